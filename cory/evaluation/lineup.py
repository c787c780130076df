"""What is evaluated: every model alone, the agents of a run in chains, one agent as its own observer.

* solo: the model answers the query.
* joint, `B after A`: B, as observer, reads A's response to the same query and answers.
* compute-matched, `A after itself`: the agent of a PPO run, or the base, answers twice, the second time as its own
  observer, so that a chain of two agents is compared with two calls of one; in longer chains as often as they have
  roles. The agent of a run whose only role is none of the first run's chain answers once.

KL is to the base model under the same prompt: the query for solo rows, the observer's prompt for the others. Each model
is loaded with its run's settings (chat template, quantization, remote code) and reads its run's prompts.
"""

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cory.config import Config, ModelConfig, RoleConfig, SamplingConfig, changed
from cory.errors import UserError
from cory.evaluation.agents import Weights, agent_folders, agent_weights, run_agents
from cory.evaluation.settings import EvaluationConfig
from cory.identity import check_models, policy_models
from cory.models.load import vocabulary
from cory.roles import RolePrompts
from cory.run.settings import read_settings
from cory.task import Task
from cory.task_kinds import find_kind, run_config

KL_COEF = 0.3  # eta of the combined reward where no run says it


@dataclass(frozen=True)
class Row:
    """A model that answers: the query alone, or after it has read what the chain of another row has answered.

    Args:
        name: of the row.
        weights: how the model is loaded.
        task: with the prompts that it reads.
        reads: the row of the role before; None: it is the first.
    """

    name: str
    weights: Weights
    task: Task
    reads: "Row | None" = None

    @property
    def earlier(self) -> list["Row"]:
        """The rows of the roles before, the pioneer's first."""
        return [*self.reads.earlier, self.reads] if self.reads else []

    @property
    def role(self) -> int:
        """The number of its role; 0 is the pioneer's."""
        return len(self.earlier)

    def after(self, reads: "Row", name: str) -> "Row":
        """The row of the same model as the next role of a chain."""
        return replace(self, name=name, reads=reads)


@dataclass
class Lineup:
    """The rows of an evaluation, and what all of them have in common.

    Args:
        runs: the settings of the runs, by folder.
        solo: the rows that read nothing, by name; `base` is the first.
        chains: those of chains, by name, each after the one that it reads.
        sampling: of all rows.
        kl_coef: eta of the combined reward.
        longest: the calls of the longest chain, at least two.
        only: the name of the run whose rows are made; None: all rows.
        date: that of the first run, which chat templates write that write the date; None: today's.
    """

    runs: dict[Path, Config]
    sampling: SamplingConfig
    kl_coef: float
    longest: int
    only: str | None = None
    date: str | None = None
    solo: dict[str, Row] = field(default_factory=dict)
    chains: dict[str, Row] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """Those that are made, each after the one that it reads."""
        rows = [*self.solo.values(), *self.chains.values()]
        return [row for row in rows if self.only is None or row.name.startswith(f"{self.only}/")]

    def add(self, row: Row) -> Row:
        """Adds a row, which it returns."""
        (self.chains if row.reads else self.solo)[row.name] = row
        return row

    @property
    def team_sizes(self) -> set[int]:
        """How many responses a chain has that earns a team reward: as many as a run has roles, or as the longest chain.

        The second so that a run of one role, which answers after itself, earns it as a run of that chain does, whether
        or not such a run is evaluated in the same call.
        """
        return {self.longest, *(config.cory.num_roles for config in self.runs.values())}


def line_up(task: Task, settings: EvaluationConfig) -> Lineup:
    """The rows that the settings name. Warns of a run that was trained on another reward.

    Raises a UserError: a run cannot be read, or was trained with another model of the same name; or `settings.only` is
    none of the runs.
    """
    runs = {
        Path(name): run_config(Path(name)) for name in settings.models if run_agents(Path(name))
    }
    if len({run.name for run in runs}) != len(runs):
        raise UserError(
            f"models: expected runs with folders of different names, which name the rows, got {list(map(str, runs))}"
        )
    if settings.only is not None and Path(settings.only) not in runs:
        raise UserError(
            f"only: expected one of the runs {list(map(str, runs))}, got {settings.only!r}"
        )
    if runs:
        first_run, config = next(iter(runs.items()))
        model = config.of_agent(0).model
        kl_coef = config.ppo.init_kl_coef
        base_task = with_prompts_of(first_run, task, settings.task)
        date = read_settings(first_run).get("date")
    else:
        config = find_kind(task.kind).config() if task.kind else Config()
        model = ModelConfig(settings.models[0])
        kl_coef = KL_COEF
        base_task = task
        date = None
    if settings.base is not None:
        model = replace(model, name=settings.base, revision=None)
    base = changed(replace(model, name=config.resolve(model.name)), settings.model)

    lineup = Lineup(
        runs=runs,
        sampling=config.sampling.after_training(settings.sampling),
        kl_coef=kl_coef if settings.kl_coef is None else settings.kl_coef,
        longest=max(
            2, len(task.prompts.roles), *(config.cory.num_roles for config in runs.values())
        ),
        only=None if settings.only is None else Path(settings.only).name,
        date=date,
    )
    row = lineup.add(Row("base", Weights(base, None, base), base_task))
    if runs:
        _add_after_itself(lineup, row)
    for name in settings.models:
        run = Path(name)
        if run in runs:
            _add_run(lineup, run, task, settings)
        elif config.resolve(name) != base.name:
            model = replace(base, name=config.resolve(name), revision=None)
            if name in lineup.solo and lineup.solo[name].weights.model != model:
                raise UserError(
                    f"models: expected a name that no other row has, got {name!r}; name it by a longer path"
                )
            lineup.add(Row(name, Weights(model, None, base), task))
    return lineup


