"""Memory and time of an update at large vocabularies, with the output layer whole and in chunks (docs/scaling.md).

    OMP_NUM_THREADS=1 python benchmarks/vocabulary.py                  # on a quiet machine
    OMP_NUM_THREADS=1 python benchmarks/vocabulary.py --algorithms ppo grpo

A small GPT-2 of random weights, in which the output layer dominates, as it does in the memory of larger models. Each
cell is a process of its own. The peak is of resident memory in an update, above what the process holds before it:
gradients, activations and arrays over the vocabulary. An update on responses of two tokens comes first and makes Adam's
state. Seconds are of processor time, of one thread.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.iteration import hardware, resident, table  # noqa: E402
from benchmarks.parallel import reset_peak  # noqa: E402
from benchmarks.shapes import word_tokenizer  # noqa: E402

WAYS = {
    "whole": "whole",
    "whole_1": "whole, `micro_batch: 1`",
    "chunks": "in chunks",
}
PROMPT = 16  # tokens


def measure(
    options: argparse.Namespace, vocabulary: int, algorithm: str, way: str
) -> dict[str, float]:
    """Seconds of an update, and MiB at its peak."""
    import numpy as np
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from cory.config import Config, PPOConfig, SamplingConfig
    from cory.learners import head
    from cory.learners.group import GroupLearner, WindowPolicy
    from cory.learners.ppo import PPOLearner
    from cory.learners.trl_parts import PolicyWithValueHead
    from cory.models.rollout import Rollout

    head.WHOLE = {"cpu": 0 if way == "chunks" else sys.maxsize}
    rows, response = options.rows, options.response
    config = Config(
        device="cpu",
        algorithm=algorithm,  # type: ignore[arg-type]
        group_size=4,
        ppo=PPOConfig(
            batch_size=rows,
            mini_batch_size=rows,
            micro_batch=1 if way == "whole_1" else "auto",
            ppo_epochs=options.epochs,
        ),
        sampling=SamplingConfig(max_new_tokens=response),
    )
    torch.manual_seed(0)
    sizes = GPT2Config(
        vocab_size=vocabulary, n_embd=options.width, n_layer=options.layers, n_head=4
    )
    policy, reference = GPT2LMHeadModel(sizes), GPT2LMHeadModel(sizes).requires_grad_(False)
    tokenizer = word_tokenizer(100)
    device = torch.device("cpu")
    learner: PPOLearner | GroupLearner
    if algorithm == "ppo":
        learner = PPOLearner(
            PolicyWithValueHead(policy), PolicyWithValueHead(reference), tokenizer, config, device
        )
    else:
        learner = GroupLearner(
            WindowPolicy(policy), WindowPolicy(reference), tokenizer, config, device
        )
    queries = list(torch.randint(vocabulary, (rows, PROMPT)))
    responses = list(torch.randint(vocabulary, (rows, response)))
    for length in (2, response):
        answers = [ids[:length] for ids in responses]
        rollout = Rollout([""] * rows, [""] * rows, queries, answers)
        before = resident("VmRSS")
        reset_peak()
        start = time.process_time()
        learner.update([rollout], [torch.randn(rows)], np.random.default_rng(0))
        seconds = time.process_time() - start
        peak = resident("VmHWM") - before
    return {"seconds": seconds, "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[50257, 151936])
    parser.add_argument("--algorithms", nargs="+", default=["ppo"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4, help="of a batch, and of a mini-batch")
    parser.add_argument("--response", type=int, default=256, help="tokens")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        vocabulary, algorithm, way = options.measure
        print(json.dumps(measure(options, int(vocabulary), algorithm, way)))
        return

    rows = []
    for algorithm in options.algorithms:
        for vocabulary in options.vocabularies:
            for way in options.ways:
                command = [sys.executable, __file__, *sys.argv[1:]]
                command += ["--measure", str(vocabulary), algorithm, way]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode != 0:
                    raise SystemExit(
                        f"{WAYS[way]}, {vocabulary}: exit status {done.returncode}\n{done.stderr}"
                    )
                numbers = json.loads(done.stdout.splitlines()[-1])
                cells = [f"{numbers['peak']:.0f}", f"{numbers['seconds']:.1f}"]
                rows.append([algorithm.upper(), f"{vocabulary:,}", WAYS[way], *cells])
    sizes = f"width {options.width}, {options.layers} layers, {options.rows} responses of {options.response} tokens"
    print(f"{hardware()}\n\n{sizes}, {options.epochs} epochs\n")
    print(
        table(rows, ["learner", "vocabulary", "output layer", "peak, MiB", "seconds of an update"])
    )


if __name__ == "__main__":
    main()
