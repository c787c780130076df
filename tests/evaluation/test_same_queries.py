"""Rows are the same query if they agree in all columns. A single query has no confidence interval."""

import json
from decimal import Decimal

import datasets
import numpy as np
import pytest

from cory import evaluate
from cory.build import make_agents
from cory.config import EvaluationConfig
from cory.identity import row_keys, share_in_training
from cory.metrics import mean_interval
from cory.roles import RolePrompts, query_text
from cory.run.folder import read_rows
from cory.task import Task
from cory.trainer import CoryTrainer

PROMPTS = RolePrompts(observer="{prompt}{response} {prompt}")
NUMBERS = {"a": 1.0, "b": 3.0, "c": 2.5, "<b>": 1.5}


def number_of(completions, letter):
    return [NUMBERS[key] for key in letter]


def make_task(letters):
    rows = [{"prompt": "the film", "letter": letter} for letter in letters]
    return Task(datasets.Dataset.from_list(rows), number_of, PROMPTS)


def evaluated(models, task, folder):
    evaluate(models, task, EvaluationConfig(samples=2, output=str(folder)))
    return json.loads((folder / "evaluation.json").read_text(), parse_constant=pytest.fail)


def test_rows_with_the_same_prompt_are_told_apart_by_their_columns(policy_folder, tmp_path):
    letters = ["a", "b", "a", "c", "<b>"]
    evaluation = evaluated([policy_folder], make_task(letters), tmp_path / "evaluation")
    assert evaluation["description"].startswith("5 queries (4 distinct), ")
    values = [NUMBERS[letter] for letter in letters]
    (row, *_) = evaluation["rows"]
    assert (row["task_reward"], row["task_reward_ci"]) == mean_interval(values, letters)
    assert row["task_reward_ci"] > 1
    assert evaluation["columns"] == [{"letter": letter} for letter in letters]
    page = (tmp_path / "evaluation" / "report.html").read_text()
    assert page.count("<article") == 4
    assert "letter: c" in page and "letter: &lt;b&gt;" in page and "letter: <b>" not in page


def test_columns_that_a_reward_does_not_name_are_not_shown():
    def reward(completions, letter, **columns):
        return [1.0 for _ in completions]

    rows = [{"prompt": "the film", "letter": "a", "source": "b", "url": "c"}]
    task = Task(datasets.Dataset.from_list(rows), reward, PROMPTS)
    assert task.columns_read() == ["letter"]


def test_a_single_query_has_no_interval(policy_folder, tmp_path, capsys):
    evaluation = evaluated([policy_folder], make_task("aa"), tmp_path / "evaluation")
    (row, *_) = evaluation["rows"]
    assert row["task_reward"] == 1.0
    assert {value for name, value in row.items() if name.endswith("_ci")} == {None}
    assert "1.000 (no interval)" in capsys.readouterr().out


def test_a_run_shows_the_columns_that_its_reward_reads(config, tmp_path, capsys):
    config.iterations = config.sample_every = config.eval_every = 1
    config.output = str(tmp_path / "run")
    train, held_out = make_task("ab" * 8), make_task("bbcc")
    trainer = CoryTrainer(config, make_agents(config), train, eval_dataset=held_out.dataset)
    run = trainer.train()
    # Half of the held-out rows have a letter that was trained on.
    assert "50 %" in capsys.readouterr().err
    samples = read_rows(run.folder / "samples.jsonl")
    assert samples and all(sample["columns"]["letter"] in ("a", "b") for sample in samples)
    page = (run.folder / "report.html").read_text()
    assert "letter: a" in page and "letter: b" in page

    settings = EvaluationConfig(output=str(run.folder.parent / "evaluation"))
    folder = evaluate([run.folder], held_out, settings, trained_on=train.dataset).folder
    assert "50 %" in json.loads((folder / "evaluation.json").read_text())["description"]


def test_chat_messages_and_lists_are_compared_by_value():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    reordered = [dict(reversed(message.items())) for message in chat]
    assert len({*row_keys({"prompt": [chat, reordered, chat[1:]]})}) == 2
    assert len({*map(query_text, [chat, reordered, chat[1:]])}) == 2
    assert len({*row_keys({"prompt": ["a", "a", "a"], "tags": [["x"], ["x"], ["x", "y"]]})}) == 2


def test_training_rows_are_compared_by_the_columns_that_both_have():
    held_out = {"prompt": ["p", "p"], "letter": ["a", "b"]}
    assert share_in_training(held_out, {"letter": ["b"], "prompt": ["p"], "source": [1]}) == 0.5
    assert share_in_training(held_out, {"letter": ["b"], "prompt": ["q"]}) == 0.0


@pytest.mark.parametrize(
    ("value", "same", "other"),
    [
        (1, 1.0, 1.5),
        (2**60, 2**60, 2**60 + 1),
        (Decimal("1.50"), 1.5, 2),
        ([1, 2], [1.0, 2.0], [2, 1]),
        (np.zeros(3000), [0] * 3000, np.r_[np.zeros(1500), 1, np.zeros(1499)]),
        ({"role": "user", "name": None}, {"role": "user"}, {"role": "user", "name": "Ann"}),
    ],
)
def test_rows_of_different_files_are_compared_by_value(value, same, other):
    held_out = {"prompt": ["p"], "x": [value]}
    assert share_in_training(held_out, {"prompt": ["p"], "x": [same]}) == 1.0
    assert share_in_training(held_out, {"prompt": ["p"], "x": [other]}) == 0.0
