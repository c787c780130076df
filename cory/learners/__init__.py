"""Learners: how one agent learns from its rollouts."""

import cory.models  # noqa: F401  # must come before TRL imports PEFT; cory/models/__init__.py says why
