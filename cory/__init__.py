"""CORY (Ma et al., NeurIPS 2024): fine-tunes two copies of a language model that answer in turn and exchange roles."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cory.agent import Agent  # noqa: F401
    from cory.build import make_agents  # noqa: F401
    from cory.chain import RoleSchedule  # noqa: F401
    from cory.config import Config, EvaluationConfig  # noqa: F401
    from cory.credit import assign_credit  # noqa: F401
    from cory.errors import UserError  # noqa: F401
    from cory.evaluation.command import evaluate  # noqa: F401
    from cory.iteration import Iteration  # noqa: F401
    from cory.roles import RolePrompts  # noqa: F401
    from cory.rollout import Rollout  # noqa: F401
    from cory.run.callback import Callback  # noqa: F401
    from cory.task import Task  # noqa: F401
    from cory.trainer import CoryTrainer  # noqa: F401

HOME = {
    "Agent": "agent",
    "Callback": "run.callback",
    "Config": "config",
    "CoryTrainer": "trainer",
    "EvaluationConfig": "config",
    "Iteration": "iteration",
    "RolePrompts": "roles",
    "RoleSchedule": "chain",
    "Rollout": "rollout",
    "Task": "task",
    "UserError": "errors",
    "assign_credit": "credit",
    "evaluate": "evaluation.command",
    "make_agents": "build",
}
__all__ = [*HOME]


def __getattr__(name: str) -> Any:
    """Imports public names lazily, so that settings are read and checked without importing torch."""
    if name not in HOME:
        raise AttributeError(f"module 'cory' has no attribute {name!r}")
    return getattr(importlib.import_module(f"cory.{HOME[name]}"), name)
