"""Loading of functions and classes that settings name as FILE.py:NAME."""

import os
import sys

import pytest

from cory.code_files import announce_files, load_code
from cory.errors import UserError
from cory.own_task import OwnConfig, OwnTaskConfig
from cory.run.callback import load_callbacks


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


VALUE = "def value(completions):\n    return [{}.0 for _ in completions]\n"


def call(name):
    return load_code("task.reward", name).value([""])


def test_an_edit_within_a_second_counts(workdir, monkeypatch):
    """The edit changes neither the file's modification time nor its size, so a bytecode cache would seem current."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for number in (1, 2):
        (workdir / "rewards.py").write_text(VALUE.format(number))
        os.utime(workdir / "rewards.py", (1e9, 1e9))
        assert call("rewards.py:value") == [number]


def test_neighbouring_files_are_imported_by_a_leading_dot(workdir):
    for folder, number in (("one", 1), ("two", 2)):
        (workdir / folder).mkdir()
        (workdir / folder / "helper.py").write_text("from .more import number\n")
        (workdir / folder / "more.py").write_text(f"number = {number}.0\n")
        source = "from . import helper\ndef value(completions):\n    return [helper.number]\n"
        (workdir / folder / "rewards.py").write_text(source)
        assert call(f"{folder}/rewards.py:value") == [number]
    assert str(workdir) not in sys.path and "helper" not in sys.modules


def test_a_callback_and_a_reward_of_one_file_share_its_globals(workdir):
    callback = (
        "from cory import Callback\nclass Doubles(Callback):\n"
        "    def on_iteration_begin(self, trainer, k):\n        factor[0] *= 2\n"
    )
    reward = "factor = [1.0]\ndef value(completions):\n    return [factor[0]] * len(completions)\n"
    (workdir / "both.py").write_text(reward + callback)
    (doubles,) = load_callbacks("both.py:Doubles")
    doubles.on_iteration_begin(None, 0)
    assert call("both.py:value") == [2.0]


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("def good(:\n", "line 1"),
        ("\n\ndef f():\n    return 1 / 0\n\nf()\n", "line 4"),
        ("good = 1\n", "'good'"),
    ],
)
def test_a_file_that_fails_is_named_with_its_line(workdir, code, place):
    (workdir / "bad.py").write_text(code)
    with pytest.raises(UserError, match=f"^task.reward: .*{place}"):
        load_code("task.reward", "bad.py:good")


def test_a_class_as_reward_and_a_function_as_callback_are_refused(workdir):
    (workdir / "both.py").write_text("class Judge: pass\ndef judge(): pass\n")
    assert load_code("callbacks", "both.py:Judge").name == "both.py:Judge"
    for key, name in [("task.reward", "Judge"), ("callbacks", "judge")]:
        with pytest.raises(UserError, match=rf"^{key}: .*{name}"):
            load_code(key, f"both.py:{name}")


@pytest.mark.parametrize("name", ["rewards.py", "none.py:good", "rewards:good"])
def test_a_name_without_an_existing_file_is_refused(workdir, name):
    (workdir / "rewards.py").write_text(VALUE.format(1))
    with pytest.raises(UserError, match=r"^task\.reward: "):
        load_code("task.reward", name)


def test_code_that_a_run_names_is_announced(workdir, capsys):
    task = OwnTaskConfig(reward=["a.py:one", "b.py:two"], metrics="c.py:three")
    config = OwnConfig(task=task, callbacks="d.py:Four")
    announce_files(workdir, config, {"task.metrics"}, callbacks=True)
    error = capsys.readouterr().err
    assert all(name in error for name in ("a.py:one", "b.py:two", "d.py:Four"))
    assert "c.py" not in error  # named on the command line and not by the run
