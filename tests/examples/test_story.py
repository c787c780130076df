"""The story's example: its reward, data, settings and table, and runs of two iterations on a random model."""

import doctest
import importlib
import json
import statistics
import sys

import pytest
from conftest import ROOT

from cory import evaluate
from cory.agents import make_agents
from cory.cli.load import load
from cory.evaluation.settings import EvaluationConfig
from cory.tasks.config import OwnConfig
from cory.tasks.own import held_out_rows, make_task
from cory.trainer import CoryTrainer

EXAMPLE = ROOT / "examples/story"
SETTINGS = ["story.yaml", "story_alone.yaml", "toy.yaml", "toy_alone.yaml"]


def imported(name):
    """A module of the example, which imports its neighbours as a script does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        for module in ("make", "rewards", "table"):
            sys.modules.pop(module, None)
        loaded = importlib.import_module(name)
    for module in ("make", "rewards", "table"):
        sys.modules.pop(module, None)
    return loaded


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The toy's data, and a model that has hardly been trained."""
    folder = tmp_path_factory.mktemp("story")
    make = imported("make")
    make.SIZE["positions"] = (
        400  # for the instructions of story.yaml, in a tokenizer that does not know them
    )
    make.make(folder, texts=200, steps=2)
    return folder


def settings(world, name, **flags):
    flags = {
        "task.dataset": world,
        "model.name": world / "model",
        "model.chat_template": "false",
        "device": "cpu",
        "iterations": 2,
        "lora.rank": 0,
        "ppo.batch_size": 8,
        "ppo.mini_batch_size": 4,
    } | flags
    argv = [f"--{key}={value}" for key, value in flags.items()]
    config = load(OwnConfig, EXAMPLE / name, argv)
    return config


def train(config):
    return CoryTrainer(config, make_agents(config), make_task(config)).train()


def test_the_reward():
    rewards = imported("rewards")
    assert doctest.testmod(rewards).failed == 0
    opening = "the fox went to the mill and there it found an old bell today"
    words = "then but so later fox mill found old bell today went there".split()
    best = [opening, " ".join([*words, *(f"new{i}" for i in range(12))])]
    assert rewards.parts(best) == dict.fromkeys(("opening", "ending", "shared", "transitions"), 1)
    copied = rewards.parts([opening, f"{opening} {opening}"])
    assert copied["shared"] == 0 and copied["transitions"] == 0
    assert rewards.story([["", ""], best]) == [0.0, 1.0]


def test_one_text_is_parted_into_paragraphs():
    paragraphs = imported("rewards").paragraphs
    assert paragraphs(["\nOne.\n\nTwo.\nThree."]) == ("One.", "\nTwo.\nThree.")
    assert paragraphs(["One. Two."]) == ("One. Two.", "")
    assert paragraphs(["One.\nTwo.", "Three."]) == ("One.\nTwo.", "Three.")


def test_no_held_out_heading_is_trained_on(world):
    make = imported("make")
    train_rows, test_rows = (
        [json.loads(line)["prompt"] for line in open(world / f"{split}.jsonl")]
        for split in make.ROWS
    )
    assert [len(train_rows), len(test_rows)] == list(make.ROWS.values())
    assert not set(train_rows) & set(test_rows)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_ending_follows_the_opening(world, name, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = settings(world, name)
    task = make_task(config).with_roles(config.roles)
    row = {"prompt": ["HEADING"]}
    (first,) = task.render(0, row, [])
    assert "HEADING" in first
    if "alone" not in name:
        (ending,) = task.render(1, row, [["OPENING"]])
        assert "HEADING" in ending and "OPENING" in ending
        alone = settings(world, name.replace(".", "_alone."))
        # At equal lengths.
        budget = sum(role.max_new_tokens for role in config.roles)
        assert alone.roles[0].max_new_tokens == budget


@pytest.mark.parametrize("pair", ["story", "toy"])
def test_runs_and_their_table(world, tmp_path, monkeypatch, pair):
    monkeypatch.chdir(ROOT)
    chosen = EvaluationConfig(samples=2, queries=6)
    evaluations = []
    for name in (pair, f"{pair}_alone"):
        config = settings(world, f"{name}.yaml", output=tmp_path / name)
        run = train(config)
        rewards = [row["team_reward"] for row in run.history]
        assert all(0 <= reward <= 1 for reward in rewards)
        task = make_task(config, held_out_rows(config)).with_roles(config.roles)
        chosen.output = str(tmp_path / f"evaluation-{name}")
        evaluations.append(evaluate([run.folder], task, chosen))
    table = imported("table")
    of_pair, of_alone = (done.folder for done in evaluations)
    lines = table.table(of_pair, of_alone).splitlines()
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in lines}
    # The team reward is the evaluation's own.
    for writer, done, name in (
        ("pair", evaluations[0], f"{pair}/agent_2 after agent_1"),
        ("pair, untrained", evaluations[0], "base after itself"),
        ("one agent", evaluations[1], f"{pair}_alone/agent_1"),
        ("one agent, untrained", evaluations[1], "base"),
    ):
        (expected,) = [row["team_reward"] for row in done.rows if row["name"] == name]
        assert rows[writer][1].startswith(f"{expected:.3f}")
        of_parts = [float(cell.strip(" |")) for cell in rows[writer][3:]]
        assert statistics.fmean(of_parts) == pytest.approx(expected, abs=0.01)
    assert len(table.stories(of_pair).splitlines()) == 2 + table.SHOWN
