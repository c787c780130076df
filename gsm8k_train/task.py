"""The paper's objective-reward task (section 4, E2): solve grade-school word problems, scored by a rule."""

from datasets import Dataset

from cory.data import check_held_out, load_dataset, without_long_prompts
from cory.errors import UserError
from cory.roles import RolePrompts
from cory.task import Task
from gsm8k_train import toy
from gsm8k_train.answers import correct, extract, gold
from gsm8k_train.config import GSM8K, Gsm8kConfig, Gsm8kTaskConfig


def rule_reward(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    """Returns 1.0 for completions whose answer equals the gold number, else 0.0 (paper, section 4).

    Args:
        answer: gold solutions, with their numbers after `####`.

    >>> rule_reward(["2 + 2?", "2 + 2?"], [" 2 + 2 = 4.", " It is 5."], ["#### 4", "#### 4"])
    [1.0, 0.0]
    """
    numbers = [gold(text) for text in answer]
    return [
        float(number is not None and correct(completion, number))
        for completion, number in zip(completions, numbers, strict=True)
    ]


def unparseable(completions: list[str]) -> list[float]:
    """Returns 1.0 for completions without a readable number as answer, else 0.0."""
    return [float(extract(completion) is None) for completion in completions]


def problems(config: Gsm8kTaskConfig, split: str) -> Dataset:
    """Returns the problems of a split, with columns `prompt` (the question) and `answer`.

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


# The functions of a task kind: see `cory.task_kinds.TaskKind`.


def make_task(config: Gsm8kConfig, rows: Dataset | None = None) -> Task:
    """Returns the task of a run, on `rows` or on the training problems."""
    prompts = RolePrompts(config.task.pioneer_prompt, config.task.observer_prompt)
    if rows is None:
        rows = training_rows(config)
    return Task(
        rows, rule_reward, prompts, {"unparseable": unparseable}, extract=extract, kind=GSM8K.name
    )


def training_rows(config: Gsm8kConfig) -> Dataset:
    """Returns the training problems of a run with these settings."""
    return _read(config, config.task.split)


def held_out_rows(config: Gsm8kConfig, split: str | None = None) -> Dataset:
    """Returns a split's problems (None: the split `test`'s). Raises a UserError if training used the default split."""
    if split is None:
        check_held_out(config.task.dataset, config.task.split)
        split = "test"
    return _read(config, split)


def _read(config: Gsm8kConfig, split: str) -> Dataset:
    """Returns the problems of a split, without those that are too long."""
    return without_long_prompts(problems(config.task, split), config, config.task.pioneer_prompt)
