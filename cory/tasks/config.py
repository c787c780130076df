"""Settings of a run on your own prompts and rewards. Importing them does not import torch."""

from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from cory.config import Config, Settings
from cory.errors import UserError
from cory.tasks.kind import TaskKind


def as_list(value: list[str] | str) -> list[str]:
    """Names of functions, of which a single one need not be a list."""
    return [value] if isinstance(value, str) else value


@dataclass
class OwnTaskConfig(Settings):
    """Prompts, reward and templates; docs/own_task.md has examples.

    Args:
        dataset: File (parquet, jsonl, json, csv), folder with files named after their splits, or
            Hub id.
        subset: Configuration of a Hub dataset; null for its only one.
        split: Split of the dataset; a single file is used whole.
        eval_dataset: Held-out prompts, for `cory.evaluation` and `eval_every`. null: another split
            of `dataset`.
        eval_split: Split of the held-out prompts that `eval_every` uses; `cory.evaluation` has
            --split.
        prompt_column: Column with the prompts: text, or chat messages of which the last is the
            user's.
        reward: FILE.py:FUNCTION, or a list of them, whose weighted sum is the reward. May be empty
            with a team_reward.
        reward_weights: A weight for each reward function. null: 1 each.
        team_reward: FILE.py:FUNCTION that rewards a whole chain, on top of `reward`. null: none.
        metrics: FILE.py:FUNCTION, or a list of them, whose means are recorded by the names of the
            functions.
        extract: FILE.py:FUNCTION from a response to its answer, or None, for the votes of an
            evaluation. null: none.
        pioneer_prompt: Template over {prompt} and the dataset's other columns.
        observer_prompt: Template over {prompt}, {response}, the response of the preceding role, and
            the other columns. null: query and response, then the query again on a new line; in a
            chat, a request for a better answer.
    """

    block: ClassVar[str] = "task"
    # Keys whose values are FILE.py:FUNCTION.
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
        """The reward functions, as a list; empty only beside a team reward."""
        if self.team_reward is not None and not self.reward:
            return []
        return as_list(self.reward)


@dataclass
class OwnConfig(Config):
    """A run on your own prompts and rewards. See cory/config.py for the keys that every task
    shares.

    Args:
        task: Prompts, reward and templates.
    """

    task: OwnTaskConfig = Field(default_factory=OwnTaskConfig)


OWN = TaskKind("own", OwnConfig, "cory.tasks.own")
