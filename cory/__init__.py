"""CORY (Ma et al., NeurIPS 2024): fine-tuning a language model as a pioneer and an observer that exchange roles."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cory.agent import Agent, Rollout, make_agents
    from cory.config import Config, UserError
    from cory.evaluation import evaluate
    from cory.prompts import RolePrompts
    from cory.rewards import collective
    from cory.roles import RoleSchedule
    from cory.task import Task
    from cory.trainer import CoryTrainer

PUBLIC = {
    "agent": ("Agent", "Rollout", "make_agents"),
    "config": ("Config", "UserError"),
    "evaluation": ("evaluate",),
    "prompts": ("RolePrompts",),
    "rewards": ("collective",),
    "roles": ("RoleSchedule",),
    "task": ("Task",),
    "trainer": ("CoryTrainer",),
}
__all__ = [
    "Agent",
    "Config",
    "CoryTrainer",
    "RolePrompts",
    "RoleSchedule",
    "Rollout",
    "Task",
    "UserError",
    "collective",
    "evaluate",
    "make_agents",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that settings are read and checked without torch."""
    for module, names in PUBLIC.items():
        if name in names:
            return getattr(importlib.import_module(f"cory.{module}"), name)
    raise AttributeError(f"module 'cory' has no attribute {name!r}")
