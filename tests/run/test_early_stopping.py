"""Early stopping on the held-out reward, and saving of the best agents."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_trainer
from interruptions import Interrupt
from run_files import summary_of

from cory import Callback, evaluate
from cory.config import CheckpointConfig, EvaluationConfig, GuardsConfig, ModelConfig
from cory.errors import UserError
from cory.models.load import load_policy
from cory.run import held_out
from cory.run.folder import read_rows
from cory.run.signals import Interrupted
from study.compare import read_runs

HELD_OUT = [1.0, 3.0, 2.0, 3.0, 9.0, 9.0]  # the reward of each iteration's evaluation


class Weights(Callback):
    """Records agent_1's first weight after each iteration."""

    def __init__(self):
        self.weights = []

    def on_iteration_end(self, trainer, iteration):
        self.weights.append(trainer.agents[0].learner.model_params[0].detach().clone())


def plan(monkeypatch, rewards_after):
    """Replaces held-out rewards by a function of the number of iterations done."""
    measure = held_out.HeldOut._measure
    done = []

    def counted(callback, trainer, chain):
        done.append(trainer.state.iteration)
        return measure(callback, trainer, chain)

    monkeypatch.setattr(held_out.HeldOut, "_measure", counted)
    monkeypatch.setattr(
        held_out, "mean_rewards", lambda chain, rows, config: rewards_after(done[-1])
    )


@pytest.fixture
def planned(monkeypatch):
    """Replaces held-out rewards by 0.5 before training and HELD_OUT afterwards."""
    plan(monkeypatch, lambda done: ([[0.5, *HELD_OUT][done]] * 2, None))


def train(config, callback=None, **changes):
    """Trains with a held-out evaluation after each iteration and returns the run's folder."""
    guards = GuardsConfig(patience=2)
    config = replace(config, **{"iterations": 6, "eval_every": 1, "guards": guards, **changes})
    config.checkpoint = CheckpointConfig(save_every=1, keep=9)
    return make_trainer(config, callbacks=[callback] if callback else []).train().folder


BEST = {"iterations": 2, "eval_task_reward": 3.0}


def test_a_run_ends_when_the_held_out_reward_no_longer_rises(config, planned):
    watch = Weights()
    run = train(config, watch)
    rewards = [row["eval_task_reward"] for row in read_rows(run / "metrics.jsonl")[::2]]
    # The second reward, 3, is the best. The next two, 2 and 3, are not better.
    assert rewards == HELD_OUT[:4]
    summary = summary_of(run)
    assert summary["stopped"] and summary["best"] == BEST
    (ended,) = read_runs([run]).ended_early.itertuples()
    assert (ended.iterations, ended.planned, ended.stopped_by) == (4, 6, "guards.patience")

    best = run / "best"
    assert json.loads((best / "summary.json").read_text()) == BEST
    model, _ = load_policy(ModelConfig(str(best / "agent_1")))
    saved = next(model.parameters())
    assert torch.equal(saved, watch.weights[1]) and not torch.equal(saved, watch.weights[3])
    chosen = EvaluationConfig(queries=2, device="cpu", output=str(run.parent / "e"))
    rows = evaluate([run, best], make_trainer(config).task, chosen).rows
    names = {"run/agent_1", "run/agent_2 after agent_1", "run-best/agent_2 after agent_1"}
    assert names <= {row["name"] for row in rows}


@pytest.mark.parametrize("iteration", [3, 4])
def test_a_resumed_run_has_waited_as_long_as_an_unbroken_one(config, planned, iteration):
    """This also holds if the signal comes in the iteration that ends the run."""
    with pytest.raises(Interrupted):
        train(config, Interrupt(iteration))
    run = train(config, Callback(), resume=config.output)
    summary = summary_of(run)
    assert summary["iterations"] == 4 and summary["stopped_by"] == "guards.patience"
    assert summary["best"] == BEST


def test_a_run_resumed_only_to_end_it_names_the_agents_in_its_folder(config, planned):
    """They may be of a later iteration, of which no checkpoint was saved."""
    with pytest.raises(Interrupted):
        train(config, Interrupt(1))
    file = Path(config.output) / "best/summary.json"
    file.write_text(json.dumps(BEST))
    run = train(config, Callback(), resume=config.output, iterations=1)
    assert summary_of(run)["best"] == BEST


def test_a_run_cannot_be_resumed_with_other_held_out_queries(config, planned):
    """Rewards on other queries could replace the best agents by worse ones."""
    with pytest.raises(Interrupted):
        train(config, Interrupt(2))
    with pytest.raises(UserError, match="eval_queries"):
        train(config, resume=config.output, eval_queries=2)


def test_the_team_reward_counts(config, monkeypatch):
    """If all task rewards are 0, the team reward decides when the run ends."""
    plan(monkeypatch, lambda done: ([0.0, 0.0], [0.5, *HELD_OUT][done]))
    run = train(config)
    reached = {"iterations": 2, "eval_task_reward": 0.0, "eval_team_reward": 3.0}
    assert summary_of(run)["iterations"] == 4 and summary_of(run)["best"] == reached
