"""Memory and time per process of the ways in which processes share two agents, beside formulas (docs/scaling.md).

    python benchmarks/parallel.py                             # memory, GPT-2-small's size, random weights
    python benchmarks/parallel.py --lora 16 --out results/speed
    python benchmarks/parallel.py --width 1280 --layers 36 --ways one data shard
    python benchmarks/parallel.py --what time --width 512 --layers 6 --epochs 2 --iterations 3    # on a quiet machine

Each way runs in processes of its own, on CPUs, with one thread each; the batch of all of them together is the same.
`devices` is one process with two threads, in which agents have devices of their own (both the CPU) and so are updated
at the same time; `one2` is the same without.

* Memory: what a process holds between iterations, all agents and the reference together; in an update, gradients and
  buffers to exchange them; its peak in iterations, and at the start, when models are loaded, both above what libraries
  take after the same with a small model. The formulas are those of benchmarks/fits.py.
* Time: all ways in turn, `--repeats` times; medians. The ideal of `data` is the time of one process over the number of
  processes, or of cores if fewer; with two threads, that of sampling with them, and half of the updates.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.iteration import hardware, resident, table  # noqa: E402

# Processes and settings of `parallel`.
WAYS: dict[str, tuple[int, dict[str, str]]] = {
    "one": (1, {}),
    "one2": (1, {}),
    "data": (2, {}),
    "data4": (4, {}),
    "shard": (2, {"shard": "full"}),
    "shard4": (4, {"shard": "full"}),
    "devices": (1, {}),
}
TITLES = {
    "one2": "one process, two threads",
    "devices": "one process, a `device` for each agent, two threads",
}
NUMBERS = {1: "one process", 2: "two", 4: "four"}
DEFAULTS = {
    "memory": ["one", "data", "shard", "devices"],
    "time": ["one", "one2", "data", "data4", "devices"],
}
QUERY = 12  # tokens
PARTS = ("weights", "Adam", "gradients", "exchange")


def title(way: str) -> str:
    """`two, parallel.shard: full`, ..."""
    if way in TITLES:
        return TITLES[way]
    count, settings = WAYS[way]
    return ", ".join([NUMBERS[count], *(f"`{key}: {value}`" for key, value in settings.items())])


def config_of(way: str, folder: str, options: argparse.Namespace) -> Any:
    """A way's settings."""
    from cory.config import (
        AgentConfig,
        Config,
        LoraConfig,
        ModelConfig,
        ParallelConfig,
        PPOConfig,
        SamplingConfig,
    )

    return Config(
        device="cpu",
        iterations=options.iterations,
        model=ModelConfig(folder),
        lora=LoraConfig(rank=options.lora),
        agents=[AgentConfig(device="cpu")] * 2 if way == "devices" else [],
        ppo=PPOConfig(
            batch_size=options.batch, mini_batch_size=options.batch, ppo_epochs=options.epochs
        ),
        sampling=SamplingConfig(options.response, options.response),
        parallel=ParallelConfig(**WAYS[way][1]),  # type: ignore[arg-type]
    )


