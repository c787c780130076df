"""The lookout example: its reward, data and settings, and a short run on a hardly trained model."""

import doctest

import pytest
import yaml
from conftest import ROOT, imported

from cory.build import make_agents
from cory.command import load
from cory.own_task import OwnConfig, make_task
from cory.roles import fill
from cory.run.folder import read_rows
from cory.trainer import CoryTrainer

EXAMPLE = ROOT / "examples/lookout"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The example's data and a model that was trained for two steps."""
    folder = tmp_path_factory.mktemp("lookout")
    imported(EXAMPLE, "make").make(folder, texts=200, steps=2)
    return folder


def test_the_right_order_depends_on_land_and_course():
    """An agent that knows only the land or only the course is right in one case of four."""
    rewards = imported(EXAMPLE, "rewards")
    assert doctest.testmod(rewards).failed == 0
    lands = [land for course in rewards.WINDS for land in rewards.WINDS]
    courses = [course for course in rewards.WINDS for _ in rewards.WINDS]
    for order in rewards.ORDERS:
        right = rewards.reward([""] * 16, [f" Steer {order}!"] * 16, lands, courses)
        for winds in (lands, courses):
            assert all(
                sum(r for r, k in zip(right, winds, strict=True) if k == wind) == 1
                for wind in rewards.WINDS
            )


def test_the_lookout_reads_the_land_and_the_helmsman_the_course(world):
    train, test = (read_rows(world / f"{split}.jsonl") for split in ("train", "test"))
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    templates = yaml.safe_load((EXAMPLE / "lookout.yaml").read_text())["task"]
    row = {"prompt": "", "land": "LAND", "course": "COURSE", "response": "RESPONSE"}
    pioneer, observer = (
        fill(templates["pioneer_prompt"], row),
        fill(templates["observer_prompt"], row),
    )
    assert "LAND" in pioneer and "COURSE" not in pioneer
    assert "LAND" not in observer and "COURSE" in observer and "RESPONSE" in observer


def test_both_roles_train(world, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = {
        "iterations": 2,
        "output": tmp_path / "x-0",
        "model.name": world / "model",
        "task.dataset": world,
    }
    flags |= {
        "ppo.batch_size": 8,
        "ppo.mini_batch_size": 8,
        "device": "cpu",
        "cory.credit": "counterfactual",
    }
    argv = [f"--{key}={value}" for key, value in flags.items()]
    config = load(OwnConfig, EXAMPLE / "lookout.yaml", argv)
    run = CoryTrainer(config, make_agents(config), make_task(config)).train()
    assert {row["role"] for row in run.history} == {"pioneer", "observer"}


def test_fog_decides_what_each_role_knows(tmp_path):
    weather = imported(EXAMPLE, "weather")
    folder = tmp_path / "weather"
    weather.make(folder, texts=200, steps=2)
    for fog in weather.FOG:
        rows = read_rows(folder / f"fog_{fog}/test.jsonl")
        foggy = [row for row in rows if "in fog" in row["prompt"]]
        assert abs(len(foggy) / len(rows) - fog / 100) < 0.1
        # In fog, the lookout sees only the land and the helmsman knows only the course.
        for row in rows:
            knows_the_rest = "ship" in row["sees"], "land" in row["knows"]
            assert knows_the_rest == ((False, False) if row in foggy else (True, True))
    templates = yaml.safe_load((EXAMPLE / "weather.yaml").read_text())["task"]
    assert fill(templates["pioneer_prompt"], rows[0]).endswith(
        f"The lookout {rows[0]['sees']} and calls:"
    )
    assert fill(templates["observer_prompt"], {**rows[0], "response": ""}).endswith(
        f"{rows[0]['knows']} and calls:"
    )
