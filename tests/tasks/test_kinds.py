"""Kinds of tasks are found by their registered names."""

import shutil
import subprocess
import sys
import tomllib
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
from cory.task_kinds import GROUP, TaskKind, kind_of_run, kind_of_script, run_config
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
    assert kind_of_script("imdb_train/cory.py") is IMDB
    assert kind_of_script("gsm8k_train/ppo.py") is GSM8K
    with pytest.raises(UserError, match=r"^script: "):
        kind_of_script("study/report.py")


@pytest.mark.parametrize(
    "name", ["antigravity", "antigravity:fly_away", "os.path", "../imdb", "IMDB"]
)
def test_a_name_in_a_run_is_looked_up_and_never_imported(name, tmp_path):
    write(tmp_path, fingerprint={"task": name})
    with pytest.raises(UserError, match="gsm8k, imdb, own"):
        run_config(tmp_path)
    assert "antigravity" not in sys.modules


def write(folder, **settings):
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))


def test_a_run_that_was_made_in_python_has_no_kind(tmp_path):
    for fingerprint in ({}, {"fingerprint": None}, {"fingerprint": {"task": ""}}):
        assert kind_of_run(fingerprint) is None
    write(tmp_path, seed=3, task={"mine": 1})
    assert run_config(tmp_path) == Config(seed=3)


def test_an_evaluator_refuses_runs_of_other_tasks(tmp_path):
    write(tmp_path, fingerprint={"task": "gsm8k"})
    assert checked_kind(tmp_path, None).name == "gsm8k"
    for fingerprint in ({"task": "gsm8k"}, {"reward": "mine.good"}):
        write(tmp_path, fingerprint=fingerprint)
        with pytest.raises(UserError):
            checked_kind(tmp_path, IMDB)


def test_installed_packages_register_theirs(tmp_path):
    """Without a checkout: this project as it is installed, and a package of somebody else."""
    for package in ("cory", "imdb_train", "gsm8k_train"):
        ignored = shutil.ignore_patterns("weights", "__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    (tmp_path / "haiku_config.py").write_text(HAIKU)
    registered = REGISTERED | {"haiku": "haiku_config:HAIKU"}
    info = tmp_path / "this_project-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: this_project\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in registered.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{LOOK}"
    argv = [sys.executable, "-c", code, "haiku", "imdb", "gsm8k", "own"]
    found = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert found.stdout.splitlines() == [
        "haiku HaikuConfig haiku_task",
        "imdb ImdbConfig imdb_train.task",
        "gsm8k Gsm8kConfig gsm8k_train.task",
        "own OwnConfig cory.own_task",
        "False",
    ], found.stderr
