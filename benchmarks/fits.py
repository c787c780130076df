"""What fits where: the memory of a process by formula (docs/scaling.md), for TinyLlama's and Llama-2's sizes.

    python benchmarks/fits.py                                    # two agents and one, on GPUs of 80 GiB
    python benchmarks/fits.py --gpu 24 --micro-batch 1
    python benchmarks/fits.py --precision bf16

The models are made without weights, so their sizes are those of the code that trains them. What a process holds is
counted exactly; what a pass needs is estimated, and 10 % of a GPU is left for its libraries and for fragmentation.
benchmarks/parallel.py measures both beside these formulas.
"""

import argparse
import copy
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.iteration import table  # noqa: E402
from cory.config import (  # noqa: E402
    AgentConfig,
    Config,
    CoryConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    PPOConfig,
    SamplingConfig,
)

GIB = 2**30
FREE = 0.1  # of a GPU, for its libraries and for fragmentation
NF4 = 0.5 + 4 / 64  # bytes a weight: 4 bits, and a float32 scale for 64 of them
SAVED = 1.25  # activations kept for the backward pass, over the inputs and outputs of linear layers
# Activations (rows, prompt, widest layer) at a time without a backward pass: a gate, what it gates,
# both.
WIDE = 3
# Float32 arrays (rows, R, vocabulary), or (positions, vocabulary) of a chunk, at a time: logits,
# log-probabilities, the reference's, the KL's.
VOCABULARIES = 6
# Layers put together at a time: the one at work, the next one, and what it is received in.
GATHERED = 3


@dataclass(frozen=True)
class Model:
    """Sizes of a causal language model, in numbers."""

    parameters: int  # tied ones once
    layers: int
    layer: int  # parameters of one
    matrices: int  # parameters of the linear layers in all layers, which 4 bit quantizes
    adapter: int  # of a LoRA of rank 1, at PEFT's choice of modules
    features: int  # inputs and outputs of the linear layers of one layer
    widest: int  # the most of them in one linear layer
    cache: int  # keys and values of a token in one layer
    width: int
    vocabulary: int

    @classmethod
    def of(cls, model: Any) -> "Model":
        """The sizes of a Hugging Face model; its weights are not read."""
        from torch.nn import Linear
        from transformers.pytorch_utils import Conv1D

        from cory.models.lora import add_adapter

        config = model.config.get_text_config()
        layers = [
            module for module in model.modules() if type(module).__name__ in model._no_split_modules
        ]
        linear = [
            module.weight for module in layers[0].modules() if isinstance(module, (Linear, Conv1D))
        ]
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        adapted = add_adapter(copy.deepcopy(model), "agent_1", LoraConfig(rank=1))
        return cls(
            parameters=count(model.parameters()),
            layers=len(layers),
            layer=count(layers[0].parameters()),
            matrices=len(layers) * count(linear),
            adapter=count(weight for name, weight in adapted.named_parameters() if "lora_" in name),
            features=sum(sum(weight.shape) for weight in linear),
            widest=max(max(weight.shape) for weight in linear),
            cache=2 * heads * head,
            width=config.hidden_size,
            vocabulary=config.vocab_size,
        )

    @property
    def outside(self) -> int:
        """Parameters outside of the layers: embeddings, the output layer."""
        return self.parameters - self.layers * self.layer


def count(tensors: Iterable[Any]) -> int:
    """Elements of tensors, or of parameters."""
    return sum(tensor.numel() for tensor in tensors)


def element(config: Config) -> int:
    """Bytes of a weight that is neither quantized nor an adapter's."""
    return {"float32": 4, "bfloat16": 2}[config.model.dtype]


