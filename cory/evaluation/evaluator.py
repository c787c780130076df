"""Answers every query with every model and chain, in chunks of queries."""

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cory.config import SamplingConfig
from cory.evaluation.lineup import Lineup, Row
from cory.evaluation.responses import LoadedModel, Responses, answer, load
from cory.evaluation.settings import EvaluationConfig
from cory.models.text import check_lengths, context_length, encode
from cory.parallel.devices import autocast
from cory.rewards import Scores, score_chains

Record = dict[str, Any]  # a line of responses.jsonl
SECONDS_BETWEEN_LINES = 30


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
        self.count = len(columns["prompt"])
        self.settings = settings
        self.device = device
        sampling = lineup.sampling
        self.greedy = SamplingConfig(1, sampling.max_new_tokens, top_k=1, stop=sampling.stop)
        self.records: dict[str, list[Record]] = {}
        self.last_line = time.monotonic()  # when progress was printed

    def run(self, path: Path) -> dict[str, list[Record]]:
        """The records of every row, in the order of the queries, also written as the lines of a file."""
        with path.open("w", encoding="utf-8") as file:
            for row in self.lineup.rows:
                self.records[row.name] = []
                for record in self._answers(row):
                    self.records[row.name].append(record)
                    file.write(json.dumps(record) + "\n")
        return self.records

    def _answers(self, row: Row) -> Iterator[Record]:
        """The records of a row, whose model is loaded for them."""
        loaded = load(row.weights, self.device)
        self._check_lengths(row, loaded)
        size = max(1, self.settings.batch_size // self.settings.samples)
        for start in range(0, self.count, size):
            chunk = range(start, min(start + size, self.count))
            yield from self._chunk_records(row, loaded, chunk)
            self._show_progress(row.name, chunk.stop)

    def _check_lengths(self, row: Row, loaded: LoadedModel) -> None:
        """Raises a UserError if a query is too long for a model that reads it alone, before any is answered."""
        if row.reads is not None:
            return
        model, _, tokenizer = loaded
        prompts = row.task.render(0, self.columns)
        chat_template = row.weights.model.chat_template
        lengths = list(map(len, encode(tokenizer, prompts, chat_template, self.lineup.date)))
        longest = row.task.prompts.settings(0).sampling(self.lineup.sampling).max_new_tokens
        check_lengths(lengths, longest, context_length(model), prompts)

    def _show_progress(self, name: str, done: int) -> None:
        """Counts in a terminal; elsewhere, prints a line when a row is complete, and in long ones twice a minute."""
        if sys.stderr.isatty():
            print(f"\r{name}: {done}/{self.count} queries ", end="", file=sys.stderr)
        elif done == self.count or time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            print(f"{name}: {done}/{self.count} queries", flush=True)
            self.last_line = time.monotonic()

    def _chunk_records(self, row: Row, loaded: LoadedModel, chunk: Sequence[int]) -> list[Record]:
        """A record for each query of a chunk."""
        samples = self.settings.samples
        responses, scores = self._respond(row, loaded, chunk, samples, self.lineup.sampling)
        rewards = scores.total.tolist()
        team_rewards = self._team_rewards(row, chunk, responses.completions)
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
            likeliest, its_scores = self._respond(row, loaded, chunk, 1, self.greedy)
            for record, text, reward in zip(
                records, likeliest.completions, its_scores.total.tolist(), strict=True
            ):
                record["greedy"] = text
                record["greedy_reward"] = reward
        return records

    def _respond(
        self,
        row: Row,
        loaded: LoadedModel,
        chunk: Sequence[int],
        samples: int,
        sampling: SamplingConfig,
    ) -> tuple[Responses, Scores]:
        """So many responses to each query of a chunk, query by query, and their rewards."""
        columns = self._columns(chunk, samples)
        with autocast(self.device, self.settings.precision):
            return answer(
                loaded,
                row.task,
                columns,
                sampling,
                read=self._read_texts(row, chunk, sampling),
                role=row.role,
                batch_size=self.settings.batch_size,
                # Of each role its own random numbers, or an observer would draw from those that drew what it reads.
                seed=self.settings.seed * 1_000_003 + chunk[0] + row.role * 2**64,
                chat_template=row.weights.model.chat_template,
                date=self.lineup.date,
            )

    def _columns(self, chunk: Sequence[int], samples: int) -> dict[str, list[Any]]:
        """The columns of a chunk, a row for each sample, query by query."""
        return {
            name: [values[query] for query in chunk for _ in range(samples)]
            for name, values in self.columns.items()
        }

    def _team_rewards(
        self, row: Row, chunk: Sequence[int], completions: Sequence[str]
    ) -> list[float] | None:
        """The team reward of each chain that ends with these completions; None if none is whole."""
        team = row.task.team
        if team is None or row.role + 1 not in self.lineup.team_sizes:
            return None
        earlier = self._read_texts(row, chunk, self.lineup.sampling) or []
        columns = self._columns(chunk, self.settings.samples)
        prompts = columns.pop("prompt")
        return score_chains(
            team, prompts, list(zip(*earlier, completions, strict=True)), columns
        ).tolist()

    def _read_texts(
        self, row: Row, chunk: Sequence[int], sampling: SamplingConfig
    ) -> list[list[str]] | None:
        """What a later role reads: of each earlier role the responses that were sampled alike."""
        texts = []
        for earlier in row.earlier:
            records = [self.records[earlier.name][query] for query in chunk]
            if sampling is self.greedy:
                texts.append([record["greedy"] for record in records])
            else:
                texts.append([text for record in records for text in record["completions"]])
        return texts or None
