"""Saves and continues runs.

    RUN/checkpoints/iter-000090/     the state before iteration 90, counted from 0
        state.json                   a `Checkpoint`
        agent_1.safetensors, ...     each trained agent's weights, value head and optimizer state

Checkpoints are written under a temporary name and renamed; one with its final name is complete. The state of random
number generators is not saved, as an iteration's random numbers derive from its index (`cory/streams.py`).
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset
from pydantic import NonNegativeInt, TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cory.agent import Agent
from cory.config import AgentConfig, Config
from cory.errors import NotFinite, UserError, counted
from cory.identity import check_models, data_hash, policy_models, versions
from cory.parallel import distributed, sharding
from cory.parallel.devices import choose_device, machine_name
from cory.run.callback import Callback, RunState
from cory.run.folder import (
    RECORDS,
    SUMMARY,
    Run,
    finished_iterations,
    flush,
    locked,
    new_folder,
    resume_command,
    unfinished_folder,
    write_text,
)
from cory.run.settings import differences, read_settings
from cory.settings import yaml_text
from cory.task import Task

CALLBACK = "a callback"  # `stopped_by` of a run that a callback ended, in place of a guard's name
# Maps each hash in the fingerprint (see `fingerprint`) to what has changed if the hash differs. Names in braces are
# other keys of the fingerprint.
HASHED = {
    "fingerprint.reward_sha256": "the file that defines the reward {reward}",
    "fingerprint.team_reward_sha256": "the file that defines the team reward {team_reward}",
    "fingerprint.prompts_sha256": "the file of a prompt function in roles",
    "fingerprint.dataset_sha256": "the dataset",
    "fingerprint.held_out_sha256": "the held-out dataset",
}


@dataclass
class Checkpoint:
    """The contents of state.json: a run's state between two iterations, except its agents' tensors.

    Args:
        iteration, stopped_by: see `RunState`.
        processes: the run's number of processes.
        settings: the contents of config.yaml (see `run_record`).
        agents: the scalar state of each agent's learner, by agent name.
        callbacks: the callbacks' states, in order.
        lengths: the number of valid bytes in each of the run's .jsonl files, by name. Later bytes are cut when the run
            continues, because it repeats the iterations that wrote them.
    """

    iteration: NonNegativeInt
    stopped_by: str | None
    processes: int
    settings: dict[str, Any]
    agents: dict[str, dict[str, Any]]
    callbacks: list[dict[str, Any]]
    lengths: dict[str, NonNegativeInt]


def lines_files(run: Path) -> list[Path]:
    """Returns the .jsonl files in a run's folder: its `RECORDS`, and files that callbacks wrote. Leaves out links."""
    return [file for file in run.glob("*.jsonl") if not file.is_symlink()]


def checkpoints(run: Path) -> list[Path]:
    """Returns a run's checkpoints, the newest last."""
    paths = [path for path in (run / "checkpoints").glob("iter-*") if path.name[5:].isdigit()]
    return sorted(paths, key=lambda path: int(path.name[5:]))


def save(
    run: Run, state: RunState, agents: Sequence[Agent], callbacks: Sequence[Callback], keep: int
) -> None:
    """Writes a checkpoint and keeps only the newest `keep`. All processes must call this."""
    folder = run.folder / "checkpoints"
    target = folder / f"iter-{state.iteration:06d}"
    if run.writes:
        unfinished = unfinished_folder(folder)
    numbers = {}
    for agent in agents:
        if not agent.is_trained:
            continue
        tensors, numbers[agent.name] = agent.state()
        tensors = sharding.gathered_tensors(tensors)
        if run.writes:
            save_file(tensors, unfinished / f"{agent.name}.safetensors")
    if not run.writes:
        return

    # Flush lines to the disk before counting their bytes.
    lengths = {}
    for file in lines_files(run.folder):
        flush(file)
        lengths[file.name] = file.stat().st_size
    content = Checkpoint(
        iteration=state.iteration,
        stopped_by=state.stopped_by,
        processes=distributed.world_size(),
        settings=dict(run.record),
        agents=numbers,
        callbacks=[callback.state_dict() for callback in callbacks],
        lengths=lengths,
    )
    (unfinished / "state.json").write_text(json.dumps(asdict(content), indent=1), encoding="utf-8")
    for file in unfinished.iterdir():
        flush(file)
    flush(unfinished)
    os.replace(unfinished, target)
    flush(folder)

    for old in checkpoints(run.folder)[:-keep]:
        os.replace(old, unfinished)  # a kill during deletion must not leave a partial checkpoint
        shutil.rmtree(unfinished)


