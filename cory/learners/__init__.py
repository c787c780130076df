"""How one agent learns from a rollout."""

import cory.models  # noqa: F401  # before TRL imports PEFT: see there
