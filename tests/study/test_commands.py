"""The commands' usage."""

import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.parametrize(
    "command", ["-m cory.hub", "-m cory.train", "-m study.compare", "imdb_train/cory.py"]
)
def test_the_usage_names_the_command_as_it_is_typed(command):
    argv = [sys.executable, *command.split(), "--help"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith(f"usage: python {command} ")
