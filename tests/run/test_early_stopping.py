"""Early stopping on the held-out reward, and the best agents."""

import errno
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import sentences

from cory import Callback, evaluate
from cory.agent import Agent, make_agents
from cory.config import CheckpointConfig, EvaluationConfig, GuardsConfig
from cory.errors import UserError
from cory.roles import RolePrompts
from cory.run.signals import Interrupted
from cory.task import Task
from cory.trainer import CoryTrainer
from study.compare import read_runs

HELD_OUT = [1.0, 3.0, 2.0, 3.0, 9.0, 9.0]  # the reward of each iteration's evaluation


def zero(prompts, completions):
    return [0.0] * len(completions)


TASK = Task.from_prompts(sentences(16), zero, RolePrompts())


class Planned(Callback):
    """Replaces held-out rewards by those of HELD_OUT, and keeps the weights before each of them."""

    def __init__(self):
        self.weights = []

    def on_iteration_end(self, trainer, iteration):
        self.weights.append(trainer.agents[0].learner.model_params[0].detach().clone())


class Stop(Callback):
    """Ends a run after so many iterations."""

    def __init__(self, iterations):
        self.iterations = iterations

    def on_iteration_end(self, trainer, iteration):
        trainer.should_stop = iteration.index + 1 == self.iterations


class Interrupt(Callback):
    """Sends a signal in an iteration, counted from 1."""

    def __init__(self, iteration):
        self.iteration = iteration

    def on_iteration_end(self, trainer, iteration):
        if iteration.index + 1 == self.iteration:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def planned(monkeypatch):
    from cory.run import callbacks

    monkeypatch.setattr(
        callbacks,
        "evaluate",
        lambda trainer, chain, rows: ([[0.5, *HELD_OUT][trainer.state.iteration]] * 2, None),
    )


def train(config, callback=None, task=TASK, **changes):
    config = replace(
        config,
        eval_every=1,
        checkpoint=CheckpointConfig(save_every=1, keep=9),
        **{"iterations": 6, "guards": GuardsConfig(patience=2), **changes},
    )
    held_out = Task.from_prompts(sentences(20)[16:], zero, RolePrompts()).dataset
    callbacks = [callback] if callback else []
    return (
        CoryTrainer(config, make_agents(config), task, eval_dataset=held_out, callbacks=callbacks)
        .train()
        .folder
    )


def test_a_run_ends_when_the_held_out_reward_no_longer_rises(config, planned, capsys):
    watch = Planned()
    run = train(config, watch)
    rewards = [
        json.loads(line)["eval_task_reward"]
        for line in (run / "metrics.jsonl").read_text().splitlines()[::2]
    ]
    assert rewards == HELD_OUT[:4]  # 3 is reached in the second; 2 and again 3 are no better
    assert "has not risen above 3.000 in 2 evaluations" in capsys.readouterr().err
    summary = json.loads((run / "summary.json").read_text())
    reached = {"iterations": 2, "eval_task_reward": 3.0}
    assert summary["stopped"] and summary["best"] == reached
    early = "ended early, after iteration 4 of 6, by guards.patience"
    assert early in (run / "report.html").read_text()
    (ended,) = read_runs([run]).ended_early.itertuples()
    assert (ended.iterations, ended.planned, ended.stopped_by) == (4, 6, "guards.patience")
    assert ", 4 iterations" in (run / "agent_1/README.md").read_text()

    best = run / "best"
    assert sorted(path.name for path in best.iterdir()) == ["agent_1", "agent_2"]
    from cory.config import ModelConfig
    from cory.models.load import load_policy

    model, _ = load_policy(ModelConfig(str(best / "agent_1")))
    saved = next(model.parameters())
    assert torch.equal(saved, watch.weights[1]) and not torch.equal(saved, watch.weights[3])
    name = str(best / "agent_1")
    rows = evaluate(
        [run, name], TASK, EvaluationConfig(queries=2, device="cpu", output=str(run.parent / "e"))
    ).rows
    assert {"run/agent_1", name} <= {row["name"] for row in rows}
    with pytest.raises(UserError, match="resume: expected auto, or the folder of a run, got"):
        train(config, resume=str(best))


