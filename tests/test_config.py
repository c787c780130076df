"""Configuration files and flags."""

import json
import math
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from cory.cli.load import as_config, load, read_command_line
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
        (["--ppo.learning_rat", "3"], "unknown key 'ppo.learning_rat'"),
        (["--ppo.reward_normalization"], "ppo.reward_normalization: expected ppo.reward_scaling"),
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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--ppo.batch_sise", "3"],
            r"unknown key 'ppo.batch_sise'.*Did you mean 'ppo.batch_size'\?",
        ),
        (["--iteration_s", "3"], "Did you mean 'iterations'"),
        (["--ppo.learning_rat", "3"], "Did you mean 'ppo.learning_rate'"),  # no abbreviations
        (["--ppo.batch_size", "many"], "ppo.batch_size.*many"),
        (
            ["--ppo.batch_size", "0"],
            "ppo.batch_size: expected a number greater than or equal to 2, got 0",
        ),
        (
            ["--ppo.batch_size", "1", "--ppo.mini_batch_size", "1"],
            "ppo.batch_size: expected a number greater than or equal to 2, got 1",
        ),
        (
            ["--ppo.mini_batch_size", "7"],
            "expected a multiple of mini_batch_size.*= 7 \\* 1 = 7, got 256",
        ),
        (
            ["--cory.exchange_period", "-1"],
            "cory.exchange_period: expected a number greater than or equal to 0, got -1",
        ),
        (["--cory.num_agents", "0"], "cory.num_agents: expected a number greater than 0, got 0"),
        (["--ppo.learning_rate=-1e-5"], "ppo.learning_rate: expected a number greater than 0"),
        (["--ppo.learning_rate", "nan"], "ppo.learning_rate.*nan"),
        (["--ppo.lam", "2"], "ppo.lam: expected a number less than or equal to 1, got 2"),
        (["--ppo.kl_penalty", "fool"], "ppo.kl_penalty.*full.*fool"),
        (["--ppo.reward_normalization", "true"], "expected ppo.reward_scaling: true beside it"),
        (
            ["--sampling.max_new_tokens", "2"],
            "sampling.max_new_tokens: expected at least min_new_tokens = 4, got 2",
        ),
        (["--sampling.temperature", "0"], "sampling.temperature: expected a number greater than 0"),
        (["--iterations", "0"], "iterations: expected a number greater than 0, got 0"),
        (["--seed", "-1"], "seed: expected a number greater than or equal to 0, got -1"),
        (
            ["--task.max_query_tokens", "1"],
            "task.max_query_tokens: expected at least min_query_tokens = 2, got 1",
        ),
        (["--tracker", "wand"], "tracker.*wandb.*wand"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--algorithm", "gpro"], "algorithm.*grpo.*gpro"),
        (
            ["--algorithm", "grpo", "--ppo.batch_size", "6", "--ppo.mini_batch_size", "6"],
            "multiple of group_size = 4, got 6",
        ),
        (
            ["--algorithm", "rloo", "--group_size", "1"],
            "group_size: expected at least 2 with algorithm: rloo, got 1",
        ),
        (["--group_size", "0"], "group_size: expected auto or a number greater than 0, got 0"),
        (["--group_size", "3"], "ppo.batch_size: expected a multiple of group_size = 3, got 256"),
        (
            ["--ppo.kl_in", "loss"],
            "ppo.kl_in: expected auto or reward with algorithm: ppo, got 'loss'",
        ),
        (["--ppo.kl_in", "lost"], "ppo.kl_in.*reward.*lost"),
        (
            ["--cory.chain_length", "0"],
            "cory.chain_length: expected a number greater than or equal to 1, got 0",
        ),
        (["--cory.chain_length", "1"], None),
        (
            ["--cory.chain_length", "1", "--cory.exchange", "none"],
            "cory.exchange: expected rotate.*got none and",
        ),
        (
            ["--cory.chain_length", "1", "--cory.exchange_period", "0"],
            "cory.exchange: expected rotate.*and 0",
        ),
        (["--cory.exchange", "turn"], "cory.exchange.*rotate.*turn"),
        (["--cory.credit", "casual"], "cory.credit.*causal.*casual"),
        (
            ["--cory.credit", "counterfactual", "--cory.knowledge_transfer", "false"],
            "cory.credit: expected knowledge_",
        ),
        (["--cory.reset_every", "-1"], "cory.reset_every: expected a number .* got -1"),
        (["--cory.weight", ".inf"], "cory.weight: expected a finite number, got inf"),
        (["--cory.other_coef", "1"], "unknown key 'cory.other_coef'"),
        (["--ppo.schedule", "linea"], "ppo.schedule.*linear.*linea"),
        (
            ["--ppo.warmup", "-1"],
            "ppo.warmup: expected a number greater than or equal to 0, got -1",
        ),
        (["--ppo.optimizer_options", "3"], "ppo.optimizer_options.*3"),
        (
            ["--eval_every", "-1"],
            "eval_every: expected a number greater than or equal to 0, got -1",
        ),
        (["--eval_queries", "0"], "eval_queries: expected a number greater than 0, got 0"),
        (
            ["--ppo.batch_size", "256", "--ppo.mini_batch_size", "256", "--ppo.kl_horizon", "10"],
            "ppo.kl_horizon: expected more than 0.2 \\* ppo.batch_size = 51.2, .* got 10",
        ),
        (
            ["--agents", "[{}]"],
            "agents: expected an empty list, or an entry for each of 2 agents, got 1",
        ),
        (
            ["--agents", "[{}, {modle: {}}]"],
            r"agents\[1\]: unknown key 'modle'. Did you mean 'model'\?",
        ),
        (["--agents", "3"], "agents.*3"),
        (["--seed="], "seed: expected an integer, got ''"),
    ],
)
def test_bad_values_are_named(argv, message):
    if message is None:  # good, beside its bad neighbours
        load(ImdbConfig, ROOT / "configs/imdb/gpt2.yaml", argv)
        return
    with pytest.raises(UserError, match=message):
        load(ImdbConfig, ROOT / "configs/imdb/gpt2.yaml", argv)


