"""A task on your own prompts and rewards, from the `task` block. Importing this does not import torch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cory.data_files import check_file
from cory.errors import UserError
from cory.tasks.config import OWN, OwnConfig, OwnTaskConfig, as_list
from cory.tasks.python_files import Loaded, PythonFiles

if TYPE_CHECKING:
    from datasets import Dataset

    from cory.task import Task


# What a task provides: see `cory.tasks.kind.TaskKind`.


def make_task(config: OwnConfig, rows: "Dataset | None" = None) -> "Task":
    """The task of a run, on `rows` or on the prompts of training."""
    settings = config.task
    settings.check()
    _check_dataset(settings)
    if rows is None:
        check_file("task.dataset", settings.dataset)
    # Before the imports below, as importing torch takes seconds.
    files = PythonFiles()
    if not settings.rewards and settings.team_reward is None:
        raise UserError("task.reward: expected path/to/FILE.py:FUNCTION, or a list of them, got []")
    functions = files.load("task.reward", settings.rewards)
    team = _loaded(files, "task.team_reward", settings.team_reward)
    extract = _loaded(files, "task.extract", settings.extract)
    metrics = _by_name(files.load("task.metrics", as_list(settings.metrics)))
    from cory.models.text import are_turns
    from cory.prompts import CHAT_OBSERVER, OBSERVER, RolePrompts
    from cory.rewards import Reward, TeamReward
    from cory.task import Task

    weights = settings.reward_weights or [1.0] * len(functions)
    rewards = [
        Reward(loaded.value, weight, loaded.full_name, loaded.sha256)
        for loaded, weight in zip(functions, weights, strict=True)
    ]
    team_reward = None if team is None else TeamReward(team.value, team.full_name, team.sha256)
    if rows is None:
        rows = training_rows(config)
    observer_prompt = settings.observer_prompt
    if observer_prompt is None:
        observer_prompt = (
            CHAT_OBSERVER if are_turns(rows["prompt"], config.model.chat_template) else OBSERVER
        )
    try:
        prompts = RolePrompts(settings.pioneer_prompt, observer_prompt)
        return Task(
            rows,
            rewards,
            prompts,
            metrics,
            team_reward,
            extract=None if extract is None else extract.value,
            kind=OWN.name,
        )
    except UserError as error:
        raise UserError(f"task: {error}") from None


def training_rows(config: OwnConfig) -> "Dataset":
    """The prompts that a run with these settings is trained on."""
    return load_prompts(config.task)


def held_out_rows(config: OwnConfig, split: str | None = None) -> "Dataset":
    """Held-out prompts: those of `eval_dataset`, or another split of `dataset`. None: the split
    `eval_split`.

    Raises a UserError if the dataset is a single file, which is trained on as a whole, unless its
    split is named, or if a split is named that a single file of held-out prompts does not have.
    """
    settings = config.task
    flag = "--split"
    if split is None:
        flag = "--task.eval_split"
        split = settings.eval_split
    if settings.eval_dataset is not None:
        check_file("task.eval_dataset", settings.eval_dataset)
        if Path(settings.eval_dataset).is_file() and split != settings.eval_split:
            raise UserError(
                f"--split: expected {settings.eval_split}, as task.eval_dataset is a single file, "
                f"{settings.eval_dataset!r}, got {split!r}"
            )
        held_out = replace(settings, dataset=settings.eval_dataset, subset=None, split=split)
        return load_prompts(held_out, "task.eval_dataset")
    if Path(settings.dataset).is_file() and split != settings.split:
        raise UserError(
            f"task.eval_dataset: expected a file of held-out prompts, as all of {settings.dataset!r} is trained on "
            f"({flag} {settings.split} uses it), got None"
        )
    return load_prompts(replace(settings, split=split))


def load_prompts(settings: OwnTaskConfig, key: str = "task.dataset") -> "Dataset":
    """The dataset, which is that of `key`, its prompts in a column `prompt`. Raises a UserError that names the key."""
    from cory.prompts import check_prompt  # here, as importing torch takes seconds
    from cory.task import load_dataset

    _check_dataset(settings)
    if settings.subset is not None and Path(settings.dataset).exists():
        raise UserError(f"task.subset: expected null for local data, got {settings.subset!r}")
    try:
        dataset = load_dataset(settings.dataset, settings.split, [], settings.subset)
    except UserError as error:
        raise UserError(f"{key}{str(error).removeprefix('dataset')}") from None

    column = settings.prompt_column
    names = dataset.column_names
    if column not in names:
        raise UserError(
            f"task.prompt_column: expected a column of {settings.dataset!r}, among {names}, got {column!r}"
        )
    if column != "prompt":  # as templates call it
        if "prompt" in names:
            raise UserError(
                f"task.prompt_column: expected 'prompt', as the dataset has a column of that name, got {column!r}"
            )
        dataset = dataset.rename_column(column, "prompt")
    for row, prompt in enumerate(dataset["prompt"][:]):
        check_prompt(prompt, f"task.prompt_column {column!r}, row {row + 1}")
    return dataset


def _loaded(files: PythonFiles, key: str, name: str | None) -> Loaded | None:
    """The function that a key names, if it names one."""
    return None if name is None else files.load(key, [name])[0]


def _by_name(metrics: Sequence[Loaded]) -> dict[str, Callable[..., Any]]:
    """Metric functions by their names. Raises a UserError if two have the same."""
    by_name = {loaded.name: loaded.value for loaded in metrics}
    if len(by_name) < len(metrics):
        raise UserError(
            f"task.metrics: expected functions of different names, got {[loaded.full_name for loaded in metrics]}"
        )
    return by_name


def _check_dataset(settings: OwnTaskConfig) -> None:
    if not settings.dataset:
        raise UserError("task.dataset: expected a file, a folder or a Hub id, got ''")
