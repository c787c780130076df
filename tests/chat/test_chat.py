"""Talking to a run's agents: what they answer, in the terminal and in a web page."""

import contextlib
import io
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import pytest
from browser import browser
from conftest import ROOT, sentences
from datasets import Dataset

from cory.agents import make_agents
from cory.chat import terminal, web
from cory.chat.chain import Answer, Chain
from cory.chat.config import ChatConfig
from cory.chat.opened import opened
from cory.config import CheckpointConfig, CoryConfig, LoraConfig, ModelConfig, SamplingConfig
from cory.errors import UserError
from cory.evaluation.responses import respond
from cory.models.load import attach, load_policy
from cory.prompts import RolePrompts
from cory.report.escape import printable
from cory.schedule import RoleSchedule
from cory.task import Task
from cory.tasks.config import OwnConfig, OwnTaskConfig
from cory.tasks.own import make_task
from cory.trainer import CoryTrainer
from gsm8k_train.config import Gsm8kConfig, Gsm8kTaskConfig
from gsm8k_train.task import make_task as make_gsm8k_task
from gsm8k_train.task import rule_reward
from imdb_train.config import ImdbConfig, ImdbTaskConfig
from imdb_train.task import PositiveLogit
from imdb_train.task import make_task as make_imdb_task

REWARD = """
def letters(prompts, completions):
    return [len(prompt) + len(text) / 100 for prompt, text in zip(prompts, completions)]

def solves(prompts, completions, answer):
    return [float(right in text) for text, right in zip(completions, answer)]

def together(chains, answer):
    return [len(first) + len(second) / 100 + len(right) for (first, second), right in zip(chains, answer)]
"""
OBSERVER = "{response} {prompt}"
QUERY = "the film was"


@pytest.fixture
def train(config, tmp_path):
    """Trains a run on prompts and a reward of its own, of two iterations with a checkpoint after each."""

    def trained(
        prompts=None,
        reward="letters",
        columns=None,
        observer_prompt=OBSERVER,
        team_reward=None,
        prompt_column="prompt",
        **changes,
    ):
        rows = [{prompt_column: text, **(columns or {})} for text in prompts or sentences(8)]
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "rewards.py").write_text(REWARD)
        task = OwnTaskConfig(
            str(tmp_path / "prompts.jsonl"),
            prompt_column=prompt_column,
            reward=f"{tmp_path}/rewards.py:{reward}",
        )
        task.observer_prompt = observer_prompt
        if team_reward:
            task.team_reward = f"{tmp_path}/rewards.py:{team_reward}"
        saving = CheckpointConfig(save_every=1)
        own = OwnConfig(
            **{**vars(config), "iterations": 2, "checkpoint": saving, "task": task, **changes}
        )
        return CoryTrainer(own, make_agents(own), make_task(own)).train().folder

    return trained


def ask(run, query=QUERY, **settings) -> list[Answer]:
    with opened(ChatConfig(str(run), device="cpu", **settings)) as (_, chain):
        return chain.ask(query)


@pytest.mark.parametrize("rank", [0, 2])
def test_base_pioneer_and_observer_answer_as_their_folders_do(train, config, rank):
    run = train(lora=LoraConfig(rank=rank))
    found = ask(run, seed=3, sampling={"max_new_tokens": 5})

    def answers(agent, prompt, role):
        model, tokenizer = load_policy(
            ModelConfig(config.model.name if rank or not agent else str(run / agent))
        )
        model = attach(model, run / agent) if rank and agent else model
        seed = 3 * 1_000_003 + role
        return respond(
            model, model, tokenizer, [prompt], SamplingConfig(1, 5), seed=seed
        ).completions[0]

    pioneer = answers("agent_1", QUERY, 0)
    texts = [
        answers(None, QUERY, 0),
        pioneer,
        answers("agent_2", OBSERVER.format(response=pioneer, prompt=QUERY), 1),
    ]
    assert [each.who for each in found] == ["base", "agent_1 as pioneer", "agent_2 as observer"]
    assert [each.text for each in found] == texts
    assert [each.reward for each in found] == pytest.approx(
        [len(QUERY) + len(text) / 100 for text in texts]
    )


