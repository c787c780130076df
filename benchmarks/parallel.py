"""Time and memory per process of the ways in which two processes share two agents (docs/scaling.md).

    python benchmarks/parallel.py                             # GPT-2-small's size, random weights, one thread each
    python benchmarks/parallel.py --width 1280 --layers 36 --ways data shard
    python benchmarks/parallel.py --lora 16 --out results/speed

Each way runs in processes of its own, on CPUs; batches are the same. Weights and optimizer are the tensors that a
process holds between iterations, all agents and the reference together; the peak is its resident memory.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.iteration import hardware, table  # noqa: E402

# Processes and settings of `parallel`.
WAYS: dict[str, tuple[int, dict[str, str]]] = {
    "one": (1, {}),
    "data": (2, {}),
    "shard": (2, {"shard": "full"}),
    "layer": (2, {"shard": "full", "gather": "layer"}),
    "apart": (2, {"agents": "apart"}),
}
TITLES = {
    "one": "one process",
    "data": "two processes",
    "shard": "two, `parallel.shard: full`",
    "layer": "two, `parallel.shard: full`, `gather: layer`",
    "apart": "two, `parallel.agents: apart`",
}


def measure(way: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """This process's seconds per iteration after the first, and MiB: held, and at the peak."""
    from cory.agent import make_agents
    from cory.config import Config, LoraConfig, ModelConfig, PPOConfig, SamplingConfig
    from cory.prompts import RolePrompts
    from cory.run.parallel import ParallelConfig
    from cory.task import Task
    from cory.trainer import CoryTrainer

    config = Config(
        device="cpu",
        iterations=options.iterations,
        model=ModelConfig(str(folder)),
        lora=LoraConfig(rank=options.lora),
        ppo=PPOConfig(batch_size=options.batch, mini_batch_size=options.batch, ppo_epochs=options.epochs),
        sampling=SamplingConfig(options.response, options.response),
        parallel=ParallelConfig(**WAYS[way][1]),  # type: ignore[arg-type]
    )
    imported = peak()
    agents = make_agents(config)
    prompts = [" ".join(f"w{(row * 7 + place) % 500}" for place in range(12)) for row in range(4 * options.batch)]

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    trainer = CoryTrainer(
        config, agents, Task.from_prompts(prompts, reward, RolePrompts(observer="{prompt} {response}"))
    )
    seconds = []
    for k in range(options.iterations):
        started = time.perf_counter()
        trainer.iteration(k)
        seconds.append(time.perf_counter() - started)
    return {"seconds": statistics.median(seconds[1:]), **held(agents), "peak": peak(), "imported": imported}


def held(agents: list[Any]) -> dict[str, float]:
    """MiB of the distinct weights and optimizer states in this process."""
    from torch.distributed.tensor import DTensor

    sizes: dict[str, dict[int, int]] = {"weights": {}, "optimizer": {}}
    for agent in (getattr(agent, "agent", agent) for agent in agents):
        if agent is None:  # lives in another process
            continue
        learner = agent.learner
        models = [model for model in (learner.model, learner.ref_model) if model is not None]
        states = [value for state in learner.optimizer.state.values() for value in state.values()]
        for kind, tensors in ("weights", [p for m in models for p in m.parameters()]), ("optimizer", states):
            for tensor in tensors:
                here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                sizes[kind][here.data_ptr()] = here.nbytes
    return {kind: sum(found.values()) / 2**20 for kind, found in sizes.items()}


def peak() -> float:
    """Peak resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def make_model(folder: Path, width: int, layers: int) -> float:
    """Saves a random GPT-2 with its vocabulary's size of words; returns its weights' MiB."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from benchmarks.shapes import word_tokenizer

    tokenizer = word_tokenizer(50257)
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.eos_token_id}
    model = GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=layers, n_head=width // 64, **ids))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters()) / 2**20


def run(way: str, folder: Path, arguments: list[str]) -> list[dict[str, float]]:
    """What each process of a way measured."""
    count = WAYS[way][0]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"] if count > 1 else []
    command = [sys.executable, *launcher, __file__, *arguments, "--measure", way, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    return [json.loads((folder / f"{way}-{rank}.json").read_text()) for rank in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--lora", type=int, default=0, help="rank; 0: full fine-tuning")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--response", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--out", type=Path, help="folder for parallel.md and parallel.json")
    parser.add_argument("--measure", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        way, folder = options.measure[0], Path(options.measure[1])
        found = measure(way, folder, options)
        (folder / f"{way}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as name:
        size = make_model(Path(name), options.width, options.layers)
        measured = {way: run(way, Path(name), sys.argv[1:]) for way in options.ways}
    rows, first = [], max(one["peak"] for one in next(iter(measured.values())))
    for way, each in measured.items():
        most = {key: max(one[key] for one in each) for key in each[0]}
        cells = [f"{most[key]:.0f}" for key in ("weights", "optimizer", "peak")]
        rows.append([TITLES[way], *cells, f"{most['peak'] / first:.2f}", f"{most['seconds']:.2f}"])
    columns = ["", "weights, MiB", "optimizer, MiB", "peak, MiB", "of the first", "s per iteration"]
    kind = f"LoRA of rank {options.lora}" if options.lora else "full fine-tuning"
    text = f"Two agents of {size:.0f} MiB each, {kind}, batch {options.batch}; the largest of the processes.\n\n"
    text += table(rows, columns)
    print(f"{hardware()}\n\n{text}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = "parallel_lora" if options.lora else "parallel"
        (options.out / f"{name}.md").write_text(text + "\n")
        numbers = {"processes": measured, "options": vars(options) | {"out": None}, "hardware": hardware()}
        (options.out / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
