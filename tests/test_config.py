"""Settings: the configuration files, settings of single agents, and errors that name the key."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from cory.command import load, read_config
from cory.config import (
    AgentConfig,
    Config,
    CoryConfig,
    LoraConfig,
    ModelConfig,
    PPOConfig,
    SamplingConfig,
)
from cory.errors import UserError
from cory.models.load import quantization
from cory.models.lora import add_adapter
from cory.roles import RolePrompts
from cory.settings import as_config
from gsm8k_train.config import Gsm8kConfig
from imdb_train.config import ImdbConfig

KINDS = {"imdb": ImdbConfig, "gsm8k": Gsm8kConfig}
FILES = sorted(path for kind in KINDS for path in (ROOT / "configs" / kind).glob("*.yaml"))
MODELS = {
    "openai-community/gpt2": GPT2Config,
    "openai-community/gpt2-large": GPT2Config,
    "openai-community/gpt2-xl": GPT2Config,
    "meta-llama/Llama-2-7b-chat-hf": LlamaConfig,
    "meta-llama/Llama-2-13b-chat-hf": LlamaConfig,
    "HuggingFaceTB/SmolLM2-135M-Instruct": LlamaConfig,
    "Qwen/Qwen2.5-0.5B-Instruct": Qwen2Config,
    "Qwen/Qwen3-0.6B": Qwen3Config,
}


def flat(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict) and value and key != "chat_template":
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@pytest.mark.parametrize("file", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_configuration_file_is_minimal_and_valid(file):
    kind = KINDS[file.parent.name]
    # The file states only differences from the defaults.
    defaults = dict(flat(asdict(kind())))
    stated = dict(flat(yaml.safe_load(file.read_text())))
    assert [key for key, value in stated.items() if defaults[key] == value] == []

    # CORY and PPO differ only in the number of agents.
    config = load(kind, None, ["--config", str(file)])
    cory = dict(flat(asdict(config)))
    ppo = dict(flat(asdict(load(kind, None, ["--config", str(file)], single_agent=True))))
    assert {key for key in cory if cory[key] != ppo[key]} == {"cory.num_agents"}
    assert (cory["cory.num_agents"], ppo["cory.num_agents"]) == (2, 1)

    # Both roles read the query, and the observer also reads the pioneer's response.
    prompts = RolePrompts(config.task.pioneer_prompt, config.task.observer_prompt)
    assert "Q1" in prompts.render(0, {"prompt": "Q1"}, None)
    observed = prompts.render(1, {"prompt": "Q1"}, ["R1"])
    assert "Q1" in observed and "R1" in observed

    assert config.model.name in (*MODELS, "tiny")
    if config.lora.rank:  # the default target modules exist in every layer
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
        model = AutoModelForCausalLM.from_config(MODELS[config.model.name](vocab_size=320, **sizes))
        adapted = add_adapter(model, "agent_1", LoraConfig(rank=config.lora.rank))
        weights = [name for name, _ in adapted.named_parameters() if "lora_A" in name]
        assert all(any(f".{layer}." in name for name in weights) for layer in range(2))
    if config.model.quantization != "none":
        pytest.importorskip("bitsandbytes")
        options = quantization(config.model, torch.device("cuda"))
        assert options["quantization_config"].load_in_4bit
        assert options["device_map"] == {"": torch.device("cuda")}


TABLE_1 = {
    "iterations": 100, "cory.exchange_period": 5, "ppo.learning_rate": 1.41e-5, "ppo.ppo_epochs": 4,
    "ppo.batch_size": 256, "ppo.mini_batch_size": 256, "ppo.gradient_accumulation_steps": 1,
    "ppo.init_kl_coef": 0.3, "ppo.gamma": 1.0, "ppo.lam": 0.95, "ppo.cliprange": 0.2,
    "ppo.cliprange_value": 0.2, "ppo.vf_coef": 0.1, "ppo.kl_penalty": "full",
    "task.min_query_tokens": 2, "task.max_query_tokens": 8,
}  # fmt: skip
TABLE_2 = {key: value for key, value in TABLE_1.items() if key.startswith("ppo.")} | {
    "iterations": 100, "ppo.learning_rate": 1e-5, "ppo.batch_size": 32, "ppo.mini_batch_size": 2,
    "ppo.gradient_accumulation_steps": 16, "ppo.init_kl_coef": 0.01,
    "model.quantization": "4bit", "sampling.stop": ["Question:"],
}  # fmt: skip
FASTER = {"ppo.learning_rate": 1e-4}


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        *((f"imdb/{name}", TABLE_1) for name in ("gpt2", "gpt2_large", "gpt2_xl")),
        *((f"gsm8k/llama2_{size}", TABLE_2) for size in ("7b", "13b")),
        *((f"gsm8k/llama2_{size}_lr1e-4", TABLE_2 | FASTER) for size in ("7b", "13b")),
        (
            "imdb/published_code",
            {"iterations": 97, "cory.reset_every": 5, "cory.exchange_period": 5, "task.min_chars": 100,
             "ppo.reward_scaling": True, "ppo.reward_normalization": True, "ppo.init_kl_coef": 0.4,
             "sampling.repetition_penalty": 1.1, "sampling.min_new_tokens": 4, "sampling.max_new_tokens": 15},
        ),
        (
            "gsm8k/published_code",
            {"ppo.ppo_epochs": 1, "ppo.learning_rate": 1e-4, "ppo.init_kl_coef": 0.1, "ppo.adaptive_kl": False,
             "sampling.top_k": 10, "sampling.top_p": 0.7, "sampling.repetition_penalty": 1.1},
        ),
    ],
)  # fmt: skip
def test_settings_of_the_paper_and_of_its_published_code(file, expected):
    config = load(KINDS[file.split("/")[0]], ROOT / f"configs/{file}.yaml", [])
    settings = dict(flat(asdict(config)))
    assert {key: settings[key] for key in expected} == expected


def test_ppo_trains_only_the_first_agent_whatever_the_file_says(tmp_path):
    path = tmp_path / "three.yaml"
    path.write_text(
        "cory: {num_agents: 2, chain_length: 3}\nagents: [{learning_rate: 0.5}, {learning_rate: 0.25}]\n"
        "roles: [{name: writer}, {name: critic}, {}]\n"
    )
    argv = ["--config", str(path)]
    config, name = read_config(ImdbConfig, None, "imdb_ppo", single_agent=True, argv=argv)
    assert (config.cory.num_agents, config.cory.num_roles, config.branches) == (1, 1, 1)
    assert config.agents == [AgentConfig(learning_rate=0.5)]
    assert [role.name for role in config.roles] == ["writer"]
    assert name == "imdb_ppo_three"
    config, name = read_config(ImdbConfig, None, "imdb_cory", argv=argv)
    assert (config.cory.num_agents, config.cory.num_roles) == (2, 3)
    assert [role.name for role in config.roles] == ["writer", "critic", None]
    assert name == "imdb_cory_three"
    for key in ("cory.num_agents", "cory.chain_length", "branches"):
        with pytest.raises(UserError, match=f"^{key}: "):
            load(ImdbConfig, None, [f"--{key}=2"], single_agent=True)


def test_an_entry_of_agents_changes_only_that_agents_settings():
    model = ModelConfig("policy", revision="v1", dtype="bfloat16")
    entries = [{"learning_rate": 0.5}, {"model": {"name": "partner"}, "trained": False}]
    config = Config(model=model, lora=LoraConfig(rank=4), agents=entries)
    config.check()

    first = config.of_agent(0)
    assert (first.ppo.learning_rate, first.model, first.lora.rank) == (0.5, model, 4)
    second = config.of_agent(1)
    assert second.model == ModelConfig("partner", revision=None, dtype="bfloat16")
    assert (second.ppo.learning_rate, second.lora.rank) == (config.ppo.learning_rate, 0)
    assert config.model == model and config.lora.rank == 4
    # An agent keeps the common revision only if it names the same model.
    config.agents = [AgentConfig(model={"name": "policy"}), AgentConfig()]
    assert config.of_agent(0).model == model

    # A run's config.yaml stores agents in this form.
    assert replace(config, agents=asdict(config)["agents"]) == config
    # Agents on a quantized base may each have an adapter.
    entries = [{"lora": {"rank": 8}}, {"lora": {"rank": 8}}]
    Config(model=ModelConfig("policy", quantization="4bit"), agents=entries).check()


@pytest.mark.parametrize(
    ("algorithm", "chains"),
    [
        ("ppo", 1),
        ("reinforce", 1),
        ("grpo", 4),
        ("dr_grpo", 4),
        ("dapo", 4),
        ("gspo", 4),
        ("rloo", 4),
    ],
)
def test_group_size_auto_fits_the_algorithm(algorithm, chains):
    """With `auto`, `--algorithm` needs no further flag. A run's config.yaml keeps the value `auto`."""
    flag = ["--algorithm", algorithm]
    config = load(ImdbConfig, FILES[-1], flag)
    assert config.chains_per_query == chains
    assert as_config(ImdbConfig, asdict(config), Path("config.yaml")) == config
    assert load(ImdbConfig, FILES[-1], [*flag, "--group_size", "2"]).chains_per_query == 2


