"""Times GRPO at GSM8K's sizes in cory, which encodes a group's shared prompt once, and in TRL 1.x.

    python benchmarks/trl_grpo.py --trl-python ENV/bin/python --group 4 --out results/speed

ENV is an environment with TRL 1.x, made for instance by `pip install torch==2.13.0 trl==1.16.0`.
The shapes `gsm8k_grpo_*` of benchmarks/shapes.py have one agent, as TRL trains a single model. The
implementations, called ways, are:

* ours: `CoryTrainer`.
* ours_plain: ours, but training encodes the prompt with each response. Sampling still encodes it once.
* trl: `trl.GRPOTrainer`.
* trl_default: trl with gradient checkpointing, TRL's default.

All ways have the same random weights, prompts in the same order, and reward model. Responses have
exactly 60 tokens. Each iteration is one optimizer step on the whole batch, with a reference model,
in float32, without dropout, and with as many threads as cores.

The ways differ as follows:

* Sampled tokens differ, as the libraries draw random numbers in their own ways.
* TRL runs its output layer in chunks, uses AdamW (no decay) instead of Adam, and keeps the C
  library's default memory settings.
* ours computes GPT-2's GELU in one kernel; TRL uses transformers' implementation.

Each way runs in its own process. The processes take turns, one iteration each, in rotating order. The
first round is a warm-up and does not count. Memory is a process's largest resident size in all rounds,
minus its size before it loads the models. At that time, the process has already imported its
libraries and run an iteration of a tiny shape.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.iteration import hardware, resident, table  # noqa: E402
from benchmarks.shapes import SHAPES, Shape, make_models  # noqa: E402
from benchmarks.ways import Bench  # noqa: E402

WAYS = ("ours", "ours_plain", "trl", "trl_default")
# A tiny shape, whose iteration loads the libraries that a way needs.
SMALL = Shape(
    layers=1,
    width=64,
    vocabulary=64,
    batch=4,
    query=(2, 2),
    observer=0,
    response=2,
    reward_layers=1,
    reward_width=64,
    agents=1,
    kl_penalty="kl",
    epochs=1,
    algorithm="grpo",
    group=2,
)
Seconds = dict[str, float]  # keys: generate, total


@dataclass
class TrlJob:
    """The settings of a training run with TRL.

    Args:
        policy, reward_model: the models' folders.
        prompts: the prompts of each iteration.
        group: the number of responses per prompt.
        response: the length of a response in tokens.
    """

    policy: str
    reward_model: str
    prompts: list[list[str]]
    group: int
    response: int
    learning_rate: float
    kl_coef: float


def same_job(bench: Bench, iterations: int) -> TrlJob:
    """Returns a TRL job with the same iterations as `bench`."""
    shape = bench.shape
    ppo = bench.config.ppo
    queries = shape.batch // shape.group
    prompts = [bench.task.batch(k, queries, 0)["prompt"] for k in range(iterations)]
    return TrlJob(
        policy=bench.policy,
        reward_model=bench.reward_model,
        prompts=prompts,
        group=shape.group,
        response=shape.response,
        learning_rate=ppo.learning_rate,
        kl_coef=ppo.init_kl_coef,
    )


def run_trl(
    job: TrlJob, checkpointing: bool, begin: Callable[[], None], end: Callable[[Seconds], None]
) -> None:
    """Runs `job` with `trl.GRPOTrainer`. Calls `begin` before each iteration and `end` after it."""
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(job.policy)
    classifier = AutoModelForSequenceClassification.from_pretrained(job.reward_model).eval()

    def positive_logit(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        pairs = zip(prompts, completions, strict=True)
        rows = tokenizer([" ".join(pair) for pair in pairs], padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = classifier(rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        return logits[:, 1].tolist()

    class Clock(TrainerCallback):
        """Times each optimizer step, which is a whole iteration."""

        started = 0.0
        generate = 0.0  # seconds of this iteration

        def on_step_begin(self, *args: Any, **options: Any) -> None:
            begin()
            self.generate = 0.0
            self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **options: Any) -> None:
            end({"generate": self.generate, "total": time.perf_counter() - self.started})

    clock = Clock()
    prompts = [{"prompt": prompt} for batch in job.prompts for prompt in batch]
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=checkpointing,
            disable_dropout=True,
            max_steps=len(job.prompts),
            shuffle_dataset=False,
            per_device_train_batch_size=len(job.prompts[0]) * job.group,
            num_generations=job.group,
            max_completion_length=job.response,
            generation_kwargs={"min_new_tokens": job.response},
            beta=job.kl_coef,
            loss_type="grpo",
            learning_rate=job.learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,  # no clipping
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
        )
        trainer = GRPOTrainer(
            model=job.policy,
            reward_funcs=positive_logit,
            args=settings,
            train_dataset=Dataset.from_list(prompts),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        generate = trainer.model.generate

        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            ids = generate(*args, **options)
            clock.generate += time.perf_counter() - started
            return ids

        trainer.model.generate = timed
        trainer.train()


def run_bench(
    bench: Bench,
    way: str,
    iterations: int,
    begin: Callable[[], None],
    end: Callable[[Seconds], None],
) -> None:
    """Runs `ours` or `ours_plain`. Calls `begin` before each iteration and `end` after it."""
    if way == "ours_plain":
        import cory.learners.learner

        cory.learners.learner.share_prompts = lambda model, batch: None
    iteration = bench.ours()
    for k in range(iterations):
        begin()
        started = time.perf_counter()
        phases = iteration(k)
        end({"generate": phases["generate"], "total": time.perf_counter() - started})


def warm_up(way: str) -> None:
    """Runs one iteration of a tiny shape."""

    def nothing(*_: Any) -> None: ...

    with tempfile.TemporaryDirectory() as folder:
        if way.startswith("trl"):
            policy, reward_model = make_models(SMALL, Path(folder))
            prompts = [["w1 w2", "w3 w4"]]
            job = TrlJob(policy, reward_model, prompts, SMALL.group, SMALL.response, 1e-5, 0.1)
            run_trl(job, way == "trl_default", nothing, nothing)
        else:
            bench = Bench(SMALL, Path(folder), "cpu", "fp32")
            run_bench(bench, way, 1, nothing, nothing)


def work(way: str) -> None:
    """Runs one way as a worker process, which talks to the benchmark by lines of JSON.

    It reads its shape and job, then a line per turn, and answers each turn with the iteration's seconds. The last
    answer has the process's memory and the versions of its libraries.
    """
    shape_sizes, job_settings = json.loads(sys.stdin.readline())
    shape = Shape(**shape_sizes)
    job = TrlJob(**job_settings)

    def answer(result: dict[str, Any]) -> None:
        print(json.dumps(result), file=sys.__stdout__, flush=True)

    def begin() -> None:
        if not sys.stdin.readline():
            raise SystemExit("the benchmark has ended")

    # Output of libraries must not mix with the answers.
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        warm_up(way)
        gc.collect()
        start = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        if way.startswith("trl"):
            run_trl(job, way == "trl_default", begin, answer)
        else:
            bench = Bench(shape, Path(folder), "cpu", "fp32")
            run_bench(bench, way, len(job.prompts), begin, answer)
        memory = resident("VmHWM") - start
    names = ["torch", "transformers", *(["trl"] if way.startswith("trl") else [])]
    answer({"memory": memory, "versions": [f"{name} {version(name)}" for name in names]})


class Worker:
    """Runs a way in its own process."""

    def __init__(self, way: str, python: str, shape: Shape, job: TrlJob, log: Path) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [python, __file__, "--worker", way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(os.cpu_count())},
        )
        self.send(json.dumps([asdict(shape), asdict(job)]))

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Returns the next answer. Raises SystemExit with the process's log if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(self.log.read_text())
        return json.loads(line)


def measure(
    ways: list[str], shape: Shape, repeats: int, trl_python: str
) -> dict[str, dict[str, Any]]:
    """Returns each way's `runs` (seconds by iteration), `memory` in MiB, and the libraries' `versions`."""
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = same_job(Bench(shape, Path(folder), "cpu", "fp32"), repeats + 1)
        workers = {}
        for way in ways:
            python = trl_python if way.startswith("trl") else sys.executable
            workers[way] = Worker(way, python, shape, job, Path(folder) / f"{way}.log")
            results[way] = {"runs": []}
        for k in range(repeats + 1):
            start = k % len(ways)
            for way in ways[start:] + ways[:start]:
                workers[way].send("")
                seconds = workers[way].answer()
                if k:
                    results[way]["runs"].append(seconds)
        for way in ways:
            results[way] |= workers[way].answer()
            workers[way].process.wait()
    return results


def as_table(group: int, results: dict[str, dict[str, Any]]) -> str:
    """Formats the results as a Markdown table, with medians over the repeats."""
    totals = {way: [run["total"] for run in results[way]["runs"]] for way in results}
    base = next(iter(results))
    rows = []
    for way, result in results.items():
        total = statistics.median(totals[way])
        generate = statistics.median(run["generate"] for run in result["runs"])
        rows.append(
            [
                str(group),
                way,
                f"{generate:.2f}",
                f"{total:.2f}",
                f"{min(totals[way]):.2f} to {max(totals[way]):.2f}",
                f"{total / statistics.median(totals[base]):.2f}",
                f"{result['memory']:.0f}",
                f"{result['memory'] / results[base]['memory']:.2f}",
            ]
        )
    return table(
        rows,
        ["G", "way", "generate s", "total s", "range s", f"time / {base}", "memory MiB",
         f"memory / {base}"],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--group", type=int, choices=(2, 4, 8), default=4)
    parser.add_argument("--trl-python", help="interpreter of the environment that has TRL 1.x")
    parser.add_argument(
        "--ways", default=",".join(WAYS), help="ways to measure, separated by commas"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for trl_grpo_G.json")
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    ways = options.ways.split(",")
    if options.trl_python is None and any(way.startswith("trl") for way in ways):
        parser.error("--trl-python: expected an interpreter that has TRL 1.x, got none")

    shape = SHAPES[f"gsm8k_grpo_{options.group}"]
    results = measure(ways, shape, options.repeats, options.trl_python)
    versions = dict.fromkeys(", ".join(result["versions"]) for result in results.values())
    text = as_table(options.group, results)
    print(f"{hardware()}; {'; '.join(versions)}; n = {options.repeats}\n\n{text}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = f"trl_grpo_{options.group}"
        numbers = {"shape": asdict(shape), "hardware": hardware(), "ways": results}
        (options.out / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
