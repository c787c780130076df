"""Configuration files and flags."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from cory.command import as_config, load, read_config
from cory.config import AgentConfig, Config, LoraConfig, ModelConfig, PPOConfig, keys
from cory.errors import UserError
from cory.own_task import OwnConfig
from gsm8k_train.config import Gsm8kConfig
from imdb_train.config import ImdbConfig

CONFIGS = sorted((ROOT / "configs/imdb").glob("*.yaml"))
GSM8K_CONFIGS = sorted((ROOT / "configs/gsm8k").glob("*.yaml"))
TABLE_1 = {
    "learning_rate": 1.41e-5, "ppo_epochs": 4, "batch_size": 256, "mini_batch_size": 256,
    "gradient_accumulation_steps": 1, "init_kl_coef": 0.3, "gamma": 1.0, "lam": 0.95, "cliprange": 0.2,
    "cliprange_value": 0.2, "vf_coef": 0.1,
}  # fmt: skip
SCRIPTS = ("imdb_train/cory.py", "imdb_train/ppo.py", "gsm8k_train/cory.py", "gsm8k_train/ppo.py")


def flat(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict) and value and key != "chat_template":
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@pytest.fixture
def printed(command):
    """The settings that a script prints, flat."""

    def run(script: str, *flags: str) -> dict:
        status, out, error = command(ROOT / script, *flags, "--print_config")
        assert status == 0, error
        return dict(flat(yaml.safe_load(out)))

    return run


@pytest.mark.parametrize("script", SCRIPTS)
def test_mistakes_are_found_before_settings_are_printed(script, command):
    for flags, message in (
        (["--ppo.learning_rat", "3"], "ppo.learning_rat: "),
        (["--ppo.reward_normalization"], "ppo.reward_normalization: "),
    ):
        status, out, error = command(ROOT / script, "--print_config", *flags)
        assert (status, out) == (2, "") and message in error


@pytest.mark.parametrize(
    "path", CONFIGS + GSM8K_CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_shipped_configs_state_only_what_differs_from_the_defaults(path):
    config_class = ImdbConfig if path in CONFIGS else Gsm8kConfig
    defaults = dict(flat(asdict(config_class())))
    stated = dict(flat(yaml.safe_load(path.read_text())))
    assert [key for key, value in stated.items() if defaults[key] == value] == []


@pytest.mark.parametrize(
    "path", CONFIGS + GSM8K_CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_both_scripts_read_a_file_and_differ_in_the_number_of_agents_alone(path, printed):
    folder = f"{path.parent.name}_train"
    cory, ppo = (
        printed(f"{folder}/{script}.py", "--config", str(path)) for script in ("cory", "ppo")
    )
    assert {key: (cory[key], ppo[key]) for key in cory if cory[key] != ppo[key]} == {
        "cory.num_agents": (2, 1)
    }


@pytest.mark.parametrize(
    "name", ["llama2_7b", "llama2_13b", "llama2_7b_lr1e-4", "llama2_13b_lr1e-4"]
)
def test_llama_configs_have_the_values_of_table_2(name):
    config = load(Gsm8kConfig, ROOT / f"configs/gsm8k/{name}.yaml", [])
    expected = TABLE_1 | {
        "learning_rate": 1e-4 if name.endswith("_lr1e-4") else 1e-5, "batch_size": 32, "mini_batch_size": 2,
        "gradient_accumulation_steps": 16, "init_kl_coef": 0.01,
    }  # fmt: skip
    assert {key: getattr(config.ppo, key) for key in expected} == expected
    assert config.model.quantization == "4bit" and config.lora.rank > 0
    assert config.iterations == 100 and config.sampling.stop == ["Question:"]


@pytest.mark.parametrize("name", ["gpt2", "gpt2_large", "gpt2_xl"])
def test_paper_configs_have_the_values_of_table_1(name):
    config = load(ImdbConfig, ROOT / f"configs/imdb/{name}.yaml", [])
    assert {key: getattr(config.ppo, key) for key in TABLE_1} == TABLE_1
    assert config.iterations == 100 and config.ppo.kl_penalty == "full"
    assert config.cory.exchange_period == 5
    assert (config.task.min_query_tokens, config.task.max_query_tokens) == (2, 8)


def test_published_code_has_the_values_of_the_authors_code():
    config = load(ImdbConfig, ROOT / "configs/imdb/published_code.yaml", [])
    assert (
        config.cory.reset_every == config.cory.exchange_period == 5
        and config.ppo.reward_scaling
        and config.ppo.reward_normalization
    )
    assert config.ppo.init_kl_coef == 0.4 and config.sampling.repetition_penalty == 1.1
    assert (config.sampling.min_new_tokens, config.sampling.max_new_tokens) == (4, 15)
    assert config.iterations == 97 and config.task.min_chars == 100


def test_published_utilities_have_their_values():
    config = load(Gsm8kConfig, ROOT / "configs/gsm8k/published_code.yaml", [])
    ppo, sampling = config.ppo, config.sampling
    assert (ppo.ppo_epochs, ppo.learning_rate, ppo.init_kl_coef, ppo.adaptive_kl) == (
        1,
        1e-4,
        0.1,
        False,
    )
    assert (sampling.top_k, sampling.top_p, sampling.repetition_penalty) == (10, 0.7, 1.1)
    assert config.task.observer_prompt.endswith(
        "Question: {prompt}\nReference: {response}\nAnswer:"
    )
    llama = load(Gsm8kConfig, ROOT / "configs/gsm8k/llama2_7b.yaml", [])
    assert (
        config.task.pioneer_prompt.split() == llama.task.pioneer_prompt.split()
        and config.model == llama.model
    )


def test_flags_override_the_file():
    path = ROOT / "configs/imdb/tiny.yaml"
    config = load(
        ImdbConfig,
        CONFIGS[0],
        ["--config", str(path), "--ppo.batch_size", "128", "--task.split", "test"],
    )
    assert (config.ppo.batch_size, config.task.split, config.ppo.learning_rate) == (
        128,
        "test",
        1e-4,
    )


def test_ppo_trains_the_first_agent_alone_whatever_the_file_says(tmp_path):
    path = tmp_path / "three.yaml"
    path.write_text(
        "cory: {num_agents: 2, chain_length: 3}\nagents: [{learning_rate: 0.5}, {learning_rate: 0.25}]\n"
    )
    argv = ["--config", str(path)]
    config, name = read_config(ImdbConfig, None, "imdb_ppo", single_agent=True, argv=argv)
    assert (config.cory.num_agents, config.cory.num_roles) == (1, 1)
    assert config.agents == [AgentConfig(learning_rate=0.5)]
    assert name == "imdb_ppo_three"
    config, name = read_config(ImdbConfig, None, "imdb_cory", argv=argv)
    assert (config.cory.num_agents, config.cory.num_roles) == (2, 3)
    assert name == "imdb_cory_three"


@pytest.mark.parametrize("key", ["cory.num_agents", "cory.chain_length", "branches"])
def test_ppo_scripts_refuse_a_second_agent_or_role(key, command):
    for flags in ([f"--{key}", "2"], [f"--{key}=2"]):
        status, out, error = command(ROOT / "imdb_train/ppo.py", *flags)
        assert (status, out) == (2, "") and error.startswith(f"error: {key}: ")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_complete_file_is_read_by_the_script_that_printed_it(script, tmp_path, printed):
    """As config.yaml of a run is."""
    settings = printed(script, "--seed", "3")
    task, name = script.removesuffix(".py").split("_train/")
    config = load(
        {"imdb": ImdbConfig, "gsm8k": Gsm8kConfig}[task],
        ROOT / f"configs/{task}/tiny.yaml",
        ["--seed", "3"],
        single_agent=name == "ppo",
    )
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(asdict(config) | {"versions": {}, "fingerprint": None}))
    assert printed(script, "--config", str(path)) | {
        "versions": {},
        "fingerprint": None,
    } == settings | {
        "versions": {},
        "fingerprint": None,
    }


def test_entries_of_agents_and_roles_are_printed(printed):
    settings = printed(
        "imdb_train/cory.py",
        "--agents=[{}, {trained: false, model: {name: partner}}]",
        "--roles=[{name: writer}, {stop: [end]}]",
    )
    assert settings["agents"][1]["model"] == {"name": "partner"}
    assert [agent["trained"] for agent in settings["agents"]] == [True, False]
    assert [role["name"] for role in settings["roles"]] == ["writer", None]
    assert settings["roles"][1]["stop"] == ["end"]


def test_texts_of_roles_that_look_like_yaml_stay_texts(tmp_path):
    prompts = ["Question: {prompt}\nAnswer:", "12", "[{prompt}]"]
    path = tmp_path / "roles.yaml"
    settings = {"cory": {"num_agents": 3}, "roles": [{"prompt": text} for text in prompts]}
    path.write_text(yaml.safe_dump(settings))
    config = load(OwnConfig, path, [])
    assert [role.prompt for role in config.roles] == prompts
    entries = f"--roles={json.dumps(settings['roles'])}"
    config = load(OwnConfig, path, ["--cory.num_agents=3", entries])
    assert [role.prompt for role in config.roles] == prompts


def test_an_entry_of_agents_changes_the_settings_of_that_agent_alone():
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
    # Another name has no revision of the common one; the same name has.
    config.agents = [AgentConfig(model={"name": "policy"}), AgentConfig()]
    assert config.of_agent(0).model == model

    # As config.yaml of a run has it.
    assert replace(config, agents=asdict(config)["agents"]) == config


def test_a_value_is_checked_where_it_is_assigned():
    config = ImdbConfig()
    for assign, key in (
        (lambda: setattr(config.ppo, "batch_size", 0), "ppo.batch_size"),
        (lambda: setattr(config.ppo, "batch_size", True), "ppo.batch_size"),
        (lambda: setattr(config.ppo, "batch_sise", 8), "ppo.batch_sise"),
        (lambda: setattr(config, "ppo", {"batch_size": 8}), "ppo"),
        (lambda: replace(config.ppo, lam=2.0), "ppo.lam"),
        (lambda: PPOConfig(micro_batch="all"), "ppo.micro_batch"),
        (lambda: PPOConfig(-1.0), "ppo.learning_rate"),
        (lambda: setattr(config.cory, "weight", math.inf), "cory.weight"),
        (lambda: Config(agents=[{}, {"learning_rate": "fast"}]), "agents.1.learning_rate"),
        (lambda: Config(roles=[{"nam": "poet"}]), "roles.0.nam"),
    ):
        with pytest.raises(UserError) as error:
            assign()
        assert str(error.value).startswith(f"{key}: ") and "\n" not in str(error.value)
    assert config == ImdbConfig()


def test_keys_may_be_assigned_one_after_the_other_and_are_checked_together():
    config = ImdbConfig()
    config.ppo.mini_batch_size = 512  # more than the batch, until that is assigned, too
    with pytest.raises(UserError, match=r"ppo.batch_size: expected a multiple of mini_batch_size"):
        config.check()
    config.ppo.batch_size = 512
    config.check()


def test_quantized_agents_may_have_adapters_of_their_own():
    model = ModelConfig("policy", quantization="4bit")
    config = Config(model=model, agents=[{"lora": {"rank": 8}}, {"lora": {"rank": 8}}])
    config.check()
    config.agents = [AgentConfig(lora={"rank": 8}), AgentConfig()]
    with pytest.raises(UserError, match=r"agents\.1\.model.quantization: expected lora.rank above"):
        config.check()


def test_print_config_prints_every_key(printed):
    assert set(printed("imdb_train/cory.py")) == set(keys(ImdbConfig))


@pytest.mark.parametrize(
    ("algorithm", "chains"),
    [("ppo", 1), ("reinforce", 1), ("grpo", 4), ("dr_grpo", 4), ("rloo", 4)],
)
def test_a_learner_that_compares_a_group_needs_no_further_flag(algorithm, chains):
    """Of a whole file, too, as a run's config.yaml is: it says `auto`, as the command line did."""
    config = load(ImdbConfig, CONFIGS[0], ["--algorithm", algorithm])
    assert config.chains_per_query == chains
    assert as_config(ImdbConfig, asdict(config), Path("config.yaml")) == config
    assert (
        load(
            ImdbConfig, CONFIGS[0], ["--algorithm", algorithm, "--group_size", "2"]
        ).chains_per_query
        == 2
    )
