"""Configuration files and flags."""

import subprocess
import sys

import pytest
import yaml
from conftest import ROOT

from cory.config import keys
from cory.errors import UserError
from cory.run.settings import load, read_settings
from gsm8k_train.config import Gsm8kConfig
from imdb_train.config import ImdbConfig

CONFIGS = sorted((ROOT / "configs/imdb").glob("*.yaml"))
GSM8K_CONFIGS = sorted((ROOT / "configs/gsm8k").glob("*.yaml"))
TABLE_1 = {
    "learning_rate": 1.41e-5, "ppo_epochs": 4, "batch_size": 256, "mini_batch_size": 256,
    "gradient_accumulation_steps": 1, "init_kl_coef": 0.3, "gamma": 1.0, "lam": 0.95, "cliprange": 0.2,
    "cliprange_value": 0.2, "vf_coef": 0.1,
}  # fmt: skip
METHODS = ("cory", "ppo")
SIZES = ("tiny", "gpt2", "gpt2_large", "gpt2_xl", "smollm2_135m", "smollm2_135m_cpu", "qwen3_0_6b", "qwen3_0_6b_lora")


def flat(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict) and value and key != "chat_template":
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@pytest.mark.parametrize("path", CONFIGS + GSM8K_CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_shipped_configs_are_complete(path):
    config_class = ImdbConfig if path in CONFIGS else Gsm8kConfig
    config, name = load(config_class, path, [])
    assert name == path.stem
    assert {key for key, _ in flat(yaml.safe_load(path.read_text()))} == set(keys(config_class)) - {"cory.other_coef"}
    assert config.cory.num_agents == (1 if name.startswith("ppo") else 2)


def test_shipped_names():
    assert {p.stem for p in CONFIGS} == {f"{m}_{s}" for m in METHODS for s in SIZES} | {"cory_published_code"}


@pytest.mark.parametrize("size", SIZES)
def test_ppo_differs_from_cory_only_in_its_cory_block(size):
    cory, ppo = (yaml.safe_load((ROOT / f"configs/imdb/{m}_{size}.yaml").read_text()) for m in ("cory", "ppo"))
    assert {key for key in cory if cory[key] != ppo[key]} == {"cory"}


@pytest.mark.parametrize("size", ["tiny", "llama2_7b", "llama2_13b", "qwen2_5_0_5b"])
def test_gsm8k_pairs_differ_only_where_table_2_says_so(size):
    assert {p.stem for p in GSM8K_CONFIGS} >= {f"cory_{size}", f"ppo_{size}"}
    cory, ppo = (dict(flat(yaml.safe_load((ROOT / f"configs/gsm8k/{m}_{size}.yaml").read_text()))) for m in METHODS)
    different = {key for key in cory if cory[key] != ppo[key] and not key.startswith("cory.")}
    assert different == ({"ppo.learning_rate"} if size.startswith("llama2") else set())


@pytest.mark.parametrize("name", ["cory_llama2_7b", "ppo_llama2_7b", "cory_llama2_13b", "ppo_llama2_13b"])
def test_llama_configs_have_the_values_of_table_2(name):
    config, _ = load(Gsm8kConfig, ROOT / f"configs/gsm8k/{name}.yaml", [])
    expected = TABLE_1 | {
        "learning_rate": 1e-4 if name.startswith("cory") else 1e-5, "batch_size": 32, "mini_batch_size": 2,
        "gradient_accumulation_steps": 16, "init_kl_coef": 0.01,
    }  # fmt: skip
    assert {key: getattr(config.ppo, key) for key in expected} == expected
    assert config.model.quantization == "4bit" and config.lora.rank > 0 and config.lora.shared_base
    assert config.iterations == 100 and config.sampling.stop == ["Question:"]


@pytest.mark.parametrize("name", ["cory_gpt2", "cory_gpt2_large", "ppo_gpt2_xl"])
def test_paper_configs_have_the_values_of_table_1(name):
    config, _ = load(ImdbConfig, ROOT / f"configs/imdb/{name}.yaml", [])
    assert {key: getattr(config.ppo, key) for key in TABLE_1} == TABLE_1
    assert config.iterations == 100 and config.ppo.kl_penalty == "full"
    assert name.startswith("ppo") or config.cory.exchange_period == 5
    assert (config.task.min_query_tokens, config.task.max_query_tokens) == (2, 8)


def test_published_code_has_the_values_of_the_authors_code():
    config, _ = load(ImdbConfig, ROOT / "configs/imdb/cory_published_code.yaml", [])
    assert config.cory.reset_on_exchange and config.ppo.reward_scaling and config.ppo.reward_normalization
    assert config.ppo.init_kl_coef == 0.4 and config.sampling.repetition_penalty == 1.1
    assert (config.sampling.min_new_tokens, config.sampling.max_new_tokens) == (4, 15)
    assert config.iterations == 97 and config.task.min_chars == 100


def test_published_utilities_have_their_values():
    config, _ = load(Gsm8kConfig, ROOT / "configs/gsm8k/cory_published_code.yaml", [])
    ppo, sampling = config.ppo, config.sampling
    assert (ppo.ppo_epochs, ppo.learning_rate, ppo.init_kl_coef, ppo.adaptive_kl) == (1, 1e-4, 0.1, False)
    assert (sampling.top_k, sampling.top_p, sampling.repetition_penalty) == (10, 0.7, 1.1)
    assert config.task.observer_prompt.endswith("Question: {prompt}\nReference: {response}\nAnswer:")
    llama, _ = load(Gsm8kConfig, ROOT / "configs/gsm8k/cory_llama2_7b.yaml", [])
    assert config.task.pioneer_prompt.split() == llama.task.pioneer_prompt.split() and config.model == llama.model


def test_flags_override_the_file():
    path = ROOT / "configs/imdb/ppo_tiny.yaml"
    config, _ = load(ImdbConfig, CONFIGS[0], ["--config", str(path), "--ppo.batch_size", "128", "--task.split", "test"])
    assert (config.ppo.batch_size, config.task.split, config.cory.num_agents) == (128, "test", 1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ppo.batch_sise", "3"], r"unknown key 'ppo.batch_sise'.*Did you mean 'ppo.batch_size'\?"),
        (["--iteration_s", "3"], "Did you mean 'iterations'"),
        (["--ppo.learning_rat", "3"], "Did you mean 'ppo.learning_rate'"),  # no abbreviations
        (["--ppo.batch_size", "many"], "ppo.batch_size.*many"),
        (["--ppo.batch_size", "0"], "ppo.batch_size: expected a number above 0, got 0"),
        (["--ppo.batch_size", "1", "--ppo.mini_batch_size", "1"], "ppo.batch_size: expected at least 2"),
        (["--ppo.mini_batch_size", "7"], "expected a multiple of mini_batch_size.*= 7 \\* 1 = 7, got 256"),
        (["--cory.exchange_period", "-1"], "cory.exchange_period: expected 0 \\(never\\) or more iterations, got -1"),
        (["--cory.num_agents", "0"], "cory.num_agents: expected at least 1, got 0"),
        (["--ppo.learning_rate=-1e-5"], "ppo.learning_rate: expected a number above 0"),
        (["--ppo.learning_rate", "nan"], "ppo.learning_rate.*nan"),
        (["--ppo.lam", "2"], "ppo.lam: expected a number from 0 to 1, got 2"),
        (["--ppo.kl_penalty", "fool"], "ppo.kl_penalty.*full.*fool"),
        (["--ppo.reward_normalization", "true"], "expected ppo.reward_scaling: true beside it"),
        (["--sampling.max_new_tokens", "2"], "sampling.max_new_tokens: expected at least min_new_tokens = 4, got 2"),
        (["--sampling.temperature", "0"], "sampling.temperature: expected a number above 0"),
        (["--iterations", "0"], "iterations: expected at least 1, got 0"),
        (["--seed", "-1"], "seed: expected a whole number"),
        (["--task.max_query_tokens", "1"], "task.max_query_tokens: expected at least min_query_tokens = 2, got 1"),
        (["--tracker", "wand"], "tracker.*wandb.*wand"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--algorithm", "gpro"], "algorithm.*grpo.*gpro"),
        (["--algorithm", "grpo"], "group_size: expected at least 2 with algorithm: grpo, got 1"),
        (["--algorithm", "rloo", "--group_size", "1"], "group_size: expected at least 2 with algorithm: rloo, got 1"),
        (["--group_size", "0"], "group_size: expected at least 1 with algorithm: ppo, got 0"),
        (["--group_size", "3"], "ppo.batch_size: expected a multiple of group_size = 3, got 256"),
        (["--ppo.kl_in", "loss"], "ppo.kl_in: expected auto or reward with algorithm: ppo, got 'loss'"),
        (["--ppo.kl_in", "lost"], "ppo.kl_in.*reward.*lost"),
        (["--cory.chain_length", "0"], r"cory.chain_length: expected null \(as many as agents\) or at least 1, got 0"),
        (["--cory.chain_length", "1"], None),
        (
            ["--cory.chain_length", "1", "--cory.exchange", "none"],
            "cory.exchange: expected rotate or shuffle.*got none and",
        ),
        (
            ["--cory.chain_length", "1", "--cory.exchange_period", "0"],
            "cory.exchange: expected rotate or shuffle.*and 0",
        ),
        (["--cory.exchange", "turn"], "cory.exchange.*rotate.*turn"),
        (["--cory.credit", "casual"], "cory.credit.*causal.*casual"),
        (["--cory.credit", "counterfactual", "--cory.knowledge_transfer", "false"], "cory.credit: expected knowledge_"),
        (["--cory.weight", ".inf"], "cory.weight: expected a finite number, got inf"),
        (["--cory.other_coef", ".nan"], "cory.weight: expected a finite number, got nan"),
        (["--ppo.schedule", "linea"], "ppo.schedule.*linear.*linea"),
        (["--ppo.warmup", "-1"], r"ppo.warmup: expected 0 \(none\) or more iterations, got -1"),
        (["--ppo.optimizer_options", "3"], "ppo.optimizer_options.*3"),
        (["--eval_every", "-1"], r"eval_every: expected 0 \(never\) or more iterations, got -1"),
        (["--eval_queries", "0"], "eval_queries: expected at least 1, got 0"),
        (
            ["--eval_every", "3", "--checkpoint.best", "eval_task_reward"],
            "checkpoint.save_every: expected a multiple of eval_every = 3 with checkpoint.best: .*, got 10",
        ),
        (["--agents", "[{}]"], r"agents: expected an empty list, or an entry for each of 2 agents, got \[{}\]"),
        (["--agents", "[{}, {modle: {}}]"], r"agents\[1\]: expected model, lora or learning_rate, got 'modle'"),
        (["--agents", "3"], "agents.*3"),
    ],
)
def test_bad_values_are_named(argv, message):
    if message is None:  # good, beside its bad neighbours
        load(ImdbConfig, ROOT / "configs/imdb/cory_gpt2.yaml", argv)
        return
    with pytest.raises(UserError, match=message):
        load(ImdbConfig, ROOT / "configs/imdb/cory_gpt2.yaml", argv)


def test_the_old_name_of_the_weight_is_read():
    config, _ = load(ImdbConfig, ROOT / "configs/imdb/cory_gpt2.yaml", ["--cory.other_coef", "0.5"])
    assert (config.cory.weight, config.cory.other_coef) == (0.5, None)


def test_flags_win_over_the_old_name_in_a_file(tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text("cory: {other_coef: 1.0}\n")

    def weight(*flags):
        return load(ImdbConfig, CONFIGS[0], [*flags])[0].cory.weight

    old = ["--config", str(path)]
    assert [weight(*old), weight(*old, "--cory.weight=0"), weight(*old, "--cory.other_coef=-1")] == [1.0, 0.0, -1.0]
    path.write_text("cory: {other_coef: 0.0}\n")
    assert [weight(f"--config={path}"), weight(f"--config={path}", "--cory.weight=1")] == [0.0, 1.0]


def test_warmup_ends_within_the_run():
    with pytest.raises(UserError, match=r"ppo.warmup: expected fewer than iterations = 5, got 5"):
        load(ImdbConfig, CONFIGS[0], ["--iterations", "5", "--ppo.warmup", "5"])


def test_ppo_scripts_refuse_two_agents_before_anything_is_loaded():
    command = [sys.executable, str(ROOT / "imdb_train/ppo.py"), "--config", str(ROOT / "configs/imdb/cory_tiny.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "cory.num_agents: expected 1 for PPO's script, got 2" in done.stderr
    assert "Loading" not in done.stdout


def test_a_run_of_an_earlier_version_is_read_as_it_was_made(tmp_path):
    old = {"seed": 1, "cory": {"num_agents": 2, "other_coef": 0.5, "exchange_period": 5}, "ppo": {"gamma": 0.9}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
    read = read_settings(tmp_path)
    assert read["cory"]["weight"] == 0.5 and read["cory"]["credit"] == "collective" and read["algorithm"] == "ppo"
    assert read["ppo"]["gamma"] == 0.9 and read["ppo"]["optimizer"] == "Adam" and read["seed"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ppo:\n  batch_sise: 3\n", "unknown key 'batch_sise'.*Did you mean 'ppo.batch_size'"),
        ("itertions: 3\n", "Did you mean 'iterations'"),
        ("ppo: [1\n", "bad.yaml"),
        ("seed: !!python/object/apply:os.system ['touch pwned']\n", "bad.yaml"),
    ],
)
def test_bad_files_are_named(tmp_path, text, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load(ImdbConfig, CONFIGS[0], ["--config", str(tmp_path / "bad.yaml")])
    assert not (tmp_path / "pwned").exists()


def test_help_documents_every_key_and_print_config_prints_them():
    script = str(ROOT / "imdb_train/cory.py")
    shown = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True).stdout
    for key in keys(ImdbConfig):
        at = shown.index(f"--{key} ")
        assert len(shown[at:].split("(type")[0].split()) > 4, key
    printed = subprocess.run([sys.executable, script, "--print_config"], capture_output=True, text=True, check=True)
    assert {key for key, _ in flat(yaml.safe_load(printed.stdout))} == set(keys(ImdbConfig))


def test_a_boolean_flag_alone_means_true():
    assert load(ImdbConfig, None, ["--overwrite", "--iterations", "3"])[0].overwrite is True
    assert load(ImdbConfig, None, ["--overwrite", "false"])[0].overwrite is False
