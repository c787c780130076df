"""Runs an experiment's runs as Ray tasks, on this machine or on a cluster: `study.experiment --engine ray`.

A run is the same command as without Ray, so its files are the same. A task whose worker or node is lost is started
again by Ray and resumes from the run's last checkpoint. All nodes need the checkout, the packages and the folder of
the runs at the same paths (a shared file system).
"""

import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cory.errors import UserError
from study.planned import Planned
from study.processes import die_with_parent

RETRIES = 3  # of a run whose worker or node is lost


def train(command: Sequence[str], cwd: str, log: str, threads: int) -> tuple[int, float]:
    """The task: runs one command with its output in `log`. A cancelled one finishes its iteration and saves first.

    Returns:
        the command's exit status and its seconds.
    """
    started = time.perf_counter()
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            preexec_fn=die_with_parent,
        )
        try:
            while process.poll() is None:
                time.sleep(0.1)  # not process.wait(), which Ray cannot interrupt
            return process.returncode, time.perf_counter() - started
        except BaseException:  # Ray cancels a task by a KeyboardInterrupt
            process.terminate()
            process.wait()
            raise


def run_all(
    planned: Sequence[Planned],
    jobs: int,
    threads: int,
    gpus: float,
    address: str | None,
    ended: Callable[[Planned, int | str, float], None],
) -> None:
    """Runs what is planned on a cluster, as many at a time as its CPUs and GPUs allow.

    Args:
        jobs: runs at a time where no cluster is named and one is started on this machine.
        threads: CPUs of a run. gpus: GPUs of a run, or a share of one.
        address: of a cluster, `auto` for the one of this machine; None: a new one, which ends with this process.
        ended: is called with each run, its exit status or what became of it, and its seconds.

    Raises:
        UserError: Ray is not installed, no cluster is at `address`, or no node has what a run needs.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Else a run is starved by whatever else the machine does.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        import ray
    except ImportError:
        raise UserError(
            "--engine ray: expected Ray (pip install -c constraints.txt -e '.[ray]'), got none"
        ) from None

    import torch  # here, as it takes a while

    if torch.cuda.device_count() and not gpus:
        print(
            "This machine has GPUs, of which runs get none to themselves: all may use the first one (--gpus 1).",
            file=sys.stderr,
        )
    new = {
        "num_cpus": jobs * threads,
        "num_gpus": math.ceil(jobs * gpus),
        "include_dashboard": False,
    }
    if address and ":" in address and "://" not in address:
        host, _, port = address.rpartition(":")
        try:  # Ray itself tries for ten minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, ValueError) as error:
            raise UserError(
                f"--address: expected a Ray cluster, got {address!r} ({error})"
            ) from None
    try:
        ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level="ERROR",
            **({} if address else new),
        )
    except (ConnectionError, ValueError) as error:
        raise UserError(f"--address: expected a Ray cluster, got {address!r} ({error})") from None
    try:
        needs = {"CPU": threads, "GPU": gpus}
        if not any(
            all(node["Resources"].get(k, 0) >= n for k, n in needs.items()) for node in ray.nodes()
        ):
            raise UserError(
                f"--cpus, --gpus: expected a node with {needs}, got {[n['Resources'] for n in ray.nodes()]}"
            )
        task = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=RETRIES)(train)
        tasks = {
            task.options(name=item.folder.name).remote(
                item.command, str(item.cwd or Path.cwd()), f"{item.folder}.log", threads
            ): item
            for item in planned
        }
        try:
            left = list(tasks)
            while left:
                (done, *_), left = ray.wait(left, num_returns=1)
                try:
                    status, seconds = ray.get(done)
                except ray.exceptions.RayError as error:
                    status, seconds = (
                        f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}",
                        math.nan,
                    )
                ended(tasks[done], status, seconds)
        except KeyboardInterrupt:
            print("Stopping: each run finishes its iteration and is saved.", flush=True)
            for pending in left:
                ray.cancel(pending, force=False)
            ray.wait(left, num_returns=len(left))
            raise
    finally:
        ray.shutdown()
