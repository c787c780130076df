"""Queries with several rows, such as questions about one text.

Each branch, one of several observer responses to the same pioneer response, answers one of the rows.
"""

import json
from dataclasses import replace

import datasets
import pytest
import torch
from conftest import count_good, sentences
from learning import spy
from questions import PROMPTS, QUESTIONS, make_questions, rows_of

from cory.build import make_agents
from cory.command import load
from cory.config import CoryConfig, RoleConfig
from cory.errors import UserError
from cory.own_task import OwnConfig, held_out_rows, make_task
from cory.roles import RolePrompts
from cory.task import Task, draw_batch
from cory.trainer import CoryTrainer


def blocks(values, size):
    return [values[start : start + size] for start in range(0, len(values), size)]


# Rows of a batch


def test_an_epoch_has_each_query_once_with_its_rows_in_order():
    rows = datasets.Dataset.from_list(rows_of("abcdefg"))
    task = Task(rows, count_good, PROMPTS)
    epochs = [
        [task.batch(k, 2, 0, rows_per_query=3) for k in range(3 * n, 3 * n + 3)] for n in range(2)
    ]
    for batches in epochs:
        for batch in batches:
            assert batch["question"] == QUESTIONS * 2
            assert all(len(set(block)) == 1 for block in blocks(batch["prompt"], 3))
        drawn = [text for batch in batches for text in batch["prompt"][::3]]
        assert len(set(drawn)) == 6  # the seventh does not fill a batch
    assert epochs[0] != epochs[1]
    assert task.batch(0, 2, 0, 3) == epochs[0][0] != task.batch(0, 2, 1, 3)


def test_queries_are_drawn_in_the_same_order_as_single_rows():
    rows = datasets.Dataset.from_dict({"prompt": list("abcdefgh")})
    single_rows = Task(rows, count_good, RolePrompts())
    queries = Task(datasets.Dataset.from_list(rows_of("abcdefgh")), count_good, PROMPTS)
    for k in range(5):
        drawn = single_rows.batch(k, 3, seed=4)["prompt"]
        assert drawn == queries.batch(k, 3, 4, 3)["prompt"][::3]


@pytest.mark.parametrize("group_size", [1, 2])
def test_each_branch_has_a_row_and_groups_repeat_whole_queries(config, group_size):
    config = replace(
        config,
        algorithm="rloo" if group_size > 1 else "ppo",
        group_size=group_size,
        branches=2,
    )
    trainer = make_questions(config)
    queries = 8 // (2 * group_size)
    drawn = trainer.task.batch(0, queries, config.seed, 2)
    batch = draw_batch(trainer.task, config, 0)
    assert batch.columns_of(0) == batch.columns
    for name in ("prompt", "question", "answer"):
        # The batch has a block of rows for each response of the pioneer.
        repeated = [block for block in blocks(drawn[name], 2) for _ in range(group_size)]
        assert batch.columns[name] == [block[0] for block in repeated]
        assert batch.columns_of(1)[name] == [value for block in repeated for value in block]


def test_processes_share_whole_queries(config, monkeypatch):
    trainer = make_questions(replace(config, branches=2))
    whole = draw_batch(trainer.task, trainer.config, 0)
    monkeypatch.setattr("cory.parallel.distributed.world_size", lambda: 2)
    shares = []
    for rank in range(2):
        monkeypatch.setattr("cory.parallel.distributed.rank", lambda rank=rank: rank)
        shares.append(draw_batch(trainer.task, trainer.config, 0))
    for role in range(2):
        first, second = (share.columns_of(role) for share in shares)
        for name, values in whole.columns_of(role).items():
            assert first[name] + second[name] == values
            assert len(first[name]) == len(second[name])


# Uses of the rows


@pytest.mark.parametrize("credit", ["causal", "counterfactual"])
def test_rewards_metrics_and_samples_use_each_responses_own_row(config, credit):
    """Rewards of counterfactual responses use it too."""
    seen = []

    def reward(prompts, completions, role, question, answer):
        seen.append((role, question, answer))
        return [float(len(text) + len(asked)) for text, asked in zip(answer, question, strict=True)]

    def team_reward(prompts, chains, answer):
        return [float(len(text)) for text in answer]

    measured = []

    def metric(completions, question):
        measured.append(question)
        return [1.0] * len(question)

    config = replace(
        config, branches=2, sample_every=1, cory=CoryConfig(credit=credit, exchange_period=0)
    )
    trainer = make_questions(config, reward, team_reward=team_reward, metrics={"asked": metric})
    learned = spy(trainer)
    iteration = trainer.iteration(0)
    drawn = trainer.task.batch(0, 4, config.seed, 2)
    first, second = iteration.rollouts
    assert first.prompts == drawn["prompt"][::2]
    assert second.prompts == [
        f"{drawn['prompt'][row]}{first.completions[row // 2]} {drawn['question'][row]} was"
        for row in range(8)
    ]
    role, question, answer = seen[0]
    assert role == ["pioneer"] * 4 + ["observer"] * 8
    assert question == drawn["question"][::2] + drawn["question"]
    assert answer == drawn["answer"][::2] + drawn["answer"]
    assert measured == [drawn["question"][::2], drawn["question"]]

    pairs = zip(drawn["answer"], drawn["question"], strict=True)
    row_rewards = torch.tensor([float(len(text) + len(asked)) for text, asked in pairs])
    team = torch.tensor([float(len(a)) for a in drawn["answer"]])
    gained = row_rewards
    if credit == "counterfactual":  # this reward depends only on the row, so the difference is 0
        assert seen[1][1:] == (drawn["question"], drawn["answer"])
        gained = row_rewards - row_rewards
    rewards = [learned[0][f"agent_{number}"][1][0] for number in (1, 2)]
    torch.testing.assert_close(rewards[0], row_rewards[::2] + (gained + team).view(4, 2).mean(1))
    torch.testing.assert_close(rewards[1], row_rewards + team)

    # Samples show the first branch, which answers the query's first row.
    for sample, row in zip(iteration.samples, [0, 2, 4, 6] * 2, strict=True):
        assert sample["columns"] == {name: drawn[name][row] for name in ("question", "answer")}


