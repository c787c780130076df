"""Own tasks: prompts and reward files named by settings alone."""

import importlib
import json
import re
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, sentences

import cory
from cory.agent import make_agents
from cory.command import as_config, load, read_config
from cory.config import keys
from cory.errors import UserError
from cory.evaluation.command import read_responses
from cory.models.text import encode
from cory.own_task import OwnConfig, OwnTaskConfig, held_out_rows, make_task
from cory.rewards import score_by_function
from cory.roles import RolePrompts
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


def needs(completions, answer):
    return [0.0] * len(completions)
"""
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder with prompts and rewards, which is the current one."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": text, "hint": f"hint {i}", "number": i} for i, text in enumerate(sentences(24))
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:6]))
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def settings(**changes) -> OwnConfig:
    known = {"dataset": "prompts.jsonl", "reward": "rewards.py:good"}
    return OwnConfig(task=OwnTaskConfig(**(known | changes)))


# Bad input: every key


MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": ""}, r"task\.dataset: .*got ''"),
        ({"dataset": "./none.jsonl"}, r"task\.dataset: .*'./none.jsonl'"),
        ({"dataset": "."}, r"task\.dataset: .*train"),
        ({"subset": "main"}, r"task\.subset: .*'main'"),
        ({"prompt_column": "question"}, r"task\.prompt_column: .*'hint'.*'question'"),
        ({"prompt_column": "hint"}, r"task\.prompt_column: .*'hint'"),
        ({"max_prompt_tokens": 1}, r"task\.max_prompt_tokens: .*got 1"),
        ({"reward": ""}, r"task\.reward: .*got ''"),
        ({"reward": []}, r"task\.reward: "),
        ({"reward": "rewards.py:god"}, r"task\.reward: .*'god'"),
        ({"reward": "rewards.py:needs"}, r"reward rewards\.py:needs: .*\['answer'\]"),
        ({"reward": ["rewards.py:good"] * 2}, r"task\.reward: .*'good', 'good'"),
        ({"reward_weights": [1.0, 2.0]}, r"task\.reward_weights: .*2\.0"),
        ({"reward_weights": [float("nan")]}, r"task\.reward_weights: .*nan"),
        ({"team_reward": "rewards.py:good"}, r"team reward rewards\.py:good: .*\['completions'\]"),
        ({"pioneer_prompt": "{prompt}{answer}"}, r"pioneer prompt: .*\{answer\}"),
        ({"observer_prompt": "{prompt}{response}{a}"}, r"observer prompt: .*\{a\}"),
        ({"observer_prompt": "{prompt}"}, r"observer prompt: .*\{response\}"),
    ],
)
def test_bad_values(here, policy_folder, changes, message):
    with pytest.raises(UserError, match=f"^{message}"):
        config = settings(**changes)
        config.model.name = str(policy_folder)
        make_task(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [("dataset", 3), ("subset", 3), ("split", 3), ("eval_dataset", 3), ("eval_split", 3), ("prompt_column", 3),
     ("reward", 3), ("reward", [3]), ("reward_weights", "one"), ("pioneer_prompt", 3), ("observer_prompt", 3)],
)  # fmt: skip
def test_values_of_another_type(key, value, here):
    with pytest.raises(UserError, match=rf"{key}"):
        settings(**{key: value})
    (here / "my.yaml").write_text(
        yaml.safe_dump({"task": {key: value if value != 3 else {"a": 1}}})
    )
    with pytest.raises(UserError, match=rf"my.yaml: .*{key}"):
        load(OwnConfig, None, ["--config", "my.yaml"])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (3, r"got \d"),
        ("", r"got ''"),
        ([{"role": "critic", "content": "Hello"}], r"got .*'critic'"),
        ([{"role": "system", "content": "Be kind."}], r"got .*Be kind"),
        ([*MESSAGES, {"role": "assistant", "content": "Hi"}], r"got .*'assistant'"),
        ([{"role": "user", "content": ""}], r"got .*''"),
        ([{"role": "user", "text": "Hello"}], r"got .*Hello"),
    ],
)
def test_bad_prompts(here, prompt, message):
    good = "Hello" if isinstance(prompt, str) else prompt
    (here / "bad.jsonl").write_text(
        "".join(json.dumps({"ask": one}) + "\n" for one in (good, prompt))
    )
    with pytest.raises(UserError, match=rf"column 'prompt', row \d: .*{message}"):
        make_task(settings(dataset="bad.jsonl", prompt_column="ask"))


# Rewards


def test_the_fingerprint_tells_rewards_apart(here):
    def prints(**changes):
        return make_task(settings(**changes)).fingerprint_of_reward()

    first = prints()
    assert first["reward"] == "rewards.py:good" and first == prints()
    both = {"reward": ["rewards.py:good", "rewards.py:short"]}
    assert prints(**both)["reward"] == "rewards.py:good + rewards.py:short"
    assert (
        prints(**both, reward_weights=[1, 0.5])["reward"]
        == "rewards.py:good + 0.5 * rewards.py:short"
    )
    (here / "rewards.py").write_text(REWARDS.replace("-0.01", "-0.02"))
    assert prints()["reward_sha256"] != first["reward_sha256"]


# Long prompts


def test_long_prompts_are_left_out_in_training_and_held_out(here, policy_folder, capsys):
    texts = ["good", "good " * 30, "good bad", "good " * 40]
    for name in ("train", "test"):
        lines = "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
        (here / f"{name}.jsonl").write_text(lines)
    config = settings(dataset=".", max_prompt_tokens=20)
    config.model.name = str(policy_folder)
    assert make_task(config).dataset["prompt"][:] == ["good", "good bad"]
    said = capsys.readouterr().err
    assert said.count("task.max_prompt_tokens: 2 of 4 prompts are longer than 20 tokens") == 1
    assert held_out_rows(config)["prompt"][:] == ["good", "good bad"]
    # What counts is the query as the pioneer reads it.
    config.task.pioneer_prompt = "good " * 20 + "{prompt}"
    with pytest.raises(UserError, match=r"^task\.max_prompt_tokens: "):
        make_task(config)
    config.roles = [{"prompt": "good {prompt}"}, {}]
    assert len(make_task(config).dataset) == 2


def test_prompts_that_do_not_fit_say_which_limit_would(here, config):
    """One error names all numbers, and the limit that it names is one that fits."""
    texts = [*sentences(10), "good " * 50, "good " * 95]  # the observer reads a query twice
    (here / "long.jsonl").write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
    own = settings(dataset="long.jsonl")
    own.model = config.model
    agents = make_agents(config)
    with pytest.raises(
        UserError, match=r"^dataset: .*2 of 12 rows .*observer.*context of 96"
    ) as error:
        CoryTrainer(config, agents, make_task(own))
    limit = int(re.search(r"task.max_prompt_tokens: (\d+)", str(error.value))[1])
    own.task.max_prompt_tokens = limit
    assert len(CoryTrainer(config, agents, make_task(own)).task.dataset) == 10


# Chat messages


def test_chat_messages_are_rendered_and_rewarded_as_messages(here, tokenizer, monkeypatch):
    seen = {}

    def reward(prompts, completions, role):
        seen.update(prompts=prompts, completions=completions, role=role)
        return [1.0] * len(prompts)

    prompts = RolePrompts("Answer: {prompt}", "{prompt} Not: {response}")
    task = Task.from_prompts([MESSAGES, MESSAGES[1:]], reward, prompts)
    columns = task.dataset[:]
    assert task.render(0, columns)[0] == [MESSAGES[0], {"role": "user", "content": "Answer: Hello"}]
    read = task.render(1, columns, [["Hi", "Ho"]])
    assert read[1] == [{"role": "user", "content": "Hello Not: Ho"}]
    with pytest.raises(
        UserError,
        match=r"model.name: expected a tokenizer with a chat template, as the prompts are",
    ):
        encode(tokenizer, read)
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    assert (
        tokenizer.decode(encode(tokenizer, read)[0]) == "<system>Be kind.<user>Hello Not: Hi<bot>"
    )
    assert encode(tokenizer, read, chat_template=True) == encode(tokenizer, read)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no system') }}")
    with pytest.raises(
        UserError,
        match=r"prompt in row 1: expected messages that the chat template takes.*no system",
    ):
        encode(tokenizer, read)
    score_by_function(
        reward, columns["prompt"], ["a", "b"], {"role": ["pioneer"] * 2, "other": [0, 0]}
    )
    assert seen["prompts"][0] == MESSAGES and seen["completions"][1] == [
        {"role": "assistant", "content": "b"}
    ]


def test_an_observer_in_a_chat_is_asked_for_a_better_answer(here):
    """By default; where models continue a text, the response is part of that text."""
    config = settings()
    task = make_task(config)
    query = task.dataset["prompt"][0]
    assert task.render(1, task.dataset[:1], [[" yes"]]) == [f"{query} yes\n{query}"]
    config.model.chat_template = True
    (read,) = make_task(config).render(1, task.dataset[:1], [["Yes."]])
    assert read == f"{query}\n\nHere is an answer to this:\n\nYes.\n\nGive a better answer."
    config.task.observer_prompt = "{prompt} Not: {response}"
    assert make_task(config).render(1, task.dataset[:1], [["Yes."]]) == [f"{query} Not: Yes."]


def test_training_on_chat_messages(here, config, policy_folder):
    config.iterations = 2
    data = [
        {"messages": [MESSAGES[0], {"role": "user", "content": text[:12]}]}
        for text in sentences(16)
    ]
    (here / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    (here / "chat.py").write_text(
        "def size(completions):\n    return [float(len(c[0]['content'])) for c in completions]\n"
    )
    agents = make_agents(config)
    template, tokenizer = agents[0].tokenizer.chat_template, agents[0].tokenizer
    tokenizer.chat_template = CHAT
    try:
        task = make_task(
            settings(dataset="chat.jsonl", prompt_column="messages", reward="chat.py:size")
        )
        folder = CoryTrainer(config, agents, task).train().folder
    finally:
        tokenizer.chat_template = template
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {sample["query"] for sample in samples} <= {
        f"system: Be kind.\nuser: {row['messages'][1]['content']}" for row in data
    }


# The commands


def write_config(here, policy_folder, **more):
    ppo = {"batch_size": 8, "mini_batch_size": 8, "learning_rate": 1e-3}
    sampling = {"min_new_tokens": 3, "max_new_tokens": 6}
    task = {
        "dataset": "prompts.jsonl",
        "eval_dataset": "held_out.jsonl",
        "reward": "rewards.py:good",
    }
    values = {
        "iterations": 2,
        "device": "cpu",
        "model": {"name": str(policy_folder)},
        "ppo": ppo,
        "sampling": sampling,
    }
    (here / "my.yaml").write_text(yaml.safe_dump(values | {"task": task} | more))


def test_train_evaluate_and_resume(here, policy_folder, command):
    write_config(here, policy_folder)
    train = ["cory.train", "--config", "my.yaml"]
    status, _, error = command(*train)
    assert status == 0, error
    status, out, _ = command(*train, "--cory.num_agents", "1", "--output", "runs/one")
    assert status == 0 and out.startswith("my-num_agents=1: PPO, model ")
    assert (
        command(
            "cory.evaluation", "runs/my", "runs/one", "--output", "runs/eval", "--samples", "2"
        )[0]
        == 0
    )
    evaluation = json.loads((here / "runs/eval/evaluation.json").read_text())
    names = ["base", "my/agent_1", "my/agent_2", "one/agent_1", "base after itself", "my/agent_2 after agent_1",
             "my/agent_1 after agent_2", "one/agent_1 after itself"]  # fmt: skip
    assert [row["name"] for row in evaluation["rows"]] == names and len(evaluation["queries"]) == 6

    other = ("--task.dataset", "other.jsonl", "--queries", "2")
    said = command("cory.evaluation", "runs/my", *other).error
    assert "task.dataset: expected task.eval_dataset, as the run's held-out prompts are" in said

    prompts = (
        "--task.pioneer_prompt",
        "Ask: {prompt}",
        "--task.observer_prompt={response}: {prompt}",
    )
    other = ("--queries", "2", "--output", "runs/other", *prompts)
    assert command("cory.evaluation", "runs/my", *other)[0] == 0
    records = read_responses(here / "runs/other")
    for (name, number), record in records.items():
        query = re.escape(evaluation["queries"][number])
        expected = f"Ask: {query}" if record["role"] == "pioneer" else f".*: {query}"
        assert re.fullmatch(expected, record["prompt"], re.DOTALL), name
    assert {"task_reward", "task_reward_ci", "kl", "combined_reward"} < set(evaluation["rows"][0])
    # The fixture's held-out rows are its first ones.
    assert evaluation["in_training"] == {"my": 1.0, "one": 1.0}
    assert command("cory.train", "--resume", "runs/my", "--iterations", "3")[0] == 0
    last = json.loads((here / "runs/my/metrics.jsonl").read_text().splitlines()[-1])
    assert last["iteration"] == 2
    (here / "rewards.py").write_text(REWARDS + "\n")
    elsewhere = ("cory.train", "--resume", "runs/my", "--output", "runs/other")
    assert command(*elsewhere).error.startswith("error: output: ")
    other_settings = ("cory.train", "--config", "my.yaml", "--resume", "runs/my")
    assert command(*other_settings).error.startswith("error: config: ")
    status, _, error = command("cory.train", "--resume", "runs/my", "--iterations", "4")
    assert status == 2 and "fingerprint.reward_sha256" in error


def test_a_single_file_has_no_held_out_prompts(here):
    config = settings()
    with pytest.raises(
        UserError,
        match=r"^task\.eval_dataset: .*'prompts\.jsonl'",
    ):
        held_out_rows(config, "test")
    assert len(held_out_rows(config, "train")) == 24
    with pytest.raises(UserError, match=r"task\.eval_dataset: .*'held_oot'"):
        held_out_rows(settings(eval_dataset="held_oot"))
    single = settings(eval_dataset="held_out.jsonl")
    assert len(held_out_rows(single, "test")) == len(held_out_rows(single)) == 6
    with pytest.raises(UserError, match=r"^--split: .*'held_out\.jsonl', got 'validation'"):
        held_out_rows(single, "validation")
    (here / "data").mkdir()
    for split in ("train", "test"):
        (here / f"data/{split}.jsonl").write_text(json.dumps({"ask": split}) + "\n")
    folder = settings(dataset="data", prompt_column="ask")
    assert make_task(folder).dataset["prompt"][0] == "train"
    assert (
        held_out_rows(folder)["prompt"][0] == held_out_rows(folder, "test")["prompt"][0] == "test"
    )


def test_help_names_every_key_of_the_task(command):
    _, out, _ = command("cory.train", "--help")
    assert all(f"--task.{key}" in out for key in keys(OwnTaskConfig))
    assert "--split" in command("cory.evaluation", "--help")[1]


def test_a_run_of_another_task_is_refused(here, policy_folder, command):
    (here / "run/agent_1").mkdir(parents=True)
    recorded = {"task": {"text_column": "text"}, "fingerprint": {"task": "own"}}
    (here / "run/config.yaml").write_text(yaml.safe_dump(recorded))
    (here / "run/summary.json").write_text("{}")
    status, _, error = command("cory.evaluation", "run")
    assert status == 2 and "text_column" in error


def test_evaluate_of_the_package_is_the_function():
    """And not the module of that name, whatever was imported before."""
    module = importlib.import_module("cory.evaluation.command")
    assert cory.evaluate is module.evaluate and callable(cory.evaluate)


def test_settings_are_read_back_from_a_run(here):
    from dataclasses import asdict

    config = settings(reward=["rewards.py:good", "rewards.py:short"], reward_weights=[1.0, 0.5])
    assert as_config(OwnConfig, yaml.safe_load(yaml.safe_dump(asdict(config))), Path("x")) == config


def test_the_settings_of_the_page_are_read(here):
    page = (ROOT / "docs/own_task.md").read_text()
    (here / "praise.yaml").write_text(
        re.search(r"cat > praise.yaml <<'END'\n(.*?)END", page, re.DOTALL).group(1)
    )
    config, name = read_config(OwnConfig, argv=["--config", "praise.yaml"])
    assert name == "praise" and config.task.reward == "rewards.py:praise"


# Experiments


EXPERIMENT = """
title: A trial
question: Does it run?
runs:
  PPO: {script: cory.train, flags: {cory.num_agents: 1}}
  CORY: {script: cory.train}
