"""Chains of responses as a report shows them, from what runs and evaluations have stored of their texts.

A chain: `query` (an index into the report's queries), `method`, `seed`, `stage` (`before`, `after`, `evaluation`, or an
iteration), and `steps`, one for each role: `agent`, `role`, `prompt` where it is not the query alone, `text`, `reward`,
`kl`, and `tokens` with their `ratios`. What an older version did not store is null.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

LONGEST = 4000  # characters of a text, and
TOKENS = 600  # tokens of a response that are shown
SEED = re.compile(r"-seed(\d+)(?=/|$)")  # in the folder of one of several runs


class Texts:
    """Collects chains, and their queries, each once."""

    def __init__(self) -> None:
        self.chains: list[dict[str, Any]] = []
        self.numbers: dict[str, int] = {}

    @property
    def queries(self) -> list[str]:
        """The queries, each as far as it is shown."""
        return [cut(query) for query in self.numbers]

    def add(self, query: str, method: str, seed: Any, stage: Any, steps: Sequence[Mapping[str, Any]]) -> None:
        """Adds a chain."""
        number = self.numbers.setdefault(query, len(self.numbers))
        chain = {"query": number, "method": method, "seed": seed, "stage": stage, "steps": list(steps)}
        self.chains.append(chain)

    def add_run(
        self, method: str, seed: Any, samples: Iterable[Mapping[str, Any]], fixed: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Adds a run's samples.jsonl, and its summary's samples before and after training."""
        for stage in ("before", "after"):
            for name, records in fixed.get(stage, {}).items():
                label = method if name == "chain" else f"{method}, {name} solo"
                self._add_chains(label, seed, stage, records)
        for iteration, records in groupby(samples, key=lambda record: record["iteration"]):
            self._add_chains(method, seed, iteration, records)

    def _add_chains(self, method: str, seed: Any, stage: Any, records: Iterable[Mapping[str, Any]]) -> None:
        by_role: dict[str, list[Mapping[str, Any]]] = {}
        for record in records:
            by_role.setdefault(record.get("role", "pioneer"), []).append(record)
        for steps in zip(*by_role.values(), strict=False):  # a file may end early
            self.add(steps[0]["query"], method, seed, stage, [_step(record) for record in steps])

    def add_evaluation(self, queries: Sequence[str], records: Mapping[tuple[str, int], Mapping[str, Any]]) -> None:
        """Adds the first response of each model to each query of an evaluation, with the responses that it read."""
        for (name, index), record in records.items():
            query, chain = queries[index], [record]
            while before := records.get((chain[0].get("read") or "", index)):
                chain.insert(0, before)
            roles = ["pioneer", *["observer"] * (len(chain) - 1)] if len(chain) > 1 else [None]
            steps = [_evaluated(query, *pair) for pair in zip(chain, roles, strict=True)]
            seed = SEED.search(name)
            self.add(query, SEED.sub("", name), seed and int(seed[1]), "evaluation", steps)


def _step(record: Mapping[str, Any]) -> dict[str, Any]:
    """A step of a chain from a sample."""
    prompt = record.get("prompt")
    if isinstance(prompt, list):  # chat messages
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    return {
        "agent": record.get("agent"),
        "role": record.get("role"),
        "prompt": None if prompt in (None, record["query"]) else cut(prompt),
        "text": cut(record["completion"]),
        "reward": short(record["task_reward"]),
        "kl": short(record.get("kl")),
        "tokens": [cut(text, 200) for text in record.get("token_texts", [])[:TOKENS]],
        "ratios": [short(ratio) for ratio in record.get("log_ratios", [])[:TOKENS]],
    }


def _evaluated(query: str, record: Mapping[str, Any], role: str | None) -> dict[str, Any]:
    """A step of a chain from a line of responses.jsonl."""
    first = {"completion": record["completions"][0], "task_reward": record["rewards"][0], "kl": record["kl"][0]}
    who = record["model"].partition(" after ")[0]
    return _step({**record, **first, "query": query, "agent": who, "role": role})


def cut(text: str, longest: int = LONGEST) -> str:
    """The text, or its beginning and how much is missing."""
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text) - longest:,} more characters)"


def short(value: Any) -> float | None:
    """A number with four digits; None where it is not finite, for which JSON has no name, or not there."""
    if not isinstance(value, (int, float)) or value != value or value in (float("inf"), float("-inf")):
        return None
    return float(f"{value:.4g}")