def test_warmup_ends_within_the_run():
    with pytest.raises(UserError, match=r"ppo.warmup: expected fewer than iterations = 5, got 5"):
        load(ImdbConfig, CONFIGS[0], ["--iterations", "5", "--ppo.warmup", "5"])


def test_ppo_trains_the_first_agent_alone_whatever_the_file_says(tmp_path):
    path = tmp_path / "three.yaml"
    path.write_text(
        "cory: {num_agents: 2, chain_length: 3}\nagents: [{learning_rate: 0.5}, {learning_rate: 0.25}]\n"
    )
    argv = ["--config", str(path)]
    line = read_command_line(ImdbConfig, None, argv, prefix="imdb_ppo", single_agent=True)
    config = line.config
    assert (config.cory.num_agents, config.cory.num_roles) == (1, 1)
    assert config.agents == [AgentConfig(learning_rate=0.5)]
    assert (line.setting, line.changed) == ("imdb_ppo_three", {})
    line = read_command_line(ImdbConfig, None, argv, prefix="imdb_cory")
    config = line.config
    assert (config.cory.num_agents, config.cory.num_roles) == (2, 3)
    assert line.setting == "imdb_cory_three"


@pytest.mark.parametrize("key", ["cory.num_agents", "cory.chain_length", "branches"])
def test_ppo_scripts_refuse_a_second_agent_or_role(key, command):
    for flags in ([f"--{key}", "2"], [f"--{key}=2"]):
        status, out, error = command(ROOT / "imdb_train/ppo.py", *flags)
        assert status == 2 and "Loading" not in out
        assert f"{key}: expected 1, as this script trains a single agent, got 2" in error


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


