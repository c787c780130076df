"""Opens the chat of a run: its agents, from its end or from a checkpoint, its task, and its data."""

import gc
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from cory.agents import make_agents
from cory.chat.chain import Chain
from cory.chat.config import ChatConfig
from cory.cli.arguments import typed
from cory.cli.load import run_of_checkpoint
from cory.config import Config, ParallelConfig, changed
from cory.errors import UserError
from cory.evaluation.lineup import changed_prompts, prompts_of_run, reward_differs
from cory.parallel.devices import choose_device
from cory.plural import counted
from cory.prompts import Prompt, RolePrompts
from cory.provenance.models import check_models, policy_models
from cory.resume import checkpoint
from cory.resume.checkpoint import RunState
from cory.rewards import MissingColumns
from cory.run.record import named, read_settings
from cory.task import Task
from cory.tasks.kind import TaskKind, kind_of_run, run_config


@contextmanager
def opened(settings: ChatConfig) -> Iterator[tuple[str, Chain]]:
    """A run's chain, and a line that says what it is.

    Raises a UserError: no such run, it has neither saved agents nor a valid checkpoint, or a setting does not fit it.
    """
    path = named(Path(settings.run))
    run = path
    if (path / "manifest.json").exists():
        path = path.resolve()  # its run is two folders above, which `../iter-000090` does not show
        run = run_of_checkpoint(path)
    recorded = read_settings(run)
    fingerprint = recorded.get("fingerprint") or {}
    kind = kind_of_run(recorded)
    config = run_config(run).on(settings.device)
    config.parallel = ParallelConfig()  # whatever the run's processes were
    config.sampling = config.sampling.after_training({})  # whoever sampled in training
    if settings.task:
        if kind is None:
            raise UserError(
                f"task: expected none, as the run has no task block, got {settings.task}"
            )
        block = config.task  # type: ignore[attr-defined]
        config.task = changed(block, typed(type(block), settings.task))  # type: ignore[attr-defined]

    device = choose_device(settings.device)
    with _saved_agents(path, run, config) as (folder, iterations, prompt):
        task, datasets, note = _task(kind, config, prompts_of_run(recorded), settings.task, prompt)
        recorded_models = fingerprint.get("models") or {}
        check_models(recorded_models, policy_models(config), str(run))
        check_models(recorded_models, task.models(), str(run), chosen=True)
        prompt_column = getattr(getattr(config, "task", None), "prompt_column", "prompt")
        chain = Chain(folder, config, settings, task, device, datasets, prompt_column)
        note = note or reward_differs(run, fingerprint, task)
        if note:
            chain.note(note)
        yield f"{run.name}: {config.method()} after {iterations}", chain


def _task(
    kind: TaskKind[Any] | None,
    config: Config,
    prompts: RolePrompts | None,
    changes: Mapping[str, Any],
    prompt: Prompt,
) -> tuple[Task, list[Dataset], str]:
    """The run's task, its data, and what the user should know, if anything.

    Its prompts are those that it has recorded, but for `changes` to its `task` block. `prompt`, one
    that an agent has read, says what the queries are, text or chat messages, where the data are not
    at hand.
    """
    columns = (prompts or RolePrompts()).columns()
    without_reward = Task(_stand_in(prompt, columns), [], prompts or RolePrompts())
    if kind is None:
        reason = "the run was started from Python, and its folder does not hold the reward."
        return without_reward, [], f"No rewards: {reason}"

    datasets, note = _data(kind, config)
    try:
        if datasets:
            task = kind.make_task(config, datasets[0])
        else:
            task, needs_data = _without_data(kind, config, prompt, columns)
            note = note if needs_data else ""
    except UserError as error:
        return without_reward, [], f"No rewards: {error}"
    if prompts is not None:
        task = replace(task, prompts=changed_prompts(prompts, task.prompts, changes))
    return task, datasets, note


def _data(kind: TaskKind[Any], config: Config) -> tuple[list[Dataset], str]:
    """The run's rows, those of training first; or none, and why they are not at hand."""
    try:
        datasets = [kind.training_rows(config)]
    except UserError as error:
        return [], f"Queries of the run's data are not known by their text: {error}"
    with suppress(UserError):  # held-out queries, where there are any
        datasets.append(kind.held_out_rows(config))
    return datasets, ""


def _without_data(
    kind: TaskKind[Any], config: Config, prompt: Prompt, columns: Sequence[str]
) -> tuple[Task, bool]:
    """A task whose data is not at hand, and whether its prompts or its reward need more of it than the query."""
    try:
        return kind.make_task(config, _stand_in(prompt, columns)), bool(columns)
    except MissingColumns as error:
        return kind.make_task(config, _stand_in(prompt, [*columns, *error.names])), True


def _stand_in(prompt: Prompt, columns: Sequence[str]) -> Dataset:
    """A row in place of the data, for a task whose prompts and reward alone are used."""
    return Dataset.from_dict({"prompt": [prompt], **{name: ["-"] for name in columns}})


@contextmanager
def _saved_agents(path: Path, run: Path, config: Config) -> Iterator[tuple[Path, str, Prompt]]:
    """A folder with config.yaml and the agents, after how many iterations they are, and a prompt
    that one of them has read.

    The agents of a run that has not ended are written from a checkpoint: the newest valid one, or
    the one that `path` is.
    """
    if path == run and (run / "summary.json").exists():
        summary: Mapping[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        before = summary["samples"]["before"]
        yield run, counted(summary["iterations"], "iteration"), _first_prompt(before)
        return
    trained = [number for number in range(config.cory.num_agents) if config.is_trained(number)]
    names = [f"agent_{number + 1}" for number in trained]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / run.name
        try:
            saved, state = _checkpoint(path, run, names)
            _write_agents(saved, state, config, folder)
        except (checkpoint.Damaged, FileNotFoundError) as error:
            # A run that goes on removes old checkpoints.
            raise UserError(f"{path}: expected a valid checkpoint, got: {error}") from None
        shutil.copy(run / "config.yaml", folder)
        gc.collect()  # the agents' optimizers
        yield (
            folder,
            f"{state.iteration} of {counted(config.iterations, 'iteration')} (checkpoint {saved.name})",
            _first_prompt(state.before),
        )


def _first_prompt(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> Prompt:
    """The first prompt of a run's samples by agent; a text if there are none."""
    if not samples:
        return "-"
    return next(iter(samples.values()))[0]["prompt"]


def _checkpoint(path: Path, run: Path, agents: Sequence[str]) -> tuple[Path, RunState]:
    if path != run:
        return path, checkpoint.read(path, agents)
    newest = checkpoint.newest(run, agents)
    if newest is None:
        raise UserError(
            f"{run}: expected a run that has ended, or has a valid checkpoint, got one without"
        )
    return newest


def _write_agents(saved: Path, state: RunState, config: Config, folder: Path) -> None:
    """Writes the agents of a checkpoint into folders, as a run does at its end."""
    agents = make_agents(config)
    checkpoint.load(saved, state, [agent for agent in agents if agent.is_trained])
    for agent in agents:
        agent.save(folder / agent.name)
