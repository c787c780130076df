"""What may change when a run continues, and how that is recorded."""

import json
import shlex
from dataclasses import replace

import pytest
import yaml
from conftest import sentences
from test_resume import count_good, make_trainer, one  # noqa: F401

from cory.config import CheckpointConfig
from cory.errors import UserError
from cory.resume import find
from cory.resume.differences import differences, in_words

BROKEN = """
calls = [0]


def good(prompts, completions):
    calls[0] += 1
    if calls[0] == 3 + 3:  # three for the samples before training: the third iteration
        raise ValueError("the reward's own fault")
    return [float(text.count("good")) for text in completions]
"""
MENDED = """
def good(prompts, completions):
    return [float(text.count("good")) for text in completions]
"""


@pytest.fixture
def failed(policy_folder, tmp_path, monkeypatch, command):
    """A run of `cory.train` whose reward raised in the third iteration; how to run it; and its folder."""
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
    assert first.status == 2 and "iteration 3: reward function rewards.py:good" in first.error
    run.said = first.error
    return run, tmp_path / "runs/a"


def pasted(said: str) -> list[str]:
    """The flags of the command that a failed run has printed."""
    (line,) = (
        line
        for line in said.splitlines()
        if line.startswith("Mend the reward, then continue with: ")
    )
    program, *flags = shlex.split(line.partition(": ")[2])
    assert [program, *flags[:2]] == ["python", "-m", "cory.train"]
    return flags[2:]


@pytest.mark.parametrize("calls", [1, 4])
def test_a_reward_that_fails_before_the_first_checkpoint_is_mended_and_continued(failed, calls):
    """In the samples before training, of which nothing is saved, and in the first iteration."""
    run, folder = failed
    rewards = folder.parent.parent / "rewards.py"
    rewards.write_text(BROKEN.replace("3 + 3:", f"{calls}:"))
    broken = run("--config", "my.yaml", "--output", "runs/b")
    assert broken.status == 2
    assert (
        "No state is saved."
        if calls == 1
        else "The last good state is runs/b/checkpoints/iter-000000."
    ) in broken.error
    rewards.write_text(MENDED)
    done = run(*pasted(broken.error))
    assert done.status == 0, done.error
    assert len((folder.with_name("b") / "metrics.jsonl").read_text().splitlines()) == 2 * 4


def test_a_mended_reward_continues_if_that_is_said(failed):
    run, folder = failed
    (folder.parent.parent / "rewards.py").write_text(MENDED)
    before = (folder / "metrics.jsonl").read_bytes()
    refused = run("--resume", "runs/a")
    assert refused.status == 2
    assert (
        "got others: the source of the reward, rewards.py, or a file beside it that it imports, has changed. "
        "If the reward was changed on purpose: "
        "python -m cory.train --resume runs/a --accept_changes reward\n"
    ) in refused.error
    assert (folder / "metrics.jsonl").read_bytes() == before

    done = run(*pasted(run.said))
    assert done.status == 0, done.error
    assert "The reward changes before iteration 3" in done.out
    assert (folder / "metrics.jsonl").read_bytes().startswith(before)
    record = yaml.safe_load((folder / "config.yaml").read_text())
    (change,) = record["changes"]
    assert change["iteration"] == 2 and record["accept_changes"] == "none"
    assert change["from"]["reward_sha256"] != change["to"]["reward_sha256"]
    assert change["to"]["reward_sha256"] == record["fingerprint"]["reward_sha256"]
    report = (folder / "report.html").read_text()
    assert (
        "The reward changed while this run trained. From iteration 2 on (counted from 0)" in report
    )

    longer = run("--resume", "runs/a", "--iterations", "5")  # from now on it is the run's reward
    assert longer.status == 0, longer.error
    assert yaml.safe_load((folder / "config.yaml").read_text())["changes"] == record["changes"]


def test_a_reward_with_which_no_iteration_was_trained_is_not_recorded(failed):
    run, folder = failed
    first = yaml.safe_load((folder / "config.yaml").read_text())["fingerprint"]["reward_sha256"]
    (folder.parent.parent / "rewards.py").write_text(BROKEN.replace("3 + 3", "1"))  # fails at once
    assert run("--resume", "runs/a", "--accept_changes", "reward").status == 2
    (folder.parent.parent / "rewards.py").write_text(MENDED)
    assert run("--resume", "runs/a", "--accept_changes", "reward").status == 0
    (change,) = yaml.safe_load((folder / "config.yaml").read_text())["changes"]
    assert change["iteration"] == 2 and change["from"]["reward_sha256"] == first


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
        "got others: the training data prompts.jsonl has changed. "
        "A new run with its settings: python -m cory.train --config runs/a/config.yaml\n"
    )


def test_only_the_reward_is_accepted(one):  # noqa: F811
    folder = make_trainer(replace(one, iterations=1)).train().folder
    changed = replace(one, resume=str(folder), accept_changes="reward", seed=3)

    def other(prompts, completions):
        return [-reward for reward in count_good(prompts, completions)]

    with pytest.raises(UserError, match=r"got others: seed: 0 -> 3$"):
        make_trainer(changed, other).train()
    make_trainer(replace(changed, seed=0), other).train()


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