scales:
  small: {config: my.yaml, seeds: [0], evaluate: cory.evaluation --queries 4}
"""


def test_an_experiment_of_an_own_task_from_any_folder(here, policy_folder, capsys, monkeypatch):
    write_config(here, policy_folder)
    (here / "trial.yaml").write_text(EXPERIMENT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    experiment.command_line(["trial.yaml", "--dry-run"])
    first, *commands = capsys.readouterr().out.splitlines()
    assert "2 runs, 2 to make" in first
    assert commands[0].startswith(
        "python -m cory.train --config my.yaml --cory.num_agents=1 --seed=0 "
    )
    # One of them is made: each starts two processes.
    (here / "trial.yaml").write_text(EXPERIMENT.replace("  CORY: {script: cory.train}\n", ""))
    experiment.command_line(["trial.yaml"])
    out = here / "runs/experiments/small/trial/comparison"
    assert {"comparison.md", "runs.csv", "held_out.csv", "held_out.png"} <= {
        path.name for path in out.iterdir()
    }
    assert "| PPO | agent_1 after itself | 1 |" in (out / "comparison.md").read_text()
    capsys.readouterr()
    experiment.command_line(["trial.yaml"])
    assert "1 run, 0 to make" in capsys.readouterr().out


def test_an_experiment_names_a_script_or_the_module(here, policy_folder):
    write_config(here, policy_folder)
    (here / "trial.yaml").write_text(EXPERIMENT.replace("cory.train", "cory.trainer"))
    with pytest.raises(
        UserError,
        match=r"script: expected a script of the checkout, or cory.train, got 'cory.trainer'",
    ):
        experiment.command_line(["trial.yaml", "--dry-run"])


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (
            "cory.evaluation",
            ["runs/nope"],
            "models: expected folders of runs or models that exist, or Hub ids, got",
        ),
        (
            "cory.evaluation",
            ["nobody/nothing"],
            "models: expected the folder of at least one run, for its prompts",
        ),
        (
            "cory.train",
            ["--resume", "runs/nope"],
            "resume: expected auto, or the folder of a run, got",
        ),
    ],
)
def test_a_run_that_is_not_there_is_named(
    module, arguments, message, tmp_path, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    status, out, error = command(module, *arguments)
    assert status == 2 and message in error and "Loading" not in out


# Metrics and callbacks


METRICS = """
from cory import Callback