def held(config: Config, model: Model, processes: int) -> dict[str, float]:
    """Bytes that each process holds: weights, Adam's state, gradients during an update, and buffers to exchange them.

    All agents of `config` are alike. If they have devices of their own, these are the bytes of each device.
    """
    size = element(config)
    sharded = config.parallel.shard == "full"
    agents = 1 if config.device_per_agent else config.cory.num_agents
    whole: float = size * model.parameters
    if config.model.quantization == "4bit":
        whole += (NF4 - size) * model.matrices
    head = 4 * (model.width + 1) if config.algorithm == "ppo" else 0
    # Adapters and value heads are float32. The reference has a value head, too, which nobody reads.
    trained = head + (4 * config.lora.rank * model.adapter if config.lora.rank else whole)
    frozen: float = whole if config.lora.rank else trained
    bytes_of: dict[str, float] = {
        "weights": frozen + agents * trained,
        "Adam": 2 * agents * trained,
        "gradients": trained,
    }
    bytes_of["exchange"] = agents * trained if processes > 1 and not sharded else 0.0
    return {name: size / processes if sharded else size for name, size in bytes_of.items()}


def checkpoint(config: Config, model: Model) -> float:
    """Bytes of a checkpoint: the weights that all agents train, and Adam's state, two numbers for each of them."""
    together = replace(config, agents=[], parallel=ParallelConfig())
    return held(together, model, 1)["Adam"] * 3 / 2


def over_vocabulary(config: Config, model: Model, rows: int) -> float:
    """Bytes of the arrays over the vocabulary at a time in an update.

    They are those of a micro-batch of `rows`, or where these are large of a chunk of positions. Each chunk then has
    a gradient of the output layer, which is added to that of the others, if that layer is trained.
    """
    from cory.learners.head import CHUNK, WHOLE

    device = "cpu" if config.device == "cpu" else "cuda"
    elements = rows * config.sampling.max_new_tokens * model.vocabulary
    if elements <= WHOLE[device] or config.parallel.shard == "full":
        return 4 * VOCABULARIES * elements
    gradient = 0 if config.lora.rank else element(config) * model.vocabulary * model.width
    return 4 * VOCABULARIES * CHUNK[device] + gradient


def passing(config: Config, model: Model, processes: int, prompt: int) -> dict[str, float]:
    """Bytes that sampling and an update need for a while, estimated, for prompts of `prompt` tokens.

    An update's rows are those of a micro-batch, sampling's those of the process's part of the batch.
    """
    method, response = config.parallel, config.sampling.max_new_tokens
    batch, mini = config.ppo.batch_size // processes, config.ppo.mini_batch_size // processes
    rows = mini if config.ppo.micro_batch == "auto" else min(mini, int(config.ppo.micro_batch))
    half = config.precision == "bf16"
    number = 2 if half else element(config)  # bytes of an activation
    layer = SAVED * model.features * number * rows * (prompt + response)
    kept = (
        model.layers * number * model.width * rows * (prompt + response)
        if config.model.gradient_checkpointing
        else 0
    )
    activations = kept + layer if kept else model.layers * layer
    together = at_once = 0
    if method.shard == "full":
        at_once = number * (model.outside + GATHERED * model.layer)
        together = number * model.parameters
        if not config.lora.rank:  # their gradients, too, and a layer's on their way
            at_once += number * (model.outside + 2 * model.layer)
    elif half and element(config) == 4:
        at_once = 2 * model.parameters  # autocast's copy of the weights, kept for the backward pass
    if config.model.quantization == "4bit":
        # At most: weights are unpacked one after the other.
        at_once = together = element(config) * model.layer
    cache = number * model.cache * model.layers * batch * (prompt + response)
    return {
        "sampling": together + cache + WIDE * number * model.widest * batch * prompt,
        "update": at_once + activations + over_vocabulary(config, model, rows),
    }


def peak(config: Config, model: Model, processes: int, prompt: int) -> float:
    """The most bytes of a process, or of an agent's device, at a time. There are no gradients while it samples."""
    here, needed = held(config, model, processes), passing(config, model, processes, prompt)
    always = here["weights"] + here["Adam"] + here["exchange"]
    return always + max(needed["sampling"], here["gradients"] + needed["update"])


def start(config: Config, model: Model, processes: int) -> float:
    """Bytes of the host's memory that each process needs while models are loaded; 4 bit weights need the GPU alone."""
    if config.model.quantization == "4bit":
        return 0.0
    # An agent's copy leaves for the GPU when its learner is made, and if it is sharded at once. Agents with devices of
    # their own are made one after the other.
    at_once = config.parallel.shard == "full" or config.device_per_agent
    copies = 0 if config.lora.rank else 1 if at_once else config.cory.num_agents
    return (1 + copies) * element(config) * model.parameters


