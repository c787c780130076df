"""Experiments on Ray give the same files as local runs, even if drivers and workers are killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from cory.build import make_agents
from cory.command import load
from cory.trainer import CoryTrainer
from imdb_train.config import ImdbConfig
from imdb_train.task import make_task
from study.experiment_file import read_experiment
from study.plan import plan

ray = pytest.importorskip("ray")

GRID = """
title: A trial
question: Does it run?
runs:
  PPO: {script: imdb_train/ppo.py}
  CORY: {script: imdb_train/cory.py}
  CORY, own: {script: imdb_train/cory.py, flags: {cory.credit: own}}
scales:
  tiny: {config: "configs/imdb/tiny.yaml", seeds: [0],
         flags: {iterations: 5, ppo.batch_size: 8, ppo.mini_batch_size: 8, checkpoint.save_every: 1}}
"""


@pytest.fixture(autouse=True)
def not_starved(monkeypatch):
    """Runs Ray's workers at normal priority, so that a busy machine does not starve them."""
    monkeypatch.setenv("RAY_worker_niceness", "0")


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Trains the grid's runs without Ray; returns the bytes of each metrics.jsonl by folder name."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "trial.yaml").write_text(GRID)
    grid = read_experiment(folder / "trial.yaml")
    for item in plan(grid, "tiny", {}, folder / "runs"):
        _, script, *argv = item.command
        config = load(ImdbConfig, None, argv, single_agent=script.endswith("ppo.py"))
        CoryTrainer(config, make_agents(config), make_task(config)).train()
    return files_of(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.parent.name: path.read_bytes()
        for path in folder.glob("runs/tiny/trial/*/metrics.jsonl")
    }


def trainings(folder: Path) -> dict[int, int]:
    """Returns the training processes of the grid in a folder, as {process id: parent's id}."""
    listed = subprocess.run(
        ["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True
    ).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return {
        int(pid): int(parent)
        for pid, parent, args in rows
        if "_train/" in args and f"{folder}/" in args
    }


def wait_for(condition, seconds: float = 300.0):
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return value


def command(folder: Path, *flags: str) -> dict:
    """Returns `Popen` arguments for a driver that trains the grid in a folder."""
    line = f"-m study.experiment trial.yaml --runs {folder}/runs --engine ray --cpus 1".split()
    return {
        "args": [sys.executable, *line, *flags],
        "cwd": folder,
        "env": os.environ | {"PYTHONPATH": str(ROOT)},
        "text": True,
    }


@pytest.mark.slow
def test_killed_drivers_and_workers_lose_nothing(local, tmp_path):
    """The first driver starts Ray itself and is killed. The second uses a cluster of two nodes and loses a worker."""
    from ray.cluster_utils import Cluster

    (tmp_path / "trial.yaml").write_text(GRID)
    driver = subprocess.Popen(**command(tmp_path, "--jobs", "1"), stdout=subprocess.PIPE)
    wait_for(lambda: "[1/3]" in driver.stdout.readline())
    wait_for(lambda: trainings(tmp_path))
    driver.kill()
    wait_for(lambda: not trainings(tmp_path))  # no orphaned process keeps training

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1)
    try:
        driver = subprocess.Popen(
            **command(tmp_path, "--address", cluster.address), stdout=subprocess.PIPE
        )
        wait_for(lambda: len(trainings(tmp_path)) == 2 or driver.poll() is not None)
        assert driver.poll() is None, driver.communicate()
        os.kill(next(iter(trainings(tmp_path).values())), signal.SIGKILL)  # kills a Ray worker
        out, _ = driver.communicate(timeout=300)
    finally:
        cluster.shutdown()
    assert driver.returncode == 0 and "FAILED" not in out, out
    assert files_of(tmp_path) == local and len(local) == 3
