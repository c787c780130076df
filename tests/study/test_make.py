"""Into which folder an example's make.py writes."""

import sys
from pathlib import Path

import pytest

from study.make import make_into


def made(folder, monkeypatch, weights="new"):
    """What is in a folder after a make.py has filled it."""

    def make(folder):
        (folder / "model").mkdir()
        (folder / "model/weights").write_text(weights)

    monkeypatch.setattr(sys, "argv", ["make.py", str(folder)])
    make_into(folder / "default", make, "Makes a model.")
    return {path.name for path in folder.iterdir()}


def test_a_folder_is_filled_again(tmp_path, monkeypatch):
    for weights in ("old", "new"):
        assert made(tmp_path / "out", monkeypatch, weights) == {"model"}
        assert (tmp_path / "out/model/weights").read_text() == weights


def test_help_makes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        made(Path("--help"), monkeypatch)
    assert "Makes a model." in capsys.readouterr().out and not list(tmp_path.iterdir())
