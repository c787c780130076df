"""CoryTrainer: Algorithm 1 for a list of agents. One is the baseline; two are the paper's pioneer and observer."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from datasets import Dataset

from cory.agent import Agent
from cory.chain import Chain, RoleSchedule, role_generators
from cory.checks import check_fits
from cory.config import Config
from cory.credit import assign_credit
from cory.errors import NotFinite, UserError
from cory.iteration import Iteration
from cory.learners.records import UpdateStats
from cory.parallel import distributed
from cory.parallel.devices import at_the_same_time
from cory.rewards import score_rollouts, score_team
from cory.rollout import Batch, Rollout
from cory.run.callback import Callback, RunState, load_callbacks
from cory.run.callbacks import EarlyStopping, Guards, Progress, Results, Samples
from cory.run.checkpoint import CALLBACK, fingerprint, open_run, save
from cory.run.folder import Run, resume_command
from cory.run.held_out import HeldOut, held_out_rows
from cory.run.measure import measure, sampled_texts, timed, timings
from cory.run.signals import Interrupted, Signals, keep_printing
from cory.run.trackers import Trackers
from cory.streams import Purpose, Stream
from cory.task import Task, draw_batch


class CoryTrainer:
    """Trains the agents on the task and records the run.

    Args:
        config: the settings; `config.cory.num_agents` must equal the number of agents.
        agents: the agents in their initial order; the first one starts as pioneer.
        task: queries, reward and prompts.
        name: name of the run, used for its folder if `config.output` is null.
        eval_dataset: held-out rows with the same columns as the task's dataset, for `config.eval_every`.
        callbacks: objects whose methods are called at each iteration (`Callback`); those named in `config.callbacks`
            are added.

    Attributes:
        config, agents, task: as given.
        eval_dataset: the held-out rows used for evaluation; None without `config.eval_every`.
        schedule: assigns agents to roles at each iteration.
        callbacks: all callbacks of the run, in the order of their calls.
        run: the run's folder and history; set once training starts.
        history: the lines of metrics.jsonl so far.
        state: the number of completed iterations, and what ended the run early.
        should_stop: set it to True to end the run after the current iteration.

    Raises:
        UserError: the agents, the data or the prompts do not fit the settings. No file is written in that case.
    """

    run: Run

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
        if len(agents) != config.cory.num_agents:
            raise UserError(
                f"cory.num_agents: expected {len(agents)}, the number of agents given, got {config.cory.num_agents}"
            )
        self.config = config
        self.agents = list(agents)
        self.task = task.with_roles(config.roles)
        self.name = name
        self.eval_dataset = held_out_rows(config, self.task, eval_dataset)
        self.schedule = RoleSchedule(
            num_agents=len(agents),
            period=config.cory.exchange_period,
            length=config.cory.num_roles,
        )
        held_out = HeldOut()
        self.callbacks = [
            held_out,  # adds to the records that the others read
            Samples(),
            Guards(),
            EarlyStopping(held_out),
            Progress(held_out),
            Results(),  # at the end: agents, curves, summary, report
            *callbacks,
            *load_callbacks(config.callbacks),
            Trackers(),  # last: forwards the records after every callback has added to them
        ]
        self.history: list[dict[str, Any]] = []
        self.state = RunState()
        self.should_stop = False
        self.has_started = False
        check_fits(
            config,
            self.agents,
            self.task.prompts,
            self.task.dataset,
            self.eval_dataset,
            self.task.rows_per_query(config.branches),
        )

    def train(self) -> Run:
        """Runs the remaining iterations, then saves curves, summary and agents in the run's folder (`Run.folder`).

        If `config.resume` names a finished run, that run is returned unchanged. The agents in memory are then
        untrained; the trained ones are in the run's folder. A trainer can train only once.

        Raises:
            UserError: `config.resume` names no run that can be continued, or the loss or gradient of an update is not
                finite.
            Interrupted: the process received SIGTERM, SIGINT or SIGHUP; the state is saved.
        """
        if self.has_started:
            raise UserError("train: expected a new trainer, got one that has trained already")
        self.has_started = True
        keep_printing()  # before a progress bar is created, which keeps using the stream it was given
        signal = 0
        opened = open_run(
            self.config,
            self.name,
            fingerprint(self.config, self.task, self.eval_dataset),
            self.agents,
            self.callbacks,
            self.state,
        )
        with opened as self.run, Signals() as signals:
            if self.run.finished:
                return self.run
            self.history = self.run.history
            self._notify("on_train_begin", self.run)

            for k in self._iterations_left():
                self._notify("on_iteration_begin", k)
                iteration = self.iteration(k)
                self.state.iteration = k + 1
                self._notify("on_iteration_end", iteration)  # callbacks may add to the records
                self.run.add(iteration)

                # If any process received a signal, all processes leave the loop together.
                signal = int(distributed.all_reduce_max(signals.received or 0))
                ends = self._ends() or signal > 0
                saving = self.config.checkpoint
                if ends or (saving.save_every and (k + 1) % saving.save_every == 0):
                    save(self.run, self.state, self.agents, self.callbacks, saving.keep)
                if ends:
                    break

            if signal:
                self.run.say(f"Continue with: {resume_command(self.run.folder)}")
                raise Interrupted(128 + signal)
            self._notify("on_train_end", self.run)
        return self.run

    def iteration(self, k: int) -> Iteration:
        """Runs iteration `k` (from 0): Algorithm 1, lines 3 to 17."""
        started = time.perf_counter()
        seconds: dict[str, float] = {}
        self._restart_learners(k)
        chain = self.chain(k)
        batch = draw_batch(self.task, self.config, k)

        # The pioneer answers the query; every later role also reads the response before it (Eq. 3).
        with timed(seconds, "generate"):
            rollouts = chain.roll_out(batch, self._generators(Purpose.SAMPLING, k))

        # The training rewards combine each role's task rewards and the team rewards, if any (Eq. 4; `cory.credit`).
        with timed(seconds, "reward"):
            scores = score_rollouts(self.task.reward, batch, rollouts)
            task_rewards = [score.total for score in scores]
            team_rewards = score_team(self.task.team, batch, rollouts)
            rewards = self._assign_credit(k, chain, batch, rollouts, task_rewards, team_rewards)

        iteration = Iteration(
            index=k,
            chain=list(chain.agents),
            batch=batch,
            rollouts=rollouts,
            task_rewards=task_rewards,
            rewards=rewards,
            team_rewards=team_rewards,
            rewards_by_function=[score.by_function for score in scores],
        )
        # Record samples before the update, so that their KL is measured under the policy that sampled them.
        if self.config.sample_every and k % self.config.sample_every == 0:
            with timed(seconds, "record"):
                iteration.samples = sampled_texts(
                    self.task, iteration, self.config.chains_per_query
                )

        with timed(seconds, "learn"):
            iteration.stats = self.update(k, chain.agents, rollouts, rewards)

        with timed(seconds, "record"):
            iteration.records = measure(
                iteration, self.agents, self.task, self.config, self.history
            )
        seconds["total"] = time.perf_counter() - started
        iteration.timings = timings(iteration, seconds)
        return iteration

    def chain(self, k: int) -> Chain:
        """Returns the chain of iteration `k`: the agents in their roles (Eq. 5)."""
        agents = [self.agents[index] for index in self.schedule.order(k)]
        return Chain(agents, self.task, self.config.sampling, self.config.cory.knowledge_transfer)

    def _generators(self, purpose: Purpose, k: int) -> list[torch.Generator]:
        """Returns this process's random generators for an iteration, one per role."""
        roles = self.config.cory.num_roles
        return role_generators(self.config.seed, purpose, roles, k, distributed.rank())

    def _assign_credit(
        self,
        k: int,
        chain: Chain,
        batch: Batch,
        rollouts: Sequence[Rollout],
        task_rewards: Sequence[torch.Tensor],
        team_rewards: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """Returns each role's training rewards, (batch,).

        For these, counterfactual credit samples further responses, and information credit computes log-likelihoods.
        """
        mode = self.config.cory.credit
        unread_rewards: list[torch.Tensor] = []
        information: list[torch.Tensor] = []
        if mode == "counterfactual" and len(chain.agents) > 1:
            unread = chain.roll_out_unread(batch, self._generators(Purpose.UNREAD, k))
            scores = score_rollouts(self.task.reward, batch, unread, first=1)
            unread_rewards = [score.total for score in scores]
        if mode == "information" and len(chain.agents) > 1:
            information = [chain.information(batch, rollouts, self.config.chains_per_query)]
        return assign_credit(
            task_rewards, mode, self.config.cory.weight, unread_rewards, team_rewards, information
        )

    def update(
        self,
        k: int,
        chain: Sequence[Agent],
        rollouts: Sequence[Rollout],
        rewards: Sequence[torch.Tensor],
    ) -> list[UpdateStats]:
        """Updates each agent on its own rollouts and returns the statistics by role.

        Agents with their own devices learn at the same time; otherwise agents learn one after the other.
        """
        warmup = self.config.ppo.warmup_iterations
        warmth = min(1.0, (k + 1) / warmup) if warmup else 1.0

        def learn(agent: Agent) -> dict[int, UpdateStats]:
            # An agent that holds several roles learns from all of them in one update.
            roles = [role for role, other in enumerate(chain) if other is agent]
            agent_rollouts = [rollouts[role] for role in roles]
            agent_rewards = [rewards[role] for role in roles]
            shuffle = Stream(
                seed=self.config.seed,
                purpose=Purpose.SHUFFLE,
                iteration=k,
                agent=self.agents.index(agent),
                process=distributed.rank(),
            )
            stats = agent.learn(agent_rollouts, agent_rewards, shuffle.numpy(), warmth)
            return dict(zip(roles, stats, strict=True))

        updates = [partial(learn, agent) for agent in dict.fromkeys(chain)]
        try:
            learned = (
                at_the_same_time(updates)
                if self.config.device_per_agent
                else [update() for update in updates]
            )
        except NotFinite as error:
            error.args = (f"iteration {k + 1}: {error}",)
            raise
        stats_by_role = {
            role: stats for agent_stats in learned for role, stats in agent_stats.items()
        }
        return [stats_by_role[role] for role in range(len(chain))]

    def _restart_learners(self, k: int) -> None:
        """Restarts all agents' learners after every `cory.reset_every` iterations."""
        reset_every = self.config.cory.reset_every
        if reset_every and k > 0 and k % reset_every == 0:
            for agent in self.agents:
                agent.restart()

    def _notify(self, event: str, argument: Run | Iteration | int) -> None:
        """Calls the method named `event` on all callbacks, in order."""
        for callback in self.callbacks:
            getattr(callback, event)(self, argument)

    def _iterations_left(self) -> range:
        """Returns the iterations still to run.

        The range is empty if a guard or a callback has already ended the resumed run, and only results remain to be
        written.
        """
        if self.state.stopped_by is not None:
            return range(0)
        return range(self.state.iteration, self.config.iterations)

    def _ends(self) -> bool:
        """Returns whether the run ends after this iteration, and records the cause of an early end.

        The result is the same in all processes.
        """
        done = self.state.iteration
        total = self.config.iterations
        self.should_stop = distributed.all_reduce_max(self.should_stop) > 0
        if done == total:
            self.state.stopped_by = None  # the run is complete, so nothing ended it early
            return True
        if self.should_stop:
            self.state.stopped_by = self.state.stopped_by or CALLBACK
            self.run.say(f"The run ends here, after iteration {done} of {total}.")
        return self.should_stop
