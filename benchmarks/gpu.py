"""Times one CORY iteration on a GPU against examples/minimal.py, and prints a table. Ten minutes, no network.

    python -m benchmarks.gpu                       # GPT-2, GPT2-Large and Qwen2.5-0.5B, fp32 and bf16
    python -m benchmarks.gpu --sizes GPT-2         # only GPT-2
    python -m benchmarks.gpu --sizes Llama-2-7B    # two LoRA adapters on one base, bf16, without minimal
    python -m benchmarks.gpu --sizes GPT2-Large --profile   # the kernels of one iteration instead
    python -m benchmarks.gpu --small               # the same at small width, on any machine

PPO trains all weights of two agents: four epochs, batch 64, queries of 2 to 8 tokens, responses of
16 tokens, the KL over the whole vocabulary, and a DistilBERT as reward model. Llama-2-7B has batch 32,
queries of 128 tokens and responses of 256. Models have the published sizes and random weights; a Llama
of the same size stands in for Qwen2.5-0.5B. Each row of the table is measured in its own process;
seconds are medians. Models are written to the folder for temporary files, up to 14 GB at a time.

`floor s` is the least time for an iteration's matrix products, at the rate of one large product, or
for reading all weights once per sampled token, whichever is longer.

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
import time
from collections.abc import Callable
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
    "Llama-2-7B": Shape(
        32, 4096, 32000, 32, (128, 128), 12, 256, 6, 768, architecture="llama2", lora_rank=16
    ),
}
DEFAULT_SIZES = ("GPT-2", "GPT2-Large", "Qwen2.5-0.5B")
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
        response=min(shape.response, 16),
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
    if options.profile:
        return {"profile": profiled(iteration)}
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
        "floor": sum(floor(shape, bench.device, options.precision).values()),
        "machine": machine(bench.device),
    }


def floor(shape: Shape, device: Any, precision: str) -> dict[str, float]:
    """Returns the least seconds of an iteration's generation and learning on this device.

    Counts the matrix products with weights: 2 operations per weight and token in a forward pass and 4 in a backward
    pass, or 2 with LoRA. Logits are needed at response tokens only. A role samples, compares with the reference once,
    and learns for `epochs` epochs.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.shapes import policy_config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(policy_config(shape))
    head = shape.vocabulary * shape.width
    body = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if weight.dim() == 2
        and not any(part in name for part in ("wte", "wpe", "embed", "lm_head"))
    )
    rate, bandwidth = rates(device, precision)
    query = sum(shape.query) / 2
    prompts = [query, *[query + shape.response + shape.observer] * (shape.agents - 1)]
    forward = [
        2 * shape.batch * (body * (prompt + shape.response) + head * shape.response)
        for prompt in prompts
    ]
    passes = 1 + shape.epochs * (2 if shape.lora_rank else 3)
    weight_bytes = (body + head) * (2 if shape.lora_rank or precision == "bf16" else 4)
    reading = shape.response * weight_bytes / bandwidth
    return {
        "generate": sum(max(operations / rate, reading) for operations in forward),
        "learn": passes * sum(forward) / rate,
    }


def rates(device: Any, precision: str) -> tuple[float, float]:
    """Measures operations per second of a large matrix product, and bytes per second of a large copy."""
    import torch

    is_gpu = device.type == "cuda"
    size = 8192 if is_gpu else 1024
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    factor = torch.randn(size, size, device=device, dtype=dtype)
    source = torch.empty(2**30 if is_gpu else 2**26, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)

    def seconds(work: Callable[[], Any]) -> float:
        work()
        started = time.perf_counter()
        for _ in range(10):
            work()
        if is_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / 10

    product = seconds(lambda: factor @ factor)
    copy = seconds(lambda: target.copy_(source))
    return 2 * size**3 / product, 2 * len(source) / copy


def profiled(iteration: Callable[[int], Any]) -> str:
    """Profiles an iteration. Returns its kernels' number and time, and a table of the ten longest."""
    import torch

    is_gpu = torch.cuda.is_available()
    started = time.perf_counter()
    phases = iteration(1)
    alone = time.perf_counter() - started
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CUDA if is_gpu else activity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        iteration(2)
    attribute = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    kernels = sorted(profile.key_averages(), key=lambda kernel: -getattr(kernel, attribute))
    busy = sum(getattr(kernel, attribute) for kernel in kernels) / 1e6
    # Calls of the CUDA runtime are listed, too, but take no time on the device.
    count = sum(kernel.count for kernel in kernels if getattr(kernel, attribute))
    spent = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases.items())
    rows = [
        [
            kernel.key[:90].replace("|", "/"),
            str(kernel.count),
            f"{getattr(kernel, attribute) / 1e6:.3f}",
            f"{getattr(kernel, attribute) / 1e6 / busy:.0%}",
        ]
        for kernel in kernels[:10]
    ]
    return (
        f"{alone:.2f} s without the profiler ({spent}), {count} kernels, which take {busy:.2f} s\n\n"
        + table(rows, ["kernel", "number", "s", "share"])
    )


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


def precisions(size: str) -> tuple[str, ...]:
    """Returns the precisions in which a size is measured. A base for LoRA has its weights in bfloat16."""
    return ("bf16",) if SIZES[size].lora_rank else PRECISIONS


def print_profiles(options: argparse.Namespace, argv: list[str]) -> None:
    """Profiles an iteration of `ours` at each size and precision, and prints each profile when it is made."""
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as temporary:
            models = ["--models", str(options.models or temporary), "--profile"]
            for precision in precisions(size):
                measured = measured_apart([*argv, *models], size, precision, "ours")
                text = measured if isinstance(measured, str) else measured["profile"]
                print(f"{size}, {precision}: {text}\n", flush=True)


def report(options: argparse.Namespace, argv: list[str]) -> str:
    """Measures all rows and returns the table. Also prints each finished row to stderr."""
    ways = ["minimal", "ours", *(["vLLM"] if options.server else [])]
    header = ["size", "precision", "way", *(f"{phase} s" for phase in (*PHASES, "total"))]
    header += ["total / minimal", "floor s", "peak GiB", "rows of a pass"]
    print(" | ".join(header), file=sys.stderr, flush=True)
    rows = []
    measured_on = ""
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as temporary:
            models = options.models or temporary
            for precision in precisions(size):
                baseline = None
                for way in ways:
                    if way == "minimal" and SIZES[size].lora_rank:
                        continue  # it trains all weights
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
                        row.append(f"{measured['floor']:.2f}")
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
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(DEFAULT_SIZES))
    parser.add_argument("--small", action="store_true", help="small models, for any machine")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--profile", action="store_true", help="profile an iteration of `ours`")
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
    if options.profile:
        print_profiles(options, argv)
    else:
        print(report(options, argv))


if __name__ == "__main__":
    main()