def test_the_same_query_gets_the_same_answers_and_roles_can_be_exchanged(train):
    run = train()
    with opened(ChatConfig(str(run), device="cpu")) as (what, chain):
        assert what == "run: CORY with 2 agents after 2 iterations"
        first = chain.ask(QUERY)
        chain.ask("another")
        assert chain.ask(QUERY) == first
        terminal.command(chain, "/exchange")
        exchanged = chain.ask(QUERY)
        assert [each.who for each in exchanged] == [
            "base",
            "agent_2 as pioneer",
            "agent_1 as observer",
        ]
        assert exchanged[0] == first[0]
        chain.seed = 1
        assert [each.text for each in chain.ask(QUERY)] != [each.text for each in exchanged]
    assert ask(run, order=[2, 1]) == exchanged
    with pytest.raises(
        UserError, match=r"order: expected numbers of the run's agents, 1 to 2, got \[3\]"
    ):
        ask(run, order=[3])


def test_one_agent_answers_alone_or_after_itself(train):
    run = train(cory=CoryConfig(num_agents=1))
    assert [each.who for each in ask(run)] == ["base", "agent_1 as pioneer"]
    assert [each.who for each in ask(run, order=[1, 1])][1:] == [
        "agent_1 as pioneer",
        "agent_1 as observer",
    ]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_that_has_not_ended_answers_with_its_newest_checkpoint(train, rank):
    run = train(lora=LoraConfig(rank=rank))
    ended = ask(run)
    (run / "summary.json").unlink()
    for agent in ("agent_1", "agent_2"):
        shutil.rmtree(run / agent)
    with opened(ChatConfig(str(run), device="cpu")) as (what, chain):
        assert what == "run: CORY with 2 agents after 2 of 2 iterations (checkpoint iter-000002)"
        assert chain.ask(QUERY) == ended
    earlier = run / "checkpoints/iter-000001"
    with opened(ChatConfig(str(earlier), device="cpu")) as (what, _):
        assert "after 1 of 2 iterations" in what
    (earlier / "agent_1.safetensors").write_bytes(b"")
    with pytest.raises(
        UserError, match=r"expected a valid checkpoint, got: agent_1\.safetensors has 0 bytes"
    ):
        ask(earlier)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="expected a run that has ended, or has a valid checkpoint"):
        ask(run)


def test_a_run_that_sampled_by_vllm_needs_no_server(train):
    run = train()
    ended = ask(run)
    (run / "summary.json").unlink()
    settings = (run / "config.yaml").read_text()
    assert "engine: native" in settings
    (run / "config.yaml").write_text(settings.replace("engine: native", "engine: vllm"))
    assert ask(run) == ended


@pytest.mark.parametrize(
    ("folder", "path"),
    [
        (".", "."),
        (".", "checkpoints/iter-000001"),
        ("checkpoints", ".."),
        ("checkpoints", "iter-000001"),
        ("checkpoints/iter-000002", "."),
        ("checkpoints/iter-000002", "../iter-000001"),
    ],
)
def test_a_run_has_its_name_from_any_folder(train, folder, path, monkeypatch):
    monkeypatch.chdir(train() / folder)
    with opened(ChatConfig(path, device="cpu")) as (what, _):
        assert what.startswith("run: CORY with 2 agents after ")


def test_a_reward_that_needs_more_than_the_query_is_missed_once(train):
    run = train(reward="solves", columns={"answer": "good"})
    with opened(ChatConfig(str(run), device="cpu")) as (_, chain):
        assert {each.reward for each in [*chain.ask(QUERY), *chain.ask("another")]} == {None}
        (note,) = chain.notes
        assert (
            "the reward also needs its answer" in note
            and sentences(8)[0] in note
            and "/set answer=" in note
        )
        scored = chain.ask(json.dumps({"prompt": QUERY, "answer": ""}))
        assert [each.reward for each in scored] == [1.0] * 3
    (run.parent / "rewards.py").unlink()
    with opened(ChatConfig(str(run), device="cpu")) as (_, chain):
        assert "an existing file" in chain.notes[0]
        assert [each.text for each in chain.ask(QUERY)] == [each.text for each in scored]


