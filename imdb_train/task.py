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
    """The dataset with a `prompt` column: the first 2 to 8 tokens of each review, the number drawn from `seed`.

    Of the toy reviews only those that belong to the split, by their text (`toy.is_held_out`).

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
    # Drawn from the seed alone, not from a `Stream`: the queries of all recorded results were drawn so.
    lengths = np.random.default_rng(seed).integers(
        config.min_query_tokens, config.max_query_tokens + 1, len(texts)
    )
    # Sixty characters a token are plenty: the rest of a long review need not be tokenized. Not verbose, as these may
    # exceed a small context, which is no matter: of each only the first tokens are kept.
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
                f"task.max_query_tokens: expected queries of split {split!r}, got none of up to {longest}"
            )
    return Dataset.from_dict({"prompt": prompts})


# What a task provides: see `cory.task_kinds.TaskKind`.


def make_task(config: ImdbConfig, rows: Dataset | None = None) -> Task:
    """The task of a run, on `rows` or on the queries of training."""
    settings = config.task
    name = str(toy.REWARD_MODEL) if settings.reward_model == "tiny" else settings.reward_model
    # A response that continues a review has its own space, one that is a turn of a chat does not.
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
        # Recorded by another name, as an evaluation scores all of its runs with one reward.
        reward = Reward(classifier, name="cory.rewards.Classifier, after a space")
    prompts = RolePrompts(settings.pioneer_prompt, settings.observer_prompt)
    if rows is None:
        rows = training_rows(config)
    return Task(rows, reward, prompts, kind=IMDB.name)


def training_rows(config: ImdbConfig) -> Dataset:
    """The queries that a run with these settings is trained on."""
    return queries(config.task, config.task.split, tokenizer_of(config), config.seed)


def held_out_rows(config: ImdbConfig, split: str | None = None) -> Dataset:
    """Queries of a split. None: of the split `test`; a UserError if that is trained on."""
    if split is None:
        check_held_out(config.task.dataset, config.task.split)
        split = "test"
    return queries(config.task, split, tokenizer_of(config), config.seed)
