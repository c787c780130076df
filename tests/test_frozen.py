"""Frozen agents: they answer as any agent does, and stay as they are."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import run_iteration
from test_trainer import make_trainer
from transformers import AutoModelForCausalLM

from cory.agent import make_agents
from cory.config import CheckpointConfig, CoryConfig, LoraConfig, SamplingConfig
from cory.errors import UserError

FROZEN = [{}, {"trained": False}]


def files(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def weights(policy):
    return [p.detach().clone() for name, p in policy.named_parameters() if "lora_" not in name]


@pytest.mark.parametrize(
    "changes", [{}, {"algorithm": "grpo", "group_size": 2}, {"lora": LoraConfig(rank=4)}]
)
def test_it_answers_in_each_role_and_stays_as_it_is(config, changes):
    config = replace(config, agents=FROZEN, checkpoint=CheckpointConfig(save_every=2), **changes)
    trainer = make_trainer(config)
    frozen = trainer.agents[1]
    assert frozen.learner is None and frozen.optimizer_steps == 0
    before = weights(frozen.policy)
    started = {}
    notify = trainer._notify

    def spy(event, argument):
        if event == "on_iteration_begin" and not started:
            started.update(files(trainer.run.folder / "agent_2"))
        notify(event, argument)

    trainer._notify = spy
    folder = trainer.train().folder
    assert all(torch.equal(a, b) for a, b in zip(weights(frozen.policy), before, strict=True))
    assert files(folder / "agent_2") == started and "model.safetensors" in started
    for path in (folder / "checkpoints").iterdir():
        assert sorted(file.name for file in path.iterdir()) == [
            "agent_1.safetensors",
            "state.json",
        ]

    rows = [
        row
        for row in map(json.loads, (folder / "metrics.jsonl").open())
        if row["agent"] == "agent_2"
    ]
    assert [row["role"] for row in rows] == ["observer", "observer", "pioneer", "pioneer"]
    assert all(
        row["kl"] == 0 and row["response_tokens"] > 0 and "policy_loss" not in row for row in rows
    )
    samples = [
        row
        for row in map(json.loads, (folder / "samples.jsonl").open())
        if row["agent"] == "agent_2"
    ]
    assert all(row["kl"] == 0 for row in samples)
    card = (folder / "agent_2/README.md").read_text()
    assert "not trained, a copy of" in card and "trained from" not in card

    base = AutoModelForCausalLM.from_pretrained(config.model.name)
    saved = AutoModelForCausalLM.from_pretrained(folder / "agent_2")
    assert all(torch.equal(a, b) for a, b in zip(weights(saved), weights(base), strict=True))


def test_it_is_the_base_that_others_share(config, llama_folder):
    full = make_agents(replace(config, agents=FROZEN))
    assert full[1].policy is full[0].learner.reference.pretrained_model
    lora = make_agents(replace(config, agents=FROZEN, lora=LoraConfig(rank=4)))
    assert lora[1].policy is lora[0].policy
    first = make_agents(replace(config, agents=FROZEN[::-1], lora=LoraConfig(rank=4)))
    assert first[1].learner.model_params and all(
        "agent_2" in n for n in trained_names(first[1].policy)
    )
    devices = [agent | {"device": "cpu"} for agent in FROZEN]
    apart = make_agents(replace(config, agents=devices, lora=LoraConfig(rank=4)))
    assert apart[1].policy is not apart[0].policy
    mixed = [{}, {"trained": False}, {"lora": {"rank": 2}}]
    mixed = make_agents(replace(config, agents=mixed, cory=CoryConfig(num_agents=3)))
    assert (
        mixed[1].policy is mixed[0].learner.reference.pretrained_model
        and mixed[2].policy is not mixed[1].policy
    )


def trained_names(policy):
    return [name for name, parameter in policy.named_parameters() if parameter.requires_grad]


def test_it_answers_without_the_adapters_of_others(config):
    """Once trained, the adapter changes what its agent answers, and not what the base does."""
    config = replace(
        config, agents=FROZEN, lora=LoraConfig(rank=4), cory=CoryConfig(exchange_period=0)
    )
    trainer = make_trainer(config)
    trained, frozen = trainer.agents

    def answers(agent):
        return agent.respond(
            ["the film was a"] * 8, 6, torch.Generator().manual_seed(0)
        ).completions

    before = answers(frozen)
    for k in range(3):
        trainer.iteration(k)
    assert answers(frozen) == before != answers(trained)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_saved_agent_is_a_partner(config, rank, tmp_path):
    """The agent of an earlier run, as a full model or as an adapter, is read and kept."""
    first = (
        make_trainer(replace(config, lora=LoraConfig(rank=rank), output=str(tmp_path / "first")))
        .train()
        .folder
    )
    partner = {"model": {"name": str(first / "agent_1")}, "trained": False}
    trainer = make_trainer(replace(config, agents=[{}, partner]))
    folder = trainer.train().folder
    assert all(
        record["kl"] == 0 for record in run_iteration(trainer, 4) if record["agent"] == "agent_2"
    )
    saved = AutoModelForCausalLM.from_pretrained(folder / "agent_2")
    model = AutoModelForCausalLM.from_pretrained(first / "agent_1")
    if rank:
        model = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.allclose(saved(ids).logits, model(ids).logits, atol=1e-4)
        base = AutoModelForCausalLM.from_pretrained(config.model.name)
        assert not torch.allclose(saved(ids).logits, base(ids).logits, atol=1e-2)


def test_a_run_that_is_continued_leaves_its_folder_alone(config):
    config = replace(config, agents=FROZEN, iterations=2)
    folder = make_trainer(config).train().folder
    before = files(folder / "agent_2")
    make_trainer(replace(config, iterations=4, resume=str(folder))).train()
    assert files(folder / "agent_2") == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"agents": [{"trained": False}, {"trained": False}]},
            "agents: expected at least one that is trained, got",
        ),
        (
            {"agents": [{"trained": False}], "cory": CoryConfig(num_agents=1)},
            "agents: expected at least one that is trained, got",
        ),
        (
            {"agents": [{}, {"trained": "no"}]},
            r"agents\.1\.trained: ",
        ),
        (
            {"agents": [{}, {"trained": False, "learning_rate": 1e-5}]},
            r"agents\.1\.learning_rate: ",
        ),
        (
            {"agents": [{}, {"trained": False, "lora": {"rank": 2}}]},
            r"agents\.1\.lora: ",
        ),
        (
            {"agents": FROZEN, "sampling": SamplingConfig(engine="vllm")},
            r"agents\.1\.trained: ",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(config, changes, message):
    with pytest.raises(UserError, match=message):
        replace(config, **changes).check()
