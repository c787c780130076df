"""The task kind `own`: the settings name the prompts and the reward. Importing this module does not import torch."""

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from cory.code_files import Loaded, as_list, load_code
from cory.config import Config
from cory.errors import UserError
from cory.settings import Settings
from cory.task_kinds import TaskKind

if TYPE_CHECKING:
    from datasets import Dataset

    from cory.rewards import Reward
    from cory.task import Task


@dataclass
class OwnTaskConfig(Settings):
    """Prompts, reward and templates; docs/own_task.md has examples.

    Args:
        dataset: File (parquet; jsonl, json or csv, optionally with .gz), folder with files named after their splits,
            folder of `save_to_disk`, or Hub id.
        subset: Configuration of a Hub dataset. null: the only configuration.
        split: Split of the dataset. A single file has no splits and is used whole.
        eval_dataset: Held-out prompts, for `cory.evaluation` and `eval_every`; checked before training. null: another
            split of `dataset`.
        eval_split: Split of the held-out prompts. `cory.evaluation` can choose another with --split.
        prompt_column: Column with the prompts, which are texts or chat messages ending with the user's.
        row_per_branch: Whether each observer response to a pioneer response has its own row; `branches` is the number
            of these responses. If true, each query takes `branches` consecutive training rows, in which the pioneer
            reads the same text. In held-out data, each row is a query (docs/learners.md).
        max_prompt_tokens: Length limit of the pioneer's prompt, in tokens. Rows with longer prompts are left out of
            training and held-out data. null: no limit.
        reward: FILE.py:FUNCTION, or a list of such names; the reward is the functions' weighted sum. May be empty with
            a team_reward.
        reward_weights: Weights of the reward functions. null: 1 each.
        team_reward: FILE.py:FUNCTION that rewards a whole chain, in addition to `reward`. null: none.
        metrics: FILE.py:FUNCTION, or a list of such names. The means are recorded under the functions' names.
        extract: FILE.py:FUNCTION that returns a response's final answer, or None, for majority votes in evaluations.
            null: none.
        pioneer_prompt: The first role's template, with placeholders {prompt} and the dataset's other columns.
        observer_prompt: The later roles' template, with placeholders {prompt}, {response} (the preceding role's
            response) and the other columns. null: for text, the query, the response, and the query again on a new line;
            for chat, a request for a better answer.
    """

    block: ClassVar[str] = "task"
    # Keys whose values have the form FILE.py:FUNCTION.
    FUNCTIONS: ClassVar[tuple[str, ...]] = (
        "reward",
        "team_reward",
        "metrics",
        "extract",
    )

    dataset: str = ""
    subset: str | None = None
    split: str = "train"
    eval_dataset: str | None = None
    eval_split: str = "test"
    prompt_column: str = "prompt"
    row_per_branch: bool = False
    max_prompt_tokens: PositiveInt | None = None
    reward: list[str] | str = ""
    reward_weights: list[float] | None = None
    team_reward: str | None = None
    metrics: list[str] | str = Field(default_factory=list)
    extract: str | None = None
    pioneer_prompt: str = "{prompt}"
    observer_prompt: str | None = None

    def check(self) -> None:
        weights = self.reward_weights
        if weights is not None and len(weights) != len(self.rewards):
            raise UserError(
                f"task.reward_weights: expected null or a weight for each of {len(self.rewards)} rewards, got {weights}"
            )

    @property
    def rewards(self) -> list[str]:
        """The names of the reward functions; empty only if there is a team reward."""
        return as_list(self.reward) if self.reward else []


@dataclass
class OwnConfig(Config):
    """A run on your own prompts and rewards. cory/config.py has the keys that all tasks share.

    Args:
        task: Prompts, reward and templates.
    """

    task: OwnTaskConfig = Field(default_factory=OwnTaskConfig)


OWN = TaskKind("own", OwnConfig, "cory.own_task")


# The functions that every task kind defines (`cory.task_kinds.TaskKind`)


