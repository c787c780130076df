"""Processes that are killed: by SIGKILL at random moments, and by signals."""

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from conftest import ROOT
from test_resume import interrupt, make_trainer, same

from cory.config import CheckpointConfig
from cory.run.signals import Signals

HERE = Path(__file__).resolve().parent
RUN = f"""
import json, os, random, signal, sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(HERE)!r}, {str(HERE.parent)!r}]
from cory.config import Config, from_data
from test_resume import make_trainer
from cory.command import main

def run():
    config = from_data(Config, json.load(open(sys.argv[1]))["config"])
    main(lambda: make_trainer(config).train())
"""
KILLER = """
# One process that imports, then forks the runs: importing takes longer than they do. Each is killed at a random moment
# of its CPU time, however busy the machine is.
import psutil
rng = random.Random(0)
for life in range(11):
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")
        run()
        os._exit(0)
    if life < 10:
        process, seconds = psutil.Process(child), 0.1 + 0.3 * rng.random()
        while sum(process.cpu_times()[:2]) < seconds and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        time.sleep(0.05 * rng.random())
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    print(len(open(sys.argv[2]).readlines()) if os.path.exists(sys.argv[2]) else 0)
sys.exit(status)
"""


def command(config, folder: Path, code: str) -> list[str]:
    """Runs code with settings that it finds in a file, and the path of the run's metrics."""
    (folder / "settings.json").write_text(json.dumps({"config": asdict(config)}))
    return [
        sys.executable,
        "-c",
        RUN + code,
        str(folder / "settings.json"),
        f"{config.output}/metrics.jsonl",
    ]


def test_killed_at_random_moments_it_ends_the_same(config, tmp_path):
    """SIGKILL ten times, a checkpoint being written at some of them."""
    config = replace(config, iterations=40, checkpoint=CheckpointConfig(save_every=1, keep=3))
    whole = make_trainer(config).train().folder
    config = replace(config, output=str(tmp_path / "killed"), resume="auto")
    # Sums are rounded otherwise by another number of threads.
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"}
    killer = command(config, tmp_path, KILLER)
    done = subprocess.run(killer, check=True, timeout=400, env=env, capture_output=True, text=True)
    *lines, last = [int(line) for line in done.stdout.split()]
    assert len(lines) == 10 and last == 2 * config.iterations
    assert len({n for n in lines if n < last}) > 3, lines  # killed in the middle, at many places
    same(whole, tmp_path / "killed")


def test_second_signal_ends_it_at_once(monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    before = signal.getsignal(signal.SIGINT)  # ignored, where the tests run in the background
    with Signals() as signals:
        interrupt()
        assert (signals.received, codes) == (signal.SIGTERM, [])
        interrupt(signal.SIGINT)
        assert codes == [130]
    assert signal.getsignal(signal.SIGINT) is before


def trains(process, metrics):
    """Waits for a process to write the next lines."""
    before = metrics.stat().st_size if metrics.exists() else 0
    while not metrics.exists() or metrics.stat().st_size == before:
        time.sleep(0.1)
        assert process.poll() is None


def saved_iterations(run):
    """Those of the run's only checkpoint, which are all that it has recorded."""
    (checkpoint,) = (run / "checkpoints").iterdir()
    rows = len((run / "metrics.jsonl").read_text().splitlines())
    assert rows == 2 * int(checkpoint.name.removeprefix("iter-"))
    return rows // 2


def shown(master, closes):
    """Reads what a process writes to its terminal, until that closes."""
    while not closes.is_set():
        if select.select([master], [], [], 0.1)[0]:
            os.read(master, 65536)
    os.close(master)


def test_a_run_in_a_terminal_that_closes_is_saved(config, tmp_path):
    """The system sends SIGHUP, shells send another one; and writing to that terminal fails from then on."""
    config = replace(config, iterations=10_000, output=str(tmp_path / "long"))
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command(config, tmp_path, "run()"), stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    closes = threading.Event()
    window = threading.Thread(target=shown, args=[master, closes])
    window.start()
    trains(process, tmp_path / "long/metrics.jsonl")
    closes.set()
    window.join()
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 129
    assert saved_iterations(tmp_path / "long") > 0


def test_a_run_under_nohup_goes_on_until_sigterm(config, tmp_path):
    config = replace(config, iterations=10_000, output=str(tmp_path / "long"))
    process = subprocess.Popen(
        ["nohup", *command(config, tmp_path, "run()")], stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "long/metrics.jsonl"
    trains(process, metrics)
    process.send_signal(signal.SIGHUP)
    for _ in range(3):
        trains(process, metrics)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert "Continue with: config.resume" in process.stderr.read()
    assert saved_iterations(tmp_path / "long") > 0
