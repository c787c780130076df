"""Own tasks: prompts and reward files named by settings alone."""

import asyncio
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, sentences

import cory
from cory.agents import make_agents
from cory.callbacks.load import load_callbacks
from cory.cli.load import as_config, load, read_command_line
from cory.config import keys
from cory.errors import UserError
from cory.evaluation.folder import read_responses
from cory.models.tokenization import encode
from cory.prompts import RolePrompts
from cory.rewards import Reward, score
from cory.task import Task, load_dataset
from cory.tasks.config import OwnConfig, OwnTaskConfig
from cory.tasks.own import held_out_rows, make_task
from cory.tasks.python_files import PythonFiles
from cory.trainer import CoryTrainer
from study import experiment

REWARDS = """
import asyncio

from beside import GOOD

WORD = "good"


def good(completions, **columns):
    return [float(text.count(GOOD)) for text in completions]


async def short(prompts, completions, hint=None):
    await asyncio.sleep(0)
    return [None if "bad" in prompt else -0.01 * len(text) for prompt, text in zip(prompts, completions)]


def fails(prompts, completions):
    return [1 / (row != "fourth") for row in prompts]


def needs(completions, answer):
    return [0.0] * len(completions)


def text(completions):
    return "good"


def nan(completions):
    return [float("nan")] * len(completions)


def few(completions):
    return [0.0]


def mapping(completions):
    return {row: 1.0 for row in range(len(completions))}


def a_set(completions):
    return {1.0, 2.0, 3.0, 4.0}


def large(completions):
    return [1e300] * len(completions)
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
    (tmp_path / "beside.py").write_text('GOOD = "good"\n')
    yield tmp_path
    sys.modules.pop("beside", None)


def settings(**changes) -> OwnConfig:
    known = {"dataset": "prompts.jsonl", "reward": "rewards.py:good"}
    return OwnConfig(task=OwnTaskConfig(**(known | changes)))


# Bad input: every key


MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": ""}, r"task.dataset: expected a file, a folder or a Hub id, got ''"),
        (
            {"dataset": "./none.jsonl"},
            r"task.dataset: expected an existing file, got './none.jsonl'. Did you mean 'prompts.jsonl'",
        ),
        (
            {"dataset": "."},
            r"task.dataset: expected a file train.parquet, train.jsonl or train.csv",
        ),
        ({"subset": "main"}, r"task.subset: expected null for local data, got 'main'"),
        (
            {"split": "valid", "dataset": "."},
            r"task.dataset: expected a file valid.parquet, valid.jsonl or valid.csv",
        ),
        (
            {"prompt_column": "question"},
            r"task.prompt_column: expected a column of .* among \['prompt',.*'question'",
        ),
        (
            {"prompt_column": "hint"},
            r"task.prompt_column: expected 'prompt', as the dataset has a column .*got 'hint'",
        ),
        ({"reward": ""}, r"task.reward: expected path/to/FILE.py:FUNCTION, got ''"),
        (
            {"reward": []},
            r"task.reward: expected path/to/FILE.py:FUNCTION, or a list of them, got \[\]",
        ),
        (
            {"reward": "rewards.py"},
            r"task.reward: expected path/to/FILE.py:FUNCTION, got 'rewards.py'",
        ),
        ({"reward": "none.py:good"}, r"task.reward: expected an existing file, got 'none.py'"),
        (
            {"reward": "rewards.py:god"},
            r"task.reward: expected a function of rewards.py, which has a_set, fails, few, good, large, mapping, nan, "
            r"needs, short, text, got",
        ),
        (
            {"reward": "rewards.py:WORD"},
            r"task.reward: expected a function, got \"rewards.py:WORD = 'good'\"",
        ),
        (
            {"reward": "rewards.py:needs"},
            r"reward function rewards.py:needs: expected parameters among .*'hint', 'number'.*got \['answer'\]",
        ),
        (
            {"reward_weights": [1.0, 2.0]},
            r"task.reward_weights: expected null or a weight for each of 1 rewards, got",
        ),
        (
            {"reward_weights": [float("nan")]},
            r"task.reward_weights: expected a finite number, got nan",
        ),
        (
            {"pioneer_prompt": "{prompt}{answer}"},
            r"task: pioneer prompt: expected placeholders among .*got \{answer\}",
        ),
        (
            {"observer_prompt": "{prompt}{response}{a}"},
            r"task: observer prompt: expected placeholders .*got \{a\}",
        ),
        (
            {"observer_prompt": "{prompt}"},
            r"task: observer prompt: expected the placeholder \{response\}",
        ),
    ],
)
def test_bad_values(here, changes, message):
    with pytest.raises(UserError, match=message):
        make_task(settings(**changes))


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
        (3, r"expected text or chat messages, got \d"),
        ("", r"expected text or chat messages, got ''"),
        (
            [{"role": "critic", "content": "Hello"}],
            r"expected messages of \{role, content\}, .*'critic'",
        ),
        (
            [{"role": "system", "content": "Be kind."}],
            r"the last one user, with text, got .*Be kind",
        ),
        ([*MESSAGES, {"role": "assistant", "content": "Hi"}], r"the last one user, with text, got"),
        ([{"role": "user", "content": ""}], r"the last one user, with text, got"),
        ([{"role": "user", "text": "Hello"}], r"expected messages of \{role, content\}"),
    ],
)
def test_bad_prompts(here, prompt, message):
    good = 1 if prompt == 3 else "Hello" if isinstance(prompt, str) else prompt
    (here / "bad.jsonl").write_text(
        "".join(json.dumps({"ask": one}) + "\n" for one in (good, prompt))
    )
    with pytest.raises(UserError, match=rf"task.prompt_column 'ask', row \d: .*{message}"):
        make_task(settings(dataset="bad.jsonl", prompt_column="ask"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def good(:\n", r"expected bad.py to run, got SyntaxError: .* \(line 1\)"),
        (
            "import os\n\nimport nowhere\n",
            r"got ModuleNotFoundError: No module named 'nowhere' \(line 3\)",
        ),
        ("\nraise SystemExit(3)\n", r"got SystemExit: 3 \(line 2\)"),
        ("x = 1\n", r"expected a function of bad.py, which has none, got 'good'"),
    ],
)
def test_reward_files_that_fail(here, code, message):
    (here / "bad.py").write_text(code)
    with pytest.raises(UserError, match=f"task.reward: .*{message}"):
        PythonFiles().load("task.reward", ["bad.py:good"])


@pytest.mark.parametrize("column", ["prompts", "completions", "role"])
def test_a_column_that_a_reward_would_get_twice(here, column):
    (here / "bad.jsonl").write_text(json.dumps({"prompt": "Hello", column: "x"}) + "\n")
    with pytest.raises(
        UserError,
        match=rf"expected no columns that reward function rewards.py:good is .*'{column}'",
    ):
        make_task(settings(dataset="bad.jsonl"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "text",
            r"expected 4 rewards, one per completion, got 1|expected a finite number, got 'g'",
        ),
        (
            "nan",
            r"expected a finite number, got nan in row 1 of the batch, prompt 'first', completion 'first'",
        ),
        ("few", r"expected 4 rewards, one per completion, got 1"),
        ("mapping", r"expected a list of numbers, got dict"),
        ("a_set", r"expected a list of numbers, got set"),
        (
            "large",
            r"expected a number of at most 3.4e\+38, got 1e\+300 in row 1 of the batch, prompt 'first'",
        ),
        (
            "fails",
            r"ZeroDivisionError: division by zero, raised at rewards.py, line 19, in row 4 of the batch, "
            r"prompt 'fourth', completion 'fourth'",
        ),
    ],
)
def test_rewards_that_are_none(here, name, message):
    (loaded,) = PythonFiles().load("task.reward", [f"rewards.py:{name}"])
    texts = ["first", "second", "third", "fourth"]
    with pytest.raises(UserError, match=rf"reward function rewards.py:{name}: ({message})"):
        score([Reward(loaded.value, 1.0, loaded.full_name)], texts, texts, {})


def test_an_error_without_a_text_is_named_by_its_kind():
    with pytest.raises(
        UserError,
        match=r"^reward function judge: StopIteration, raised at test_own_task.py, line \d+, in row 1",
    ):
        score(judge, ["a"], ["a"], {})


def judge(completions):
    return [next(iter([])) for _ in completions]


def test_a_reward_that_raises_for_the_whole_batch_only():
    def judge(completions):
        if len(completions) > 1:
            raise TimeoutError("too many")
        return [0.0]

    with pytest.raises(
        UserError, match=r"judge: .*TimeoutError: too many, raised at .*for none of its rows alone"
    ):
        score(judge, ["a", "b"], ["a", "b"], {})


def test_no_agent_learns_from_a_reward_that_raises(here, policy_folder, config):
    (here / "beside.py").write_text("GOOD = 3\n")  # str.count raises
    one = CoryTrainer(config, make_agents(config), make_task(settings()))
    with pytest.raises(
        UserError,
        match=r"rewards.py:good: TypeError: .*, raised at .* in row 1 of the batch, prompt",
    ):
        one.iteration(0)
    assert [agent.optimizer_steps for agent in one.agents] == [0, 0]


# Rewards


def test_several_rewards_are_a_weighted_sum_and_none_does_not_count():
    """As TRL's GRPO trainer: the sum over the functions that apply; 0 and a warning where none does."""

    def one(completions, **columns):
        return [1.0, None, 3.0, None]

    async def other(completions):
        return [10.0, 20.0, None, None]

    texts = ["a", "b", "c", "d"]
    with pytest.warns(
        UserWarning, match="reward function one and reward function other returned None for a row"
    ):
        values = score([Reward(one), Reward(other, 0.5)], texts, texts, {})
    assert values.tolist() == [6.0, 10.0, 3.0, 0.0] and values.dtype == torch.float32


