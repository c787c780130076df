"""CoryTrainer: Algorithm 1 over a list of agents. One agent is PPO; two are the paper's pioneer and observer."""

import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset

from cory.agent import Agent
from cory.callbacks import Callback
from cory.config import Config, RewardError, UserError, expect
from cory.credit import assign_credit
from cory.learners.optimizer import learning_rate_factor
from cory.learners.stats import UpdateStats
from cory.metrics import combined_reward, distinct, in_training
from cory.policies.rollout import Rollout
from cory.policies.sampling import check_lengths, seed_everything
from cory.prompts import fit_responses, query_text, text_of
from cory.report import NAME as REPORT
from cory.report import write_run_report
from cory.rewards import score
from cory.roles import RoleSchedule, role_name
from cory.run import checkpoint, processes
from cory.run.checkpoint import CheckpointManager, RunState
from cory.run.clock import timed
from cory.run.folder import NotSaved, Run, run_record
from cory.run.guards import Interrupted, NotFinite, Signals, flags
from cory.run.identity import policy_models
from cory.run.resume import Resumed, find_resumed, how_to_continue
from cory.run.streams import Purpose, generator
from cory.task import Task

MEASURED = ("task_reward", "combined_reward", "distinct_2")  # metrics besides the agents' own and the task's
NUM_SAMPLES = 4  # queries whose responses are shown before and after training, and in samples.jsonl
HELD_OUT = 2**32 - 2  # in place of an iteration, the key of the random stream of held-out responses
FIXED_SAMPLES = 2**32 - 1  # in place of an iteration, the key of the random stream of the responses before and after
Records = list[dict[str, Any]]


class Batch(NamedTuple):
    """An iteration's queries: the columns of the task's data, and the maximum length of a response."""

    columns: dict[str, list[Any]]
    max_new_tokens: int


