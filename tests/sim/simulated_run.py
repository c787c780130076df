"""Runs every learner on the CPU and on the simulated accelerator: `simulated_run.py FOLDER`.

Writes FOLDER/results.json with each learner's metrics by device, and the error that a planted mistake raises.
The device stays registered in a process, so test_simulated.py starts this script in a separate process.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

import pytest  # noqa: E402
import simulated  # noqa: E402
import torch  # noqa: E402
from accelerate import PartialState  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from conftest import hurry, make_config, make_gpt2, make_trainer, sentences  # noqa: E402
from questions import make_questions  # noqa: E402

from cory.config import CoryConfig, LoraConfig  # noqa: E402
from toys.small_models import train_tokenizer  # noqa: E402

PPO = {"kl_penalty": "full", "mini_batch_size": 4, "micro_batch": 2, "reward_scaling": True}
LEARNERS = {
    "ppo": {"ppo": PPO, "eval_every": 1},
    "grpo": {"group_size": 2, "lora": LoraConfig(rank=4)},
    "dr_grpo": {"group_size": 2},
    "dapo": {"group_size": 2},
    "gspo": {"group_size": 2},
    "rloo": {"group_size": 2, "branches": 2, "cory": CoryConfig(credit="information")},
    "reinforce": {"cory": CoryConfig(exchange_period=1, credit="counterfactual")},
}


def trainer_on(device, folder, algorithm, ppo=None, **changes):
    PartialState._reset_state()
    AcceleratorState._reset_state(True)
    simulated.use(device)
    config = make_config(folder / "policy", folder)
    output = str(folder / f"{algorithm}-{device}")
    changes |= {"iterations": 2, "device": device, "output": output, "algorithm": algorithm}
    config = replace(config, ppo=replace(config.ppo, **(ppo or {})), **changes)
    return make_questions(config) if algorithm == "rloo" else make_trainer(config)


def numbers(record: dict) -> dict:
    return {key: value for key, value in record.items() if isinstance(value, (int, float))}


def planted_mistake(folder) -> str:
    """Returns the error that is raised if a learner's advantages are on the CPU."""
    trainer = trainer_on("sim:0", folder, "ppo")
    learner = trainer.agents[0].learner
    targets = learner.targets

    def targets_on_the_cpu(*args):
        result = targets(*args)
        result.advantages = result.advantages.cpu()
        return result

    learner.targets = targets_on_the_cpu
    try:
        trainer.iteration(0)
    except RuntimeError as error:
        return str(error)
    return ""


def main() -> None:
    folder = Path(sys.argv[1])
    tokenizer = train_tokenizer(sentences(200), vocab_size=320)
    make_gpt2(tokenizer).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    simulated.install()
    results = {"mistake": planted_mistake(folder)}
    for algorithm, changes in LEARNERS.items():
        results[algorithm] = {}
        for device in ("cpu", "sim:0"):
            run = trainer_on(device, folder, algorithm, **changes).train()
            results[algorithm][device] = [numbers(record) for record in run.history]
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    hurry(pytest.MonkeyPatch())
    torch.set_num_threads(1)
    main()
