"""Two agents' group learning side by side: `CoryTrainer` with GRPO, and MAGRPO of CoMLRL.

    python benchmarks/comlrl.py --comlrl-python ENV/bin/python --shape imdb_tiny --out results/speed
    python benchmarks/comlrl.py --comlrl-python ENV/bin/python --shape gpt2_small --out results/speed

ENV is an environment with CoMLRL, made for instance by `pip install torch==2.13.0 comlrl==1.4.3`. Both libraries start
from the same model folder and take the same queries in the same order. Per iteration, each of the two agents samples
`group` responses of exactly `tokens` tokens to each query (the model has no end token) and takes one AdamW step on all
of them, at the same learning rate. Advantages are normalised within the group, dropout is off, nothing changes the
sampling distribution. A response's reward is its length in characters, over 100; both agents train on their sum.

Differences: CORY's observer reads the pioneer's response, and every CORY iteration measures the KL to the base model.
MAGRPO's agents answer the bare query, and its KL is off, as by default. Its trainer has no setting for several queries
or responses in one pass: it samples query by query and trains on one response at a time. `comlrl_mp` runs the two
agents in parallel (`parallel_training="mp"`), each on one thread; `_1` stands for one thread in all.

Every measurement is a process of its own, in turn. A process's seconds per iteration are the median over all iterations
but the first; the table has medians over processes. Memory is the process's peak resident size, libraries included.
Rewards are of both agents together, in the first iteration and over the last fifth of them, means over processes.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

WAYS = ("cory", "cory_1", "comlrl", "comlrl_1", "comlrl_mp")


@dataclass
class Job:
    """What a worker runs. `queries`: those of each iteration; `observer`: the template of the observer's prompt."""

    model: str
    queries: list[list[str]]
    observer: str
    group: int
    tokens: int
    learning_rate: float
    seed: int


@dataclass
class Size:
    """Queries per iteration, responses per query and agent, tokens per response."""

    queries: int
    group: int
    tokens: int
    learning_rate: float
    iterations: int


SIZES = {
    "imdb_tiny": Size(queries=32, group=4, tokens=16, learning_rate=1e-3, iterations=12),
    "gpt2_small": Size(queries=8, group=4, tokens=16, learning_rate=1e-5, iterations=3),
}


def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Length in characters, over 100.

    >>> reward([""], ["four"])
    [0.04]
    """
    return [len(completion) / 100 for completion in completions]


def peak_memory() -> float:
    """Peak resident MiB of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def run_comlrl(job: Job, parallel: bool) -> dict[str, Any]:
    """`job` with MAGRPO."""
    import torch
    import transformers
    from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer

    transformers.logging.set_verbosity_error()
    torch.manual_seed(job.seed)
    if parallel:
        torch.set_num_threads(1)
    started: list[float] = []
    rewards: list[float] = []

    class Queries(torch.utils.data.Dataset):
        """Those of the iteration, which is an epoch here."""

        def __len__(self) -> int:
            return len(job.queries[0])

        def __getitem__(self, row: int) -> dict[str, str]:
            if row == 0:
                started.append(time.perf_counter())
            return {"prompt": job.queries[len(started) - 1][row]}

    def team_reward(first: list[str], second: list[str]) -> list[float]:
        pairs = zip(reward([], first), reward([], second), strict=True)
        totals = [sum(pair) for pair in pairs]
        rewards.extend(totals)
        return totals

    size = len(job.queries[0])
    settings = MAGRPOConfig(
        num_train_epochs=len(job.queries),
        agent_learning_rate=job.learning_rate,
        num_agents=2,
        parallel_training="mp" if parallel else "none",
        # Two names of one device make two workers.
        agent_devices=["cpu", "cpu:0"] if parallel else ["cpu"],
        num_generations=job.group,
        max_new_tokens=job.tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        num_turns=1,
        eval_interval=0,
        rollout_buffer_size=size,
        train_batch_size=size,
    )
    trainer = MAGRPOTrainer(
        agent_model=job.model,
        num_agents=2,
        model_config={"dtype": "float32"},
        train_dataset=Queries(),
        reward_func=team_reward,
        args=settings,
    )
    trainer.verbose = False
    trainer.train(min_new_tokens=job.tokens)
    ends = [*started[1:], time.perf_counter()]
    count = size * job.group
    return {
        "seconds": [end - start for start, end in zip(started, ends, strict=True)],
        "rewards": [
            statistics.fmean(rewards[k * count : (k + 1) * count]) for k in range(len(started))
        ],
        "memory": peak_memory(),
        "versions": versions("comlrl", "torch", "transformers"),
    }


