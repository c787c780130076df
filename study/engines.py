"""Executes an experiment's runs: several at a time on this machine, or as Ray tasks.

Both ways execute the same commands and give the same files. An interrupted run continues from its last checkpoint when
its command is repeated. With Ray, all machines need the checkout, the packages and the runs' folder at the same paths
(a shared file system). Ray restarts tasks whose worker or machine is lost.
"""

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from cory.errors import UserError
from study.plan import Planned

PR_SET_PDEATHSIG = 1  # Linux: prctl(2)
RETRIES = 3  # restarts of a run whose worker or machine is lost
STOPPING = "Stopping: each run finishes its iteration and is saved."

# Called when a run ends. Arguments: the run, its exit status or a description of the failure, and its seconds.
Ended = Callable[[Planned, int | str, float], None]


def start(
    command: Sequence[str], cwd: str | Path | None, log: str | Path, threads: int | None
) -> subprocess.Popen[bytes]:
    """Starts a process whose output is appended to `log`.

    The process ends with the current one. It has its own session, so that Ctrl-C in the terminal does not reach it.

    Args:
        command: the command and its arguments.
        cwd: the working directory. None: the current one.
        log: the file for its output.
        threads: the number of threads. None: the process decides.
    """
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with open(log, "a", encoding="utf-8") as output:
        return subprocess.Popen(
            command,
            cwd=cwd,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=_die_with_parent,
            start_new_session=True,
        )


def _die_with_parent() -> None:
    """Makes the calling process end when its parent is killed, so that another worker can resume the run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_here(planned: Sequence[Planned], jobs: int, threads: int | None, ended: Ended) -> None:
    """Executes runs on this machine, `jobs` at a time. SIGINT or SIGTERM ends each after its current iteration.

    A run that starts from another one waits for it.
    """
    running: set[subprocess.Popen[bytes]] = set()
    futures: dict[Path, Future[None]] = {}
    stopping = threading.Event()

    def run(item: Planned) -> None:
        folders = [folder for path in item.starts_from for folder in path.parents]
        wait([futures[folder] for folder in folders if folder in futures])
        if stopping.is_set():
            return
        if item.missing:
            ended(item, item.missing, 0.0)
            return
        started = time.perf_counter()
        process = start(item.command, item.cwd, item.log, threads)
        running.add(process)
        status = process.wait()
        running.remove(process)
        ended(item, status, time.perf_counter() - started)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for item in planned:
                futures[item.folder] = pool.submit(run, item)
            for future in futures.values():
                future.result()
        except KeyboardInterrupt:
            print(STOPPING, flush=True)
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def run_on_ray(
    planned: Sequence[Planned],
    jobs: int,
    threads: int,
    gpus: float,
    address: str | None,
    ended: Ended,
) -> None:
    """Executes runs as Ray tasks, as many at a time as CPUs and GPUs allow.

    Args:
        planned: the runs.
        jobs: the number of runs at a time on a new cluster. An existing cluster decides for itself.
        threads: CPUs per run.
        gpus: GPUs per run; may be a fraction.
        address: the address of a cluster; `auto` finds this machine's. None: a new cluster that ends with this process.
        ended: called when a run ends.

    Raises:
        UserError: Ray is not installed, or there is no cluster at `address`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # With Ray's default niceness, other processes on the machine would starve a run.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        import ray
    except ImportError:
        raise UserError(
            "--engine ray: expected Ray (pip install -c constraints.txt -e '.[ray]'), got none"
        ) from None
    cluster = {"address": address or "local", "log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        cluster |= {"num_cpus": jobs * threads, "num_gpus": math.ceil(jobs * gpus)}
        cluster |= {"include_dashboard": False}
    try:
        ray.init(**cluster)
    except (ConnectionError, ValueError) as error:
        raise UserError(f"--address: expected a Ray cluster, got {address!r} ({error})") from None
    try:
        task = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=RETRIES)(train)
        tasks = {
            task.remote(item.command, str(item.cwd or Path.cwd()), str(item.log), threads): item
            for item in planned
        }
        left = list(tasks)
        try:
            while left:
                (done, *_), left = ray.wait(left, num_returns=1)
                try:
                    status, seconds = ray.get(done)
                except ray.exceptions.RayError as error:
                    status = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
                    seconds = math.nan
                ended(tasks[done], status, seconds)
        except KeyboardInterrupt:
            print(STOPPING, flush=True)
            for pending in left:
                ray.cancel(pending, force=False)
            ray.wait(left, num_returns=len(left))
            raise
    finally:
        ray.shutdown()


def train(command: Sequence[str], cwd: str, log: str, threads: int) -> tuple[int, float]:
    """Runs one command as a Ray task, and returns its exit status and seconds.

    A cancelled task finishes its iteration and saves first.
    """
    started = time.perf_counter()
    process = start(command, cwd, log, threads)
    try:
        while process.poll() is None:
            time.sleep(0.1)  # not process.wait(), which Ray cannot interrupt
    except BaseException:  # Ray cancels a task with a KeyboardInterrupt
        process.terminate()
        process.wait()
        raise
    return process.returncode, time.perf_counter() - started
