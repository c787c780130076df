"""How settings are written for people, and read again."""

from dataclasses import asdict
from pathlib import Path

import yaml

from cory.command import load
from cory.run.settings import named
from cory.yaml_file import yaml_text
from imdb_train.config import ImdbConfig


def test_texts_of_several_lines_stand_as_blocks_and_are_read_as_they_were():
    settings = {
        "prompt": "Note: {prompt}\nÄ question:\n\n  {question}\nAnswer:",
        "stop": ["\n", "\n\n", " \n"],
        "trailing": "a \nb\t\n",
        "odd": "a\x07\nb\r\nc",
        "plain": "no",
    }
    text = yaml_text(settings)
    assert yaml.safe_load(text) == settings and list(yaml.safe_load(text)) == list(settings)
    lines = text.splitlines()
    assert lines[:6] == [
        "prompt: |-",
        "  Note: {prompt}",
        "  Ä question:",
        "",
        "    {question}",
        "  Answer:",
    ]


def test_texts_that_look_like_numbers_or_lines_stay_texts(tmp_path):
    flags = ["--sampling.stop", "['1e3', '\\n']", "--model.revision", "1234e56"]
    config = load(ImdbConfig, None, [*flags, "--task.observer_prompt", "a\x85b\u2028c\n d"])
    (tmp_path / "config.yaml").write_text(yaml_text(asdict(config)), encoding="utf-8")
    assert load(ImdbConfig, None, ["--config", str(tmp_path / "config.yaml")]) == config


def test_a_run_has_one_name_by_whatever_path_it_is_reached(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.chdir(run)
    assert named(Path()) == run.resolve() and named(Path("run")) == Path("run")
