"""Makes models and tasks of given sizes. Weights are random; each word is one token, so lengths are exact."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Shape:
    """Sizes of one CORY iteration. `query` is the shortest and longest length of a query in tokens."""

    layers: int
    width: int
    vocabulary: int
    batch: int
    query: tuple[int, int]
    observer: int  # tokens that the observer's prompt adds to the query and response
    response: int
    reward_layers: int
    reward_width: int
    agents: int = 2
    kl_penalty: str = "full"
    epochs: int = 4
    algorithm: str = "ppo"
    group: int = 1  # chains (a response of each role) per query
    # gpt2, llama (with the proportions of Qwen2.5-0.5B) or llama2 (with Llama-2-7B's)
    architecture: str = "gpt2"
    lora_rank: int = 0  # above 0: agents are adapters on one base in bfloat16

    @property
    def heads(self) -> int:
        """The number of attention heads. Heads have width 64, as in GPT-2, or 128, as in Llama 2, if it divides the
        model's width.
        """
        width = 128 if self.architecture == "llama2" else 64
        return self.width // width if self.width % width == 0 else 4


SHAPES = {
    # GPT-2-small; the observer's prompts have 28 to 44 tokens.
    "gpt2_small": Shape(12, 768, 50257, 16, (4, 20), 12, 12, 6, 768),
    # One agent with prompts of GSM8K's length, and 2, 4 or 8 responses to each.
    **{
        f"gsm8k_grpo_{group}": Shape(
            6,
            512,
            8192,
            32,
            (150, 150),
            0,
            60,
            1,
            64,
            agents=1,
            kl_penalty="kl",
            epochs=1,
            algorithm="grpo",
            group=group,
        )
        for group in (2, 4, 8)
    },
    # The small pair on which the authors' code took 42 s per iteration.
    "small_pair": Shape(4, 256, 8192, 64, (5, 5), 14, 9, 2, 256),
    # The toy version of IMDB.
    "imdb_tiny": Shape(3, 112, 862, 64, (2, 8), 15, 10, 2, 64, kl_penalty="kl"),
}


def word_tokenizer(size: int) -> Any:
    """Makes a tokenizer with `size` tokens: words w0, w1, ..., an end token and a padding token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{i}": i for i in range(size - 2)} | {"<end>": size - 2, "<pad>": size - 1}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>")


def policy_config(shape: Shape) -> Any:
    """Returns the configuration of a GPT-2 or Llama of these sizes, without an end token.

    Qwen2.5-0.5B is a Llama except for three biases per layer. The model type is not Qwen2: for that type, transformers
    would rebuild the tokenizer, which would then split words.
    """
    from transformers import GPT2Config, LlamaConfig

    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": shape.vocabulary - 1}
    if shape.architecture in ("llama", "llama2"):
        is_llama2 = shape.architecture == "llama2"
        inner, outer = (
            (11008, 4096) if is_llama2 else (4864, 896)
        )  # widths inside and outside an MLP
        return LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            intermediate_size=shape.width * inner // outer,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads if is_llama2 else max(1, shape.heads // 7),
            tie_word_embeddings=not is_llama2,
            **ids,
        )
    return GPT2Config(
        vocab_size=shape.vocabulary,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        **ids,
    )


def make_models(shape: Shape, folder: Path, device: Any = "cpu") -> tuple[str, str]:
    """Saves a random policy and a random DistilBERT classifier, unless they exist, and returns their folders.

    A base for LoRA is made on `device`, as 7 B random numbers take minutes on a CPU.
    """
    folders = (str(folder / "policy"), str(folder / "reward_model"))
    if (folder / "complete").exists():
        return folders

    import torch
    from transformers import (
        AutoModelForCausalLM,
        DistilBertConfig,
        DistilBertForSequenceClassification,
    )

    torch.manual_seed(0)
    tokenizer = word_tokenizer(shape.vocabulary)
    if shape.lora_rank:
        with torch.device(device):
            policy = AutoModelForCausalLM.from_config(policy_config(shape), dtype=torch.bfloat16)
    else:
        policy = AutoModelForCausalLM.from_config(policy_config(shape))
    reward = DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=shape.vocabulary,
            dim=shape.reward_width,
            hidden_dim=4 * shape.reward_width,
            n_layers=shape.reward_layers,
            n_heads=max(1, shape.reward_width // 64),
            pad_token_id=shape.vocabulary - 1,
            id2label={0: "NEGATIVE", 1: "POSITIVE"},
            label2id={"NEGATIVE": 0, "POSITIVE": 1},
        )
    )
    for name, model in (("policy", policy), ("reward_model", reward)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "complete").touch()
    return folders


def make_config(shape: Shape, policy: str, device: str, precision: str) -> Any:
    """Returns the run's settings, with a fixed response length."""
    from cory.config import (
        Config,
        CoryConfig,
        LoraConfig,
        ModelConfig,
        PPOConfig,
        SamplingConfig,
    )

    return Config(
        device=device,
        precision=precision,  # type: ignore[arg-type]
        sample_every=0,
        algorithm=shape.algorithm,  # type: ignore[arg-type]
        group_size=shape.group,
        model=ModelConfig(policy, dtype="bfloat16" if shape.lora_rank else "float32"),
        lora=LoraConfig(rank=shape.lora_rank),
        cory=CoryConfig(num_agents=shape.agents),
        ppo=PPOConfig(
            batch_size=shape.batch,
            mini_batch_size=shape.batch,
            ppo_epochs=shape.epochs,
            kl_penalty=shape.kl_penalty,  # type: ignore[arg-type]
        ),
        sampling=SamplingConfig(shape.response, shape.response),
    )


def make_task(shape: Shape, reward_model: str, device: Any) -> Any:
    """Makes a task of random queries, scored by the classifier."""
    import numpy as np

    from cory.rewards import Classifier
    from cory.roles import RolePrompts
    from cory.task import Task

    rng = np.random.default_rng(0)
    low, high = shape.query
    queries = [
        " ".join(f"w{i}" for i in rng.integers(0, shape.vocabulary - 2, n))
        for n in rng.integers(low, high + 1, 4096)
    ]
    extra = " ".join(["w1"] * shape.observer)
    reward = Classifier(reward_model, "POSITIVE", 2 * shape.batch, device)

    def scored(prompts: list[str], completions: list[str]) -> list[float]:
        return reward([prompt + " " for prompt in prompts], completions)

    return Task.from_prompts(
        queries, scored, RolePrompts("{prompt}", f"{extra} {{prompt}} {{response}}")
    )
