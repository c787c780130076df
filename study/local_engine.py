"""Runs an experiment's runs on this machine, several at a time."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

from cory.cli import terminal
from study.planned import Planned
from study.processes import die_with_parent, of_threads


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP. The runs may not get it by themselves, as they get a Ctrl-C of the terminal."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__()


def run_all(
    planned: Sequence[Planned],
    jobs: int,
    threads: int | None,
    ended: Callable[[Planned, int | str, float], None],
) -> None:
    """Runs what is planned, `jobs` at a time. Signals end the runs after their iteration.

    Args:
        threads: of each run; None: as many as it takes.
        ended: is called with each run, its exit status and its seconds.
    """
    running: set[subprocess.Popen[bytes]] = set()
    env = dict(os.environ) if threads is None else of_threads(threads)

    def run(item: Planned) -> None:
        started = time.perf_counter()
        item.folder.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{item.folder}.log", "a", encoding="utf-8") as log:
            process = subprocess.Popen(
                item.command,
                cwd=item.cwd,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                preexec_fn=die_with_parent,
            )
            running.add(process)
            status = process.wait()
            running.remove(process)
        ended(item, status, time.perf_counter() - started)

    numbers: list[int] = [signal.SIGTERM]
    if terminal.heeds_hangup():
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, _terminated) for number in numbers}
    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(run, planned))
        except KeyboardInterrupt as stop:
            print("Stopping: each run finishes its iteration and is saved.", flush=True)
            if isinstance(stop, Terminated):
                for process in list(running):
                    process.send_signal(stop.number)
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _terminated(number: int, frame: FrameType | None) -> None:
    if number == terminal.HANGUP:
        signal.signal(number, signal.SIG_IGN)  # a terminal that closes may send it twice
        terminal.outlive()
    raise Terminated(number)
