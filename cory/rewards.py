"""Rewards and metrics: functions that give each response a number.

    reward(prompts, completions, **columns) -> list[float | None]

Functions have the signature of TRL's GRPO reward functions; `async def` functions and callable objects work, too. A
function receives the columns that its parameters name, or all of them if it takes **kwargs: `prompts`, `completions`,
`completion_ids` (each completion's tokens, including an end token), `role` (the name of the role that wrote each
completion) and the dataset's columns. For chat prompts, prompts and completions are messages, as in TRL. A function
returns None for a response to which it does not apply. A metric cannot take `completion_ids`, but can take `rewards`,
the responses' task rewards. A team reward takes `chains`, one list of responses per chain, in place of `completions`.

Errors raised by a function are not caught.
"""

import copy
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cory.code_files import awaited
from cory.errors import UserError
from cory.models.load import LOADING, find, first_line, load_model
from cory.models.text import special_tokens, without
from cory.models.window import pad
from cory.parallel.devices import to_device
from cory.process import warn
from cory.rollout import Batch, Rollout

Function = Callable[..., Any]
Columns = Mapping[str, Sequence[Any]]
LARGEST_FLOAT = torch.finfo(torch.float32).max  # larger numbers become infinite in float32


@dataclass(frozen=True)
class Reward:
    """A reward function with its weight: `Task(dataset, [f, Reward(g, 0.5)], prompts)`.

    Args:
        function: the reward function.
        weight: its weight in the sum of rewards.
        name: name in messages and records. Empty: the function's name.
        sha256: hash that identifies the source. Empty: the hash of the function's file.
    """

    function: Function
    weight: float = 1.0
    name: str = ""
    sha256: str = ""

    def __str__(self) -> str:
        return self.name or getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def short_name(self) -> str:
        """The name without its file, such as `good` for `rewards.py:good`."""
        return str(self).split(":")[-1]


@dataclass(frozen=True)
class Scores:
    """The rewards of a batch of responses.

    Args:
        total: the weighted sum over functions, (batch,) float32 on the CPU. None counts as 0.
        by_function: each function's unweighted rewards, (batch,), nan where it returned None. Empty if there is a
            single function.
    """

    total: torch.Tensor
    by_function: dict[str, torch.Tensor]

    def split(self, sizes: list[int]) -> list["Scores"]:
        """Splits the scores into parts of the given sizes."""
        totals = self.total.split(sizes)
        parts = {name: values.split(sizes) for name, values in self.by_function.items()}
        return [
            Scores(total, {name: values[index] for name, values in parts.items()})
            for index, total in enumerate(totals)
        ]


Rewards = Function | Reward | Sequence[Function | Reward]


def as_rewards(reward: Rewards) -> list[Reward]:
    """Returns a list of reward functions with weights; the default weight is 1.

    Raises a UserError if a function is not callable.
    """
    functions: list[Any] = [reward]
    if isinstance(reward, Sequence) and not isinstance(reward, str):
        functions = [*reward]
    rewards = [item if isinstance(item, Reward) else Reward(item) for item in functions]
    for item in rewards:
        if not callable(item.function):
            raise UserError(
                f"task.reward: expected functions, such as a cory.rewards.Classifier, got {item.function!r}"
            )
    return rewards


def score_by_function(
    reward: Rewards,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: Columns,
) -> Scores:
    """Returns the responses' rewards, as a weighted sum and by function. Without functions, all rewards are 0.

    Raises a UserError that names function and row if a function does not return one finite number or None per
    completion.
    """
    rewards = as_rewards(reward)
    if not rewards:
        return Scores(torch.zeros(len(completions)), {})
    functions = [(f"reward {reward}", reward.function) for reward in rewards]
    values = _numbers(functions, _with_responses(prompts, completions, columns))
    if values.isnan().all(0).any():
        which = "all rows of a batch" if values.isnan().all() else "a row"
        warn(f"{' and '.join(map(str, rewards))} returned None for {which}, so the reward is 0")
    weights = torch.tensor([[reward.weight] for reward in rewards])
    names = [reward.short_name for reward in rewards]
    by_function = dict(zip(names, values, strict=True)) if len(rewards) > 1 else {}
    return Scores((values * weights).nansum(0), by_function)


def score_chains(
    reward: Reward, prompts: Sequence[Any], chains: Sequence[Sequence[str]], columns: Columns
) -> torch.Tensor:
    """Returns each chain's team reward, (chains,) float32 on the CPU.

    Args:
        chains: one list per chain, with its responses by role.

    Raises a UserError that names function and chain if the function does not return one finite number per chain.
    """
    rows = {**columns, "prompts": prompts, "chains": [list(chain) for chain in chains]}
    return _numbers([(f"team reward {reward}", reward.function)], rows, unit="chain")[0]


