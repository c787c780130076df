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
    with suppress(OSError, subprocess.SubprocessError):  # no git, or no checkout
        result["commit"] = commit(Path(__file__).parent)
    return result


def commit(folder: Path) -> str:
    """The commit of a folder's repository, with `-dirty` after it where tracked files differ from it.

    But for those under `results`: an experiment that writes its rows there changes nothing that its next run computes.

    Raises an OSError or a subprocess.SubprocessError: no git, or no repository.
    """
    changes = _git(
        folder, "status", "--porcelain", "--untracked-files=no", "--", ":(top,exclude)results"
    )
    return _git(folder, "rev-parse", "HEAD") + ("-dirty" if changes else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=5
    ).stdout.strip()
