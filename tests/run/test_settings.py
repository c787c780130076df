"""Settings are read back as they were written, and settings from Python are checked like those from a file."""

from pathlib import Path

import pytest
import yaml

from cory.build import make_agents
from cory.config import Config
from cory.errors import UserError
from cory.run.settings import named
from cory.settings import yaml_text


def test_multi_line_texts_are_written_as_blocks_and_read_back_unchanged():
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


def test_the_current_folder_is_named_by_its_absolute_path(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.chdir(run)
    assert named(Path()) == run.resolve() and named(Path("run")) == Path("run")


def test_settings_in_python_are_checked_together_when_they_are_used():
    config = Config()
    config.ppo.learning_rate, config.output = 1, None  # an integer is accepted for a float
    config.ppo.batch_size = config.ppo.mini_batch_size = 16
    config.check()
    config.ppo.mini_batch_size = 7
    with pytest.raises(UserError, match=r"ppo\.batch_size: "):
        make_agents(config)
