"""Rows of an evaluation: the runs' agents, other models, and chains of them. Importing this does not import torch.

In a chain, models answer one after the other and read the earlier answers. An agent's base is the model that it was
trained from.

* solo: the model answers the query.
* joint, `B after A`: B, as observer, reads A's response to the same query and answers.
* compute-matched, `A after itself`: the agent of a single-agent run, or the base, answers twice (two calls), the second
  time as its own observer. A chain of two agents is thus compared with a single model that answers as often. Longer
  chains add a call per role. A single agent answers only once if its role is not the task's first role, since it cannot
  begin the chain.
* untrained, `base of B after base of A`: two agents of a run before training, if their bases differ. If they
  have the same base, this chain is `base after itself`.

Each response's KL is measured to the base under the prompt that it answers: `kl` is the last response's, `chain_kl` the
sum over the chain. Each model is loaded with its run's settings (chat template, quantization) and reads its run's
prompts.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cory.code_files import announce_prompts
from cory.config import Config, EvaluationConfig, ModelConfig, SamplingConfig
from cory.errors import UserError
from cory.identity import check_models, is_adapter, policy_models
from cory.roles import RolePrompts
from cory.run.folder import agent_index, run_agents, run_label
from cory.run.settings import read_settings
from cory.run.tables import one_line
from cory.settings import changed
from cory.task_kinds import find_kind, run_config

if TYPE_CHECKING:
    from cory.task import Task

KL_COEF = 0.3  # eta of the combined reward if no run sets it


# The agents of a run


class ModelSource(NamedTuple):
    """How a model is loaded (`load_agent` in cory/evaluation/answer.py).

    Args:
        model: the model's settings.
        adapter: the folder of an adapter on the model, or None.
        base: the model to which KL is measured.
    """

    model: ModelConfig
    adapter: Path | None
    base: ModelConfig


def agent_sources(run: Path, config: Config, changes: Mapping[str, Any]) -> dict[str, ModelSource]:
    """Returns how a run's saved agents are loaded, by name.

    Args:
        config: the run's settings.
        changes: changes to each agent's `model` block.
    """
    sources = {}
    for name, folder in run_agents(run).items():
        model = config.of_agent(agent_index(folder.name)).model
        base = changed(replace(model, name=config.resolve(model.name)), changes)
        if is_adapter(folder):
            sources[name] = ModelSource(base, folder, base)
        else:
            # Full weights are saved unquantized, even if the base was quantized.
            quantization = changes.get("quantization", "none")
            full_model = replace(base, name=str(folder), revision=None, quantization=quantization)
            if not config.is_trained(agent_index(folder.name)):
                base = changed(base_of_saved(base), changes)
            sources[name] = ModelSource(full_model, None, base)
    return sources


def base_of_saved(model: ModelConfig) -> ModelConfig:
    """Returns the base of a run's saved agent. A model that is not a saved agent is its own base."""
    folder = Path(model.name)
    run = folder.parent
    if not re.fullmatch(r"agent_\d+", folder.name) or not (run / "config.yaml").exists():
        return model
    config = run_config(run)
    base = config.of_agent(agent_index(folder.name)).model
    base = replace(base, name=config.resolve(base.name), chat_template=model.chat_template)
    # If the agent was frozen in that run, too, its model may be an agent saved by a still earlier run.
    return base if config.is_trained(agent_index(folder.name)) else base_of_saved(base)


