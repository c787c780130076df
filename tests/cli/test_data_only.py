"""A configuration is data: a command that reads one imports and runs nothing that it names, and says which key does."""

import json
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from cory.config import blocks
from cory.own_task import OwnConfig

# A module that can be imported, and says so by a file; so do its class and its function.
MARKER = """
from pathlib import Path

FOLDER = Path(__file__).parent
(FOLDER / "imported").touch()


def run(**arguments):
    (FOLDER / "ran").touch()


class Thing:
    def __init__(self, **arguments):
        run()
"""
CODE = {"class_path": "code_marker.Thing", "init_args": {"a": 1}}
TAG = "!!python/object/apply:code_marker.run []"
SETTINGS = {
    "iterations": 1,
    "model": {"name": "model"},
    "task": {"dataset": "rows.jsonl", "reward": "rewards.py:reward"},
    "versions": {"cory": "1"},
    "fingerprint": {"task": "own"},
}
EXPERIMENT = {
    "title": "A",
    "question": "B",
    "runs": {"cory": {"script": "cory.train", "flags": {"seed": 1}}},
    "scales": {"tiny": {"config": "own.yaml", "seeds": [0]}},
}


def cases() -> dict[str, tuple[dict, str]]:
    """Settings that name code, and the key of which the message speaks."""
    found: dict[str, tuple[dict, str]] = {}
    for name, block in blocks(OwnConfig).items():
        found[f"{name} itself"] = {name: CODE}, name
        key = fields(block)[0].name
        found[f"a key of {name}"] = {name: {key: CODE}}, f"{name}.{key}"
    for name in ("versions", "changes", "seed", "output"):
        found[name] = {name: CODE}, name
    for name in ("agents", "roles"):
        found[name] = {name: [CODE]}, f"{name}[0]"
        found[f"a key of {name}"] = {name: [{"model": CODE}]}, f"{name}[0].model"
    found["fingerprint"] = {"fingerprint": {"task": "own", "a": CODE}}, "fingerprint.a"
    found["optimizer_options"] = (
        {"ppo": {"optimizer_options": {"a": CODE}}},
        "ppo.optimizer_options.a",
    )
    found["chat_template"] = {"model": {"chat_template": {"a": CODE}}}, "model.chat_template.a"
    found["in lists"] = {"changes": [{"a": [1, [CODE]]}]}, "changes[0].a[1][0]"
    found["no arguments"] = {"versions": {"class_path": "code_marker.Thing"}}, "versions"
    found["a function"] = {"versions": {"class_path": "code_marker.run"}}, "versions"
    found["a module"] = {"versions": {"class_path": "code_marker"}}, "versions"
    found["no text"] = {"versions": {"class_path": None}}, "versions"
    nested = {"class_path": "builtins.dict", "init_args": {"a": CODE}}
    found["in arguments"] = {"versions": nested}, "versions"
    found["with a dot"] = {"versions.class_path": "code_marker.Thing"}, "versions.class_path"
    found["of the file"] = CODE, "class_path"
    return found


CASES = cases()
COMMANDS = {
    "train": ("cory.train", "--config", "own.yaml"),
    "a task's train": (ROOT / "imdb_train/cory.py", "--config", "own.yaml"),
    "resume": ("cory.train", "--resume", "run"),
    "evaluation": ("cory.evaluation", "run"),
    "chat": ("cory.chat", "run"),
    "report": ("study.report", "run"),
    "compare": ("study.compare", "run", "--out", "comparison"),
    "card": ("cory.hub", "run", "user/name", "--look"),
    "experiment": ("study.experiment", "experiment.yaml", "--dry-run"),
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes settings as text to a file, which any of the commands reads, and to a run's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "code_marker.py").write_text(MARKER)
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    (tmp_path / "run/agent_1").mkdir(parents=True)
    for name in ("metrics.jsonl", "summary.json"):
        (tmp_path / "run" / name).write_text("{}\n")

    def write_all(text: str) -> None:
        for name in ("own.yaml", "run/config.yaml"):
            (tmp_path / name).write_text(text)

    yield write_all
    sys.modules.pop("code_marker", None)


def check_not_run(ended) -> None:
    """The command was refused, and nothing was imported."""
    assert not Path("ran").exists()
    assert not Path("imported").exists() and "code_marker" not in sys.modules
    assert ended.status == 2, ended.error


def check_refused(ended, *words: str) -> None:
    """Nothing was imported, and the message is one line that has `words`."""
    check_not_run(ended)
    message = [line for line in ended.error.split("\n") if line]
    assert len(message) == 1 and message[0].startswith("error: "), ended.error
    for word in words:
        assert word in message[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_mapping_that_names_code_is_refused_by_its_key(name, case, write, command):
    settings, key = CASES[case]
    write(yaml.safe_dump(SETTINGS | settings))
    ended = command(*COMMANDS[name])
    check_refused(ended, f" {key}: expected", "class_path", ".yaml")


@pytest.mark.parametrize("name", COMMANDS)
def test_in_json_too(name, write, command):
    write(json.dumps(SETTINGS | {"versions": CODE}))
    check_refused(command(*COMMANDS[name]), " versions: expected", "class_path", ".yaml")


@pytest.mark.parametrize("text", ["versions: " + TAG, "ppo: {batch_size: " + TAG + "}", TAG])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_tag_that_names_code_is_refused_by_its_file(name, text, write, command):
    write(text)
    ended = command(*COMMANDS[name])
    place = "run" if "run" in COMMANDS[name] else "own.yaml"
    check_refused(ended, place, "python/object/apply")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"title": CODE}, "title"),
        ({"runs": CODE}, "runs"),
        ({"runs": {"cory": CODE}}, "runs.cory"),
        ({"runs": {"cory": {"script": "cory.train", "flags": {"seed": CODE}}}}, "runs.cory.flags"),
        ({"scales": {"tiny": CODE}}, "scales.tiny"),
        ({"scales": {"tiny": {"config": "a", "seeds": [0], "values": [CODE]}}}, "scales.tiny"),
    ],
)
def test_an_experiment_is_data(changes, key, write, command):
    write(yaml.safe_dump(SETTINGS))
    Path("experiment.yaml").write_text(yaml.safe_dump(EXPERIMENT | changes))
    ended = command(*COMMANDS["experiment"])
    check_refused(ended, f"experiment.yaml: {key}", "class_path")