def check_vocabularies(lineup: Lineup) -> None:
    """Raises a UserError if a model's tokens are not those of the base to which its KL is measured.

    Ids that only one of them has may be any.
    """
    vocabulary_of: dict[str, dict[int, str]] = {}
    for row in lineup.rows:
        base = row.weights.base
        model = row.weights.model
        if model.name == base.name:
            continue
        # A run's agents have the tokens of the models that they started from, so those of one start are read once.
        name = model.name
        for run, config in lineup.runs.items():
            if row.name in agent_folders(run):
                name = config.resolve(config.of_agent(_index(row.name)).model.name)
        if name == base.name:
            continue
        for key, one in ((name, model), (base.name, base)):
            if key not in vocabulary_of:
                vocabulary_of[key] = vocabulary(one)
        ours, theirs = vocabulary_of[name], vocabulary_of[base.name]
        for index in ours.keys() & theirs.keys():
            if ours[index] != theirs[index]:
                raise UserError(
                    f"models: expected a model with the tokens of its base {base.name!r}, for a KL between them, got "
                    f"{model.name!r}, whose token {index} is {ours[index]!r} and not {theirs[index]!r}"
                )


def _add_run(lineup: Lineup, run: Path, task: Task, settings: EvaluationConfig) -> None:
    """Adds a run's agents and their chains, with the run's prompts."""
    config = lineup.runs[run]
    agents = agent_weights(run_agents(run), config, settings.model)
    loads_own_base = not settings.base or any(weights.adapter for weights in agents.values())
    _check_run(run, config, task, loads_own_base)

    run_task = with_prompts_of(run, task, settings.task)
    rows = []
    for agent, weights in agents.items():
        # Each agent's KL is to its own base, unless one is named for all.
        kl_base = lineup.solo["base"].weights.model if settings.base else weights.base
        if not _base_needs_no_row(lineup, kl_base, config, _index(agent)):
            lineup.add(Row(f"base of {agent}", Weights(kl_base, None, kl_base), run_task))
        rows.append(lineup.add(Row(agent, weights._replace(base=kl_base), run_task)))

    if len(rows) > 1:
        _add_chains(lineup, run, rows)
    elif _begins_as(task.prompts, run_task.prompts):
        _add_after_itself(lineup, rows[0])


def _check_run(run: Path, config: Config, task: Task, loads_own_base: bool) -> None:
    """Warns if a run was trained on another reward; raises a UserError if it was with other models of these names."""
    fingerprint = read_settings(run).get("fingerprint") or {}
    recorded = fingerprint.get("models") or {}
    if loads_own_base:
        check_models(recorded, policy_models(config), str(run))
    check_models(recorded, task.models(), str(run), chosen=True)
    warning = reward_differs(run, fingerprint, task)
    if warning:
        print(warning, file=sys.stderr)


def _add_chains(lineup: Lineup, run: Path, agents: Sequence[Row]) -> None:
    """Adds the chains of a run's agents: of each two in both orders, and those of all roles."""
    cory = lineup.runs[run].cory
    if not cory.knowledge_transfer:
        print(f"{run}: no chains, as its agents read no responses (cory.knowledge_transfer)")
        return
    for pioneer, observer in itertools.permutations(agents, 2):
        lineup.add(observer.after(pioneer, f"{observer.name} after {_short(pioneer.name)}"))
    if cory.num_roles > 2:
        _add_long_chains(lineup, agents, cory.num_roles)


