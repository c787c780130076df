"""Two processes on the CPU (gloo): data parallelism, sharding, a shared engine, stops and kills, in one launch."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_config, make_gpt2, make_trainer
from distributed_run import run_job, save_state
from ppo_learner import make_learner
from questions import make_questions
from ragged import ragged, rollout_of, weights
from safetensors.torch import load_file
from torchrun import launch
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM
from vllm_server import serving

from cory.build import make_agents
from cory.config import (
    CheckpointConfig,
    Config,
    CoryConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    SamplingConfig,
)
from cory.errors import UserError
from cory.parallel import distributed
from cory.run.folder import read_rows

FULL = ParallelConfig(shard="full")
LORA = LoraConfig(rank=4)
KLS = ["kl", "full"]
AGENTS = ["agent_1", "agent_2"]


def data_parallel_configs(base: Config) -> dict[str, Config]:
    """Returns runs without sharding, whose weights are compared across processes."""
    saved = CheckpointConfig(save_every=1)
    ppo = replace(base.ppo, reward_scaling=True)
    whole = replace(base, iterations=4, checkpoint=saved, ppo=ppo)
    changes = {
        "whole": {},
        "lora": {"lora": LORA, "iterations": 3},
        "cut": {"iterations": 2},
        "three": {"cory": CoryConfig(num_agents=3, credit="counterfactual"), "iterations": 2},
        "shared": {
            "cory": CoryConfig(num_agents=1, chain_length=2),
            "branches": 2,
            "iterations": 2,
        },
        "questions": {"cory": CoryConfig(credit="information"), "branches": 2, "iterations": 2},
        "callback stops": {},
        "killed": {},
    }
    folder = Path(base.output).parent
    return {
        name: replace(whole, output=str(folder / name), **change)
        for name, change in changes.items()
    }


def sharded_configs(base: Config) -> dict[str, Config]:
    """Returns runs that sharding must not change.

    Their precision is double, since Adam would turn the rounding errors of zero gradients into steps.
    """
    folder = Path(base.output).parent
    # Greedy decoding gives the same responses in any number of processes.
    greedy = replace(base, iterations=3, sampling=SamplingConfig(3, 6, top_k=1))
    steps = {"mini_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.05}
    changes = {
        "ppo": {},
        "reinforce_lora": {
            "algorithm": "reinforce",
            "lora": LORA,
            "ppo": replace(base.ppo, max_grad_norm=0.05),
        },
        # Sampled responses of different lengths, micro-batches, accumulation, checkpointing and clipping.
        "grpo": {
            "algorithm": "grpo",
            "group_size": 2,
            "lora": LORA,
            "iterations": 2,
            "sampling": SamplingConfig(4, 8, stop=["e", "a"]),
            "model": replace(base.model, gradient_checkpointing=True),
            "ppo": replace(base.ppo, **steps, micro_batch=1, ratio_threshold=1.02),
        },
        # Sampled by transformers' `generate`.
        "mamba_lora": {
            "algorithm": "reinforce",
            "lora": LoraConfig(4, target_modules=["in_proj", "x_proj"]),
            "iterations": 2,
            "model": replace(base.model, name=str(folder / "mamba")),
        },
    }
    return {
        name: replace(greedy, **{"output": str(folder / name)} | change)
        for name, change in changes.items()
    }


def engine_configs(base: Config, url: str) -> list[Config]:
    """Returns runs whose main process hands weights to the engine. Their two processes get 5 and 4 held-out queries."""
    sampling = replace(base.sampling, engine="vllm", engine_url=url)
    ppo = replace(base.ppo, learning_rate=1e-2)
    folder = Path(base.output).parent
    common = replace(base, iterations=2, sampling=sampling, ppo=ppo, sample_every=0)
    held_out = {"eval_every": 1, "eval_queries": 9, "lora": LORA}
    return [
        replace(common, output=str(folder / "engine-full"), parallel=FULL),
        replace(common, output=str(folder / "engine-lora"), **held_out),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def runs(policy_folder, tokenizer, folder) -> dict[str, Config]:
    """Does all jobs in one launch of two processes. The last job kills a process, which ends the launch."""
    base = make_config(policy_folder, folder)
    runs = data_parallel_configs(base)
    make_gpt2(tokenizer).double().save_pretrained(folder / "gpt2")
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2}
    MambaForCausalLM(MambaConfig(**sizes, state_size=8)).double().save_pretrained(folder / "mamba")
    for name in ("gpt2", "mamba"):
        tokenizer.save_pretrained(folder / name)
    model = ModelConfig(str(folder / "gpt2"), dtype="auto")
    whole = sharded_configs(replace(base, model=model))
    runs |= whole
    for name, config in whole.items():
        output = f"{config.output}-sharded"
        runs[f"{name}-sharded"] = replace(config, output=output, parallel=FULL)
    saved = CheckpointConfig(save_every=1)
    begun = replace(runs["ppo-sharded"], iterations=1, checkpoint=saved)
    runs["ppo-begun"] = begun = replace(begun, output=str(folder / "ppo-resumed"))
    runs["ppo-resumed"] = replace(begun, iterations=3, resume=begun.output)
    runs["cut-resumed"] = replace(runs["cut"], iterations=4, resume="auto")

    torch.save(tokenizer, folder / "tokenizer")
    jobs = [
        {"update": kl, "tokenizer": f"{folder}/tokenizer", "output": f"{folder}/update_{kl}"}
        for kl in KLS
    ]
    in_one_process = ("ppo", "reinforce_lora")
    jobs += [
        run_job(config, name if name == "callback stops" else "")
        for name, config in runs.items()
        if name not in (*in_one_process, "killed")
    ]
    with serving(policy_folder) as server:
        engine = engine_configs(base, server.url)
        jobs += [run_job(config) for config in engine]
        launched = launch("distributed_run.py", [*jobs, run_job(runs["killed"], "killed")], folder)
    assert Path(f"{runs['killed'].output}-killed").exists(), launched.stderr[-3000:]
    assert launched.returncode != 0
    for name in in_one_process:
        trainer = make_trainer(runs[name])
        trainer.train()
        save_state(runs[name], trainer.agents)
    return runs | {config.output.rpartition("/")[2]: config for config in engine}


def ranks(config):
    """Returns what each of the two processes recorded of a run."""
    return [json.loads(Path(f"{config.output}-rank{rank}.json").read_text()) for rank in range(2)]


def metrics(config) -> list[dict]:
    return read_rows(Path(config.output, "metrics.jsonl"))


@pytest.mark.parametrize("name", ["whole", "lora", "three", "shared", "questions"])
def test_two_processes_train_as_one(runs, tmp_path, name):
    config = runs[name]
    first, second = ranks(config)
    assert first["processes"] == 2
    # Weights are equal to the bit on both processes and change in every iteration.
    assert first["digests"] == second["digests"]
    assert len(set(first["digests"])) == config.iterations
    assert first["orders"] == second["orders"]
    make = make_questions if name == "questions" else make_trainer
    one = make(replace(config, output=str(tmp_path / "one"), iterations=1))
    queries = 8 // config.branches
    for k, (rank_0, rank_1) in enumerate(zip(first["queries"], second["queries"], strict=True)):
        assert len(rank_0) == len(rank_1) == queries // 2
        rows_per_query = one.task.rows_per_query(config.branches)
        drawn = one.task.batch(k, queries, config.seed, rows_per_query)["prompt"]
        assert rank_0 + rank_1 == drawn[::rows_per_query]
    rows = metrics(config)
    chains = [one.schedule.order(k) for k in range(config.iterations)]
    assert [(row["iteration"], row["agent"]) for row in rows] == [
        (k, f"agent_{index + 1}") for k, chain in enumerate(chains) for index in sorted(chain)
    ]
    longest = one.config.sampling.max_new_tokens
    assert all(0 < row["response_tokens"] <= longest for row in rows)


def test_a_resumed_run_equals_an_unbroken_one(runs):
    """With data parallelism and with sharding."""
    for name, other in (("whole", "cut-resumed"), ("ppo-sharded", "ppo-resumed")):
        for file in ("metrics.jsonl", "agent_1/model.safetensors", "agent_2/model.safetensors"):
            first, second = (Path(runs[run].output, file).read_bytes() for run in (name, other))
            assert first == second, (name, file)


def test_a_killed_process_ends_all(runs):
    output = runs["killed"].output
    assert not Path(f"{output}-rank0.json").exists()
    assert list(Path(output, "checkpoints").iterdir())  # its checkpoints stay


def test_a_callback_that_stops_one_process_stops_all(runs):
    config = runs["callback stops"]
    assert [len(seen["digests"]) for seen in ranks(config)] == [2, 2]
    assert Path(config.output, "checkpoints/iter-000002").exists()
    assert json.loads(Path(config.output, "summary.json").read_text())["stopped"]


@pytest.mark.parametrize("kl", KLS)
def test_an_update_of_two_processes_equals_one_of_a_single_process(runs, folder, tokenizer, kl):
    """Whitening, token weights, KL and statistics use the whole batch, not one process's rows."""
    whole, _ = make_learner(tokenizer, kl_penalty=kl)
    before = weights(whole)
    queries, responses, scores = ragged()
    (stats,) = whole.update([rollout_of(queries, responses)], [scores], np.random.default_rng(0))
    for rank in range(2):
        shared, trained = torch.load(folder / f"update_{kl}{rank}", weights_only=False)
        assert shared == pytest.approx(stats.metrics(), rel=1e-5, abs=1e-7)
        assert (trained - weights(whole)).norm() <= 1e-5 * (weights(whole) - before).norm()


