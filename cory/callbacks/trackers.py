"""wandb, TensorBoard or trackio beside the run's own files, through accelerate's trackers: `tracker`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cory.callbacks.callback import Callback
from cory.config import Config
from cory.errors import UserError
from cory.iteration import Iteration
from cory.report.tables import markdown_table
from cory.run.folder import write_text

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

    from cory.run.folder import Run
    from cory.trainer import CoryTrainer

COLUMNS = ("iteration", "agent", "role", "query", "completion", "task_reward")  # of samples.jsonl


class Trackers(Callback):
    """Passes samples, metrics and timings of each iteration on to the tracker of the settings, in the main process."""

    def __init__(self) -> None:
        self.tracker: GeneralTracker | None = None

    def on_train_begin(self, trainer: CoryTrainer, run: Run) -> None:
        if not run.writes:
            return
        resumed_at = len(run.seconds) if run.resumed else None
        self.tracker = start_tracker(trainer.config, run.folder, resumed_at)
        if self.tracker is not None:
            run.exits.callback(self.tracker.finish)  # however the run ends

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        if self.tracker is None:
            return
        if iteration.samples:
            log_samples(self.tracker, iteration.index, iteration.samples)
        # An agent that holds several roles has a curve for each of them.
        several_roles = trainer.config.cory.num_roles > trainer.config.cory.num_agents
        self.tracker.log(curves(iteration.records, several_roles), step=iteration.index)
        timings = {
            f"time/{key}": value for key, value in iteration.timings.items() if key != "iteration"
        }
        self.tracker.log(timings, step=iteration.index)


def curves(records: list[dict[str, Any]], several_roles: bool) -> dict[str, float]:
    """The numbers of an iteration by the names of their curves: `agent_1/kl`, or `agent_1/pioneer/kl`."""
    values: dict[str, float] = {}
    for record in records:
        agent, role = record["agent"], record["role"]
        prefix = f"{agent}/{role}" if several_roles else agent
        values |= {
            f"{prefix}/{key}": value for key, value in record.items() if isinstance(value, float)
        }
        values[f"{agent}/is_{role}"] = 1
    return values


def start_tracker(
    config: Config, folder: Path, resumed_at: int | None = None
) -> GeneralTracker | None:
    """The requested tracker of accelerate, or None; iterations that are repeated count once in
    each.

    `resumed_at`: the next iteration of a resumed run. Raises a UserError if the tracker's package
    is missing.
    """
    if config.tracker == "none":
        return None
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    options: dict[str, Any] = {}
    if config.tracker == "tensorboard":
        options = {"logging_dir": str(folder), "purge_step": resumed_at}
    elif config.tracker == "wandb":  # ignores earlier steps than its last one
        options = {"dir": str(folder), "name": folder.name, **_wandb_run(folder)}
        if not os.environ.get("WANDB_MODE") and not _wandb_account():
            options["mode"] = "offline"
            print(
                f"wandb: no account is set up, so the run is kept in {folder / 'wandb'}; `wandb sync` uploads it later."
            )
    elif config.tracker == "trackio":
        options = {
            "name": folder.name,
            "resume": "never" if resumed_at is None else "allow",
            "embed": False,
        }
    try:
        tracker = LOGGER_TYPE_TO_CLASS[config.tracker]("cory", **options)
    except ImportError as error:
        raise UserError(
            f"tracker: expected {config.tracker} to be installed, got: {error}"
        ) from None
    tracker.start()
    tracker.store_init_configuration(_flat(asdict(config)))
    if config.tracker == "trackio" and resumed_at is not None:
        _skip_logged(tracker)
    return tracker


def _skip_logged(tracker: Any) -> None:
    """Makes a resumed trackio run ignore steps up to its last one, which it would log twice."""
    from trackio.sqlite_storage import SQLiteStorage

    last = SQLiteStorage.get_max_step_for_run(tracker.run_name, run_id=tracker.run.id)
    log = tracker.log
    if last is not None:
        tracker.log = lambda values, step: log(values, step) if step > last else None


def log_samples(tracker: GeneralTracker, k: int, samples: Sequence[Mapping[str, Any]]) -> None:
    """Sends sample texts of iteration `k` as the table `completions`, with the columns of samples.jsonl."""
    rows = [[row[column] for column in COLUMNS] for row in samples]
    if tracker.name == "tensorboard":  # shows texts as Markdown
        cells = [[str(value) for value in row] for row in rows]
        tracker.log({"completions": markdown_table(COLUMNS, cells)}, step=k)
    elif tracker.name == "wandb":
        tracker.log_table("completions", columns=list(COLUMNS), data=rows, step=k)
    else:
        import trackio

        tracker.log({"completions": trackio.Table(list(COLUMNS), rows)}, step=k)


def _wandb_run(folder: Path) -> dict[str, str]:
    """The wandb run to continue if this one is resumed; its id is stored in the run's folder."""
    file = folder / "wandb_id"
    stored_id = file.read_text(encoding="utf-8").strip() if file.exists() else ""
    if stored_id.isalnum():
        return {"id": stored_id, "resume": "allow"}
    new_id = secrets.token_hex(4)
    write_text(file, new_id)
    return {"id": new_id}


def _wandb_account() -> bool:
    """Whether wandb has an account to write to; in a terminal it asks for one."""
    import wandb

    try:
        return bool(wandb.login())
    except wandb.errors.UsageError:
        return False


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings under dotted keys, as numbers and texts."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, (int, float, str)) else str(value)
    return flat
