"""Chat with a run's agents: who answers, what the agents read, and what is printed."""

import io
import json
import re
import shutil

import pytest
from conftest import answering, make_config, sentences

import cory.agent
from cory.agent import Agent
from cory.build import make_agents
from cory.chat import Chat
from cory.config import ModelConfig, SamplingConfig
from cory.errors import UserError
from cory.models.load import load_policy
from cory.own_task import OwnConfig, OwnTaskConfig, make_task
from cory.roles import RolePrompts
from cory.run.tables import printable
from cory.streams import Purpose, Stream
from cory.task import Task
from cory.trainer import CoryTrainer

REWARDS = """
def year(completions, year):
    return [float(value) for value in year]
"""
QUERY = "the film was"


@pytest.fixture(scope="module")
def with_columns(policy_folder, tmp_path_factory):
    """A run with chat prompts that have a system message, and with a reward that reads a column."""
    folder = tmp_path_factory.mktemp("columns")
    model = shutil.copytree(policy_folder, folder / "model")
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    rows = [{"prompt": [SYSTEM, turn(text)], "year": 1999} for text in sentences(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    task = OwnTaskConfig(str(folder / "rows.jsonl"), reward=f"{folder}/rewards.py:year")
    task.observer_prompt = "{response} {prompt}"
    changes = {"iterations": 1, "task": task, "model": ModelConfig(str(model))}
    config = OwnConfig(**{**vars(make_config(policy_folder, folder)), **changes})
    return CoryTrainer(config, make_agents(config), make_task(config)).train().folder


SYSTEM = {"role": "system", "content": "be good"}


def turn(text):
    return {"role": "user", "content": text}


@pytest.fixture
def read(monkeypatch):
    """Collects the prompts that models answer, in order."""
    prompts = []
    respond = Agent.respond

    def recorded(agent, asked, *arguments, **options):
        prompts.extend(asked)
        return respond(agent, asked, *arguments, **options)

    monkeypatch.setattr(Agent, "respond", recorded)
    return prompts


def shown(answer):
    return printable(answer).replace("\n", "\n  ")


def test_a_prompt_is_answered_by_the_base_and_by_each_role(finished):
    lines = Chat(finished.folder, "cpu").answer(QUERY)

    def text(agent, prompt, role):
        folder = finished.folder / agent if agent else finished.config.model.name
        model, tokenizer = load_policy(ModelConfig(str(folder)))
        generator = Stream(0, Purpose.EVALUATION, role=role).torch()
        agent = answering(model, tokenizer)
        return agent.respond([prompt], SamplingConfig(1, 6), generator).completions[0]

    pioneer = text("agent_1", QUERY, 0)
    observer = text("agent_2", f'Improve "{QUERY}{pioneer}": {QUERY}', 1)
    expected = {
        "base": text(None, QUERY, 0),
        "agent_1 as pioneer": pioneer,
        "agent_2 as observer": observer,
    }
    for line, (name, answer) in zip(lines[:-1], expected.items(), strict=True):
        reward = answer.count("good") + len(answer) / 50
        assert line == f"{name} {reward:+.2f} {shown(answer)}"
    assert lines[-1] == "team reward +2.00"


def test_the_columns_of_a_row_reach_the_reward(with_columns, read):
    """A typed prompt becomes a turn after the system message. Its answers get no reward, since it lacks the column."""
    chat = Chat(with_columns, "cpu")
    row = {"prompt": [SYSTEM, turn("a film")], "year": 7}
    lines = chat.answer(json.dumps(row))
    assert read[-1][-1]["content"].endswith(" a film")
    assert all(" +7.00 " in line for line in lines[:3])
    read.clear()
    *answers, note = chat.answer(QUERY)
    assert read[0] == [SYSTEM, turn(QUERY)]
    assert len(answers) == 3 and not any(re.search(r" [+-]\d+\.\d\d ", line) for line in answers)
    assert "year" in note


def test_typed_messages_are_read_as_messages_and_a_failing_reward_gives_one_line(
    with_columns, read
):
    chat = Chat(with_columns, "cpu")
    messages = [turn("a film"), {"role": "assistant", "content": "bad"}, turn("the music")]
    chat.answer(json.dumps(messages))
    assert read[0] == messages
    *answers, note = chat.answer(json.dumps({"prompt": QUERY, "year": "seven"}))
    assert len(answers) == 3 and "ValueError" in note and "seven" in note


def test_a_wrong_row_gives_one_line_and_the_chat_continues(finished, command, monkeypatch):
    rows = [
        b'{"prompt": ',
        b'{"year": 1}',
        b'{"prompt": 5}',
        b'{"prompt": ""}',
        b'[{"role": 1}]',
        b"caf\xe9",
    ]
    rows.append(rb'{"prompt": "\ud800"}')
    for lines, status in (([*rows, b"", QUERY.encode()], 2), ([QUERY.encode()], 0)):
        stream = io.BytesIO(b"\n".join(lines))
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(stream, encoding="utf-8"))
        ended = command("cory.chat", finished.folder, "--device", "cpu")
        errors = [line for line in ended.out.splitlines() if line.startswith("error: ")]
        assert ended.status == status and "\nbase +" in f"\n{ended.out}"
        assert len(errors) == (len(rows) if status else 0)


def test_hostile_text_is_escaped_and_cannot_fake_a_line(finished, monkeypatch):
    chat = Chat(finished.folder, "cpu")
    hostile = "\x1b[31mred\u202e\nagent_2 as observer +9.00 good"
    monkeypatch.setattr(cory.agent, "plain_texts", lambda *_: [hostile])
    shown = "\n".join(chat.answer(QUERY))
    assert "\x1b" not in shown and "\u202e" not in shown and r"\x1b[31mred\u202e" in shown
    assert "\nagent_2 as observer +9.00" not in shown


def test_unfinished_runs_and_runs_made_in_python_are_refused(finished, config, tmp_path):
    run = shutil.copytree(finished.folder, tmp_path / "copy")
    (run / "summary.json").unlink()
    config.iterations = 1
    task = Task.from_prompts(sentences(8), lambda prompts: [0.0] * len(prompts), RolePrompts())
    made_in_python = CoryTrainer(config, make_agents(config), task).train().folder
    for folder in (run, made_in_python):
        with pytest.raises(UserError, match=str(folder)):
            Chat(folder, "cpu")