def same_weights(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two settings load the same weights; a chat template changes only prompts."""
    return replace(one, chat_template=other.chat_template) == other


# The rows of an evaluation


@dataclass(frozen=True)
class Row:
    """A model that answers a query, either alone or after reading the responses of another row's chain.

    Args:
        name: the row's name.
        source: how the model is loaded.
        task: the task with the prompts that the model reads.
        reads: the row of the previous role; None for the first role.
    """

    name: str
    source: ModelSource
    task: "Task"
    reads: "Row | None" = None

    @property
    def earlier(self) -> list["Row"]:
        """The rows of the earlier roles, starting with the pioneer's."""
        return [*self.reads.earlier, self.reads] if self.reads else []

    @property
    def role(self) -> int:
        """The index of the row's role; the pioneer's is 0."""
        return len(self.earlier)

    def after(self, chain: "Row") -> "Row":
        """Returns the row in which this model has the next role of a chain, such as `RUN/agent_2 after agent_1`."""
        return replace(self, name=f"{self.name} after {chain.name.split('/')[-1]}", reads=chain)

    def after_itself(self) -> "Row":
        """Returns the row in which the same model also has the next role."""
        return replace(self, name=f"{self.name} after itself", reads=self)


@dataclass
class Lineup:
    """The rows of an evaluation and the settings that they share.

    Args:
        rows: the rows, each after the row that it reads.
        runs: the settings of the runs, by folder.
        sampling: the sampling settings of all rows.
        kl_coef: eta of the combined reward.
        team_sizes: the lengths, in responses, of the chains that earn a team reward.
        notes: caveats about the numbers.
        sampled_kl: whether to report the sampled KL beside the full KL, because a run penalizes the sampled KL.
        date: the date shown by chat templates that print one: the first run's, or None for today.
    """

    rows: list[Row]
    runs: dict[Path, Config]
    sampling: SamplingConfig
    kl_coef: float
    team_sizes: set[int]
    notes: list[str]
    sampled_kl: bool
    date: str | None


def line_up(task: "Task", settings: EvaluationConfig) -> Lineup:
    """Returns the rows that the settings name.

    Raises a UserError: a run cannot be read, or was trained with another model of the same name; two rows would have
    the same name; or `settings.only` is none of the runs.
    """
    runs = {
        Path(name): run_config(Path(name)) for name in settings.models if run_agents(Path(name))
    }
    if settings.only is not None and Path(settings.only) not in runs:
        raise UserError(
            f"only: expected one of the runs {list(map(str, runs))}, got {settings.only!r}"
        )

    for run, config in runs.items():
        announce_prompts(run, config)  # before `with_prompts_of` runs code in prompt files
    # The first run sets base, prompts, sampling and eta.
    if runs:
        first_run, config = next(iter(runs.items()))
        model = config.of_agent(0).model
        base_task = with_prompts_of(first_run, config, task, settings.task)
        kl_coef = config.ppo.init_kl_coef
        date = read_settings(first_run).get("date")
    else:
        config = find_kind(task.kind).config() if task.kind else Config()
        model = ModelConfig(settings.models[0])
        base_task = task
        kl_coef = KL_COEF
        date = None
    if settings.base is not None:
        model = replace(model, name=settings.base, revision=None)
    base = changed(replace(model, name=config.resolve(model.name)), settings.model)

    roles = {config.cory.num_roles for config in runs.values()}
    longest = max(2, len(task.prompts.roles), *roles)
    solo = [Row("base", ModelSource(base, None, base), base_task)]
    chains = _after_itself(solo[0], longest) if runs else []
    notes = []
    for name in settings.models:
        if Path(name) in runs:
            notes += check_run(Path(name), runs[Path(name)], task)
            agents = _add_agents(solo, Path(name), runs[Path(name)], task, settings)
            if len(agents) == 1:
                if begins_as(task.prompts, agents[0].task.prompts):
                    chains += _after_itself(agents[0], longest)
            elif runs[Path(name)].cory.knowledge_transfer:
                chains += _untrained_chains(solo, agents, runs[Path(name)])
                chains += _chains(agents, runs[Path(name)])
            else:
                notes.append(
                    f"{run_label(Path(name))}: no chains, as its agents read no responses (cory.knowledge_transfer)"
                )
        elif config.resolve(name) != base.name:
            model = replace(base, name=config.resolve(name), revision=None)
            solo.append(Row(name, ModelSource(model, None, base), base_task))

    notes += _references(solo)
    rows = [*solo, *chains]
    names = [row.name for row in rows]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(
            f"models: expected folders with different names, got two rows named {twice!r}"
        )
    if settings.only is not None:
        rows = [row for row in rows if row.name.startswith(f"{run_label(Path(settings.only))}/")]
    return Lineup(
        rows=rows,
        runs=runs,
        sampling=config.sampling.after_training(settings.sampling),
        kl_coef=kl_coef if settings.kl_coef is None else settings.kl_coef,
        # A single agent's chain with itself earns a team reward, too, if it has as many calls as the longest chain.
        team_sizes={longest, *roles},
        notes=notes,
        sampled_kl=any(config.ppo.kl_penalty == "kl" for config in runs.values()),
        date=date,
    )


def _add_agents(
    solo: list[Row], run: Path, config: Config, task: "Task", settings: EvaluationConfig
) -> list[Row]:
    """Adds and returns the rows of a run's agents, and adds rows for bases that have none yet."""
    run_task = with_prompts_of(run, config, task, settings.task)
    agents = []
    for name, source in agent_sources(run, config, settings.model).items():
        # KL is measured to the agent's own base, unless the settings name one base for all rows.
        base = solo[0].source.base if settings.base else source.base
        if config.is_trained(agent_index(name)) and _row_of(base, solo) is None:
            solo.append(Row(f"base of {name}", ModelSource(base, None, base), run_task))
        agents.append(Row(name, source._replace(base=base), run_task))
        solo.append(agents[-1])
    return agents


def _row_of(model: ModelConfig, solo: Sequence[Row]) -> Row | None:
    """Returns the row of a model without an adapter, or None."""
    rows = (row for row in solo if row.source.adapter is None)
    return next((row for row in rows if same_weights(row.source.model, model)), None)


def _references(solo: Sequence[Row]) -> list[str]:
    """Returns a note on each row's KL reference if not all rows have the same one."""
    measured: dict[str, list[str]] = {}
    for row in solo:
        reference = _row_of(row.source.base, solo)
        if reference is not row:  # otherwise KL is 0
            model = "/".join(Path(row.source.base.name).parts[-2:])
            name = f"{reference.name} ({model})" if reference else model
            measured.setdefault(name, []).append(row.name)
    if len(measured) < 2:
        return []
    parts = [f"{reference} for {', '.join(names)}" for reference, names in measured.items()]
    return [f"KL and combined rewards have different references: {'; '.join(parts)}"]


def _untrained_chains(solo: Sequence[Row], agents: Sequence[Row], config: Config) -> list[Row]:
    """Returns chains of two agents before training, in both orders, if both learn and their bases differ."""
    rows = []
    trained = [agent for agent in agents if config.is_trained(agent_index(agent.name))]
    for pioneer, observer in itertools.permutations(trained, 2):
        base = observer.source.base
        if not same_weights(pioneer.source.base, base):
            name = f"base of {observer.name} after base of {pioneer.name.split('/')[-1]}"
            first = _row_of(pioneer.source.base, solo)
            rows.append(Row(name, ModelSource(base, None, base), observer.task, reads=first))
    return rows


def _chains(agents: Sequence[Row], config: Config) -> list[Row]:
    """Returns chains of a run's agents: each pair in both orders, and the full chain that each agent begins."""
    rows = [observer.after(pioneer) for pioneer, observer in itertools.permutations(agents, 2)]
    for start, pioneer in enumerate(agents):
        chain = pioneer
        for role in range(1, config.cory.num_roles):
            chain = agents[(start + role) % len(agents)].after(chain)
            if role > 1:  # chains of two are already among the pairs
                rows.append(chain)
    return rows


def _after_itself(row: Row, calls: int) -> list[Row]:
    """Returns chains of 2 to `calls` calls in which one model holds all roles."""
    rows = [row]
    while len(rows) < calls:
        rows.append(rows[-1].after_itself())
    return rows[1:]


# Prompts and rewards that a run has recorded


def with_prompts_of(run: Path, config: Config, task: "Task", changes: Mapping[str, Any]) -> "Task":
    """Returns the task with the prompts and roles that a run has recorded.

    Roles that the run lacks are taken from the task, if run and task have the same first role. A single agent holds
    these roles when it answers after itself.

    Args:
        config: the run's settings.
        changes: changes to the run's `task` block. Prompts that they name are also taken from the task.
    """
    templates = dict(read_settings(run)["fingerprint"]["prompts"])
    for role, template in [*templates.items()]:
        if template is None or f"{role}_prompt" in changes:
            templates[role] = getattr(task.prompts, role)
    prompts = RolePrompts(**templates, roles=tuple(config.roles))

    count = config.cory.num_roles
    further = task.prompts.roles[count:]
    if further and begins_as(task.prompts, prompts):
        # The run's roles get the task's names, to which the further roles' templates may refer.
        first = [
            replace(
                prompts.settings(role), name=prompts.settings(role).name or task.prompts.name(role)
            )
            for role in range(count)
        ]
        prompts = replace(prompts, roles=(*first, *further))
    return replace(task, prompts=prompts)


def begins_as(chain: RolePrompts, prompts: RolePrompts) -> bool:
    """Whether the first role of `prompts` is the chain's first role: it has the same name, or no name."""
    return prompts.settings(0).name in (None, chain.name(0))


def check_run(run: Path, config: Config, task: "Task") -> list[str]:
    """Returns notes on how the reward and prompts that a run was trained with differ from `task`.

    Raises a UserError if the run was trained with other models of the same names.
    """
    fingerprint = read_settings(run)["fingerprint"]
    models = fingerprint["models"]
    check_models(models, policy_models(config), str(run))
    check_models(models, task.models(), str(run), chosen=True)

    notes = []
    if fingerprint["prompts_sha256"] != with_prompts_of(run, config, task, {}).hash_of_prompts():
        notes.append(
            f"{run_label(run)} was trained with another version of the file that defines a prompt function"
        )
    before = {key: value for key, value in fingerprint.items() if "reward" in key}
    now = task.fingerprint_of_reward()
    for key, model in task.models().items():
        if key in models and models[key]["identity"] != model["identity"]:
            before[key] = models[key]["name"]
            now[key] = model["name"]
    changes = [
        f"the file that defines {before[key.removesuffix('_sha256')]} has changed"
        if key.endswith("_sha256")
        and before[key.removesuffix("_sha256")] == now[key.removesuffix("_sha256")]
        else f"{key} {before.get(key)}, now {now.get(key)}"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    ]
    if changes:
        notes.append(
            one_line(f"{run_label(run)} was trained on another reward: {'; '.join(changes)}")
        )
    return notes
