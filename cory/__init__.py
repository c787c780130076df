"""CORY (Ma et al., NeurIPS 2024): fine-tuning a language model as a pioneer and an observer that exchange roles."""

from cory.agent import Agent, Rollout
from cory.config import Config, UserError
from cory.data import Task
from cory.models import make_agents
from cory.prompts import RolePrompts
from cory.rewards import collective
from cory.roles import RoleSchedule
from cory.trainer import CoryTrainer

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
    "make_agents",
]