def test_entries_of_agents_and_roles_are_printed_as_they_are_written(printed):
    settings = printed(
        "imdb_train/cory.py",
        "--agents=[{}, {trained: false, model: {name: partner}}]",
        "--roles=[{name: writer}, {stop: [end]}]",
    )
    assert settings["agents"] == [{}, {"trained": False, "model": {"name": "partner"}}]
    assert settings["roles"] == [{"name": "writer"}, {"stop": ["end"]}]


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
    for assign, message in (
        (
            lambda: setattr(config.ppo, "batch_size", 0),
            "ppo.batch_size: expected a number greater than or equal to 2, got 0",
        ),
        (
            lambda: setattr(config.ppo, "batch_size", True),
            "ppo.batch_size: expected a valid integer, got True",
        ),
        (
            lambda: setattr(config.ppo, "batch_sise", 8),
            "ppo: unknown key 'batch_sise'. Did you mean 'batch_size'?",
        ),
        (
            lambda: setattr(config, "ppo", {"batch_size": 8}),
            "ppo: expected an instance of PPOConfig, got {'batch_size': 8}",
        ),
        (
            lambda: replace(config.ppo, lam=2.0),
            "ppo.lam: expected a number less than or equal to 1, got 2.0",
        ),
        (
            lambda: PPOConfig(micro_batch="all"),
            "ppo.micro_batch: expected a valid integer or 'auto', got 'all'",
        ),
        (
            lambda: setattr(config.cory, "weight", math.inf),
            "cory.weight: expected a finite number, got inf",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            assign()
    assert config == ImdbConfig()


def test_keys_may_be_assigned_one_after_the_other_and_are_checked_together():
    config = ImdbConfig()
    config.ppo.mini_batch_size = 512  # more than the batch, until that is assigned, too
    with pytest.raises(UserError, match=r"ppo.batch_size: expected a multiple of mini_batch_size"):
        config.check()
    config.ppo.batch_size = 512
    config.check()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ppo:\n  batch_sise: 3\n", "unknown key 'ppo.batch_sise'.*Did you mean 'ppo.batch_size'"),
        ("itertions: 3\n", "Did you mean 'iterations'"),
        ("ppo: [1\n", "bad.yaml"),
        (
            "ppo: {gamma: 0.5}\nseed: 1\nppo:\n  batch_size: 8\n",
            "bad.yaml: expected each key once, got 'ppo' again in line 3",
        ),
        ("roles:\n- {name: a, prompt: b, name: c}\n", "got 'name' again in line 2"),
        ("seed: &x [*x]\n", "bad.yaml"),
        ("? [a, b]\n: 1\n", "bad.yaml"),
        ("ppo: null\n", r"bad.yaml: ppo: expected a block of settings, got None"),
        ("task: 3\n", r"bad.yaml: task: expected a block of settings, got 3"),
        ("seed: null\n", r"bad.yaml: seed: expected a valid integer, got None"),
        ("seed: !!python/object/apply:os.system ['touch pwned']\n", "bad.yaml"),
    ],
)
def test_bad_files_are_named(tmp_path, text, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load(ImdbConfig, CONFIGS[0], ["--config", str(tmp_path / "bad.yaml")])
    assert not (tmp_path / "pwned").exists()


def test_the_file_with_the_bad_value_is_named(tmp_path):
    for name, seed in (("bad.yaml", "x"), ("good.yaml", "3")):
        (tmp_path / name).write_text(f"seed: {seed}\n")
    files = ["--config", str(tmp_path / "bad.yaml"), "--config", str(tmp_path / "good.yaml")]
    with pytest.raises(UserError, match=r"bad\.yaml: seed"):
        load(ImdbConfig, None, files)
    (tmp_path / "bad.yaml").write_text("seed: -1\n")
    with pytest.raises(
        UserError, match=r"bad\.yaml: seed: expected"
    ):  # a flag does not mend a file
        load(ImdbConfig, None, [*files[:2], "--seed", "0"])


def test_quantized_agents_may_have_adapters_of_their_own():
    model = ModelConfig("policy", quantization="4bit")
    config = Config(model=model, agents=[{"lora": {"rank": 8}}, {"lora": {"rank": 8}}])
    config.check()
    config.agents = [AgentConfig(lora={"rank": 8}), AgentConfig()]
    with pytest.raises(
        UserError, match=r"agents\[1\].model.quantization: expected lora.rank above"
    ):
        config.check()


def test_help_names_every_key_and_print_config_prints_them(printed):
    script = "imdb_train/cory.py"
    shown = subprocess.run(
        [sys.executable, str(ROOT / script), "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert all(f"--{key} " in shown for key in keys(ImdbConfig))
    assert "The optimizer's learning rate. (type: float, default: 1.41e-05)" in " ".join(
        shown.split()
    )
    assert set(printed(script)) == set(keys(ImdbConfig))


def test_a_boolean_flag_alone_means_true():
    assert load(ImdbConfig, None, ["--ppo.whiten_rewards", "--iterations", "3"]).ppo.whiten_rewards
    assert not load(ImdbConfig, None, ["--ppo.whiten_rewards", "false"]).ppo.whiten_rewards


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
