"""Kinds of tasks are found by their registered names."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from conftest import ROOT
from datasets import Dataset

from cory.config import Config
from cory.errors import UserError
from cory.evaluation.command import checked_kind
from cory.roles import RolePrompts
from cory.task import Task
from cory.task_kinds import GROUP, TaskKind, find_kind, kind_of_run, kind_of_script, run_config
from gsm8k_train.config import GSM8K
from imdb_train.config import IMDB

REGISTERED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
HAIKU = """
from cory.config import Config
from cory.task_kinds import TaskKind


class HaikuConfig(Config):
    pass


HAIKU = TaskKind("haiku", HaikuConfig, "haiku_task")
"""
LOOK = """
import sys
from cory.task_kinds import find_kind, kind_of_script
for name in sys.argv[1:]:
    kind = find_kind(name)
    print(kind.name, kind.config.__name__, kind.module)
print("torch" in sys.modules)
"""


@pytest.mark.parametrize("name", ["own", *REGISTERED])
def test_each_registered_kind_has_what_a_task_needs(name):
    kind = find_kind(name)
    assert kind.name == name and issubclass(kind.config, Config) and kind.config().task is not None
    functions = vars(__import__(kind.module, fromlist=["make_task"]))
    assert all(
        callable(functions[function])
        for function in ("make_task", "training_rows", "held_out_rows")
    )


def test_a_task_has_the_name_of_its_kind(monkeypatch):
    """Whatever its functions say, as commands find it again by this name."""
    module = ModuleType("haiku_task")
    module.make_task = lambda config, rows: Task(
        Dataset.from_dict({"prompt": ["Moon."]}),
        lambda prompts, completions: [0.0 for _ in prompts],
        RolePrompts("{prompt}", "{prompt}{response}"),
    )
    monkeypatch.setitem(sys.modules, "haiku_task", module)
    task = TaskKind("haiku", Config, "haiku_task").make_task(Config())
    assert task.kind == task.fingerprint()["task"] == "haiku"


def test_a_script_is_of_the_task_of_its_folder():
    assert (
        kind_of_script("imdb_train/cory.py") is IMDB
        and kind_of_script("gsm8k_train/ppo.py") is GSM8K
    )
    with pytest.raises(
        UserError,
        match="script: expected one in the folder of a registered task, got 'study/report",
    ):
        kind_of_script("study/report.py")


@pytest.mark.parametrize(
    "name", ["antigravity", "antigravity:fly_away", "os.path", "../imdb", "IMDB"]
)
def test_a_name_in_a_run_is_looked_up_and_never_imported(name, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"fingerprint": {"task": name}}))
    with pytest.raises(UserError, match="expected a task among gsm8k, imdb, own, got '"):
        run_config(tmp_path)
    assert "antigravity" not in sys.modules


def test_a_run_that_was_made_in_python_has_no_kind(tmp_path):
    for fingerprint in ({}, {"fingerprint": None}, {"fingerprint": {"task": ""}}):
        assert kind_of_run(fingerprint) is None
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"seed": 3, "task": {"mine": 1}}))
    assert run_config(tmp_path) == Config(seed=3)


def test_the_evaluator_of_another_task_names_the_right_one(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"fingerprint": {"task": "gsm8k"}}))
    with pytest.raises(UserError, match=r"python -m cory\.evaluation"):
        checked_kind(tmp_path, IMDB)
    assert checked_kind(tmp_path, None).name == "gsm8k"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"fingerprint": {"reward": "mine.good"}}))
    with pytest.raises(UserError, match=r"made in Python.*cory\.evaluate\("):
        checked_kind(tmp_path, IMDB)


def look(path: Path, *names: str) -> subprocess.CompletedProcess:
    """Looks names up in a process whose packages are those of a folder."""
    code = f"import sys; sys.path.insert(0, {str(path)!r})\n{LOOK}"
    return subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, cwd=path
    )


def install(site: Path, package: str, entry_points: dict[str, str]) -> None:
    """Writes the metadata of an installed package."""
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]))


def test_installed_packages_register_theirs(tmp_path):
    """Without a checkout: this project as it is installed, and a package of somebody else."""
    for package in ("cory", "imdb_train", "gsm8k_train"):
        shutil.copytree(
            ROOT / package,
            tmp_path / package,
            ignore=shutil.ignore_patterns("weights", "__pycache__"),
        )
    install(tmp_path, "of_somebody", {"haiku": "haiku_config:HAIKU"})
    (tmp_path / "haiku_config.py").write_text(HAIKU)
    install(tmp_path, "this_project", REGISTERED)
    found = look(tmp_path, "haiku", "imdb", "gsm8k", "own")
    assert found.stdout.splitlines() == [
        "haiku HaikuConfig haiku_task",
        "imdb ImdbConfig imdb_train.task",
        "gsm8k Gsm8kConfig gsm8k_train.task",
        "own OwnConfig cory.own_task",
        "False",
    ], found.stderr