@pytest.mark.parametrize(
    ("name", "largest"),
    [("ppo", 1e-5), ("reinforce_lora", 1e-5), ("grpo", 1e-9), ("mamba_lora", 1e-5)],
)
def test_sharding_changes_no_number(runs, name, largest):
    """Weights, optimizer states and metrics are the same as in one process or, for grpo, with data parallelism."""
    whole, split = runs[name], runs[f"{name}-sharded"]
    for agent in AGENTS:
        one, two = (torch.load(f"{config.output}-{agent}") for config in (whole, split))
        assert one.keys() == two.keys() and one
        for key, tensor in one.items():
            torch.testing.assert_close(two[key], tensor, rtol=0, atol=largest)
    for one, two in zip(metrics(whole), metrics(split), strict=True):
        # The explained variance is far below 0 for a bad critic, so its tolerance is relative.
        quotient = one.pop("explained_variance", 0.0)
        assert two.pop("explained_variance", 0.0) == pytest.approx(quotient, rel=largest)
        assert one.keys() == two.keys()
        for key, value in one.items():
            assert two[key] == (
                pytest.approx(value, rel=0, abs=largest) if isinstance(value, float) else value
            )
    if name == "grpo":
        assert any(row["response_tokens"] % 1 for row in metrics(split))  # lengths vary


