"""The paper's subjective-reward task (section 4, E1): continue a film review so that a classifier finds it positive."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cory.config import Config, UserError, expect
from cory.data import Task, load_dataset
from cory.models import load_classifier, load_tokenizer
from cory.processes import first
from cory.prompts import RolePrompts
from cory.window import pad

OBSERVER = 'I can make this sentence "{prompt}{response}" more positive: {prompt}'


@dataclass
class ImdbTaskConfig:
    """Queries, reward and prompts.

    Args:
        dataset: Hub id, local file or folder with reviews (parquet, json lines, csv), or `tiny`.
        split: Which split of it.
        text_column: Its column with the reviews.
        min_chars: Shorter reviews are left out.
        min_query_tokens: Fewest tokens of a review that make a query; a number is drawn for each review.
        max_query_tokens: Most tokens of a review that make a query.
        reward_model: Hub id or local folder of a classifier with a POSITIVE label, or `tiny`.
        reward_batch_size: Texts that are scored at a time.
        pioneer_prompt: Template over {prompt}.
        observer_prompt: Template over {prompt} and {response}, the response of the role before.
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


class PositiveLogit:
    """Reward: the classifier's POSITIVE logit for query plus response.

    Args:
        name: Hub id or local folder of a sequence classifier.
        batch_size: texts in one forward pass.
        device: where it runs.

    Raises:
        UserError: there is no such classifier, or it has no POSITIVE label.
    """

    __name__ = "PositiveLogit"

    def __init__(self, name: str, batch_size: int, device: torch.device) -> None:
        model, self.tokenizer, self.index = load_classifier(name, "POSITIVE", "task.reward_model")
        self.model: PreTrainedModel = model.to(device)
        self.batch_size = batch_size
        self.max_length = getattr(model.config, "max_position_embeddings", None)

    @torch.no_grad()
    def __call__(self, prompts: list[str], completions: list[str]) -> list[float]:
        """Scores query + response, in batches of similar length so that padding costs little."""
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        rows = self.tokenizer(texts, truncation=self.max_length is not None, max_length=self.max_length)["input_ids"]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        rewards = torch.empty(len(rows))
        for start in range(0, len(order), self.batch_size):
            index = order[start : start + self.batch_size]
            ids, mask = pad(
                [torch.tensor(rows[i], dtype=torch.long) for i in index], self.tokenizer.pad_token_id or 0, "right"
            )
            logits = self.model(input_ids=ids.to(self.model.device), attention_mask=mask.to(self.model.device)).logits
            rewards[index] = logits[:, self.index].float().cpu()
        return rewards.tolist()


def queries(config: ImdbTaskConfig, split: str, tokenizer: PreTrainedTokenizerBase, seed: int) -> Any:
    """The dataset with a `prompt` column: the first 2 to 8 tokens of each review, the number drawn from `seed`.

    Raises:
        UserError: the dataset cannot be had, or no review is long enough.
    """
    reviews = load_dataset(config.dataset, split, [config.text_column])
    texts = [text for text in reviews[config.text_column] if text and text.strip() and len(text) >= config.min_chars]
    if not texts:
        raise UserError(
            f"dataset: expected reviews of at least {config.min_chars} characters, got none in {config.dataset!r}"
        )
    lengths = np.random.default_rng(seed).integers(config.min_query_tokens, config.max_query_tokens + 1, len(texts))
    # Sixty characters a token are plenty: the rest of a long review need not be tokenized.
    heads = tokenizer([text[: 60 * config.max_query_tokens] for text in texts], add_special_tokens=False)["input_ids"]
    prompts = [tokenizer.decode(ids[:n], skip_special_tokens=True) for ids, n in zip(heads, lengths, strict=True)]
    return type(reviews).from_dict({"prompt": [prompt for prompt in prompts if prompt]})


def make_task(config: ImdbConfig, device: torch.device) -> Task:
    """The task of a run: `tiny` names are resolved before (`resolve_tiny`)."""
    prompts = RolePrompts(config.task.pioneer_prompt, config.task.observer_prompt)
    tokenizer = load_tokenizer(config.model.name, {"revision": config.model.revision}, config.model.trust_remote_code)
    reward = PositiveLogit(config.task.reward_model, config.task.reward_batch_size, device)
    return Task(queries(config.task, config.task.split, tokenizer, config.seed), reward, prompts)


def resolve_tiny(config: ImdbConfig) -> None:
    """Replaces every `tiny` in a run's settings, and says what runs and how to run the paper's setting."""
    if {"tiny", "tiny_large"} & {config.model.name, config.task.dataset, config.task.reward_model} and first():
        method = "cory" if config.cory.num_agents > 1 else "ppo"
        print(
            "Embedded default: a small GPT-2 and DistilBERT on generated reviews, built on first use (about a minute)."
        )
        print(
            f"The paper's setting: python imdb_train/{method}.py --config configs/imdb/{method}_gpt2_large.yaml",
            flush=True,
        )
    config.model.name, config.task = resolve_tiny_names(config.model.name, config.task)


def resolve_tiny_names(model: str, task: ImdbTaskConfig) -> tuple[str, ImdbTaskConfig]:
    """Model name and task with every `tiny` replaced by the folder of the embedded default, built on first use."""
    if not {"tiny", "tiny_large"} & {model, task.dataset, task.reward_model}:
        return model, task
    from imdb_train import tiny

    folder = tiny.paths()
    task = replace(
        task,
        dataset=str(folder) if task.dataset == "tiny" else task.dataset,
        reward_model=str(folder / "reward_model") if task.reward_model == "tiny" else task.reward_model,
    )
    if model == "tiny_large":
        return str(tiny.large() / "policy"), task
    return str(folder / "policy") if model == "tiny" else model, task
