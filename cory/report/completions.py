"""The completions of a page: for each query the chains that answered it, from what runs and evaluations store."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

# So that the file stays small:
ITERATIONS = 25  # of a run's samples, evenly spaced
QUERIES = 100  # of an evaluation
LONGEST = 4000  # characters of a text

Record: TypeAlias = Mapping[str, Any]


@dataclass
class Step:
    """A response. `prompt`: what its role read, where that is not the query alone."""

    who: str
    numbers: str
    prompt: str | None
    text: str


@dataclass
class Chain:
    """The responses of all roles to a query."""

    title: str
    steps: list[Step]


Completions: TypeAlias = dict[str, list[Chain]]  # by query


def add_run(
    completions: Completions,
    method: str,
    samples: Sequence[Record],
    before_after: Mapping[str, Mapping[str, Sequence[Record]]],
) -> None:
    """Adds a run's samples before and after training (summary.json), and while it trained (samples.jsonl)."""
    for stage, by_name in before_after.items():
        shown: set[tuple[str, str]] = set()
        # The chain first: a solo response with which it begins is not repeated.
        for name in sorted(by_name, key=lambda name: name != "chain"):
            is_solo = name != "chain" and "chain" in by_name
            who = f"{method}, {name} solo" if is_solo else method
            for records in _chains(by_name[name]):
                first = (records[0]["query"], records[0]["completion"])
                if first not in shown:
                    shown.add(first)
                    _add(completions, f"{who} · {stage} training", records)
    iterations = list(dict.fromkeys(sample["iteration"] for sample in samples))
    every = max(1, math.ceil(len(iterations) / ITERATIONS))
    for iteration in iterations[::every]:
        of_iteration = [sample for sample in samples if sample["iteration"] == iteration]
        for records in _chains(of_iteration):
            _add(completions, f"{method} · iteration {iteration}", records)


def add_evaluation(
    completions: Completions, queries: Sequence[str], records: Mapping[tuple[str, int], Record]
) -> None:
    """Adds the first response of each model to the first queries, after the responses that it read.

    Args:
        records: of responses.jsonl, by model and query.
    """
    steps_of: dict[tuple[str, int], list[Step]] = {}
    for (model, number), record in records.items():
        if number >= QUERIES:
            continue
        read = record["read"]
        first = {
            "agent": model.partition(" after ")[0],
            "role": record["role"] if read else None,
            "query": queries[number],
            "prompt": record["prompt"],
            "completion": record["completions"][0],
            "task_reward": record["rewards"][0],
            "kl": record["kl"][0],
        }
        if "team_rewards" in record:
            first["team_reward"] = record["team_rewards"][0]
        steps_of[model, number] = [*steps_of.get((read, number), []), _step(first)]
        chain = Chain(model, steps_of[model, number])
        completions.setdefault(_cut(queries[number]), []).append(chain)


def _chains(records: Sequence[Record]) -> list[tuple[Record, ...]]:
    """Samples of one iteration as chains: the records of all roles to a query together."""
    roles: dict[str, list[Record]] = {}
    for record in records:
        roles.setdefault(record["role"], []).append(record)
    return list(zip(*roles.values(), strict=False))  # a file may end within an iteration


def _add(completions: Completions, title: str, records: Sequence[Record]) -> None:
    chain = Chain(title, [_step(record) for record in records])
    completions.setdefault(_cut(records[0]["query"]), []).append(chain)


def _step(record: Record) -> Step:
    """A step from a sample (docs/metrics.md, "Samples")."""
    numbers = [f"reward {record['task_reward']:+.2f}"]
    if "team_reward" in record:
        numbers.append(f"team reward {record['team_reward']:+.2f}")
    numbers.append(f"KL {record['kl']:.2f}")
    prompt = record["prompt"]
    if isinstance(prompt, list):  # chat messages
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    return Step(
        who=" · ".join(filter(None, [record["role"], record["agent"]])),
        numbers=" · ".join(numbers),
        prompt=None if prompt == record["query"] else _cut(prompt),
        text=_cut(record["completion"]),
    )


def _cut(text: str) -> str:
    """The text, or its beginning and how much is missing."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}… ({len(text) - LONGEST:,} more characters)"
