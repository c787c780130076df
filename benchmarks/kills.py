"""Kills trainings at random moments, and checks that nothing finished is lost and that the same command then succeeds.

    TMPDIR=/dev/shm python benchmarks/kills.py          # 60 kills; in memory, as many files are copied and removed
    python benchmarks/kills.py --kills 6 --seed 1
    python benchmarks/kills.py --only extend --keep FOLDER

Every command works on toy settings, in a folder of its own that is copied from a prepared one. It is forked from a
process that has imported the libraries, as importing takes longer than the work, and gets SIGKILL at a random moment of
its life, which was measured before. After each kill:

* files that the command does not write are byte-identical, and none that was finished is missing;
* every file under its final name is complete: JSON parses, figures and pages have their end, tensors load;
* records are whole lines but for the last one, and a prefix of those of an unbroken command;
* an extended run has the agents and the summary of its finished iterations, or none that count as finished;
* the same command (`--resume auto` where a run was begun) ends with status 0, with the records of an unbroken one.
"""

import argparse
import json
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import yaml  # noqa: E402

SMALL = {
    "device": "cpu", "sample_every": 1, "checkpoint.save_every": 1, "ppo.batch_size": 4, "ppo.mini_batch_size": 4,
    "ppo.ppo_epochs": 1, "sampling.min_new_tokens": 4, "sampling.max_new_tokens": 4,
}  # fmt: skip
ITERATIONS = 4
OWN = {
    "model": {"name": str(ROOT / "imdb_train/weights/policy")},
    "task": {"dataset": "data", "reward": "rewards.py:reward"},
}
REWARD = """
def reward(completions, **columns):
    return [len(text) + text.count("good") for text in completions]
"""
FLAGS = [f"--{key}={value}" for key, value in SMALL.items()]
TRAIN = ["cory.train", "--config=own.yaml"]
RESUME = ["cory.train", "--resume=a"]
RECORDS = ("metrics.jsonl", "samples.jsonl", "timings.jsonl")


@dataclass
class Command:
    """A command whose life is shortened.

    Args:
        name: in the table. argv: module and arguments. prepared: the folder in which it starts.
        again: arguments of the second start where a run was begun and they differ.
    """

    name: str
    argv: list[str]
    prepared: str
    again: list[str] | None = None


@dataclass
class Count:
    """What became of a command: seconds of its life unbroken, number of kills, what was lost, restarts that worked."""

    seconds: float
    kills: int = 0
    worked: int = 0
    lost: list[str] = field(default_factory=list)


def training(iterations: int = ITERATIONS) -> list[str]:
    return [*TRAIN, *FLAGS, f"--iterations={iterations}", "--output=a"]


COMMANDS = [
    Command("train, a new run", training(), "empty", [*training(), "--resume=auto"]),
    Command("train, --resume", RESUME, "unfinished"),
    Command("train, extend a finished run", [*RESUME, f"--iterations={ITERATIONS}"], "finished"),
]
# Files of the run that end as those of an unbroken command, byte for byte.
EQUAL = ("a/metrics.jsonl", "a/samples.jsonl")


