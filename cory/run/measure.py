"""The records of an iteration: the lines of metrics.jsonl, samples.jsonl and timings.jsonl (docs/metrics.md)."""

from __future__ import annotations

import math
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cory.agent import Agent
from cory.config import Config
from cory.credit import per_response
from cory.iteration import Iteration
from cory.metrics import collapsed, combined_reward, distinct, share_of_start
from cory.parallel import distributed
from cory.rewards import measure_responses
from cory.roles import query_text
from cory.rollout import Rollout
from cory.run.folder import as_json
from cory.task import Task

NUM_QUERIES = 4  # queries shown with responses, before and after training and in samples.jsonl
EMPTY_SHARE = 0.1

# Explanations of the warning flags in metrics.jsonl. Each is printed at most once; a resumed run may print it again.
MEANING = {
    "kl": "KL {kl:.1f} is above guards.kl_bound. Try a larger ppo.init_kl_coef, a smaller ppo.learning_rate or, "
    "if ppo.kl_penalty is full, ppo.kl_penalty: kl (docs/paper.md, 'KL penalty').",
    "equal_rewards": "every response of the batch earned the same reward, so there is nothing to learn. Try a larger "
    "ppo.batch_size, or a task that is neither too hard nor too easy for the model.",
    "empty_responses": "more than one response in ten is empty. Look at samples.jsonl, sampling.stop and the prompts.",
    "ratio": "the probability ratio exceeded ppo.ratio_threshold, so an optimizer step had no gradient. Try a smaller "
    "ppo.learning_rate or fewer ppo.ppo_epochs.",
    "collapse": "distinct-2 of the responses, {distinct_2:.2f}, is below half of the first iteration's (responses "
    "repeat each other), or KL {kl:.1f} is above guards.kl_bound. Try a larger ppo.init_kl_coef or a smaller "
    "ppo.learning_rate.",
}


