"""Sampling by an engine, tested against a stand-in for vLLM's server. test_vllm.py uses the real server."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import make_gpt2
from engine_runs import learner, train
from vllm_server import serving

from cory.build import make_agents
from cory.config import CheckpointConfig, Config, RoleConfig
from cory.errors import UserError
from cory.models.vllm import Engine


@pytest.fixture
def server(policy_folder):
    with serving(policy_folder) as started:
        yield started


@pytest.fixture
def settings(config, server) -> Config:
    """Settings with a learning rate so high that sampling from old weights would be noticed."""
    sampling = replace(config.sampling, engine="vllm", engine_url=server.url, stop=["good"])
    ppo = replace(config.ppo, learning_rate=1e-2)
    return replace(config, sampling=sampling, ppo=ppo, sample_every=0, iterations=2)


@pytest.mark.parametrize(("algorithm", "rank"), [("grpo", 0), ("ppo", 4)])
def test_responses_come_from_the_weights_of_each_iteration(settings, server, algorithm, rank):
    """With LoRA, the server starts with another base model, which the run must replace by its own."""
    if rank:
        server.model = make_gpt2(make_agents(settings)[0].tokenizer, seed=5)
    records = train(learner(settings, algorithm, rank))
    assert max(record["engine_difference"] for record in records) < 1e-5
    assert len(server.adapters) == (2 if rank else 0)  # earlier updates' adapters are unloaded
    # Weights reach the server as files in the run's folder, which are deleted afterwards.
    paths = [
        body["lora_path"] if path == "/v1/load_lora_adapter" else body["kwargs"]["weights_path"]
        for path, body in server.requests
        if path in ("/v1/load_lora_adapter", "/collective_rpc")
    ]
    folder = Path(settings.output).resolve()
    assert paths and all(Path(path).is_relative_to(folder) for path in paths)
    assert not any(Path(path).parent.exists() for path in paths)


@pytest.mark.parametrize("rank", [0, 4])
def test_stale_weights_on_the_server_show_in_the_metrics(settings, server, rank):
    server.stale = True
    ppo = replace(settings.ppo, learning_rate=5e-4)
    records = train(replace(learner(settings, "ppo", rank), ppo=ppo))
    assert records[0]["engine_difference"] < 1e-5  # before the first update
    assert records[-1]["engine_difference"] > 1e-3
    assert records[0]["engine_ratio"] == pytest.approx(1, abs=1e-4)
    assert abs(records[-1]["engine_ratio"] - 1) > 1e-4  # importance weights correct the samples


def test_requests_ask_for_exact_sampling(settings, server, monkeypatch):
    monkeypatch.setattr("cory.models.vllm.PROMPTS_PER_REQUEST", 3)
    changes = {"top_k": 9, "repetition_penalty": 1.1, "engine_correction": "none"}
    sampling = replace(settings.sampling, **changes, max_new_tokens=6)
    texts = [
        "the film",
        "a",
        "some very fine story",
        "music",
        "bad acting",
        "the scene",
        "the film",
    ]
    agent, _ = make_agents(replace(settings, sampling=sampling))
    rollout = agent.respond(texts, sampling, torch.Generator())
    asked = [body for path, body in server.requests if path == "/v1/completions"]
    expected = {
        "temperature": 1.0, "top_k": 9, "top_p": 1.0, "repetition_penalty": 1.1, "min_p": 0.0, "max_tokens": 6,
        "stop": ["good"], "stop_token_ids": [0], "ignore_eos": True, "model": "base", "presence_penalty": 0.0,
    }  # fmt: skip
    for body in asked:
        assert body | expected == body
        assert "seed" not in body  # a seed would give equal prompts equal responses
    assert [len(body["prompt"]) for body in asked] == [3, 3, 1]
    assert [ids for body in asked for ids in body["prompt"]] == agent.encode(texts)
    rows = zip(
        rollout.prompt_ids, rollout.response_ids, rollout.logprobs, rollout.completions, strict=True
    )
    for query, response, engine_logprobs, text in rows:  # each row is paired with its own response
        assert 1 <= len(response) == len(engine_logprobs) <= 6 and "good" not in text
        with torch.no_grad():
            logits = agent.policy(torch.cat([query, response])[None]).logits[0, len(query) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        assert torch.allclose(logprobs, engine_logprobs, atol=1e-5)


def test_roles_and_branches_go_with_an_engine(settings, server):
    """Each role requests its own length limit and stop strings; two observers answer each pioneer response."""
    roles = [RoleConfig("writer", max_new_tokens=3), RoleConfig(max_new_tokens=5, stop=["film"])]
    config = replace(settings, branches=2, roles=roles, iterations=1)
    records = train(config)
    asked = [body for path, body in server.requests if path == "/v1/completions"]
    limits = [(body["max_tokens"], body["stop"], len(body["prompt"])) for body in asked]
    assert (3, ["good"], 4) in limits and (5, ["film"], 8) in limits
    assert all(record["engine_difference"] < 1e-5 for record in records)


def test_a_killed_engine_ends_the_run_which_continues_with_another(settings, server, policy_folder):
    # The server dies after 4 requests for the samples before training, 2 for an iteration and 1 for a pioneer.
    server.dies_at = 4 + 2 * 1 + 1
    saved = replace(settings, checkpoint=CheckpointConfig(save_every=1))
    with pytest.raises(UserError, match=r"^(iteration 1: )?sampling.engine_url: ") as caught:
        train(saved)
    assert "iter-000001" in "".join(caught.value.__notes__)
    before = (Path(settings.output) / "metrics.jsonl").read_text()
    with serving(policy_folder) as another:
        sampling = replace(settings.sampling, engine_url=another.url)
        records = train(replace(settings, resume=settings.output, sampling=sampling))
    assert len(records) == 4 and max(record["engine_difference"] for record in records) < 1e-5
    assert (Path(settings.output) / "metrics.jsonl").read_text().startswith(before)


@pytest.mark.parametrize(
    ("key", "server_has", "changes"),
    [
        ("sampling.engine_url", {}, {"engine_url": "http://127.0.0.1:9"}),
        ("sampling.engine_url", {"key": "secret"}, {}),
        ("sampling.engine_url", {"kept_cache": 9}, {}),
        ("dataset", {"longest": 12}, {}),
        ("sampling.engine: ", {"stale": True, "model": "another"}, {}),
        ("agents", {}, {"agents": [{"model": {"name": "other"}}, {}]}),
        ("agents", {}, {"agents": [{"lora": {"rank": 4}}, {}]}),
        ("agents", {}, {"agents": [{"model": {"revision": "v1"}}, {}]}),
    ],
)
def test_unusable_servers_and_settings_are_refused(
    settings, server, tokenizer, monkeypatch, key, server_has, changes
):
    monkeypatch.setattr("cory.models.vllm.CACHE_RESETS", 2)
    for name, value in server_has.items():
        is_model = name == "model"
        other_model = make_gpt2(tokenizer, seed=5, initializer_range=0.5) if is_model else value
        setattr(server, name, other_model)
    sampling = {name: changes[name] for name in changes if name.startswith("engine")}
    others = {name: changes[name] for name in changes if name not in sampling}
    settings = replace(settings, sampling=replace(settings.sampling, **sampling), **others)
    with pytest.raises(UserError, match=key):
        if others:
            Engine(settings)
        train(settings)
    assert not list(Path(settings.output).glob("checkpoints/*"))


def test_servers_of_other_programs_are_refused_and_the_api_key_is_sent(
    settings, server, monkeypatch
):
    for answer in ({}, {"data": [{"id": "another server's model"}]}):
        with (
            mock.patch.object(Engine, "_ask", return_value=answer),
            pytest.raises(UserError, match=r"sampling\.engine_url: "),
        ):
            Engine(settings)
    server.key, server.kept_cache = "secret", 1
    monkeypatch.setattr("cory.models.vllm.CACHE_RESETS", 2)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    agent = make_agents(settings)[0]
    agent.respond(
        ["the film"], settings.sampling, torch.Generator()
    )  # the server empties its cache at the second request
    # A proxy whose server is gone answers without the field `choices`.
    with (
        mock.patch.object(Engine, "_hand_over", return_value="base"),
        mock.patch.object(Engine, "_ask", return_value={}),
        pytest.raises(UserError, match=r"sampling\.engine_url: "),
    ):
        agent.respond(["the film"], settings.sampling, torch.Generator())


def test_after_training_agents_sample_themselves(settings):
    assert settings.sampling.after_training({"temperature": 0.5}).engine == "native"
    with pytest.raises(UserError, match=r"sampling\.engine"):
        settings.sampling.after_training({"engine": "vllm"})