# Refused data


ROWS = rows_of("ab", QUESTIONS[:2])


@pytest.mark.parametrize(
    ("rows", "prompts", "changes", "match"),
    [
        (ROWS[:3], PROMPTS, {}, "dataset: expected a multiple of branches = 2 .*, got 3"),
        (ROWS, PROMPTS, {}, "dataset: .* = 4 queries of 2 rows, got 2"),
        ([*ROWS[::2], *ROWS[1::2]], PROMPTS, {}, "dataset, column 'prompt', row 2: .* of row 1"),
        (ROWS, RolePrompts("{prompt} {question}"), {}, "dataset, column 'question', row 2: "),
        # The pioneer's prompt may also come from the run's settings.
        (
            ROWS,
            PROMPTS,
            {"roles": [RoleConfig(prompt="{prompt} {question}"), RoleConfig()]},
            "dataset, column 'question', row 2: ",
        ),
    ],
)
def test_rows_that_do_not_form_queries_are_refused(config, rows, prompts, changes, match):
    config = replace(config, branches=2, **changes)
    task = Task(datasets.Dataset.from_list(rows), count_good, prompts, row_per_branch=True)
    with pytest.raises(UserError, match=f"^{match}"):
        CoryTrainer(config, make_agents(config), task)


# From files

REWARD = """
import json


def reward(prompts, completions, role, question, answer):
    with open("seen.jsonl", "a") as file:
        file.write(json.dumps([prompts, role, question, answer]) + "\\n")
    return [float(len(text)) for text in completions]
"""
SETTINGS = """
iterations: 2
branches: 3
sample_every: 0
eval_every: 2
cory: {credit: causal, exchange_period: 0}
ppo: {batch_size: 12, mini_batch_size: 6, ppo_epochs: 1}
sampling: {min_new_tokens: 3, max_new_tokens: 4}
roles:
  - {name: writer}
  - {name: reader, prompt: "{writer} {question}"}
task:
  dataset: rows.jsonl
  eval_dataset: held_out.jsonl
  prompt_column: text
  row_per_branch: true
  max_prompt_tokens: 40
  reward: rewards.py:reward
"""


@pytest.fixture
def settings(tmp_path, monkeypatch, policy_folder):
    """Returns a function that changes keys of a run's settings and loads them. Its task has three rows per query."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "run.yaml").write_text(SETTINGS)
    texts = [*sentences(8), "good " * 50]
    lines = [json.dumps({"text": row.pop("prompt"), **row}) + "\n" for row in rows_of(texts)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    # Held-out rows need not form whole queries.
    (tmp_path / "held_out.jsonl").write_text("".join(lines[:4]))

    def settings(**changes):
        flags = {"model.name": policy_folder, "device": "cpu", "output": "run"} | changes
        argv = [f"--{key}={value}" for key, value in flags.items()]
        return load(OwnConfig, tmp_path / "run.yaml", argv)

    return settings


def test_a_run_from_files_trains_on_whole_queries(settings, tmp_path):
    config = settings()
    task = make_task(config)
    assert len(task.dataset) == 24  # the three rows of the long text are left out
    CoryTrainer(config, make_agents(config), task, eval_dataset=held_out_rows(config)).train()
    calls = [json.loads(line) for line in (tmp_path / "seen.jsonl").open()]
    training_calls = [call for call in calls if len(call[0]) == 4 + 12]
    assert len(training_calls) == 2
    for k, (prompts, role, question, answer) in enumerate(training_calls):
        drawn = task.batch(k, 4, config.seed, 3)
        assert role == ["writer"] * 4 + ["reader"] * 12
        assert prompts == drawn["prompt"][::3] + drawn["prompt"]
        assert question == ["plot"] * 4 + QUESTIONS * 4
        assert answer == drawn["answer"][::3] + drawn["answer"]
    # Held-out rows are evaluated one by one. The fixed samples take one row of each text.
    held_out = next(call for call in calls if call[0][0] == call[0][2] and len(call[0]) == 8)
    assert held_out[2] == [*QUESTIONS, "plot"] * 2


def test_each_held_out_row_is_a_query(settings):
    task = make_task(settings())
    assert task.row_per_branch
    assert not make_task(settings(), task.dataset.select(range(4))).row_per_branch
