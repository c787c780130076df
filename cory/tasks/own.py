"""A task on your own prompts and rewards, from the `task` block. Importing this does not import torch."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cory.errors import UserError, expect
from cory.run.data_files import check_file
from cory.tasks.config import OwnConfig, OwnTaskConfig
from cory.tasks.rewards_file import load_rewards

if TYPE_CHECKING:
    from datasets import Dataset

    from cory.task import Task


def make_task(config: OwnConfig, device: Any = None, split: str | None = None) -> "Task":
    """The task of a run; with `split`, of held-out prompts. `device` is for tasks with a reward model.

    Raises a UserError that names the key: a file or a column is missing, or a value does not fit.
    """
    settings = config.task if split is None else held_out(config.task, split)
    settings.check()
    expect(bool(settings.dataset), "task.dataset", "a file, a folder or a Hub id", settings.dataset)
    try:
        check_file(settings.dataset)
    except UserError as error:
        raise UserError(f"task.{error}") from None
    rewards = load_rewards(settings.rewards)
    from cory.models.sampling import are_turns  # here, as importing torch takes seconds
    from cory.prompts import CHAT_OBSERVER, OBSERVER, RolePrompts
    from cory.rewards import Reward
    from cory.task import Task

    weights = settings.reward_weights or [1.0] * len(rewards)
    parts = [Reward(one.function, weight, one.name, one.sha256) for one, weight in zip(rewards, weights, strict=True)]
    dataset = load_prompts(settings)
    usual = CHAT_OBSERVER if are_turns(dataset["prompt"], config.model.chat_template) else OBSERVER
    try:
        observer = usual if settings.observer_prompt is None else settings.observer_prompt
        prompts = RolePrompts(settings.pioneer_prompt, observer)
        return Task(dataset, parts, prompts)
    except UserError as error:
        raise UserError(f"task: {error}") from None


def load_prompts(settings: OwnTaskConfig) -> "Dataset":
    """The dataset, its prompts in a column `prompt`. Raises a UserError that names the key."""
    from cory.prompts import check_prompt  # here, as importing torch takes seconds
    from cory.task import load_dataset

    column, local = settings.prompt_column, Path(settings.dataset).exists()
    expect(settings.subset is None or not local, "task.subset", "null for local data", settings.subset)
    try:
        dataset = load_dataset(settings.dataset, settings.split, [], settings.subset)
    except UserError as error:
        raise UserError(f"task.{error}") from None
    names = dataset.column_names
    expect(column in names, "task.prompt_column", f"a column of {settings.dataset!r}, among {names}", column)
    if column != "prompt":  # as templates call it
        free = "prompt" not in names
        expect(free, "task.prompt_column", "'prompt', as the dataset has a column of that name", column)
        dataset = dataset.rename_column(column, "prompt")
    for row, prompt in enumerate(dataset["prompt"]):
        check_prompt(prompt, f"task.prompt_column {column!r}, row {row + 1}")
    return dataset


def training_rows(config: OwnConfig) -> "Dataset":
    """The prompts that a run with these settings is trained on."""
    return load_prompts(config.task)


def held_out(settings: OwnTaskConfig, split: str, flag: str = "--split") -> OwnTaskConfig:
    """The settings with held-out prompts in place of those of training: `eval_dataset`, or another split.

    Raises a UserError if the dataset is a single file, which is trained on as a whole, unless its split is named.
    """
    if settings.eval_dataset is not None:
        return replace(settings, dataset=settings.eval_dataset, subset=None, split=split)
    whole = Path(settings.dataset).is_file() and split != settings.split
    none = f"a file of held-out prompts, as all of {settings.dataset!r} is trained on ({flag} {settings.split} uses it)"
    expect(not whole, "task.eval_dataset", none, settings.eval_dataset)
    return replace(settings, split=split)
