"""Samples a model on held-out prompts and measures its KL to the base: what every task's `evaluate.py` is made of."""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cory import window
from cory.config import SamplingConfig, UserError
from cory.metrics import full_kl
from cory.sampling import (
    check_lengths,
    context_length,
    encode,
    pad_token,
    plain_text,
    sample,
    seed_everything,
)
from cory.tracking import one_line

OVER_SEEDS = "Mean ± standard deviation over seeds; a model without seeds has its own interval, as below.\n\n"


@dataclass
class Responses:
    """A model's answers to a list of prompts, in their order.

    Args:
        completions: their texts.
        kl: KL to the base in nats, under the same prompt, summed over the response.
        tokens: their lengths, the end token included.
    """

    completions: list[str]
    kl: list[float]
    tokens: list[int]


@torch.no_grad()
def respond(
    model: PreTrainedModel,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    sampling: SamplingConfig,
    batch_size: int = 64,
    seed: int = 0,
    chat_template: bool = False,
) -> Responses:
    """Samples one response of at most `sampling.max_new_tokens` tokens per prompt.

    Batches hold prompts of similar length; the random stream depends on `seed` alone, so that every model is given the
    same one.

    Raises:
        UserError: a prompt is too long for the model, or model and base differ in their vocabulary.
    """
    if model.config.vocab_size != base.config.vocab_size:
        raise UserError(
            f"expected a model with the base's vocabulary of {base.config.vocab_size}, for a KL between them, "
            f"got {model.config.vocab_size} in {model.name_or_path!r}"
        )
    queries = [torch.tensor(ids, dtype=torch.long) for ids in encode(tokenizer, prompts, chat_template)]
    check_lengths([len(query) for query in queries], sampling.max_new_tokens, context_length(model), list(prompts))
    model.eval()
    seed_everything(seed)
    result = Responses([""] * len(queries), [0.0] * len(queries), [0] * len(queries))
    order = sorted(range(len(queries)), key=lambda i: len(queries[i]))
    for start in range(0, len(order), batch_size):
        index = order[start : start + batch_size]
        chosen = [queries[i].to(model.device) for i in index]
        responses = sample(model, tokenizer, chosen, sampling, sampling.max_new_tokens)
        packed = window.pack(chosen, responses, pad_token(tokenizer))
        logits, base_logits = (
            window.forward(m, *packed[:3], packed.response_ids.shape[1])[0].float() for m in (model, base)
        )
        kls = full_kl(logits, base_logits, packed.response_mask).tolist()
        for i, response, kl in zip(index, responses, kls, strict=True):
            result.completions[i], result.kl[i], result.tokens[i] = (
                plain_text(tokenizer, response, sampling.stop),
                kl,
                len(response),
            )
    return result


def run_agents(folder: Path) -> dict[str, Path]:
    """The saved agents of a run's folder, named RUN/agent_1, ...; empty where it is no run."""
    if not (folder / "config.yaml").exists():
        return {}
    return {f"{folder.name}/{agent.name}": agent for agent in sorted(folder.glob("agent_*")) if agent.is_dir()}


def run_config(folder: Path) -> dict:
    """The settings of a run's folder, as written; nothing in the file is executed."""
    return yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))


def over_seeds(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of models that differ in their run's seed alone (RUN-seed0/agent_1, RUN-seed1/agent_1, ...) as one row.

    Args:
        rows: each with `name`, and for every metric its value and `METRIC_ci`, the half-width of its interval.

    Returns:
        rows of the same form; where several seeds are in one, its values are means over them, and `METRIC_ci` are
        their standard deviations; a model that is there once keeps its own interval. Empty where none has several.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(re.sub(r"-seed\d+(?=/|$)", "", row["name"]), []).append(row)
    if len(groups) == len(rows):
        return []
    result = []
    for name, members in groups.items():
        one: dict[str, Any] = {"name": f"{name}, {len(members)} seeds" if len(members) > 1 else name}
        for metric in (key.removesuffix("_ci") for key in members[0] if key.endswith("_ci")):
            values = [row[metric] for row in members]
            one[metric] = statistics.fmean(values)
            one[f"{metric}_ci"] = statistics.stdev(values) if len(values) > 1 else members[0][f"{metric}_ci"]
        result.append(one)
    return result


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of equal keys as a table; a model's text cannot act as Markdown, HTML or terminal control."""
    if not rows:
        return "None.\n"
    lines = ["| " + " | ".join(map(_literal, rows[0])) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(_literal(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _literal(text: str) -> str:
    text = one_line(text)
    harmless = {found.start() for found in re.finditer(r"(?<=[^\W_])_(?=[^\W_])", text)}  # as in agent_1
    acting = "<>&|`*_[]#~\\$"
    return "".join(f"&#{ord(c)};" if c in acting and i not in harmless else c for i, c in enumerate(text)).strip()
