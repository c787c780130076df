"""Team rewards: their arguments, their share in training, and their metrics."""

import asyncio
import json
from dataclasses import replace

import pytest
import torch
from conftest import count_good, make_trainer, run_iteration
from learning import spy

from cory.config import CoryConfig, EvaluationConfig
from cory.credit import assign_credit
from cory.errors import UserError
from cory.evaluation.table import titles
from cory.rewards import Reward
from cory.run.folder import read_rows
from cory.run.settings import differences


async def lengths(prompts, chains, label):
    """Returns a team reward that depends on the query, its label and both responses."""
    await asyncio.sleep(0)
    return [
        len(prompt) + 10.0 * len(chain[0]) + 100.0 * len(chain[-1]) + row / 8
        for prompt, chain, row in zip(prompts, chains, label, strict=True)
    ]


@pytest.mark.parametrize(("credit", "branches"), [("collective", 1), ("own", 2)])
def test_a_chains_team_reward_is_added_to_every_roles_credit(config, credit, branches):
    trainer = make_trainer(
        replace(config, branches=branches, cory=CoryConfig(credit=credit)), team_reward=lengths
    )
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
    team = torch.tensor(asyncio.run(lengths(queries, chains, labels)))
    assert torch.equal(iteration.team_rewards, team) and len(team) == 8
    shares = assign_credit(iteration.task_rewards, credit)
    assert torch.allclose(seen[0]["agent_1"][1][0], shares[0] + team.view(-1, branches).mean(1))
    assert torch.allclose(seen[0]["agent_2"][1][0], shares[1] + team)


def test_the_team_reward_is_a_separate_metric(config):
    config = replace(config, iterations=2, eval_every=2)
    folder = make_trainer(config, team_reward=lengths).train().folder
    rows = read_rows(folder / "metrics.jsonl")
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert first["team_reward"] == second["team_reward"] > 100
        for row in (first, second):
            expected = row["task_reward"] + row["team_reward"] - config.ppo.init_kl_coef * row["kl"]
            assert row["task_reward"] < 10 and row["combined_reward"] == pytest.approx(expected)
    assert [row["iteration"] for row in rows if "eval_team_reward" in row] == [1, 1]
    samples = read_rows(folder / "samples.jsonl")
    team = [row["team_reward"] for row in samples]
    assert team[:4] == team[4:8]
    before = json.loads((folder / "summary.json").read_text())["samples"]["before"]
    # A solo sample is not a whole chain.
    assert "team_reward" in before["chain"][0] and "team_reward" not in before["agent_1"][0]


def test_a_team_reward_may_be_the_only_reward(config):
    records = run_iteration(make_trainer(config, [], team_reward=lengths), 0)
    assert all(record["task_reward"] == 0 and record["team_reward"] > 100 for record in records)
    assert all("equal_rewards" not in record["flags"] for record in records)
    for reward, shown in (([], False), (count_good, True)):
        task = make_trainer(config, reward, team_reward=lengths).task
        row = {"task_reward": 0.0}
        assert ("task_reward" in titles(task, EvaluationConfig(samples=2), [row])) == shown
    with pytest.raises(UserError, match=r"^task\.reward: "):
        make_trainer(config, reward=[])


def test_a_run_records_its_team_rewards_source(config):
    recorded = make_trainer(config, team_reward=lengths).task.fingerprint()
    assert recorded["team_reward"].endswith("test_team_reward.lengths")
    assert len(recorded["team_reward_sha256"]) == 16
    without = make_trainer(config).task.fingerprint()
    assert differences({"fingerprint": without}, {"fingerprint": recorded}).keys() == {
        "fingerprint.team_reward",
        "fingerprint.team_reward_sha256",
    }
    named = Reward(lengths, name="team.py:lengths", sha256="abc")
    recorded = make_trainer(config, team_reward=named).task.fingerprint()
    assert (recorded["team_reward"], recorded["team_reward_sha256"]) == ("team.py:lengths", "abc")