def test_the_last_response_has_the_chains_team_reward(train):
    run = train(columns={"answer": "good"}, team_reward="together")
    with opened(ChatConfig(str(run), device="cpu")) as (_, chain):
        base, first, second = chain.ask(sentences(8)[5])
        expected = len(first.text) + len(second.text) / 100 + len("good")
        assert second.team_reward == pytest.approx(expected, rel=1e-6)
        assert base.team_reward is None and first.team_reward is None and not chain.notes
        assert second.reward is not None
        assert f"team reward {expected:+.2f}" in second.rewards
        assert "team reward" in terminal.shown([base, first, second], 80).splitlines()[-1]
        # A query without the answer has the rewards that do not need it.
        (*_, last) = chain.ask(QUERY)
        assert last.team_reward is None and last.reward is not None
        (note,) = chain.notes
        assert "No team reward for this query, as it also needs its answer" in note
    # One agent in one role is no chain of this run.
    (*_, alone) = ask(run, sentences(8)[5], order=[1])
    assert alone.team_reward is None


def test_a_query_of_the_data_brings_its_answer_along_and_others_are_given_one(train, capsys):
    run = train(reward="solves", columns={"answer": "", "source": "made"})
    with opened(ChatConfig(str(run), device="cpu")) as (_, chain):
        assert [each.reward for each in chain.ask(f" {sentences(8)[5]}  ")] == [
            1.0
        ] * 3 and not chain.notes
        terminal.command(chain, "/set answer=no text has this")
        assert [each.reward for each in chain.ask(QUERY)] == [0.0] * 3
        # Its own answer counts.
        assert [each.reward for each in chain.ask(sentences(8)[5])] == [1.0] * 3
        assert [each.reward for each in chain.ask(json.dumps({"prompt": QUERY, "answer": ""}))] == [
            1.0
        ] * 3
        terminal.command(chain, "/set answer=")
        assert {each.reward for each in chain.ask(QUERY)} == {None}
        with pytest.raises(
            UserError, match=r"set: expected a column .* among \['answer'\], got 'source'"
        ):
            terminal.command(chain, "/set source=typed")
    assert "answer=no text has this\nnothing is set\n" in capsys.readouterr().out