def test_async_rewards_wait_together_on_one_loop():
    loops = []
    all_wait = asyncio.Barrier(4)  # each waits until all four do

    async def together(completions):
        loops.append(asyncio.get_running_loop())
        await all_wait.wait()
        return [1.0] * len(completions)

    for _ in range(2):
        assert score([Reward(together)] * 4, ["a"], ["a"], {}).tolist() == [4.0]
    assert len(set(loops)) == 1

    async def alone(completions):
        return [1.0] * len(completions)

    async def notebook():  # where a loop is running already
        return score(alone, ["a"], ["a"], {}).tolist()

    assert asyncio.run(notebook()) == [1.0]


def test_an_async_reward_that_raises():
    async def judge(prompts, completions):
        if "bad" in completions:
            raise ConnectionError("refused")
        return [0.0] * len(completions)

    with pytest.raises(
        UserError,
        match=r"judge: .*ConnectionError: refused, raised at .*in row 2 of the batch, prompt 'b'",
    ):
        score(judge, ["a", "b"], ["good", "bad"], {})


def test_an_async_reward_may_end_the_program():
    async def keyless(completions):
        sys.exit("no API key")

    async def good(completions):
        return [1.0] * len(completions)

    with pytest.raises(SystemExit, match="no API key"):
        score([Reward(keyless), Reward(good)], ["a"], ["a"], {})
    assert score(good, ["a"], ["a"], {}).tolist() == [1.0]  # their loop goes on


