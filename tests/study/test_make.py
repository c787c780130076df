"""Into which folder an example's make.py writes."""

import sys
from pathlib import Path

import pytest

from cory.errors import UserError
from study.make import make_into


def made(folder, monkeypatch, name="notes"):
    """What is in a folder after a make.py has filled it."""

    def make(folder):
        (folder / "model").mkdir()
        (folder / "model/weights").write_text(name)

    monkeypatch.setattr(sys, "argv", ["make.py", str(folder)])
    make_into(folder / "default", name, ["model"], make, "Makes a model.")
    return {path.name for path in folder.iterdir()}


def test_a_folder_is_filled_again(tmp_path, monkeypatch):
    for _ in range(2):
        assert made(tmp_path / "out", monkeypatch) == {"model", "made_by_notes.txt"}


def test_a_model_of_ones_own_is_kept(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights").write_text("mine")
    with pytest.raises(UserError, match="where model would be replaced"):
        made(tmp_path, monkeypatch)
    assert (tmp_path / "model/weights").read_text() == "mine"
    made(tmp_path / "out", monkeypatch)
    with pytest.raises(UserError, match=r"made_by_weather\.txt"):
        made(tmp_path / "out", monkeypatch, "weather")


def test_help_makes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        made(Path("--help"), monkeypatch)
    assert "Makes a model." in capsys.readouterr().out and not list(tmp_path.iterdir())