def score_rollouts(
    reward: Rewards, batch: Batch, rollouts: Sequence[Rollout], first: int = 0
) -> list[Scores]:
    """Returns each role's rewards, (batch,). Each function is called once and scores all roles together.

    Args:
        first: role of the first rollout, an index into the chain.
    """
    names = [*batch.columns, "role", "completion_ids"]
    columns: dict[str, list[Any]] = {name: [] for name in names}
    completions: list[str] = []
    for role, rollout in enumerate(rollouts, first):
        completions += rollout.completions
        columns["role"] += [rollout.role] * len(rollout.completions)
        columns["completion_ids"] += [ids.tolist() for ids in rollout.response_ids]
        for name, values in batch.columns_of(role).items():
            columns[name] += values
    prompts = columns.pop("prompt")
    scores = score_by_function(reward, prompts, completions, columns)
    return scores.split([len(rollout.completions) for rollout in rollouts])


def score_team(
    team: Reward | None, batch: Batch, rollouts: Sequence[Rollout]
) -> torch.Tensor | None:
    """Returns the chains' team rewards, one per response of the last role; None without a team reward."""
    if team is None:
        return None
    last = len(rollouts) - 1
    columns = batch.columns_of(last)
    prompts = columns.pop("prompt")
    responses = [*batch.earlier_responses(last, rollouts), rollouts[last].completions]
    return score_chains(team, prompts, list(zip(*responses, strict=True)), columns)


def measure_responses(
    metrics: Mapping[str, Function],
    prompts: Sequence[Any],
    completions: Sequence[str],
    rewards: Sequence[float],
    columns: Columns,
) -> dict[str, list[float]]:
    """Returns each metric's values, nan where a metric does not apply. Raises a UserError like `score_by_function`."""
    if not metrics:
        return {}
    rows = _with_responses(prompts, completions, columns) | {"rewards": rewards}
    functions = [(f"metric {name}", function) for name, function in metrics.items()]
    return dict(zip(metrics, _numbers(functions, rows).tolist(), strict=True))


def accepted_columns(label: str, function: Function, columns: Collection[str]) -> list[str]:
    """Returns the columns that a function takes. Raises a UserError if it requires a parameter that is no column.

    Args:
        label: the function's name, for the message.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not a function, or a builtin such as `max`
        raise UserError(
            f"{label}: expected a function with named parameters, got {function!r}"
        ) from None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in columns]
    missing += [f"{p.name} (positional-only)" for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if missing:
        raise UserError(f"{label}: expected parameters among {sorted(columns)}, got {missing}")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return list(columns)
    return [p.name for p in named if p.name in columns]


def _with_responses(
    prompts: Sequence[Any], completions: Sequence[str], columns: Columns
) -> dict[str, Any]:
    """Returns all columns that a function can take. If prompts are chat messages, completions are, too."""
    is_chat = len(prompts) > 0 and not isinstance(prompts[0], str)
    responses: Sequence[Any] = completions
    if is_chat:
        responses = [[{"role": "assistant", "content": text}] for text in completions]
    return {**columns, "prompts": prompts, "completions": responses}


def _numbers(
    functions: Sequence[tuple[str, Function]], columns: Columns, unit: str = "completion"
) -> torch.Tensor:
    """Calls labelled functions. Returns their values, (functions, rows) float32 on the CPU, nan for None."""
    results = []
    for label, function in functions:
        arguments = {name: columns[name] for name in accepted_columns(label, function, columns)}
        try:
            # Copy deeply, so that a function that changes its arguments in place does not affect the others.
            results.append(function(**copy.deepcopy(arguments)))
        except SystemExit as error:  # it would end the run without a message
            raise RuntimeError(f"{label} has called sys.exit") from error
    numbers = [
        _checked(label, result, columns, unit)
        for (label, _), result in zip(functions, awaited(results), strict=True)
    ]
    return torch.tensor(numbers, dtype=torch.float32).reshape(len(functions), -1)


def _checked(label: str, result: Any, columns: Columns, unit: str) -> list[float]:
    """Returns one finite number per row. For completions, a function may also return None, which becomes nan."""
    count = len(columns["prompts"])
    # Refuse mappings, since `list()` would keep only the keys, and sets, which have no order.
    if isinstance(result, Mapping | Set) or not isinstance(result, Iterable):
        raise UserError(f"{label}: expected a list of {count} numbers, got {type(result).__name__}")
    values = list(result)
    if len(values) != count:
        raise UserError(f"{label}: expected {count} numbers, one per {unit}, got {len(values)}")
    numbers = []
    for row, value in enumerate(values):
        number = _as_float(value)
        if value is None and unit == "completion":
            number = math.nan
        elif not abs(number) <= LARGEST_FLOAT:
            raise UserError(
                f"{label}: expected a finite number, got {value!r} in row {row + 1} of the batch, "
                f"prompt {columns['prompts'][row]!r}, {unit} {columns[unit + 's'][row]!r}"
            )
        numbers.append(number)
    return numbers


def _as_float(value: Any) -> float:
    """Converts a Python, numpy or torch number to float. Anything else, such as a list or a text, gives nan."""
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        if not isinstance(value, str | bytes) and not getattr(value, "shape", ()):
            return float(value.item() if hasattr(value, "item") else value)
    return math.nan


class Classifier:
    """A reward function: a sequence classifier's logit for prompt plus response.

    Texts are scored in padded batches if padding does not change the logits, else one at a time. Without a pad
    token, they are scored one at a time, since a decoder's head uses the pad token to find a text's last token.

    Args:
        name: Hub id or local folder of the classifier.
        label: label whose logit is the reward; case does not matter. None: the model's only output, as in reward
            models.
        batch_size: number of texts in a forward pass.
        device: device of the classifier.
        separator: text between prompt and response. A response that continues its prompt begins with its own space; a
            chat response needs a separator.
        recorded_as: name to record in a run's config.yaml, if it differs from `name`.

    Raises a UserError if the classifier does not exist, or does not have the label.
    """

    def __init__(
        self,
        name: str,
        label: str | None = None,
        batch_size: int = 64,
        device: torch.device | str = "cpu",
        separator: str = "",
        recorded_as: str | None = None,
    ) -> None:
        model, self.tokenizer, self.index = load_classifier(name, label)
        self.model: PreTrainedModel = model.to(torch.device(device))
        self.batch_size = batch_size
        self.separator = separator
        # Recorded in config.yaml, so that a resumed run refuses a model that has changed under this name.
        self.models = {"task.reward_model": (recorded_as or name, name)}
        self.max_length = _most_tokens(model)
        self.tokenizer.truncation_side = "left"  # if a text is too long, its response is kept
        # Use the model's pad token, since the tokenizer's may differ.
        self.pad_id = model.config.get_text_config().pad_token_id
        if not self._ignores_padding():
            self.batch_size = 1

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """Scores prompt + response. Texts of similar length share a batch, so that little padding is needed.

        Raises a UserError if a prompt is a list of chat messages.
        """
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise UserError(
                "Classifier: expected text prompts, got chat messages. Use text prompts with model.chat_template, or "
                "write a reward function that converts messages to text"
            )
        special = special_tokens(self.tokenizer)  # the policy may write them as ordinary text
        texts = [
            prompt + self.separator + without(special, completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        rows = self.tokenizer(
            texts, truncation=self.max_length is not None, max_length=self.max_length
        )["input_ids"]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        rewards = torch.empty(len(rows))
        for start in range(0, len(order), self.batch_size):
            index = order[start : start + self.batch_size]
            logits = self._logits([rows[i] for i in index])
            rewards[index] = logits[:, self.index].float().cpu()
        return rewards.tolist()

    def _logits(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Returns logits (texts, labels) for texts given as token ids."""
        texts_ids = [torch.tensor(row, dtype=torch.long) for row in rows]
        ids, mask = pad(texts_ids, self.pad_id or 0, "right")
        logits: torch.Tensor = self.model(
            input_ids=to_device(ids, self.model.device),
            attention_mask=to_device(mask, self.model.device),
        ).logits
        return logits

    @torch.no_grad()
    def _ignores_padding(self) -> bool:
        """Whether padding leaves a text's logits unchanged, up to rounding. FNet, for example, mixes all positions."""
        # Encoder-decoder heads require the same number of end tokens in all texts.
        if self.model.config.is_encoder_decoder:
            return False
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        if self.pad_id is None or not 0 <= self.pad_id < vocabulary:
            return False
        texts: list[list[int]] = self.tokenizer(["good", "good " * 8])["input_ids"]
        padded = self._logits(texts)
        alone = torch.cat([self._logits([text]) for text in texts])
        scale = (alone[1] - alone[0]).abs().max()
        return bool((padded - alone).abs().max() <= 0.01 * scale + 1e-6)