def measure(
    iteration: Iteration,
    agents: Sequence[Agent],
    task: Task,
    config: Config,
    history: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Returns an iteration's metrics over all processes: a record per role, in the order of `agents`.

    Args:
        history: the records of earlier iterations.
    """
    kl_coef = config.ppo.init_kl_coef
    kl_bound = config.guards.kl_bound
    team_rewards = None
    if iteration.team_rewards is not None:
        team_rewards = torch.tensor(distributed.gather_rows(iteration.team_rewards.tolist()))
    # Collapse is judged against the first iteration.
    first_records = {record["role"]: record for record in history[: len(iteration.chain)]}
    records = []
    for role, agent in enumerate(iteration.chain):
        completions = distributed.gather_rows(iteration.rollouts[role].completions)
        task_rewards = torch.tensor(distributed.gather_rows(iteration.task_rewards[role].tolist()))
        earned = task_rewards
        if team_rewards is not None:
            earned = task_rewards + per_response(team_rewards, like=task_rewards)
        update_stats = iteration.stats[role].metrics()
        kl = update_stats.pop("kl")
        record: dict[str, Any] = {
            "iteration": iteration.index,
            "agent": agent.name,
            "role": iteration.rollouts[role].role,
            "task_reward": task_rewards.mean().item(),
            **({} if team_rewards is None else {"team_reward": team_rewards.mean().item()}),
            "kl": kl,
            "combined_reward": combined_reward(earned.mean().item(), kl, kl_coef),
            **update_stats,
            "distinct_2": distinct(completions, 2),
        }
        record |= _task_metrics(task, iteration, role)
        first_record = first_records.get(record["role"], record)
        trained_on = torch.tensor(distributed.gather_rows(iteration.rewards[role].tolist()))
        record["flags"] = flags(record, first_record, trained_on, completions, kl_bound)
        records.append(record)

    position = {agent.name: index for index, agent in enumerate(agents)}
    return sorted(records, key=lambda record: position[record["agent"]])


def _task_metrics(task: Task, iteration: Iteration, role: int) -> dict[str, float]:
    """Returns a role's mean of each task metric and, if the task has several reward functions, of each function.

    A mean covers the responses to which the metric applies. A metric that applies to none is left out.
    """
    rollout = iteration.rollouts[role]
    completions = rollout.completions
    columns = iteration.batch.columns_of(role)
    prompts = columns.pop("prompt")
    columns["role"] = [rollout.role] * len(completions)
    task_rewards = iteration.task_rewards[role].tolist()
    values = {
        f"reward_{name}": rewards.tolist()
        for name, rewards in iteration.rewards_by_function[role].items()
    }
    values |= measure_responses(task.metrics, prompts, completions, task_rewards, columns)
    means = {}
    for name, rank_values in values.items():
        numbers = [
            number for number in distributed.gather_rows(rank_values) if not math.isnan(number)
        ]
        if numbers:
            means[name] = statistics.fmean(numbers)
    return means


def flags(
    record: Mapping[str, Any],
    start: Mapping[str, Any],
    rewards: torch.Tensor,
    completions: Sequence[str],
    kl_bound: float,
) -> list[str]:
    """Returns the warning flags of a role's iteration, which are keys of MEANING.

    Args:
        record: the role's metrics.
        start: the metrics of the same role in the first iteration.
        rewards: training rewards (batch,) of the role (Eq. 4).
        completions: the role's responses.
        kl_bound: the bound on the KL, `guards.kl_bound`.
    """
    is_raised = {
        "kl": record["kl"] > kl_bound,
        "equal_rewards": bool((rewards == rewards[0]).all()),
        "empty_responses": sum(not text.strip() for text in completions)
        > EMPTY_SHARE * len(completions),
        "ratio": record["dropped_steps"] > 0,
        "collapse": collapsed(
            share_of_start(record["distinct_2"], start["distinct_2"]), record["kl"], kl_bound
        ),
    }
    return [name for name, raised in is_raised.items() if raised]


def sampled_texts(task: Task, iteration: Iteration, chains_per_query: int) -> list[dict[str, Any]]:
    """Returns samples for a few queries: each query's first chain, which is one response per role.

    Must be called before the update: the KL is measured with the policy that sampled the responses.
    """
    described = describe(
        iteration.chain,
        iteration.batch.columns,
        iteration.rollouts,
        iteration.task_rewards,
        slice(0, NUM_QUERIES * chains_per_query, chains_per_query),
        task.columns_read(),
        iteration.team_rewards,
    )
    return [{"iteration": iteration.index, **sample} for sample in described]


def describe(
    chain: Sequence[Agent],
    columns: dict[str, list[Any]],
    rollouts: Sequence[Rollout],
    task_rewards: Sequence[torch.Tensor],
    rows: slice,
    read: Sequence[str],
    team_rewards: torch.Tensor | None = None,
) -> list[dict[str, Any]]:
    """Returns a record (docs/metrics.md) of each role's response to each of `rows`, role by role.

    If a role samples several responses (branches) to one earlier response, only the first is included.

    Args:
        chain: the agents, in the order of their roles.
        columns: the batch's columns.
        rollouts: the roles' rollouts.
        task_rewards: the roles' task rewards, each (responses,).
        rows: the rows of `columns` to describe.
        read: the columns that prompts and rewards use besides the query.
        team_rewards: team rewards (chains,), or None.
    """

    def first_branches(responses: int) -> slice:
        """Returns the slice of a role's `responses` that has the first branch of each of `rows`."""
        branches = responses // len(columns["prompt"])
        return slice(0, rows.stop and rows.stop * branches, (rows.step or 1) * branches)

    queries = [query_text(prompt) for prompt in columns["prompt"][rows]]
    shown_columns = {name: columns[name][rows] for name in read}
    shown_team_rewards = {}
    if team_rewards is not None:
        first_chains = first_branches(len(team_rewards))
        shown_team_rewards = {"team_reward": team_rewards[first_chains].tolist()}
    samples = []
    for agent, rollout, rewards in zip(chain, rollouts, task_rewards, strict=True):
        role_rows = first_branches(len(rollout.completions))
        shown = rollout.rows(role_rows)
        shown_rewards = {"task_reward": rewards[role_rows].tolist(), **shown_team_rewards}
        kls = agent.response_kls(shown)
        for row, query in enumerate(queries):
            sample = {
                "agent": agent.name,
                "role": rollout.role,
                "query": query,
                "columns": {name: as_json(values[row]) for name, values in shown_columns.items()},
                "prompt": shown.prompts[row],
                "completion": shown.completions[row],
                **{name: values[row] for name, values in shown_rewards.items()},
                "kl": kls[row],
            }
            samples.append(sample)
    return samples


def timings(iteration: Iteration, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Returns the line of timings.jsonl: seconds by phase, speed and memory.

    Timings are kept out of metrics.jsonl, so that repeating a run reproduces that file bit for bit.
    """
    # `response_tokens` is a mean over all ranks, which have equally many rows.
    tokens = distributed.world_size() * sum(
        stats.response_tokens * len(rollout.completions)
        for stats, rollout in zip(iteration.stats, iteration.rollouts, strict=True)
    )
    return {
        "iteration": iteration.index,
        **{f"seconds_{phase}": round(value, 6) for phase, value in seconds.items()},
        "tokens_per_second": round(tokens / seconds["total"], 3),
        "peak_memory_mb": round(peak_memory_mb(), 1),
    }


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the seconds that the block takes to `seconds[phase]`."""
    started = time.perf_counter()
    yield
    for gpu in _gpus_in_use():
        torch.cuda.synchronize(gpu)  # queued work must not count for the next phase
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started


def peak_memory_mb() -> float:
    """Returns peak memory so far in MiB: of the fullest GPU if CUDA is used, otherwise of the process."""
    gpus = _gpus_in_use()
    if gpus:
        return max(map(torch.cuda.max_memory_allocated, gpus)) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _gpus_in_use() -> list[int]:
    """Returns the GPUs on which this process has allocated memory.

    Other GPUs must not be synchronized, because that would allocate memory on them.
    """
    if not torch.cuda.is_initialized():
        return []
    return [gpu for gpu in range(torch.cuda.device_count()) if torch.cuda.max_memory_allocated(gpu)]
