"""Settings of a run on IMDB. Importing this module does not import torch."""

from typing import ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from cory.config import Config
from cory.errors import UserError
from cory.settings import Settings
from cory.task_kinds import TaskKind
from imdb_train import toy

OBSERVER = 'I can make this sentence "{prompt}{response}" more positive: {prompt}'


@dataclass
class ImdbTaskConfig(Settings):
    """Queries, reward and prompts.

    Args:
        dataset: Hub id, local file or folder with reviews (parquet, json lines, csv), or `tiny`.
        split: Split of the dataset.
        text_column: Column with the reviews.
        min_chars: Shortest review in characters; shorter ones are left out.
        min_query_tokens: Shortest query in tokens. A query is the beginning of a review; its length is drawn for each
            review.
        max_query_tokens: Longest query in tokens.
        reward_model: Hub id or local folder of a classifier, or `tiny`.
        reward_label: Label whose logit is the reward. null: the only output, as in reward models.
        reward_batch_size: Number of texts scored at a time.
        pioneer_prompt: Template over {prompt}.
        observer_prompt: Template over {prompt} and {response}, the preceding role's response.
    """

    block: ClassVar[str] = "task"

    dataset: str = "stanfordnlp/imdb"
    split: str = "train"
    text_column: str = "text"
    min_chars: NonNegativeInt = 200
    min_query_tokens: PositiveInt = 2
    max_query_tokens: PositiveInt = 8
    reward_model: str = "lvwerra/distilbert-imdb"
    reward_label: str | None = "POSITIVE"
    reward_batch_size: PositiveInt = 256
    pioneer_prompt: str = "{prompt}"
    observer_prompt: str = OBSERVER

    def check(self) -> None:
        if self.max_query_tokens < self.min_query_tokens:
            raise UserError(
                f"task.max_query_tokens: expected at least min_query_tokens = {self.min_query_tokens}, "
                f"got {self.max_query_tokens}"
            )


@dataclass
class ImdbConfig(Config):
    """A run on IMDB. cory/config.py has the keys that all tasks share.

    Args:
        task: Queries, reward and prompts.
    """

    task: ImdbTaskConfig = Field(default_factory=ImdbTaskConfig)

    def resolve(self, name: str) -> str:
        """Returns the folder of a built-in model, or the name itself."""
        return toy.folder(name)


IMDB = TaskKind("imdb", ImdbConfig, "imdb_train.task")
