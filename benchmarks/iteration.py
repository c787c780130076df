"""One CORY iteration, timed side by side: ours, two stock TRL trainers, and the arithmetic that nobody can avoid.

    python benchmarks/iteration.py --shape gpt2_small                # all shapes: benchmarks/shapes.py
    python benchmarks/iteration.py --shape gpt2_small --what update  # one agent's PPO update on the observer's prompts
    python benchmarks/iteration.py --shape small_pair --what memory  # two agents' peak against what cannot be avoided
    python benchmarks/iteration.py --shape small_pair --what scaling # over batch, lengths, width and number of agents

ours: `CoryTrainer`. stock: trl.PPOTrainer 0.11.4 for each agent, with the same settings, its own `generate` in batches
of 4 (its default) or all at once, roles exchanged by pointer. floor: plain torch and transformers, one `generate` per
agent, one pass of the reward model, one of the reference, and forward and backward passes over exactly the response
window with a fused Adam step each: no KL, no advantages, no statistics, no text.

All ways run in turn in one process, and the order of turns rotates; the table has medians.
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
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.shapes import SHAPES, Shape, make_config, make_models, make_task  # noqa: E402

PHASES = ("generate", "reward", "learn")
Seconds = dict[str, float]


class Clock:
    """Seconds by phase, the device's queue included."""

    def __init__(self) -> None:
        self.seconds: Seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        import torch

        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] += time.perf_counter() - started


