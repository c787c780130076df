"""Settings from command lines and files: how they are read, and how errors name the wrong key."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from safetensors import SafetensorError

from cory.command import (
    LONGEST,
    evaluation_name,
    flag_values,
    load,
    main,
    read_config,
    run_name,
)
from cory.config import ModelConfig, SamplingConfig
from cory.errors import UserError
from cory.evaluation.command import parse_settings
from cory.own_task import OwnConfig, OwnTaskConfig
from cory.settings import changed, keys
from gsm8k_train.config import Gsm8kConfig
from imdb_train.config import ImdbConfig

TINY = "configs/imdb/tiny.yaml"


def refused(*argv: str, kind=ImdbConfig, default=None) -> str:
    """Returns the error message for a command line."""
    with pytest.raises(UserError) as error:
        load(kind, default, argv)
    assert "\n" not in str(error.value)
    return str(error.value)


# Mistakes


@pytest.mark.parametrize(
    ("key", "flags"),
    [
        # wrong type
        ("seed", "--seed many"),
        ("seed", "--seed="),
        ("seed", "--seed"),
        ("ppo.batch_size", "--ppo.batch_size [8"),
        ("ppo.learning_rate", "--ppo.learning_rate null"),
        ("algorithm", "--algorithm gpro"),
        ("agents.0", "--agents [3,{}]"),
        ("agents.0.learning_rate", "--agents=[{learning_rate: fast},{}]"),
        ("sampling.stop.1", "--sampling.stop ['a','']"),
        # out of range
        ("seed", "--seed -1"),
        ("cory.weight", "--cory.weight .inf"),
        ("sampling.temperature", "--sampling.temperature 0"),
        ("sampling.engine_url", "--sampling.engine_url http://localhost:99999"),
        ("agents.1.lora.rank", "--agents=[{},{lora: {rank: -1}}]"),
        ("roles.0.name", "--roles=[{name: class},{}]"),
        # unknown key
        ("ppo.batch_sise", "--ppo.batch_sise 3"),
        ("seed=3", "seed=3"),
        ("ppo", "--ppo {}"),
        ("agents.1.modle", "--agents=[{},{modle: {}}]"),
        # contradictions
        ("ppo.batch_size", "--ppo.batch_size 10 --ppo.mini_batch_size 4"),
        ("ppo.batch_size", "--algorithm grpo --ppo.batch_size 6 --ppo.mini_batch_size 6"),
        ("ppo.batch_size", "--ppo.batch_size 100000000"),
        ("ppo.reward_normalization", "--ppo.reward_normalization"),
        ("group_size", "--algorithm rloo --group_size 1"),
        ("sampling.max_new_tokens", "--sampling.min_new_tokens 9 --sampling.max_new_tokens 8"),
        ("cory.chain_length", "--cory.num_agents 3 --cory.chain_length 2"),
        ("cory.credit", "--cory.credit counterfactual --cory.knowledge_transfer false"),
        ("cory.credit", "--cory.credit information --cory.knowledge_transfer false"),
        ("cory.credit", "--cory.credit information --cory.num_agents 3"),
        ("guards.patience", "--guards.patience 3"),
        ("branches", "--branches 2 --cory.knowledge_transfer false"),
        ("task.max_query_tokens", "--task.max_query_tokens 1"),
        # files and runs
        ("config", "--config nowhere.yaml"),
        ("iterations", "--iterations 1:30"),
        ("resume", "--resume nowhere"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_refused_by_its_key(key, flags):
    words = [part.strip() for part in f" {flags}".split(" --") if part.strip()]
    argv = [word for part in words for word in f"--{part}".split(" ", 1 if "=" not in part else 0)]
    if flags == "seed=3":
        argv = [flags]
    assert refused(*argv).startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (": ppo.batch_sise", "ppo: {batch_sise: 3}"),
        (": batch_size", "batch_size: 3\nppo: {gamma: -1}"),
        (": ppo.learning_rate", "ppo: {learning_rate: .nan}"),
        (": ppo", "ppo: null"),
        (": model.revision", "model: {revision: 1e3}"),
        (": seed", "seed: '3'"),
        (": agents.1.learning_rate", "agents: [{}, {learning_rate: -1}]"),
        (": 1", "1: 2"),
        (": iterations", "iterations: 1:30"),
        (": iterations", "iterations: 0x1F"),
        (": ppo.batch_size.x", "ppo: {batch_size.x: 2}"),
        (": sampling.max_new_tokens", "sampling: {max_new_tokens: 2}"),
        # not a mapping of keys
        (", line 3", "ppo: {gamma: 0.5}\nseed: 1\nppo:\n  batch_size: 8\n"),
        (", line 2", "ppo: [1\n"),
        ("", "- 1"),
        ("", "seed: !!binary aGk="),
        ("", "[" * 1500),
        ("", "seed: \ud800"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_its_name_and_key(place, text, tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert refused("--config", str(file)).startswith(f"{file}{place}: ")


def test_a_flag_given_twice_is_reported_and_the_last_one_counts(capsys):
    config = load(ImdbConfig, None, ["--seed", "1", "--iterations", "2", "--seed=3"])
    assert (config.seed, config.iterations) == (3, 2)
    assert "--seed is given several times" in capsys.readouterr().err


def test_a_wrong_flag_is_not_blamed_on_the_file(tmp_path):
    file = tmp_path / "good.yaml"
    file.write_text("ppo: {batch_size: 512}\n")
    assert refused("--config", str(file), "--ppo.batch_size", "-1").startswith("ppo.batch_size: ")


def test_the_nearest_key_is_named(tmp_path):
    for word, key in (("learning-rate", "ppo.learning_rate"), ("ppo.rank", "lora.rank")):
        assert f"{key!r}" in refused(f"--{word}", "1")
    (tmp_path / "bad.yaml").write_text("batch_size: 3")
    assert "ppo.batch_size'" in refused("--config", str(tmp_path / "bad.yaml"))


# Syntax


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--ppo.batch_size", "64", "--ppo.mini_batch_size=64"], "ppo.batch_size", 64),
        (["--ppo.learning_rate", "1e-4"], "ppo.learning_rate", 1e-4),
        (["--iterations", "010"], "iterations", 10),
        (["--iterations", "1_008"], "iterations", 1008),
        (["--cory.weight", "-1"], "cory.weight", -1),
        (["--ppo.reward_scaling", "--seed", "3"], "ppo.reward_scaling", True),
        (["--ppo.reward_scaling", "false"], "ppo.reward_scaling", False),
        (["--cory.chain_length", "null"], "cory.chain_length", None),
        (["--group_size", "auto"], "group_size", "auto"),
        (["--model.chat_template", "{enable_thinking: false}"], "model.chat_template", {"enable_thinking": False}),
        (["--model.name", "007"], "model.name", "007"),
        (["--model.revision", "1234567"], "model.revision", "1234567"),
        (["--sampling.stop", '["\\n", ": "]'], "sampling.stop", ["\n", ": "]),
        (["--task.observer_prompt", "# {prompt}: {response}"], "task.observer_prompt", "# {prompt}: {response}"),
        (["--task.reward", "[a.py:b, c.py:d]"], "task.reward", ["a.py:b", "c.py:d"]),
        (["--task.reward_weights", "[1, 0.5]", "--task.reward=[a.py:b, c.py:d]"], "task.reward_weights", [1.0, 0.5]),
    ],
)  # fmt: skip
def test_flags_are_read_with_the_type_of_their_key(flags, key, value):
    config = load(OwnConfig, None, flags)
    for name in key.split("."):
        config = getattr(config, name)
    assert config == value


def test_texts_of_mappings_stay_texts(tmp_path):
    """Texts such as "12" or "null" stay texts in roles from a file and from a flag."""
    prompts = ["Question: {prompt}", "12", "2026-01-31", "null"]
    roles = [{"prompt": prompt} for prompt in prompts]
    file = tmp_path / "roles.yaml"
    file.write_text(yaml.safe_dump({"cory": {"num_agents": 4}, "roles": roles}))
    for argv in (["--config", str(file)], ["--cory.num_agents=4", f"--roles={json.dumps(roles)}"]):
        config = load(OwnConfig, None, argv)
        assert [role.prompt for role in config.roles] == prompts


def test_a_file_replaces_the_default_file(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(
        "iterations: 3\nppo: {learning_rate: 1e-4}\nversions: {cory: '1'}\nfingerprint: null\n"
    )
    config = load(ImdbConfig, TINY, ["--config", str(file)])
    assert (config.ppo.learning_rate, config.ppo.batch_size, config.model.name) == (
        1e-4,
        256,
        ImdbConfig().model.name,
    )
    assert load(ImdbConfig, TINY, []).ppo.batch_size == 64
    # The defaults of the task's class still apply.
    file.write_text("ppo: {ppo_epochs: 1}\n")
    config = load(Gsm8kConfig, None, ["--config", str(file), "--ppo.lam", "1"])
    assert (config.ppo.batch_size, config.ppo.init_kl_coef, config.lora.rank) == (32, 0.01, 16)
    assert (config.ppo.ppo_epochs, config.ppo.lam) == (1, 1.0)


def test_shipped_files_are_found_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load(ImdbConfig, TINY, ["--config", "configs/imdb/gpt2_large.yaml"])
    assert config.model.name == "openai-community/gpt2-large"


def test_resume_uses_the_settings_of_the_run(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 7\n")
    assert load(ImdbConfig, TINY, ["--resume", str(run), "--iterations", "9"]).seed == 7
    assert load(ImdbConfig, TINY, ["--resume", "auto"]).model.name == "tiny"
    assert refused("--resume", str(run), "--output", "elsewhere").startswith("output: ")
    (run / "config.yaml").write_text("itertions: 7\n")
    assert refused("--resume", str(run)).startswith(f"{run / 'config.yaml'}: itertions: ")
    # Runs made by another script are refused.
    (run / "config.yaml").write_text("cory: {num_agents: 2}\n")
    with pytest.raises(UserError, match=r"^cory\.num_agents: expected 1 .* got 2$"):
        load(ImdbConfig, TINY, ["--resume", str(run)], single_agent=True)
    (run / "config.yaml").write_text("task: {subset: main}\n")
    assert refused("--resume", str(run)).endswith("(continue a run with the script that made it)")


def test_help_names_every_key_and_imports_no_torch():
    code = "import sys, runpy; sys.argv = ['imdb_train/cory.py', *sys.argv[1:]]\n"
    code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\nfinally: assert 'torch' not in sys.modules"
    argv = [sys.executable, "-c", code, "--config", "configs/imdb/gpt2_xl.yaml", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=True)
    shown = " ".join(done.stdout.split())
    assert shown.startswith("usage: python imdb_train/cory.py ")
    assert all(f"--{key} " in shown for key in keys(ImdbConfig))
    # The help shows the file's values, and its lines may break at a hyphen.
    assert '["openai-community/gpt2-xl"]' in shown.replace("- ", "-")


@pytest.mark.parametrize("name", ["cory.chat", "cory.evaluation", "cory.hub", "cory.train"])
def test_help_of_a_module_imports_no_torch(name):
    code = f"import sys, runpy; sys.argv = ['', '--help']\ntry: runpy.run_module('{name}', run_name='__main__')\n"
    code += "finally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr


def test_settings_are_checked_before_they_are_printed(capsys):
    for flags in (["--ppo.learning_rat", "3"], ["--ppo.reward_normalization"]):
        with pytest.raises(UserError):
            read_config(ImdbConfig, TINY, argv=["--print_config", *flags])
        assert capsys.readouterr().out == ""


def test_printed_settings_can_be_read_as_a_file(tmp_path, capsys):
    flags = ["--sampling.stop", "['1e3', '\\n']", "--task.observer_prompt", "a\x85b\u2028c\n d"]
    with pytest.raises(SystemExit):
        read_config(ImdbConfig, TINY, argv=[*flags, "--print_config"])
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    printed = load(ImdbConfig, None, ["--config", str(tmp_path / "printed.yaml")])
    assert printed == load(ImdbConfig, TINY, flags)


# Evaluations


@pytest.mark.parametrize(
    ("argv", "block", "values"),
    [
        (["--task.pioneer_prompt=[a, {prompt}]"], OwnTaskConfig, {"pioneer_prompt": "[a, {prompt}]"}),
        (["--task", '{pioneer_prompt: "Ask: {prompt}"}'], OwnTaskConfig, {"pioneer_prompt": "Ask: {prompt}"}),
        (["--task.eval_dataset", "null"], OwnTaskConfig, {"eval_dataset": None}),
        (["--model.dtype", "auto"], ModelConfig, {"dtype": "auto"}),
        (["--sampling.stop", '["\\n"]'], SamplingConfig, {"stop": ["\n"]}),
    ],
)  # fmt: skip
def test_an_evaluations_flags_change_keys_of_the_runs_settings(argv, block, values):
    settings = parse_settings(None, None, ["run", *argv, "--samples", "2"])
    assert (settings.models, settings.samples) == (["run"], 2)
    assert flag_values(block, getattr(settings, block.block)) == values


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["--sampling.temperatur", "1"], "sampling.temperatur"),
        (["--sampling.temperature", "hot"], "sampling.temperature"),
        (["--sampling.temperature", "--greedy"], "sampling.temperature"),
        (["--samples", "0"], "samples"),
    ],
)  # fmt: skip
def test_a_wrong_evaluation_flag_is_named(argv, key):
    with pytest.raises(UserError) as error:
        changed(SamplingConfig(), parse_settings(None, None, ["run", *argv]).sampling)
    assert str(error.value).startswith(f"{key}: ")


def test_other_attributes_of_a_settings_class_are_no_keys():
    for key in ("rewards", "check", "block"):  # a property, a method, a class attribute
        with pytest.raises(UserError, match=f"^task.{key}: "):
            changed(OwnTaskConfig(), {key: "x"})


# Names of runs and evaluations


def name(*flags: str, single_agent: bool = False) -> str:
    prefix = "imdb_ppo" if single_agent else "imdb_cory"
    return read_config(ImdbConfig, "configs/imdb/tiny.yaml", prefix, single_agent, flags)[1]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "imdb_cory_tiny"),
        (["--cory.credit", "causal"], "imdb_cory_tiny-credit=causal"),
        (
            ["--iterations", "7", "--tracker", "tensorboard", "--checkpoint.keep=3"],
            "imdb_cory_tiny",
        ),
        (["--cory.credit", "collective"], "imdb_cory_tiny"),  # the same value as in the file
        (
            ["--seed", "3", "--algorithm", "grpo", "--group_size", "4"],
            "imdb_cory_tiny-algorithm=grpo-group_size=4-seed3",
        ),
        (["--model.name", "/a/b c/my model"], "imdb_cory_tiny-name=my_model"),
    ],
)
def test_a_runs_name_lists_differences_from_its_file(flags, expected):
    assert name(*flags) == expected


def test_a_run_with_another_runs_settings_is_named_after_that_run(tmp_path, monkeypatch):
    run = tmp_path / "first"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 3\n")
    (run / "metrics.jsonl").write_text("")
    for folder, file in ((tmp_path, "first/config.yaml"), (run, "config.yaml")):
        monkeypatch.chdir(folder)
        assert read_config(ImdbConfig, file, "imdb_cory", argv=[])[1] == "first"


def test_run_names_are_valid_folder_names():
    for value in ("../../etc", "a/b", "a\\b", "é" * 300, "x\n", ".", "{prompt}: {response}?"):
        folder_name = run_name("cory", {"task.observer_prompt": value})
        assert len(folder_name) <= LONGEST
        assert "/" not in folder_name and "\\" not in folder_name
        assert Path(folder_name).name == folder_name


def test_a_long_name_keeps_whole_parts_and_the_seed():
    values = {f"task.key_{n}": f"{n}" * 30 for n in range(9)} | {"ppo.batch_size": 16, "seed": 3}
    long_name = run_name("imdb_cory_tiny", values)
    assert len(long_name) <= LONGEST and long_name.endswith("-seed3")
    assert {*long_name.split("-")} < {
        "imdb_cory_tiny", "batch_size=16", "seed3", *(f"key_{n}={n}".ljust(36, f"{n}") for n in range(9)),
    }  # fmt: skip


def test_an_evaluation_is_named_after_its_runs_differences():
    models = [f"runs/imdb_cory_tiny{credit}-batch_size=16-seed3" for credit in ("", "-credit=own")]
    assert evaluation_name(models) == "evaluation-imdb_cory_tiny-credit=own"
    assert evaluation_name(models[1:]) == "evaluation-imdb_cory_tiny-credit=own-batch_size=16-seed3"


def test_an_evaluation_of_many_runs_has_a_short_name():
    assert len(evaluation_name([f"runs/{number:030d}" for number in range(9)])) <= LONGEST


# How a command ends


def test_the_error_for_a_block_as_flag_names_its_keys():
    assert "ppo.learning_rate" in refused("--ppo", "{}")


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_a_full_disk_gives_one_line(kind, capsys):
    def work():
        raise kind("[Errno 28] No space left on device")

    with pytest.raises(SystemExit, match="2"):
        main(work)
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"


def test_a_character_that_the_terminal_lacks_is_escaped():
    code = "from cory.command import main\nmain(lambda: print('Le caf\\u00e9'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "Le caf\\xe9\n"


# A configuration is data and runs no code

# Importing this module creates a file.
MARKER = "from pathlib import Path\n(Path(__file__).parent / 'imported').touch()\n"
CODE = {"class_path": "code_marker.Thing", "init_args": {"a": 1}}
TAG = "!!python/object/apply:code_marker.run []"
SETTINGS = {
    "iterations": 1,
    "model": {"name": "model"},
    "task": {"dataset": "rows.jsonl", "reward": "rewards.py:reward"},
}
COMMANDS = {
    "train": ("cory.train", "--config", "own.yaml"),
    "resume": ("cory.train", "--resume", "run"),
    "evaluation": ("cory.evaluation", "run"),
    "chat": ("cory.chat", "run"),
    "card": ("cory.hub", "run", "user/name", "--look"),
    "experiment": ("study.experiment", "own.yaml", "--dry-run"),
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Returns a function that writes a text to own.yaml and to a run's config.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "code_marker.py").write_text(MARKER)
    for agent in ("agent_1", "agent_2"):
        (tmp_path / "run" / agent).mkdir(parents=True)
    (tmp_path / "run/metrics.jsonl").write_text("{}\n")
    (tmp_path / "run/summary.json").write_text('{"iterations": 1}')

    def write_all(text: str) -> None:
        for name in ("own.yaml", "run/config.yaml"):
            (tmp_path / name).write_text(text)

    yield write_all
    sys.modules.pop("code_marker", None)


TEXTS = {
    "class_path": yaml.safe_dump(SETTINGS | {"model": CODE, "fingerprint": {"task": "own"}}),
    "names": yaml.safe_dump(
        SETTINGS | {"seed": "!!python", "fingerprint": {"task": "code_marker"}}
    ),
    "tag": f"ppo: {{batch_size: {TAG}}}",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_imports_nothing_that_a_file_names(name, write, command):
    for text in TEXTS.values():
        write(text)
        ended = command(*COMMANDS[name])
        assert not Path("imported").exists() and "code_marker" not in sys.modules
        assert ended.status == 2 and ended.error.startswith("error: "), ended.error


# By design, a command runs the files that a run names for rewards, metrics and callbacks. It announces them first.
@pytest.fixture
def reward_file(write):
    """A run whose reward file, when executed, ends the command."""
    task = {"dataset": "rows.jsonl", "eval_dataset": "rows.jsonl", "reward": "rewards.py:reward"}
    write(yaml.safe_dump(SETTINGS | {"task": task, "fingerprint": {"task": "own"}}))
    Path("rows.jsonl").write_text('{"prompt": "a"}\n' * 99)
    for name in ("rewards.py", "mine.py"):
        code = f"import sys\nprint('running {name}', file=sys.stderr)\nraise KeyboardInterrupt\n"
        Path(name).write_text(code)


@pytest.mark.parametrize(
    ("words", "announced"),
    [
        (COMMANDS["resume"], True),
        (COMMANDS["evaluation"], True),
        (COMMANDS["chat"], True),
        (("cory.train", "--config", "run/config.yaml", "--output", "new"), True),
        (COMMANDS["train"], False),
        ((*COMMANDS["evaluation"], "--task.reward", "mine.py:reward"), False),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else " ".join(map(str, value)),
)
def test_files_that_a_run_names_are_announced_before_they_are_run(
    words, announced, reward_file, command
):
    ended = command(*words)
    assert ended.status == 130, ended.error
    lines = [line for line in ended.error.split("\n") if "names" in line or "running" in line]
    assert [line.split()[0] for line in lines] == ["run/config.yaml"] * announced + ["running"]
