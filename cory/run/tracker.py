"""wandb, TensorBoard or trackio beside the run's own files, through accelerate's trackers."""

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cory.config import Config
from cory.errors import UserError
from cory.run.output import replace_text
from cory.run.summary import markdown_table

COLUMNS = ("iteration", "agent", "role", "query", "completion", "task_reward")  # of samples.jsonl


def start_tracker(config: Config, folder: Path, resumed_at: int | None = None) -> Any:
    """The requested tracker of accelerate, or None; iterations that are repeated count once in each.

    `resumed_at`: the next iteration of a resumed run. Raises a UserError if the tracker's package is missing.
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
            place = folder / "wandb"
            print(f"wandb: no account is set up, so the run is kept in {place}; `wandb sync` uploads it later.")
    elif config.tracker == "trackio":
        options = {"name": folder.name, "resume": "never" if resumed_at is None else "allow", "embed": False}
    try:
        tracker = LOGGER_TYPE_TO_CLASS[config.tracker]("cory", **options)
    except ImportError as error:
        raise UserError(f"tracker: expected {config.tracker} to be installed, got: {error}") from None
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


def log_samples(tracker: Any, k: int, samples: Sequence[Mapping[str, Any]]) -> None:
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
    known = file.read_text(encoding="utf-8").strip() if file.exists() else ""
    if known.isalnum():
        return {"id": known, "resume": "allow"}
    replace_text(file, new := secrets.token_hex(4))
    return {"id": new}


def _wandb_account() -> bool:
    """Whether wandb has an account to write to; in a terminal it asks for one."""
    import wandb

    try:
        return bool(wandb.login())
    except wandb.errors.UsageError:
        return False


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return {key: value if isinstance(value, (int, float, str)) else str(value) for key, value in flat.items()}
