"""How settings are written and read again, and that those of Python are checked as those of a file."""

from pathlib import Path

import pytest
import yaml

from cory.build import make_agents
from cory.config import Config
from cory.errors import UserError
from cory.run.settings import named
from cory.settings import yaml_text


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
    assert text.startswith("prompt: |-\n  Note: {prompt}\n  Ä question:\n\n    {question}\n")


def test_a_run_has_one_name_by_whatever_path_it_is_reached(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.chdir(run)
    assert named(Path()) == run.resolve() and named(Path("run")) == Path("run")


def test_settings_in_python_are_checked_together_when_they_are_used():
    config = Config()
    config.ppo.learning_rate, config.output = 1, None  # a whole number will do for a float
    config.ppo.batch_size = config.ppo.mini_batch_size = 16
    config.check()
    config.ppo.mini_batch_size = 7
    with pytest.raises(UserError, match=r"ppo\.batch_size: "):
        make_agents(config)
