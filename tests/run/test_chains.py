"""Any number of agents with any models train in a chain, where they answer in turn. Resuming changes no bit."""

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import count_good, make_trainer, read_responses
from interruptions import after, interrupt
from run_files import outcome
from transformers import AutoModelForCausalLM, AutoTokenizer

from cory import evaluate
from cory.build import make_agents
from cory.config import (
    CheckpointConfig,
    Config,
    CoryConfig,
    EvaluationConfig,
    LoraConfig,
)
from cory.run.folder import read_rows
from cory.run.signals import Interrupted

CHAINS = {
    "three agents": {"cory": CoryConfig(num_agents=3, exchange_period=1, credit="counterfactual")},
    "one agent, both roles": {"cory": CoryConfig(num_agents=1, chain_length=2, credit="causal")},
    "two models, LoRA": {"cory": CoryConfig(exchange_period=2), "lora": LoraConfig(rank=4)},
    "frozen": {"cory": CoryConfig(exchange_period=2), "agents": [{"trained": False}]},
    "branches, RLOO": {"branches": 2, "algorithm": "rloo", "group_size": 2},
}


ITERATIONS = 5


def make_chain(name: str, config: Config, llama_folder: Path) -> Config:
    """Returns settings for five iterations of one of CHAINS, with a checkpoint every two iterations."""
    settings = dict(CHAINS[name])
    other = {"model": {"name": str(llama_folder)}, "learning_rate": 2e-3}
    if "two models" in name:
        settings["agents"] = [{}, other | ({"lora": {"rank": 2}} if "lora" in settings else {})]
    if "frozen" in name:  # a GPT-2 beside a Llama
        settings["agents"] = [*settings["agents"], other]
    checkpoints = CheckpointConfig(save_every=2)
    return replace(config, iterations=ITERATIONS, checkpoint=checkpoints, **settings)


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_trains_and_is_resumed_to_the_bit(name, config, llama_folder, tmp_path):
    config = make_chain(name, config, llama_folder)
    trainer = make_trainer(config)
    agents = [agent for agent in trainer.agents if agent.is_trained]
    before = [agent.learner.model_params[0].detach().clone() for agent in agents]
    folder = trainer.train().folder
    for agent, old in zip(agents, before, strict=True):
        assert (agent.learner.model_params[0] != old).any()
    names = [agent.name for agent in trainer.agents]
    rows = read_rows(folder / "metrics.jsonl")
    assert len(rows) == ITERATIONS * config.cory.num_roles
    assert {row["agent"] for row in rows} == {*names}
    for agent in names:  # also a frozen agent
        assert f"{ITERATIONS} iterations" in (folder / agent / "README.md").read_text()
    broken = replace(config, output=str(tmp_path / "broken"))
    with pytest.raises(Interrupted):  # during the third iteration
        make_trainer(broken, after(count_good, 4 + len(names), interrupt)).train()
    make_trainer(replace(broken, resume="auto")).train()
    assert outcome(folder, names) == outcome(tmp_path / "broken", names)


def test_agents_with_different_models_share_nothing(config, policy_folder, llama_folder, tmp_path):
    agents = [{}, {"model": {"name": str(llama_folder)}, "learning_rate": 2e-3}]
    config = replace(config, agents=agents)
    trainer = make_trainer(config)
    one, two = trainer.agents
    assert one.tokenizer is not two.tokenizer and len(one.tokenizer) != len(two.tokenizer)
    assert [a.policy.config.model_type for a in trainer.agents] == ["gpt2", "llama"]
    assert [a.learner.optimizer.param_groups[0]["lr"] for a in trainer.agents] == [1e-3, 2e-3]
    folder = trainer.train().folder
    saved = AutoModelForCausalLM.from_pretrained(folder / "agent_2")
    assert saved.config.model_type == "llama"
    assert len(AutoTokenizer.from_pretrained(folder / "agent_2")) == len(two.tokenizer)
    settings = EvaluationConfig(queries=4, output=str(tmp_path / "evaluation"), device="cpu")
    done = evaluate([folder], trainer.task, settings)
    rows = {row["name"]: row for row in done.rows}
    untrained = [
        "base of run/agent_2 after base of agent_1",
        "base of run/agent_1 after base of agent_2",
    ]
    assert list(rows) == ["base", "run/agent_1", "base of run/agent_2", "run/agent_2", "base after itself", *untrained,
                          "run/agent_2 after agent_1", "run/agent_1 after agent_2"]  # fmt: skip
    assert all(row["kl"] >= 0 for row in rows.values())
    assert all(rows[name]["kl"] == 0 for name in ("base of run/agent_2", *untrained))
    # In the untrained pair, too, the second model reads the first one's response.
    records = read_responses(done.folder)
    for name, first in zip(untrained, ("base", "base of run/agent_2"), strict=True):
        prompt = records[name, 0]["prompt"]
        query, (response, *_) = records[first, 0]["prompt"], records[first, 0]["completions"]
        assert prompt == f'Improve "{query}{response}": {query}'


def test_agents_with_the_same_model_share_its_reference(config, llama_folder):
    agents = [{}, {"model": {"name": str(llama_folder)}}, {"learning_rate": 5e-4}]
    config = replace(config, cory=CoryConfig(num_agents=3))
    references = [a.learner.reference for a in make_agents(replace(config, agents=agents))]
    assert references[0] is references[2] is not references[1]
    lora = make_agents(replace(config, agents=agents, lora=LoraConfig(rank=2)))
    assert lora[0].policy is lora[2].policy is not lora[1].policy
    mixed = replace(config, cory=CoryConfig(), agents=[{}, {"lora": {"rank": 2}}])
    full, adapted = make_agents(mixed)
    assert adapted.learner.reference is None
    for model in (full.learner.reference, full.policy):
        assert not any("lora" in name for name, _ in model.named_parameters())
