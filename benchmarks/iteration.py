"""One CORY iteration, timed side by side: ours, two stock TRL trainers, and examples/minimal.py.

    python benchmarks/iteration.py --shape gpt2_small                # all shapes: benchmarks/shapes.py
    python benchmarks/iteration.py --shape gpt2_small --what update  # one agent's PPO update on the observer's prompts
    python benchmarks/iteration.py --shape small_pair --what memory  # two agents' peak against what is unavoidable

The ways are described in benchmarks/ways.py. All run in turn in one process, and the order of turns rotates; the table
has medians. Memory is measured in a process of its own for each way. The C library's memory settings are cory's for
ours and minimal, and the library's own for stock.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
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
    """Runs every way in turn, after a warm-up round; each round starts with another way."""
    names = list(ways)
    seconds: dict[str, list[Seconds]] = {name: [] for name in names}
    for k in range(repeats + 1):
        for name in names[k % len(names) :] + names[: k % len(names)]:
            memory_as(name)
            measured = ways[name](k)
            if k:
                seconds[name].append(measured)
    return seconds


def peak_memory(bench: Bench, name: str, what: str) -> dict[str, float]:
    """MiB of one iteration (or update) after a first: its peak above the process without models, and above its start.

    Call it in a process of its own. On the CPU: resident memory; on a GPU: what torch allocated.
    """
    import torch

    gpu = bench.device.type == "cuda"
    warm_up(bench, name, what)  # libraries are not part of an iteration's memory
    gc.collect()
    start = 0.0 if gpu else resident("VmRSS")
    way = bench.update(name) if what == "update" else bench.way(name)
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


def warm_up(bench: Bench, name: str, what: str) -> None:
    """One iteration (or update) of a minimal shape, which loads every library that a way needs."""
    shape = Shape(layers=1, width=64, vocabulary=64, batch=2, query=(2, 2), observer=2, response=2, reward_layers=1,
                  reward_width=64)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        small = Bench(shape, Path(folder), bench.device.type, bench.precision)
        (small.update(name) if what == "update" else small.way(name))(0)


def tensor_memory(bench: Bench) -> float:
    """Peak MiB of tensors in our iteration, after a first one; existing models do not count."""
    import torch

    def live() -> int:
        gc.collect()
        tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
        return sum(
            {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values()
        )

    warm_up(bench, "ours", "iteration")
    start = live()
    way = bench.way("ours")
    way(0)
    before = live() - start
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        way(1)
    allocations = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    peak = held = 0
    for event in sorted(allocations, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return (before + peak) / 2**20


def resident(field: str) -> float:
    """MiB of this process: VmRSS is the current value, VmHWM the peak since the last reset. Trims freed memory."""
    import ctypes

    ctypes.CDLL("libc.so.6").malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {field}")


def unavoidable_memory(bench: Bench) -> dict[str, float]:
    """MiB that two (or more) fully fine-tuned agents with a shared reference cannot do without."""
    import torch

    from cory.learners.trl_parts import PolicyWithValueHead
    from cory.models import window

    shape = bench.shape
    model = PolicyWithValueHead(bench.load()[0])
    weights = sum(p.nbytes for p in model.parameters()) / 2**20
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    length = shape.query[1] + shape.observer + shape.response
    ids = torch.zeros(length, dtype=torch.long, device=bench.device)
    batch = window.pack([ids] * shape.batch, [ids[: shape.response]] * shape.batch, 0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits, values = model.to(bench.device).eval()(*batch[:3], shape.response)
        loss = logits.log_softmax(-1)[..., 0].sum() + values.sum()
    activations = sum(saved.values()) / 2**20
    del loss
    return {
        "weights": (shape.agents + 1) * weights,
        "gradients": weights,
        "optimizer states": 2 * shape.agents * weights,
        "activations": activations,
        "sum": (3 * shape.agents + 2) * weights + activations,
    }


def measured_apart(
    options: argparse.Namespace, shape: Shape, name: str, what: str
) -> dict[str, float]:
    """`peak_memory` in a process of its own."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("iteration.py")),
        "--way",
        name,
        "--what",
        what,
        "--device",
        options.device,
    ]
    command += [
        "--precision",
        options.precision,
        "--sizes",
        json.dumps({k: v for k, v in asdict(shape).items() if k != "heads"}),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def exchange_seconds(trainer: Any, repeats: int = 1000) -> float:
    """Seconds per role exchange, which puts the chain of agents in its next order."""
    started = time.perf_counter()
    for k in range(repeats):
        [
            trainer.agents[index]
            for index in trainer.schedule.order(k * trainer.config.cory.exchange_period)
        ]
    return (time.perf_counter() - started) / repeats


def table(rows: list[list[str]], header: list[str]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def hardware() -> str:
    """The processor and torch, in words."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    return f"{name}, {torch.get_num_threads()} CPU threads, torch {torch.__version__}"


def processor() -> str:
    """The name of the CPU."""
    name = platform.processor() or platform.machine()
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        name = next(
            (x.split(":")[1].strip() for x in cpu.read_text().splitlines() if "model name" in x),
            name,
        )
    return name


def medians(runs: list[Seconds]) -> Seconds:
    """By phase, and the median of the totals."""
    result = {phase: statistics.median(run[phase] for run in runs) for phase in PHASES}
    return result | {"total": statistics.median(sum(run.values()) for run in runs)}


def measure_time(options: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """Interleaved seconds of all ways."""
    names = options.ways.split(",")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(shape, Path(folder), options.device, options.precision)
        make = bench.update if options.what == "update" else bench.way
        ways = {name: make(name) for name in names}
        runs = interleaved(ways, options.repeats)
    result: dict[str, Any] = {
        "seconds": {name: medians(run) for name, run in runs.items()},
        "runs": runs,
    }
    if "ours" in names and options.what == "iteration":
        result["exchange_seconds"] = exchange_seconds(ways["ours"].trainer)  # type: ignore[attr-defined]
    return result


def report(options: argparse.Namespace, shape: Shape) -> tuple[str, dict[str, Any]]:
    """Time and memory of every way, as Markdown and as numbers."""
    names = options.ways.split(",")
    result = measure_time(options, shape)
    memory = {name: measured_apart(options, shape, name, options.what) for name in names}
    tokens = shape.batch * shape.response * (1 if options.what == "update" else shape.agents)
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
    if "exchange_seconds" in result:
        text += f"\n\nRole exchange: {result['exchange_seconds'] * 1e6:.1f} microseconds."
    return text, {"shape": asdict(shape), "hardware": hardware(), **result, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="small_pair")
    parser.add_argument("--what", choices=["iteration", "update", "memory"], default="iteration")
    parser.add_argument(
        "--ways", default="ours,minimal,stock,stock_all", help="which, separated by commas"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--out", type=Path, help="folder for NAME.md and NAME.json")
    parser.add_argument("--sizes", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = Shape(**json.loads(options.sizes)) if options.sizes else SHAPES[options.shape]
    if options.way:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(shape, Path(folder), options.device, options.precision)
            if options.way == "unavoidable":
                print(json.dumps(unavoidable_memory(bench)))
            elif options.way == "tensors":
                print(json.dumps({"peak": tensor_memory(bench)}))
            else:
                print(json.dumps(peak_memory(bench, options.way, options.what)))
        return
    if options.what == "memory":
        sums = measured_apart(options, shape, "unavoidable", "iteration")
        peaks = {"tensors": measured_apart(options, shape, "tensors", "iteration")["peak"]}
        peaks["resident"] = measured_apart(options, shape, "ours", "iteration")["peak"]
        text = table(
            [[f"{value:.0f}" for value in (*sums.values(), *peaks.values())]
             + [f"{peak / sums['sum']:.2f}" for peak in peaks.values()]],
            [*(f"{key} MiB" for key in sums), *(f"measured {key} MiB" for key in peaks),
             *(f"{key} / sum" for key in peaks)],
        )  # fmt: skip
        numbers: dict[str, Any] = {"unavoidable": sums, "measured": peaks, "shape": asdict(shape)}
    else:
        text, numbers = report(options, shape)
    print(f"{options.what}, {options.shape}, {options.precision}, {hardware()}\n\n{text}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = f"{options.what}_{options.shape}_{options.precision}"
        (options.out / f"{name}.md").write_text(text + "\n")
        (options.out / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