def _base_needs_no_row(lineup: Lineup, kl_base: ModelConfig, config: Config, agent: int) -> bool:
    """Whether an agent's base has a row, or is the agent itself, which is not trained."""
    base = lineup.solo["base"].weights.model
    if replace(kl_base, chat_template=base.chat_template) == base:
        return True  # a template changes prompts, not weights
    if any(row.weights.model == kl_base for row in lineup.solo.values()):
        return True
    own_model = config.resolve(config.of_agent(agent).model.name)
    return not config.is_trained(agent) and kl_base.name == own_model


def _add_after_itself(lineup: Lineup, row: Row) -> None:
    """Adds chains in which a model holds all roles, up to the calls of the longest chain."""
    chain = row
    for _ in range(1, lineup.longest):
        chain = lineup.add(row.after(chain, f"{chain.name} after itself"))


def _add_long_chains(lineup: Lineup, agents: Sequence[Row], roles: int) -> None:
    """Adds chains of more than two roles, role by role, one that begins with each agent."""
    for start, pioneer in enumerate(agents):
        chain = pioneer
        for role in range(1, roles):
            agent = agents[(start + role) % len(agents)]
            names = [_short(row.name.split(" after ")[0]) for row in [chain, *chain.earlier[::-1]]]
            chain = lineup.add(agent.after(chain, " after ".join([agent.name, *names])))


def _index(agent: str) -> int:
    """1, of RUN/agent_2."""
    return int(agent.rpartition("_")[2]) - 1


def _short(agent: str) -> str:
    """agent_1, of RUN/agent_1."""
    return agent.split("/")[-1]


def with_prompts_of(run: Path, task: Task, changes: Mapping[str, Any]) -> Task:
    """The task with the prompts and roles that a run has recorded, but for `changes` to its `task` block.

    Roles beyond those of the run stay the task's: what a single agent reads that answers after itself. A run whose role
    is another than the task's first has no part in the task's chain.
    """
    settings = read_settings(run)
    prompts = prompts_of_run(settings)
    if prompts is None:
        return task
    prompts = changed_prompts(prompts, task.prompts, changes)
    count = run_config(run).cory.num_roles
    further = task.prompts.roles[count:]
    if further and _begins_as(task.prompts, prompts):
        # Called as the task's roles are, as the further templates may name them.
        first = [
            replace(
                prompts.settings(role), name=prompts.settings(role).name or task.prompts.name(role)
            )
            for role in range(count)
        ]
        prompts = replace(prompts, roles=(*first, *further))
    return replace(task, prompts=prompts)


def changed_prompts(
    recorded: RolePrompts, current: RolePrompts, changes: Mapping[str, Any]
) -> RolePrompts:
    """The prompts that a run has recorded; the current ones where `changes` to its `task` block state them."""
    stated = {
        role: getattr(current, role)
        for role in ("pioneer", "observer")
        if f"{role}_prompt" in changes
    }
    return replace(recorded, **stated)


def _begins_as(chain: RolePrompts, prompts: RolePrompts) -> bool:
    """Whether the first role of `prompts` is that of the chain: it has its name, or none of its own."""
    return prompts.settings(0).name in (None, chain.name(0))


def prompts_of_run(settings: Mapping[str, Any]) -> RolePrompts | None:
    """What a run's roles read, by its config.yaml; None where that does not say it."""
    prompts = (settings.get("fingerprint") or {}).get("prompts")
    if not prompts:
        return None
    return RolePrompts(
        **prompts, roles=tuple(RoleConfig(**role) for role in settings.get("roles") or [])
    )


def reward_differs(run: Path, fingerprint: Mapping[str, Any], task: Task) -> str:
    """A warning if the reward of `task` is not that of the run with this fingerprint, else nothing."""
    if not fingerprint:
        return ""
    current = task.fingerprint_of_reward()
    reward = fingerprint.get("reward")
    if reward != current["reward"]:
        return f"Warning: {run} was trained on the reward {reward}, not {current['reward']}."
    if fingerprint.get("reward_sha256") != current["reward_sha256"]:
        return f"Warning: the source of the reward {reward} has changed since {run} was trained."
    team_reward = fingerprint.get("team_reward")
    if team_reward != current.get("team_reward"):
        return f"Warning: {run} was trained with the team reward {team_reward}, not {current.get('team_reward')}."
    if fingerprint.get("team_reward_sha256") != current.get("team_reward_sha256"):
        return f"Warning: the source of the team reward {team_reward} has changed since {run} was trained."
    recorded = fingerprint.get("models") or {}
    for key, model in task.models().items():
        if recorded.get(key) and recorded[key]["identity"] != model["identity"]:
            return f"Warning: {run} was trained with {key} {recorded[key]['name']!r}, not {model['name']!r}."
    return ""
