"""Talking to a run's agents: who answers, what they read, and what is printed."""

import io
import json
import shutil

import pytest
from conftest import sentences

import cory.evaluation.answer
from cory.agent import make_agents
from cory.chat import Chat
from cory.config import LoraConfig, ModelConfig, SamplingConfig
from cory.errors import UserError
from cory.evaluation.answer import Answerer
from cory.models.load import attach, load_policy
from cory.own_task import OwnConfig, OwnTaskConfig, make_task
from cory.roles import RolePrompts
from cory.run.tables import printable
from cory.task import Task
from cory.trainer import CoryTrainer

REWARDS = """
def length(prompts, completions):
    return [len(prompt) + len(text) / 100 for prompt, text in zip(prompts, completions)]

def year(completions, year):
    return [float(value) for value in year]

def together(chains):
    return [float(len(chain)) for chain in chains]
"""
QUERY = "the film was"


@pytest.fixture
def train(config, tmp_path):
    """Trains a run of one iteration on prompts and rewards of its own."""

    def trained(
        reward="length",
        columns=None,
        observer_prompt="{response} {prompt}",
        prompts=None,
        **changes,
    ):
        rows = [{"prompt": prompt, **(columns or {})} for prompt in prompts or sentences(8)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "rewards.py").write_text(REWARDS)
        task = OwnTaskConfig(str(tmp_path / "rows.jsonl"), reward=f"{tmp_path}/rewards.py:{reward}")
        task.observer_prompt = observer_prompt
        task.team_reward = f"{tmp_path}/rewards.py:together"
        own = OwnConfig(**{**vars(config), "iterations": 1, "task": task, **changes})
        return CoryTrainer(own, make_agents(own), make_task(own)).train().folder

    return trained


@pytest.fixture
def read(monkeypatch):
    """The prompts that models have answered, in order."""
    prompts = []
    respond = Answerer.respond

    def recorded(answerer, asked, *arguments, **options):
        prompts.extend(asked)
        return respond(answerer, asked, *arguments, **options)

    monkeypatch.setattr(Answerer, "respond", recorded)
    return prompts


@pytest.mark.parametrize("rank", [0, 2])
def test_a_prompt_is_answered_by_the_base_and_by_each_role(train, config, rank):
    run = train(lora=LoraConfig(rank=rank))
    lines = Chat(run, "cpu").answer(QUERY)

    def text(agent, prompt, role):
        is_full_model = agent and not rank
        model, tokenizer = load_policy(
            ModelConfig(str(run / agent) if is_full_model else config.model.name)
        )
        model = attach(model, run / agent) if agent and rank else model
        sampling = SamplingConfig(1, 6)
        answerer = Answerer(model, model, tokenizer)
        return answerer.respond([prompt], sampling, seed=3 + role).completions[0]

    pioneer = text("agent_1", QUERY, 0)
    texts = [text(None, QUERY, 0), pioneer, text("agent_2", f"{pioneer} {QUERY}", 1)]
    names = ["base", "agent_1 as pioneer", "agent_2 as observer"]
    assert lines == [
        *(
            f"{name} {len(QUERY) + len(text) / 100:+.2f} {printable(text)}"
            for name, text in zip(names, texts, strict=True)
        ),
        "team reward +2.00",
    ]


def test_the_columns_of_a_row_reach_the_prompts_and_the_reward(train, read):
    run = train("year", {"year": 1999}, "{response} {prompt} {year}")
    lines = Chat(run, "cpu").answer(json.dumps({"prompt": sentences(8)[0], "year": 7}))
    assert read[-1].endswith(f"{sentences(8)[0]} 7")
    assert all(" +7.00 " in line for line in lines[:3])


def test_a_prompt_alone_is_answered_without_a_reward_that_needs_more(train):
    *answers, note = Chat(train("year", {"year": 1999}), "cpu").answer(QUERY)
    assert len(answers) == 3 and not any("+" in answer for answer in answers)
    assert note.startswith("no reward: ") and "year" in note


def test_a_typed_prompt_is_a_turn_after_the_system_message(train, read, policy_folder, tmp_path):
    folder = shutil.copytree(policy_folder, tmp_path / "chat_model")
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    system = {"role": "system", "content": "be good"}
    turns = [[system, {"role": "user", "content": text}] for text in sentences(8)]
    run = train("year", {"year": 1}, prompts=turns, model=ModelConfig(str(folder)))
    Chat(run, "cpu").answer(QUERY)
    assert read[0] == [system, {"role": "user", "content": QUERY}]


def test_a_wrong_row_is_one_line_and_the_chat_goes_on(train, command, monkeypatch):
    run = train("year", {"year": 1999}, "{response} {prompt} {year}")
    rows = [
        '{"prompt": ',
        QUERY,
        '{"year": 1}',
        '{"prompt": 5, "year": 1}',
        '{"prompt": "", "year": 1}',
    ]
    good = json.dumps({"prompt": QUERY, "year": 3})
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*rows, "", good])))
    ended = command("cory.chat", run, "--device", "cpu")
    *errors, base, _, _, _ = ended.out.splitlines()
    assert ended.status == 0 and base.startswith("base +3.00 ")
    assert len(errors) == len(rows) and all(line.startswith("error: ") for line in errors)
    assert "expected a JSON object with year, got 'the film was'" in errors[1]


def test_hostile_text_acts_on_no_terminal_and_is_no_line_of_its_own(train, monkeypatch):
    chat = Chat(train(), "cpu")
    hostile = "\x1b[31mred\u202e\nagent_2 as observer +9.00 good"
    monkeypatch.setattr(cory.evaluation.answer, "plain_texts", lambda *_: [hostile])
    shown = "\n".join(chat.answer(QUERY))
    assert "\x1b" not in shown and "\u202e" not in shown and r"\x1b[31mred\u202e" in shown
    assert "\nagent_2 as observer +9.00" not in shown


def test_what_cannot_be_talked_to_is_refused(train, config, tmp_path):
    run = train()
    (run / "summary.json").unlink()
    with pytest.raises(UserError, match="expected a run with saved agents, got one that has not"):
        Chat(run, "cpu")
    config.iterations = 1
    config.output = str(tmp_path / "python")
    task = Task.from_prompts(sentences(8), lambda prompts: [0.0] * len(prompts), RolePrompts())
    made_in_python = CoryTrainer(config, make_agents(config), task).train().folder
    with pytest.raises(UserError, match=r"expected a run of .*, got one that was made in Python"):
        Chat(made_in_python, "cpu")
