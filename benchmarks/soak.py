"""A long run at a minimal size, to check that memory and open files stay flat and metrics.jsonl stays valid.

    python benchmarks/soak.py                          # 10,000 iterations, or as many as 20 minutes allow
    python benchmarks/soak.py --iterations 2000 --out results/soak

The toy setting of IMDB with a batch of 4 and responses of 4 tokens, checkpoints every 100 iterations.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def slope(x: list[float], y: list[float]) -> float:
    """Of the least-squares line through the points."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )


def resident() -> float:
    """MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--out", type=Path, help="folder for soak.md and soak.json")
    options = parser.parse_args()

    from cory.agents import make_agents
    from cory.callbacks import Callback
    from cory.cli.load import load
    from cory.trainer import CoryTrainer
    from imdb_train.config import ImdbConfig
    from imdb_train.task import make_task

    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "iterations": options.iterations, "output": f"{folder}/run", "device": "cpu", "sample_every": 100,
            "ppo.batch_size": 4, "ppo.mini_batch_size": 4, "ppo.ppo_epochs": 1, "ppo.learning_rate": 1e-6,
            "sampling.min_new_tokens": 4, "sampling.max_new_tokens": 4, "checkpoint.save_every": 100,
        }  # fmt: skip
        argv = [f"--{key}={value}" for key, value in flags.items()]
        config = load(ImdbConfig, ROOT / "configs/imdb/tiny.yaml", argv)
        agents = make_agents(config)
        seen: list[tuple[int, float, int]] = []
        started = time.monotonic()

        class Watch(Callback):
            def on_iteration_begin(self, trainer: CoryTrainer, k: int) -> None:
                if k % 50 == 0:
                    seen.append((k, resident(), len(os.listdir("/proc/self/fd"))))
                if time.monotonic() - started > 60 * options.minutes:
                    trainer.should_stop = True

        task = make_task(config)
        CoryTrainer(config, agents, task, callbacks=[Watch()]).train()
        lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        expected = [(k, agent.name) for k in range(len(records) // 2) for agent in agents]
        valid = [(record["iteration"], record["agent"]) for record in records] == expected

    steady = seen[len(seen) // 10 :]  # allocators settle first
    per_1000 = 1000 * slope([k for k, *_ in steady], [memory for _, memory, _ in steady])
    numbers = {
        "iterations": len(records) // 2,
        "minutes": round((time.monotonic() - started) / 60, 1),
        "resident MiB, first tenth left out": [round(steady[0][1], 1), round(steady[-1][1], 1)],
        "MiB per 1,000 iterations": round(per_1000, 2),
        "open files": sorted({files for *_, files in steady}),
        "metrics.jsonl valid": valid,
    }
    text = "\n".join(
        ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in numbers.items())]
    )
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "soak.md").write_text(text + "\n")
        (options.out / "soak.json").write_text(json.dumps({**numbers, "seen": seen}) + "\n")


if __name__ == "__main__":
    main()
