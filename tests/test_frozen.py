"""Frozen agents answer like other agents and are never trained."""

from dataclasses import replace

import pytest
import torch
from conftest import make_trainer, run_iteration
from transformers import AutoModelForCausalLM

from cory.build import make_agents
from cory.config import CheckpointConfig, CoryConfig, LoraConfig, SamplingConfig
from cory.run.folder import read_rows

FROZEN = [{}, {"trained": False}]


def weights(policy):
    return [p.detach().clone() for name, p in policy.named_parameters() if "lora_" not in name]


@pytest.mark.parametrize("rank", [0, 4])
def test_a_frozen_agent_answers_in_each_role_and_does_not_change(config, rank):
    saved, lora = CheckpointConfig(save_every=2), LoraConfig(rank=rank)
    trainer = make_trainer(replace(config, agents=FROZEN, checkpoint=saved, lora=lora))
    trained, frozen = trainer.agents
    assert frozen.learner is None
    before = weights(frozen.policy)

    def answers(agent):
        generator = torch.Generator().manual_seed(0)
        return agent.respond(["the film was a"] * 8, SamplingConfig(1, 6), generator).completions

    answered = answers(frozen)
    folder = trainer.train().folder
    # Training changes the other agent's answers, but not the frozen agent's.
    assert answers(frozen) == answered != answers(trained)
    assert all(torch.equal(a, b) for a, b in zip(weights(frozen.policy), before, strict=True))
    for path in (folder / "checkpoints").iterdir():
        assert {file.name for file in path.iterdir()} == {"agent_1.safetensors", "state.json"}

    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["agent"] == "agent_2"]
    assert [row["role"] for row in rows] == ["observer", "observer", "pioneer", "pioneer"]
    for row in rows:
        assert row["kl"] == 0 and row["response_tokens"] > 0 and "policy_loss" not in row
    samples = read_rows(folder / "samples.jsonl")
    assert all(row["kl"] == 0 for row in samples if row["agent"] == "agent_2")

    base = AutoModelForCausalLM.from_pretrained(config.model.name)
    saved = AutoModelForCausalLM.from_pretrained(folder / "agent_2")
    assert all(torch.equal(a, b) for a, b in zip(weights(saved), weights(base), strict=True))


def test_a_frozen_agent_uses_the_base_that_others_share(config):
    full = make_agents(replace(config, agents=FROZEN))
    assert full[1].policy is full[0].learner.reference.pretrained_model
    lora = make_agents(replace(config, agents=FROZEN, lora=LoraConfig(rank=4)))
    assert lora[1].policy is lora[0].policy
    first = make_agents(replace(config, agents=FROZEN[::-1], lora=LoraConfig(rank=4)))
    trained = [name for name, p in first[1].policy.named_parameters() if p.requires_grad]
    assert trained and all("agent_2" in name for name in trained)
    devices = [agent | {"device": "cpu"} for agent in FROZEN]
    apart = make_agents(replace(config, agents=devices, lora=LoraConfig(rank=4)))
    assert apart[1].policy is not apart[0].policy
    mixed = [{}, {"trained": False}, {"lora": {"rank": 2}}]
    mixed = make_agents(replace(config, agents=mixed, cory=CoryConfig(num_agents=3)))
    assert mixed[1].policy is mixed[0].learner.reference.pretrained_model
    assert mixed[2].policy is not mixed[1].policy


@pytest.mark.parametrize("rank", [0, 4])
def test_an_earlier_runs_agent_can_be_a_frozen_partner(config, rank, tmp_path):
    """The agent, a full model or an adapter, is loaded and saved unchanged."""
    saved = replace(config, lora=LoraConfig(rank=rank), output=str(tmp_path / "first"))
    first = make_trainer(replace(saved, iterations=2)).train().folder
    partner = {"model": {"name": str(first / "agent_1")}, "trained": False}
    trainer = make_trainer(replace(config, agents=[{}, partner], iterations=1))
    folder = trainer.train().folder
    assert run_iteration(trainer, 1)[1]["kl"] == 0
    kept = AutoModelForCausalLM.from_pretrained(folder / "agent_2")
    model = AutoModelForCausalLM.from_pretrained(first / "agent_1")
    base, ids = AutoModelForCausalLM.from_pretrained(config.model.name), torch.arange(8)[None]
    with torch.no_grad():
        assert torch.allclose(kept(ids).logits, model(ids).logits, atol=1e-4)
        assert not torch.allclose(kept(ids).logits, base(ids).logits, atol=1e-2)
