"""CoryTrainer: Algorithm 1 over a list of agents. One agent is PPO; two are the paper's pioneer and observer."""

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import PartialState

from cory.agent import STATS, Agent, Rollout
from cory.config import Config, UserError, expect
from cory.metrics import combined_reward, distinct
from cory.policies.sampling import check_lengths, seed_everything
from cory.prompts import fit_responses
from cory.rewards import collective, score
from cory.roles import RoleSchedule, role_name
from cory.run import checkpoint, processes
from cory.run.checkpoint import CheckpointManager, RunState, find_resumed
from cory.run.folder import Run, run_record
from cory.run.guards import Interrupted, NotFinite, Signals, flags
from cory.task import Task

MEASURED = ("task_reward", "combined_reward", "distinct_2")  # metrics besides the agents' own and the task's
NUM_SAMPLES = 4  # queries whose responses are shown before and after training, and in samples.jsonl
SOLO_SAMPLES = 2**32 - 1  # in place of an iteration, the key of the random stream of those responses
Records = list[dict[str, Any]]


class Batch(NamedTuple):
    """An iteration's queries: the columns of the task's data, and the most tokens of a response."""

    columns: dict[str, list[Any]]
    max_new_tokens: int


class CoryTrainer:
    """Trains the agents on the task and records the run.

    Args:
        config: the settings; `config.cory.num_agents` must be the number of agents.
        agents: the chain in its first order: the first agent starts as pioneer.
        task: queries, reward and prompts. name: of the run, for its folder where `config.output` is null.

    Raises:
        UserError: the agents, the data or the prompts do not fit the settings; raised before anything is written.
    """

    def __init__(self, config: Config, agents: Sequence[Agent], task: Task, name: str = "cory") -> None:
        config.check()
        count, wanted, rows, size = len(agents), config.cory.num_agents, len(task.dataset), config.ppo.batch_size
        known, best = sorted([*STATS, *MEASURED, *task.metrics]), config.checkpoint.best
        expect(count == wanted, "cory.num_agents", f"the number of agents, {count}", wanted)
        expect(rows >= size, "dataset", f"at least ppo.batch_size = {size} rows", rows)
        expect(best is None or best in known, "checkpoint.best", f"null or one of the metrics {known}", best)
        self.config, self.agents, self.task, self.name = config, list(agents), task, name
        self.schedule = RoleSchedule(len(agents), config.cory.exchange_period)
        self.seconds: dict[str, float] = {}
        self._check_prompt_lengths()

    def train(self) -> Run:
        """Runs all iterations that are left, then saves curves, summary and agents in the run's `.folder`.

        Raises:
            UserError: `config.resume` names no run that can be continued; a reward is not finite.
            NotFinite: an update is not finite (`guards.on_nonfinite`).
            Interrupted: after SIGTERM or SIGINT; the state is saved.
        """
        names = [agent.name for agent in self.agents]
        made_of = run_record(self.config, self.task.fingerprint())
        main = PartialState().is_main_process
        resumed = processes.broadcast(find_resumed(self.config, made_of, self.name, names) if main else None)
        if resumed and resumed.checkpoint:
            checkpoint.load(resumed.checkpoint, resumed.state, self.agents)
        state: RunState = resumed.state if resumed else RunState()
        state.config = made_of
        place = (resumed.run, state.lengths) if resumed else ()
        with Run(self.config, self.name, names, made_of, *place) as run, Signals() as signals:
            state.before = state.before or self._solo_samples()
            checkpoints = CheckpointManager(run, self.agents, self.config.checkpoint, state)
            for k in range(state.iteration, self.config.iterations):
                started = time.perf_counter()
                steps = [agent.optimizer_steps for agent in self.agents]
                try:
                    records, samples = self.iteration(k, run.history)
                except Exception as error:
                    if steps == [agent.optimizer_steps for agent in self.agents]:
                        checkpoints.save()  # the agents are as they were before iteration k
                    there = checkpoints.newest()
                    where = f"The last good state is {there}" if there else "No state is saved"
                    if isinstance(error, (NotFinite, UserError)):
                        raise UserError(f"iteration {k + 1}: {error}\n{where}.") from None
                    print(f"\nIteration {k + 1} failed. {where}.", file=sys.stderr)
                    raise
                with self._timed("log"):
                    if self.config.sample_every and k % self.config.sample_every == 0:
                        run.add_samples(k, samples)
                    run.log(k, records)
                run.log_timings(k, records, {**self.seconds, "total": time.perf_counter() - started})
                bound = self.config.guards.stop_at_kl
                too_far = bound is not None and any(one["kl"] > bound for one in records)
                if too_far:
                    run.say(f"KL is above guards.stop_at_kl = {bound:g}: the run ends here.")
                received = int(processes.all_reduce_max(signals.received or 0))
                state.iteration = k + 1
                checkpoints.after(records, k + 1 == self.config.iterations, stopped=bool(too_far or received))
                if received:
                    run.interrupted()
                    raise Interrupted(128 + received)
                if too_far:
                    break
            after = self._solo_samples()
            if main:
                run.finish(state.before, after, self.agents)
            PartialState().wait_for_everyone()
        return run

    def iteration(self, k: int, history: Sequence[dict[str, Any]] = ()) -> tuple[Records, Records]:
        """Algorithm 1, lines 3 to 17, for iteration `k`: a record per agent (docs/metrics.md), a few texts per role.

        `history`: the records so far; those of the first iteration are what collapse is judged by.
        """
        self.seconds = {}
        chain, batch = self._begin(k)
        with self._timed("generate"):
            rollouts = self.roll_out(chain, batch)
        with self._timed("reward"):
            task_rewards = self.score(batch, rollouts)
            rewards = self.assign_credit(task_rewards)
        with self._timed("learn"):
            stats = self.update(chain, rollouts, rewards)
        with self._timed("record"):
            return self.record(k, chain, batch, rollouts, task_rewards, stats, history)

    def roll_out(self, chain: Sequence[Agent], batch: Batch) -> list[Rollout]:
        """Each role's responses; from the second role on, an agent reads the response of the role before (Eq. 3)."""
        rollouts: list[Rollout] = []
        for role, agent in enumerate(chain):
            reads = rollouts[-1].completions if role and self.config.cory.knowledge_transfer else None
            prompts = self._prompts(agent, role, batch.columns, reads, batch.max_new_tokens)
            rollouts.append(agent.respond(prompts, batch.max_new_tokens))
        return rollouts

    def score(self, batch: Batch, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """(roles, batch) task rewards: all roles' responses in one call, so in one pass of a reward model."""
        columns = {name: values * len(rollouts) for name, values in batch.columns.items()}
        completions = [completion for rollout in rollouts for completion in rollout.completions]
        rewards = score(self.task.reward, columns.pop("prompt"), completions, columns)
        return rewards.view(len(rollouts), -1)

    def assign_credit(self, task_rewards: torch.Tensor) -> torch.Tensor:
        """(roles, batch) training rewards (Eq. 4)."""
        return collective(task_rewards, self.config.cory.other_coef)

    def update(
        self, chain: Sequence[Agent], rollouts: Sequence[Rollout], rewards: torch.Tensor
    ) -> list[dict[str, float]]:
        """Each agent learns from its own rollout, one after the other; returns their statistics, by role."""
        stats = []
        for role, (agent, rollout) in enumerate(zip(chain, rollouts, strict=True)):
            try:
                stats.append(agent.learn(rollout, rewards[role]))
            except NotFinite as error:
                where = [f"{rollout.prompts[row]!r} -> {rollout.completions[row]!r}" for row in error.rows[:1]]
                text = "".join(f", the first of them {one}" for one in where)
                raise NotFinite(f"{agent.name} as {role_name(role)}: {error.what}", error.rows, text) from None
        return stats

    def record(
        self,
        k: int,
        chain: Sequence[Agent],
        batch: Batch,
        rollouts: Sequence[Rollout],
        task_rewards: torch.Tensor,
        stats: Sequence[dict[str, float]],
        history: Sequence[dict[str, Any]],
    ) -> tuple[Records, Records]:
        """What the iteration came to, in all processes: a record per agent, in their order, and sample texts."""
        eta, kl_bound = self.config.ppo.init_kl_coef, self.config.guards.kl_bound
        records, samples = [], []
        for role, agent in enumerate(chain):
            completions = processes.gather(rollouts[role].completions)
            role_rewards = torch.tensor(processes.gather(task_rewards[role].tolist()))
            task_reward, kl, name = role_rewards.mean().item(), stats[role]["kl"], role_name(role)
            who = {"iteration": k, "agent": agent.name, "role": name}
            measured: dict[str, Any] = {
                **who,
                "task_reward": task_reward,
                "kl": kl,
                "combined_reward": combined_reward(task_reward, kl, eta),
                **{key: value for key, value in stats[role].items() if key != "kl"},
                "distinct_2": distinct(completions, 2),
                **{key: statistics.fmean(map(metric, completions)) for key, metric in self.task.metrics.items()},
            }
            start = next((r for r in history[: len(chain)] if r["role"] == name), measured)
            measured["flags"] = flags(measured, start, role_rewards, completions, kl_bound)
            records.append(measured)
            shown = zip(batch.columns["prompt"], rollouts[role].completions, task_rewards[role].tolist(), strict=True)
            samples += [
                {**who, "query": query, "completion": completion, "task_reward": reward}
                for query, completion, reward in list(shown)[:NUM_SAMPLES]
            ]
        return sorted(records, key=lambda one: [a.name for a in self.agents].index(one["agent"])), samples

    def _begin(self, k: int) -> tuple[list[Agent], Batch]:
        """The chain of iteration `k` (Eq. 5) and this process's part of its batch; random streams start anew."""
        config = self.config
        seed_everything(config.seed, k, PartialState().process_index)
        if config.cory.reset_on_exchange and self.schedule.exchanges_before(k):
            for agent in self.agents:
                agent.restart()
        chain = [self.agents[index] for index in self.schedule.order(k)]
        mine = processes.shard(config.ppo.batch_size)
        columns = self.task.batch(k, config.ppo.batch_size, config.seed)
        shortest, longest = config.sampling.min_new_tokens, config.sampling.max_new_tokens
        length = int(np.random.default_rng([config.seed, k]).integers(shortest, longest + 1))  # in all processes
        return chain, Batch({name: values[mine] for name, values in columns.items()}, length)

    def _prompts(
        self, agent: Agent, role: int, columns: dict[str, list[Any]], responses: list[str] | None, length: int
    ) -> list[str]:
        if responses is None:
            return self.task.render(role, columns)
        return fit_responses(
            lambda texts: self.task.render(role, columns, texts), responses, agent.encode, agent.context_length, length
        )

    def _solo_samples(self) -> dict[str, Records]:
        """What each agent alone answers to a few fixed queries, with its reward, from a random stream of its own."""
        longest = self.config.sampling.max_new_tokens
        batch = Batch(self.task.dataset[: min(NUM_SAMPLES, len(self.task.dataset))], longest)
        samples = {}
        for agent in self.agents:
            seed_everything(self.config.seed, SOLO_SAMPLES)
            rollout = agent.respond(self.task.render(0, batch.columns), longest)
            rewards = self.score(batch, [rollout])[0].tolist()
            samples[agent.name] = [
                {"query": query, "completion": completion, "task_reward": reward}
                for query, completion, reward in zip(batch.columns["prompt"], rollout.completions, rewards, strict=True)
            ]
        return samples

    def _check_prompt_lengths(self) -> None:
        """Fails early where a prompt and the longest response exceed the context; an observer reads a response, too."""
        columns, rows = self.task.dataset[:], len(self.task.dataset)
        for role, agent in enumerate(self.agents[:2]):
            observes = role > 0 and self.config.cory.knowledge_transfer
            prompts = self.task.render(role, columns, [""] * rows if observes else None)
            longest = self.config.sampling.max_new_tokens * (2 if observes else 1)
            check_lengths([len(ids) for ids in agent.encode(prompts)], longest, agent.context_length, prompts)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # else the time of queued work would count for the next phase
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started