def test_an_experiment_has_no_tag_that_names_code(write, command):
    Path("experiment.yaml").write_text(yaml.safe_dump(EXPERIMENT) + f"over: {TAG}\n")
    ended = command(*COMMANDS["experiment"])
    check_refused(ended, "experiment.yaml", "python/object/apply")


# The parser reads these texts and files once more.
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"versions": json.dumps(CODE)}, "versions"),
        ({"ppo": {"optimizer_options": json.dumps(CODE)}}, "ppo.optimizer_options"),
        ({"ppo": "./options.yaml"}, "ppo.optimizer_options"),
        ({"model": "./code.yaml"}, "model"),
        ({"config": "model.yaml"}, "class_path"),
        ({"ppo": "code_marker.run"}, "ppo"),
        ({"model": "code_marker.Thing"}, "model"),
    ],
)
def test_texts_and_files_that_a_configuration_names_are_data(settings, key, write, command):
    Path("options.yaml").write_text(yaml.safe_dump({"optimizer_options": CODE}))
    Path("code.yaml").write_text(yaml.safe_dump(CODE))
    Path("model.yaml").write_text(yaml.safe_dump({"model": CODE}))
    write(yaml.safe_dump(SETTINGS | settings))
    ended = command(*COMMANDS["train"])
    check_refused(ended, f" {key}: expected")


@pytest.mark.parametrize(
    "words",
    [
        ("cory.train", "--config", "own.yaml", "--versions", json.dumps(CODE)),
        ("cory.train", "--config", "own.yaml", "--model", json.dumps(CODE)),
        ("cory.train", "--config", "own.yaml", "--ppo.optimizer_options", json.dumps({"a": CODE})),
        ("cory.evaluation", "run", "--sampling", json.dumps({"a": CODE})),
    ],
    ids=lambda words: f"{words[0]} {words[-2]}",
)
def test_a_flag_imports_nothing(words, write, command):
    write(yaml.safe_dump(SETTINGS))
    check_not_run(command(*words))


# By design, a command runs the files that a run names for its rewards, metrics and callbacks. It says so first.
ANNOUNCED = "config.yaml names code, which runs now: rewards.py:reward"
REWARD_OF_RUN = ("resume", "evaluation", "chat")


@pytest.fixture
def reward_file(write):
    """A run whose reward is that of a file, which ends the command once it is run."""
    task = {"dataset": "rows.jsonl", "eval_dataset": "rows.jsonl", "reward": "rewards.py:reward"}
    write(yaml.safe_dump(SETTINGS | {"task": task}))
    Path("rows.jsonl").write_text('{"prompt": "a"}\n' * 99)
    Path("run/summary.json").write_text('{"iterations": 1}')
    for name in ("rewards.py", "mine.py"):
        code = f"import sys\nprint('running {name}', file=sys.stderr)\nraise KeyboardInterrupt\n"
        Path(name).write_text(code)


def own_lines(ended) -> list[str]:
    """What a command and the files that it runs have printed."""
    assert ended.status == 130, ended.error
    return [line for line in ended.error.split("\n") if "names" in line or "running" in line]


@pytest.mark.parametrize("name", REWARD_OF_RUN)
def test_a_file_that_a_run_names_is_announced_before_it_is_run(name, reward_file, command):
    ended = command(*COMMANDS[name])
    assert own_lines(ended) == [f"run/{ANNOUNCED}", "running rewards.py"]


def test_a_file_that_the_config_of_a_run_names_is_announced_in_a_new_run(reward_file, command):
    ended = command("cory.train", "--config", "run/config.yaml", "--output", "new")
    assert own_lines(ended) == [f"run/{ANNOUNCED}", "running rewards.py"]


@pytest.mark.parametrize("name", ["resume", "evaluation"])
def test_a_file_that_the_command_line_names_is_not_announced(name, reward_file, command):
    ended = command(*COMMANDS[name], "--task.reward", "mine.py:reward")
    assert own_lines(ended) == ["running mine.py"]


def test_the_file_of_an_own_configuration_is_not_announced(reward_file, command):
    ended = command(*COMMANDS["train"])
    assert own_lines(ended) == ["running rewards.py"]
