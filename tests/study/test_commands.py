"""The commands start at once, and their files are light to import."""

import subprocess
import sys

import pytest
from conftest import ROOT

HEAVY = ("torch", "transformers", "trl", "matplotlib", "scipy", "pandas")
RUN = """
import sys
from study.{name} import command_line
from cory.command import main
try:
    main(command_line)
except SystemExit as end:
    print("status", end.code)
print("heavy", [module for module in {heavy} if module in sys.modules])
"""


@pytest.mark.parametrize("name", ["experiment", "compare", "claims"])
@pytest.mark.parametrize("argument, status", [("--help", 0), ("--nope", 2)])
def test_help_and_mistakes_import_nothing_heavy(name, argument, status):
    argv = [sys.executable, "-c", RUN.format(name=name, heavy=HEAVY), argument]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith(f"status {status}\nheavy []\n"), done.stdout + done.stderr
    if argument == "--help":
        assert f"    python -m study.{name} " in done.stdout  # the examples keep their lines
    else:
        assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_planning_an_experiment_and_judging_claims_imports_no_trainer(tmp_path):
    code = "import sys; from study import experiment, claims\n"
    run = ["configs/experiments/imdb_curves.yaml", "--dry-run", "--runs", str(tmp_path)]
    code += f"experiment.command_line({run})\n"
    code += f"claims.command_line(['--results', {str(tmp_path)!r}])\n"
    code += f"print('heavy', [module for module in {HEAVY} if module in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("heavy []\n"), done.stdout + done.stderr


@pytest.mark.parametrize(
    "command", ["-m cory.hub", "-m cory.train", "-m study.compare", "imdb_train/cory.py"]
)
def test_the_usage_names_the_command_as_it_is_typed(command):
    argv = [sys.executable, *command.split(), "--help"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith(f"usage: python {command} ")
