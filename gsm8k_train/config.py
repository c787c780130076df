"""Settings of a run on GSM8K. Importing them does not import torch."""

from dataclasses import dataclass, field

from cory.config import Config, LoraConfig, PPOConfig, SamplingConfig, Settings
from gsm8k_train import toy
from gsm8k_train.toy import EXAMPLE

PIONEER = EXAMPLE + "Question: {prompt} Answer:"
OBSERVER = EXAMPLE + "Question: {prompt} Reference: {response} Answer:"
OBSERVERS = {  # wordings of the observer's prompt, by the names that task.observer_prompt takes
    "paper": OBSERVER,
    "proposal": EXAMPLE + "Question: {prompt} Somebody's answer, which may be wrong: {response} The right answer:",
    "instruction": "{prompt}\nReason step by step and end with the number. A solution that may be wrong: {response}\n"
    "Your solution:",
}


@dataclass
class Gsm8kTaskConfig(Settings):
    """Problems and prompts.

    Args:
        dataset: Hub id, local file or folder (parquet, json lines, csv) with `question` and `answer`, or `tiny`.
        subset: Configuration of a Hub dataset.
        split: Split of the dataset.
        pioneer_prompt: Template over {prompt}, the question.
        observer_prompt: Template over {prompt} and {response}, the response of the preceding role; or a named
            template: paper, proposal, instruction (docs/when.md).
    """

    dataset: str = "openai/gsm8k"
    subset: str | None = "main"
    split: str = "train"
    pioneer_prompt: str = PIONEER
    observer_prompt: str = OBSERVER

    def __post_init__(self) -> None:
        self.observer_prompt = OBSERVERS.get(self.observer_prompt, self.observer_prompt)


@dataclass
class Gsm8kConfig(Config):
    """A run on GSM8K. See cory/config.py for the keys that every task shares.

    Args:
        task: Problems and prompts.
    """

    lora: LoraConfig = field(default_factory=lambda: LoraConfig(rank=16))
    ppo: PPOConfig = field(
        default_factory=lambda: PPOConfig(
            learning_rate=1e-4, batch_size=32, mini_batch_size=2, gradient_accumulation_steps=16, init_kl_coef=0.01
        )
    )
    sampling: SamplingConfig = field(
        default_factory=lambda: SamplingConfig(min_new_tokens=256, max_new_tokens=256, stop=["Question:"])
    )
    task: Gsm8kTaskConfig = field(default_factory=Gsm8kTaskConfig)

    def resolve(self, name: str) -> str:
        """The folder of a built-in model, or the name itself."""
        return toy.folder(name)