@pytest.mark.parametrize("name", ["ppo", "reinforce_lora"])
def test_agents_of_sharded_runs_are_plain_folders(runs, name):
    for agent in AGENTS:
        one, two = (Path(runs[run].output, agent) for run in (name, f"{name}-sharded"))
        assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in two.iterdir())
        (file,) = (path.name for path in one.glob("*.safetensors"))
        first, second = load_file(one / file), load_file(two / file)
        assert first.keys() == second.keys()
        assert max((first[key] - second[key]).abs().max() for key in first) < 1e-5
    if name == "ppo":
        assert AutoModelForCausalLM.from_pretrained(two).config.architectures == ["GPT2LMHeadModel"]


@pytest.mark.parametrize("name", ["engine-full", "engine-lora"])
def test_several_processes_share_an_engine(runs, name):
    config = runs[name]
    records = metrics(config)
    assert len(records) == 4 and max(record["engine_difference"] for record in records) < 1e-5
    assert all("eval_task_reward" in record for record in records) == bool(config.eval_every)


@pytest.mark.parametrize(
    ("processes", "changes", "key"),
    [
        (3, {}, "ppo.mini_batch_size"),
        (2, {"agents": [{"device": "cpu"}] * 2}, r"agents\[0\].device"),
        (1, {"parallel": FULL}, "parallel.shard"),
        (2, {"parallel": FULL, "model": {"quantization": "4bit"}}, "model.quantization"),
        (
            2,
            {"branches": 4, "ppo": {"mini_batch_size": 2, "gradient_accumulation_steps": 2}},
            "branches",
        ),
        (2, {"algorithm": "grpo", "group_size": 8}, "ppo.batch_size"),
        (2, {"branches": 4, "cory": {"credit": "information"}}, "ppo.batch_size"),
        (1, {"precision": "bf16"}, "accelerate"),
        (1, {"iterations": 2}, "accelerate"),
    ],
)
def test_incompatible_settings_are_refused_before_models_are_loaded(
    config, monkeypatch, processes, changes, key
):
    monkeypatch.setattr("cory.build.load_policy", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(distributed, "world_size", lambda: processes)
    if key == "accelerate":
        is_mixed = changes == {"precision": "bf16"}
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16" if is_mixed else "no")
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "false" if is_mixed else "true")
    blocks = {
        name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    with pytest.raises(UserError, match=f"^{key}: "):
        make_agents(replace(config, lora=LORA, **blocks))