def versions(*packages: str) -> str:
    """Names and versions of installed packages."""
    from importlib.metadata import version

    return ", ".join(f"{name} {version(name)}" for name in packages)


def run_cory(job: Job) -> dict[str, Any]:
    """`job` with `CoryTrainer`."""
    from cory import Config, CoryTrainer, RolePrompts, Task, make_agents

    class InOrder(Task):
        """A task whose batches are the job's."""

        def batch(self, k: int, size: int, seed: int) -> dict[str, list[Any]]:
            return {"prompt": job.queries[k]}

    config = Config(seed=job.seed, iterations=len(job.queries), device="cpu", sample_every=0)
    config.algorithm, config.group_size = "grpo", job.group
    config.model.name = job.model
    config.ppo.batch_size = config.ppo.mini_batch_size = len(job.queries[0]) * job.group
    config.ppo.learning_rate, config.ppo.optimizer, config.ppo.ppo_epochs = (
        job.learning_rate,
        "AdamW",
        1,
    )
    config.ppo.init_kl_coef, config.ppo.adaptive_kl, config.ppo.kl_penalty = 0.0, False, "kl"
    config.sampling.min_new_tokens = config.sampling.max_new_tokens = job.tokens
    config.checkpoint.save_every = 0
    prompts = [query for queries in job.queries for query in queries]
    task = InOrder.from_prompts(prompts, reward, RolePrompts(observer=job.observer))
    with tempfile.TemporaryDirectory() as folder:
        config.output = f"{folder}/run"
        CoryTrainer(config, make_agents(config), task).train()
        timings, metrics = (
            [json.loads(line) for line in Path(config.output, name).read_text().splitlines()]
            for name in ("timings.jsonl", "metrics.jsonl")
        )
    rewards = [0.0] * len(job.queries)
    for record in metrics:
        rewards[record["iteration"]] += record["task_reward"]
    return {
        "seconds": [record["seconds_total"] for record in timings],
        "rewards": rewards,
        "memory": peak_memory(),
        "versions": versions("cory", "torch", "transformers"),
    }


def make_model(shape: str, folder: Path) -> str:
    """A copy of the toy policy, or a random GPT-2 of the shape, without dropout and end token; returns its folder."""
    if shape == "imdb_tiny":
        model = Path(shutil.copytree(ROOT / "imdb_train" / "weights" / "policy", folder / "policy"))
    else:
        from benchmarks.shapes import SHAPES, make_models

        model = Path(make_models(SHAPES[shape], folder)[0])
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((model / name).read_text()) | {"eos_token_id": None}
        if name == "config.json":
            settings |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        (model / name).write_text(json.dumps(settings))
    return str(model)


def make_queries(shape: str, model: str, count: int) -> tuple[list[str], str]:
    """`count` queries of the shape, and the template of the observer's prompt."""
    if shape == "imdb_tiny":
        from cory.models.load import load_tokenizer
        from imdb_train.config import ImdbTaskConfig
        from imdb_train.task import queries

        settings = ImdbTaskConfig(dataset="tiny", min_chars=0)
        return queries(settings, "train", load_tokenizer(model, {}), 0)["prompt"][
            :count
        ], settings.observer_prompt
    import numpy as np

    from benchmarks.shapes import SHAPES

    rng, sizes = np.random.default_rng(0), SHAPES[shape]
    low, high = sizes.query
    words = (rng.integers(0, sizes.vocabulary - 2, n) for n in rng.integers(low, high + 1, count))
    extra = " ".join(["w1"] * sizes.observer)
    return [" ".join(f"w{i}" for i in one) for one in words], f"{extra} {{prompt}} {{response}}"


