"""Chains of responses as a report shows them, from what runs and evaluations have stored of their
texts.

A chain: `query` (an index into the report's queries), `method`, `seed`, `stage` (`before`, `after`,
`evaluation`, or an iteration), and `steps`, one for each role: `agent`, `role`, `prompt` where it
is not the query alone, `text`, `reward`, `team` (the chain's team reward), `kl`, and `tokens` with
their `ratios`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

LONGEST = 4000  # characters of a text, and
TOKENS = 600  # tokens of a response that are shown
ROLES = 50  # of a chain at most, so that a file that names itself as read does no harm
SEED = re.compile(r"-seed(\d+)(?=/|$)")  # in the folder of one of several runs


class Texts:
    """Collects chains, and their queries, each once."""

    def __init__(self) -> None:
        self.chains: list[dict[str, Any]] = []
        self.numbers: dict[str, int] = {}

    def in_order(self) -> list[dict[str, Any]]:
        """The chains by stage: before training, after it, evaluations, iterations."""
        ranks = {"before": -3, "after": -2, "evaluation": -1}
        return sorted(self.chains, key=lambda chain: ranks.get(chain["stage"], chain["stage"]))

    @property
    def queries(self) -> list[str]:
        """The queries, each as far as it is shown."""
        return [cut(query) for query in self.numbers]

    def add(
        self, query: str, method: str, seed: Any, stage: Any, steps: Sequence[Mapping[str, Any]]
    ) -> None:
        """Adds a chain."""
        number = self.numbers.setdefault(query, len(self.numbers))
        chain = {
            "query": number,
            "method": method,
            "seed": seed,
            "stage": stage,
            "steps": list(steps),
        }
        self.chains.append(chain)

    def add_run(
        self,
        method: str,
        seed: Any,
        samples: Iterable[Mapping[str, Any]],
        fixed: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Adds a run's samples.jsonl, and its summary's samples before and after training.

        A solo response with which a chain of that stage begins is not repeated, nor one that two
        agents share.
        """
        for stage in ("before", "after"):
            samples_by_name = fixed.get(stage, {})
            chain_first = sorted(samples_by_name, key=lambda name: name != "chain")
            shown: set[tuple[str, str]] = set()
            for name in chain_first:
                for steps in _by_role(samples_by_name[name]):
                    query, response = steps[0]["query"], steps[0]["completion"]
                    if (query, response) in shown:
                        continue
                    shown.add((query, response))
                    is_solo = len(steps) == 1 and len(samples_by_name) > 1
                    by = f"{method}, {name} solo" if is_solo else method
                    self.add(query, by, seed, stage, _steps(steps))
        for iteration, records in groupby(samples, key=lambda record: record["iteration"]):
            for steps in _by_role(records):
                self.add(steps[0]["query"], method, seed, iteration, _steps(steps))

    def add_evaluation(
        self, queries: Sequence[str], records: Mapping[tuple[str, int], Mapping[str, Any]]
    ) -> None:
        """Adds the first response of each model to each query of an evaluation, with the responses that it read."""
        for (name, index), record in records.items():
            query = queries[index]
            chain = [record]
            while len(chain) < ROLES:
                before = records.get((chain[0].get("read") or "", index))
                if before is None:
                    break
                chain.insert(0, before)
            steps = [_evaluated(query, record) for record in chain]
            if len(chain) == 1:
                steps[0]["role"] = None  # solo
            seed = SEED.search(name)
            self.add(query, SEED.sub("", name), int(seed[1]) if seed else None, "evaluation", steps)


def _by_role(records: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], ...]]:
    """Samples of one iteration as chains, the records of all roles to a query together."""
    roles: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        roles.setdefault(record.get("role", "pioneer"), []).append(record)
    return list(zip(*roles.values(), strict=False))  # a file may end within an iteration


def _steps(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [_step(record) for record in records]


def _step(record: Mapping[str, Any]) -> dict[str, Any]:
    """A step of a chain from a sample."""
    prompt = record.get("prompt")
    if isinstance(prompt, list):  # chat messages
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    tokens = record.get("token_texts", [])
    more = len(tokens) - TOKENS
    return {
        "agent": record.get("agent"),
        "role": record.get("role"),
        "prompt": None if prompt in (None, record["query"]) else cut(prompt),
        "text": cut(record["completion"]),
        "reward": short(record["task_reward"]),
        "team": short(record.get("team_reward")),
        "kl": short(record.get("kl")),
        "tokens": [cut(text, 200) for text in tokens[:TOKENS]]
        + [f"… ({more:,} more tokens)"] * (more > 0),
        "ratios": [short(ratio) for ratio in record.get("log_ratios", [])[:TOKENS]]
        + [None] * (more > 0),
    }


def _evaluated(query: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """A step of a chain from a line of responses.jsonl."""
    first = {
        "completion": record["completions"][0],
        "task_reward": record["rewards"][0],
        "kl": record["kl"][0],
    }
    if record.get("team_rewards"):
        first["team_reward"] = record["team_rewards"][0]
    who = record["model"].partition(" after ")[0]
    return _step({**record, **first, "query": query, "agent": who})


def cut(text: str, longest: int = LONGEST) -> str:
    """The text, or its beginning and how much is missing."""
    return (
        text
        if len(text) <= longest
        else f"{text[:longest]}… ({len(text) - longest:,} more characters)"
    )


def short(value: Any) -> float | None:
    """A number with four digits; None where it is not finite, for which JSON has no name, or not there."""
    if (
        not isinstance(value, (int, float))
        or value != value
        or value in (float("inf"), float("-inf"))
    ):
        return None
    return float(f"{value:.4g}")
