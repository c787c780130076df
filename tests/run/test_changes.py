"""What may change when a run continues, and how that is recorded."""

import json
from dataclasses import replace

import pytest
import yaml
from conftest import sentences
from test_resume import count_good, make_trainer, one  # noqa: F401

from cory.config import CheckpointConfig
from cory.resume import find
from cory.resume.differences import differences, in_words

BROKEN = """
calls = [0]


def good(prompts, completions):
    calls[0] += 1
    if calls[0] == 3 + 3:  # three for the samples before training: the third iteration
        return [float("nan")] * len(prompts)
    return [float(text.count("good")) for text in completions]
"""
MENDED = """
def good(prompts, completions):
    return [float(text.count("good")) for text in completions]
"""


@pytest.fixture
def failed(policy_folder, tmp_path, monkeypatch, command):
    """A run of `cory.train` whose reward failed in the third iteration; how to run it; and its folder."""
    (tmp_path / "rewards.py").write_text(BROKEN)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in sentences(16))
    )
    settings = {
        "iterations": 4,
        "device": "cpu",
        "output": "runs/a",
        "model": {"name": str(policy_folder)},
        "ppo": {"batch_size": 8, "mini_batch_size": 8},
        "sampling": {"min_new_tokens": 3, "max_new_tokens": 6},
        "task": {"dataset": "prompts.jsonl", "reward": "rewards.py:good"},
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(settings))

    monkeypatch.chdir(tmp_path)

    def run(*flags):
        return command("cory.train", *flags)

    first = run("--config", "my.yaml")
    assert first.status == 2 and "iteration 3: reward rewards.py:good" in first.error
    run.said = first.error
    return run, tmp_path / "runs/a"


def test_a_changed_reward_is_refused(failed):
    run, folder = failed
    (folder.parent.parent / "rewards.py").write_text(MENDED)
    before = (folder / "metrics.jsonl").read_bytes()
    refused = run("--resume", "runs/a")
    assert refused.status == 2
    assert (
        "got others: the source of the reward, rewards.py, or a file beside it that it imports, has changed. "
        "To go on with others, start a new run from its agents (model.name: runs/a/agent_1)."
    ) in refused.error
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_of_several_rewards_those_that_changed_are_named():
    saved = {
        "fingerprint": {
            "reward": "one.py:a + 0.2 * two.py:b + two.py:c",
            "reward_sha256": "1+2+2",
            "team_reward": "team.all",
            "team_reward_sha256": "5",
        }
    }
    wanted = {
        "fingerprint": saved["fingerprint"] | {"reward_sha256": "1+3+3", "team_reward_sha256": "6"}
    }
    changes = list(differences(saved, wanted))
    assert in_words(changes, saved, wanted) == [
        "the source of the reward, two.py, or a file beside it that it imports, has changed",
        "the source of the team reward, team.all, has changed",
    ]


def test_changed_prompts_are_named_with_the_command_of_a_new_run(failed):
    run, folder = failed
    (folder.parent.parent / "rewards.py").write_text(BROKEN)
    prompts = folder.parent.parent / "prompts.jsonl"
    prompts.write_text(prompts.read_text().replace("film", "plot"))
    refused = run("--resume", "runs/a")
    assert refused.error.endswith(
        "got others: the training data prompts.jsonl has changed. To go on with others, start a new run from its "
        "agents (model.name: runs/a/agent_1). "
        "A new run with its settings: python -m cory.train --config runs/a/config.yaml\n"
    )


def test_other_versions_are_named(one, capsys, monkeypatch):  # noqa: F811
    folder = make_trainer(replace(one, iterations=1, checkpoint=CheckpointConfig())).train().folder
    monkeypatch.setattr(
        "cory.run.folder.versions", lambda: {"torch": "9.9", "transformers": "9.8", "trl": "0.11.4"}
    )
    make_trainer(replace(one, resume=str(folder), iterations=2)).train()
    warned = capsys.readouterr().err
    assert "Warning: the run began with other versions: torch " in warned
    assert "-> 9.9, transformers " in warned and "trl" not in warned


def test_the_names_of_versions_are_those_that_are_recorded(one):  # noqa: F811
    folder = make_trainer(replace(one, iterations=1)).train().folder
    recorded = yaml.safe_load((folder / "config.yaml").read_text())["versions"]
    assert set(find.WATCHED_VERSIONS) <= set(recorded)
