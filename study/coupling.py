"""Correlation of the rewards of a run's two agents, overall and within each query.

Eq. 4 rewards an agent with `r_1 + r_2`. What the observer earns teaches the pioneer as far as it depends on the
response that the observer reads. The rest is noise, and the more so the more both rewards rise and fall with the query.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from cory.cli.settings import as_config, read_settings
from cory.config import Config
from cory.errors import UserError
from cory.evaluation.responses import answer
from cory.evaluation.settings import agent_models, run_agents
from cory.models.load import ModelPool, choose_device
from cory.task import Task
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
    folder: Path, kind: type[C], make_task: Callable[[C, torch.device, str], Task], queries: int = 200, samples: int = 8
) -> dict[str, Interval]:
    """`correlations` of a run's first two agents on held-out queries, the second as observer of the first.

    Args:
        folder: of a run that has ended. Its agents are loaded as the run had them.
        kind: the configuration class of its task; make_task: makes the task, of a split.
        queries: number of its rows that are answered, from the first. samples: responses to each.

    Raises:
        UserError: the run has not saved two agents.
    """
    config = as_config(kind, read_settings(folder), folder / "config.yaml")
    models = list(agent_models(run_agents(folder), config, {}).values())[:2]
    if len(models) < 2:
        raise UserError(f"{folder}: expected a run with two saved agents, got {len(models)}")
    device = choose_device("auto")
    task = make_task(config, device, "test")
    columns = repeated(task.dataset[:queries], samples)
    pool = ModelPool(device)
    rewards: list[np.ndarray] = []
    read = None  # what the pioneer has answered
    for role, (model, adapter, base) in enumerate(models):
        with pool.loaded(model, adapter, base) as loaded:
            responses, values = answer(
                loaded, task, columns, config.sampling, read, role,
                seed=role, chat_template=model.chat_template, kl=False,
            )  # fmt: skip
            if config.cory.knowledge_transfer:
                read = responses.completions
            rewards.append(np.reshape(values, (-1, samples)))
    return correlations(*rewards)


def repeated(columns: Mapping[str, Sequence[Any]], times: int) -> dict[str, list[Any]]:
    """Columns in which each row is repeated `times` times, consecutively."""
    return {name: [x for x in column for _ in range(times)] for name, column in columns.items()}


def text(measured: dict[str, Interval]) -> str:
    """The correlations in one line."""
    parts = {name: interval.text("+.2f") for name, interval in measured.items()}
    return f"correlation of the agents' rewards {parts['all']}, through the pioneer's response {parts['response']}"
