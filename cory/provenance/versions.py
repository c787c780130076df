"""Versions of Python, the libraries and this repository."""

import platform
import subprocess
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets")


def versions() -> dict[str, str]:
    """Python, the libraries, and this repository's commit where it is a checkout."""
    result = {"python": platform.python_version()}
    for library in LIBRARIES:
        result[library] = version(library)
    folder = str(Path(__file__).parent)
    git = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):  # no git, or no checkout
        described = subprocess.run(git, capture_output=True, text=True, check=True, timeout=5)
        result["commit"] = described.stdout.strip()
    return result