def test_the_fingerprint_tells_rewards_apart(here):
    def prints(**changes):
        sys.modules.pop("beside", None)
        return make_task(settings(**changes)).fingerprint_of_reward()

    first = prints()
    assert first["reward"] == "rewards.py:good" and first == prints()
    both = {"reward": ["rewards.py:good", "rewards.py:short"]}
    assert prints(**both)["reward"] == "rewards.py:good + rewards.py:short"
    assert (
        prints(**both, reward_weights=[1, 0.5])["reward"]
        == "rewards.py:good + 0.5 * rewards.py:short"
    )
    (here / "beside.py").write_text('GOOD = "fine"\n')  # of the same length, in the same second
    assert prints()["reward_sha256"] != first["reward_sha256"]
    (here / "beside.py").write_text('GOOD = "good"\n')
    (here / "rewards.py").write_text(REWARDS.replace("-0.01", "-0.02"))
    assert prints()["reward_sha256"] != first["reward_sha256"]


def test_a_file_beside_a_reward_that_has_changed_needs_another_process(here):
    """In a notebook, where Python would go on with what it has imported, under the hash of what is there now."""
    sys.modules.pop("beside", None)
    make_task(settings())
    (here / "rewards.py").write_text(
        REWARDS.replace("-0.01", "-0.02")
    )  # a reward itself is run anew
    make_task(settings())
    (here / "beside.py").write_text('GOOD = "fine"\n')
    with pytest.raises(
        UserError, match=r"task\.reward: expected beside\.py as it was when rewards\.py"
    ):
        make_task(settings())


def test_the_fingerprint_has_the_packages_beside_a_file(here):
    (here / "helpers").mkdir()
    (here / "helpers/__init__.py").write_text("from helpers.inner import value\n")
    (here / "packed.py").write_text("from helpers import value\n")
    hashes = set()
    for number in (1, -1):
        for module in [name for name in sys.modules if name.split(".")[0] == "helpers"]:
            del sys.modules[module]
        source = f"def value(completions):\n    return [{number}.0] * len(completions)\n"
        (here / "helpers/inner.py").write_text(source)
        (loaded,) = PythonFiles().load("task.reward", ["packed.py:value"])
        hashes.add(loaded.sha256)
    assert len(hashes) == 2


