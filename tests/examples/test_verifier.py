"""The verifier's example: its rules, data, settings and table, and runs of two iterations on a random model."""

import doctest
import importlib
import json
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

EXAMPLE = ROOT / "examples/verifier"
SETTINGS = ["verifier.yaml", "toy.yaml"]
ALONE = {"cory.num_agents": 1, "agents": "[]", "roles": "[]", "task.team_reward": "null"}


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
    folder = tmp_path_factory.mktemp("verifier")
    make = imported("make")
    make.SIZE["positions"] = 256  # for the worked examples of verifier.yaml
    make.make(folder, texts=200, steps=2)
    return folder


def settings(world, name, **flags):
    flags = {
        "task.dataset": world,
        "model.name": world / "model",
        "device": "cpu",
        "iterations": 2,
        "lora.rank": 0,
        "ppo.batch_size": 12,
        "ppo.mini_batch_size": 6,
    } | flags
    argv = [f"--{key}={value}" for key, value in flags.items()]
    config = load(OwnConfig, EXAMPLE / name, argv)
    return config


def train(config):
    return CoryTrainer(config, make_agents(config), make_task(config)).train()


def test_the_rules():
    assert doctest.testmod(imported("rewards")).failed == 0


def test_no_held_out_sum_is_trained_on(world):
    make = imported("make")
    train_rows, test_rows = (
        [json.loads(line) for line in open(world / f"{split}.jsonl")] for split in make.ROWS
    )
    assert len(train_rows) == make.ROWS["train"] and len(test_rows) == make.ROWS["test"]
    assert not {row["prompt"] for row in train_rows} & {row["prompt"] for row in test_rows}
    for row in test_rows:
        first, second = row["prompt"].split(" + ")
        assert int(first) + int(second) == int(row["answer"])


def test_the_toys_answers_are_right_or_rounded():
    make = imported("make")
    rng = make.random.Random(0)
    answers = [make.attempt(rng, 27, 15) for _ in range(1000)]
    assert set(answers) == {40, 42}
    assert answers.count(40) / 1000 == pytest.approx(make.ROUNDS, abs=0.05)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_verifier_reads_question_and_answer(world, name, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = settings(world, name)
    task = make_task(config).with_roles(config.roles)
    row = {"prompt": ["QUESTION"], "answer": ["GOLD"]}
    (solver,) = task.render(0, row, [])
    (verifier,) = task.render(1, row, [[" ANSWER"]])
    assert "QUESTION" in solver and "GOLD" not in solver
    assert "QUESTION" in verifier and "ANSWER" in verifier and "GOLD" not in verifier


@pytest.mark.parametrize("name", SETTINGS)
def test_runs_and_their_table(world, tmp_path, monkeypatch, name):
    monkeypatch.chdir(ROOT)
    config = settings(world, name, output=tmp_path / "pair")
    pair = train(config)
    roles = {(row["agent"], row["role"]) for row in pair.history}
    assert roles == {("agent_1", "solver"), ("agent_2", "verifier")}
    assert all(row["task_reward"] == 0 for row in pair.history if row["role"] == "verifier")
    assert all(0 <= row["team_reward"] <= 1 for row in pair.history)
    assert all(row["kl"] == 0 for row in pair.history if row["role"] == "solver")  # frozen
    alone = train(settings(world, name, output=tmp_path / "alone", **ALONE))
    assert "team_reward" not in alone.history[0]

    task = make_task(config, held_out_rows(config)).with_roles(config.roles)
    chosen = EvaluationConfig(samples=8, ks=[4, 8], queries=6, output=str(tmp_path / "evaluation"))
    done = evaluate([pair.folder, alone.folder], task, chosen)
    table = imported("table")
    shown = table.table(done.folder, ["pair", "alone"])
    # By the same arithmetic as the evaluation's own tables.
    by_name = {row["name"]: row for row in done.rows}
    verified = by_name["pair/agent_2 after agent_1"]["verified@4"]
    vote = by_name["alone/agent_1"]["maj@8"]
    cells = [line.strip("| ").split(" | ") for line in shown.splitlines()]
    of_pair, of_alone = (
        next(row for row in cells if row[0] == name and len(row) == 6) for name in ("pair", "alone")
    )
    assert of_pair[4].startswith(f"{verified:.3f}") and of_alone[3].startswith(f"{vote:.3f}")
    assert cells[-1][0] == "pair" and cells[-1][2].startswith(f"{verified - vote:.3f}")
    assert len(table.samples(done.folder, "pair").splitlines()) == 2 + table.SHOWN
