"""Settings of a run on IMDB. Importing them does not import torch."""

from dataclasses import dataclass, field

from cory.config import Config, Settings, expect
from imdb_train import toy

OBSERVER = 'I can make this sentence "{prompt}{response}" more positive: {prompt}'
OBSERVERS = {  # wordings of the observer's prompt, by the names that task.observer_prompt takes
    "paper": OBSERVER,
    "review": "Review: {prompt}{response}\nMore positive review: {prompt}",
    "instruction": "Here is the beginning of a film review: {prompt}{response}\n"
    "Rewrite it so that it is as positive as it can be.\nRewritten: {prompt}",
}


@dataclass
class ImdbTaskConfig(Settings):
    """Queries, reward and prompts.

    Args:
        dataset: Hub id, local file or folder with reviews (parquet, json lines, csv), or `tiny`.
        split: Split of the dataset.
        text_column: Column with the reviews.
        min_chars: Shorter reviews are left out.
        min_query_tokens: Fewest tokens of a review that make a query; the number is drawn for each review.
        max_query_tokens: Most tokens of a review that make a query.
        reward_model: Hub id or local folder of a classifier with a POSITIVE label, or `tiny`.
        reward_batch_size: Texts that are scored at a time.
        pioneer_prompt: Template over {prompt}.
        observer_prompt: Template over {prompt} and {response}, the response of the preceding role; or a named
            template: paper, review, instruction (docs/when.md).
    """

    dataset: str = "stanfordnlp/imdb"
    split: str = "train"
    text_column: str = "text"
    min_chars: int = 200
    min_query_tokens: int = 2
    max_query_tokens: int = 8
    reward_model: str = "lvwerra/distilbert-imdb"
    reward_batch_size: int = 256
    pioneer_prompt: str = "{prompt}"
    observer_prompt: str = OBSERVER

    def __post_init__(self) -> None:
        self.observer_prompt = OBSERVERS.get(self.observer_prompt, self.observer_prompt)
        expect(self.min_chars >= 0, "task.min_chars", "0 or more", self.min_chars)
        expect(self.min_query_tokens >= 1, "task.min_query_tokens", "at least 1", self.min_query_tokens)
        expect(
            self.max_query_tokens >= self.min_query_tokens,
            "task.max_query_tokens",
            f"at least min_query_tokens = {self.min_query_tokens}",
            self.max_query_tokens,
        )
        expect(self.reward_batch_size >= 1, "task.reward_batch_size", "at least 1", self.reward_batch_size)


@dataclass
class ImdbConfig(Config):
    """A run on IMDB. See cory/config.py for the keys that every task shares.

    Args:
        task: Queries, reward and prompts.
    """

    task: ImdbTaskConfig = field(default_factory=ImdbTaskConfig)

    def resolve(self, name: str) -> str:
        """The folder of a built-in model, or the name itself."""
        return toy.folder(name)
