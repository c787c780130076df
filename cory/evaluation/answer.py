"""Answers every query with every model and chain, with the responses' KL to a base and their rewards."""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cory.config import EvaluationConfig, SamplingConfig
from cory.errors import UserError
from cory.evaluation.rows import Lineup, ModelSource, Row, same_weights
from cory.learners.memory import LARGEST, rows_within
from cory.metrics import full_kl
from cory.models.load import adapter_tokenizer, attach, load_answering
from cory.models.prefixes import response_logits
from cory.models.sample import sample
from cory.models.text import (
    ChatTemplate,
    are_turns,
    check_lengths,
    context_length,
    encode,
    pad_token,
    plain_texts,
    special_tokens,
    turn_stop,
)
from cory.parallel.devices import autocast, to_device
from cory.rewards import Scores, score_by_function, score_chains
from cory.roles import Prompt
from cory.streams import Purpose, Stream
from cory.task import Task

Record = dict[str, Any]  # a line of responses.jsonl
LoadedModel: TypeAlias = tuple[PreTrainedModel, PreTrainedTokenizerBase]


# A model and its answers


@dataclass
class Responses:
    """Answers to prompts, as columns.

    Args:
        prompts: what is answered.
        completions: the answers' texts.
        completion_ids: their tokens, with the end token.
        prompt_tokens: the lengths of the prompts.
        kl: to the base, in nats per response.
        base_nll: their negative log-likelihood under the base, in nats per response.
        tokens: their lengths, with the end token.
    """

    prompts: list[Prompt]
    completions: list[str]
    completion_ids: list[list[int]]
    prompt_tokens: list[int]
    kl: list[float]
    base_nll: list[float]
    tokens: list[int]


