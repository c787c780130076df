"""Training processes that get signals or lose their terminal. benchmarks/kills.py tests SIGKILL at random times."""

import errno
import fcntl
import io
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from dataclasses import replace

import pytest
from conftest import ROOT, make_trainer
from interruptions import interrupt

from cory.run.folder import read_rows
from cory.run.signals import Signals, keep_printing

SCRIPT = str(ROOT / "imdb_train/cory.py")


def test_a_second_signal_ends_the_process_at_once(monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    before = signal.getsignal(signal.SIGINT)
    with Signals() as signals:
        interrupt()
        assert (signals.received, codes) == (signal.SIGTERM, [])
        interrupt(signal.SIGINT)
        assert codes == [130]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_closed_terminal_without_a_signal_ends_nothing(monkeypatch):
    """A background run loses its terminal in this way when its shell ends."""

    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "the terminal is gone")

    monkeypatch.setattr(sys, "stdout", Gone())
    keep_printing()
    print("a line")


def test_a_run_continues_when_the_reader_of_its_output_ends(config, monkeypatch):
    """For example, `head` ends early, and Ctrl-C ends `tee`."""
    reader, writer = os.pipe()
    os.close(reader)
    pipe = os.fdopen(writer, "w", buffering=1)
    resume = None
    for iterations in (1, 2):
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(sys, "stderr", pipe)
        changed = replace(config, iterations=iterations, resume=resume)
        run = make_trainer(changed).train().folder
        assert len(read_rows(run / "metrics.jsonl")) == 2 * iterations
        resume = str(run)
    os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # takes output that is still buffered


def wait_for_metrics(process, metrics):
    """Waits until a running process has written further metrics."""
    before = metrics.stat().st_size if metrics.exists() else 0
    while not metrics.exists() or metrics.stat().st_size == before:
        time.sleep(0.05)
        assert process.poll() is None


def iterations(run):
    return len((run / "metrics.jsonl").read_text().splitlines()) // 2


@pytest.fixture
def flags(policy_folder, classifier_folder, reviews):
    values = {
        "model.name": policy_folder, "task.reward_model": classifier_folder, "task.dataset": reviews,
        "ppo.batch_size": 8, "ppo.mini_batch_size": 8, "device": "cpu", "output": "runs/mine",
    }  # fmt: skip
    return [f"--{key}={value}" for key, value in values.items()]


def read_terminal(master, closes, output):
    """Reads a process's terminal output into `output` until the event `closes` is set, then closes the terminal."""
    while not closes.is_set():
        if select.select([master], [], [], 0.1)[0]:
            output += os.read(master, 65536)
    os.close(master)


def test_a_run_in_a_terminal_shows_both_agents_and_is_saved_when_it_closes(flags, tmp_path):
    """When a terminal closes, the system and the shell each send SIGHUP, and later writes to it fail."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *flags, "--iterations=10000"],
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True, cwd=tmp_path,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    closes, output = threading.Event(), bytearray()
    window = threading.Thread(target=read_terminal, args=[master, closes, output])
    window.start()
    run = tmp_path / "runs/mine"
    for _ in range(3):
        wait_for_metrics(process, run / "metrics.jsonl")
    closes.set()
    window.join()
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 129
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert iterations(run) == int(checkpoint.name.removeprefix("iter-")) > 0
    text = re.sub(r"\x1b\[\w", "", output.decode())
    bars = [line for line in re.split(r"[\r\n]+", text) if re.match(r"\s*\d+/10000 \[", line)]
    assert any("agent_1" in line and "agent_2" in line for line in bars), text
    assert max(map(len, bars)) <= 80


def test_a_run_under_nohup_ends_at_sigterm_and_prints_a_command_that_resumes_it(
    flags, tmp_path, monkeypatch, command
):
    process = subprocess.Popen(
        ["nohup", sys.executable, SCRIPT, *flags, "--iterations=60"],
        cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    run = tmp_path / "runs/mine"
    wait_for_metrics(process, run / "metrics.jsonl")
    process.send_signal(signal.SIGHUP)
    for _ in range(2):
        wait_for_metrics(process, run / "metrics.jsonl")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert 0 < iterations(run) < 60
    printed = re.search(r"Continue with: (.+)", errors).group(1)
    _, *argv = shlex.split(printed)
    monkeypatch.chdir(tmp_path)
    again = command(*argv)
    assert again.status == 0, again.error
    assert iterations(run) == 60
    other = command(SCRIPT, "--resume", "runs/mine", "--ppo.learning_rate", "0.5")
    assert other.status == 2 and "ppo.learning_rate" in other.error
