"""Two processes on the CPU (gloo), started by torchrun."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from test_ppo import make_trainer as make_ppo
from test_ppo import ragged, weights
from test_resume import make_trainer as make_run

from cory.agent import make_agents
from cory.config import CheckpointConfig, LoraConfig, SamplingConfig, UserError
from cory.run import processes

SCRIPT = Path(__file__).with_name("distributed_run.py")


def launch(config, tmp_path, *fault, nproc=2, module=("torch.distributed.run",)):
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(asdict(config)))
    command = [sys.executable, "-m", *module, "--nproc_per_node", str(nproc), "--standalone", str(SCRIPT)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run([*command, str(settings), *fault], capture_output=True, text=True, timeout=120, env=env)


@pytest.fixture
def two(config):
    return replace(config, device="cpu", iterations=4, checkpoint=CheckpointConfig(save_every=1))


def ranks(config):
    return [json.loads(Path(f"{config.output}-rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("lora", [0, 4])
def test_two_processes_train_as_one(two, tmp_path, lora):
    config = replace(two, iterations=10, lora=LoraConfig(rank=lora), ppo=replace(two.ppo, reward_scaling=True))
    done = launch(config, tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = ranks(config)
    assert first["processes"] == 2
    assert first["digests"] == second["digests"] and len(set(first["digests"])) == 10  # equal to the bit, and they move
    assert first["orders"] == second["orders"] and len({tuple(order) for order in first["orders"]}) == 2
    task = make_run(replace(config, output=str(tmp_path / "one"))).task
    for k, (mine, theirs) in enumerate(zip(first["queries"], second["queries"], strict=True)):
        assert len(mine) == len(theirs) == 4
        assert mine + theirs == task.batch(k, 8, config.seed)["prompt"]
    metrics = [json.loads(line) for line in Path(config.output, "metrics.jsonl").open()]
    assert [(m["iteration"], m["agent"]) for m in metrics] == [(k, f"agent_{i}") for k in range(10) for i in (1, 2)]
    assert all(0 < m["response_tokens"] <= 6 for m in metrics)
    assert done.stdout.count("s per iteration") == 1

    # Interrupted and resumed, it ends the same.
    other = replace(config, output=str(tmp_path / "other"), iterations=7)
    assert launch(other, tmp_path).returncode == 0
    assert launch(replace(other, iterations=10, resume="auto"), tmp_path).returncode == 0
    assert Path(other.output, "metrics.jsonl").read_bytes() == Path(config.output, "metrics.jsonl").read_bytes()
    assert ranks(other)[0]["digests"] == first["digests"][7:]


@pytest.mark.parametrize("fault", ["raises", "killed"])
def test_a_failing_process_ends_all(two, tmp_path, fault):
    done = launch(two, tmp_path, fault)
    assert done.returncode != 0
    assert fault == "killed" or "the reward of rank 1 fails" in done.stderr
    assert not Path(f"{two.output}-rank0.json").exists()
    saved = sorted(path.name for path in Path(two.output, "checkpoints").iterdir())
    assert saved  # what was there stays


def test_batches_that_cannot_be_shared_are_refused(two, monkeypatch):
    monkeypatch.setattr(processes, "world_size", lambda: 3)
    with pytest.raises(
        UserError, match=r"ppo.mini_batch_size: expected a multiple of the number of processes, 3, got 8"
    ):
        make_agents(two)


WORKER = """
import os
import sys
sys.path[:0] = {path!r}
from pathlib import Path
import torch
from cory.policies.load import choose_device
choose_device("cpu")
from accelerate import PartialState
import conftest, test_ppo
from cory.run import processes
rank = PartialState().process_index
tokenizer = torch.load({tokenizer!r}, weights_only=False)
trainer, _ = test_ppo.make_trainer("ours", tokenizer, kl_penalty={kl!r})
queries, responses, scores = test_ppo.ragged()
part = processes.shard(8)
stats = trainer.step(queries[part], responses[part], scores[part])
torch.save((stats, test_ppo.weights(trainer)), {out!r} + str(rank))
torch.distributed.barrier()
os._exit(0)  # gloo's threads now and then abort a process that tears them down, on a loaded machine
"""


@pytest.mark.parametrize("kl", ["full", "kl"])
def test_an_update_of_two_processes_is_that_of_one(tokenizer, tmp_path, kl):
    """Whitening, token weights, KL and statistics are those of the whole batch, however the rows are shared."""
    whole, _ = make_ppo("ours", tokenizer, kl_penalty=kl)
    before = weights(whole)
    stats = whole.step(*ragged())
    torch.save(tokenizer, tmp_path / "tokenizer")
    worker = tmp_path / "worker.py"
    out = str(tmp_path / "result")
    path = [str(ROOT / part) for part in ("", "tests", "tests/learners", "tests/run")]
    worker.write_text(WORKER.format(path=path, tokenizer=str(tmp_path / "tokenizer"), kl=kl, out=out))
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", str(worker)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        shared, trained = torch.load(f"{out}{rank}", weights_only=False)
        assert shared == pytest.approx(stats, rel=1e-5, abs=1e-7)
        assert (trained - weights(whole)).norm() <= 1e-5 * (weights(whole) - before).norm()


def test_response_length_is_the_same_in_all_processes_and_varies(two):
    config = replace(two, sampling=SamplingConfig(3, 9), iterations=8, output=two.output + "-lengths")
    trainer = make_run(config)
    lengths = []
    agent = trainer.agents[0]
    respond = agent.respond
    agent.respond = lambda prompts, length: lengths.append(length) or respond(prompts, length)
    for k in range(8):
        trainer.iteration(k)
    assert len(set(lengths)) > 2
