"""wandb, TensorBoard or trackio beside the run's own files, through accelerate's trackers."""

import os
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cory.config import Config, UserError
from cory.run.jsonl import replace_text


def start_tracker(config: Config, folder: Path) -> Any:
    """accelerate's tracker of the kind that is asked for, or None.

    Raises:
        UserError: its package is not installed.
    """
    if config.tracker == "none":
        return None
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    tracker_class = LOGGER_TYPE_TO_CLASS[config.tracker]
    options: dict[str, Any] = {}
    if config.tracker == "wandb":
        options = {"dir": str(folder), "name": folder.name, **_wandb_run(folder)}
        if not os.environ.get("WANDB_MODE") and not _wandb_account():
            options["mode"] = "offline"
            print(
                f"wandb: no account is set up, so the run is kept in {folder / 'wandb'}; `wandb sync` uploads it later."
            )
    if config.tracker == "tensorboard":
        options = {"logging_dir": str(folder)}
    try:
        tracker = tracker_class("cory", **options)
    except ImportError as error:
        raise UserError(f"tracker: expected {config.tracker} to be installed, got: {error}") from None
    if hasattr(tracker, "start"):
        tracker.start()
    tracker.store_init_configuration(_flat(asdict(config)))
    return tracker


def _wandb_run(folder: Path) -> dict[str, str]:
    """The run that wandb goes on with where this one is resumed: its id lies in the run's folder."""
    file = folder / "wandb_id"
    known = file.exists() and file.read_text(encoding="utf-8").strip().isalnum()
    if not known:
        replace_text(file, secrets.token_hex(4))
    return {"id": file.read_text(encoding="utf-8").strip(), **({"resume": "allow"} if known else {})}


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