class Bench:
    """The models and the data of a shape, from which each way makes what it needs.

    A way is a function of the iteration that returns its seconds by phase.
    """

    def __init__(self, shape: Shape, folder: Path, device: str, precision: str) -> None:
        from cory.models import choose_device

        self.shape, self.precision = shape, precision
        self.device = choose_device(device)
        self.policy, self.reward_model = make_models(shape, folder)
        self.config = make_config(shape, self.policy, device, precision)
        self.task = make_task(shape, self.reward_model, self.device)

    def load(self) -> tuple[Any, Any]:
        from cory.models import load_policy

        policy, tokenizer = load_policy(self.config.model)
        return policy.to(self.device), tokenizer

    def ours(self) -> Callable[[int], Seconds]:
        """`CoryTrainer`."""
        from cory.models import make_agents
        from cory.trainer import CoryTrainer

        agents = make_agents(self.config, self.shape.agents)
        trainer = CoryTrainer(self.config, agents, self.task)

        def iteration(k: int) -> Seconds:
            trainer.seconds = {}
            trainer.iteration(k)
            return {phase: trainer.seconds[phase] for phase in PHASES}

        iteration.agents, iteration.trainer = agents, trainer  # type: ignore[attr-defined]
        return iteration

    def stock(self, generate_batch: int) -> Callable[[int], Seconds]:
        """A stock trl.PPOTrainer for each agent, in the authors' loop."""
        import torch
        import trl
        from transformers import AutoModelForCausalLM

        from cory.trl_parts import trl_config

        def with_value_head(model: Any) -> Any:
            wrapped = trl.AutoModelForCausalLMWithValueHead(model)
            wrapped.is_peft_model = False
            return wrapped.to(self.device)

        def load() -> Any:
            return AutoModelForCausalLM.from_pretrained(self.policy)  # as a user of TRL loads it

        reference, tokenizer = with_value_head(load()).requires_grad_(False), self.load()[1]
        trainers = []
        for _ in range(self.shape.agents):
            model = load()
            settings = trl_config(self.config.ppo, 0)
            if self.precision == "bf16":
                settings.accelerator_kwargs = {"mixed_precision": "bf16"}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainers.append(
                    trl.PPOTrainer(
                        config=settings, model=with_value_head(model), ref_model=reference, tokenizer=tokenizer
                    )
                )
        options = {
            "min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True, "max_new_tokens": self.shape.response,
            "pad_token_id": self.shape.vocabulary - 1,
        }  # fmt: skip

        def iteration(k: int) -> Seconds:
            clock, shape = Clock(), self.shape
            queries = self.task.batch(k, shape.batch, 0)["prompt"]
            texts: list[list[str]] = []
            rollouts = []
            for role, trainer in enumerate(trainers):
                prompts = [
                    self.task.prompts.render(role, {"prompt": query}, texts[-1][row] if role else None)
                    for row, query in enumerate(queries)
                ]
                with clock("generate"):
                    ids = [torch.tensor(tokenizer(p)["input_ids"], device=self.device) for p in prompts]
                    out = trainer.generate(ids, batch_size=generate_batch, return_prompt=False, **options)
                    texts.append([tokenizer.decode(row, skip_special_tokens=True) for row in out])
                rollouts.append((ids, out))
            with clock("reward"):
                rewards = [self.task.reward(queries, text) for text in texts]
                total = [torch.tensor(sum(row)) for row in zip(*rewards, strict=True)]
            for trainer, (ids, out) in zip(trainers, rollouts, strict=True):
                with clock("learn"):
                    trainer.step(ids, list(out), total)
            return clock.seconds

        iteration.trainers = trainers  # type: ignore[attr-defined]
        return iteration

    def floor(self) -> Callable[[int], Seconds]:
        """The arithmetic alone: see the module."""
        import torch
        import torch.nn.functional as F
        from transformers import AutoModelForSequenceClassification, GenerationConfig

        from cory import window

        shape = self.shape
        reference = self.load()[0].eval().requires_grad_(False)
        reward = AutoModelForSequenceClassification.from_pretrained(self.reward_model).to(self.device).eval()
        agents = []
        for _ in range(shape.agents):
            model = self.load()[0].eval()
            agents.append((model, torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)))
        settings = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=shape.response, pad_token_id=shape.vocabulary - 1
        )
        tokenizer = self.load()[1]

        def autocast() -> Any:
            return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

        def iteration(k: int) -> Seconds:
            clock = Clock()
            queries = tokenizer(self.task.batch(k, shape.batch, 0)["prompt"])["input_ids"]
            originals = prompts = [torch.tensor(ids, device=self.device) for ids in queries]
            extra = torch.ones(shape.observer, dtype=torch.long, device=self.device)
            rollouts: list[tuple[list[Any], list[Any]]] = []
            for role, (model, _) in enumerate(agents):
                if role:
                    answered = zip(originals, rollouts[-1][1], strict=True)
                    prompts = [torch.cat([extra, query, response]) for query, response in answered]
                with clock("generate"), torch.no_grad(), autocast():
                    ids, mask = window.pad(prompts, 0, "left")
                    out = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
                    out = out[:, ids.shape[1] :]
                rollouts.append((prompts, list(out)))
            with clock("reward"), torch.no_grad():
                ids, mask = window.pad(
                    [torch.cat(pair) for _, rows in rollouts for pair in zip(originals, rows, strict=True)], 0, "right"
                )
                reward(input_ids=ids, attention_mask=mask)
            for (model, optimizer), (asked, answered) in zip(agents, rollouts, strict=True):
                with clock("learn"):
                    floor_update(model, optimizer, reference, asked, answered, shape.epochs, autocast)
            return clock.seconds

        def floor_update(model, optimizer, reference, asked, answered, epochs, autocast) -> None:  # type: ignore[no-untyped-def]
            batch = window.pack(asked, answered, 0)
            width = batch.response_ids.shape[1]
            with torch.no_grad(), autocast():
                window.forward(reference, *batch[:3], width)
            for _ in range(epochs):
                with autocast():
                    logits, _ = window.forward(model, *batch[:3], width)
                loss = F.cross_entropy(logits.float().flatten(0, 1), batch.response_ids.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        iteration.agents = agents  # type: ignore[attr-defined]
        iteration.update = lambda asked, answered: floor_update(  # type: ignore[attr-defined]
            *agents[-1], reference, asked, answered, shape.epochs, autocast
        )
        return iteration

    def way(self, name: str) -> Callable[[int], Seconds]:
        """By name: ours, floor, stock (batches of 4) or stock_all."""
        if name.startswith("stock"):
            return self.stock(4 if name == "stock" else self.shape.batch)
        return {"ours": self.ours, "floor": self.floor}[name]()

    def update(self, name: str) -> Callable[[int], Seconds]:
        """One PPO update of one agent, on prompts of the observer's lengths and random responses."""
        import numpy as np
        import torch

        shape, rng = self.shape, np.random.default_rng(0)
        context = shape.observer + shape.response
        lengths = rng.integers(shape.query[0] + context, shape.query[1] + context + 1, shape.batch)
        asked, answered = (
            [torch.tensor(rng.integers(0, shape.vocabulary - 2, n), device=self.device) for n in sizes]
            for sizes in (lengths, [shape.response] * shape.batch)
        )
        scores = torch.randn(shape.batch)
        way = self.way(name)
        if name == "floor":
            step = way.update  # type: ignore[attr-defined]
        elif name == "ours":
            step = partial_step(way.agents[-1].ppo, scores)  # type: ignore[attr-defined]
        else:
            step = partial_step(way.trainers[-1], list(scores))  # type: ignore[attr-defined]

        def iteration(k: int) -> Seconds:
            clock = Clock()
            with clock("learn"):
                step(asked, answered)
            return clock.seconds

        return iteration


def partial_step(trainer: Any, scores: Any) -> Callable[[Any, Any], Any]:
    return lambda asked, answered: trainer.step(asked, answered, scores)


def interleaved(ways: dict[str, Callable[[int], Seconds]], repeats: int) -> dict[str, list[Seconds]]:
    """Every way in turn, after one round that does not count; each round starts with another way."""
    names = list(ways)
    seconds: dict[str, list[Seconds]] = {name: [] for name in names}
    for k in range(repeats + 1):
        for name in names[k % len(names) :] + names[: k % len(names)]:
            measured = ways[name](k)
            if k:
                seconds[name].append(measured)
    return seconds


def peak_memory(bench: Bench, name: str, what: str) -> dict[str, float]:
    """MiB of one iteration (or update) after a first: in all over what the process took before any model, and on top.

    To be called in a process of its own. On the CPU: resident memory; on a GPU: what torch allocated.
    """
    import torch

    gpu = bench.device.type == "cuda"
    gc.collect()
    start = 0.0 if gpu else resident("VmRSS")
    way = bench.update(name) if what == "update" else bench.way(name)
    way(0)
    if what == "point":
        seconds = statistics.median(sum(way(k).values()) for k in range(1, 4))
        weights = sum(p.nbytes for p in way.agents[0].ppo.model.parameters()) / 2**20  # type: ignore[attr-defined]
        result = {"seconds": seconds, "weights": weights}
    else:
        result = {}
    gc.collect()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
    else:
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
    way(4)
    peak = torch.cuda.max_memory_allocated() / 2**20 if gpu else resident("VmHWM")
    return {"peak": peak - start, "extra": peak - before, **result}


def resident(field: str) -> float:
    """MiB of this process: VmRSS now, VmHWM at most since the last reset. Freed memory is given back first."""
    import ctypes

    ctypes.CDLL("libc.so.6").malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {field}")


def unavoidable_memory(bench: Bench) -> dict[str, float]:
    """MiB that two (or more) fully fine-tuned agents with a shared reference cannot do without."""
    import torch

    from cory import window
    from cory.trl_parts import PolicyWithValueHead

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
        logits, values = model.to(bench.device).eval()(*batch[:4])
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


def measured_apart(options: argparse.Namespace, shape: Shape, name: str, what: str) -> dict[str, float]:
    """`peak_memory` in a process of its own."""
    command = [sys.executable, __file__, "--way", name, "--what", what, "--device", options.device]
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


SCALES = {
    "batch": [16, 32, 64, 128],
    "response": [8, 16, 32, 64],
    "observer": [14, 32, 64, 128],
    "width": [128, 256, 512, 768],
    "agents": [1, 2, 3, 4],
}
SCALE_TITLES = {
    "batch": "queries per iteration",
    "response": "tokens per response",
    "observer": "tokens that the observer's prompt adds",
    "width": "model width",
    "agents": "agents",
}


def scaling(options: argparse.Namespace, shape: Shape) -> tuple[str, dict[str, Any]]:
    """Seconds and memory of our iteration as one size changes, each in a process of its own."""
    points: dict[str, list[dict[str, float]]] = {}
    rows = []
    for key, values in SCALES.items():
        points[key] = []
        for value in values:
            measured = measured_apart(options, replace(shape, **{key: value}), "ours", "point")
            points[key].append({"value": value, **measured})
            cells = [f"{measured['seconds']:.2f}", f"{measured['peak']:.0f}"]
            rows.append([SCALE_TITLES[key], str(value), *cells])
    agents = points["agents"]
    each = (agents[-1]["peak"] - agents[0]["peak"]) / (agents[-1]["value"] - agents[0]["value"])
    owned = 3 * agents[0]["weights"]
    text = table(rows, ["over", "", "s per iteration", "peak MiB"])
    text += (
        f"\n\nAn agent more: {each:.0f} MiB. Its weights and Adam's two moments are {owned:.0f} MiB of them; "
        f"{each - owned:.0f} MiB are beyond."
    )
    return text, {"points": points, "shape": asdict(shape), "hardware": hardware()}


def plot_scaling(points: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Seconds and memory against each size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(points), figsize=(3 * len(points), 5), layout="constrained", sharey="row")
    for column, (key, rows) in enumerate(points.items()):
        x = [row["value"] for row in rows]
        for axis, name, colour in zip(axes[:, column], ("seconds", "peak"), ("#c1440e", "#1f6fb4"), strict=True):
            axis.plot(x, [row[name] for row in rows], "o-", color=colour)
            axis.set(xlabel=SCALE_TITLES[key], xlim=(0, None), ylim=(0, None), xticks=x)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("seconds per iteration")
    axes[1, 0].set_ylabel("peak memory, MiB")
    figure.savefig(path, dpi=120)


def exchange_seconds(trainer: Any, repeats: int = 1000) -> float:
    """What an exchange of roles takes: the chain of agents in its next order."""
    started = time.perf_counter()
    for k in range(repeats):
        [trainer.agents[index] for index in trainer.schedule.order(k * trainer.config.cory.exchange_period)]
    return (time.perf_counter() - started) / repeats


def table(rows: list[list[str]], header: list[str]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def hardware() -> str:
    """The processor and torch, in words."""
    import torch

    name = platform.processor() or platform.machine()
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        name = next((x.split(":")[1].strip() for x in cpu.read_text().splitlines() if "model name" in x), name)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return f"{gpu or name}, {torch.get_num_threads()} CPU threads, torch {torch.__version__}"


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
    result: dict[str, Any] = {"seconds": {name: medians(run) for name, run in runs.items()}, "runs": runs}
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
            + [f"{seconds['total'] / result['seconds']['ours']['total']:.2f}" if "ours" in names else ""]
            + [f"{seconds['total'] / result['seconds']['floor']['total']:.2f}" if "floor" in names else ""]
            + [f"{memory[name]['extra'] / memory['stock_all' if 'stock_all' in names else names[-1]]['extra']:.2f}"]
        )
    text = table(rows, ["way", *(f"{phase} s" for phase in (*PHASES, "total")), "response tokens/s", "peak MiB",
                        "extra MiB", "time / ours", "time / floor", "extra / stock"])  # fmt: skip
    if "exchange_seconds" in result:
        text += f"\n\nRole exchange: {result['exchange_seconds'] * 1e6:.1f} microseconds."
    return text, {"shape": asdict(shape), "hardware": hardware(), **result, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small_pair")
    parser.add_argument("--what", choices=["iteration", "update", "memory", "scaling", "point"], default="iteration")
    parser.add_argument("--ways", default="ours,floor,stock,stock_all", help="which, separated by commas")
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
            else:
                print(json.dumps(peak_memory(bench, options.way, options.what)))
        return
    if options.what == "memory":
        sums = measured_apart(options, shape, "unavoidable", "iteration")
        peak = measured_apart(options, shape, "ours", "iteration")["peak"]
        text = table(
            [[f"{value:.0f}" for value in (*sums.values(), peak)] + [f"{peak / sums['sum']:.2f}"]],
            [*(f"{key} MiB" for key in sums), "measured peak MiB", "measured / sum"],
        )
        numbers: dict[str, Any] = {"unavoidable": sums, "peak": peak, "shape": asdict(shape)}
    elif options.what == "scaling":
        text, numbers = scaling(options, shape)
    else:
        text, numbers = report(options, shape)
    print(f"{options.what}, {options.shape}, {options.precision}, {hardware()}\n\n{text}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = f"{options.what}_{options.shape}_{options.precision}"
        (options.out / f"{name}.md").write_text(text + "\n")
        if options.what == "scaling":
            plot_scaling(numbers["points"], options.out / f"{name}.png")
        (options.out / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
