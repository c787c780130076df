"""Kills a training run with SIGKILL at random moments, and compares its result with an unbroken run's.

    python benchmarks/kills.py                  # 30 kills of one process, then 30 of two (torchrun)
    python benchmarks/kills.py --kills 3 2      # fewer
    TMPDIR=/dev/shm python benchmarks/kills.py  # in memory

After each kill, the same command, with `--output RUN --resume auto`, starts again, as on a cluster. The final
metrics.jsonl and both agents' weights must equal an unbroken run's, byte for byte. If not, the exit status is 1.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {
    "device": "cpu", "checkpoint.save_every": 1, "sample_every": 1, "ppo.batch_size": 4, "ppo.mini_batch_size": 4,
    "ppo.ppo_epochs": 1, "ppo.reward_scaling": "true", "sampling.min_new_tokens": 4, "sampling.max_new_tokens": 8,
}  # fmt: skip
FILES = ("metrics.jsonl", "agent_1/model.safetensors", "agent_2/model.safetensors")


def start(run: Path, processes: int, iterations: int) -> psutil.Popen:
    """Starts or continues a run, appending its output to a log file beside its folder."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [str(ROOT / "imdb_train/cory.py"), f"--output={run}", "--resume=auto"]
    command += [f"--{key}={value}" for key, value in SETTINGS.items()]
    command += [f"--iterations={iterations}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(f"{run}.log", "a") as log:
        return psutil.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


def size(run: Path) -> int:
    """Returns the size of a run's metrics so far, in bytes."""
    file = run / "metrics.jsonl"
    return file.stat().st_size if file.exists() else 0


def kill_after(process: psutil.Popen, run: Path, seconds: float) -> bool:
    """Kills a run's processes `seconds` after it records an iteration. Returns False if the run had already ended."""
    before = size(run)
    while size(run) <= before and process.poll() is None:
        before = min(before, size(run))  # a resumed run first removes lines to be recomputed
        time.sleep(0.005)
    time.sleep(seconds)
    running = process.poll() is None
    for part in [process, *process.children(recursive=True)] if running else []:
        with suppress(psutil.NoSuchProcess):
            part.kill()
    process.wait()
    return running


def trial(folder: Path, processes: int, kills: int, rng: random.Random) -> list[str]:
    """Makes an unbroken run and one that is killed `kills` times. Returns the files that differ."""
    iterations = 3 * kills + 5  # two or three iterations between kills
    unbroken = folder / f"unbroken-{processes}"
    if start(unbroken, processes, iterations).wait() != 0:
        raise SystemExit(f"the unbroken run failed: {unbroken}.log")
    lines = (unbroken / "timings.jsonl").read_text().splitlines()
    seconds = [float(line.split('"seconds_total": ')[1].split(",")[0]) for line in lines]

    killed = folder / f"killed-{processes}"
    for number in range(kills):
        moment = rng.uniform(0, 2 * sorted(seconds)[len(seconds) // 2])
        if not kill_after(start(killed, processes, iterations), killed, moment):
            raise SystemExit(f"the run ended before kill {number + 1}: {killed}.log")
    if start(killed, processes, iterations).wait() != 0:
        raise SystemExit(f"the run could not be continued: {killed}.log")
    return [
        name for name in FILES if (unbroken / name).read_bytes() != (killed / name).read_bytes()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills",
        type=int,
        nargs=2,
        default=(30, 30),
        help="kills of a run with one process, and with two",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="work in this new folder and keep it")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for processes, kills in zip((1, 2), options.kills, strict=True):
            started = time.monotonic()
            differ = trial(folder, processes, kills, random.Random(options.seed))
            failed |= bool(differ)
            result = f"different: {', '.join(differ)}" if differ else "equal to the byte"
            seconds = time.monotonic() - started
            print(f"{processes} process(es), {kills} kills: {result} ({seconds:.0f} s)", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