def test_gsm8k_has_its_reward_for_problems_of_both_splits_and_without_its_data(config, tmp_path):
    rows = {"train": {"question": "the film was good ?", "answer": "#### 18"}}
    rows["test"] = {"question": "a bad film", "answer": "it is\n#### 2"}
    data = tmp_path / "problems"
    data.mkdir()
    for split, row in rows.items():
        (data / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    task = Gsm8kTaskConfig(
        dataset=str(data), subset=None, pioneer_prompt="{prompt}", observer_prompt=OBSERVER
    )
    gsm8k = Gsm8kConfig(**{**vars(config), "iterations": 1, "task": task})
    run = CoryTrainer(gsm8k, make_agents(gsm8k), make_gsm8k_task(gsm8k)).train().folder
    with opened(ChatConfig(str(run), device="cpu")) as (_, chain):
        for row in rows.values():
            assert {each.reward for each in chain.ask(row["question"])} == {0.0} and not chain.notes
        assert {each.reward for each in chain.ask(QUERY)} == {None}
    shutil.rmtree(data)
    with opened(ChatConfig(str(run), device="cpu")) as (_, chain):
        assert "not known by their text" in chain.notes[0]
        assert {each.reward for each in chain.ask(QUERY)} == {None}
        chain.set_column("answer", "18")
        answers = chain.ask(QUERY)
        assert [each.reward for each in answers] == rule_reward(
            [], [each.text for each in answers], ["#### 18"] * 3
        )


def test_columns_that_prompts_name_can_be_set_too(train):
    run = train(columns={"year": 1999}, observer_prompt="{response} {prompt} {year}")
    with opened(ChatConfig(str(run), device="cpu")) as (_, chain):
        with pytest.raises(UserError, match="query: expected year, which the prompts name"):
            chain.ask(QUERY)
        with pytest.raises(UserError, match="set year: expected a value like 1999, got 'late'"):
            chain.set_column("year", "late")
        chain.set_column("year", "2001")
        assert chain.row(QUERY) == {"prompt": QUERY, "year": 2001} and len(chain.ask(QUERY)) == 3


def test_a_column_keeps_its_type(train):
    prompt = "{response} {prompt} {year} {stars}"
    run = train(columns={"year": 1999, "stars": 4.5}, observer_prompt=prompt)
    with opened(ChatConfig(str(run), device="cpu")) as (_, chain):
        for value in ("true", "[1, 2]", "null", '"1999"', "1999.5"):
            with pytest.raises(UserError, match="set year: expected a value like 1999, got "):
                chain.set_column("year", value)
        chain.set_column("stars", "4")
        assert chain.columns == {"stars": 4.0} and type(chain.columns["stars"]) is float


def test_the_type_of_a_column_is_that_of_its_first_value():
    columns = {
        "year": [None, 1999],
        "source": [None, "made"],
        "day": [datetime(2026, 1, 31), None],
        "words": [["a"], ["b"]],
        "nothing": [None, None],
    }
    dataset = Dataset.from_dict(columns)
    task = SimpleNamespace(dataset=dataset)
    chain = SimpleNamespace(task=task, further_columns=list(columns), columns={})
    Chain.set_column(chain, "year", "2001")
    Chain.set_column(chain, "source", "typed")
    assert chain.columns == {"year": 2001, "source": "typed"}
    for name in ("day", "words", "nothing"):
        with pytest.raises(
            UserError, match=f"set {name}: expected a column of texts, numbers or booleans, got "
        ):
            Chain.set_column(chain, name, "2026-02-01")


@pytest.mark.parametrize(("agents", "roles"), [(1, 2), (2, 2), (2, 3), (3, 2), (3, 3)])
def test_exchanges_are_those_of_training(train, agents, roles):
    cory = CoryConfig(num_agents=agents, chain_length=roles)
    run = train(cory=cory)
    schedule = RoleSchedule(agents, period=1, length=roles)
    with opened(ChatConfig(str(run), device="cpu")) as (_, chain):
        for k in range(5):
            assert [number - 1 for number in chain.order] == list(schedule.order(k))
            terminal.command(chain, "/exchange")


def test_an_exchange_in_the_web_page_is_that_of_training(train):
    pytest.importorskip("gradio", reason="no gradio: pip install -e '.[web]'")
    run = train(cory=CoryConfig(num_agents=3, chain_length=2))
    with opened(ChatConfig(str(run), device="cpu")) as (what, chain):
        blocks, _ = web.page(chain, what)
        (exchange,) = [event.fn for event in blocks.fns.values() if event.inputs == event.outputs]
        assert [exchange(order) for order in ([1, 2], [2, 3], [3, 1])] == [[2, 3], [3, 1], [1, 2]]


def test_other_prompts_than_those_of_the_run_can_be_tried(train):
    run = train()
    with opened(ChatConfig(str(run), device="cpu")) as (_, chain):
        assert chain.task.prompts == RolePrompts(observer=OBSERVER)
    changes = {"observer_prompt": "Better: {prompt} {response}"}
    with opened(ChatConfig(str(run), device="cpu", task=changes)) as (_, chain):
        assert chain.task.prompts == RolePrompts(observer=changes["observer_prompt"])


def test_a_line_of_the_data_is_a_query_and_what_the_prompts_read_of_it_is_shown(
    train, capsys, monkeypatch
):
    run = train(
        prompt_column="opening",
        columns={"year": 1999},
        observer_prompt="{response} {prompt} {year}",
    )
    line = json.dumps({"opening": QUERY, "year": 2001})
    with opened(ChatConfig(str(run), device="cpu")) as (_, chain):
        assert chain.row(line)["prompt"] == QUERY
        capsys.readouterr()  # what training has printed
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{line}\n{sentences(8)[5]}\n"))
        terminal.talk(chain)
    shown = capsys.readouterr().out.splitlines()
    assert [text for text in shown if text.startswith("year")] == ["year: 2001", "year: 1999"]


SYSTEM = {"role": "system", "content": "be good"}
# Of an earlier turn, too, which belongs to a conversation of its own.
CHATS = [
    [
        SYSTEM,
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "a film"},
        {"role": "user", "content": text},
    ]
    for text in sentences(8)
]
TYPED = [SYSTEM, {"role": "user", "content": QUERY}]


@pytest.fixture
def chat_model(policy_folder, tmp_path) -> ModelConfig:
    """A model with a chat template."""
    folder = tmp_path / "chat_model"
    shutil.copytree(policy_folder, folder)
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return ModelConfig(str(folder))


