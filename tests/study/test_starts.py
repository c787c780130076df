"""Runs that start from the agents of other runs in the same experiment."""

import sys
from dataclasses import replace

import pytest
from planned import planned_in
from written import write_run

from cory.errors import UserError
from study import engines, experiment

TRIAL = """
title: A trial
question: Does it run?
runs:
  PPO: {script: imdb_train/ppo.py}
  reader:
    script: imdb_train/cory.py
    flags: {agents: [{trained: false, model: {name: "{runs}/PPO-seed{seed}/agent_1"}}, {}]}
scales:
  tiny: {config: "configs/imdb/tiny.yaml", seeds: [3, 4], flags: {iterations: 3}}
"""


def test_commands_name_each_runs_own_start_and_recorded_settings_keep_placeholders(tmp_path):
    ppo, _, reader, other = planned_in(tmp_path, TRIAL)
    agent = tmp_path / "runs/tiny/trial/PPO-seed3/agent_1"
    assert agent.parent == ppo.folder and reader.starts_from == (agent,)
    (flag,) = [flag for flag in reader.command if flag.startswith("--agents=")]
    assert f'"name": "{agent}"' in flag
    assert other.starts_from == (tmp_path / "runs/tiny/trial/PPO-seed4/agent_1",)
    assert ppo.starts_from == () and not ppo.missing
    # A run's row in the results records the placeholders, which do not depend on the machine.
    name = "{runs}/PPO-seed{seed}/agent_1"
    assert reader.settings["agents"][0]["model"]["name"] == name


@pytest.mark.parametrize(
    "folder", ["GRPO-seed{seed}", "reader-seed{seed}", "PPO-seed7", "PPO-seed3"]
)
def test_a_run_can_only_start_from_an_earlier_groups_run_with_its_seed(tmp_path, folder):
    with pytest.raises(UserError, match=r"runs\.reader: "):
        planned_in(tmp_path, TRIAL.replace("PPO-seed{seed}", folder))


def test_a_run_is_not_started_if_its_starting_agent_is_missing(tmp_path):
    reader = planned_in(tmp_path, TRIAL)[2]
    ended = []
    engines.run_here([reader], 1, 1, lambda item, status, seconds: ended.append(status))
    assert len(ended) == 1 and str(reader.starts_from[0]) in ended[0]
    assert not reader.log.exists()


def test_a_run_waits_for_the_run_from_which_it_starts(tmp_path):
    """Also if several runs are made at a time."""
    ppo, _, reader, _ = planned_in(tmp_path, TRIAL)
    agent = reader.starts_from[0]
    slow = (
        f"import pathlib, time; time.sleep(0.5); pathlib.Path({str(agent)!r}).mkdir(parents=True)"
    )
    items = [
        replace(item, command=[sys.executable, "-c", code], cwd=tmp_path)
        for item, code in ((ppo, slow), (reader, ""))
    ]
    ended = []
    engines.run_here(items, 2, 1, lambda item, status, seconds: ended.append((item.label, status)))
    assert ended == [("PPO", 0), ("reader", 0)]


def test_ray_is_refused_since_it_does_not_keep_the_order_of_runs(tmp_path, monkeypatch):
    (tmp_path / "trial.yaml").write_text(TRIAL)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--engine: "):
        experiment.command_line(["trial.yaml", "--engine", "ray"])


def test_agents_that_other_runs_start_from_are_not_discarded(tmp_path, monkeypatch):
    (tmp_path / "trial.yaml").write_text(
        TRIAL.replace("seeds: [3, 4]", "seeds: [3, 4], evaluate: imdb_train/evaluate.py")
    )
    monkeypatch.chdir(tmp_path)

    def run_here(planned, jobs, threads, ended):
        for item in planned:
            write_run(item.folder, item.seed, iterations=3)
            for agent in ("agent_1", "agent_2"):
                (item.folder / agent).mkdir()
            ended(item, 0, 1.0)

    monkeypatch.setattr(engines, "run_here", run_here)
    monkeypatch.setattr("study.run_evaluation.RunEvaluation.rows", lambda self, item: [])
    experiment.command_line(["trial.yaml", "--discard-agents", "--seeds", "1"])
    runs = tmp_path / "runs/experiments/tiny/trial"
    assert (runs / "PPO-seed3/agent_1").exists()
    assert not (runs / "reader-seed3/agent_1").exists()
