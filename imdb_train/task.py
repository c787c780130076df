"""The paper's subjective-reward task (section 4, E1): continue a film review so that a classifier finds it positive."""

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cory.errors import UserError
from cory.models.load import (
    LOADING,
    find,
    first_line,
    load_model,
    load_tokenizer,
)
from cory.models.window import pad
from cory.parallel.devices import choose_device, to_device
from cory.prompts import RolePrompts
from cory.task import Task, check_held_out, load_dataset
from imdb_train import toy
from imdb_train.config import IMDB, ImdbConfig, ImdbTaskConfig


def load_classifier(
    name: str, label: str, what: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, int]:
    """A sequence classifier, its tokenizer, and the index of `label` (upper or lower case alike).

    Raises:
        UserError: it or its tokenizer is missing, it is no classifier, it lacks weights (such as its head's), or it has
            no such label among at least two.
    """
    where = find(name, what)
    try:
        labels = AutoConfig.from_pretrained(name, **where).id2label
        index = [i for i, text in labels.items() if text.upper() == label.upper()]
    except LOADING as error:
        raise UserError(
            f"{what}: expected a sequence classifier, got {name!r} ({first_line(error)})"
        ) from None
    if len(labels) < 2 or not index:
        raise UserError(
            f"{what}: expected a classifier with the label {label} among two or more, got {labels} in {name!r}"
        )
    model, tokenizer = load_model(
        AutoModelForSequenceClassification,
        "a sequence classifier",
        name,
        what,
        {"dtype": "float32"},
        where,
    )
    return model.eval().requires_grad_(False), tokenizer, int(index[0])


class PositiveLogit:
    """Reward: the classifier's POSITIVE logit for query plus response.

    Args:
        name: Hub id or local folder of a sequence classifier.
        batch_size: texts in one forward pass.
        device: where it runs.
        separator: between query and response. A response that continues its query has its own space; one that is a
            turn of a chat does not.
        recorded_as: its name in a run's config.yaml, if another than `name`.

    Raises:
        UserError: there is no such classifier, or it has no POSITIVE label.
    """

    __name__ = "PositiveLogit"

    def __init__(
        self,
        name: str,
        batch_size: int,
        device: torch.device,
        separator: str = "",
        recorded_as: str | None = None,
    ) -> None:
        model, self.tokenizer, self.index = load_classifier(name, "POSITIVE", "task.reward_model")
        self.model: PreTrainedModel = model.to(device)
        self.batch_size = batch_size
        self.separator = separator
        # Identified in config.yaml, so that another model behind this name is refused.
        self.models = {"task.reward_model": (recorded_as or name, name)}
        self.max_length = _most_tokens(model)

    @torch.no_grad()
    def __call__(self, prompts: list[str], completions: list[str]) -> list[float]:
        """Scores query + response, in batches of similar length so that padding costs little."""
        texts = [
            prompt + self.separator + completion
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        rows = self.tokenizer(
            texts, truncation=self.max_length is not None, max_length=self.max_length
        )["input_ids"]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        rewards = torch.empty(len(rows))
        for start in range(0, len(order), self.batch_size):
            index = order[start : start + self.batch_size]
            texts_ids = [torch.tensor(rows[i], dtype=torch.long) for i in index]
            ids, mask = pad(texts_ids, self.tokenizer.pad_token_id or 0, "right")
            logits = self.model(
                input_ids=to_device(ids, self.model.device),
                attention_mask=to_device(mask, self.model.device),
            ).logits
            rewards[index] = logits[:, self.index].float().cpu()
        return rewards.tolist()


def _most_tokens(model: PreTrainedModel) -> int | None:
    """How long a text a classifier can read; None: any."""
    positions = getattr(model.config, "max_position_embeddings", None)
    embeddings = getattr(model.base_model, "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    if positions is None or padding is None:
        return positions
    return positions - padding - 1  # RoBERTa's positions begin after that of padding


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
    # Sixty characters a token are plenty: the rest of a long review need not be tokenized.
    heads = tokenizer(
        [text[: 60 * config.max_query_tokens] for text in texts], add_special_tokens=False
    )["input_ids"]
    prompts = [
        tokenizer.decode(ids[:n], skip_special_tokens=True)
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


# What a task provides: see `cory.tasks.kind.TaskKind`.


def make_task(config: ImdbConfig, rows: Dataset | None = None) -> Task:
    """The task of a run, on `rows` or on the queries of training."""
    settings = config.task
    name = str(toy.REWARD_MODEL) if settings.reward_model == "tiny" else settings.reward_model
    reward = PositiveLogit(
        name,
        settings.reward_batch_size,
        device=choose_device(config.of_agent(0).device),
        separator=" " if config.of_agent(0).model.chat_template else "",
        recorded_as=settings.reward_model,
    )
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


def tokenizer_of(config: ImdbConfig) -> PreTrainedTokenizerBase:
    """The first agent's tokenizer, by whose tokens queries are cut."""
    model = config.of_agent(0).model
    policy = config.resolve(model.name)
    return load_tokenizer(
        policy, find(policy, "model.name", model.revision), model.trust_remote_code
    )
