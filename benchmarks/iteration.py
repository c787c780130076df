"""Times one CORY iteration in several implementations: cory, stock TRL trainers, and examples/minimal.py.

    python benchmarks/iteration.py --shape gpt2_small                # all shapes: benchmarks/shapes.py

benchmarks/ways.py describes the implementations, called ways. They take turns in one process, in rotating order; the
table has medians. Memory is measured in a separate process for each way. `ours` and `minimal` run with cory's memory
settings of the C library, `stock` with the library's defaults.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.shapes import SHAPES, Shape  # noqa: E402
from benchmarks.ways import PHASES, Bench, Seconds, memory_as  # noqa: E402


def interleaved(
    ways: dict[str, Callable[[int], Seconds]], repeats: int
) -> dict[str, list[Seconds]]:
    """Runs all ways in rounds; the first round warms up. Each round starts with the next way."""
    names = list(ways)
    seconds: dict[str, list[Seconds]] = {name: [] for name in names}
    for k in range(repeats + 1):
        for name in names[k % len(names) :] + names[: k % len(names)]:
            memory_as(name)
            measured = ways[name](k)
            if k:
                seconds[name].append(measured)
    return seconds


def peak_memory(bench: Bench, name: str) -> dict[str, float]:
    """Measures the second iteration's peak memory in MiB. `peak` excludes the memory used before models are loaded,
    `extra` the memory used at the iteration's start.

    Must be called in a separate process. Counts resident memory on a CPU, and torch's allocations on a GPU.
    """
    import torch

    gpu = bench.device.type == "cuda"
    warm_up(bench, name)  # loads the libraries, which are not counted
    gc.collect()
    start = 0.0 if gpu else resident("VmRSS")
    way = bench.way(name)
    way(0)
    gc.collect()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
    else:
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
    way(4)
    peak = torch.cuda.max_memory_allocated() / 2**20 if gpu else resident("VmHWM")
    return {"peak": peak - start, "extra": peak - before}


def warm_up(bench: Bench, name: str) -> None:
    """Runs one iteration of a tiny shape, which loads every library that a way needs."""
    shape = Shape(layers=1, width=64, vocabulary=64, batch=2, query=(2, 2), observer=2, response=2, reward_layers=1,
                  reward_width=64)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        small = Bench(shape, Path(folder), bench.device.type, bench.precision)
        small.way(name)(0)


def resident(field: str) -> float:
    """Trims freed memory and returns resident MiB: now (`field` VmRSS), or the peak since the last reset (VmHWM)."""
    import ctypes

    ctypes.CDLL("libc.so.6").malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {field}")


def measured_apart(options: argparse.Namespace, shape: Shape, name: str) -> dict[str, float]:
    """Calls `peak_memory` in a separate process."""
    command = [sys.executable, __file__, "--way", name, "--sizes", json.dumps(asdict(shape))]
    command += ["--device", options.device, "--precision", options.precision]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: list[list[str]], header: list[str]) -> str:
    """Formats rows as a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def hardware() -> str:
    """Describes the processor, the number of threads and torch's version."""
    import torch

    from cory.parallel.devices import choose_device, machine_name

    name = machine_name(choose_device("auto"))
    return f"{name}, {torch.get_num_threads()} CPU threads, torch {torch.__version__}"


def medians(runs: list[Seconds]) -> Seconds:
    """Returns the median seconds of each phase, and of the total."""
    result = {phase: statistics.median(run[phase] for run in runs) for phase in PHASES}
    return result | {"total": statistics.median(sum(run.values()) for run in runs)}


def measure_time(options: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """Measures the seconds of all ways, interleaved."""
    names = options.ways.split(",")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(shape, Path(folder), options.device, options.precision)
        ways = {name: bench.way(name) for name in names}
        runs = interleaved(ways, options.repeats)
    return {"seconds": {name: medians(run) for name, run in runs.items()}, "runs": runs}


def report(options: argparse.Namespace, shape: Shape) -> tuple[str, dict[str, Any]]:
    """Measures time and memory of every way. Returns a Markdown table and the numbers."""
    names = options.ways.split(",")
    result = measure_time(options, shape)
    memory = {name: measured_apart(options, shape, name) for name in names}
    tokens = shape.batch * shape.response * shape.agents
    rows = []
    for name in names:
        seconds = result["seconds"][name]
        cells = [f"{seconds[phase]:.3f}" for phase in (*PHASES, "total")]
        rows.append(
            [name, *cells, f"{tokens / seconds['total']:.0f}"]
            + [f"{memory[name][key]:.0f}" for key in ("peak", "extra")]
            + [
                f"{seconds['total'] / result['seconds']['ours']['total']:.2f}"
                if "ours" in names
                else ""
            ]
            + [
                f"{seconds['total'] / result['seconds']['minimal']['total']:.2f}"
                if "minimal" in names
                else ""
            ]
            + [
                f"{memory[name]['extra'] / memory['stock_all' if 'stock_all' in names else names[-1]]['extra']:.2f}"
            ]
        )
    text = table(rows, ["way", *(f"{phase} s" for phase in (*PHASES, "total")), "response tokens/s", "peak MiB",
                        "extra MiB", "time / ours", "time / minimal", "extra / stock"])  # fmt: skip
    return text, {"shape": asdict(shape), "hardware": hardware(), **result, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="small_pair")
    parser.add_argument(
        "--ways",
        default="ours,minimal,stock,stock_all",
        help="ways to measure, separated by commas",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--out", type=Path, help="folder for NAME.json")
    parser.add_argument("--sizes", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = Shape(**json.loads(options.sizes)) if options.sizes else SHAPES[options.shape]
    if options.way:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(shape, Path(folder), options.device, options.precision)
            print(json.dumps(peak_memory(bench, options.way)))
        return
    text, numbers = report(options, shape)
    print(f"{options.shape}, {options.precision}, {hardware()}\n\n{text}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = f"iteration_{options.shape}_{options.precision}"
        (options.out / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
