"""The paper's objective-reward task (section 4, E2): solve grade-school word problems, scored by a rule."""

from dataclasses import dataclass, field, replace

import datasets

from cory.config import Config, LoraConfig, PPOConfig, SamplingConfig, UserError
from cory.data import Task, load_dataset
from cory.processes import first
from cory.prompts import RolePrompts
from gsm8k_train.answers import correct, extract, gold

EXAMPLE = (
    "Question: Shawn has five toys. For Christmas, he got two toys each from his mom and dad. How many toys does he "
    "have now? Answer: Shawn started with 5 toys. If he got 2 toys each from his mom and dad, then that is 4 "
    "more toys. 5 + 4 = 9. "
)
PIONEER = EXAMPLE + "Question: {prompt} Answer:"
OBSERVER = EXAMPLE + "Question: {prompt} Reference: {response} Answer:"


@dataclass
class Gsm8kTaskConfig:
    """Problems and prompts.

    Args:
        dataset: Hub id, local file or folder (parquet, json lines, csv) with `question` and `answer`, or `tiny`.
        subset: Configuration of a Hub dataset.
        split: Which split of it.
        pioneer_prompt: Template over {prompt}, the question.
        observer_prompt: Template over {prompt} and {response}, the response of the role before.
    """

    dataset: str = "openai/gsm8k"
    subset: str | None = "main"
    split: str = "train"
    pioneer_prompt: str = PIONEER
    observer_prompt: str = OBSERVER


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


def problems(config: Gsm8kTaskConfig, split: str) -> datasets.Dataset:
    """The problems with columns `prompt` (the question) and `answer`.

    Raises:
        UserError: the dataset cannot be had, or a gold answer has no number.
    """
    loaded = load_dataset(config.dataset, split, ["question", "answer"], config.subset)
    for row, answer in enumerate(loaded["answer"]):
        if not isinstance(answer, str) or gold(answer) is None:
            raise UserError(f"dataset: expected a gold answer with a number after ####, got {answer!r} in row {row}")
    return loaded.select_columns(["question", "answer"]).rename_column("question", "prompt")


def make_task(config: Gsm8kConfig) -> Task:
    """The task of a run: `tiny` names are resolved before (`resolve_tiny`)."""
    prompts = RolePrompts(config.task.pioneer_prompt, config.task.observer_prompt)
    return Task(problems(config.task, config.task.split), rule_reward, prompts, {"unparseable": unparseable})


def resolve_tiny(config: Gsm8kConfig) -> None:
    """Replaces every `tiny` in a run's settings, and says what runs and how to run the paper's setting."""
    if "tiny" in (config.model.name, config.task.dataset) and first():
        method = "cory" if config.cory.num_agents > 1 else "ppo"
        print("Embedded default: a small GPT-2 on generated word problems, built on first use (one to two minutes).")
        print(
            f"The paper's setting: python gsm8k_train/{method}.py --config configs/gsm8k/{method}_llama2_7b.yaml",
            flush=True,
        )
    config.model.name, config.task = resolve_tiny_names(config.model.name, config.task)


def resolve_tiny_names(model: str, task: Gsm8kTaskConfig) -> tuple[str, Gsm8kTaskConfig]:
    """Model name and task with every `tiny` replaced by the folder of the embedded default, built on first use."""
    if "tiny" not in (model, task.dataset):
        return model, task
    from gsm8k_train import tiny

    folder = tiny.paths()
    task = replace(task, dataset=str(folder)) if task.dataset == "tiny" else task
    return str(folder / "policy") if model == "tiny" else model, task