def test_a_typed_query_of_a_chat_has_the_system_message_alone(train, chat_model):
    run = train(CHATS, model=chat_model)
    with opened(ChatConfig(str(run), device="cpu")) as (_, chain):
        assert chain.row(QUERY)["prompt"] == TYPED
        assert chain.row(json.dumps({"prompt": QUERY}))["prompt"] == TYPED
        assert len(chain.ask(QUERY)) == 3
        # A query of the data goes on its own conversation.
        assert chain.row(json.dumps({"prompt": CHATS[3]}))["prompt"] == CHATS[3]


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_query_is_a_chat_where_the_data_of_chats_are_missing(train, chat_model, has_ended):
    run = train(CHATS, model=chat_model)
    (run.parent / "prompts.jsonl").unlink()
    if not has_ended:
        (run / "summary.json").unlink()
    with opened(ChatConfig(str(run), device="cpu")) as (_, chain):
        assert chain.row(QUERY)["prompt"] == TYPED


def test_a_query_is_a_chat_where_a_run_of_chats_was_started_from_python(config, chat_model):
    task = Task.from_prompts(
        CHATS, lambda completions, **_: [0.0] * len(completions), RolePrompts()
    )
    config = replace(config, iterations=1, model=chat_model)
    run = CoryTrainer(config, make_agents(config), task).train().folder
    with opened(ChatConfig(str(run), device="cpu")) as (_, chain):
        assert chain.row(QUERY)["prompt"] == TYPED


def test_imdb_has_its_reward_without_its_data(config, classifier_folder, reviews, tmp_path):
    data = tmp_path / "reviews"
    shutil.copytree(reviews, data)
    task = ImdbTaskConfig(dataset=str(data), min_chars=0, reward_model=str(classifier_folder))
    imdb = ImdbConfig(**{**vars(config), "iterations": 1, "task": task})
    agents = make_agents(imdb)
    run = CoryTrainer(imdb, agents, make_imdb_task(imdb)).train().folder
    shutil.rmtree(data)
    answers = ask(run)
    logits = PositiveLogit(str(classifier_folder), 1, agents[0].device)
    expected = logits([QUERY] * 3, [each.text for each in answers])
    assert [each.reward for each in answers] == pytest.approx(expected, rel=1e-4)


def test_a_run_started_from_python_answers_without_rewards(config):
    task = Task.from_prompts(
        sentences(8), lambda completions, **_: [0.0] * len(completions), RolePrompts()
    )
    run = CoryTrainer(replace(config, iterations=1), make_agents(config), task).train().folder
    with opened(ChatConfig(str(run), device="cpu")) as (_, chain):
        assert "started from Python" in chain.notes[0]
        assert {each.reward for each in chain.ask(QUERY)} == {None}


def test_queries_that_cannot_be_answered_leave_the_chat_open(train, capsys, monkeypatch):
    lines = iter(
        ["", "   ", "the film " * 90, '{"prompt": ""}', '{"prompt": 3}', "/seed", "{", QUERY]
    )
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or end(lines))

    def end(left):
        if (line := next(left, None)) is None:
            raise EOFError
        return line

    run = train()
    capsys.readouterr()
    with opened(ChatConfig(str(run), device="cpu")) as (_, chain):
        terminal.talk(chain)
    said = capsys.readouterr().out
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert "expected at most 96 tokens, the model's context" in errors[0]
    assert (
        "query: expected text or chat messages" in errors[1]
        and "got 3" in errors[2]
        and "/seed" in errors[3]
    )
    assert len(errors) == 4 and said.count("agent_2 as observer") == 2


def test_control_characters_in_notes_are_shown_as_escapes(capsys):
    chain = SimpleNamespace(notes=["Queries such as: the \x1b[31mfilm"])
    terminal._say_notes(chain)
    assert capsys.readouterr().out == "Queries such as: the \\x1b[31mfilm\n" and not chain.notes


def test_control_characters_are_shown_as_escapes():
    text = terminal.shown(
        [Answer("base", "\x1b[31mred\rback\nnext line \u202e", 1.0), Answer("agent_1", "", None)],
        60,
    )
    assert (
        text == "base     +1.00  \\x1b[31mred\\rback\n                next line \\u202e\nagent_1  "
    )