def test_files_of_one_name_in_two_folders(here):
    for number in (1, 2):
        (here / str(number)).mkdir()
        (here / f"{number}/rewards.py").write_text(
            f"def value(completions):\n    return [{number}.0]\n"
        )
    one, two = PythonFiles().load("task.reward", ["1/rewards.py:value", "2/rewards.py:value"])
    assert (one.value([""]), two.value([""])) == ([1.0], [2.0]) and one.sha256 != two.sha256
    (here / "2/beside.py").write_text("")
    (here / "2/rewards.py").write_text("import beside\n")
    PythonFiles().load("task.reward", ["rewards.py:good"])
    with pytest.raises(
        UserError, match=r"task.reward: expected 'beside' to be .*2/beside.py, got '.*beside.py'"
    ):
        PythonFiles().load("task.reward", ["2/rewards.py:value"])


def test_a_callback_and_a_reward_of_one_file_share_its_globals(here):
    source = """
from cory import Callback

factor = [1.0]

def value(completions):
    return [factor[0]] * len(completions)

class Doubles(Callback):
    def on_iteration_begin(self, trainer, k):
        factor[0] *= 2
"""
    (here / "both.py").write_text(source)

    def load():
        (reward,) = PythonFiles().load("task.reward", ["both.py:value"])
        (callback,) = load_callbacks("both.py:Doubles")
        callback.on_iteration_begin(None, 0)
        return reward.value([""])

    assert load() == [2.0]
    (here / "both.py").write_text(source.replace("1.0", "3.0"))
    assert load() == [6.0]  # it has changed, so it is run again


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
    score(reward, columns["prompt"], ["a", "b"], {"role": ["pioneer"] * 2, "other": [0, 0]})
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
        row["messages"][1]["content"] for row in data
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
    assert "output: expected none, as a resumed run goes on in its" in command(*elsewhere).error
    (here / "other.yaml").write_text(f"{(here / 'my.yaml').read_text()}output: runs/other\n")
    elsewhere = ("cory.train", "--config", "other.yaml", "--resume", "runs/my")
    assert "output: expected none, as a resumed run goes on in its" in command(*elsewhere).error
    status, _, error = command("cory.train", "--resume", "runs/my", "--iterations", "4")
    assert status == 2 and "fingerprint.reward_sha256" in error


def test_a_split_is_its_own_file_and_its_parts(here):
    (here / "data").mkdir()
    for name in "train", "train_small", "train-dev", "part-00000-of-00002", "part-00001-of-00002":
        (here / f"data/{name}.jsonl").write_text(json.dumps({"ask": name}) + "\n")
    folder = settings(dataset="data", prompt_column="ask")
    assert make_task(folder).dataset["prompt"][:] == ["train"]
    parts = make_task(settings(dataset="data", prompt_column="ask", split="part")).dataset
    assert parts["prompt"][:] == ["part-00000-of-00002", "part-00001-of-00002"]
    shutil.copy(here / "data/train.jsonl", here / "data/train.json")
    with pytest.raises(
        UserError, match=r"expected a file train.*got \['train.json', 'train.jsonl'"
    ):
        make_task(folder)


def test_an_empty_file_has_no_rows(here):
    (here / "empty.jsonl").touch()
    with pytest.raises(UserError, match=r"task.dataset: expected rows, got none in 'empty.jsonl'"):
        make_task(settings(dataset="empty.jsonl"))


def test_a_single_file_has_no_held_out_prompts(here):
    config = settings()
    with pytest.raises(
        UserError,
        match=r"task.eval_dataset: expected a file of held-out prompts, as all of 'prompts.j",
    ):
        held_out_rows(config, "test")
    assert len(held_out_rows(config, "train")) == 24
    with pytest.raises(UserError, match=r"task\.eval_dataset: .*'held_oot'"):
        held_out_rows(settings(eval_dataset="held_oot"))
    single = settings(eval_dataset="held_out.jsonl")
    assert len(held_out_rows(single, "test")) == len(held_out_rows(single)) == 6
    with pytest.raises(
        UserError, match=r"--split: expected test, as task\.eval_dataset is a single"
    ):
        held_out_rows(single, "validation")
    (here / "data").mkdir()
    for split in ("train", "test"):
        (here / f"data/{split}.jsonl").write_text(json.dumps({"ask": split}) + "\n")
    folder = settings(dataset="data", prompt_column="ask")
    assert make_task(folder).dataset["prompt"][0] == "train"
    assert (
        held_out_rows(folder)["prompt"][0] == held_out_rows(folder, "test")["prompt"][0] == "test"
    )


