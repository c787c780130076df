"""Team rewards: what they are given, what comes of them, and what is refused."""

import asyncio
import json
import math
from dataclasses import replace

import datasets
import pytest
import torch
from conftest import run_iteration, sentences
from matplotlib.image import imread
from test_credit import spy
from test_trainer import PROMPTS, count_good

from cory.agent import make_agents
from cory.config import CoryConfig
from cory.credit import assign_credit
from cory.errors import UserError
from cory.rewards import Reward
from cory.run.plots import plot_curves
from cory.task import Task
from cory.trainer import CoryTrainer

ROWS = {"prompt": [" ".join(text.split()[:4]) for text in sentences(20)], "label": list(range(20))}


def lengths(prompts, chains, label):
    """A number that depends on the query and on every response."""
    return [
        len(prompt) + 10.0 * len(chain[0]) + 100.0 * len(chain[-1]) + row / 8
        for prompt, chain, row in zip(prompts, chains, label, strict=True)
    ]


def make_trainer(config, team_reward=lengths, reward=count_good):
    dataset = datasets.Dataset.from_dict(ROWS)
    task = Task(dataset, reward, PROMPTS, team_reward=team_reward)
    return CoryTrainer(
        config, make_agents(config), task, eval_dataset=dataset if config.eval_every else None
    )


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("credit", ["collective", "own"])
def test_every_role_gets_its_chains_team_reward_on_top(config, credit, branches):
    trainer = make_trainer(replace(config, branches=branches, cory=CoryConfig(credit=credit)))
    seen = spy(trainer)
    iteration = trainer.iteration(0)
    first, second = iteration.rollouts
    chains = [
        [first.completions[row // branches], text] for row, text in enumerate(second.completions)
    ]
    queries, labels = (
        [x for x in iteration.batch.columns[name] for _ in range(branches)]
        for name in ("prompt", "label")
    )
    team = torch.tensor(lengths(queries, chains, labels))
    assert torch.equal(iteration.team_rewards, team) and len(team) == 8
    shares = assign_credit(iteration.task_rewards, credit)
    assert torch.allclose(seen[0]["agent_1"][1][0], shares[0] + team.view(-1, branches).mean(1))
    assert torch.allclose(seen[0]["agent_2"][1][0], shares[1] + team)


def test_it_is_a_metric_of_its_own(config):
    config = replace(config, eval_every=2)
    trainer = make_trainer(config)
    folder = trainer.train().folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    for one, two in zip(rows[::2], rows[1::2], strict=True):
        assert one["team_reward"] == two["team_reward"] > 100
        assert one["task_reward"] < 10 and two["task_reward"] < 10
        for row in (one, two):
            expected = row["task_reward"] + row["team_reward"] - config.ppo.init_kl_coef * row["kl"]
            assert row["combined_reward"] == pytest.approx(expected)
    assert [row["iteration"] for row in rows if "eval_team_reward" in row] == [1, 1, 3, 3]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").open()]
    assert [row["team_reward"] for row in samples[:4]] == [
        row["team_reward"] for row in samples[4:8]
    ]
    before = json.loads((folder / "summary.json").read_text())["samples"]["before"]
    # No whole chain.
    assert "team_reward" in before["chain"][0] and "team_reward" not in before["agent_1"][0]


def test_samples_of_one_role_have_it(config):
    one = replace(config, cory=CoryConfig(num_agents=1))
    samples = make_trainer(one).train().summary["samples"]
    for when in ("before", "after"):
        assert all(row["team_reward"] > 100 for row in samples[when]["agent_1"])


def test_it_may_take_the_place_of_rewards_of_responses(config):
    records = run_iteration(make_trainer(config, reward=[]), 0)
    assert all(record["task_reward"] == 0 and record["team_reward"] > 100 for record in records)
    assert all("equal_rewards" not in record["flags"] for record in records)
    with pytest.raises(UserError, match=r"^task\.reward: "):
        make_trainer(config, None, reward=[])


def test_it_may_wait(config):
    async def slow(chains, **columns):
        await asyncio.sleep(0)
        return [float(len(chain)) for chain in chains]

    three = replace(config, cory=CoryConfig(num_agents=3))
    assert {record["team_reward"] for record in run_iteration(make_trainer(three, slow), 0)} == {
        3.0
    }


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda chains, **_: [1.0], "8 .*, one per chain, got 1"),
        (lambda chains, **_: [math.nan] * len(chains), "nan in row 1 .* chain"),
        (lambda chains, **_: [None] * len(chains), "None in row 1 .* chain"),
        (lambda chains, text: [1.0], r"\['text'\]"),
        (lambda chains, role, **_: [1.0], r"\['role'\]"),
        (lambda chains, prompt: [1.0], r"\['prompt'\]"),
    ],
)
def test_bad_returns_name_the_function_and_the_chain(config, function, message):
    with pytest.raises(UserError, match=f"^team reward <lambda>: .*{message}"):
        make_trainer(config, function).iteration(0)


def test_a_run_knows_it_by_its_source(config, tmp_path):
    def other(prompts, chains, label):
        return lengths(prompts, chains, label)

    trainer = make_trainer(config)
    recorded = trainer.task.fingerprint()
    assert (
        recorded["team_reward"].endswith("test_team_reward.lengths")
        and len(recorded["team_reward_sha256"]) == 16
    )
    assert "team_reward" not in make_trainer(config, None).task.fingerprint()
    folder = trainer.train().folder
    again = replace(config, iterations=6, resume=str(folder))
    with pytest.raises(UserError, match=r"fingerprint.team_reward"):
        make_trainer(again, other).train()


def test_a_reward_names_it(config):
    task = make_trainer(config, Reward(lengths, name="team.py:lengths", sha256="abc")).task
    recorded = task.fingerprint_of_reward()
    assert (recorded["team_reward"], recorded["team_reward_sha256"]) == ("team.py:lengths", "abc")


@pytest.mark.usefixtures("drawn_figures")
def test_the_curves_have_a_panel_for_it(tmp_path):
    rows = [
        {"agent": agent, "role": role, "iteration": k, "task_reward": 0, "kl": 0}
        | {"combined_reward": 0, "team_reward": k}
        for k in range(3)
        for agent, role in (("agent_1", "pioneer"), ("agent_2", "observer"))
    ]
    plot_curves(rows, tmp_path / "with.png")
    without = [{key: row[key] for key in row if key != "team_reward"} for row in rows]
    plot_curves(without, tmp_path / "without.png")
    widths = [imread(tmp_path / name).shape[1] for name in ("with.png", "without.png")]
    assert widths[0] / 4 == pytest.approx(widths[1] / 3, abs=1)