def test_a_chat_in_a_terminal(train):
    """Lines are typed, edited and answered; Ctrl-C at the prompt ends it."""
    master, slave = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb"}
    command = [sys.executable, "-m", "cory.chat", str(train()), "--device", "cpu"]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    seen = ""

    def until(text, typed=None):
        nonlocal seen
        if typed is not None:
            os.write(master, typed.encode())
        end, start = time.monotonic() + 120, len(seen)
        while text not in seen[start:]:
            assert time.monotonic() < end and process.poll() is None, seen
            if select.select([master], [], [], 1)[0]:
                seen += os.read(master, 4096).decode(errors="replace")
        return seen[start:]

    try:
        until("> ")
        first = until("> ", "the fillm\x7f\x7fm was\n")
        assert "base" in first and "agent_1 as pioneer" in first and "agent_2 as observer" in first
        assert "base, agent_2 as pioneer, agent_1 as observer" in until("> ", "/exchange\n")
        until("> ", "\n")
        # One that comes just before the prompt ends no chat, one while Python ends kills it.
        for _ in range(6):
            os.write(master, b"\x03")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
                break
        assert process.returncode == 0
    finally:
        process.kill()
        os.close(master)


def test_the_web_page_has_a_field_for_the_answer(train):
    pytest.importorskip("gradio", reason="no gradio: pip install -e '.[web]'")
    run = train(reward="solves", columns={"answer": ""})
    with browser() as chromium, opened(ChatConfig(str(run), device="cpu")) as (what, chain):
        blocks, look = web.page(chain, what)
        url = blocks.launch(
            server_name="127.0.0.1",
            theme=look,
            quiet=True,
            prevent_thread_lock=True,
            ssr_mode=False,
        )[1]
        try:
            page = chromium.new_page()
            page.goto(url)
            page.get_by_label("Query").fill(QUERY)
            page.get_by_role("button", name="Ask").click()
            page.get_by_label("Notes").wait_for()
            assert "the field answer in the page" in page.get_by_label("Notes").input_value()
            page.get_by_label("answer", exact=True).fill("no text has this")
            page.get_by_role("button", name="Ask").click()
            page.get_by_label("base: reward +0.00").wait_for()
        finally:
            blocks.close()


def test_the_web_page_shows_texts_as_they_are(train, monkeypatch):
    """Asked in a headless browser on a wide and a narrow screen; a response that is HTML does not act."""
    pytest.importorskip("gradio", reason="no gradio: pip install -e '.[web]'")
    hostile = "<img src=x onerror=\"document.title='acted'\"> **bold** \x1b[31m"
    with browser() as chromium, opened(ChatConfig(str(train()), device="cpu")) as (what, chain):
        blocks, look = web.page(chain, what)
        url = blocks.launch(
            server_name="127.0.0.1",
            theme=look,
            quiet=True,
            prevent_thread_lock=True,
            ssr_mode=False,
            footer_links=[],
        )[1]
        expected = chain.ask(QUERY)
        try:
            for width in (1280, 390):
                page = chromium.new_context(viewport={"width": width, "height": 900}).new_page()
                elsewhere, problems = [], []
                page.on(
                    "request",
                    lambda it, to=elsewhere: (
                        to.append(it.url) if not it.url.startswith(url) else None
                    ),
                )
                page.on("pageerror", lambda it, to=problems: to.append(str(it)))
                page.goto(url)
                page.get_by_label("Query").fill(QUERY)
                page.get_by_role("button", name="Ask").click()
                for each in expected:
                    box = page.get_by_label(f"{each.who}: reward {each.reward:+.2f}")
                    box.wait_for()
                    assert box.input_value() == printable(each.text)
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                page.get_by_role("button", name="Exchange roles").click()
                page.get_by_label("agent_1 as observer: reward").wait_for()
                page.get_by_label("Query").fill("the film " * 90)
                page.get_by_role("button", name="Ask").click()
                page.get_by_label("Notes").wait_for()
                assert "expected at most 96 tokens" in page.get_by_label("Notes").input_value()
                assert not elsewhere and not problems
            monkeypatch.setattr(
                chain, "ask", lambda query: [each._replace(text=hostile) for each in expected]
            )
            page.get_by_role("button", name="Ask").click()
            box = page.get_by_label(f"base: reward {expected[0].reward:+.2f}")
            box.wait_for()
            assert box.input_value() == hostile.replace("\x1b", "\\x1b")
            assert page.title() != "acted" and page.locator("img[src=x]").count() == 0
        finally:
            blocks.close()
