"""Runs an experiment's runs on this machine, several at a time."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import FrameType

from cory.run.signals import HANGUP, heeds_hangup, outlive
from study.planned import Planned
from study.processes import die_with_parent, environment, take_gpus


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
    """Runs what is planned, `jobs` at a time, which share the machine's GPUs. Signals end the runs after their
    iteration.

    Args:
        threads: of each run; None: as many as it takes.
        ended: is called with each run, its exit status and its seconds.
    """
    running: set[subprocess.Popen[bytes]] = set()
    jobs = max(1, min(jobs, len(planned)))
    shares: SimpleQueue[str | None] = SimpleQueue()
    for share in shares_of_gpus(jobs):
        shares.put(share)

    def run(item: Planned) -> None:
        started = time.perf_counter()
        item.folder.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{item.folder}.log", "a", encoding="utf-8") as log:
            process = subprocess.Popen(
                item.command,
                cwd=item.cwd,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(threads),
                preexec_fn=die_with_parent,
            )
            running.add(process)
            status = process.wait()
            running.remove(process)
        ended(item, status, time.perf_counter() - started)

    numbers: list[int] = [signal.SIGTERM]
    if heeds_hangup():
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, _terminated) for number in numbers}
    with ThreadPoolExecutor(jobs, initializer=lambda: take_gpus(shares.get())) as pool:
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


def shares_of_gpus(jobs: int) -> list[str | None]:
    """The GPUs of each of so many jobs, as CUDA_VISIBLE_DEVICES names them: this machine's, shared out; where there
    are fewer than jobs, one for each in turn. None: those of this process.
    """
    if jobs == 1:
        return [None]
    import torch  # here, as it takes a while

    count = torch.cuda.device_count()
    if count == 0:
        return [None] * jobs
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    each = max(1, count // jobs)
    shares = [",".join(names[first : first + each]) for first in range(0, count - each + 1, each)]
    return [shares[job % len(shares)] for job in range(jobs)]


def _terminated(number: int, frame: FrameType | None) -> None:
    if number == HANGUP:
        signal.signal(number, signal.SIG_IGN)  # a terminal that closes may send it twice
        outlive()
    raise Terminated(number)
