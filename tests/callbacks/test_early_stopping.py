"""Early stopping on the held-out reward, and the best agents."""

import errno
import json
import os
import shlex
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import sentences

from cory import evaluate
from cory.agent import Agent
from cory.agents import make_agents
from cory.callbacks import Callback
from cory.cli.load import load
from cory.config import CheckpointConfig, GuardsConfig
from cory.errors import UserError
from cory.evaluation.settings import EvaluationConfig
from cory.hub import write_folder
from cory.prompts import RolePrompts
from cory.resume.best import check_resumed
from cory.run.signals import Interrupted
from cory.task import Task
from cory.tasks.config import OwnConfig
from cory.trainer import CoryTrainer
from study.page import make_page
from study.records import read

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
    from cory.callbacks import held_out

    monkeypatch.setattr(
        held_out,
        "evaluate",
        lambda trainer, iteration, rows: ([HELD_OUT[iteration.index]] * 2, None),
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


def summary_of_best(folder):
    """What the summary of best agents says of them, besides that they are some."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.pop("best_agents") == folder.name
    return summary


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
    assert (
        "This run ended early, after iteration 4 of 6: the reward on held-out prompts had stopped rising "
        "(guards.patience). The best held-out task reward, 3.000, is that after iteration 2; the agents of then are "
        "in run/run-best, those of the end in run."
    ) in (run / "report.html").read_text()
    notes = make_page([read(run)], [Path("no-evaluation")], "Report").notes
    assert (
        "CORY, run: ended early, after iteration 4 of 6, by guards.patience; "
        "tables are of the agents of the end, not of the best"
    ) in notes
    assert ", 4 iterations" in (run / "agent_1/README.md").read_text()

    best = run / "run-best"
    assert summary_of_best(best) == reached
    from cory.config import ModelConfig
    from cory.models.load import load_policy

    model, _ = load_policy(ModelConfig(str(best / "agent_1")))
    saved = next(model.parameters())
    assert torch.equal(saved, watch.weights[1]) and not torch.equal(saved, watch.weights[3])
    rows = evaluate(
        [run, best], TASK, EvaluationConfig(queries=2, device="cpu", output=str(run.parent / "e"))
    ).rows
    assert {"run/agent_1", "run-best/agent_1", "run-best/agent_2 after agent_1"} <= {
        row["name"] for row in rows
    }
    (look := run.parent / "look").mkdir()
    write_folder(look, best, "user/pair")
    assert ", 2 iterations" in (look / "README.md").read_text()


@pytest.mark.parametrize(("agents", "entries"), [(1, False), (1, True), (2, False)])
def test_resuming_the_best_agents_names_what_can_be_done(
    config, planned, monkeypatch, agents, entries
):
    config = replace(config, cory=replace(config.cory, num_agents=agents))
    if entries:
        config = replace(config, agents=[{"model": {"name": config.model.name}}])
    run = train(config)
    best = run / "run-best"
    with pytest.raises(UserError, match="which holds the best agents of") as refused:
        train(config, resume=str(best))
    _, resume, new = str(refused.value).splitlines()
    assert resume == f"To continue the run: --resume {run}"
    flags = shlex.split(new.partition("agents: ")[2])
    monkeypatch.chdir(run.parent)
    restarted = load(OwnConfig, None, flags)
    assert [restarted.of_agent(index).model.name for index in range(agents)] == [
        str(best / f"agent_{index + 1}") for index in range(agents)
    ]


def test_a_resumed_run_has_waited_as_long_as_an_unbroken_one(config, planned):
    with pytest.raises(Interrupted):
        train(config, Interrupt(3))
    resumed = train(config, resume=config.output)
    lines = (resumed / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 4
    summary = json.loads((resumed / "summary.json").read_text())
    assert summary["best"] == {"iterations": 2, "eval_task_reward": 3.0}


@pytest.mark.parametrize("times", [1, 2])
def test_a_run_that_is_extended_past_its_end_waits_anew(config, planned, monkeypatch, times):
    rewards = [1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 2.0, 9.0]
    monkeypatch.setitem(globals(), "HELD_OUT", rewards)
    run = train(config)
    for more in range(times):
        train(config, resume=str(run), iterations=7 + more)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["iterations"] == 4 + 2 * times
    assert summary["best"] == {
        "iterations": 2 if times == 1 else 8,
        "eval_task_reward": max(rewards[: 4 + 2 * times]),
    }


@pytest.mark.parametrize(("iterations", "done"), [(6, 4), (7, 6)])
def test_a_signal_in_the_last_iteration_does_not_lift_the_end(
    config, planned, monkeypatch, iterations, done
):
    """Asked for more iterations, the run goes on, and waits anew."""
    monkeypatch.setitem(globals(), "HELD_OUT", [1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 2.0])
    with pytest.raises(Interrupted):
        train(config, Interrupt(4))
    run = train(config, resume=config.output, iterations=iterations)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["iterations"] == done and summary["stopped_by"] == "guards.patience"
    assert summary["best"] == {"iterations": 2, "eval_task_reward": 3.0}


def constant(prompts, completions):
    return [1.0] * len(completions)


@pytest.mark.parametrize("how", ["overwrite", "accept_changes", "patience"])
def test_what_no_longer_counts_is_not_the_best(config, planned, monkeypatch, how):
    """After the best evaluation was deleted, or made by another reward, or its agents were not saved."""
    guards = GuardsConfig(patience=None if how == "patience" else 2)
    run = train(config, Stop(2), guards=guards)
    monkeypatch.setitem(globals(), "HELD_OUT", [1.0, 0.1, 0.3, 0.2])
    changes = {
        "overwrite": {"resume": str(run / "checkpoints/iter-000001"), "overwrite": True},
        "accept_changes": {
            "resume": str(run),
            "accept_changes": "reward",
            "task": replace(TASK, reward=constant),
        },
        "patience": {"resume": str(run)},
    }[how]
    train(config, iterations=4, **changes)
    reached = {"iterations": 3, "eval_task_reward": 0.3}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["best"] == reached and summary["iterations"] == 4
    assert summary_of_best(run / "run-best") == reached


def test_the_best_is_the_saved_one_after_any_number_of_resumes(config, planned, monkeypatch):
    """The first two evaluations, one as good as the third and one better, were made without guards.patience."""
    monkeypatch.setitem(globals(), "HELD_OUT", [0.3, 3.0, 0.3, 0.2, 0.5, 0.4])
    run = train(config, Stop(2), guards=GuardsConfig())
    train(config, Stop(3), resume=str(run), iterations=6)
    train(config, Stop(4), resume=str(run), iterations=7)
    third = {"iterations": 3, "eval_task_reward": 0.3}
    assert json.loads((run / "summary.json").read_text())["best"] == third
    train(config, resume=str(run), iterations=6)
    reached = {"iterations": 5, "eval_task_reward": 0.5}
    assert json.loads((run / "summary.json").read_text())["best"] == reached
    assert summary_of_best(run / "run-best") == reached


def test_a_renamed_run_keeps_its_best_agents(config, planned):
    run = train(config, Stop(3))
    best = (run / "run-best/summary.json").read_text()
    renamed = run.rename(run.with_name("renamed"))
    train(config, resume=str(renamed), iterations=7)
    summary = json.loads((renamed / "summary.json").read_text())
    reached = {"iterations": 2, "eval_task_reward": 3.0}
    assert summary["best"] == summary_of_best(renamed / "run-best") == reached
    assert summary["iterations"] == 4 and (renamed / "run-best/summary.json").read_text() == best
    assert not (renamed / "renamed-best").exists()
    assert "the agents of then are in renamed/run-best" in (renamed / "report.html").read_text()
    with pytest.raises(UserError, match=r"run-best', which holds the best agents of '.*renamed'"):
        train(config, resume=str(renamed / "run-best"))


def test_a_new_run_may_be_started_where_best_agents_are(config, planned, monkeypatch):
    run = train(config, Stop(2))
    monkeypatch.chdir(run / "run-best")
    check_resumed(replace(config, resume=None))
    with pytest.raises(UserError, match=r"which holds the best agents of"):
        check_resumed(replace(config, resume="."))


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_only_what_the_run_has_saved_as_its_best_is_replaced(config, planned, monkeypatch):
    """Neither another run in its folder, nor best agents that were renamed to keep them."""
    monkeypatch.setitem(globals(), "HELD_OUT", [3.0, 1.0, 9.0, 9.5])
    run = train(config, Stop(2))
    kept = (run / "run-best").rename(run / "old-best")
    other = run / "keep-best"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("*-best"))
    before = content(kept), content(other)
    train(config, resume=str(run), iterations=4)
    assert (content(kept), content(other)) == before
    assert summary_of_best(run / "run-best")["iterations"] == 4


def test_best_agents_do_not_take_the_place_of_something_else(config, planned):
    run = train(config, Stop(2), guards=GuardsConfig())
    (run / "run-best").mkdir()
    (run / "run-best/notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"guards.patience: expected a place .*run-best', which"):
        train(config, resume=str(run), iterations=4)
    assert list(content(run / "run-best").values()) == [b"mine"]
    assert json.loads((run / "summary.json").read_text())["iterations"] == 2


def test_a_full_disk_costs_no_training_while_best_agents_are_saved(config, planned, monkeypatch):
    save, saves = Agent.save, []

    def full(agent, folder):
        if folder.parent.name == "run-best":
            saves.append(folder)
            if len(saves) == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
        save(agent, folder)

    monkeypatch.setattr(Agent, "save", full)
    with pytest.warns(UserWarning, match="best agents, those after 1 iteration, could not be"):
        run = train(config)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["iterations"] == 4
    assert summary["best"] == summary_of_best(run / "run-best")
    assert summary["best"] == {"iterations": 2, "eval_task_reward": 3.0}


def test_agents_that_could_not_be_saved_are_not_the_best_after_a_resume(
    config, planned, monkeypatch
):
    """Or worse ones would take the place of those that were saved."""
    monkeypatch.setitem(globals(), "HELD_OUT", [1.0, 3.0, 0.3, 2.0, 1.5, 1.5])
    save = Agent.save

    def full(agent, folder):
        if folder.parent.name == "run-best":
            raise OSError(errno.ENOSPC, "No space left on device")
        save(agent, folder)

    class Full(Interrupt):
        def on_iteration_begin(self, trainer, k):
            if k == 1:
                monkeypatch.setattr(Agent, "save", full)

    with pytest.warns(UserWarning, match="best agents"), pytest.raises(Interrupted):
        train(config, Full(2), guards=GuardsConfig(patience=3))
    monkeypatch.setattr(Agent, "save", save)
    best = Path(config.output) / "run-best"
    assert summary_of_best(best) == {"iterations": 1, "eval_task_reward": 1.0}
    run = train(config, resume=config.output, iterations=3, guards=GuardsConfig(patience=3))
    assert summary_of_best(best) == {"iterations": 1, "eval_task_reward": 1.0}
    train(config, resume=str(run), iterations=4, guards=GuardsConfig(patience=3))
    assert summary_of_best(best) == {"iterations": 4, "eval_task_reward": 2.0}


def test_going_back_removes_no_folder_that_is_none_of_the_runs_best(config, planned):
    run = train(config, guards=GuardsConfig(), iterations=3)
    other = run / "run-best"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("*-best"))
    before = content(other)
    train(
        config,
        guards=GuardsConfig(),
        iterations=2,
        resume=str(run / "checkpoints/iter-000001"),
        overwrite=True,
    )
    assert content(other) == before


@pytest.mark.parametrize("resume", ["path", "auto"])
def test_a_run_that_a_callback_has_ended_is_finished(config, planned, capsys, resume):
    run = train(config, Stop(3), guards=GuardsConfig())
    assert "iteration 3 of 6: a callback has ended it." in (run / "report.html").read_text()
    before = content(run)
    train(config, guards=GuardsConfig(), resume=str(run) if resume == "path" else "auto")
    said = capsys.readouterr().out
    assert "is finished: a callback ended it after 3 of 6 iterations, and all is saved." in said
    last = run / "checkpoints/iter-000003"
    assert f"config.resume = '{last}'; config.overwrite = True" in said
    assert content(run) == before
    train(config, guards=GuardsConfig(), resume=str(last), overwrite=True)
    assert json.loads((run / "summary.json").read_text())["iterations"] == 6


def test_a_signal_does_not_lift_the_end_by_a_callback(config, planned):
    class Both(Stop):
        def on_iteration_end(self, trainer, iteration):
            super().on_iteration_end(trainer, iteration)
            Interrupt(3).on_iteration_end(trainer, iteration)

    with pytest.raises(Interrupted):
        train(config, Both(3), guards=GuardsConfig())
    run = train(config, guards=GuardsConfig(), resume=config.output)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["iterations"], summary["stopped_by"]) == (3, "a callback")


def test_rewards_of_other_held_out_queries_are_not_compared(config, planned):
    """They could replace the best agents by worse ones."""
    run = train(config, Stop(2))
    best = (run / "run-best/summary.json").read_text()
    with pytest.raises(UserError, match="the held-out queries, whose rewards") as refused:
        train(config, iterations=4, resume=str(run), eval_queries=2)
    assert "--guards.patience null" in str(refused.value)
    train(config, iterations=4, resume=str(run), eval_queries=2, guards=GuardsConfig())
    assert (run / "run-best/summary.json").read_text() == best


def test_the_team_reward_counts(config, monkeypatch):
    """Beside a team reward alone, every task reward is 0."""
    from cory.callbacks import held_out

    monkeypatch.setattr(
        held_out,
        "evaluate",
        lambda trainer, iteration, rows: ([0.0, 0.0], HELD_OUT[iteration.index]),
    )
    run = train(config)
    summary = json.loads((run / "summary.json").read_text())
    reached = {"iterations": 2, "eval_task_reward": 0.0, "eval_team_reward": 3.0}
    assert summary["iterations"] == 4 and summary["best"] == reached
    assert summary_of_best(run / "run-best") == reached
    assert "best held-out task and team reward, 3.000, is" in (run / "report.html").read_text()


def test_patience_needs_held_out_evaluations(config):
    with pytest.raises(
        UserError, match=r"guards\.patience: expected null without eval_every, got 2"
    ):
        replace(config, guards=GuardsConfig(patience=2)).check()
