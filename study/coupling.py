"""Correlation of the rewards of a run's two agents, overall and within each query.

Eq. 4 rewards an agent with `r_1 + r_2`. What the observer earns teaches the pioneer as far as it depends on the
response that the observer reads. The rest is noise, and the more so the more both rewards rise and fall with the query.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cory.cli.load import as_config
from cory.config import Config
from cory.errors import UserError
from cory.evaluation.agents import agent_weights, run_agents
from cory.evaluation.responses import answer, load
from cory.parallel.devices import choose_device
from cory.run.record import read_settings
from cory.tasks.kind import TaskKind
from study.intervals import Interval, over_queries

C = TypeVar("C", bound=Config)
RESAMPLES = 1000  # of the queries


def correlations(pioneer: np.ndarray, observer: np.ndarray) -> dict[str, Interval]:
    """Pearson correlation of two agents' rewards, with the 95 % interval of a bootstrap over queries.

    Args:
        pioneer: (queries, samples) rewards. observer: those of the responses that read them, in the same places.

    Returns:
        `all`: over all responses. `response`: of their deviations from the query's mean, which is the part due to the
        response that was read; 0 if the observer's reward does not depend on it. NaN where a reward never varies.
    """
    rewards = np.stack([pioneer, observer])

    def correlation(queries: Sequence[int], axes: tuple[int, ...]) -> float:
        chosen = rewards[:, list(queries)]
        one, two = chosen - chosen.mean(axis=axes, keepdims=True)
        deviations = float(np.sqrt((one**2).sum() * (two**2).sum()))
        return float((one * two).sum()) / deviations if deviations > 0 else float("nan")

    return {
        name: over_queries(partial(correlation, axes=axes), len(pioneer), RESAMPLES)
        for name, axes in (("all", (1, 2)), ("response", (2,)))
    }


def coupling(
    folder: Path, kind: TaskKind[Any], queries: int = 200, samples: int = 8
) -> dict[str, Interval]:
    """`correlations` of a run's first two agents on held-out queries, the second as observer of the first.

    Args:
        folder: of a run that has ended. Its agents are loaded as the run had them.
        kind: of its task.
        queries: number of its rows that are answered, from the first. samples: responses to each.

    Raises:
        UserError: the run has not saved two agents.
    """
    config = as_config(kind.config, read_settings(folder), folder / "config.yaml")
    models = list(agent_weights(run_agents(folder), config, {}).values())[:2]
    if len(models) < 2:
        raise UserError(f"{folder}: expected a run with two saved agents, got {len(models)}")
    config = config.on("auto")
    device = choose_device(config.device)
    task = kind.make_task(config, kind.held_out_rows(config, "test"))
    columns = repeated(task.dataset[:queries], samples)
    rewards: list[np.ndarray] = []
    read: list[list[str]] = []  # what each role has answered
    for role, weights in enumerate(models):
        # The base is the model itself, as no KL is computed.
        loaded = load(weights._replace(base=weights.model), device)
        reads = read if read and config.cory.knowledge_transfer else None
        responses, scores = answer(
            loaded, task, columns, config.sampling, reads, role,
            seed=role, chat_template=weights.model.chat_template, kl=False,
        )  # fmt: skip
        read.append(responses.completions)
        rewards.append(np.reshape(scores.total.numpy(), (-1, samples)))
    return correlations(*rewards)


def repeated(columns: Mapping[str, Sequence[Any]], times: int) -> dict[str, list[Any]]:
    """Columns in which each row is repeated `times` times, consecutively."""
    return {name: [x for x in column for _ in range(times)] for name, column in columns.items()}


def text(measured: dict[str, Interval]) -> str:
    """The correlations in one line."""
    parts = {name: interval.text("+.2f") for name, interval in measured.items()}
    return f"correlation of the agents' rewards {parts['all']}, through the pioneer's response {parts['response']}"