class CoryTrainer:
    """Trains the agents on the task and records the run.

    Args:
        config: the settings; `config.cory.num_agents` must be the number of agents.
        agents: in their first order: the first one starts as pioneer.
        task: queries, reward and prompts.
        name: of the run, for its folder where `config.output` is null.
        eval_dataset: held-out rows with the columns of the task's, for `config.eval_every`.
        callbacks: see `Callback`.

    Raises:
        UserError: the agents, the data or the prompts do not fit the settings; raised before anything is written.
    """

    def __init__(
        self,
        config: Config,
        agents: Sequence[Agent],
        task: Task,
        name: str = "cory",
        eval_dataset: Dataset | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        config.check()
        count, wanted, rows = len(agents), config.cory.num_agents, len(task.dataset)
        size = config.ppo.batch_size // config.group_size
        held_out = ["eval_task_reward"] if config.eval_every else []
        absent = {"value_loss": config.algorithm != "ppo", "engine_difference": config.sampling.engine == "native"}
        own = [field.name for field in fields(UpdateStats) if not absent.get(field.name)]
        known, best = sorted([*own, *MEASURED, *task.metrics, *held_out]), config.checkpoint.best
        expect(count == wanted, "cory.num_agents", f"the number of agents, {count}", wanted)
        needed = f"at least ppo.batch_size / group_size = {size} rows" if size < config.ppo.batch_size else ""
        expect(rows >= size, "dataset", needed or f"at least ppo.batch_size = {size} rows", rows)
        expect(best is None or best in known, "checkpoint.best", f"null or one of the metrics {known}", best)
        if config.eval_every:
            given = sorted(eval_dataset.column_names) if eval_dataset is not None else None
            columns = sorted(task.dataset.column_names)
            expect(given == columns, "eval_every", f"an eval_dataset with the columns {columns}", given)
            assert eval_dataset is not None
            rows = processes.even(min(config.eval_queries, len(eval_dataset)))
            expect(rows > 0, "eval_every", "held-out rows, at least one for each process", rows)
            eval_dataset = eval_dataset.select(range(rows))
            replace(task, dataset=eval_dataset)  # checks its prompts
        self.config, self.agents, self.task, self.name = config, list(agents), task, name
        self.eval_dataset, self.callbacks = eval_dataset, list(callbacks)
        method = config.cory
        self.schedule = RoleSchedule(count, method.exchange_period, method.roles, method.exchange, config.seed)
        self.seconds: dict[str, float] = {}
        self._check_prompt_lengths()

    def train(self) -> Run:
        """Runs all iterations that are left, then saves curves, summary and agents in the run's `.folder`.

        Raises:
            UserError: `config.resume` names no run that can be continued; a reward is not finite.
            NotFinite: an update is not finite (`guards.on_nonfinite`).
            Interrupted: after SIGTERM, SIGINT or SIGHUP; the state is saved.
        """
        with ExitStack() as locks:  # of the run's folder, held until all is written
            return self._train(locks)

    def _train(self, locks: ExitStack) -> Run:
        names = [agent.name for agent in self.agents]
        record = run_record(self.config, self.fingerprint())
        found = find_resumed(self.config, record, self.name, names, locks) if processes.is_main() else None
        resumed: Resumed | None = processes.broadcast(found)
        state = RunState()
        continued: dict[str, Any] = {"locks": locks}
        if resumed is not None:
            if resumed.finished:
                run = Run(self.config, self.name, names, record, resumed.run, finished=True)
                if processes.is_main() and not (run.folder / REPORT).exists():  # killed after everything else was saved
                    write_run_report(run.folder, self.config.method())
                return run
            state = resumed.state
            record["changes"] = resumed.changes
            if resumed.checkpoint is not None:
                checkpoint.load(resumed.checkpoint, state, self.agents)
            continued |= {"folder": resumed.run, "lengths": state.lengths, "outdated": resumed.outdated}
        state.config = record
        with Run(self.config, self.name, names, record, **continued) as run, Signals() as signals:
            held_out = self._held_out_queries()
            if held_out:
                run.say(
                    f"eval_every: {held_out['queries']} held-out queries ({held_out['distinct']} distinct), "
                    f"{100 * held_out['in_training']:.3g} % of them also in training"
                )
            checkpoints = CheckpointManager(run, self.agents, self.config.checkpoint, state)
            if not state.before:
                try:
                    state.before = self._fixed_samples()
                except Exception as error:
                    self._fail("samples before training", error, checkpoints)
            for callback in self.callbacks:
                callback.on_train_begin(self, run)
            for k in range(state.iteration, self.config.iterations):
                started = time.perf_counter()
                steps = [agent.optimizer_steps for agent in self.agents]
                try:
                    processes.agreed(partial(self._announce, k))
                    records, samples = self.iteration(k, run.history)
                    if self.config.eval_every and (k + 1) % self.config.eval_every == 0:
                        self.held_out(k, records)
                except Exception as error:
                    checkpoints.save_after(error, steps == [agent.optimizer_steps for agent in self.agents])
                    self._fail(f"iteration {k + 1}", error, checkpoints)
                with timed(self.seconds, "log"):
                    run.add_samples(k, samples)
                    run.log(k, records)
                run.log_timings(k, records, {**self.seconds, "total": time.perf_counter() - started})
                bound = self.config.guards.stop_at_kl
                too_far = bound is not None and any(one["kl"] > bound for one in records)
                if too_far:
                    run.say(f"KL is above guards.stop_at_kl = {bound:g}: the run ends here.")
                ended = [callback.on_iteration_end(self, k, records) for callback in self.callbacks]
                if any(ended):
                    run.say("A callback ends the run here.")
                too_far = bool(processes.all_reduce_max(too_far or any(ended)))
                received = int(processes.all_reduce_max(signals.received or 0))
                state.iteration = k + 1
                checkpoints.after(records, k + 1 == self.config.iterations, stopped=bool(too_far or received))
                if received:
                    run.interrupted()
                    raise Interrupted(128 + received)
                if too_far:
                    break
            try:
                run.finish(state.before, self._fixed_samples(), self.agents, held_out)
            except NotSaved as error:
                self._fail("the end of the run", error, checkpoints)
            if processes.is_main():
                write_run_report(run.folder, self.config.method())
            for callback in self.callbacks:
                callback.on_train_end(self, run)
        return run

    def _fail(self, where: str, error: Exception, checkpoints: CheckpointManager) -> NoReturn:
        """Raises the error that ends the run, or prints before it, what is saved and how to continue."""
        of_reward = isinstance(error, RewardError) or getattr(error, "of_reward", False)
        done, newest = checkpoints.state.iteration, checkpoints.newest()
        advice = how_to_continue(checkpoints.run.folder, newest, self.config, done, of_reward)
        if isinstance(error, (NotFinite, UserError)):
            raise UserError(f"{where}: {error}\n{advice}") from None
        print(f"\n{where.capitalize()} failed. {advice}", file=sys.stderr)
        raise error

    def fingerprint(self) -> dict[str, Any]:
        """What the settings do not capture: reward, prompts and data of the task, and the models behind their names."""
        models = policy_models(self.config) | self.task.models()
        return {**self.task.fingerprint(), "models": models}

    def iteration(self, k: int, history: Sequence[dict[str, Any]] = ()) -> tuple[Records, Records]:
        """Algorithm 1, lines 3 to 17, for iteration `k`: a record per agent, and, where they are due, samples.

        Both: docs/metrics.md. `history`: the records so far; collapse is judged against those of the first iteration.
        """
        self.seconds = {}
        chain, batch = self._begin(k)
        with timed(self.seconds, "generate"):
            rollouts = self.roll_out(chain, batch)
        with timed(self.seconds, "reward"):
            task_rewards = self.score(batch, rollouts)
            rewards = self.assign_credit(chain, batch, task_rewards)
        with timed(self.seconds, "record"):  # before the update, after which log-ratios are others
            every, group, samples = self.config.sample_every, self.config.group_size, []
            if every and k % every == 0:
                samples = self._sampled(chain, batch, rollouts, task_rewards, slice(0, NUM_SAMPLES * group, group))
        with timed(self.seconds, "learn"):
            rate = learning_rate_factor(self.config.ppo.schedule, self.config.ppo.warmup, self.config.iterations, k)
            stats = processes.merged(processes.updated(lambda: self.update(k, chain, rollouts, rewards, rate)))
        with timed(self.seconds, "record"):
            return self.record(k, chain, rollouts, task_rewards, stats, history), samples

    def roll_out(self, chain: Sequence[Agent], batch: Batch) -> list[Rollout]:
        """Each role's responses; from the second role on, an agent reads the response of the role before (Eq. 3)."""
        rollouts: list[Rollout] = []
        for role, agent in enumerate(chain):
            reads = rollouts[-1].completions if role and self.config.cory.knowledge_transfer else None
            prompts = self._prompts(agent, role, batch.columns, reads, batch.max_new_tokens)
            rollout = agent.respond(prompts, batch.max_new_tokens)
            rollout.role = role_name(role)
            rollouts.append(rollout)
        return rollouts

    def score(self, batch: Batch, rollouts: Sequence[Rollout], first: int = 0) -> list[torch.Tensor]:
        """Each role's (batch,) task rewards: all roles' responses in one call, so in one pass of a reward model.

        The reward function sees the dataset's columns and, as `role`, the role of each response, counted from `first`.
        """
        columns = {name: values * len(rollouts) for name, values in batch.columns.items()}
        names = [role_name(first + index) for index in range(len(rollouts))]
        columns["role"] = [name for name, rollout in zip(names, rollouts, strict=True) for _ in rollout.completions]
        completions = [completion for rollout in rollouts for completion in rollout.completions]
        prompts = columns.pop("prompt")
        rewards = processes.computed_by(0, lambda: score(self.task.reward, prompts, completions, columns))
        return list(rewards.chunk(len(rollouts)))

    def assign_credit(
        self, chain: Sequence[Agent], batch: Batch, task_rewards: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Each role's (batch,) training rewards (Eq. 4, or another mode of `cory.credit`)."""
        unread, settings = None, self.config.cory
        if settings.credit == "counterfactual" and len(chain) > 1:
            nothing = [""] * len(task_rewards[0])
            prompts = [self._prompts(agent, 1, batch.columns, nothing, batch.max_new_tokens) for agent in chain[1:]]
            answers = [a.respond(p, batch.max_new_tokens) for a, p in zip(chain[1:], prompts, strict=True)]
            unread = [torch.zeros_like(task_rewards[0]), *self.score(batch, answers, first=1)]
        return assign_credit(task_rewards, settings.credit, settings.weight, unread)

    def update(
        self,
        k: int,
        chain: Sequence[Agent],
        rollouts: Sequence[Rollout],
        rewards: Sequence[torch.Tensor],
        rate: float = 1.0,
    ) -> list[UpdateStats | None]:
        """Each agent learns from its own rollouts, one agent after the other; returns the statistics by role.

        None stands for a role whose agent lives in another process.
        """
        stats: dict[int, UpdateStats | None] = {}
        for agent in dict.fromkeys(chain):
            roles = [role for role, other in enumerate(chain) if other is agent]
            shuffle = generator(
                seed=self.config.seed,
                iteration=k,
                purpose=Purpose.SHUFFLE,
                agent=self.agents.index(agent),
                process=PartialState().process_index,
            )
            learned = agent.learn([rollouts[role] for role in roles], [rewards[role] for role in roles], shuffle, rate)
            stats |= zip(roles, learned, strict=True)
        return [stats[role] for role in range(len(chain))]

    def record(
        self,
        k: int,
        chain: Sequence[Agent],
        rollouts: Sequence[Rollout],
        task_rewards: Sequence[torch.Tensor],
        stats: Sequence[UpdateStats],
        history: Sequence[dict[str, Any]],
    ) -> Records:
        """The results of the iteration, over all processes: a record per agent, in their order."""
        eta, kl_bound = self.config.ppo.init_kl_coef, self.config.guards.kl_bound
        records = []
        for role, agent in enumerate(chain):
            completions = processes.gather(rollouts[role].completions)
            role_rewards = torch.tensor(processes.gather(task_rewards[role].tolist()))
            task_reward, kl, name = role_rewards.mean().item(), stats[role].kl, role_name(role)
            measured: dict[str, Any] = {
                "iteration": k,
                "agent": agent.name,
                "role": name,
                "task_reward": task_reward,
                "kl": kl,
                "combined_reward": combined_reward(task_reward, kl, eta),
                **{key: value for key, value in stats[role].metrics().items() if key != "kl"},
                "distinct_2": distinct(completions, 2),
                **{key: statistics.fmean(map(metric, completions)) for key, metric in self.task.metrics.items()},
            }
            start = next((r for r in history[: len(chain)] if r["role"] == name), measured)
            measured["flags"] = flags(measured, start, role_rewards, completions, kl_bound)
            records.append(measured)
        return sorted(records, key=lambda one: [a.name for a in self.agents].index(one["agent"]))

    def held_out(self, k: int, records: Records) -> None:
        """Adds `eval_task_reward` to the records: the mean task reward of each role's responses to held-out queries.

        The chain of iteration `k` answers the first `config.eval_queries` rows, from the same random stream each time.
        """
        with timed(self.seconds, "evaluate"):
            assert self.eval_dataset is not None
            chain = [self.agents[index] for index in self.schedule.order(k)]
            rank, world = PartialState().process_index, processes.world_size()
            rows, size = range(len(self.eval_dataset))[rank::world], self.config.ppo.batch_size // world
            seed_everything(self.config.seed, HELD_OUT, rank)
            earned: list[list[float]] = [[] for _ in chain]
            for start in range(0, len(rows), size):
                columns = self.eval_dataset[list(rows[start : start + size])]
                batch = Batch(columns, self.config.sampling.max_new_tokens)
                for role, rewards in enumerate(self.score(batch, self.roll_out(chain, batch))):
                    earned[role] += rewards.tolist()
            for role, values in enumerate(earned):
                (record,) = (one for one in records if one["role"] == role_name(role))
                record["eval_task_reward"] = statistics.fmean(processes.gather(values))

    def _announce(self, k: int) -> None:
        """Tells the callbacks that iteration `k` begins."""
        for callback in self.callbacks:
            callback.on_iteration_begin(self, k)

    def _held_out_queries(self) -> dict[str, float]:
        """How many held-out queries there are, how many differ, and the share of them in training; empty without."""
        if self.eval_dataset is None or not self.config.eval_every:
            return {}
        held_out, trained = (
            [query_text(prompt) for prompt in dataset["prompt"]] for dataset in (self.eval_dataset, self.task.dataset)
        )
        return {
            "queries": len(held_out),
            "distinct": len(set(held_out)),
            "in_training": in_training(held_out, trained),
        }

    def _begin(self, k: int) -> tuple[list[Agent], Batch]:
        """The chain of iteration `k` (Eq. 5) and this process's part of its batch; random streams start anew."""
        config = self.config
        seed_everything(config.seed, k, PartialState().process_index)
        if config.cory.reset_on_exchange and self.schedule.exchanges_before(k):
            for agent in self.agents:
                agent.restart()
        chain = [self.agents[index] for index in self.schedule.order(k)]
        mine = processes.shard(config.ppo.batch_size)
        columns = self.task.batch(k, config.ppo.batch_size // config.group_size, config.seed)
        columns = {name: [x for x in values for _ in range(config.group_size)] for name, values in columns.items()}
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

    def _fixed_samples(self) -> dict[str, Records]:
        """Responses to a few fixed queries: each agent's, solo, and as `chain` those of the run's first chain."""
        longest = self.config.sampling.max_new_tokens
        batch = Batch(self.task.dataset[: min(NUM_SAMPLES, len(self.task.dataset))], longest)
        chains = {agent.name: [agent] for agent in self.agents}
        if self.config.cory.roles > 1:
            chains["chain"] = [self.agents[index] for index in self.schedule.order(0)]
        samples = {}
        for name, chain in chains.items():
            seed_everything(self.config.seed, FIXED_SAMPLES)
            rollouts = self.roll_out(chain, batch)
            samples[name] = self._sampled(chain, batch, rollouts, self.score(batch, rollouts), slice(None))
        return samples

    def _sampled(
        self,
        chain: Sequence[Agent],
        batch: Batch,
        rollouts: Sequence[Rollout],
        task_rewards: Sequence[torch.Tensor],
        rows: slice,
    ) -> Records:
        """By role, a record (docs/metrics.md, "Samples") of each response in `rows`."""
        queries, samples = list(map(text_of, batch.columns["prompt"][rows])), []
        for role, agent in enumerate(chain):
            part, who = rollouts[role].rows(rows), {"agent": agent.name, "role": role_name(role)}
            each = zip(queries, part.prompts, part.completions, task_rewards[role][rows].tolist(), strict=True)
            samples += [
                {**who, "query": query, "prompt": prompt, "completion": completion, "task_reward": reward, **more}
                for (query, prompt, completion, reward), more in zip(each, agent.explain(part), strict=True)
            ]
        return samples

    def _check_prompt_lengths(self) -> None:
        """Fails early if a prompt plus the longest response exceeds the context; an observer also reads a response."""
        alike = {(id(agent.tokenizer), agent.context_length): agent for agent in self.agents}  # agents of one model
        asked = [self.task.dataset, *([self.eval_dataset] if self.eval_dataset else [])]
        roles = range(min(2, self.config.cory.roles))
        for dataset, role, agent in itertools.product(asked, roles, alike.values()):
            columns, rows = dataset[:], len(dataset)
            observes = role > 0 and self.config.cory.knowledge_transfer
            prompts = self.task.render(role, columns, [""] * rows if observes else None)
            longest = self.config.sampling.max_new_tokens * (2 if observes else 1)
            try:
                check_lengths([len(ids) for ids in agent.encode(prompts)], longest, agent.context_length, prompts)
            except UserError as error:
                reads = f", which also reads a response of up to {longest // 2} tokens" if observes else ""
                raise UserError(f"{agent.name} as {role_name(role)}{reads}: {error}") from None
