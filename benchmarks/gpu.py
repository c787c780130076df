"""Times one CORY iteration on a GPU against examples/minimal.py, and prints a table. Ten minutes, no network.

    python -m benchmarks.gpu                       # GPT-2, GPT2-Large and Qwen2.5-0.5B, fp32 and bf16
    python -m benchmarks.gpu --sizes GPT-2         # only GPT-2
    python -m benchmarks.gpu --small               # the same at small width, on any machine

PPO trains all weights of two agents: four epochs, batch 64, queries of 2 to 8 tokens, responses of
16 tokens, the KL over the whole vocabulary, and a DistilBERT as reward model. Models have the published
sizes and random weights; a Llama of the same size stands in for Qwen2.5-0.5B. Each row of the table
is measured in its own process; seconds are medians. Models are written to the folder for temporary
files, 3.5 GB at a time.

To measure vLLM, keep one size's model with the first command below, start a server on that model
(docs/scaling.md has the command), then run the second one:

    python -m benchmarks.gpu --sizes GPT-2 --models FOLDER           # keeps FOLDER/GPT-2/policy
    python -m benchmarks.gpu --sizes GPT-2 --models FOLDER --server http://127.0.0.1:8000
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.iteration import medians, table
from benchmarks.shapes import Shape
from benchmarks.ways import PHASES, Bench

SIZES = {
    "GPT-2": Shape(12, 768, 50257, 64, (2, 8), 12, 16, 6, 768),
    "GPT2-Large": Shape(36, 1280, 50257, 64, (2, 8), 12, 16, 6, 768),
    "Qwen2.5-0.5B": Shape(24, 896, 151936, 64, (2, 8), 12, 16, 6, 768, architecture="llama"),
}
PRECISIONS = ("fp32", "bf16")
GIB = 2**30


def small(shape: Shape) -> Shape:
    """Returns the same architecture, small enough for a CPU."""
    return replace(
        shape,
        layers=shape.layers // 12,
        width=128,
        vocabulary=512,
        batch=8,
        reward_layers=1,
        reward_width=64,
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures one implementation (`--way`) in this process.

    Returns median seconds by phase (after a first iteration), peak memory, sequences per pass, and the machine.
    """
    import torch

    from cory.run.measure import peak_memory_mb

    size = options.sizes[0]
    shape = small(SIZES[size]) if options.small else SIZES[size]
    folder = options.models / (f"{size}-small" if options.small else size)
    bench = Bench(shape, folder, options.device, options.precision)
    if options.way == "vLLM":
        bench.config.sampling.engine = "vllm"
        bench.config.sampling.engine_url = options.server
    iteration = bench.minimal() if options.way == "minimal" else bench.ours()
    iteration(0)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    runs = [iteration(k) for k in range(1, options.repeats + 1)]

    rows = shape.batch
    if options.way != "minimal":
        rows = min(agent.learner.pass_size.micro_batch for agent in iteration.agents)  # type: ignore[attr-defined]
    return {
        "seconds": medians(runs),
        "gib": peak_memory_mb() / 2**10,
        "rows": rows,
        "machine": machine(bench.device),
    }


def machine(device: Any) -> str:
    """Describes the device, its memory and the libraries' versions."""
    import psutil
    import torch

    from cory.errors import counted
    from cory.identity import versions
    from cory.parallel.devices import processor

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = (
            f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, CUDA {torch.version.cuda}"
        )
    else:
        memory = psutil.virtual_memory().total / GIB
        name = f"{processor()}, {memory:.0f} GiB, {counted(torch.get_num_threads(), 'thread')}"
    numbers = ", ".join(f"{library} {version}" for library, version in versions().items())
    return f"{name}; {numbers}"


def measured_apart(argv: list[str], size: str, precision: str, way: str) -> dict[str, Any] | str:
    """Runs `measure` in its own process; returns the last line of the error if that fails."""
    command = [sys.executable, "-m", "benchmarks.gpu", *argv, "--sizes", size]
    command += ["--precision", precision, "--way", way]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    print(done.stderr, file=sys.stderr)
    return "out of memory" if "out of memory" in done.stderr else lines[-1][:100].replace("|", "/")


def report(options: argparse.Namespace, argv: list[str]) -> str:
    """Measures all rows and returns the table. Also prints each finished row to stderr."""
    ways = ["minimal", "ours", *(["vLLM"] if options.server else [])]
    header = ["size", "precision", "way", *(f"{phase} s" for phase in (*PHASES, "total"))]
    header += ["total / minimal", "peak GiB", "rows of a pass"]
    print(" | ".join(header), file=sys.stderr, flush=True)
    rows = []
    measured_on = ""
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as temporary:
            models = options.models or temporary
            for precision in PRECISIONS:
                baseline = None
                for way in ways:
                    measured = measured_apart(
                        [*argv, "--models", str(models)], size, precision, way
                    )
                    row = [size, precision, way]
                    if isinstance(measured, str):
                        row += [measured, *[""] * (len(header) - 4)]
                    else:
                        measured_on = measured["machine"]
                        seconds = measured["seconds"]
                        baseline = seconds["total"] if way == "minimal" else baseline
                        row += [f"{seconds[phase]:.2f}" for phase in (*PHASES, "total")]
                        row.append(f"{seconds['total'] / baseline:.2f}" if baseline else "")
                        row += [f"{measured['gib']:.1f}", str(measured["rows"])]
                    rows.append(row)
                    print(" | ".join(row), file=sys.stderr, flush=True)

    command = f"`python -m benchmarks.gpu {' '.join(sys.argv[1:])}`"
    text = f"{command} on {measured_on}\n\n{table(rows, header)}"
    if options.small:
        text += "\n\nAll sizes at width 128, with 1 to 3 layers, a vocabulary of 512 and batch 8."
    return text


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--small", action="store_true", help="small models, for any machine")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--models", type=Path, help="folder that keeps the models")
    parser.add_argument("--server", help="address of a vLLM server for the model of --sizes")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options)))
        return
    if options.server and (len(options.sizes) > 1 or options.models is None):
        parser.error("--server: expected a single size in --sizes, and --models FOLDER")
    if options.device == "auto" and not options.small and not has_gpu():
        parser.error("--device: expected a GPU, got none. Use --small or --device cpu")
    argv = ["--repeats", str(options.repeats), "--device", options.device]
    argv += ["--small"] if options.small else []
    argv += ["--server", options.server] if options.server else []
    print(report(options, argv))


if __name__ == "__main__":
    main()
