"""Sampling by an engine, against a stand-in for vLLM's server; test_vllm.py has the real one."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import datasets
import pytest
import torch
from conftest import ROOT, make_gpt2, sentences
from vllm_server import serving

from cory.agent import make_agents
from cory.config import CheckpointConfig, Config, LoraConfig, ParallelConfig, RoleConfig
from cory.errors import UserError
from cory.models.vllm import MAX_DIFFERENCE, Engine
from cory.roles import RolePrompts
from cory.task import Task
from cory.trainer import CoryTrainer


@pytest.fixture
def server(policy_folder):
    with serving(policy_folder) as started:
        yield started


@pytest.fixture
def settings(config, server) -> Config:
    """Updates large enough that old weights would show."""
    sampling = replace(config.sampling, engine="vllm", engine_url=server.url, stop=["good"])
    return replace(
        config, sampling=sampling, ppo=replace(config.ppo, learning_rate=1e-2), sample_every=0
    )


def count_good(prompts, completions):
    return [float(completion.count("o")) + len(completion) / 50 for completion in completions]


def train(config: Config, reward=count_good) -> list[dict]:
    """The records of a run."""
    prompts = RolePrompts(observer='Improve "{prompt}{response}": {prompt}')
    task = Task.from_prompts(
        [" ".join(text.split()[:4]) for text in sentences(40)], reward, prompts
    )
    CoryTrainer(config, make_agents(config), task).train()
    return [
        json.loads(line)
        for line in (Path(config.output) / "metrics.jsonl").read_text().splitlines()
    ]


def learner(config: Config, algorithm: str, rank: int) -> Config:
    group = {"algorithm": algorithm, "group_size": 1 if algorithm == "ppo" else 4}
    return replace(config, lora=LoraConfig(rank=rank), **group)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_responses_come_from_the_weights_of_each_iteration(settings, server, algorithm, rank):
    records = train(learner(settings, algorithm, rank))
    assert max(record["engine_difference"] for record in records) < 1e-5
    loaded = {"/v1/load_lora_adapter"} if rank else {"/collective_rpc", "/reset_prefix_cache"}
    assert loaded <= {path for path, _ in server.requests}
    assert len(server.adapters) == (2 if rank else 0)  # those of earlier updates are unloaded


@pytest.mark.parametrize("rank", [0, 4])
def test_a_server_that_keeps_old_weights_shows(settings, server, rank):
    server.stale = True
    records = train(
        replace(learner(settings, "ppo", rank), ppo=replace(settings.ppo, learning_rate=5e-4))
    )
    assert records[0]["engine_difference"] < 1e-5  # before the first update
    assert records[-1]["engine_difference"] > 1e-3


@pytest.mark.parametrize("rank", [0, 4])
def test_weights_go_through_the_folder_of_the_run(settings, server, rank):
    train(learner(settings, "ppo", rank))
    places = [
        body["lora_path"] if path == "/v1/load_lora_adapter" else body["kwargs"]["weights_path"]
        for path, body in server.requests
        if path in ("/v1/load_lora_adapter", "/collective_rpc")
    ]
    folder = Path(settings.output).resolve()
    assert places and all(Path(place).is_relative_to(folder) for place in places)
    assert not any(Path(place).parent.exists() for place in places)  # the run has ended


def test_a_lora_run_restores_the_base_that_another_run_has_left(settings, server):
    server.model = make_gpt2(make_agents(settings)[0].tokenizer, seed=5)
    records = train(learner(settings, "ppo", 4))
    assert max(record["engine_difference"] for record in records) < 1e-5


def test_requests_ask_for_exact_sampling(settings, server):
    settings = replace(
        settings,
        sampling=replace(settings.sampling, temperature=0.7, top_k=9, repetition_penalty=1.1),
    )
    (agent, _), texts = make_agents(settings), ["the film", "a story"] * 4
    rollout = agent.respond(texts, 6, torch.Generator())
    (body,) = [body for path, body in server.requests if path == "/v1/completions"]
    asked = {
        "temperature": 0.7,
        "top_k": 9,
        "top_p": 1.0,
        "repetition_penalty": 1.1,
        "min_p": 0.0,
        "max_tokens": 6,
    }
    asked |= {
        "stop": ["good"],
        "stop_token_ids": [0],
        "ignore_eos": True,
        "model": "base",
        "presence_penalty": 0.0,
    }
    assert body | asked == body and body["prompt"] == agent.encode(texts)
    assert "seed" not in body  # it would give equal prompts equal responses
    assert len({tuple(response.tolist()) for response in rollout.response_ids[::2]}) > 1
    for response, text, logprobs in zip(
        rollout.response_ids, rollout.completions, rollout.logprobs, strict=True
    ):
        assert 1 <= len(response) == len(logprobs) <= 6 and "good" not in text


def test_roles_branches_and_team_rewards_go_with_an_engine(settings, server):
    """Each role asks with its own limit and stops; two observers answer after each response of the pioneer."""
    roles = [RoleConfig("writer", max_new_tokens=3), RoleConfig(max_new_tokens=5, stop=["film"])]
    config = replace(settings, branches=2, roles=roles, iterations=1)
    rows = {"prompt": [" ".join(text.split()[:4]) for text in sentences(40)]}
    task = Task(
        datasets.Dataset.from_dict(rows),
        count_good,
        RolePrompts(),
        team_reward=lambda chains: [float(len(" ".join(chain))) for chain in chains],
    )
    trainer = CoryTrainer(config, make_agents(config), task)
    server.requests.clear()
    done = trainer.iteration(0)
    asked = [body for path, body in server.requests if path == "/v1/completions"]
    size = config.ppo.batch_size
    assert [(body["max_tokens"], body["stop"], len(body["prompt"])) for body in asked] == [
        (3, ["good"], size // 2),
        (5, ["film"], size),
    ]
    assert len(done.team_rewards) == size
    assert all(stats.engine_difference < 1e-5 for stats in done.stats)


def test_large_batches_take_several_requests(settings, server, monkeypatch):
    monkeypatch.setattr("cory.models.vllm.PROMPTS_PER_REQUEST", 3)
    texts = [
        "the film",
        "a",
        "some very fine story",
        "music",
        "bad acting",
        "the scene",
        "in every",
    ]
    agent = make_agents(settings)[0]
    rollout = agent.respond(texts, 4, torch.Generator())
    asked = [body["prompt"] for path, body in server.requests if path == "/v1/completions"]
    assert [len(prompts) for prompts in asked] == [3, 3, 1]
    assert [ids for prompts in asked for ids in prompts] == agent.encode(texts)
    with torch.no_grad():
        for query, response, theirs in zip(
            rollout.prompt_ids, rollout.response_ids, rollout.logprobs, strict=True
        ):
            logits = agent.policy(torch.cat([query, response])[None]).logits[0, len(query) - 1 : -1]
            ours = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
            assert torch.allclose(ours, theirs, atol=1e-5)  # each row has its own response


def test_an_engine_with_another_model_ends_the_run_before_an_update(settings, server):
    server.model, server.stale = (
        make_gpt2(make_agents(settings)[0].tokenizer, seed=5, initializer_range=0.5),
        True,
    )
    with pytest.raises(
        UserError,
        match=rf"sampling.engine: .* nats a token \(limit {MAX_DIFFERENCE}\)",
    ):
        train(settings)
    assert not list(Path(settings.output).glob("checkpoints/*"))


def test_a_killed_engine_ends_the_run_which_continues_with_another(settings, server, policy_folder):
    server.dies_at = 4 + 2 * 2 + 1  # fixed samples, two iterations, a pioneer
    with pytest.raises(
        UserError, match=r"sampling.engine_url: expected a server at .*no answer"
    ) as caught:
        train(replace(settings, checkpoint=CheckpointConfig(save_every=1)))
    assert "--model " + str(policy_folder) in str(caught.value)
    assert "iter-000002" in "".join(caught.value.__notes__)
    before = (Path(settings.output) / "metrics.jsonl").read_text()
    with serving(policy_folder) as another:
        elsewhere = replace(settings.sampling, engine_url=another.url)
        records = train(replace(settings, resume=settings.output, sampling=elsewhere))
    assert len(records) == 8 and max(record["engine_difference"] for record in records) < 1e-5
    assert before.count("\n") == 4 and (
        Path(settings.output) / "metrics.jsonl"
    ).read_text().startswith(before)


def test_no_server_and_other_servers(settings, server):
    nowhere = replace(
        settings, sampling=replace(settings.sampling, engine_url="http://127.0.0.1:9")
    )
    with pytest.raises(
        UserError,
        match=r"no answer .*\n.*--host 127.0.0.1 --port 9 --dtype float32 --generation-config vllm$",
    ):
        make_agents(nowhere)
    secure = replace(nowhere.sampling, engine_url="https://127.0.0.1")
    with pytest.raises(UserError, match=r"--host 127.0.0.1 --port 443 "):
        make_agents(replace(nowhere, sampling=secure))
    with pytest.raises(UserError, match=r"--enable-lora --max-lora-rank 8 --max-loras 2$"):
        make_agents(learner(nowhere, "ppo", 4))
    model = {
        "name": "own/model 2",
        "revision": "v1",
        "trust_remote_code": True,
        "quantization": "4bit",
    }
    own = replace(learner(nowhere, "ppo", 4), agents=[{"model": model}] * 2)
    with pytest.raises(
        UserError,
        match=r"--model 'own/model 2' .*--revision v1 --trust-remote-code --quantization bi",
    ):
        Engine(own)
    for answer in ({}, {"data": [{"id": "another server's model"}]}):
        with (
            mock.patch.object(Engine, "_ask", return_value=answer),
            pytest.raises(UserError, match="expected a vLLM server with a model, got"),
        ):
            Engine(settings)
    server.key = "secret"
    with pytest.raises(UserError, match="answers 401"):
        make_agents(settings)


def test_a_server_that_keeps_its_cache_is_refused(settings, server, monkeypatch):
    monkeypatch.setattr("cory.models.vllm.CACHE_RESETS", 2)
    server.kept_cache = 1
    make_agents(settings)[0].respond(["the film"], 3, torch.Generator())
    server.kept_cache = 2
    with pytest.raises(UserError, match="does not forget keys and values"):
        make_agents(settings)[0].respond(["the film"], 3, torch.Generator())


def test_a_page_in_the_place_of_responses_is_named(settings, server):
    """As of a proxy that has lost its server."""
    engine = Engine(settings)
    policy = make_agents(settings)[0].policy
    with (
        mock.patch.object(engine, "_hand_over", return_value="base"),
        mock.patch.object(engine, "_ask", return_value={}),
        pytest.raises(UserError, match=r"engine_url: expected responses from http.*, got none"),
    ):
        engine.sample("agent_1", policy, [torch.tensor([1])], 3, [], [])


def test_the_server_may_want_a_key(settings, server, monkeypatch):
    server.key = "secret"
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert Engine(settings).base == "base"


def test_prompts_must_fit_the_context_of_the_server(settings, server):
    server.longest = 12
    with pytest.raises(UserError, match=r"^dataset: .* in a context of 12"):
        train(settings)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"agents": [{"model": {"name": "other"}}, {}]}, "agents of one base"),
        ({"agents": [{"lora": {"rank": 4}}, {}]}, "agents of one base"),
        ({"agents": [{"model": {"revision": "v1"}}, {}]}, "agents of one base"),
        ({"engine_url": "localhost:8000"}, r"^sampling\.engine_url: .*localhost:8000"),
    ],
)
def test_settings_that_do_not_go_with_an_engine(settings, change, said):
    with pytest.raises(UserError, match=said):
        ours = {key: change.pop(key) for key in list(change) if key.startswith("engine")}
        Engine(replace(settings, sampling=replace(settings.sampling, **ours), **change))


def test_several_processes_share_an_engine(settings, server, tmp_path):
    """Sharded agents, and data parallelism: each process asks for its part, the main one hands over weights.

    With data parallelism, held-out queries that they cannot share evenly: 5 and 4, in two batches and one.
    """
    jobs = []
    for shard, rank in (("full", 0), ("full", 4), ("none", 4), ("none", 0)):
        changed = replace(
            learner(settings, "ppo", rank), output=str(tmp_path / f"{shard}-{rank}"), iterations=2
        )
        held_out = {"eval_every": int(shard == "none"), "eval_queries": 9}
        jobs.append(replace(changed, parallel=ParallelConfig(shard=shard), **held_out))
    (tmp_path / "jobs.json").write_text(json.dumps([(asdict(job), "") for job in jobs]))
    command = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--standalone",
        "tests/parallel/parallel_run.py",
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [sys.executable, *command, str(tmp_path / "jobs.json")],
        check=True,
        cwd=ROOT,
        env=env,
        timeout=240,
    )
    for job in jobs:
        records = [
            json.loads(line)
            for line in (Path(job.output) / "metrics.jsonl").read_text().splitlines()
        ]
        assert len(records) == 4 and max(record["engine_difference"] for record in records) < 1e-5
        assert all("eval_task_reward" in record for record in records) == bool(job.eval_every)


def test_after_training_agents_sample_themselves(settings):
    assert settings.sampling.after_training({"temperature": 0.5}).engine == "native"
    with pytest.raises(UserError, match="expected no engine"):
        settings.sampling.after_training({"engine": "vllm"})