def make_task(config: OwnConfig, rows: "Dataset | None" = None) -> "Task":
    """Returns a run's task. Its dataset is `rows`, or the training prompts if `rows` is None."""
    from cory.models.text import are_turns
    from cory.roles import CHAT_OBSERVER, OBSERVER, RolePrompts
    from cory.task import Task

    settings = config.task
    settings.check()
    if not settings.rewards and settings.team_reward is None:
        raise UserError(
            "task.reward: expected FILE.py:NAME, by --task.reward or in the file of --config, got none. The "
            "config.yaml of a run made in Python does not name the reward, so add --task.reward"
        )
    weights = settings.reward_weights or [1.0] * len(settings.rewards)
    rewards = [
        _reward(load_code("task.reward", name), weight)
        for name, weight in zip(settings.rewards, weights, strict=True)
    ]
    team_reward = None
    if settings.team_reward is not None:
        team_reward = _reward(load_code("task.team_reward", settings.team_reward))
    extract = None
    if settings.extract is not None:
        extract = load_code("task.extract", settings.extract).value
    loaded = [load_code("task.metrics", name) for name in as_list(settings.metrics)]
    metrics = {metric.name.split(":")[-1]: metric.value for metric in loaded}
    if len(metrics) < len(loaded):
        raise UserError(
            f"task.metrics: expected functions of different names, got {settings.metrics}"
        )
    row_per_branch = settings.row_per_branch and rows is None  # rows passed in are held out
    if rows is None:
        rows = training_rows(config)
    observer_prompt = settings.observer_prompt
    if observer_prompt is None:
        is_chat = are_turns(rows["prompt"], config.of_agent(0).model.chat_template)
        observer_prompt = CHAT_OBSERVER if is_chat else OBSERVER
    prompts = RolePrompts(settings.pioneer_prompt, observer_prompt)
    return Task(rows, rewards, prompts, metrics, team_reward, extract, OWN.name, row_per_branch)


def training_rows(config: OwnConfig) -> "Dataset":
    """Returns the training prompts."""
    settings = config.task
    return _read(config, "task.dataset", settings.dataset, settings.split, settings.subset)


def held_out_rows(config: OwnConfig, split: str | None = None) -> "Dataset":
    """Returns held-out prompts from `eval_dataset`, or from another split of `dataset`.

    Args:
        split: name of the split. None: `eval_split`.

    A dataset without splits is treated as one split: `eval_dataset` as the split `eval_split`, `dataset` as the
    training split. Raises a UserError if the dataset lacks the requested split, or if by default it is the training
    split.
    """
    from cory.data import has_splits

    settings = config.task
    held_out_split = split or settings.eval_split
    if settings.eval_dataset is not None:
        if held_out_split != settings.eval_split and not has_splits(settings.eval_dataset):
            raise UserError(
                f"--split: expected none, got {split!r}. task.eval_dataset, {settings.eval_dataset!r}, has no splits"
            )
        return _read(config, "task.eval_dataset", settings.eval_dataset, held_out_split)
    if split is None and settings.eval_split == settings.split:
        raise UserError(
            "task.eval_split: expected another split than the training split, or task.eval_dataset, got "
            f"{settings.eval_split!r}"
        )
    if held_out_split != settings.split and not has_splits(settings.dataset):
        raise UserError(
            f"task.eval_dataset: expected held-out prompts, got None. Training uses all of {settings.dataset!r}"
        )
    return _read(config, "task.dataset", settings.dataset, held_out_split, settings.subset)


def _reward(loaded: Loaded, weight: float = 1.0) -> "Reward":
    from cory.rewards import Reward

    return Reward(loaded.value, weight, loaded.name, loaded.sha256)


def _read(
    config: OwnConfig, key: str, dataset: str, split: str, subset: str | None = None
) -> "Dataset":
    """Returns a dataset's rows, without those that are too long, and with the prompts in the column `prompt`."""
    from cory.data import load_dataset, without_long_prompts

    if not dataset:
        raise UserError(f"{key}: expected a file, a folder or a Hub id, got ''")
    if subset is not None and Path(dataset).exists():
        raise UserError(f"task.subset: expected null for local data, got {subset!r}")
    rows = load_dataset(dataset, split, [], subset, key)
    column = config.task.prompt_column
    names = rows.column_names
    if column not in names:
        raise UserError(
            f"task.prompt_column: expected one of {names} of {dataset!r}, got {column!r}"
        )
    if column != "prompt":  # templates call it `prompt`
        if "prompt" in names:
            raise UserError(
                f"task.prompt_column: expected 'prompt', got {column!r}. The dataset has both columns, and templates "
                "use 'prompt'"
            )
        rows = rows.rename_column(column, "prompt")
    return without_long_prompts(rows, config, config.task.pioneer_prompt)
