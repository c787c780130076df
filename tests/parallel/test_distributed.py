"""Two processes on the CPU (gloo), started by torchrun: data parallelism."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_config
from test_ppo import make_learner, ragged, rollout_of, weights
from test_resume import make_trainer as make_run
from torchrun import launch

from cory.agent import make_agents
from cory.config import CheckpointConfig, LoraConfig, SamplingConfig
from cory.errors import UserError
from cory.parallel import distributed

RANKS = [0, 4]  # of LoRA; 0: full fine-tuning
KLS = ["full", "kl", "full in chunks"]  # of the output layer in chunks, the full KL


@pytest.fixture(scope="module")
def done(policy_folder, tokenizer, tmp_path_factory):
    """All runs and updates, in two launches, as a start takes longer than most of them: settings and what was printed.

    In the first, all start, and the last run is killed. In the second, those that ended early are resumed.
    """
    folder = tmp_path_factory.mktemp("distributed")
    base = replace(
        make_config(policy_folder, folder), iterations=4, checkpoint=CheckpointConfig(save_every=1)
    )
    configs = {
        name: replace(base, output=str(folder / name)) for name in ("killed", "callback stops")
    }
    for rank in RANKS:
        lora = replace(base, lora=LoraConfig(rank=rank), ppo=replace(base.ppo, reward_scaling=True))
        configs[f"whole{rank}"] = replace(lora, iterations=6, output=str(folder / f"whole{rank}"))
        configs[f"cut{rank}"] = replace(lora, iterations=4, output=str(folder / f"cut{rank}"))
    torch.save(tokenizer, folder / "tokenizer")
    updates = [
        {"update": kl, "tokenizer": f"{folder}/tokenizer", "output": f"{folder}/update_{kl}"}
        for kl in KLS
    ]
    wholes, cuts = ([configs[f"{kind}{rank}"] for rank in RANKS] for kind in ("whole", "cut"))
    runs = [{"run": asdict(config), "fault": ""} for config in [*wholes, *cuts]]
    killed = {"run": asdict(configs["killed"]), "fault": "killed"}
    stopped = {"run": asdict(configs["callback stops"]), "fault": "callback stops"}
    launched = launch("distributed_run.py", [*updates, *runs, stopped, killed], folder)
    assert Path(configs["killed"].output, "checkpoints").exists(), launched.stderr
    resumed = [
        {"run": asdict(replace(cut, iterations=6, resume="auto")), "fault": ""} for cut in cuts
    ]
    second = launch("distributed_run.py", resumed, folder)
    assert second.returncode == 0, second.stderr
    return configs, launched


def ranks(config):
    return [json.loads(Path(f"{config.output}-rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("rank", RANKS)
def test_two_processes_train_as_one(done, tmp_path, rank):
    configs, launched = done
    config, cut = configs[f"whole{rank}"], configs[f"cut{rank}"]
    first, second = ranks(config)
    assert first["processes"] == 2
    # Equal to the bit, and they move.
    assert first["digests"] == second["digests"] and len(set(first["digests"])) == 6
    assert (
        first["orders"] == second["orders"]
        and len({tuple(order) for order in first["orders"]}) == 2
    )
    task = make_run(replace(config, output=str(tmp_path / "one"))).task
    for k, (mine, theirs) in enumerate(zip(first["queries"], second["queries"], strict=True)):
        assert len(mine) == len(theirs) == 4
        assert mine + theirs == task.batch(k, 8, config.seed)["prompt"]
    metrics = [json.loads(line) for line in Path(config.output, "metrics.jsonl").open()]
    assert [(m["iteration"], m["agent"]) for m in metrics] == [
        (k, f"agent_{i}") for k in range(6) for i in (1, 2)
    ]
    assert all(0 < m["response_tokens"] <= 6 for m in metrics)
    # Once for each run that has ended well.
    assert launched.stdout.count("s per iteration") == 2 * len(RANKS) + 1

    # Ended earlier and resumed by other processes, it ends the same.
    assert (
        Path(cut.output, "metrics.jsonl").read_bytes()
        == Path(config.output, "metrics.jsonl").read_bytes()
    )
    assert ranks(cut)[0]["digests"] == first["digests"][4:]


def test_a_killed_process_ends_all(done):
    configs, launched = done
    config = configs["killed"]
    assert launched.returncode != 0 and Path(f"{config.output}-killed").exists()
    assert not Path(f"{config.output}-rank0.json").exists()
    assert list(Path(config.output, "checkpoints").iterdir())  # what was there stays


def test_a_callback_that_stops_one_process_stops_all(done):
    config = done[0]["callback stops"]
    assert [len(seen["digests"]) for seen in ranks(config)] == [2, 2]
    assert Path(config.output, "checkpoints/iter-000002").exists()
    assert json.loads(Path(config.output, "summary.json").read_text())["stopped"]


def test_batches_that_cannot_be_shared_are_refused(config, monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    with pytest.raises(
        UserError,
        match=r"ppo.mini_batch_size: expected a multiple of the number of processes, 3, got 8",
    ):
        make_agents(config)


def test_mixed_precision_of_accelerate_is_refused(config, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    distributed.check(config)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    expected = r"accelerate: expected mixed_precision: no, got bf16.*--precision bf16"
    with pytest.raises(UserError, match=expected):
        distributed.check(config)


@pytest.mark.parametrize("kl", KLS)
def test_an_update_of_two_processes_is_that_of_one(done, tokenizer, kl):
    """Whitening, token weights, KL and statistics are those of the whole batch, however the rows are shared."""
    whole, _ = make_learner(tokenizer, kl_penalty=kl.removesuffix(" in chunks"))
    before = weights(whole)
    queries, responses, scores = ragged()
    (stats,) = whole.update([rollout_of(queries, responses)], [scores], np.random.default_rng(0))
    folder = Path(done[0]["killed"].output).parent
    for rank in range(2):
        shared, trained = torch.load(folder / f"update_{kl}{rank}", weights_only=False)
        assert shared == pytest.approx(stats.metrics(), rel=1e-5, abs=1e-7)
        assert (trained - weights(whole)).norm() <= 1e-5 * (weights(whole) - before).norm()


def test_response_length_is_the_same_in_all_processes_and_varies(config):
    trainer = make_run(replace(config, sampling=SamplingConfig(3, 9), iterations=8))
    lengths = []
    agent = trainer.agents[0]
    respond = agent.respond
    agent.respond = lambda prompts, length, *args: (
        lengths.append(length) or respond(prompts, length, *args)
    )
    for k in range(8):
        trainer.iteration(k)
    assert len(set(lengths)) > 2