def measure(way: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """This process's bytes held and at the peaks, and median seconds of iterations after the first, by phase."""
    from cory.agents import make_agents
    from cory.prompts import RolePrompts
    from cory.task import Task
    from cory.trainer import CoryTrainer

    config = config_of(way, str(folder), options)
    imported = resident("VmRSS")
    reset_peak()
    agents = make_agents(config)
    start = resident("VmHWM")
    prompts = [
        " ".join(f"w{(row * 7 + place) % 500}" for place in range(QUERY))
        for row in range(4 * options.batch)
    ]

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    prompts_of_roles = RolePrompts(observer="{prompt} {response}")
    trainer = CoryTrainer(config, agents, Task.from_prompts(prompts, reward, prompts_of_roles))
    gradients = dict.fromkeys(agents, 0)  # in bytes, by agent

    def measure_gradients(agent: Any, *_: Any) -> None:
        gradients[agent] = gradient_bytes([agent])

    for agent in agents:
        assert agent.learner is not None
        agent.learner.optimizer.optimizer.register_step_pre_hook(partial(measure_gradients, agent))
    reset_peak()
    seconds = []
    for k in range(options.iterations):
        started = time.perf_counter()
        iteration = trainer.iteration(k)
        seconds.append({**iteration.seconds, "total": time.perf_counter() - started})
    found = {"imported": imported, "start": start, "peak": resident("VmHWM")}
    medians = {phase: statistics.median(one[phase] for one in seconds[1:]) for phase in seconds[-1]}
    return {
        **{key: value * 2**20 for key, value in found.items()},
        **held(agents),
        # Agents with devices of their own learn at the same time.
        "gradients": (sum if config.device_per_agent else max)(gradients.values()),
        **medians,
    }


def reset_peak() -> None:
    """Starts the measurement of this process's peak memory again (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def size_of(tensors: Any) -> int:
    """Bytes of the distinct tensors in this process."""
    from torch.distributed.tensor import DTensor

    here = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in here if tensor.nbytes}.values())


def gradient_bytes(agents: list[Any]) -> int:
    """Bytes of the gradients of all agents in this process."""
    parameters = [parameter for agent in agents for parameter in agent.learner.model_params]
    return size_of(parameter.grad for parameter in parameters if parameter.grad is not None)


def held(agents: list[Any]) -> dict[str, float]:
    """Bytes of weights, optimizer states and buffers for the exchange of gradients in this process."""
    learners = [agent.learner for agent in agents]
    models = [
        model
        for one in learners
        for model in (one.model, one.passes.reference)
        if model is not None
    ]
    states = [
        value
        for one in learners
        for state in one.optimizer.state.values()
        for value in state.values()
    ]
    engines = {one.model for one in learners if hasattr(one.model, "reducer")}
    buckets = [engine._get_ddp_logging_data()["bucket_sizes"] for engine in engines]
    return {
        "weights": size_of(parameter for model in models for parameter in model.parameters()),
        "Adam": size_of(states),
        "exchange": sum(int(size) for sizes in buckets for size in sizes.split(",")),
    }


def make_model(folder: Path, width: int, layers: int, vocabulary: int = 50257) -> Any:
    """Saves a random GPT-2, by default with its vocabulary's size of words; returns its sizes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from benchmarks.fits import Model
    from benchmarks.shapes import word_tokenizer

    tokenizer = word_tokenizer(vocabulary)
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": vocabulary, "n_embd": width, "n_layer": layers, "n_head": width // 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **ids))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Model.of(model)


def run(ways: list[str], folder: Path, arguments: list[str]) -> dict[str, list[dict[str, float]]]:
    """What each process of each way measured. The ways, of equally many processes, run one after the other in them."""
    count = WAYS[ways[0]][0]
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        if count > 1
        else []
    )
    command = [sys.executable, *launcher, __file__, *arguments, "--measure", *ways, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "2" if ways[0] in TITLES else "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    return {
        way: [json.loads((folder / f"{way}-{rank}.json").read_text()) for rank in range(count)]
        for way in ways
    }


def most(each: list[dict[str, float]]) -> dict[str, float]:
    """The largest of the processes."""
    return {key: max(one[key] for one in each) for key in each[0]}


def formula(way: str, model: Any, options: argparse.Namespace) -> dict[str, float]:
    """What benchmarks/fits.py says that each process of a way holds and needs, in bytes."""
    from benchmarks import fits

    config, processes = config_of(way, "", options), WAYS[way][0]
    found = fits.held(config, model, processes)
    peak = fits.peak(config, model, processes, prompt=QUERY + options.response)
    if config.device_per_agent:  # these are the bytes of a device, and both are this process's
        return {name: 2 * size for name, size in found.items()} | {"peak": 2 * peak}
    return found | {"peak": peak}


