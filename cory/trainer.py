"""CoryTrainer: Algorithm 1 over a list of agents. One agent is PPO; two are the paper's pioneer and observer."""

import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate import PartialState

from cory import checkpoint, processes
from cory.agent import STATS, Agent, Rollout
from cory.checkpoint import Saver
from cory.config import Config, UserError
from cory.data import Task
from cory.guards import Interrupted, NotFinite, Signals, flags
from cory.metrics import combined_reward, distinct
from cory.prompts import fit_responses
from cory.rewards import collective, score
from cory.roles import RoleSchedule
from cory.sampling import check_lengths, context_length, seed_everything
from cory.tracking import Run

ROLE_NAMES = ("pioneer", "observer")
MEASURED = ("task_reward", "combined_reward", "distinct_2")  # metrics besides the agents' own and the task's
NUM_SAMPLES = 4  # queries whose responses are shown before and after training, and in samples.jsonl
SOLO_SAMPLES = 2**32 - 1  # in place of an iteration, the key of the random stream of those responses


def role_name(role: int) -> str:
    """`pioneer`, `observer`, then `observer_2`, ... in chains of more than two agents."""
    return ROLE_NAMES[role] if role < 2 else f"observer_{role}"


class CoryTrainer:
    """Trains the agents on the task and records the run.

    Args:
        config: the settings; `config.cory.num_agents` must be the number of agents.
        agents: the chain in its first order: the first agent starts as pioneer.
        task: queries, reward and prompts.
        name: of the run, for its folder where `config.output` is null.

    Raises:
        UserError: the agents, the data or the prompts do not fit the settings; raised before anything is written.
    """

    def __init__(self, config: Config, agents: Sequence[Agent], task: Task, name: str = "cory") -> None:
        if len(agents) != config.cory.num_agents:
            raise UserError(
                f"cory.num_agents: expected the number of agents, {len(agents)}, got {config.cory.num_agents}"
            )
        if len(task.dataset) < config.ppo.batch_size:
            raise UserError(
                f"dataset: expected at least ppo.batch_size = {config.ppo.batch_size} rows, got {len(task.dataset)}"
            )
        best, known = config.checkpoint.best, [*STATS, *MEASURED, *task.metrics]
        if best is not None and best not in known:
            raise UserError(f"checkpoint.best: expected null or one of the metrics {sorted(known)}, got {best!r}")
        self.config = config
        self.agents = list(agents)
        self.task = task
        self.name = name
        self.schedule = RoleSchedule(len(agents), config.cory.exchange_period)
        self.seconds: dict[str, float] = {}
        self.touched = False  # whether the current iteration has changed any weights
        self._check_prompt_lengths()

    def train(self) -> Run:
        """Runs all iterations that are left, then saves curves, summary and agents in the run's folder.

        Returns:
            the run: its folder (`.folder`) and what was measured (`.history`).

        Raises:
            UserError: `config.resume` names no run that can be continued; a reward is not finite.
            NotFinite: an update is not finite (`guards.on_nonfinite`).
            Interrupted: after SIGTERM or SIGINT; the state is saved.
        """
        names = [agent.name for agent in self.agents]
        main = PartialState().is_main_process
        resumed = processes.from_main(checkpoint.find(self.config, self.name, names) if main else None)
        if resumed and resumed.checkpoint:
            checkpoint.load(resumed.checkpoint, resumed.state, self.agents)
        state: dict[str, Any] = resumed.state if resumed else {"iteration": 0}
        place = (resumed.run, state["lengths"]) if resumed else ()
        with Run(self.config, self.name, names, *place) as run, Signals() as signals:
            before = state.get("before") or self._solo_samples()
            saver = Saver(run, self.agents, before, state)
            for k in range(state["iteration"], self.config.iterations):
                started = time.perf_counter()
                self.seconds = {}
                try:
                    records, samples = self.iteration(k, run.history)
                except Exception as error:
                    # As long as no agent has been updated, this is the state before iteration k.
                    where = saver.give_up(k, untouched=not self.touched)
                    if isinstance(error, (NotFinite, UserError)):
                        raise UserError(f"iteration {k + 1}: {error}\n{where}.") from None
                    print(f"\nIteration {k + 1} failed. {where}.", file=sys.stderr)
                    raise
                with self._timed("log"):
                    if self.config.sample_every and k % self.config.sample_every == 0:
                        run.add_samples(k, samples)
                    run.log(k, records)
                run.log_timings(k, records, {**self.seconds, "total": time.perf_counter() - started})
                stop = self._too_far(records)
                if stop:
                    run.say(f"KL is above guards.stop_at_kl = {self.config.guards.stop_at_kl:g}: the run ends here.")
                received = int(processes.largest(signals.received or 0))
                saver.after(k, records, last=bool(stop or received or k + 1 == self.config.iterations))
                if received:
                    run.say(f"Continue with: --resume {run.folder}")
                    raise Interrupted(128 + received)
                if stop:
                    break
            after = self._solo_samples()
            if main:
                run.finish(before, after, self.agents)
            PartialState().wait_for_everyone()
        return run

    def iteration(
        self, k: int, history: Sequence[dict[str, Any]] = ()
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Algorithm 1, lines 3 to 17, for iteration `k`.

        Args:
            history: the records so far; those of the first iteration are what collapse is judged by.

        Returns:
            one record per agent (see docs/metrics.md) and a few sample texts per role.
        """
        config = self.config
        self.touched = False
        seed_everything(config.seed, k, PartialState().process_index)
        if config.cory.reset_on_exchange and self.schedule.exchanges_before(k):
            for agent in self.agents:
                agent.restart()
        chain = [self.agents[index] for index in self.schedule.order(k)]  # Eq. 5
        batch = self.task.batch(k, config.ppo.batch_size, config.seed)
        mine = processes.share(config.ppo.batch_size)
        batch = {name: values[mine] for name, values in batch.items()}
        shortest, longest = config.sampling.min_new_tokens, config.sampling.max_new_tokens
        length = int(np.random.default_rng([config.seed, k]).integers(shortest, longest + 1))  # in all processes

        rollouts: list[Rollout] = []
        with self._timed("generate"):
            for role, agent in enumerate(chain):  # Eq. 3
                reads = rollouts[-1].completions if role and config.cory.knowledge_transfer else None
                rollouts.append(agent.respond(self._prompts(agent, role, batch, reads, length), length))
        with self._timed("reward"):
            task_rewards = self._score(batch, rollouts)
            rewards = collective(task_rewards, config.cory.other_coef)  # Eq. 4
        records, samples = [], []
        with self._timed("learn"):
            for role, agent in enumerate(chain):
                stats = self._learn(agent, role, rollouts[role], rewards[role])
                completions = processes.joined(rollouts[role].completions)
                role_rewards = torch.tensor(processes.joined(task_rewards[role].tolist()))
                task_reward = role_rewards.mean().item()
                record: dict[str, Any] = {
                    "iteration": k,
                    "agent": agent.name,
                    "role": role_name(role),
                    "task_reward": task_reward,
                    "kl": stats["kl"],
                    "combined_reward": combined_reward(task_reward, stats["kl"], config.ppo.init_kl_coef),
                    **{name: value for name, value in stats.items() if name != "kl"},
                    "distinct_2": distinct(completions, 2),
                    **{
                        name: statistics.fmean(map(measure, completions)) for name, measure in self.task.metrics.items()
                    },
                }
                start = next((r for r in history[: len(chain)] if r["role"] == role_name(role)), record)
                bound = config.guards.kl_bound
                record["flags"] = flags(record, start, role_rewards, completions, bound)
                records.append(record)
                samples += [
                    {
                        "iteration": k,
                        "agent": agent.name,
                        "role": role_name(role),
                        "query": batch["prompt"][row],
                        "completion": rollouts[role].completions[row],
                        "task_reward": task_rewards[role, row].item(),
                    }
                    for row in range(min(NUM_SAMPLES, len(task_rewards[role])))
                ]
        names = [agent.name for agent in self.agents]
        return sorted(records, key=lambda record: names.index(record["agent"])), samples

    def _learn(self, agent: Agent, role: int, rollout: Rollout, rewards: torch.Tensor) -> dict[str, float]:
        try:
            stats = agent.learn(rollout, rewards)
        except NotFinite as error:
            row = error.rows[0] if error.rows else None
            text = (
                "" if row is None else f", the first of them {rollout.prompts[row]!r} -> {rollout.completions[row]!r}"
            )
            self.touched |= agent.ppo.gradient_norms != []  # an optimizer step of this update was taken
            raise NotFinite(f"{agent.name} as {role_name(role)}: {error.what}", error.rows, text) from None
        self.touched = True
        return stats

    def _too_far(self, records: Sequence[dict[str, Any]]) -> bool:
        """Whether an agent's KL is above `guards.stop_at_kl`."""
        bound = self.config.guards.stop_at_kl
        return bound is not None and any(record["kl"] > bound for record in records)

    def _render(self, role: int, batch: dict[str, list[Any]], responses: list[str] | None) -> list[str]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        return [
            self.task.prompts.render(role, row, None if responses is None else responses[i])
            for i, row in enumerate(rows)
        ]

    def _prompts(
        self, agent: Agent, role: int, batch: dict[str, list[Any]], responses: list[str] | None, length: int
    ) -> list[str]:
        context = context_length(agent.ppo.policy)
        if responses is None or context is None:
            return self._render(role, batch, responses)
        return fit_responses(lambda texts: self._render(role, batch, texts), responses, agent.encode, context - length)

    def _score(self, batch: dict[str, list[Any]], rollouts: list[Rollout]) -> torch.Tensor:
        """(roles, batch) task rewards: all roles' responses in one call, so in one pass of a reward model."""
        columns = {name: values * len(rollouts) for name, values in batch.items()}
        completions = [completion for rollout in rollouts for completion in rollout.completions]
        rewards = score(self.task.reward, columns.pop("prompt"), completions, columns)
        return rewards.view(len(rollouts), -1)

    def _solo_samples(self) -> dict[str, list[dict[str, Any]]]:
        """What each agent alone answers to a few fixed queries, with its reward, from a random stream of its own."""
        batch = self.task.dataset[: min(NUM_SAMPLES, len(self.task.dataset))]
        samples = {}
        for agent in self.agents:
            seed_everything(self.config.seed, SOLO_SAMPLES)
            rollout = agent.respond(self._render(0, batch, None), self.config.sampling.max_new_tokens)
            rewards = self._score(batch, [rollout])[0].tolist()
            samples[agent.name] = [
                {"query": query, "completion": completion, "task_reward": reward}
                for query, completion, reward in zip(batch["prompt"], rollout.completions, rewards, strict=True)
            ]
        return samples

    def _check_prompt_lengths(self) -> None:
        """A row too long for the model's context is found now; an observer's prompt with a response of full length."""
        longest = self.config.sampling.max_new_tokens
        batch = self.task.dataset[:]
        for role, agent in enumerate(self.agents[:2]):
            observes = role > 0 and self.config.cory.knowledge_transfer
            prompts = self._render(role, batch, [""] * len(self.task.dataset) if observes else None)
            lengths = [len(ids) for ids in agent.encode(prompts)]
            check_lengths(lengths, longest * (2 if observes else 1), context_length(agent.ppo.policy), prompts)

    @contextmanager
    def _timed(self, phase: str):  # type: ignore[no-untyped-def]
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # else the time of queued work would count for the next phase
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started
