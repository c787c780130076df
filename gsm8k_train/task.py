"""The paper's objective-reward task (section 4, E2): solve grade-school word problems, scored by a rule."""

import torch
from datasets import Dataset

from cory.errors import UserError
from cory.prompts import RolePrompts
from cory.task import Task, check_held_out, load_dataset
from gsm8k_train import toy
from gsm8k_train.answers import correct, extract, gold
from gsm8k_train.config import Gsm8kConfig, Gsm8kTaskConfig


def rule_reward(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    """1.0 where the number that a completion answers with equals the gold number, else 0.0 (paper, section 4).

    Args:
        answer: the gold solutions, each with its number after `####`.

    >>> rule_reward(["2 + 2?", "2 + 2?"], [" 2 + 2 = 4.", " It is 5."], ["#### 4", "#### 4"])
    [1.0, 0.0]
    """
    numbers = [gold(text) for text in answer]
    return [
        float(number is not None and correct(completion, number))
        for completion, number in zip(completions, numbers, strict=True)
    ]


def unparseable(completion: str) -> float:
    """1.0 where a completion answers with no number at all, else 0.0."""
    return float(extract(completion) is None)


def problems(config: Gsm8kTaskConfig, split: str) -> Dataset:
    """The problems with columns `prompt` (the question) and `answer`.

    Raises:
        UserError: the dataset is not available, or a gold answer has no number.
    """
    if config.dataset == "tiny":
        loaded = Dataset.from_list(toy.problems(split))
    else:
        loaded = load_dataset(config.dataset, split, ["question", "answer"], config.subset)
    for row, answer in enumerate(loaded["answer"]):
        if not isinstance(answer, str) or gold(answer) is None:
            raise UserError(
                f"dataset: expected a gold answer with a number after ####, got {answer!r} in row {row + 1}"
            )
    return loaded.select_columns(["question", "answer"]).rename_column("question", "prompt")


def training_rows(config: Gsm8kConfig) -> Dataset:
    """The problems that a run with these settings is trained on."""
    return problems(config.task, config.task.split)


def make_task(
    config: Gsm8kConfig,
    device: torch.device | None = None,
    split: str | None = None,
    dataset: Dataset | None = None,
) -> Task:
    """The task of a run; with `split`, of another part of the data; with `dataset`, of other rows.

    The rule needs no device.
    """
    prompts = RolePrompts(config.task.pioneer_prompt, config.task.observer_prompt)
    rows = problems(config.task, split or config.task.split) if dataset is None else dataset
    return Task(rows, rule_reward, prompts, {"unparseable": unparseable})


def held_out(config: Gsm8kConfig) -> Dataset | None:
    """Problems for `config.eval_every`, of the split `test`; None if not requested.

    Raises a UserError if they would be those of training.
    """
    if not config.eval_every:
        return None
    check_held_out(config.task.dataset, config.task.split)
    return problems(config.task, "test")