def memory(options: argparse.Namespace, folder: Path, model: Any) -> tuple[str, dict[str, Any]]:
    """Memory of every way beside the formulas, as Markdown and as numbers."""
    measured = {way: run([way], folder, sys.argv[1:])[way] for way in options.ways}
    rows, numbers = [], {}
    for way, each in measured.items():
        found, by_formula = most(each), formula(way, model, options)
        found["peak"], found["start"] = (
            found[key] - found["imported"] for key in ("peak", "start")
        )
        cells = [
            f"{found[key] / 2**20:.0f} ({by_formula[key] / 2**20:.0f})" for key in (*PARTS, "peak")
        ]
        rows.append([title(way), *cells, f"{found['start'] / 2**20:.0f}"])
        numbers[way] = {"processes": each, "formula": by_formula}
    text = table(rows, ["MiB, by formula in brackets", *PARTS, "peak", "at the start"])
    return text, numbers


def times(options: argparse.Namespace, folder: Path) -> tuple[str, dict[str, Any]]:
    """Seconds of every way beside the ideal, as Markdown and as numbers."""
    ways, cores = options.ways, len(os.sched_getaffinity(0))
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for k in range(options.repeats):
        for way in ways[k % len(ways) :] + ways[: k % len(ways)]:
            runs[way].append(most(run([way], folder, sys.argv[1:])[way]))
    middle = {
        way: {key: statistics.median(one[key] for one in each) for key in each[0]}
        for way, each in runs.items()
    }
    rows = []
    for way in ways:
        found, one, at_once = middle[way], middle["one"], min(WAYS[way][0], cores)
        ideal = one["total"] / at_once
        if way in TITLES:  # sampling as it is with two threads, and two updates in the time of one
            ideal = middle[way]["generate"] + one["learn"] / min(2, cores)
        totals = [each["total"] for each in runs[way]]
        cells = [f"{found[phase]:.2f}" for phase in ("generate", "learn", "total")]
        spread = f"{min(totals):.2f} to {max(totals):.2f}"
        rows.append([title(way), *cells, spread, f"{ideal:.2f}", f"{found['total'] / ideal:.2f}"])
    text = table(
        rows,
        ["seconds", "sampling", "updates", "iteration", "from, to", "ideal", "iteration / ideal"],
    )
    return f"{options.repeats} runs of each way in turn, {cores} cores.\n\n{text}", {"runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=["memory", "time"], default="memory")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, help="default: those of docs/scaling.md's table"
    )
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--lora", type=int, default=0, help="rank; 0: full fine-tuning")
    parser.add_argument(
        "--batch", type=int, default=16, help="responses per role, over all processes"
    )
    parser.add_argument("--response", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--iterations", type=int, default=4, help="of each process; the first is not timed"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of each way, for `--what time`")
    parser.add_argument("--out", type=Path, help="folder for NAME.md and NAME.json")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)  # ways and a folder
    options = parser.parse_args()
    if options.measure:
        *ways, folder = options.measure
        for way in ways:
            if options.what == "memory":
                # Loads what libraries load when they are first used.
                measure(way, Path(folder, "small"), options)
            found = measure(way, Path(folder), options)
            Path(folder, f"{way}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
        from torch import distributed  # here, as the parent does without it

        if distributed.is_initialized():
            # Its threads may abort a process that ends under them.
            distributed.destroy_process_group()
        return
    options.ways = options.ways or DEFAULTS[options.what]
    if options.what == "time" and "one" not in options.ways:
        parser.error("--ways: expected `one` among them, whose time gives the ideals")
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name, "small"), 64, 1, 512)
        model = make_model(Path(name), options.width, options.layers)
        text, numbers = (
            memory(options, Path(name), model)
            if options.what == "memory"
            else times(options, Path(name))
        )
    kind = f"LoRA of rank {options.lora}" if options.lora else "full fine-tuning"
    sizes = f"{4 * model.parameters / 2**20:.0f} MiB each, {kind}, batch {options.batch}, {options.response} tokens"
    text = (
        f"Two agents of {sizes}, {options.epochs} epochs; the largest of the processes.\n\n{text}"
    )
    print(f"{hardware()}\n\n{text}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = f"parallel_{options.what}" + ("_lora" if options.lora else "")
        (options.out / f"{name}.md").write_text(text + "\n")
        stored = {"ways": numbers, "options": vars(options) | {"out": None}, "hardware": hardware()}
        (options.out / f"{name}.json").write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
