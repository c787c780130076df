"""Experiments on Ray: the files of `local`, workers and drivers that are killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from cory.agent import make_agents
from cory.command import load
from cory.errors import UserError
from cory.trainer import CoryTrainer
from imdb_train.config import ImdbConfig
from imdb_train.task import make_task
from study import experiment

ray = pytest.importorskip("ray")

GRID = """
title: A trial
question: Does it run?
runs:
  PPO: {script: imdb_train/ppo.py}
  CORY: {script: imdb_train/cory.py}
  CORY, own: {script: imdb_train/cory.py, flags: {cory.credit: own}}
scales:
  tiny: {config: "configs/imdb/tiny.yaml", seeds: [0], minutes: {ppo: 6}, hardware: a laptop,
         flags: {iterations: 5, ppo.batch_size: 8, ppo.mini_batch_size: 8, checkpoint.save_every: 1}}
"""


@pytest.fixture(autouse=True)
def not_starved(monkeypatch):
    """The cluster's workers get their share of a busy machine."""
    monkeypatch.setenv("RAY_worker_niceness", "0")


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The grid's runs without Ray, in this process: metrics.jsonl by folder name."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "trial.yaml").write_text(GRID)
    grid = experiment.read_experiment(folder / "trial.yaml")
    for item in experiment.plan(grid, "tiny", {}, folder / "runs"):
        _, script, *argv = item.command
        config = load(ImdbConfig, None, argv, single_agent=script.endswith("ppo.py"))
        CoryTrainer(config, make_agents(config), make_task(config)).train()
    return files_of(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.parent.name: path.read_bytes()
        for path in folder.glob("runs/tiny/trial/*/metrics.jsonl")
    }


def children_of(pid: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True
    ).stdout
    return [int(word) for word in found.split()]


def trainings(folder: Path) -> dict[int, int]:
    """Trainings of the grid in a folder that run now: their process, and its parent."""
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
    """The arguments of a process that trains the grid in a folder."""
    line = f"-m study.experiment trial.yaml --runs {folder}/runs --engine ray --cpus 1".split()
    return {
        "args": [sys.executable, *line, *flags],
        "cwd": folder,
        "env": os.environ | {"PYTHONPATH": str(ROOT)},
        "text": True,
    }


def test_killed_drivers_and_workers_lose_nothing(local, tmp_path):
    """Begun on a Ray of its own, whose driver is killed, and ended on a cluster of two nodes, where a worker is."""
    from ray.cluster_utils import Cluster

    (tmp_path / "trial.yaml").write_text(GRID)
    driver = subprocess.Popen(**command(tmp_path, "--jobs", "1"), stdout=subprocess.PIPE)
    wait_for(lambda: "[1/3]" in driver.stdout.readline())
    wait_for(lambda: trainings(tmp_path))
    driver.kill()
    wait_for(lambda: not trainings(tmp_path))  # no orphan goes on training

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
        os.kill(next(iter(trainings(tmp_path).values())), signal.SIGKILL)  # a worker of Ray
        out, _ = driver.communicate(timeout=300)
    finally:
        cluster.shutdown()
    assert driver.returncode == 0 and "FAILED" not in out, out
    assert "3 runs, 1 with a row" in out and "[2/2]" in out
    assert files_of(tmp_path) == local and len(local) == 3


CANCELLED = """
import _thread, sys, threading, time
from pathlib import Path
from study import ray_engine

log = Path("logs/run.log")

def cancel():
    while not (log.exists() and "begun" in log.read_text()):
        time.sleep(0.05)
    _thread.interrupt_main()  # as Ray does: it interrupts no system call

threading.Thread(target=cancel).start()
run = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(print('saved'))); print('begun', flush=True)"
try:
    ray_engine.train([sys.executable, "-c", f"{run}; time.sleep(100)"], ".", str(log), threads=1)
except KeyboardInterrupt:
    print("cancelled")
"""


def test_a_cancelled_run_saves_before_its_task_ends(tmp_path):
    """In a process of its own, as the interrupt is one of its main thread."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", CANCELLED],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.stdout == "cancelled\n", done.stderr
    assert (tmp_path / "logs/run.log").read_text() == "begun\nsaved\n"


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--address", "auto"], "--engine: expected ray with --address or --gpus, got 'local'"),
        (["--engine", "ray", "--gpus", "-1"], "--gpus: expected at least 0"),
        (["--engine", "ray", "--cpus", "0"], "--cpus: expected at least 1"),
        (
            ["--engine", "ray", "--address", "127.0.0.1:1"],
            "--address: expected a Ray cluster, got '127.0.0.1:1'",
        ),
    ],
)
def test_what_ray_cannot_do_is_an_error(tmp_path, flags, message):
    (tmp_path / "trial.yaml").write_text(GRID)
    with pytest.raises(UserError, match=message):
        experiment.command_line(
            [str(tmp_path / "trial.yaml"), "--runs", str(tmp_path / "runs"), *flags]
        )
