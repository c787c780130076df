"""Which task a run is of, from its config.yaml. Importing this does not import torch."""

import importlib
from collections.abc import Mapping
from typing import Any

from cory.config import Config
from cory.tasks.config import OwnConfig

BUILT_IN = {"imdb_train": "ImdbConfig", "gsm8k_train": "Gsm8kConfig"}  # packages of tasks, and their configuration


def kind_of(settings: Mapping[str, Any]) -> tuple[type[Config], str | None]:
    """The configuration class of a run, and the module whose `make_task` makes its task.

    `Config` and None for a run that was started from Python code, with a task that its folder does not describe.
    """
    package = str((settings.get("fingerprint") or {}).get("reward")).partition(".")[0]
    if package in BUILT_IN:  # no other module is imported because a file names it
        return getattr(importlib.import_module(f"{package}.config"), BUILT_IN[package]), f"{package}.task"
    if isinstance(settings.get("task"), Mapping) and "reward" in settings["task"]:
        return OwnConfig, "cory.tasks.own"
    return Config, None
