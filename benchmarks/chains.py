"""Memory and time of a pair of agents by the kind of chain: as it is, with a frozen agent, with branches.

    python benchmarks/chains.py                          # GPT-2 of 25 million random weights, on the CPU

Each way runs in a process of its own. Memory is the process's peak; time is the CPU's, of the fastest iteration.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

WAYS: dict[str, dict[str, Any]] = {
    "one agent": {"cory": {"num_agents": 1}},
    "two agents": {},
    "two agents, one frozen": {"agents": [{}, {"trained": False}]},
    "two agents, 4 branches": {"branches": 4},
}
RESPONSES = 32  # of the observer


def make_base(folder: str) -> None:
    """Saves a random GPT-2 of eight layers with a small tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from study.small_models import train_tokenizer

    tokenizer = train_tokenizer(["the film was a good story, it was some film"] * 10, 300)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_embd=512, n_layer=8, n_head=8)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure(way: str, folder: str, iterations: int) -> dict[str, float]:
    """Peak memory of the process before and after, in MiB, and seconds of an iteration."""
    from cory import CoryTrainer, RolePrompts, Task, make_agents
    from cory.config import Config, CoryConfig, ModelConfig, PPOConfig, SamplingConfig
    from cory.run.clock import peak_memory_mb

    changes = dict(WAYS[way])
    config = Config(
        device="cpu",
        model=ModelConfig(folder),
        ppo=PPOConfig(batch_size=RESPONSES, mini_batch_size=RESPONSES, micro_batch=8),
        sampling=SamplingConfig(8, 8),
        cory=CoryConfig(**changes.pop("cory", {})),
        **changes,
    )
    task = Task.from_prompts(
        [f"the film was {number}" for number in range(RESPONSES)],
        lambda prompts, completions: [float(len(text)) for text in completions],
        RolePrompts(),
    )
    before = peak_memory_mb()
    trainer = CoryTrainer(config, make_agents(config), task)
    seconds = []
    for k in range(iterations):
        started = time.process_time()
        trainer.iteration(k)
        seconds.append(time.process_time() - started)
    return {"before": before, "peak": peak_memory_mb(), "seconds": min(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--measure", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        way, folder = options.measure
        print(json.dumps(measure(way, folder, options.iterations)))
        return
    print("| chain | peak memory (MiB) | CPU seconds of an iteration |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        make_base(folder)
        for way in WAYS:
            command = [
                sys.executable,
                __file__,
                "--iterations",
                str(options.iterations),
                "--measure",
                way,
                folder,
            ]
            # What it prints on stderr stays visible, so that a way that fails names its cause.
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            numbers = json.loads(done.stdout.splitlines()[-1])
            print(f"| {way} | {numbers['peak']:.0f} | {numbers['seconds']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
