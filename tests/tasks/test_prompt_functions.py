"""Prompt functions: Python code that computes what a role reads, for example by running a tool between two answers."""

import asyncio
import json
from dataclasses import replace

import datasets
import pytest
from conftest import count_good, make_config, make_trainer

from cory import EvaluationConfig, RolePrompts, Task, evaluate, make_agents
from cory.chat import Chat
from cory.config import CheckpointConfig, CoryConfig, RoleConfig
from cory.errors import UserError
from cory.run.folder import read_rows
from cory.trainer import CoryTrainer

FILE = """
calls = []

def check(row, responses):
    calls.append((row, responses))
    return f"{len(responses['pioneer'])} letters: {row['prompt']}"

def turn(row, responses):
    return [{"role": "user", "content": responses["writer"]}]

def broken(row, responses):
    return responses["nobody"]

def wrong(row, responses):
    return 5

def long(row, responses):
    return "the film " * 200

def reward(completions):
    return [text.count("good") for text in completions]
"""


@pytest.fixture
def code(tmp_path):
    file = tmp_path / "code.py"
    file.write_text(FILE)
    return file


def with_prompt(config, file, name, **changes):
    roles = [RoleConfig(), RoleConfig(prompt=f"{file}:{name}")]
    return replace(config, roles=roles, **changes)


def samples(run, role):
    return [row for row in read_rows(run / "samples.jsonl") if row["role"] == role]


def test_a_function_gets_the_row_and_the_earlier_responses(config, code):
    trainer = make_trainer(with_prompt(config, code, "check"))
    iteration = trainer.iteration(0)
    pioneer, observer = iteration.rollouts
    for query, text, read in zip(
        iteration.batch.columns["prompt"], pioneer.completions, observer.prompts, strict=True
    ):
        assert read == f"{len(text)} letters: {query}"
    (module,) = {trainer.task.prompts.function(1).__globals__["__name__"]}
    calls = trainer.task.prompts.function(1).__globals__["calls"]
    assert module.endswith(".code") and len(calls) == len(observer.prompts)  # one call per row
    assert {*calls[0][1]} == {"pioneer"} and {*calls[0][0]} == {"prompt", "label"}


def test_an_async_function_passed_in_python_runs_for_all_rows_at_once(config):
    running, most_running = [0], [0]

    async def look_up(row, responses):
        running[0] += 1
        most_running[0] = max(most_running[0], running[0])
        await asyncio.sleep(0.01)
        running[0] -= 1
        row["prompt"] = "changed in place"
        return [{"role": "user", "content": f"{row['year']} {responses['pioneer']}"}]

    prompts = RolePrompts(observer=look_up)
    rows = [{"prompt": "the film was", "year": year} for year in range(16)]
    task = Task(datasets.Dataset.from_list(rows), count_good, prompts)
    config = replace(config, model=replace(config.model, chat_template=False))
    agents = make_agents(config)
    for agent in agents:
        agent.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    iteration = CoryTrainer(config, agents, task).iteration(0)
    pioneer, observer = iteration.rollouts
    years = iteration.batch.columns["year"]
    assert [prompt[0]["content"] for prompt in observer.prompts] == [
        f"{year} {text}" for year, text in zip(years, pioneer.completions, strict=True)
    ]
    assert most_running[0] == len(observer.prompts)
    assert {*iteration.batch.columns["prompt"]} == {"the film was"}


def test_a_run_resumes_to_the_byte_and_is_refused_with_a_changed_function(
    policy_folder, code, tmp_path
):
    saved = CheckpointConfig(save_every=2)
    config = with_prompt(make_config(policy_folder, tmp_path), code, "check", checkpoint=saved)
    config = replace(config, iterations=4)
    whole = make_trainer(replace(config, output=str(tmp_path / "whole"))).train().folder
    half = make_trainer(replace(config, iterations=2, output=str(tmp_path / "half"))).train().folder
    make_trainer(replace(config, resume=str(half))).train()
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (whole / name).read_bytes() == (half / name).read_bytes()
    assert samples(half, "observer")[0]["prompt"].split()[1] == "letters:"
    code.write_text(FILE.replace("letters", "characters"))
    with pytest.raises(UserError, match=r"the file of a prompt function in roles has changed"):
        make_trainer(replace(config, iterations=6, resume=str(half))).train()


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nothing", UserError, r"^roles\.1\.prompt: .*'nothing'"),
        ("broken", KeyError, "nobody"),
        ("wrong", UserError, r"^prompt of observer, row 1: .*got 5"),
        ("long", UserError, r"^prompt of observer, row 1: .*tokens.*got 40"),
    ],
)
def test_errors_of_a_prompt_function(config, code, name, error, message):
    with pytest.raises(error, match=message):
        make_trainer(with_prompt(config, code, name)).iteration(0)


def test_evaluation_chat_and_counterfactual_credit_use_prompt_functions(
    config, code, tmp_path, command
):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"the film {n}"}) + "\n" for n in range(16)))
    credit = CoryConfig(credit="counterfactual")
    config = with_prompt(config, code, "check", cory=credit, iterations=1)
    settings = {
        "model": {"name": config.model.name},
        "iterations": 1,
        "device": "cpu",
        "output": str(tmp_path / "run"),
        "cory": {"credit": "counterfactual"},
        "sampling": {"min_new_tokens": 3, "max_new_tokens": 6},
        "ppo": {"batch_size": 4, "mini_batch_size": 4},
        "roles": [{}, {"prompt": f"{code}:check"}],
        "task": {"dataset": str(rows), "reward": f"{code}:reward"},
    }
    (tmp_path / "task.yaml").write_text(json.dumps(settings))
    ended = command("cory.train", "--config", tmp_path / "task.yaml")
    assert ended.status == 0, ended
    run = tmp_path / "run"
    lines = Chat(run, "cpu").answer("the film")
    assert lines[2].startswith("agent_2 as observer")
    ended = command(
        "cory.evaluation", run, "--task.eval_dataset", rows, "--queries", "4", "--device", "cpu",
        "--output", tmp_path / "evaluation",
    )  # fmt: skip
    assert ended.status == 0
    for name in ("reward", "check"):
        assert f"names code, which runs now: {code}:{name}" in ended.error
    answers = {
        (row["model"], row["query"]): row
        for row in read_rows(tmp_path / "evaluation" / "responses.jsonl")
    }
    for query in range(4):
        (text,) = answers["run/agent_1", query]["completions"]
        chain = answers["run/agent_2 after agent_1", query]
        assert chain["prompt"] == f"{len(text)} letters: the film {query}"
    code.write_text(FILE.replace("letters", "characters"))
    done = evaluate(
        [run],
        replace(make_trainer(config).task, kind=""),
        EvaluationConfig(device="cpu", queries=2, output=str(tmp_path / "again")),
    )
    assert "another version of the file" in (done.folder / "evaluation.json").read_text()