def test_a_value_is_checked_when_it_is_assigned():
    config = ImdbConfig()
    for assign, key in (
        (lambda: setattr(config.ppo, "batch_size", 1), "ppo.batch_size"),
        (lambda: setattr(config.ppo, "batch_size", True), "ppo.batch_size"),
        (lambda: setattr(config.ppo, "batch_sise", 8), "ppo.batch_sise"),
        (lambda: setattr(config, "ppo", {"batch_size": 8}), "ppo"),
        (lambda: replace(config.ppo, lam=2.0), "ppo.lam"),
        (lambda: PPOConfig(micro_batch="all"), "ppo.micro_batch"),
        (lambda: PPOConfig(-1.0), "ppo.learning_rate"),
        (lambda: Config(agents=[{"init_kl_coef": -0.1}, {}]), "agents.0.init_kl_coef"),
        (lambda: Config(roles=[{"nam": "poet"}]), "roles.0.nam"),
        (lambda: Config(roles=[{"max_new_tokens": 0}, {}]), "roles.0.max_new_tokens"),
        (lambda: Config(roles=[{"stop": [""]}, {}]), "roles.0.stop"),
        (lambda: Config(branches=0), "branches"),
    ):
        with pytest.raises(UserError) as error:
            assign()
        assert str(error.value).startswith(f"{key}") and "\n" not in str(error.value)
    assert config == ImdbConfig()


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("agents", {"agents": [{}]}),
        ("agents", {"agents": [{"trained": False}] * 2}),
        ("agents.1.learning_rate", {"agents": [{}, {"trained": False, "learning_rate": 1e-5}]}),
        ("agents.1.lora", {"agents": [{}, {"trained": False, "lora": {"rank": 2}}]}),
        ("agents.1.device", {"agents": [{"device": "cpu"}, {}]}),
        ("agents.1.trained", {"agents": [{}, {"trained": False}], "sampling": SamplingConfig(engine="vllm")}),
        ("roles", {"roles": [{}]}),
        ("roles.1.name", {"roles": [{"name": "observer"}, {}]}),
        ("roles.0.name", {"roles": [{"name": "responses"}, {}]}),
        ("roles.0.name", {"roles": [{"name": "the writer"}, {}]}),
        ("roles.1.prompt", {"roles": [{}, {"prompt": "{prompt}"}], "cory": CoryConfig(knowledge_transfer=False)}),
        ("ppo.batch_size", {"branches": 4, "group_size": 4}),
        ("branches", {"branches": 2, "cory": CoryConfig(num_agents=3)}),
        ("branches", {"branches": 8}),
        ("branches", {"branches": 4, "ppo": PPOConfig(batch_size=8, mini_batch_size=1, gradient_accumulation_steps=4)}),
        ("model.quantization", {"model": ModelConfig("x", quantization="4bit")}),
        ("agents.1.model.quantization",
         {"model": ModelConfig("x", quantization="4bit"), "agents": [{"lora": {"rank": 8}}, {}]}),
    ],
)  # fmt: skip
def test_incompatible_settings_are_refused_by_their_key(config, key, changes):
    with pytest.raises(UserError) as error:
        replace(config, **changes).check()
    assert str(error.value).startswith(f"{key}: ")
