"""Kinds of tasks are found by their registered names."""

import sys
from types import ModuleType

import pytest
import yaml
from conftest import count_good

from cory.config import Config
from cory.errors import UserError
from cory.evaluation.command import checked_kind
from cory.own_task import OWN, OwnConfig
from cory.roles import RolePrompts
from cory.task import Task
from cory.task_kinds import TaskKind, kind_of_run, run_config
from imdb_train.config import IMDB, ImdbConfig


def test_a_task_has_the_name_of_its_kind(monkeypatch):
    """Commands find a run's task by this name, so the name set by the task's own code does not count."""
    module = ModuleType("haiku_task")
    module.make_task = lambda config, rows: Task.from_prompts(["Moon."], count_good, RolePrompts())
    monkeypatch.setitem(sys.modules, "haiku_task", module)
    task = TaskKind("haiku", Config, "haiku_task").make_task(Config())
    assert task.kind == task.fingerprint()["task"] == "haiku"


def test_a_task_name_in_a_run_is_looked_up_and_never_imported(tmp_path):
    write(tmp_path, fingerprint={"task": "antigravity"})
    with pytest.raises(UserError, match="gsm8k, imdb, own"):
        run_config(tmp_path)
    assert "antigravity" not in sys.modules


def write(folder, **settings):
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))


def test_a_run_made_in_python_has_no_kind(tmp_path):
    for fingerprint in ({}, {"fingerprint": None}, {"fingerprint": {"task": ""}}):
        assert kind_of_run(fingerprint) is None
    write(tmp_path, seed=3, task={"mine": 1})
    assert run_config(tmp_path) == Config(seed=3)


@pytest.mark.parametrize(("kind", "config"), [(OWN, OwnConfig), (IMDB, ImdbConfig)])
def test_a_run_made_in_python_can_only_be_resumed_in_python(kind, config, tmp_path):
    write(tmp_path, fingerprint={"task": ""})
    with pytest.raises(UserError, match=r"^resume: .* made in Python"):
        kind.make_task(config(resume=str(tmp_path)))
    with pytest.raises(UserError, match=r"^task\.reward: .*--task\.reward"):
        OWN.make_task(OwnConfig())  # such a run's settings do not say which reward it used


def test_an_evaluator_refuses_runs_of_other_tasks(tmp_path):
    write(tmp_path, fingerprint={"task": "gsm8k"})
    assert checked_kind(tmp_path, None).name == "gsm8k"
    for fingerprint in ({"task": "gsm8k"}, {"reward": "mine.good"}):
        write(tmp_path, fingerprint=fingerprint)
        with pytest.raises(UserError):
            checked_kind(tmp_path, IMDB)