def load_classifier(
    name: str, label: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, int]:
    """Loads a sequence classifier and its tokenizer. Returns both and the index of `label`, or of the only output.

    Raises a UserError if the model or the tokenizer is missing, the model is no classifier or lacks weights (such as
    those for its head), or the label does not exist.
    """
    where = find(name, "task.reward_model")
    try:
        labels = AutoConfig.from_pretrained(name, trust_remote_code=False, **where).id2label
    except LOADING as error:
        raise UserError(
            f"task.reward_model: expected a sequence classifier, got {name!r} ({first_line(error)})"
        ) from None
    if label is None:
        expected = "a single output"
        indices = list(labels) if len(labels) == 1 else []
    else:
        expected = f"the label {label} among two or more"
        is_one_of_several = len(labels) > 1
        indices = [
            i for i, text in labels.items() if is_one_of_several and text.upper() == label.upper()
        ]
    if not indices:
        raise UserError(
            f"task.reward_model: expected a classifier with {expected}, got {labels} in {name!r}"
        )
    model, tokenizer = load_model(
        AutoModelForSequenceClassification,
        "a sequence classifier",
        name,
        "task.reward_model",
        {"dtype": "float32"},
        where,
    )
    return model.eval().requires_grad_(False), tokenizer, int(indices[0])


def _most_tokens(model: PreTrainedModel) -> int | None:
    """Returns the largest number of tokens that a classifier can read; None if unlimited."""
    positions = getattr(model.config, "max_position_embeddings", None)
    embeddings = getattr(model.base_model, "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    if positions is None or positions < 0:  # XLNet's is -1
        return None
    if padding is None:
        return positions
    return positions - padding - 1  # RoBERTa's positions start after the padding index
