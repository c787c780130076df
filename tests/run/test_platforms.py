"""Other machines than Linux with or without CUDA, as far as one of those can tell."""

import os
import subprocess
import sys

from conftest import ROOT


def run(code: str, *arguments: str) -> str:
    """What a program prints, run in a process of its own: the first device that one chooses stays."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


PRINT = """
from cory.command import main
main(lambda: print("Le caf\u00e9"))
"""


def test_a_terminal_without_a_letter_shows_its_number(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert run(PRINT) == "Le caf\\xe9\n"
