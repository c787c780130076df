"""Sampling by a real vLLM server on the CPU. CORY_VLLM names a Python that has vLLM (docs/scaling.md)."""

import math
import os
import signal
import socket
import subprocess
import time
from dataclasses import replace
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from engine_runs import learner, train

from cory.build import make_agents
from cory.models.vllm import Engine

PYTHON = os.environ.get("CORY_VLLM", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="CORY_VLLM names no Python with vLLM")


class Started:
    """A vLLM server at `url`, in a separate process group; `start` can also restart it."""

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


@pytest.mark.parametrize(("algorithm", "rank"), [("grpo", 0), ("ppo", 4)])
def test_twenty_iterations_sample_from_the_weights_of_each(settings, algorithm, rank):
    records = train(learner(settings, algorithm, rank))
    differences = [record["engine_difference"] for record in records]
    assert len(differences) == 40 and max(differences) < 1e-4


@pytest.mark.parametrize("correction", ["sequence_mask", "none"])
def test_importance_ratios_correct_samples_from_weights_one_update_old(
    settings, monkeypatch, correction
):
    """The server gets each agent's adapter one update late."""
    hand_over, kept = Engine._hand_over, {}

    def late(engine, agent, policy):
        adapter = {n: p for n, p in policy.named_parameters() if f".{agent}." in n}
        current = {name: weight.detach().clone() for name, weight in adapter.items()}
        for name, weight in kept.get(agent, current).items():
            adapter[name].data.copy_(weight)
        served = hand_over(engine, agent, policy)
        for name, weight in current.items():
            adapter[name].data.copy_(weight)
        kept[agent] = current
        return served

    monkeypatch.setattr(Engine, "_hand_over", late)
    sampling = replace(settings.sampling, engine_correction=correction)
    ppo = replace(settings.ppo, learning_rate=1e-3)
    config = replace(settings, sampling=sampling, ppo=ppo, iterations=5)
    records = train(learner(config, "ppo", 4))
    late_records = [record for record in records if record["iteration"] > 0]
    assert all(record["engine_difference"] > 1e-4 for record in late_records)
    ratios = [record["engine_ratio"] for record in late_records]
    if correction == "none":
        assert ratios == [1.0] * len(ratios)
    else:
        assert all(0.5 < ratio < 2 and ratio != 1 for ratio in ratios)


def test_tokens_follow_the_probabilities_of_the_policy(settings):
    """A chi-square test of 4,000 single-token responses to one prompt."""
    agent, count = make_agents(settings)[0], 4000
    prompt = agent.encode(["the film"])[0]
    probabilities = agent.policy(torch.tensor([prompt])).logits[0, -1].softmax(-1).detach()
    drawn = torch.zeros_like(probabilities)
    sampling = replace(settings.sampling, min_new_tokens=1, max_new_tokens=1)
    for response in agent.respond(["the film"] * count, sampling, torch.Generator()).response_ids:
        drawn[response[0]] += 1
    common = probabilities > 10 / count
    expected = torch.cat([probabilities[common], probabilities[~common].sum()[None]]) * count
    seen = torch.cat([drawn[common], drawn[~common].sum()[None]])
    chi_square, degrees = ((seen - expected) ** 2 / expected).sum().item(), len(seen) - 1
    assert abs(chi_square - degrees) < 4 * math.sqrt(2 * degrees)


def test_responses_end_at_an_end_token_a_stop_string_or_the_limit(settings):
    sampling = replace(settings.sampling, stop=["go", "ry"], max_new_tokens=40)
    agent = make_agents(replace(settings, sampling=sampling))[0]
    rollout = agent.respond(["the film was a"] * 300, sampling, torch.Generator())
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