def length(completions):
    return [float(len(text)) for text in completions]


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


def test_a_yaml_task_has_metrics_callbacks_and_a_metric_for_each_reward(
    here, policy_folder, command
):
    (here / "watch.py").write_text(METRICS)
    prompts = here / "prompts.jsonl"
    prompts.write_text(prompts.read_text().replace("bad", "sad"))  # so each has both rewards
    rewards = {"reward": ["rewards.py:good", "rewards.py:short"], "reward_weights": [1.0, 2.0]}
    task = {"dataset": "prompts.jsonl", "eval_dataset": "held_out.jsonl", **rewards}
    task["metrics"] = ["watch.py:length", "watch.py:hinted"]
    write_config(here, policy_folder, task=task, callbacks="watch.py:Count", sample_every=1)
    status, _, error = command("cory.train", "--config", "my.yaml")
    assert status == 0, error
    records = [
        json.loads(line) for line in (here / "runs/my/metrics.jsonl").read_text().splitlines()
    ]
    for record in records:
        total = record["reward_good"] + 2 * record["reward_short"]
        assert record["task_reward"] == pytest.approx(total, abs=1e-5)
        assert ("hinted" in record) == (record["role"] == "pioneer")
        assert record["role"] == "observer" or record["hinted"] == pytest.approx(
            record["task_reward"], abs=1e-5
        )
    counted = [float(line) for line in (here / "runs/my/counted").read_text().splitlines()]
    assert counted == [record["length"] for record in records if record["agent"] == "agent_1"]
    status, said, error = command("cory.evaluation", "runs/my", "--queries", "4", "--device", "cpu")
    assert status == 0, error
    folder = here / "runs/evaluation-my"
    rows = json.loads((folder / "evaluation.json").read_text())["rows"]
    assert {"reward_good", "reward_short", "length"} < set(rows[0]) and "reward_good" in said
    observer = next(row for row in rows if row["name"] == "my/agent_2 after agent_1")
    assert "hinted" in rows[0] and "hinted" not in observer
    records = [
        json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines() if line
    ]
    for record in records:
        parts = record["rewards_by_function"]
        (total,) = record["rewards"]
        assert total == pytest.approx(
            (parts["good"][0] or 0) + 2 * (parts["short"][0] or 0), abs=1e-5
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": {"metrics": "watch.py:none"}}, r"task\.metrics: .*'none'"),
        ({"task": {"metrics": ["watch.py:length"] * 2}}, r"task\.metrics: .*watch\.py:length"),
        ({"task": {"metrics": "other.py:kl"}}, r"task\.metrics: .*'kl'"),
        ({"task": {"metrics": "other.py:name"}}, r"task\.metrics: .*'name'"),
        ({"task": {"extract": "other.py:slow"}}, r"task\.extract: "),
        (
            {
                "task": {
                    "reward": ["rewards.py:good", "rewards.py:short"],
                    "metrics": "other.py:reward_short",
                }
            },
            r"task\.metrics: .*'reward_short'",
        ),
        ({"callbacks": "watch.py:length"}, r"callbacks: .*watch\.py:length"),
        ({"callbacks": ["none.py:Count"]}, r"callbacks: .*'none\.py:Count'"),
        ({"guards": {"patience": 2}}, r"guards\.patience: expected null without eval_every, got 2"),
    ],
)
def test_bad_metrics_and_callbacks(here, policy_folder, command, changes, message):
    (here / "watch.py").write_text(METRICS)
    zeros = "    return [0.0] * len(completions)\n"
    functions = [f"def {name}(completions):\n{zeros}" for name in ("kl", "name", "reward_short")]
    functions.append("async def slow(text):\n    return text\n")
    (here / "other.py").write_text("\n".join(functions))
    task = {"dataset": "prompts.jsonl", "reward": "rewards.py:good", **changes.pop("task", {})}
    write_config(here, policy_folder, task=task, **changes)
    status, _, error = command("cory.train", "--config", "my.yaml")
    assert status == 2 and re.search(message, error), error