@contextmanager
def open_run(
    config: Config,
    name: str,
    fingerprint: Mapping[str, Any],
    agents: Sequence[Agent],
    callbacks: Sequence[Callback],
    state: RunState,
) -> Iterator[Run]:
    """Opens a new run, or the run named by `config.resume`, whose state is loaded into agents, callbacks and `state`.

    The run's folder is locked against other processes until the block ends. An error in the block gets a note that
    names the newest checkpoint and the command that continues from there.

    Raises a UserError: the run cannot be continued with these settings, or its folder cannot be written.
    """
    record = run_record(config, fingerprint)
    with ExitStack() as lock:
        # The main process reads the folder and broadcasts what it found.
        status = None
        if distributed.is_main():
            folder = _folder(config, name)
            lock.enter_context(locked(folder))
            saved = _saved(folder, config, record)
            status = folder, saved, saved is not None and _has_ended(folder, saved, config)
        folder, saved, has_ended = distributed.broadcast_object(status)

        if not has_ended:
            if saved is not None:
                record["date"] = saved.settings["date"]
                _load(saved, folder, config, agents, callbacks, state)
            if distributed.is_main():
                for file in lines_files(folder):
                    length = saved.lengths.get(file.name) if saved else None
                    if length is not None or file.name in RECORDS:
                        os.truncate(file, length or 0)
                write_text(folder / "config.yaml", yaml_text(record))
            distributed.barrier()

        writes = distributed.is_main() and not has_ended
        run = Run(folder, record, writes, resumed=saved is not None, finished=has_ended)
        with run.exits:
            try:
                if not has_ended:
                    _prepare_agents(agents, run)
                yield run
            except Exception as error:
                error.add_note(_advice(folder, config, state, error))
                raise


def fingerprint(config: Config, task: Task, held_out: Dataset | None) -> dict[str, Any]:
    """Returns names and hashes of what settings only point to: reward, prompts, data and the models' contents."""
    result = task.fingerprint()
    if held_out is not None:
        result["held_out_sha256"] = data_hash(held_out)
    return result | {"models": policy_models(config) | task.models()}


def _prepare_agents(agents: Sequence[Agent], run: Run) -> None:
    """Sets the agents' date and, for an inference engine, the folder from which it loads their weights."""
    for agent in agents:
        agent.date = run.record["date"]  # chat templates may show it
    engine = agents[0].engine  # shared by all agents
    if engine is not None:
        engine.folder = run.folder / ".engine"
        run.exits.callback(shutil.rmtree, engine.folder, ignore_errors=True)


