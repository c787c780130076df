"""Trains small models from scratch: a BPE tokenizer, a GPT-2 policy and a DistilBERT classifier.

The models train in minutes on two CPU cores. Other scripts, such as `make_imdb_toy.py` or an example's `make.py`,
provide the texts.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from cory.agent import Agent
from cory.config import Config, SamplingConfig
from cory.evaluation.answer import respond
from cory.models.load import quiet
from cory.run.folder import UNFINISHED, new_folder

END = "<|endoftext|>"
PAD = "<|pad|>"


def cached(target: Path, build: Callable[[Path], None]) -> Path:
    """Returns a model's folder, building it if it is missing. The folder is either complete or absent.

    Args:
        target: the model's folder.
        build: called with an empty folder, which is renamed when it returns.

    Raises:
        UserError: `target` holds something else.
    """
    if is_model(target):
        return target
    new_folder(str(target), target.name)  # refuses other content
    with TemporaryDirectory(dir=target.parent, prefix=UNFINISHED) as unfinished:
        model = Path(unfinished, "model")
        model.mkdir()
        build(model)
        target.rmdir()
        os.replace(model, target)
    return target


def is_model(folder: Path) -> bool:
    """Whether a folder holds a Hugging Face model."""
    return (folder / "config.json").is_file()


def save(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes a model and its tokenizer as a Hugging Face folder."""
    with quiet():
        model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)


def save_half(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes a model in half precision and its tokenizer as a Hugging Face folder."""
    save(model.half(), tokenizer, folder)


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE of `vocab_size` tokens, including `END` and `PAD`, which it does not add to texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END, PAD],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, bos_token=END, pad_token=PAD
    )


def train_gpt2(
    texts: list[str],
    tokenizer: PreTrainedTokenizerFast,
    *,
    width: int,
    layers: int,
    positions: int,
    steps: int,
    batch: int = 64,
    learning_rate: float = 4e-3,
    beta2: float = 0.999,
    after: str | None = None,
    sinusoids: bool = False,
    initializer_range: float = 0.02,
    length: int | None = None,
    seed: int = 0,
) -> GPT2LMHeadModel:
    """Trains a GPT-2 on `texts`, each followed by END, for `steps` batches of texts of similar length.

    Args:
        beta2: AdamW's beta2; a lower value lets long runs of small batches settle faster.
        after: a string. Only the part of a text after the string's last occurrence is learned. Default: the whole text.
        sinusoids: initialize position embeddings as sinusoids, so that near positions are similar from the start.
        initializer_range: standard deviation of the initial weights; small models learn faster from larger weights.
        length: number of first tokens of a text to learn from. Default: the model's number of positions.
    """
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=positions,
            n_embd=width,
            n_layer=layers,
            n_head=4,
            activation_function="gelu_pytorch_tanh",  # the same function as GPT-2's, in one kernel
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=initializer_range,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    if sinusoids:
        angles = torch.arange(positions)[:, None] * torch.logspace(0, -3, width // 2)
        model.transformer.wpe.weight.data = 0.1 * torch.cat([angles.sin(), angles.cos()], 1)
    rows = [
        ids[: length or positions] for ids in tokenizer([text + END for text in texts])["input_ids"]
    ]
    # For each row: how many of its first tokens the loss leaves out.
    given = (
        [
            len(ids)
            for ids in tokenizer([t[: t.rindex(after) + len(after)] for t in texts])["input_ids"]
        ]
        if after
        else [1] * len(rows)
    )
    batches = _length_sorted_batches(rows, batch)

    def loss(index: torch.Tensor) -> torch.Tensor:
        ids, mask = _pad([rows[i] for i in index], tokenizer.pad_token_id)
        learnt = mask.bool() & (
            torch.arange(ids.shape[1]) >= torch.tensor([given[i] for i in index])[:, None]
        )
        hidden = model.transformer(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-1]
        return F.cross_entropy(model.lm_head(hidden[learnt[:, 1:]]), ids[:, 1:][learnt[:, 1:]])

    _fit(model, loss, batches, steps, learning_rate, beta2)
    return model.eval()


def train_distilbert(
    texts: list[str],
    positive: list[float],
    tokenizer: PreTrainedTokenizerFast,
    *,
    width: int,
    layers: int,
    positions: int,
    steps: int,
    batch: int = 64,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> DistilBertForSequenceClassification:
    """Trains a NEGATIVE/POSITIVE DistilBERT to give each text its target probability of being POSITIVE."""
    torch.manual_seed(seed)
    model = DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=positions,
            dim=width,
            hidden_dim=4 * width,
            n_layers=layers,
            n_heads=4,
            dropout=0.0,
            attention_dropout=0.0,
            seq_classif_dropout=0.0,
            pad_token_id=tokenizer.pad_token_id,
            id2label={0: "NEGATIVE", 1: "POSITIVE"},
            label2id={"NEGATIVE": 0, "POSITIVE": 1},
        )
    )
    rows = [ids[:positions] for ids in tokenizer(texts)["input_ids"]]
    target = torch.tensor([[1 - p, p] for p in positive])

    def loss(index: torch.Tensor) -> torch.Tensor:
        ids, mask = _pad([rows[i] for i in index], tokenizer.pad_token_id)
        return F.cross_entropy(model(input_ids=ids, attention_mask=mask).logits, target[index])

    _fit(model, loss, _length_sorted_batches(rows, batch), steps, learning_rate)
    return model.eval()


def _length_sorted_batches(rows: list[list[int]], batch: int) -> list[torch.Tensor]:
    """Returns batches of row indices with near-equal lengths, to minimize padding."""
    return list(torch.tensor(sorted(range(len(rows)), key=lambda i: len(rows[i]))).split(batch))


def _pad(rows: list[list[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad_id] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


def _fit(
    model: torch.nn.Module,
    loss: Callable[[torch.Tensor], torch.Tensor],
    batches: list[torch.Tensor],
    steps: int,
    learning_rate: float,
    beta2: float = 0.999,
) -> None:
    """Trains with AdamW and a one-cycle learning rate schedule, over batches in random order."""
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, beta2), weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=0.1
    )
    order = torch.cat([torch.randperm(len(batches)) for _ in range(-(-steps // len(batches)))])[
        :steps
    ]
    for index in tqdm(order.tolist(), disable=None):  # None: hidden without a terminal
        optimizer.zero_grad()
        loss(batches[index]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def answered(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    sampling: SamplingConfig,
) -> list[str]:
    """Samples a response to each prompt."""
    agent = Agent("policy", policy, tokenizer, Config(), policy.device)
    return respond(agent, policy, prompts, sampling)[0].completions
