"""Sharded agents in two processes on the CPU (gloo), against one process or data parallelism."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from conftest import make_gpt2
from parallel_run import save_state
from safetensors.torch import load_file
from test_resume import make_trainer
from torchrun import launch
from transformers import AutoModelForCausalLM

from cory.agent import make_agents
from cory.config import (
    CheckpointConfig,
    Config,
    CoryConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    PPOConfig,
    SamplingConfig,
)
from cory.errors import UserError
from cory.parallel import distributed

FULL = ParallelConfig(shard="full")
AGENTS = ["agent_1", "agent_2"]


def start(jobs, folder: Path):
    """Runs pairs of settings and a fault, see parallel_run.py, one after the other in two processes."""
    return launch("parallel_run.py", [(asdict(config), fault) for config, fault in jobs], folder)


def start_and_kill(configs, killed, folder: Path) -> None:
    """Runs settings, the last of them until a process is killed."""
    done = start([*((config, "") for config in configs), (killed, "killed")], folder)
    assert done.returncode != 0 and Path(f"{killed.output}-killed").exists(), done.stderr


def alone(config):
    """Runs settings in this process."""
    trainer = make_trainer(config)
    trainer.train()
    save_state(config, trainer.agents)


def distance(first, second) -> float:
    """The largest difference of two runs: of trained weights, optimizer states, and metrics."""
    largest = 0.0
    for agent in AGENTS:
        one, two = (torch.load(f"{config.output}-{agent}") for config in (first, second))
        assert one.keys() == two.keys() and one
        largest = max(
            largest, *((one[name].double() - two[name].double()).abs().max().item() for name in one)
        )
    rows = [
        [json.loads(line) for line in Path(c.output, "metrics.jsonl").open()]
        for c in (first, second)
    ]
    for one, two in zip(*rows, strict=True):
        # A quotient of variances: far below 0 where the critic is bad, so it is compared by its size.
        first_quotient = one.pop("explained_variance", 0.0)
        quotient = two.pop("explained_variance", 0.0)
        largest = max(largest, abs(first_quotient - quotient) / max(1.0, abs(quotient)))
        assert {k: v for k, v in one.items() if not isinstance(v, float)} == {
            k: v for k, v in two.items() if not isinstance(v, float)
        }
        largest = max(
            largest,
            *(abs(value - two[key]) for key, value in one.items() if isinstance(value, float)),
        )
    return largest


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer):
    """Three iterations, in double precision, as Adam turns the rounding errors of gradients of zero into steps."""
    folder = tmp_path_factory.mktemp("parallel")
    make_gpt2(tokenizer).double().save_pretrained(folder / "gpt2")
    tokenizer.save_pretrained(folder / "gpt2")

    def settings(name, **changes):
        ppo = PPOConfig(
            **{"learning_rate": 1e-3, "batch_size": 8, "mini_batch_size": 8}
            | changes.pop("ppo", {})
        )
        model = ModelConfig(
            str(folder / "gpt2"),
            dtype="auto",
            gradient_checkpointing=changes.pop("checkpointing", False),
        )
        return Config(
            **{
                "iterations": 3,
                "output": str(folder / name),
                "device": "cpu",
                "model": model,
                "cory": CoryConfig(exchange_period=2),
                # The likeliest token, so the same in any process.
                "sampling": SamplingConfig(3, 6, top_k=1),
                "checkpoint": CheckpointConfig(save_every=0),
            }
            | changes,
            ppo=ppo,
        )

    return settings


@pytest.fixture(scope="module")
def sharded(base, tmp_path_factory):
    """Settings that are run sharded in two processes, and otherwise; one that is resumed sharded, and one killed."""
    lora, saved = LoraConfig(rank=4), CheckpointConfig(save_every=1)
    drawn = {
        "sampling": SamplingConfig(4, 8, stop=["e", "a"]),
        "iterations": 2,
        "algorithm": "grpo",
        "group_size": 2,
    }
    steps = {
        "mini_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.05,
        "micro_batch": 1,
    }
    drawn |= {"ppo": steps | {"ratio_threshold": 1.02}}
    whole = {
        "ppo": base("ppo"),
        "ppo_lora": base("ppo_lora", lora=lora, ppo={"reward_scaling": True}),
        "reinforce": base("reinforce", algorithm="reinforce"),
        "reinforce_lora": base(
            "reinforce_lora", algorithm="reinforce", lora=lora, ppo={"max_grad_norm": 0.05}
        ),
        "grpo": base("grpo", **drawn, checkpointing=True, lora=lora),
    }
    split = {
        name: replace(c, output=f"{c.output}-sharded", parallel=FULL) for name, c in whole.items()
    }
    begun = base("resumed", iterations=1, checkpoint=saved, parallel=FULL)
    resumed = replace(begun, iterations=3, resume=begun.output)
    killed = base("killed_full", iterations=1000, checkpoint=saved, parallel=FULL)
    configs = [*split.values(), whole["grpo"], begun, resumed]
    start_and_kill(configs, killed, tmp_path_factory.mktemp("sharded"))
    for name in whole.keys() - {"grpo"}:
        alone(whole[name])
    return whole, split, resumed, killed


@pytest.mark.parametrize("name", ["ppo", "ppo_lora", "reinforce", "reinforce_lora"])
def test_two_sharded_processes_train_as_one(sharded, name):
    whole, split, *_ = sharded
    assert distance(whole[name], split[name]) < 1e-5


def test_sharding_equals_data_parallelism(sharded):
    """Responses are drawn, of different lengths, with micro-batches, accumulation, checkpointing and clipping."""
    whole, split, *_ = sharded
    assert distance(whole["grpo"], split["grpo"]) < 1e-9
    tokens = [
        json.loads(line)["response_tokens"]
        for line in Path(split["grpo"].output, "metrics.jsonl").open()
    ]
    assert any(count % 1 for count in tokens)  # lengths differ


@pytest.mark.parametrize("name", ["ppo", "ppo_lora"])
def test_agents_of_sharded_runs_are_plain_folders(sharded, name):
    whole, split, *_ = sharded
    for agent in AGENTS:
        one, two = (Path(config.output, agent) for config in (whole[name], split[name]))
        assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in two.iterdir())
        (file,) = (path.name for path in one.glob("*.safetensors"))
        first, second = load_file(one / file), load_file(two / file)
        assert first.keys() == second.keys()
        assert max((first[key] - second[key]).abs().max() for key in first) < 1e-5
    if name == "ppo":
        assert AutoModelForCausalLM.from_pretrained(two).config.architectures == ["GPT2LMHeadModel"]


def test_a_sharded_run_that_is_resumed_ends_the_same(sharded):
    _, split, resumed, _ = sharded
    for file in ("metrics.jsonl", "agent_1/model.safetensors", "agent_2/model.safetensors"):
        assert (
            Path(resumed.output, file).read_bytes() == Path(split["ppo"].output, file).read_bytes()
        )
    with pytest.raises(UserError, match="resume: expected"):
        alone(replace(resumed, iterations=4, parallel=ParallelConfig()))


def test_a_killed_process_ends_all_and_the_run_continues(sharded):
    _, _, _, killed = sharded
    assert not Path(f"{killed.output}-agent_1").exists()
    newest = max(int(path.name[5:]) for path in Path(killed.output, "checkpoints").glob("iter-*"))
    rows = [
        json.loads(line) for line in Path(killed.output, "metrics.jsonl").open() if line[-1] == "\n"
    ]
    assert 0 < 2 * newest <= len(rows)


def test_what_cannot_be_combined_is_refused_before_models_are_loaded(config, monkeypatch):
    monkeypatch.setattr("cory.agent.load_policy", lambda *_: pytest.fail("loaded"))
    sharded = replace(config, parallel=FULL)
    with pytest.raises(UserError, match=r"parallel.shard: expected none in a single process"):
        make_agents(sharded)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    quantized = replace(
        sharded, lora=LoraConfig(rank=4), model=replace(config.model, quantization="4bit")
    )
    for settings, message in [
        (quantized, "model.quantization: expected none with parallel.shard: full"),
        (
            replace(sharded, ppo=replace(config.ppo, optimizer="Adafactor")),
            "ppo.optimizer: expected none of Adafactor",
        ),
        (
            replace(config, agents=[{"device": "cpu"}] * 2),
            r"agents\[0\].device: expected null with 2 processes, got 'cpu'",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            make_agents(settings)