def start(argv: Sequence[str], folder: Path) -> int:
    """Forks a process that runs a command in a folder; returns its id. Its output goes to a file beside the folder."""
    child = os.fork()
    if child:
        return child
    os.chdir(folder)
    output = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = list(argv)
    status = 0
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def finish(child: int) -> int:
    """The status with which a process ends; that of a signal is negative."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed(child: int, seconds: float) -> bool:
    """Kills a process after so many seconds. Returns whether it was still there."""
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return finish(child) == -signal.SIGKILL


def content(folder: Path) -> dict[str, bytes]:
    """The files under their final names: neither locks nor what is partly written."""
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            found[str(name)] = path.read_bytes()
    return found


def whole(name: str, data: bytes) -> bool:
    """Whether a file is complete, as far as its kind shows."""
    from safetensors.torch import load

    ends = {".html": b"</html>", ".png": b"IEND\xaeB`\x82"}
    kind = Path(name).suffix
    try:
        if kind == ".json":
            json.loads(data)
        elif kind == ".yaml":
            return isinstance(yaml.safe_load(data), dict)
        elif kind == ".safetensors":
            load(data)
        elif kind in ends:
            return data.rstrip().endswith(ends[kind])
        elif kind == ".md":
            return len(data) > 0
    except Exception:
        return False
    return True


def lost(
    before: Mapping[str, bytes], now: Mapping[str, bytes], unbroken: Mapping[str, bytes]
) -> list[str]:
    """What is wrong after a kill, in words."""
    found = []
    for name, data in before.items():
        in_run = name.startswith("a/")
        rotated = "/checkpoints/" in name or _is_end(name, before)  # checked below
        if not in_run and now.get(name) != data:
            found.append(f"{name} has changed")
        elif in_run and name not in now and not rotated:
            found.append(f"{name} is missing")
    for name, data in now.items():
        if Path(name).name in RECORDS:
            found += _wrong_records(name, data, unbroken)
        elif "/checkpoints/" not in name and not whole(name, data):
            found.append(f"{name} is not complete")
    if "a/metrics.jsonl" in before:
        found += _wrong_end(before, now)
    return found


def _is_end(name: str, before: Mapping[str, bytes]) -> bool:
    """Whether a file is one of those that the run writes together at its end."""
    return "a/metrics.jsonl" in before and name.startswith(("a/agent_", "a/summary.json"))


def _wrong_records(name: str, data: bytes, unbroken: Mapping[str, bytes]) -> list[str]:
    lines = data[: data.rfind(b"\n") + 1]
    with suppress(ValueError):
        for line in lines.splitlines():
            if line:
                json.loads(line)
        if Path(name).name == "timings.jsonl" or unbroken.get(name, b"").startswith(lines):
            return []
    return [f"{name} is no prefix of the records of an unbroken command"]


def _wrong_end(before: Mapping[str, bytes], now: Mapping[str, bytes]) -> list[str]:
    """The run's end is the old one, or a new one of other iterations, or does not count as one."""
    if "a/summary.json" in before and now.get("a/summary.json") == before["a/summary.json"]:
        return [
            f"{name} is not that of the finished iterations"
            for name in before
            if _is_end(name, before) and now.get(name) != before[name]
        ]
    if "a/summary.json" in now:
        agents = [
            name
            for name in now
            if name.startswith("a/agent_") and name.endswith("model.safetensors")
        ]
        return [] if len(agents) == 2 else [f"the run is finished with {len(agents)} agents"]
    return []


def newest_checkpoint(folder: Path) -> int:
    """The iteration of the newest valid checkpoint of the run `a`; -1: there is none."""
    from cory.resume.checkpoint import newest

    found = newest(folder / "a", ["agent_1", "agent_2"])
    return found[1].iteration if found else -1


