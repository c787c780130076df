"""How the rewards of a run's two agents go together: their correlation, and what of it comes through the reference.

Eq. 4 rewards an agent with `r_1 + r_2`. What the other one earns teaches a pioneer as far as it depends on the response
that the observer reads. The rest is noise, and the more so the more both rewards rise and fall with the query.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from jsonargparse import ArgumentParser

from cory.config import Config, ModelConfig, UserError
from cory.evaluation import respond, run_agents, run_config
from cory.policies.load import choose_device, load_policy
from cory.policies.sampling import context_length, encode
from cory.prompts import fit_responses
from cory.rewards import score
from cory.task import Task
from study.statistics import bootstrap

C = TypeVar("C", bound=Config)
Interval = tuple[float, float, float]


def correlations(pioneer: np.ndarray, observer: np.ndarray) -> dict[str, Interval]:
    """Pearson correlation of two agents' rewards, with the 95 % interval of a bootstrap over queries.

    Args:
        pioneer: (queries, samples) rewards. observer: those of the responses that read them, in the same places.

    Returns:
        `all`: over all responses. `reference`: of their deviations from the query's mean, which is what the observer's
        reward has from the response that it read; 0 where it does not depend on it. NaN where a reward never varies.
    """
    rewards = np.stack([pioneer, observer])

    def over(queries: Sequence[int], _: Sequence[int], axes: tuple[int, ...]) -> float:
        chosen = rewards[:, list(queries)]
        one, two = chosen - chosen.mean(axis=axes, keepdims=True)
        size = float(np.sqrt((one**2).sum() * (two**2).sum()))
        return float((one * two).sum()) / size if size > 0 else float("nan")

    places = list(range(pioneer.shape[0]))
    return {
        name: bootstrap(partial(over, axes=axes), places, places[:1], 1000)
        for name, axes in (("all", (1, 2)), ("reference", (2,)))
    }


def coupling(
    folder: Path, kind: type[C], make_task: Callable[[C, torch.device], Task], queries: int = 200, samples: int = 8
) -> dict[str, Interval]:
    """`correlations` of a run's first two agents on held-out queries, the second as observer of the first.

    Args:
        folder: of a run that has ended.
        kind: the configuration class of its task; make_task: makes the task, of the split `test`.
        queries: so many of its rows, from the first, are answered; samples: times each.

    Raises:
        UserError: the run has not saved two agents.
    """
    agents = list(run_agents(folder).values())[:2]
    if len(agents) < 2:
        raise UserError(f"{folder}: expected a run with two saved agents, got {len(agents)}")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    settings = {key: value for key, value in read_settings(folder).items() if key != "versions"}
    settings["task"] |= {"split": "test"}
    config = kind(**vars(parser.instantiate(parser.parse_object(settings))))
    device = choose_device("auto")
    task = make_task(config, device)
    rows = task.dataset.select(range(min(queries, len(task.dataset)))).to_list()
    rows = [row for row in rows for _ in range(samples)]
    columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}

    def render(role: int, texts: Sequence[str]) -> list[str]:
        return [task.prompts.render(role, row, text) for row, text in zip(rows, texts, strict=True)]

    rewards, read = [], [""] * len(rows)
    for role, agent in enumerate(agents):
        policy, tokenizer = load_policy(ModelConfig(str(agent)))
        policy.to(device)
        prompts = fit_responses(
            partial(render, role if config.cory.knowledge_transfer else 0),
            read,
            partial(encode, tokenizer, chat_template=config.model.chat_template),
            (context_length(policy) or sys.maxsize) - config.sampling.max_new_tokens,
        )
        answers = respond(
            policy, policy, tokenizer, prompts, config.sampling, seed=role, chat_template=config.model.chat_template
        )
        read = answers.completions
        values = score(task.reward, [row["prompt"] for row in rows], read, columns)
        rewards.append(values.double().numpy().reshape(-1, samples))
    return correlations(*rewards)


def text(measured: dict[str, Interval]) -> str:
    """One line of it."""
    parts = {name: f"{value:+.2f} ({low:+.2f} to {high:+.2f})" for name, (value, low, high) in measured.items()}
    return f"correlation of the agents' rewards {parts['all']}, through the reference {parts['reference']}"