def measure(python: str, way: str, job: Job) -> dict[str, Any]:
    """A worker's result, from a process of its own."""
    threads = 1 if way.endswith(("_1", "_mp")) else os.cpu_count()
    command = [python, __file__, "--worker", way]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        command, input=json.dumps(asdict(job)), capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def table(runs: dict[str, list[dict[str, Any]]], size: Size) -> str:
    """Markdown: medians over each way's runs."""
    tokens = 2 * size.queries * size.group * size.tokens
    middle, last_few = statistics.median, -(-size.iterations // 5)
    seconds = {
        way: middle(middle(run["seconds"][1:]) for run in made) for way, made in runs.items()
    }
    base = seconds.get("cory", next(iter(seconds.values())))
    lines = [
        "| way | s per iteration | response tokens/s | time / cory | peak MiB | reward, first | reward, last |"
    ]
    lines.append("| --- " * 7 + "|")
    for way, made in runs.items():
        numbers = f"{seconds[way]:.2f} | {tokens / seconds[way]:.0f} | {seconds[way] / base:.1f}"
        memory, first, last = (
            middle(run["memory"] for run in made),
            statistics.fmean(run["rewards"][0] for run in made),
            statistics.fmean(statistics.fmean(run["rewards"][-last_few:]) for run in made),
        )
        lines.append(f"| {way} | {numbers} | {memory:.0f} | {first:.2f} | {last:.2f} |")
    return "\n".join(lines)


def processor() -> str:
    """The processor's name."""
    cpu = Path("/proc/cpuinfo")
    names = (
        [x.split(":")[1].strip() for x in cpu.read_text().splitlines() if "model name" in x]
        if cpu.exists()
        else []
    )
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SIZES, default="imdb_tiny")
    parser.add_argument("--comlrl-python", help="interpreter of the environment that has CoMLRL")
    parser.add_argument("--ways", default=",".join(WAYS), help="which, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--queries", type=int, help="per iteration")
    parser.add_argument("--iterations", type=int, help="of a process")
    parser.add_argument("--out", type=Path, help="folder for comlrl_SHAPE.md and comlrl_SHAPE.json")
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        job = Job(**json.load(sys.stdin))
        run = (
            run_comlrl(job, options.worker == "comlrl_mp")
            if "comlrl" in options.worker
            else run_cory(job)
        )
        print(json.dumps(run))
        return
    names, size = options.ways.split(","), SIZES[options.shape]
    size.queries, size.iterations = (
        options.queries or size.queries,
        options.iterations or size.iterations,
    )
    if options.comlrl_python is None and any("comlrl" in name for name in names):
        parser.error("--comlrl-python: expected an interpreter that has CoMLRL, got none")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(options.shape, Path(folder))
        queries, observer = make_queries(options.shape, model, size.queries * size.iterations)
        batches = [
            queries[start : start + size.queries] for start in range(0, len(queries), size.queries)
        ]
        for seed in range(options.repeats):
            job = Job(model, batches, observer, size.group, size.tokens, size.learning_rate, seed)
            for name in names[seed % len(names) :] + names[: seed % len(names)]:
                python = options.comlrl_python if "comlrl" in name else sys.executable
                runs[name].append(measure(python, name, job))
    libraries = "; ".join(dict.fromkeys(made[0]["versions"] for made in runs.values()))
    shown = f"{size.queries} queries, {size.group} responses of {size.tokens} tokens to each from each of two agents"
    hardware = f"{processor()}, {os.cpu_count()} cores"
    text = f"{options.shape}: {shown}, {size.iterations} iterations; {libraries}; {hardware}\n\n{table(runs, size)}"
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"comlrl_{options.shape}.md").write_text(text + "\n")
        (options.out / f"comlrl_{options.shape}.json").write_text(
            json.dumps({**asdict(size), "runs": runs}) + "\n"
        )


if __name__ == "__main__":
    main()
