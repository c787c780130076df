"""Correlation of the rewards of a run's two agents, overall and within each query.

Eq. 4 rewards an agent with `r_1 + r_2`. What the observer earns teaches the pioneer as far as it depends on the
response that the observer reads. The rest is noise, and the more so the more both rewards rise and fall with the query.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from cory.config import Config, UserError
from cory.evaluation import respond
from cory.policies.load import ModelPool, choose_device
from cory.policies.sampling import context_length, encode
from cory.prompts import fit_responses
from cory.rewards import score
from cory.roles import role_name
from cory.run.evaluation_settings import agent_models
from cory.run.settings import as_config, read_settings
from cory.task import Task
from study.statistics import Interval, bootstrap, with_interval

C = TypeVar("C", bound=Config)
RESAMPLES = 1000  # of the queries


def correlations(pioneer: np.ndarray, observer: np.ndarray) -> dict[str, Interval]:
    """Pearson correlation of two agents' rewards, with the 95 % interval of a bootstrap over queries.

    Args:
        pioneer: (queries, samples) rewards. observer: those of the responses that read them, in the same places.

    Returns:
        `all`: over all responses. `response`: of their deviations from the query's mean, which is what the observer's
        reward has from the response that it read; 0 where it does not depend on it. NaN where a reward never varies.
    """
    rewards = np.stack([pioneer, observer])

    def over(queries: Sequence[int], axes: tuple[int, ...]) -> float:
        chosen = rewards[:, list(queries)]
        one, two = chosen - chosen.mean(axis=axes, keepdims=True)
        size = float(np.sqrt((one**2).sum() * (two**2).sum()))
        return float((one * two).sum()) / size if size > 0 else float("nan")

    return {
        name: bootstrap(partial(over, axes=axes), range(len(pioneer)), resamples=RESAMPLES)
        for name, axes in (("all", (1, 2)), ("response", (2,)))
    }


def coupling(
    folder: Path, kind: type[C], make_task: Callable[[C, torch.device], Task], queries: int = 200, samples: int = 8
) -> dict[str, Interval]:
    """`correlations` of a run's first two agents on held-out queries, the second as observer of the first.

    Args:
        folder: of a run that has ended. Its agents are loaded as the run had them.
        kind: the configuration class of its task; make_task: makes the task, of the split `test`.
        queries: so many of its rows, from the first, are answered; samples: times each.

    Raises:
        UserError: the run has not saved two agents.
    """
    config = as_config(kind, read_settings(folder), folder / "config.yaml")
    models = list(agent_models(folder, config, {}).values())[:2]
    if len(models) < 2:
        raise UserError(f"{folder}: expected a run with two saved agents, got {len(models)}")
    config.task.split = "test"  # type: ignore[attr-defined]
    device = choose_device("auto")
    task = make_task(config, device)
    columns = {key: [x for x in column for _ in range(samples)] for key, column in task.dataset[:queries].items()}
    others = {key: column for key, column in columns.items() if key != "prompt"}
    pool = ModelPool(device)
    rewards: list[np.ndarray] = []
    read = None
    for role, (own, adapter, of) in enumerate(models):
        with pool.loaded(own, adapter, of) as (policy, base, tokenizer):
            tokens = partial(encode, tokenizer, chat_template=own.chat_template)
            if read is None or not config.cory.knowledge_transfer:
                prompts = task.render(0, columns)
            else:
                render, length = partial(task.render, role, columns), config.sampling.max_new_tokens
                prompts = fit_responses(render, read, tokens, context_length(policy), length)
            answers = respond(
                policy, base, tokenizer, prompts, config.sampling, seed=role, chat_template=own.chat_template
            )
        read = answers.completions
        roles = [role_name(role)] * len(read)
        values = score(task.reward, columns["prompt"], read, {**others, "role": roles})
        rewards.append(values.double().numpy().reshape(-1, samples))
    return correlations(*rewards)


def text(measured: dict[str, Interval]) -> str:
    """One line of it."""
    parts = {name: with_interval(interval, "+.2f") for name, interval in measured.items()}
    return f"correlation of the agents' rewards {parts['all']}, through the pioneer's response {parts['response']}"
