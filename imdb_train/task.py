"""The paper's subjective-reward task (section 4, E1): continue a film review so that a classifier finds it positive."""

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from cory.data import check_held_out, load_dataset
from cory.errors import UserError
from cory.models.load import tokenizer_of
from cory.models.text import are_turns, decode
from cory.parallel.devices import choose_device
from cory.rewards import Classifier, Reward
from cory.roles import RolePrompts
from cory.task import Task
from imdb_train import toy
from imdb_train.config import IMDB, ImdbConfig, ImdbTaskConfig


def queries(
    config: ImdbTaskConfig, split: str, tokenizer: PreTrainedTokenizerBase, seed: int
) -> Dataset:
    """Returns a dataset whose `prompt` column has the first tokens of each review. `seed` decides how many.

    Queries from toy reviews are kept only if they belong to the split (`toy.is_held_out`).

    Raises:
        UserError: the dataset is not available, or no review is long enough.
    """
    if config.dataset == "tiny":
        texts = toy.reviews(split)
    else:
        texts = load_dataset(config.dataset, split, [config.text_column])[config.text_column]
        for row, text in enumerate(texts):
            if not isinstance(text, str | None):
                raise UserError(
                    f"task.text_column: expected texts, got {text!r} in row {row + 1} of {config.text_column!r}"
                )
    texts = [text for text in texts if text and text.strip() and len(text) >= config.min_chars]
    if not texts:
        raise UserError(
            f"dataset: expected reviews of at least {config.min_chars} characters, got none in {config.dataset!r}"
        )
    # Drawn from the seed itself, not from a `Stream`, to reproduce the queries of all recorded results.
    lengths = np.random.default_rng(seed).integers(
        config.min_query_tokens, config.max_query_tokens + 1, len(texts)
    )
    # Sixty characters per token are plenty, so the rest of a long review is not tokenized. `verbose=False` silences a
    # warning about texts longer than a small context. Only their first tokens are used.
    heads = tokenizer(
        [text[: 60 * config.max_query_tokens] for text in texts],
        add_special_tokens=False,
        verbose=False,
    )["input_ids"]
    prompts = [
        decode(tokenizer, ids[:n], skip_special_tokens=True)
        for ids, n in zip(heads, lengths, strict=True)
    ]
    prompts = [prompt for prompt in prompts if prompt]
    if config.dataset == "tiny":
        prompts = toy.of_split(prompts, split)
        if not prompts:
            longest = config.max_query_tokens
            raise UserError(
                f"task.max_query_tokens: expected queries of split {split!r} in up to {longest} tokens, got none"
            )
    return Dataset.from_dict({"prompt": prompts})


# The functions of a task kind: see `cory.task_kinds.TaskKind`.


def make_task(config: ImdbConfig, rows: Dataset | None = None) -> Task:
    """Returns the task of a run, on `rows` or on the training queries."""
    settings = config.task
    name = str(toy.REWARD_MODEL) if settings.reward_model == "tiny" else settings.reward_model
    # A response that continues a review begins with its own space; a chat turn does not.
    separator = " " if are_turns([], config.of_agent(0).model.chat_template) else ""
    classifier = Classifier(
        name,
        settings.reward_label,
        settings.reward_batch_size,
        device=choose_device(config.of_agent(0).device),
        separator=separator,
        recorded_as=settings.reward_model,
    )
    reward: Classifier | Reward = classifier
    if separator:
        # Recorded under a name of its own, so that evaluations note if runs differ in the space before responses.
        reward = Reward(classifier, name="cory.rewards.Classifier, after a space")
    prompts = RolePrompts(settings.pioneer_prompt, settings.observer_prompt)
    if rows is None:
        rows = training_rows(config)
    return Task(rows, reward, prompts, kind=IMDB.name)


def training_rows(config: ImdbConfig) -> Dataset:
    """Returns the training queries of a run with these settings."""
    return queries(config.task, config.task.split, tokenizer_of(config), config.seed)


def held_out_rows(config: ImdbConfig, split: str | None = None) -> Dataset:
    """Returns the queries of a split (default: `test`). Raises a UserError if training used that default split."""
    if split is None:
        check_held_out(config.task.dataset, config.task.split)
        split = "test"
    return queries(config.task, split, tokenizer_of(config), config.seed)
