"""Runs on the simulated accelerator and on the CPU, started by test_simulated.py: `simulated_run.py FOLDER`.

Prints a JSON object: of each scenario, its result on both devices and what was counted on `sim`, or
its traceback. The device stays registered in a process, so tests run it in one of its own.
"""

import json
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE), str(HERE.parent / "run")]

import simulated  # noqa: E402
import torch  # noqa: E402
from accelerate import PartialState  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from conftest import make_config, make_gpt2, save_blank, sentences  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from test_resume import make_trainer  # noqa: E402

from benchmarks import gpu  # noqa: E402
from cory import evaluate  # noqa: E402
from cory.agents import make_agents  # noqa: E402
from cory.callbacks.metrics import measure  # noqa: E402
from cory.config import CheckpointConfig, Config, CoryConfig, LoraConfig  # noqa: E402
from cory.evaluation.settings import EvaluationConfig  # noqa: E402
from cory.trainer import CoryTrainer  # noqa: E402
from imdb_train.config import ImdbConfig  # noqa: E402
from imdb_train.task import make_task  # noqa: E402
from study.small_models import train_tokenizer  # noqa: E402

MEASURED = ("task_reward", "kl", "entropy", "policy_loss", "gradient_norm", "eval_task_reward")


def metrics(folder: Path) -> list[dict[str, float]]:
    """The records of a run, of what is measured."""
    return measured(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))


def measured(records: Iterable[dict[str, Any]]) -> list[dict[str, float]]:
    return [
        {key: record[key] for key in MEASURED if record.get(key) is not None} for record in records
    ]


def trains(**changes: Any) -> Callable[[Config], list[dict[str, float]]]:
    """A scenario: a run with these settings changed."""

    def run(config: Config) -> list[dict[str, float]]:
        return metrics(make_trainer(replace(config, **changes)).train().folder)

    return run


def iterates(**changes: Any) -> Callable[[Config], list[dict[str, float]]]:
    """A scenario: the iterations of such a run, without what it says and saves. PPO's own settings are under `ppo`."""

    def run(config: Config) -> list[dict[str, float]]:
        others = {key: value for key, value in changes.items() if key != "ppo"}
        ppo = replace(config.ppo, **changes.get("ppo", {}))
        trainer = make_trainer(replace(config, ppo=ppo, **others))
        return measured(
            record
            for k in range(config.iterations)
            for record in measure(trainer, trainer.iteration(k))
        )

    return run


def resumes(config: Config) -> list[dict[str, float]]:
    """A run that ends after its first iteration's checkpoint, and is continued."""
    config = replace(config, checkpoint=CheckpointConfig(save_every=1))
    make_trainer(replace(config, iterations=1)).train()
    return metrics(make_trainer(replace(config, resume=config.output)).train().folder)


def on_two_devices(config: Config) -> list[dict[str, float]]:
    """Each agent on a device of its own."""
    devices = ("cpu", "cpu") if config.device == "cpu" else ("sim:0", "sim:1")
    agents = [{"device": device} for device in devices]
    return metrics(make_trainer(replace(config, agents=agents)).train().folder)


def with_reward_model(config: Config) -> list[dict[str, float]]:
    """IMDB's toy setting: a DistilBERT rates on the agents' device."""
    imdb = ImdbConfig(iterations=2, output=config.output, device=config.device)
    imdb.model.name = imdb.task.dataset = imdb.task.reward_model = "tiny"
    imdb.task.min_chars = 0
    imdb.ppo = replace(config.ppo, kl_penalty="full")
    return metrics(CoryTrainer(imdb, make_agents(imdb), make_task(imdb)).train().folder)


def is_evaluated(config: Config) -> list[dict[str, float]]:
    """A run's agents, and their KL to the base, on held-out queries."""
    trainer = make_trainer(config)
    folder = trainer.train().folder
    settings = EvaluationConfig(
        device=config.device,
        queries=8,
        base=config.model.name,
        output=config.output + "-evaluation",
    )
    rows = evaluate([folder], trainer.task, settings).rows
    return [{key: row[key] for key in ("task_reward", "kl")} for row in rows]


def is_benchmarked(config: Config) -> list[dict[str, float]]:
    """The rows of a pass in each way of benchmarks/gpu.py, at small width."""
    options = Namespace(small=True, device=config.device, precision="bf16", repeats=1)
    options.models = Path(config.output)
    options.sizes = ["Qwen2.5-0.5B"]
    ways = ("minimal", "ours")
    return [{way: gpu.measure(Namespace(**vars(options), way=way))["rows"]} for way in ways]


def has_advantages_on(device: str) -> Callable[[Config], str]:
    """A scenario with a planted mistake: a learner's advantages are on a device of their own."""

    def run(config: Config) -> str:
        trainer = make_trainer(config)
        learner = trainer.agents[0].learner
        targets = learner.targets

        def elsewhere(*args: Any) -> Any:
            result = targets(*args)
            result.advantages = result.advantages.to(device)
            return result

        learner.targets = elsewhere
        try:
            trainer.iteration(0)
        except RuntimeError as error:
            line = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in line if "/cory/" in frame.filename]
            return f"{Path(own[-1].filename).name} {own[-1].name}: {error}"
        return ""

    return run


SCENARIOS: dict[str, Callable[[Config], Any]] = {
    "ppo": trains(),
    "full KL, micro-batches, reward scaling": iterates(
        ppo={
            "kl_penalty": "full",
            "mini_batch_size": 4,
            "micro_batch": 2,
            "reward_scaling": True,
            "reward_normalization": True,
        }
    ),
    "reinforce, counterfactual credit": iterates(
        algorithm="reinforce", cory=CoryConfig(exchange_period=2, credit="counterfactual")
    ),
    "rloo, lora": iterates(algorithm="rloo", group_size=2, lora=LoraConfig(rank=4)),
    "grpo, lora": iterates(algorithm="grpo", group_size=2, lora=LoraConfig(rank=4)),
    "bf16": iterates(precision="bf16"),
    "held out": trains(eval_every=1),
    "resumed": resumes,
    "two devices": on_two_devices,
    "reward model": with_reward_model,
    "evaluation": is_evaluated,
    "benchmark": is_benchmarked,
    "advantages on the CPU": has_advantages_on("cpu"),
    "advantages on the other device": has_advantages_on("sim:1"),
}


def run(scenario: Callable[[Config], Any], config: Config, device: str) -> dict[str, Any]:
    """Its result and counts on a device, or its traceback."""
    PartialState._reset_state()
    AcceleratorState._reset_state(True)
    simulated.use(device)
    with simulated.counted() as counts:
        try:
            result = scenario(replace(config, device=device, output=f"{config.output}-{device}"))
        except Exception:
            return {"error": traceback.format_exc()}
    return {"result": result, "counts": dict(counts)}


def main() -> None:
    folder = Path(sys.argv[1])
    chosen = sys.argv[2:] or list(SCENARIOS)
    tokenizer = train_tokenizer(sentences(200), vocab_size=320)
    make_gpt2(tokenizer).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    simulated.install()
    results = {}
    for name in chosen:
        config = replace(make_config(folder / "policy", folder), iterations=2, sample_every=0)
        config.output = str(folder / name.split(",")[0].replace(" ", "_"))
        results[name] = {
            device: run(SCENARIOS[name], config, device) for device in ("cpu", "sim:0")
        }
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    Figure.savefig = save_blank
    torch.set_num_threads(1)
    main()
