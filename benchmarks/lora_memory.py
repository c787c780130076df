"""Memory of two agents: LoRA on one shared base or on copies of it, and full fine-tuning with a frozen agent or none.

    python benchmarks/lora_memory.py                     # a base of GPT-2-small's size, random weights
    python benchmarks/lora_memory.py --width 1280 --layers 36
    python benchmarks/lora_memory.py --ways trained frozen  # full fine-tuning: both agents trained, or one of them

LoRA is set against what is unavoidable: one base, adapters, value heads, optimizers.

Counts every distinct tensor that agents, references and optimizers hold after one update each, and the resident memory
of the process, one process per way of holding the agents so that none sees another's.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

WAYS = ("shared", "copies", "trained", "frozen")
LORA = ("shared", "copies")
KINDS = ("policies", "frozen", "adapters", "value heads", "optimizers")


def measure(way: str, folder: str, rank: int) -> dict[str, float]:
    """MiB held by two agents after an update each: in all, and by kind.

    `policies` are trained weights, `frozen` those of bases, references and frozen agents, which may be the same.
    Gradients are freed after an update, so they count in the peak alone.
    """
    import numpy as np
    import torch

    from cory.agents import make_agents
    from cory.config import AgentConfig, Config, LoraConfig, ModelConfig, PPOConfig, SamplingConfig

    agents_of = {  # with devices of their own they have copies
        "copies": [AgentConfig(device="cpu"), AgentConfig(device="cpu")],
        "frozen": [AgentConfig(), AgentConfig(trained=False)],
    }
    config = Config(
        device="cpu",
        model=ModelConfig(folder),
        lora=LoraConfig(rank=rank if way in LORA else 0),
        agents=agents_of.get(way, []),
        ppo=PPOConfig(batch_size=4, mini_batch_size=4, ppo_epochs=1),
        sampling=SamplingConfig(4, 4),
    )
    agents = make_agents(config)
    for agent in agents:
        rollout = agent.respond(["the film", "a story", "it was", "some"], 4, torch.Generator())
        agent.learn([rollout], [torch.randn(4)], np.random.default_rng(0))
    seen: dict[int, tuple[str, int]] = {}
    for agent in agents:
        learner = agent.learner
        if learner is None:
            for parameter in agent.policy.parameters():
                seen[parameter.data_ptr()] = ("frozen", parameter.nbytes)
            continue
        if learner.passes.reference is not None:
            for parameter in learner.passes.reference.parameters():
                seen[parameter.data_ptr()] = ("frozen", parameter.nbytes)
        for name, parameter in learner.model.named_parameters():
            kind = "policies" if parameter.requires_grad else "frozen"
            if ".lora_" in name:
                kind = "adapters"
            elif name.startswith("v_head"):
                kind = "value heads"
            seen[parameter.data_ptr()] = (kind, parameter.nbytes)
        for state in learner.optimizer.state.values():
            for value in state.values():
                seen[value.data_ptr()] = ("optimizers", value.nbytes)
    result = dict.fromkeys(KINDS, 0.0)
    for kind, size in seen.values():
        result[kind] += size / 2**20
    result["all"] = sum(result.values())
    result["peak resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return result


def make_base(folder: str, width: int, layers: int) -> float:
    """Saves a random GPT-2 with a small tokenizer; returns its parameters' MiB."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from study.small_models import train_tokenizer

    tokenizer = train_tokenizer(["the film was a good story, it was some film"] * 10, 300)
    model = GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=layers, n_head=width // 64))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters()) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=LORA)
    parser.add_argument("--measure", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        way, folder = options.measure
        print(json.dumps(measure(way, folder, options.rank)))
        return
    with tempfile.TemporaryDirectory() as folder:
        base = make_base(folder, options.width, options.layers)
        rows = {}
        for way in options.ways:
            command = [
                sys.executable,
                __file__,
                "--rank",
                str(options.rank),
                "--measure",
                way,
                folder,
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows[way] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"base: width {options.width}, {options.layers} layers, {base:.1f} MiB; LoRA rank {options.rank}; two agents\n"
    )
    print(f"| MiB | {' | '.join(KINDS)} | all | peak resident |")
    print("|" + "---|" * (len(KINDS) + 3))
    for way, row in rows.items():
        cells = [f"{row[kind]:.1f}" for kind in (*KINDS, "all")]
        print(f"| {way} | {' | '.join(cells)} | {row['peak resident']:.0f} |")
    if "shared" in rows:
        unavoidable = base + sum(
            rows["shared"][kind] for kind in ("adapters", "value heads", "optimizers")
        )
        print(
            f"\nunavoidable with LoRA: base + adapters + value heads + optimizers = {unavoidable:.1f} MiB"
        )
        for way in LORA:
            if way in rows:
                print(f"{way}: {rows[way]['all'] / unavoidable:.3f} times as much")


if __name__ == "__main__":
    main()
