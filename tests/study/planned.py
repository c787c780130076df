"""A small experiment and its planned runs."""

from study.experiment_file import read_experiment
from study.plan import plan

SMALL = """
title: A trial
question: Does it run?
over: ppo.learning_rate
runs:
  PPO: {script: imdb_train/ppo.py}
  CORY: {script: imdb_train/cory.py, flags: {cory.exchange_period: 2}}
scales:
  tiny: {config: "configs/imdb/tiny.yaml", seeds: [0, 1], values: [1.0e-4, 1.0e-3], flags: {iterations: 3}}
"""


def planned_in(tmp_path, text=SMALL, scale="tiny", changes=None):
    """Writes an experiment's file and returns the planned runs."""
    (tmp_path / "trial.yaml").write_text(text)
    return plan(read_experiment(tmp_path / "trial.yaml"), scale, changes or {}, tmp_path / "runs")