DEVICES = "2, `device`"
# hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads
LLAMAS = {
    "1.1 B": (2048, 5632, 22, 32, 4),  # TinyLlama
    "7 B": (4096, 11008, 32, 32, 32),
    "13 B": (5120, 13824, 40, 40, 40),
    "70 B": (8192, 28672, 80, 64, 8),
}
TUNINGS = {
    "full": (ModelConfig(gradient_checkpointing=True), LoraConfig()),
    "LoRA": (ModelConfig(dtype="bfloat16", gradient_checkpointing=True), LoraConfig(rank=16)),
    "4 bit, LoRA": (
        ModelConfig(dtype="bfloat16", quantization="4bit", gradient_checkpointing=True),
        LoraConfig(rank=16),
    ),
}
SHARD = ParallelConfig(shard="full")
# The number of processes, each with a GPU, but for `device`: one process, in which each agent has a GPU.
WAYS = {
    "1 GPU": (1, ParallelConfig()),
    "4": (4, ParallelConfig()),
    "8": (8, ParallelConfig()),
    DEVICES: (1, ParallelConfig()),
    "4, `shard`": (4, SHARD),
    "8, `shard`": (8, SHARD),
}


def llama(hidden: int, inner: int, layers: int, heads: int, shared: int) -> Model:
    """A Llama of these sizes with Llama-2's vocabulary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    with torch.device("meta"):
        return Model.of(
            LlamaForCausalLM(
                LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=shared)
            )
        )


def setting(options: argparse.Namespace, tuning: str, agents: int, way: str) -> Config:
    """The settings of a cell."""
    model, lora = TUNINGS[tuning]
    processes, parallel = WAYS[way]
    devices = [AgentConfig(device=f"cuda:{i}") for i in range(agents)] if way == DEVICES else []
    mini = options.micro_batch * processes
    ppo = PPOConfig(batch_size=max(options.batch, mini), mini_batch_size=mini)
    sampling = SamplingConfig(max_new_tokens=options.response)
    return Config(precision=options.precision, model=model, lora=lora, cory=CoryConfig(agents), ppo=ppo,
                  sampling=sampling, parallel=parallel, agents=devices)  # fmt: skip


def cell(options: argparse.Namespace, model: Model, tuning: str, agents: int, way: str) -> str:
    """GiB of a process, bold where it fits; empty where settings are refused."""
    processes, parallel = WAYS[way]
    if parallel.shard == "full" and "4 bit" in tuning:
        return ""
    needed = peak(setting(options, tuning, agents, way), model, processes, options.prompt) / GIB
    return f"**{needed:.0f}**" if needed <= (1 - FREE) * options.gpu else f"{needed:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", type=float, default=80, help="memory of a GPU, GiB")
    parser.add_argument(
        "--batch", type=int, default=32, help="responses per role and iteration, over all processes"
    )
    parser.add_argument("--micro-batch", type=int, default=2, help="rows of a pass in each process")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the observer's prompt")
    parser.add_argument("--response", type=int, default=256, help="tokens")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    options = parser.parse_args()
    models = {name: llama(*sizes) for name, sizes in LLAMAS.items()}
    cases = [(name, model, tuning) for name, model in models.items() for tuning in TUNINGS]
    for agents in (2, 1):
        ways = [way for way in WAYS if agents > 1 or way != DEVICES]
        rows = [[f"{name}, {tuning}", *(cell(options, model, tuning, agents, way) for way in ways)]
                for name, model, tuning in cases]  # fmt: skip
        print(f"{agents} agent{'s' * (agents > 1)}, GiB per GPU\n\n{table(rows, ['', *ways])}\n")
    ways = ["1 GPU", DEVICES, "8, `shard`"]
    rows = []
    for name, model, tuning in cases:
        each = [start(setting(options, tuning, 2, way), model, WAYS[way][0]) / GIB for way in ways]
        rows.append([f"{name}, {tuning}", *(f"{size:.0f}" for size in each)])
    rows = [row for row in rows if "4 bit" not in row[0]]
    print(
        f"GiB of the host's memory for each process, while two agents are loaded\n\n{table(rows, ['', *ways])}"
    )


if __name__ == "__main__":
    main()