def prepare(folder: Path) -> None:
    """Makes the folders in which commands start."""
    empty = folder / "empty"
    (empty / "data").mkdir(parents=True)
    for split in ("train", "test"):
        rows = [
            json.dumps({"prompt": f"{split} {number}: this film was"}) + "\n"
            for number in range(16)
        ]
        (empty / f"data/{split}.jsonl").write_text("".join(rows))
    (empty / "rewards.py").write_text(REWARD)
    (empty / "own.yaml").write_text(yaml.safe_dump(OWN))
    for name in ("unfinished", "finished"):
        shutil.copytree(empty, folder / name)
    status = finish(start(training(ITERATIONS // 2), folder / "finished"))
    if status:
        raise SystemExit(f"train: status {status}, see {folder}/finished.log")
    child = start(training(), folder / "unfinished")
    metrics = folder / "unfinished/a/metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2:
        time.sleep(0.01)
    os.kill(child, signal.SIGTERM)
    finish(child)


def unbroken(command: Command, folder: Path) -> tuple[float, dict[str, bytes]]:
    """The seconds that a command takes if nothing interrupts it, and what its folder then holds."""
    place = folder / "unbroken"
    shutil.copytree(folder / command.prepared, place)
    started = time.monotonic()
    status = finish(start(command.argv, place))
    seconds = time.monotonic() - started
    if status:
        raise SystemExit(f"{command.name}: status {status}, see {place}.log")
    found = content(place)
    shutil.rmtree(place)
    return seconds, found


def trial(
    command: Command, folder: Path, seconds: float, expected: Mapping[str, bytes], count: Count
) -> bool:
    """One kill and the restart. Returns whether the command was still running."""
    place = folder / "trial"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder / command.prepared, place)
    before = content(place)
    saved = newest_checkpoint(place) if "a/metrics.jsonl" in before else -1
    if not killed(start(command.argv, place), seconds):
        return False
    if command.name == "evaluate" and (place / "e/evaluation.json").exists():
        return False  # it had ended, and the same command would be refused
    count.kills += 1
    found = lost(before, content(place), expected)
    if saved > (newest_checkpoint(place) if saved >= 0 else -1):
        found.append("the newest checkpoint is lost")
    again = command.again if command.again and (place / "a/config.yaml").exists() else command.argv
    status = finish(start(again, place))
    end = content(place)
    differ = [name for name in EQUAL if end.get(name) != expected[name]]
    differ += [name for name in expected if name not in end and "/checkpoints/" not in name]
    partial = [str(path) for path in place.rglob(".partial-*") if path.is_dir()]
    count.worked += status == 0 and not differ
    if status or differ or found or partial:
        print(
            f"{command.name}, killed after {seconds:.2f} s: {found}; status {status}; differ {differ}; left {partial}"
        )
    count.lost += found
    return True


def table(counts: Mapping[str, Count]) -> str:
    rows = [("command", "seconds", "kills", "lost", "restarts that worked")]
    for name, count in counts.items():
        rows.append(
            (
                name,
                f"{count.seconds:.1f}",
                str(count.kills),
                str(len(count.lost)),
                str(count.worked),
            )
        )
    total = [sum(c.kills for c in counts.values()), sum(len(c.lost) for c in counts.values())]
    rows.append(
        ("all", "", str(total[0]), str(total[1]), str(sum(c.worked for c in counts.values())))
    )
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="commands whose name holds this")
    parser.add_argument("--keep", type=Path, help="work in this new folder and keep it")
    options = parser.parse_args()
    chosen = [command for command in COMMANDS if options.only in command.name]
    if not chosen:
        parser.error(f"--only: expected a part of one of {[command.name for command in COMMANDS]}")
    started = time.monotonic()
    import_all()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary) / "work"
        folder.mkdir(parents=True)
        prepare(folder)
        rng, counts = random.Random(options.seed), {}
        for command in chosen:
            seconds, expected = unbroken(command, folder)
            count = counts[command.name] = Count(seconds)
            wanted = max(1, round(options.kills / len(chosen)))
            while count.kills < wanted:
                if not trial(command, folder, seconds * rng.random(), expected, count):
                    # It had ended: the machine is less busy than when its life was measured.
                    seconds *= 0.9
            so_far = f"{count.kills} kills, {len(count.lost)} lost, {count.worked} restarts worked"
            print(f"{command.name}: {so_far}, {time.monotonic() - started:.0f} s", flush=True)
    print(
        f"\n{table(counts)}\n\nSeed {options.seed}, {(time.monotonic() - started) / 60:.0f} minutes."
    )
    if any(count.lost or count.worked < count.kills for count in counts.values()):
        sys.exit(1)


def import_all() -> None:
    """Imports what the commands import. Nothing is computed: a process that has computed cannot be forked safely."""
    import matplotlib

    matplotlib.use("Agg")
    import cory.trainer  # noqa: F401


if __name__ == "__main__":
    main()
