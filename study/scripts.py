"""The scripts that an experiment runs: those of the checkout, or the modules of a task of one's own."""

import sys
from pathlib import Path

from cory.errors import UserError

ROOT = Path(__file__).resolve().parent.parent  # the checkout, with its scripts and configurations


def is_module(script: str) -> bool:
    """Whether a script is run with `python -m`, from the current directory, and not from the checkout."""
    return not script.endswith(".py")


def start(script: str) -> list[str]:
    """The beginning of the command that runs a script."""
    return [sys.executable, *(["-m"] if is_module(script) else []), script]


def checkout_file(name: str, what: str) -> Path:
    """A script or configuration of the repository, by its path in there.

    Raises:
        UserError: it is missing, as in an installation without a checkout.
    """
    path = ROOT / name
    if not path.is_file():
        raise UserError(
            f"{what}: expected a file {name!r} in {str(ROOT)!r}, got none. Experiments run scripts and configurations "
            "of a checkout of the repository: clone it, and run the command there"
        )
    return path