def run_record(config: Config, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of config.yaml, also kept in checkpoints: settings, fingerprint, versions, machine, date.

    `output` and `resume` are reset to their defaults, so that the file can configure a new run.
    """
    record = asdict(config) | {"output": None, "resume": None}
    record["fingerprint"] = dict(fingerprint)
    record["versions"] = versions() | {"machine": machine_name(choose_device(config.device))}
    record["date"] = date.today().isoformat()
    return json.loads(json.dumps(record))  # the types that reading a file gives


def _folder(config: Config, name: str) -> Path:
    """Returns the folder in which the run continues or begins."""
    if config.resume is None:
        return new_folder(config.output, name)
    if config.resume == "auto":
        if config.output is None:
            raise UserError(
                "resume: expected the run's folder as output, got null. auto continues the run in output"
            )
        folder = Path(config.output)
        is_run = (folder / "config.yaml").exists() and "fingerprint" in read_settings(folder)
        return folder if is_run else new_folder(config.output, name)
    folder = Path(config.resume)
    if not (folder / "config.yaml").exists():
        raise UserError(f"resume: expected auto or a run's folder, got {config.resume!r}")
    return folder


def _saved(folder: Path, config: Config, record: Mapping[str, Any]) -> Checkpoint | None:
    """Returns the newest checkpoint of the run to continue; None for a new run."""
    paths = checkpoints(folder)
    if not paths:
        if config.resume is None or (config.resume == "auto" and not (folder / SUMMARY).exists()):
            return None
        raise UserError(
            f"resume: expected a checkpoint in {folder}, got none. {_new_run(folder, config)}"
        )
    try:
        content = json.loads((paths[-1] / "state.json").read_text(encoding="utf-8"))
        saved = TypeAdapter(Checkpoint).validate_python(content)
    except (OSError, ValueError) as error:
        raise _damaged(paths[-1], error, config) from None

    for key, (before, now) in differences(saved.settings, record).items():
        change = f"expected {key} = {before!r}, got {now!r}"
        if key in HASHED:
            change = f"{HASHED[key].format(**record['fingerprint'])} has changed"
        new_run = (
            _new_run(folder, config)
            if finished_iterations(folder) == saved.iteration
            else f"With --iterations {saved.iteration}, that run then ends and saves its agents, from which a new run "
            "can start"
        )
        raise UserError(f"resume: {change}. Undo the change to continue {folder}. {new_run}")
    check_models(
        saved.settings["fingerprint"]["models"], record["fingerprint"]["models"], str(folder)
    )
    if saved.processes != distributed.world_size():
        raise UserError(
            f"resume: expected {saved.processes} processes, got {distributed.world_size()}. {folder} was started with "
            f"{saved.processes}"
        )
    if config.iterations < saved.iteration:
        raise UserError(
            f"iterations: expected at least {saved.iteration}, got {config.iterations}. {folder} has already done "
            f"{counted(saved.iteration, 'iteration')}"
        )
    for name, length in saved.lengths.items():
        file = folder / name
        if not file.exists() or file.stat().st_size < length:
            raise UserError(f"resume: expected at least {length} bytes in {file}, got fewer")
    return saved


def _has_ended(folder: Path, saved: Checkpoint, config: Config) -> bool:
    """Whether the run is finished and saved; prints the reason if so."""
    goes_on = saved.stopped_by is None and config.iterations != saved.iteration
    # A failed extension leaves metrics of iterations after the last checkpoint.
    is_extended = (folder / "metrics.jsonl").stat().st_size > saved.lengths["metrics.jsonl"]
    if goes_on or is_extended or finished_iterations(folder) != saved.iteration:
        return False
    reason = (
        f"iterations = {saved.iteration} are done. A larger --iterations extends the run"
        if saved.stopped_by is None
        else f"{saved.stopped_by} ended it after iteration {saved.iteration}. {_new_run(folder, config)}"
    )
    print(f"{folder} is finished: {reason}", flush=True)
    return True


def _load(
    saved: Checkpoint,
    folder: Path,
    config: Config,
    agents: Sequence[Agent],
    callbacks: Sequence[Callback],
    state: RunState,
) -> None:
    """Loads a checkpoint into agents, callbacks and `state`."""
    path = checkpoints(folder)[-1]
    try:
        for agent in agents:
            if agent.is_trained:
                tensors = load_file(path / f"{agent.name}.safetensors")
                agent.load_state(tensors, saved.agents[agent.name])
    except (OSError, LookupError, TypeError, ValueError, SafetensorError) as error:
        raise _damaged(path, error, config) from None
    if len(saved.callbacks) != len(callbacks):
        raise UserError(f"resume: expected the same callbacks as when {folder} began, got others")
    for callback, callback_state in zip(callbacks, saved.callbacks, strict=True):
        callback.load_state_dict(callback_state)
    state.iteration = saved.iteration
    state.stopped_by = saved.stopped_by
    if distributed.is_main():
        print(
            f"Resuming {folder} from {path}: next is iteration {saved.iteration + 1}.", flush=True
        )


def _damaged(path: Path, error: Exception, config: Config) -> UserError:
    reason = " ".join(str(error).split())
    run = path.parents[1]
    advice = (
        "Delete that folder to continue from the checkpoint before it"
        if len(checkpoints(run)) > 1
        else _new_run(run, config)
    )
    return UserError(f"resume: {path} is damaged ({reason}). {advice}")


def _new_run(run: Path, config: Config) -> str:
    """Returns flags for a new run from a run's saved agents, or with its settings if no agents are saved."""
    flags = f"--config {shlex.quote(f'{run}/config.yaml')} --output NEW"
    if finished_iterations(run) is None:
        return f"A new run with its settings: {flags}"
    default = asdict(AgentConfig())
    entries = []
    for index in range(config.cory.num_agents):
        agent = asdict(config.agents[index] if config.agents else AgentConfig())
        agent["model"]["name"] = f"{run}/agent_{index + 1}"
        entries.append({key: value for key, value in agent.items() if value != default[key]})
    text = yaml.safe_dump(entries, default_flow_style=True, sort_keys=False, width=math.inf)
    return f"A new run from its agents: {flags} --agents {shlex.quote(text.strip())}"


def _advice(run: Path, config: Config, state: RunState, error: Exception) -> str:
    """Returns the note for a failed run's error: its newest checkpoint, and how to continue."""
    paths = checkpoints(run)
    if not paths:
        return f"No checkpoint is saved. {_new_run(run, config)}"
    text = f"The newest checkpoint is {paths[-1]}."
    if isinstance(error, NotFinite):
        return (
            f"{text} Continuing would fail again: try a new run with a smaller ppo.learning_rate."
        )
    is_done = state.stopped_by is not None or state.iteration == config.iterations
    if is_done and finished_iterations(run) == state.iteration:
        return f"{text} The run is finished, and its agents are saved."
    return f"{text} Continue with: {resume_command(run)}"