def test_mistakes_are_told_before_torch_is_imported(here, policy_folder):
    write_config(here, policy_folder)
    code = """
import sys
from cory.train import run
sys.argv = ["x", "--config", "my.yaml", "--task.reward", "no.py:f"]
try:
    run()
except Exception as error:
    print(error)
print("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.splitlines()[1:] == [
        "task.reward: expected an existing file, got 'no.py'",
        "False",
    ]


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
    module = importlib.import_module("cory.evaluation.evaluate")
    assert cory.evaluate is module.evaluate and callable(cory.evaluate)


def test_settings_are_read_back_from_a_run(here):
    from dataclasses import asdict

    config = settings(reward=["rewards.py:good", "rewards.py:short"], reward_weights=[1.0, 0.5])
    assert as_config(OwnConfig, yaml.safe_load(yaml.safe_dump(asdict(config))), Path("x")) == config


def test_cells_of_a_csv_file_are_texts(here):
    (here / "p.csv").write_text('prompt,answer\nNA,007\n"a, b",\nnull,True\n')
    rows = load_dataset("p.csv", "train", ["prompt", "answer"])
    assert rows["prompt"][:] == ["NA", "a, b", "null"] and rows["answer"][:] == ["007", "", "True"]
    for row in ("a", "a,b,c"):
        (here / "p.csv").write_text(f"prompt,answer\na,b\n{row}\n")
        with pytest.raises(UserError, match=r"p.csv, line 3: not as many cells as columns"):
            load_dataset("p.csv", "train", ["prompt", "answer"])


def test_the_settings_of_the_page_are_read(here):
    page = (ROOT / "docs/own_task.md").read_text()
    (here / "praise.yaml").write_text(
        re.search(r"cat > praise.yaml <<'END'\n(.*?)END", page, re.DOTALL).group(1)
    )
    line = read_command_line(OwnConfig, None, ["--config", "praise.yaml"])
    assert line.setting == "praise" and line.config.task.reward == "rewards.py:praise"


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
    assert "2 runs, 0 with a row, 0 finished" in first and "To do: 2 runs" in first
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
    assert "1 run, 1 with a row" in capsys.readouterr().out


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


def fails(completions):
    raise KeyError("gone")


class Count(Callback):
    def on_train_begin(self, trainer, run):
        self.file = run.folder / "counted"

    def on_iteration_end(self, trainer, iteration):
        with open(self.file, "a") as file:
            file.write(f"{iteration.records[0]['length']}\\n")


class Needs(Callback):
    def __init__(self, size):
        self.size = size


def loud(completions):
    return [0.0] * len(completions)
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
        (
            {"task": {"metrics": "watch.py:none"}},
            r"task\.metrics: expected a function of watch\.py, which .*length",
        ),
        (
            {"task": {"metrics": ["watch.py:length"] * 2}},
            r"task\.metrics: expected functions of different names",
        ),
        (
            {"task": {"metrics": "other.py:kl"}},
            r"metrics: expected a name that no other metric has, got 'kl'",
        ),
        (
            {"task": {"metrics": "other.py:name"}},
            r"metrics: expected a name that no other metric has, got 'name'",
        ),
        ({"task": {"extract": "other.py:slow"}}, r"extract: expected a function, got an async one"),
        (
            {"task": {"metrics": "watch.py:fails"}},
            r"metric function fails: KeyError: 'gone', raised at watch\.py, line 15",
        ),
        (
            {
                "task": {
                    "reward": ["rewards.py:good", "rewards.py:short"],
                    "metrics": "other.py:reward_short",
                }
            },
            r"metrics: expected a name that no other metric has, got 'reward_short'",
        ),
        (
            {"callbacks": "watch.py:length"},
            r"callbacks: expected a class derived from cory\.Callback",
        ),
        (
            {"callbacks": "watch.py:Needs"},
            r"callbacks: expected watch\.py:Needs to be made without arguments",
        ),
        ({"callbacks": ["none.py:Count"]}, r"callbacks: expected an existing file, got 'none\.py'"),
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
