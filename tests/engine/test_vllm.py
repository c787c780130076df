"""Sampling by vLLM itself, on a CPU. CORY_VLLM names the Python of an environment that has it: docs/scaling.md."""

import math
import os
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from conftest import save_llama
from test_engine import count_good, learner, train

from cory.agent import make_agents
from cory.config import CheckpointConfig, LoraConfig
from cory.errors import UserError
from cory.models.vllm import Engine

PYTHON = os.environ.get("CORY_VLLM", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="CORY_VLLM names no Python with vLLM")


@pytest.fixture(scope="module")
def wide_llama(tokenizer, tmp_path_factory):
    """A random Llama with heads of a width that vLLM has on a CPU."""
    return save_llama(tokenizer, tmp_path_factory.mktemp("models") / "wide", width=64)


class Started:
    """A server of its own process group, at `url`; `start` also starts it again."""

    def __init__(self, folder, log) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.log, self.url = folder, log, f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        shown = "VLLM_SERVER_DEV_MODE VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_NO_USAGE_STATS VLLM_CPU_KVCACHE_SPACE"
        environment = os.environ | dict.fromkeys(shown.split(), "1")
        command = f"-m vllm.entrypoints.openai.api_server --model {self.folder} --port {self.port} --host 127.0.0.1"
        command += " --generation-config vllm --dtype float32 --enforce-eager --max-model-len 128"
        command += " --enable-lora --max-lora-rank 8 --max-loras 2"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [PYTHON, *command.split()],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + 300
        while time.monotonic() < until and self.process.poll() is None:
            try:
                return urlopen(f"{self.url}/health", timeout=5).close()
            except (URLError, OSError):
                time.sleep(1)
        pytest.fail(f"vLLM did not start: {self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def vllm(wide_llama, tmp_path_factory):
    server = Started(wide_llama, tmp_path_factory.mktemp("vllm") / "log")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def settings(config, vllm):
    sampling = replace(config.sampling, engine="vllm", engine_url=vllm.url)
    model = replace(config.model, name=str(vllm.folder))
    ppo = replace(config.ppo, learning_rate=1e-2)
    return replace(config, sampling=sampling, model=model, ppo=ppo, iterations=20, sample_every=0)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_twenty_iterations_sample_from_the_weights_of_each(settings, algorithm, rank):
    records = train(learner(settings, algorithm, rank))
    differences = [record["engine_difference"] for record in records]
    print(
        f"{algorithm}, LoRA rank {rank}: mean {sum(differences) / 40:.1e}, largest {max(differences):.1e} nats a token"
    )
    assert len(differences) == 40 and max(differences) < 1e-4


@pytest.mark.parametrize("rank", [0, 4])
def test_weights_that_are_not_handed_over_show(settings, monkeypatch, rank):
    """The check of the test above would fail."""
    monkeypatch.setattr(Engine, "outdated", lambda self, agent: None)
    settings = learner(replace(settings, iterations=3), "ppo", rank)
    ppo = replace(settings.ppo, learning_rate=5e-4)
    one = replace(settings.cory, num_agents=1)  # with two, each takes the server from the other
    differences = [
        record["engine_difference"] for record in train(replace(settings, ppo=ppo, cory=one))
    ]
    assert differences[0] < 1e-4 and max(differences[1:]) > 1e-3


def test_tokens_are_drawn_with_the_probabilities_of_the_policy(settings):
    agent, count = make_agents(settings)[0], 4000
    prompt = agent.encode(["the film"])[0]
    probabilities = agent.policy(torch.tensor([prompt])).logits[0, -1].softmax(-1).detach()
    drawn = torch.zeros_like(probabilities)
    for response in agent.respond(["the film"] * count, 1, torch.Generator()).response_ids:
        drawn[response[0]] += 1
    common = probabilities > 10 / count
    expected = torch.cat([probabilities[common], probabilities[~common].sum()[None]]) * count
    seen = torch.cat([drawn[common], drawn[~common].sum()[None]])
    chi_square, degrees = ((seen - expected) ** 2 / expected).sum().item(), len(seen) - 1
    assert abs(chi_square - degrees) < 4 * math.sqrt(2 * degrees)


def test_responses_end_as_those_of_the_policy_do(settings):
    sampling = replace(settings.sampling, stop=["go", "ry"])
    agent = make_agents(replace(settings, sampling=sampling))[0]
    rollout = agent.respond(["the film was a"] * 300, 40, torch.Generator())
    ends = {"end": 0, "stop": 0, "length": 0}
    for response, text in zip(rollout.response_ids, rollout.completions, strict=True):
        whole = agent.tokenizer.decode(response)
        stopped = any(stop in whole for stop in sampling.stop)
        assert not any(stop in agent.tokenizer.decode(response[:-1]) for stop in sampling.stop)
        assert 0 not in response[:-1] and not any(stop in text for stop in sampling.stop)
        kind = "end" if response[-1] == 0 else "stop" if stopped else "length"
        assert kind != "length" or len(response) == 40
        ends[kind] += 1
    assert min(ends.values()) > 0, ends


def test_a_killed_server_ends_the_run_with_its_state_saved(settings, vllm):
    calls = []
    every = CheckpointConfig(save_every=1)
    settings = replace(settings, iterations=6, lora=LoraConfig(rank=4), checkpoint=every)

    def reward(prompts, completions):
        calls.append(1)
        if len(calls) == 3 + 3:  # fixed samples of two agents and the chain; iteration 3
            vllm.kill()
        return count_good(prompts, completions)

    with pytest.raises(
        UserError,
        match=r"sampling.engine_url: expected a server",
    ):
        train(settings, reward)
    before = (Path(settings.output) / "metrics.jsonl").read_text()
    vllm.start()
    records = train(replace(settings, resume=settings.output), reward)
    assert len(records) == 12 and max(record["engine_difference"] for record in records) < 1e-4
    assert before.count("\n") == 6 and (
        Path(settings.output) / "metrics.jsonl"
    ).read_text().startswith(before)
