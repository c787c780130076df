"""Users' own tasks, whose prompts and rewards are files named in settings."""

import json
import re
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, read_responses, sentences

from cory.build import make_agents
from cory.config import AgentConfig
from cory.errors import UserError
from cory.models.text import encode
from cory.own_task import OwnConfig, OwnTaskConfig, held_out_rows, make_task
from cory.rewards import score_by_function
from cory.roles import RolePrompts
from cory.run.callback import load_callbacks
from cory.run.folder import read_rows
from cory.task import Task
from cory.trainer import CoryTrainer
from study import experiment

REWARDS = """
import asyncio

WORD = "good"


def good(completions, **columns):
    return [float(text.count(WORD)) for text in completions]


async def short(prompts, completions, hint=None):
    await asyncio.sleep(0)
    return [None if "bad" in prompt else -0.01 * len(text) for prompt, text in zip(prompts, completions)]
"""
METRICS = """
from cory import Callback


def length(completions):
    return [float(len(text)) for text in completions]


kl = reward_short = answers = length


async def hinted(prompts, completions, hint, number, role, rewards):
    assert all(text == f"hint {i}" for text, i in zip(hint, number))
    return [None if who == "observer" else reward for who, reward in zip(role, rewards)]


class Count(Callback):
    def on_train_begin(self, trainer, run):
        self.file = run.folder / "counted"

    def on_iteration_end(self, trainer, iteration):
        with open(self.file, "a") as file:
            file.write(f"{iteration.records[0]['length']}\\n")
"""
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]