@dataclass(frozen=True)
class Answerer:
    """A model that answers, and the base to which its KL is measured.

    Args:
        model: the model.
        base: its base; None: the model with its adapters off.
        tokenizer: of both.
        chat_template: how prompts become a chat (`model.chat_template`).
        date: that templates write; None: today's.
    """

    model: PreTrainedModel
    base: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    chat_template: ChatTemplate = False
    date: str | None = None

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of prompts, as the model reads them."""
        return encode(self.tokenizer, prompts, self.chat_template, self.date)

    def encode_checked(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        """As `encode`. Raises a UserError if a prompt leaves no room for a response in the model's context."""
        prompt_ids = self.encode(prompts)
        lengths = [len(ids) for ids in prompt_ids]
        check_lengths(lengths, max_new_tokens, context_length(self.model), list(prompts))
        return prompt_ids

    def answer(
        self,
        task: Task,
        role: int,
        columns: Mapping[str, Sequence[Any]],
        earlier: Sequence[Sequence[str]] | None,
        sampling: SamplingConfig,
        **options: Any,
    ) -> Responses:
        """A response to each row of a task, as one role of its chain (Eq. 3).

        Args:
            columns: of the rows, `prompt` among them.
            earlier: of each earlier role, its responses; None: the model reads the query alone.
            sampling: of roles without limits of their own.
            options: `seed`, `batch_size` and `kl` of `respond`.
        """
        sampling = task.prompts.settings(role).sampling(sampling)
        prompts = task.prompts_of_role(
            role,
            columns,
            earlier,
            self.encode,
            special_tokens(self.tokenizer),
            context_length(self.model),
            sampling.max_new_tokens,
        )
        return self.respond(prompts, sampling, **options)

    @torch.no_grad()
    def respond(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        seed: int = 0,
        batch_size: int = 64,
        kl: bool = True,
    ) -> Responses:
        """Samples one response of at most `sampling.max_new_tokens` tokens per prompt.

        Batches hold prompts of similar length, at most `batch_size`, and with `kl` no more than whose logits (rows,
        max_new_tokens, vocabulary) are within `LARGEST`. Without `kl` it and `base_nll` are 0.

        Raises a UserError: a prompt is too long for the model, or a probability is not finite.
        """
        model = self.model.eval()
        prompt_ids = self.encode_checked(prompts, sampling.max_new_tokens)
        queries = [torch.tensor(ids, dtype=torch.long) for ids in prompt_ids]
        lengths = [len(ids) for ids in prompt_ids]
        generator = Stream(seed, Purpose.EVALUATION).torch()

        count = len(queries)
        result = Responses(
            prompts=list(prompts),
            completions=[""] * count,
            completion_ids=[[] for _ in prompts],
            prompt_tokens=lengths,
            kl=[0.0] * count,
            base_nll=[0.0] * count,
            tokens=[0] * count,
        )
        is_turn = are_turns(prompts, self.chat_template)
        if is_turn:
            ends_turn = turn_stop(model, self.tokenizer, self.chat_template, sampling.stop)
            sampling = replace(sampling, stop=[*sampling.stop, *ends_turn])
        if kl:
            rows = rows_within(LARGEST, model.device, model, sampling.max_new_tokens)
            batch_size = min(batch_size, rows)
        by_length = sorted(range(count), key=lambda i: lengths[i])
        for start in range(0, count, batch_size):
            batch = by_length[start : start + batch_size]
            query_ids = [queries[i] for i in batch]
            responses, logits = sample(
                model,
                self.tokenizer,
                query_ids,
                sampling,
                sampling.max_new_tokens,
                generator,
                keep_logits=kl,
            )
            texts = plain_texts(self.tokenizer, responses, sampling.stop, is_turn)
            for i, response, text in zip(batch, responses, texts, strict=True):
                result.completions[i] = text
                result.completion_ids[i] = response.tolist()
                result.tokens[i] = len(response)
            if not kl:
                continue
            base_logits = self._base_logits(query_ids, responses)
            of_responses = _kl_and_base_nll(responses, logits, base_logits, sampling.temperature)
            for i, (kl_of, base_nll) in zip(batch, of_responses, strict=True):
                if not math.isfinite(kl_of):
                    raise UserError(
                        f"expected finite probabilities, got a KL of {kl_of} between {model.name_or_path!r} and its "
                        f"base, for the prompt {prompts[i]!r}"
                    )
                result.kl[i] = kl_of
                result.base_nll[i] = base_nll
            del logits, base_logits  # before the next batch needs their memory
        return result

    def _base_logits(
        self, query_ids: Sequence[torch.Tensor], responses: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        """Logits of the responses under the base, (B, max T_i, V); None if the model is its own base."""
        if self.base is self.model:
            return None
        with self.model.disable_adapter() if self.base is None else nullcontext():
            return response_logits(
                self.base or self.model, query_ids, responses, pad_token(self.tokenizer)
            )


def _kl_and_base_nll(
    responses: Sequence[torch.Tensor],
    logits: Sequence[Sequence[torch.Tensor]],
    base_logits: torch.Tensor | None,
    temperature: float,
) -> Iterator[tuple[float, float]]:
    """Each response's KL to the base, and its negative log-likelihood under it, in nats.

    Both are of the distributions at the temperature at which the responses were sampled.

    Args:
        responses: token ids, (T_i,).
        logits: of each response, T_i of (V,).
        base_logits: (B, max T_i, V); None: the base is the model itself.
    """
    kls: list[torch.Tensor] = []
    base_nlls: list[torch.Tensor] = []
    # A response at a time, as a processor's cache holds one's vocabulary, not a batch's.
    for row, response in enumerate(responses):
        logprobs = (torch.stack(list(logits[row])).float() / temperature).log_softmax(-1)
        base_logprobs = logprobs
        if base_logits is not None:
            base_of_row = base_logits[row, : len(response)].float()
            base_logprobs = (base_of_row / temperature).log_softmax(-1)
        tokens = to_device(response, logprobs.device)[:, None]
        kls.append(full_kl(logprobs, base_logprobs).sum())
        base_nlls.append(-base_logprobs.gather(-1, tokens)[:, 0].sum())
    # One tensor leaves the device, so that the program waits for it once a batch.
    kl, base_nll = torch.stack([*kls, *base_nlls]).cpu().chunk(2)
    return zip(kl.tolist(), base_nll.tolist(), strict=True)


def load(source: ModelSource, device: torch.device, date: str | None = None) -> Answerer:
    """Loads a model that answers, and the base to which its KL is measured.

    Raises a UserError if one cannot be loaded, or if their tokens are not the same.
    """
    # A run that started from an adapter has merged it and trained others on that.
    policy, tokenizer = load_answering(source.model, device, merge=source.adapter is not None)
    base: PreTrainedModel | None = policy
    if source.adapter is not None:
        policy = attach(policy, source.adapter).eval()
        tokenizer = adapter_tokenizer(source.adapter, policy, tokenizer)
        base = None
    if not same_weights(source.model, source.base):
        base, tokenizer_of_base = load_answering(source.base, device)
        _check_tokens(source, (policy, tokenizer), (base, tokenizer_of_base))
    return Answerer(policy, base, tokenizer, source.model.chat_template, date)


def _check_tokens(source: ModelSource, model: LoadedModel, base: LoadedModel) -> None:
    """Raises a UserError if a model and its base have other tokens, as a KL between them would mean nothing.

    Ids that only one of them has, or that were added such as a chat's marks, may be any.
    """
    vocabularies = []
    for _, tokenizer in (model, base):
        added = set(tokenizer.added_tokens_decoder)
        tokens = tokenizer.get_vocab().items()
        vocabularies.append({index: token for token, index in tokens if index not in added})
    ours, theirs = vocabularies
    is_same = all(ours[index] == theirs[index] for index in ours.keys() & theirs.keys())
    sizes = [loaded.config.get_text_config().vocab_size for loaded, _ in (model, base)]
    if not is_same or sizes[0] != sizes[1]:
        raise UserError(
            f"models: expected a model with the {sizes[1]} tokens of its base {source.base.name!r}, for a KL between "
            f"them, got {source.model.name!r} with {sizes[0]}{'' if is_same else ', of which some differ'}"
        )


# All rows


class Evaluator:
    """Answers the queries of an evaluation.

    Args:
        lineup: who answers.
        columns: the queries' columns, `prompt` among them.
        settings: how many samples, in which batches.
        device: of the models.

    Attributes:
        records: those made so far, by the name of the row, in the order of the queries.
    """

    def __init__(
        self,
        lineup: Lineup,
        columns: dict[str, Sequence[Any]],
        settings: EvaluationConfig,
        device: torch.device,
    ) -> None:
        self.lineup = lineup
        self.columns = columns
        self.settings = settings
        self.device = device
        self.records: dict[str, list[Record]] = {}

    def run(self, path: Path) -> dict[str, list[Record]]:
        """The records of every row, also written as the lines of a file."""
        with path.open("w", encoding="utf-8") as file:
            for row in self.lineup.rows:
                self.records[row.name] = []
                for record in self._answer(row):
                    self.records[row.name].append(record)
                    file.write(json.dumps(record) + "\n")
        return self.records

    def _answer(self, row: Row) -> Iterator[Record]:
        """The records of a row, whose model is loaded for them."""
        answerer = load(row.source, self.device, self.lineup.date)
        if row.reads is None:  # too long a query is found before any is answered
            sampling = row.task.prompts.settings(0).sampling(self.lineup.sampling)
            answerer.encode_checked(
                row.task.prompts.render_rows(0, self.columns), sampling.max_new_tokens
            )

        count = len(self.columns["prompt"])
        size = max(1, self.settings.batch_size // self.settings.samples)
        bar = tqdm(total=count, desc=row.name, unit=" queries", leave=False, disable=None)
        with bar:
            for start in range(0, count, size):
                chunk = range(start, min(start + size, count))
                yield from self._answer_chunk(row, answerer, chunk)
                bar.update(len(chunk))
        print(f"{row.name}: {count}/{count} queries", file=sys.stderr, flush=True)

    def _answer_chunk(self, row: Row, answerer: Answerer, chunk: range) -> list[Record]:
        """A record for each query of a chunk."""
        samples = self.settings.samples
        responses, scores, team_rewards = self._respond(row, answerer, chunk, samples)
        rewards = scores.total.tolist()
        records = []
        for position, query in enumerate(chunk):
            first = position * samples
            rows = slice(first, first + samples)
            record = {
                "model": row.name,
                "query": query,
                "role": row.task.prompts.name(row.role),
                "rewards": rewards[rows],
                "rewards_by_function": {
                    function: [
                        None if math.isnan(value) else value for value in values[rows].tolist()
                    ]
                    for function, values in scores.by_function.items()
                },
                "kl": responses.kl[rows],
                "base_nll": responses.base_nll[rows],
                "tokens": responses.tokens[rows],
                "prompt_tokens": responses.prompt_tokens[rows],
                "completions": responses.completions[rows],
                "read": row.reads.name if row.reads else None,
                # Of the first sample alone, as they are long.
                "prompt": responses.prompts[first],
            }
            if team_rewards is not None:
                record["team_rewards"] = team_rewards[rows]
            records.append(record)

        if self.settings.greedy:
            likeliest, scores, _ = self._respond(row, answerer, chunk, 1, greedy=True)
            for position, record in enumerate(records):
                record["greedy"] = likeliest.completions[position]
                record["greedy_reward"] = scores.total[position].item()
        return records

    def _respond(
        self, row: Row, answerer: Answerer, chunk: range, samples: int, greedy: bool = False
    ) -> tuple[Responses, Scores, list[float] | None]:
        """So many responses to each query of a chunk, query by query, their rewards, and their chains' team rewards.

        A later role reads the responses that the earlier ones have sampled alike.
        """
        task = row.task
        columns = {
            name: [values[query] for query in chunk for _ in range(samples)]
            for name, values in self.columns.items()
        }
        earlier = []
        for reads in row.earlier:
            records = [self.records[reads.name][query] for query in chunk]
            if greedy:
                earlier.append([record["greedy"] for record in records])
            else:
                earlier.append([text for record in records for text in record["completions"]])
        sampling = self.lineup.sampling
        if greedy:
            sampling = SamplingConfig(1, sampling.max_new_tokens, top_k=1, stop=sampling.stop)
        with autocast(self.device, self.settings.precision):
            responses = answerer.answer(
                task,
                row.role,
                columns,
                earlier or None,
                sampling,
                # Of each role its own random numbers, or an observer would draw from those that drew what it reads.
                seed=self.settings.seed * 1_000_003 + chunk.start + row.role * 2**64,
                batch_size=self.settings.batch_size,
                kl=not greedy,
            )

        # Rewards are computed as in training, outside of autocast.
        prompts = columns.pop("prompt")
        texts = responses.completions
        columns_of_reward = {
            **columns,
            "role": [task.prompts.name(row.role)] * len(texts),
            "completion_ids": responses.completion_ids,
        }
        scores = score_by_function(task.reward, prompts, texts, columns_of_reward)
        team_rewards = None
        if task.team is not None and row.role + 1 in self.lineup.team_sizes and not greedy:
            chains = list(zip(*earlier, texts, strict=True))
            team_rewards = score_chains(task.team, prompts, chains, columns).tolist()
        return responses, scores, team_rewards
