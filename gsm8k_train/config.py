"""Settings of a run on GSM8K. Importing this module does not import torch."""

from typing import ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from cory.config import Config, EvaluationConfig, LoraConfig, PPOConfig, SamplingConfig
from cory.settings import Settings
from cory.task_kinds import TaskKind
from gsm8k_train import toy
from gsm8k_train.toy import EXAMPLE

PIONEER = EXAMPLE + "Question: {prompt} Answer:"
OBSERVER = EXAMPLE + "Question: {prompt} Reference: {response} Answer:"


@dataclass
class Gsm8kTaskConfig(Settings):
    """Problems and prompts.

    Args:
        dataset: Hub id, local file or folder (parquet, json lines, csv) with `question` and `answer`, or `tiny`.
        subset: Configuration of a Hub dataset.
        split: Split of the dataset.
        max_prompt_tokens: Longest prompt of the pioneer, in tokens. Problems with longer prompts are left out of
            training and held-out data. null: no limit.
        pioneer_prompt: Template over {prompt}, the question.
        observer_prompt: Template over {prompt} and {response}, the preceding role's response.
    """

    block: ClassVar[str] = "task"

    dataset: str = "openai/gsm8k"
    subset: str | None = "main"
    split: str = "train"
    max_prompt_tokens: PositiveInt | None = None
    pioneer_prompt: str = PIONEER
    observer_prompt: str = OBSERVER


@dataclass
class Gsm8kConfig(Config):
    """A run on GSM8K. cory/config.py has the keys that all tasks share.

    Args:
        task: Problems and prompts.
    """

    lora: LoraConfig = Field(default_factory=lambda: LoraConfig(rank=16))
    ppo: PPOConfig = Field(
        default_factory=lambda: PPOConfig(
            learning_rate=1e-5,
            batch_size=32,
            mini_batch_size=2,
            gradient_accumulation_steps=16,
            init_kl_coef=0.01,
        )
    )
    sampling: SamplingConfig = Field(
        default_factory=lambda: SamplingConfig(
            min_new_tokens=256, max_new_tokens=256, stop=["Question:"]
        )
    )
    task: Gsm8kTaskConfig = Field(default_factory=Gsm8kTaskConfig)

    def resolve(self, name: str) -> str:
        """Returns the folder of a built-in model, or the name itself."""
        return toy.folder(name)


@dataclass
class Gsm8kEvaluation(EvaluationConfig):
    """The defaults of an evaluation on GSM8K: all problems, with eight samples and a greedy answer each.

    Args:
        queries: Number of problems, counted from the first. 0: all.
        samples: Responses sampled per problem.
        ks: Values of k for pass@k, at most `samples`.
        greedy: Also answer each problem once by greedy decoding.
        batch_size: Responses sampled at a time.
    """

    queries: NonNegativeInt = 0
    samples: PositiveInt = 8
    ks: list[int] = Field(default_factory=lambda: [1, 2, 4, 8])
    greedy: bool = True
    batch_size: PositiveInt = 128


GSM8K = TaskKind("gsm8k", Gsm8kConfig, "gsm8k_train.task", Gsm8kEvaluation)
