"""The untrained agents' held-out reward is recorded, drawn, and the first that early stopping compares with."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import make_trainer
from interruptions import Interrupt

from cory import Callback
from cory.config import CheckpointConfig, GuardsConfig, ModelConfig
from cory.models.load import load_policy
from cory.run import held_out, plots
from cory.run.folder import read_rows
from cory.run.signals import Interrupted


def team(prompts, chains):
    return [len(set(" ".join(chain))) / 8 for chain in chains]


@pytest.fixture
def evaluating(config):
    """Settings whose learning rate is so large that each update changes the rewards."""
    return replace(
        config,
        iterations=4,
        eval_every=2,
        eval_queries=4,
        ppo=replace(config.ppo, learning_rate=1e-2),
        checkpoint=CheckpointConfig(save_every=1),
    )


def test_the_reward_before_training_is_recorded_with_the_first_iteration(evaluating):
    trainer = make_trainer(evaluating)
    untrained = held_out.mean_rewards(trainer.chain(0), trainer.eval_dataset, evaluating)[0]
    records = read_rows(trainer.train().folder / "metrics.jsonl")
    assert [record["eval_task_reward_before"] for record in records[:2]] == untrained
    assert not any("eval_task_reward_before" in record for record in records[2:])
    assert [r["iteration"] for r in records if "eval_task_reward" in r] == [1, 1, 3, 3]
    assert records[2]["eval_task_reward"] != untrained[0]


def test_the_team_reward_before_training_is_recorded_too(evaluating):
    trainer = make_trainer(evaluating, team_reward=team)
    records = trainer.train().history
    assert records[0]["eval_team_reward_before"] == records[1]["eval_team_reward_before"] > 0


@pytest.mark.parametrize("iteration", [1, 3])
def test_a_resumed_run_equals_an_unbroken_one_and_does_not_measure_again(
    evaluating, iteration, monkeypatch
):
    unbroken = make_trainer(evaluating).train().folder
    broken = replace(evaluating, output=f"{evaluating.output}-broken")
    with pytest.raises(Interrupted):
        make_trainer(broken, callbacks=[Interrupt(iteration)]).train()
    measured = []
    measure = held_out.HeldOut._measure
    monkeypatch.setattr(
        held_out.HeldOut,
        "_measure",
        lambda callback, trainer, chain: (
            measured.append(trainer.state.iteration) or measure(callback, trainer, chain)
        ),
    )
    again = replace(broken, resume=broken.output)
    resumed = make_trainer(again, callbacks=[Callback()]).train().folder
    assert measured == [k for k in (2, 4) if k > iteration]
    assert (resumed / "metrics.jsonl").read_bytes() == (unbroken / "metrics.jsonl").read_bytes()


def test_a_run_that_never_gets_better_keeps_the_untrained_agents(evaluating, monkeypatch):
    """The first measurement after an update is lower than the one before training."""
    planned = iter([1.52, 1.4, 1.58])
    monkeypatch.setattr(
        held_out, "mean_rewards", lambda chain, rows, config: ([next(planned)] * 2, None)
    )
    config = replace(evaluating, guards=GuardsConfig(patience=1))
    trainer = make_trainer(config)
    untrained = [p.detach().clone() for p in trainer.agents[0].policy.parameters()]
    run = trainer.train().folder
    summary = json.loads((run / "summary.json").read_text())
    assert summary["best"] == {"iterations": 0, "eval_task_reward": 1.52}
    assert summary["iterations"] == 2 and summary["stopped_by"] == "guards.patience"
    best, _ = load_policy(ModelConfig(str(run / "best" / "agent_1")))
    trained, _ = load_policy(ModelConfig(str(run / "agent_1")))
    assert all(torch.equal(a, b) for a, b in zip(best.parameters(), untrained, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(trained.parameters(), untrained, strict=True))


def test_curves_begin_with_the_reward_before_training(tmp_path, drawn_figures, monkeypatch):
    """Each point is drawn at the number of iterations that were complete when it was measured."""
    row = {"agent": "agent_1", "role": "pioneer", "task_reward": 0.0, "kl": 0.0}
    history = [{"iteration": k, "combined_reward": 0.0, **row} for k in range(4)]
    history[0]["eval_task_reward_before"] = 1.0
    history[1]["eval_task_reward"] = 2.0
    history[3]["eval_task_reward"] = 3.0
    drawn = {}

    def saved(figure, path):
        for line in figure.axes[0].get_lines():
            drawn[line.get_label()] = line.get_xydata().tolist()

    monkeypatch.setattr(plots, "save", saved)
    plots.plot_curves(history, tmp_path / "curves.png")
    assert drawn["agent_1, held out"] == [[0, 1.0], [2, 2.0], [4, 3.0]]