def test_a_resumed_run_has_waited_as_long_as_an_unbroken_one(config, planned):
    with pytest.raises(Interrupted):
        train(config, Interrupt(3))
    resumed = train(config, Callback(), resume=config.output)
    lines = (resumed / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 4
    summary = json.loads((resumed / "summary.json").read_text())
    assert summary["best"] == {"iterations": 2, "eval_task_reward": 3.0}


def test_a_signal_in_the_last_iteration_does_not_lift_the_end(config, planned):
    with pytest.raises(Interrupted):
        train(config, Interrupt(4))
    run = train(config, Callback(), resume=config.output)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["iterations"] == 4 and summary["stopped_by"] == "guards.patience"
    assert summary["best"] == {"iterations": 2, "eval_task_reward": 3.0}


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_full_disk_leaves_the_best_agents_of_before(config, planned, monkeypatch):
    """The run ends, and continues where there is space again."""
    save = Agent.save

    def full(agent, folder):
        if folder.parent.name == "best" and (Path(config.output) / "checkpoints").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        save(agent, folder)

    monkeypatch.setattr(Agent, "save", full)
    with pytest.raises(OSError, match="No space left on device"):
        train(config)
    before = content(Path(config.output) / "best")
    monkeypatch.setattr(Agent, "save", save)
    run = train(config, resume=config.output)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["iterations"] == 4
    assert summary["best"] == {"iterations": 2, "eval_task_reward": 3.0}
    assert content(run / "best") != before


@pytest.mark.parametrize("resume", ["path", "auto"])
def test_a_run_that_a_callback_has_ended_is_finished(config, planned, capsys, resume):
    run = train(config, Stop(3), guards=GuardsConfig())
    assert "after iteration 3 of 6, by a callback" in (run / "report.html").read_text()
    before = content(run)
    train(config, guards=GuardsConfig(), resume=str(run) if resume == "path" else "auto")
    said = capsys.readouterr().out
    assert "is finished: a callback ended it" in said
    assert content(run) == before


def test_a_signal_does_not_lift_the_end_by_a_callback(config, planned):
    class Both(Stop):
        def on_iteration_end(self, trainer, iteration):
            super().on_iteration_end(trainer, iteration)
            Interrupt(3).on_iteration_end(trainer, iteration)

    with pytest.raises(Interrupted):
        train(config, Both(3), guards=GuardsConfig())
    run = train(config, Callback(), guards=GuardsConfig(), resume=config.output)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["iterations"], summary["stopped_by"]) == (3, "a callback")


def test_rewards_of_other_held_out_queries_are_not_compared(config, planned):
    """They could replace the best agents by worse ones."""
    with pytest.raises(Interrupted):
        train(config, Interrupt(2))
    with pytest.raises(UserError, match="eval_queries"):
        train(config, resume=config.output, eval_queries=2)


def test_the_team_reward_counts(config, monkeypatch):
    """Beside a team reward alone, every task reward is 0."""
    from cory.run import callbacks

    monkeypatch.setattr(
        callbacks,
        "evaluate",
        lambda trainer, chain, rows: ([0.0, 0.0], [0.5, *HELD_OUT][trainer.state.iteration]),
    )
    run = train(config)
    summary = json.loads((run / "summary.json").read_text())
    reached = {"iterations": 2, "eval_task_reward": 0.0, "eval_team_reward": 3.0}
    assert summary["iterations"] == 4 and summary["best"] == reached


def test_patience_needs_held_out_evaluations(config):
    with pytest.raises(
        UserError, match=r"guards\.patience: expected null without eval_every, got 2"
    ):
        replace(config, guards=GuardsConfig(patience=2)).check()