def write_rows(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    """The current folder, with files of prompts, rewards and metrics."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": text, "hint": f"hint {i}", "number": i} for i, text in enumerate(sentences(24))
    ]
    write_rows(tmp_path / "prompts.jsonl", rows)
    write_rows(tmp_path / "held_out.jsonl", rows[:6])
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "watch.py").write_text(METRICS)
    return tmp_path


def settings(**changes) -> OwnConfig:
    defaults = {"dataset": "prompts.jsonl", "reward": "rewards.py:good"}
    return OwnConfig(task=OwnTaskConfig(**(defaults | changes)))


# Bad input


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("task.dataset", {"dataset": ""}),
        ("task.subset", {"subset": "main"}),
        ("task.prompt_column", {"prompt_column": "question"}),
        ("task.prompt_column", {"prompt_column": "hint"}),
        ("task.reward", {"reward": []}),
        ("task.reward", {"reward": "rewards.py:god"}),
        ("task.reward", {"reward": ["rewards.py:good"] * 2}),
        ("task.reward_weights", {"reward_weights": [1.0, 2.0]}),
        ("task.reward_weights", {"reward_weights": [float("nan")]}),
        ("team reward rewards.py:good", {"team_reward": "rewards.py:good"}),
        ("pioneer prompt", {"pioneer_prompt": "{prompt}{answer}"}),
        ("observer prompt", {"observer_prompt": "{prompt}{response}{a}"}),
        ("task.metrics", {"metrics": ["watch.py:length"] * 2}),
        ("task.metrics", {"metrics": "watch.py:kl"}),
        ("task.metrics", {"metrics": "watch.py:answers"}),
        ("task.metrics", {"metrics": "watch.py:reward_short", "reward": ["rewards.py:good", "rewards.py:short"]}),
        ("task.extract", {"extract": "watch.py:hinted"}),
    ],
)  # fmt: skip
def test_wrong_task_settings_are_refused_by_their_key(workdir, policy_folder, key, changes):
    with pytest.raises(UserError, match=f"^{re.escape(key)}"):
        config = settings(**changes)
        config.model.name = str(policy_folder)
        make_task(config)


@pytest.mark.parametrize(
    "prompt",
    [
        [{"role": "critic", "content": "Hello"}],
        [*MESSAGES, {"role": "assistant", "content": "Hi"}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "text": "Hello"}],
    ],
)
def test_invalid_chat_messages_are_named_by_row(workdir, prompt):
    write_rows(workdir / "bad.jsonl", [{"ask": MESSAGES}, {"ask": prompt}])
    with pytest.raises(UserError, match=r"column 'prompt', row 2"):
        make_task(settings(dataset="bad.jsonl", prompt_column="ask"))


def test_a_callback_must_be_derived_from_callback(workdir):
    (workdir / "plain.py").write_text("class Plain: ...\n")
    with pytest.raises(
        UserError,
        match=r"^callbacks: expected a class derived from cory.Callback, got plain.py:Plain",
    ):
        load_callbacks("plain.py:Plain")


@pytest.mark.parametrize("name", ["runs/nope", "nobody/nothing"])
def test_a_missing_run_is_named(workdir, command, name):
    status, _, error = command("cory.evaluation", name)
    assert status == 2 and error.startswith("error: models: ")


# Prompts


def test_different_rewards_have_different_fingerprints(workdir):
    def prints(**changes):
        return make_task(settings(**changes)).fingerprint_of_reward()

    first = prints()
    assert first["reward"] == "rewards.py:good" and first == prints()
    both = {"reward": ["rewards.py:good", "rewards.py:short"]}
    weighted = prints(**both, reward_weights=[1, 0.5])
    assert len({first["reward"], prints(**both)["reward"], weighted["reward"]}) == 3
    (workdir / "rewards.py").write_text(REWARDS.replace("-0.01", "-0.02"))
    assert prints()["reward_sha256"] != first["reward_sha256"]


def test_long_prompts_are_left_out_in_training_and_held_out(workdir, config):
    texts = ["good", "good " * 30, "good bad", "good " * 95]
    for name in ("train", "test"):
        write_rows(workdir / f"{name}.jsonl", [{"prompt": text} for text in texts])
    own_config = settings(dataset=".", max_prompt_tokens=20)
    own_config.model = config.model
    assert make_task(own_config).dataset["prompt"][:] == ["good", "good bad"]
    assert held_out_rows(own_config)["prompt"][:] == ["good", "good bad"]
    # The limit applies to the pioneer's whole prompt.
    own_config.task.pioneer_prompt = "good " * 20 + "{prompt}"
    with pytest.raises(UserError, match=r"^task\.max_prompt_tokens: "):
        make_task(own_config)
    own_config.roles = [{"prompt": "good {prompt}"}, {}]
    assert len(make_task(own_config).dataset) == 2
    # Without a limit, the long prompts do not fit the context.
    own_config.task.max_prompt_tokens = None
    with pytest.raises(UserError, match=r"^dataset: "):
        CoryTrainer(config, make_agents(config), make_task(own_config))


def test_chat_messages_are_rendered_and_rewarded_as_messages(workdir, tokenizer, monkeypatch):
    seen = {}

    def reward(prompts, completions, role):
        seen.update(prompts=prompts, completions=completions, role=role)
        return [1.0] * len(prompts)

    prompts = RolePrompts("Answer: {prompt}", "{prompt} Not: {response}")
    task = Task.from_prompts([MESSAGES, MESSAGES[1:]], reward, prompts)
    columns = task.dataset[:]
    assert task.prompts.render_rows(0, columns)[0] == [
        MESSAGES[0],
        {"role": "user", "content": "Answer: Hello"},
    ]
    read = task.prompts.render_rows(1, columns, [["Hi", "Ho"]])
    assert read[1] == [{"role": "user", "content": "Hello Not: Ho"}]
    with pytest.raises(UserError, match=r"^model\.name: "):  # the tokenizer has no template
        encode(tokenizer, read)
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    text = "<system>Be kind.<user>Hello Not: Hi<bot>"
    assert tokenizer.decode(encode(tokenizer, read)[0]) == text
    assert encode(tokenizer, read, chat_template=True) == encode(tokenizer, read)
    for template, error in (
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
    ):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        with pytest.raises(UserError, match=f"row 1.*{error}"):
            encode(tokenizer, read)
    roles = {"role": ["pioneer"] * 2, "other": [0, 0]}
    score_by_function(reward, columns["prompt"], ["a", "b"], roles)
    assert seen["prompts"][0] == MESSAGES
    assert seen["completions"][1] == [{"role": "assistant", "content": "b"}]


def test_an_observer_in_a_chat_is_asked_for_a_better_answer(workdir):
    """Without a chat template, the default observer prompt puts the response right after the query."""
    config = settings()
    task = make_task(config)
    query = task.dataset["prompt"][0]
    assert task.prompts.render_rows(1, task.dataset[:1], [[" yes"]]) == [f"{query} yes\n{query}"]
    config.model.chat_template = True
    (read,) = make_task(config).prompts.render_rows(1, task.dataset[:1], [["Yes."]])
    assert read.startswith(f"{query}\n\n") and "\n\nYes.\n\n" in read
    by_agent = settings()
    by_agent.agents = [AgentConfig(model={"chat_template": True})] * 2
    assert make_task(by_agent).prompts.render_rows(1, task.dataset[:1], [["Yes."]]) == [read]
    config.task.observer_prompt = "{prompt} Not: {response}"
    assert make_task(config).prompts.render_rows(1, task.dataset[:1], [["Yes."]]) == [
        f"{query} Not: Yes."
    ]


def test_held_out_prompts_come_from_another_file_or_split(workdir):
    config = settings()
    with pytest.raises(UserError, match=r"^task\.eval_dataset: "):
        held_out_rows(config, "test")
    assert len(held_out_rows(config, "train")) == 24
    with pytest.raises(UserError, match=r"task\.eval_dataset: "):
        held_out_rows(settings(eval_dataset="held_oot"))
    single = settings(eval_dataset="held_out.jsonl")
    assert len(held_out_rows(single, "test")) == len(held_out_rows(single)) == 6
    with pytest.raises(UserError, match=r"^--split: "):
        held_out_rows(single, "validation")
    (workdir / "data").mkdir()
    for split in ("train", "test"):
        write_rows(workdir / f"data/{split}.jsonl", [{"ask": split}])
    folder = settings(dataset="data", prompt_column="ask")
    assert make_task(folder).dataset["prompt"][0] == "train"
    for rows in (held_out_rows(folder), held_out_rows(folder, "test")):
        assert rows["prompt"][0] == "test"
    same = settings(dataset="data", prompt_column="ask", split="test")
    with pytest.raises(UserError, match=r"^task\.eval_split: .*'test'"):
        held_out_rows(same)
    assert held_out_rows(same, "train")["prompt"][0] == "train"


# The commands


def write_config(workdir, policy_folder, **more):
    values = {
        "iterations": 2,
        "device": "cpu",
        "model": {"name": str(policy_folder)},
        "ppo": {"batch_size": 8, "mini_batch_size": 8, "learning_rate": 1e-3},
        "sampling": {"min_new_tokens": 3, "max_new_tokens": 6},
        "task": {
            "dataset": "prompts.jsonl",
            "eval_dataset": "held_out.jsonl",
            "reward": "rewards.py:good",
        },
    }
    (workdir / "my.yaml").write_text(yaml.safe_dump(values | more))


def test_train_evaluate_and_resume(workdir, policy_folder, command):
    write_config(workdir, policy_folder)

    def run(*argv) -> str:
        status, out, error = command(*argv)
        assert status == 0, error
        return out

    def refused(key, *argv) -> None:
        status, _, error = command(*argv)
        assert status == 2 and error.startswith(f"error: {key}"), error

    train = ["cory.train", "--config", "my.yaml"]
    run(*train)
    run("cory.evaluation", "runs/my", "--output", "runs/eval", "--samples", "2")
    evaluation = json.loads((workdir / "runs/eval/evaluation.json").read_text())
    assert len(evaluation["queries"]) == 6
    # The fixture's held-out rows are also training rows.
    assert evaluation["in_training"] == {"my": 1.0}

    refused("task.dataset", "cory.evaluation", "runs/my", "--task.dataset", "other.jsonl")
    prompts = ["--task.pioneer_prompt=Ask: {prompt}", "--task.observer_prompt={response}: {prompt}"]
    run("cory.evaluation", "runs/my", "--queries=2", "--output=runs/other", *prompts)
    for (_, number), record in read_responses(workdir / "runs/other").items():
        query = re.escape(evaluation["queries"][number])
        expected = f"Ask: {query}" if record["role"] == "pioneer" else f".*: {query}"
        assert re.fullmatch(expected, record["prompt"], re.DOTALL)

    # Held-out rows are checked before training even without `eval_every`, since a later evaluation reads them.
    refused("task.eval_dataset", *train, "--task.eval_dataset", "nope.jsonl")
    write_rows(workdir / "other.jsonl", [{"prompt": "2 + 2?"}])
    hinted = ["--task.eval_dataset", "other.jsonl", "--task.pioneer_prompt", "{hint}: {prompt}"]
    refused("held-out rows: ", *train, *hinted)
    assert [path.name for path in (workdir / "runs").glob("my*")] == ["my"]

    resume = ["cory.train", "--resume", "runs/my"]
    run(*resume, "--iterations", "3")
    assert read_rows(workdir / "runs/my/metrics.jsonl")[-1]["iteration"] == 2
    refused("config", *train, "--resume", "runs/my")
    (workdir / "rewards.py").write_text(REWARDS + "\n")
    status, _, error = command(*resume, "--iterations", "4")
    assert status == 2 and "reward rewards.py:good has changed" in error


def test_a_yaml_task_has_metrics_callbacks_and_a_metric_for_each_reward(
    workdir, policy_folder, command
):
    prompts = workdir / "prompts.jsonl"
    # Without "bad", both rewards apply to every prompt.
    prompts.write_text(prompts.read_text().replace("bad", "sad"))
    rewards = {"reward": ["rewards.py:good", "rewards.py:short"], "reward_weights": [1.0, 2.0]}
    task = {"dataset": "prompts.jsonl", "eval_dataset": "held_out.jsonl", **rewards}
    task["metrics"] = ["watch.py:length", "watch.py:hinted"]
    write_config(workdir, policy_folder, task=task, callbacks="watch.py:Count")
    assert command("cory.train", "--config", "my.yaml").status == 0
    records = read_rows(workdir / "runs/my/metrics.jsonl")
    for record in records:
        total = record["reward_good"] + 2 * record["reward_short"]
        assert record["task_reward"] == pytest.approx(total, abs=1e-5)
        assert ("hinted" in record) == (record["role"] == "pioneer")
        hinted = record.get("hinted", record["task_reward"])
        assert hinted == pytest.approx(record["task_reward"], abs=1e-5)
    counted = [float(line) for line in (workdir / "runs/my/counted").read_text().splitlines()]
    assert counted == [record["length"] for record in records if record["agent"] == "agent_1"]

    evaluate = ("cory.evaluation", "runs/my", "--queries", "4", "--device", "cpu")
    assert command(*evaluate).status == 0
    folder = workdir / "runs/evaluation-my"
    rows = json.loads((folder / "evaluation.json").read_text())["rows"]
    assert {"reward_good", "reward_short", "length", "hinted"} < set(rows[0])
    observer = next(row for row in rows if row["name"] == "my/agent_2 after agent_1")
    assert "hinted" not in observer
    for record in read_rows(folder / "responses.jsonl"):
        parts = {name: values[0] or 0 for name, values in record["rewards_by_function"].items()}
        total = parts["good"] + 2 * parts["short"]
        assert record["rewards"] == pytest.approx([total], abs=1e-5)


EXPERIMENT = """
title: A trial
question: Does it run?
runs:
  PPO: {script: cory.train, flags: {cory.num_agents: 1}}
scales:
  small: {config: my.yaml, seeds: [0], evaluate: cory.evaluation --queries 4}
"""


def test_an_experiments_script_may_be_the_module_cory_train(workdir, policy_folder, capsys):
    write_config(workdir, policy_folder)
    (workdir / "trial.yaml").write_text(EXPERIMENT)
    experiment.command_line(["trial.yaml", "--dry-run"])
    command = "python -m cory.train --config my.yaml --cory.num_agents=1 --seed=0 "
    assert command in capsys.readouterr().out
    (workdir / "trial.yaml").write_text(EXPERIMENT.replace("cory.train", "cory.trainer"))
    with pytest.raises(UserError, match="script: "):
        experiment.command_line(["trial.yaml", "--dry-run"])


@pytest.mark.slow
def test_an_experiment_with_an_own_task_runs_in_any_folder(
    workdir, policy_folder, capsys, monkeypatch
):
    write_config(workdir, policy_folder)
    (workdir / "trial.yaml").write_text(EXPERIMENT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    experiment.command_line(["trial.yaml"])
    out = workdir / "runs/experiments/small/trial/comparison"
    names = {path.name for path in out.iterdir()}
    assert {"comparison.md", "runs.csv", "held_out.csv", "curves.png"} <= names
    assert "| PPO | agent_1 after itself | 1 |" in (out / "comparison.md").read_text()
    capsys.readouterr()
    experiment.command_line(["trial.yaml"])
    assert "0 to make" in capsys.readouterr().out
