"""Costs and rewards in an evaluation's rows: KL, tokens and calls of a chain, team rewards, majority votes.

In a chain, several models answer in turn. Each answer is a call, and a chain's costs are summed over its calls.
"""

from dataclasses import replace
from fractions import Fraction

import datasets
import pytest
from conftest import PROMPTS, count_good, read_responses, sentences
from evaluation_settings import settings

from cory import evaluate
from cory.build import make_agents
from cory.config import CoryConfig, EvaluationConfig, LoraConfig, RoleConfig
from cory.evaluation.table import majority, majority_at_k, table_rows, titles
from cory.task import Task
from cory.trainer import CoryTrainer
from gsm8k_train.answers import extract

QUERIES = {"prompt": ["first", "second"]}
ETA = 0.1


def record(
    rewards, kl, read=None, completions=("a", "b"), prompt_tokens=(5, 5), tokens=(2, 4), **more
):
    return {
        "rewards": list(rewards),
        "kl": list(kl),
        "base_nll": [1.0] * len(rewards),
        "prompt_tokens": list(prompt_tokens),
        "tokens": list(tokens),
        "completions": list(completions),
        "role": "observer" if read else "pioneer",
        "read": read,
        **more,
    }


def task(**changes):
    return Task(datasets.Dataset.from_dict(QUERIES), count_good, PROMPTS, **changes)


@pytest.fixture
def three_calls():
    """Records of a chain of three models, one, two and three, with two samples for each of two queries."""
    return {
        "one": [record([0, 0], [1.0, 3.0]), record([0, 0], [2.0, 2.0])],
        "two": [record([0, 1], [0.5, 0.5], "one", prompt_tokens=(7, 9))] * 2,
        "three": [record([1, 2], [4.0, 6.0], "two", prompt_tokens=(10, 11), tokens=(1, 1))] * 2,
    }


def test_a_chain_counts_all_of_its_calls(three_calls):
    """Expected sums: KL 2 + 0.5 + 5, tokens read 5 + 8 + 10.5, tokens written 3 + 3 + 1."""
    one, two, three = table_rows(three_calls, QUERIES, task(), EvaluationConfig(samples=2), ETA)
    assert [row["calls"] for row in (one, two, three)] == [1, 2, 3]
    assert [row["kl"] for row in (one, two, three)] == [2, 0.5, 5]
    assert [row["chain_kl"] for row in (one, two, three)] == [2, 2.5, 7.5]
    assert [row["tokens_read"] for row in (one, two, three)] == [5, 13, 23.5]
    assert [row["tokens_written"] for row in (one, two, three)] == [3, 6, 7]
    assert [row["tokens"] for row in (one, two, three)] == [3, 3, 1]
    assert three["combined_reward"] == pytest.approx(1.5 - ETA * 7.5)
    assert one["combined_reward"] == pytest.approx(0 - ETA * 2)


def test_intervals_are_computed_from_sums_over_calls():
    """Two queries with KL 101 + 102 and 103 + 100: each call's KL varies, but the sums are equal."""
    records = {
        "one": [record([0], [101.0], completions="a"), record([0], [103.0], completions="a")],
        "two": [record([0], [102.0], "one", "a"), record([0], [100.0], "one", "a")],
    }
    one, two = table_rows(records, QUERIES, task(), EvaluationConfig(), ETA)
    assert two["chain_kl"] == 203 and two["chain_kl_ci"] == 0
    assert two["kl_ci"] > 0 and one["chain_kl_ci"] == one["kl_ci"] > 0


def test_an_interval_that_would_leave_the_range_of_its_metric_is_none():
    """KL 1.5 +- 6.4 and perplexity 148 +- 1886 would reach below 0. A reward may be negative."""
    first = record([-1.0], [1.0], completions="a", tokens=[2], base_nll=[8.0])
    second = record([0.5], [2.0], completions="a", tokens=[2], base_nll=[12.0])
    (row,) = table_rows({"one": [first, second]}, QUERIES, task(), EvaluationConfig(), ETA)
    assert row["kl"] == 1.5 and row["kl_ci"] is row["chain_kl_ci"] is None
    assert row["perplexity"] == pytest.approx(148.4, abs=0.1) and row["perplexity_ci"] is None
    assert row["task_reward"] == -0.25 and row["task_reward_ci"] > 9
    assert row["tokens"] == 2 and row["tokens_ci"] == 0


def test_a_team_reward_is_counted_beside_the_last_response(three_calls):
    three_calls["three"] = [record([1, 2], [4.0, 6.0], "two", team_rewards=[10.0, 20.0])] * 2
    two, three = table_rows(three_calls, QUERIES, task(), EvaluationConfig(samples=2), ETA)[1:]
    assert "team_reward" not in two and three["team_reward"] == 15
    assert three["combined_reward"] == pytest.approx(1.5 + 15 - ETA * 7.5)


def test_rows_without_a_team_reward_have_no_combined_reward(three_calls):
    teamwork = task(team_reward=variety)
    with_team = [
        record([1, 2], [4.0, 6.0], "two", team_rewards=rewards) for rewards in ([1.0, 3.0], [4, 6])
    ]
    three_calls["three"] = with_team
    one, two, three = table_rows(three_calls, QUERIES, teamwork, EvaluationConfig(samples=2), ETA)
    for row in (one, two):
        assert "task_reward" in row and not {"team_reward", "combined_reward"} & set(row)
    assert three["team_reward"] == 3.5
    assert three["combined_reward"] == pytest.approx(1.5 + 3.5 - ETA * 7.5)


def test_majority_vote():
    """The first answer wins a tie. Responses without an answer do not vote."""
    assert majority(["5", "7", "7"]) == 1 and majority(["7", "5", "5", "7"]) == 0
    assert majority([None, "5", None]) == 1 and majority([None, None]) == 0
    assert majority([Fraction(1, 2), Fraction(3), Fraction(2, 4)]) == 0


def test_pass_at_k_is_only_reported_for_rewards_0_and_1():
    settings = EvaluationConfig(samples=2, ks=[1, 2])
    for rewards, expected in (([0.0, 1.0], 0.5), ([0.2, 1.2], None)):
        records = {"base": [record(rewards, [0.0, 0.0])] * 2}
        (row,) = table_rows(records, QUERIES, task(), settings, ETA)
        assert row.get("pass@1") == expected
        shown = titles(task(), settings, [row])
        assert ("pass@1" in shown, "task_reward" in shown) == (bool(expected), not expected)


def test_pass_at_k_is_omitted_from_all_rows_if_one_has_another_reward():
    settings = EvaluationConfig(samples=2, ks=[1, 2], greedy=True)
    solved = [record([0.0, 1.0], [0.0, 0.0], greedy_reward=1.0)] * 2
    graded = [record([0.0, 0.5], [0.0, 0.0], greedy_reward=0.5)] * 2
    (row,) = table_rows({"base": solved}, QUERIES, task(extract=extract), settings, ETA)
    solved_metrics = {"pass@1", "pass@2", "maj@2", "greedy"}
    assert solved_metrics < set(row)
    rows = table_rows({"base": solved, "a": graded}, QUERIES, task(extract=extract), settings, ETA)
    for row in rows:
        assert not solved_metrics & set(row) and "task_reward" in row
    assert "task_reward" in titles(task(), settings, rows)


def test_majority_votes_are_taken_in_groups_of_k():
    """Five responses make two groups of 2, (x, y) and (y, y); the fifth is left out."""
    rewards = [3.0, 0.0, 1.0, 9.0, 100.0]
    assert majority_at_k(["x", "y", "y", "y", "z"], rewards, 2) == (3 + 1) / 2
    # The vote picks the first of the three y.
    assert majority_at_k(["x", "y", "y", "y", "z"], rewards, 5) == 0


def test_each_k_above_1_has_a_column_of_majority_votes():
    texts = ["It is 3.", "It is 4.", "It is 4.", "none"]
    lengths = {"prompt_tokens": [5] * 4, "tokens": [2] * 4}
    solo = record([1, 0, 0, 1], [0.0] * 4, completions=texts, **lengths)
    ks = EvaluationConfig(samples=4, ks=[1, 2, 4])
    (one,) = table_rows({"one": [solo] * 2}, QUERIES, task(extract=extract), ks, ETA)
    assert (
        one["maj@2"] == (1 + 0) / 2
    )  # 3 wins the tie in the first pair; in the second, only 4 is an answer
    assert one["maj@4"] == 0
    assert "maj@1" not in one


def variety(chains, **columns):
    return [float(len(" ".join(chain).split())) + 100 * len(chain) for chain in chains]


ROLES = [
    RoleConfig(name="writer"),
    RoleConfig(name="critic", prompt="{writer} {prompt}"),
    RoleConfig(stop=["a"]),
]


@pytest.fixture
def rows():
    """Queries to train on and to evaluate."""
    queries = [" ".join(text.split()[:4]) for text in sentences(16)]
    return datasets.Dataset.from_dict({"prompt": queries})


def trained(config, task, name, tmp_path, **changes):
    """Trains agents and returns the folder of their run."""
    run = replace(config, **{"output": str(tmp_path / name), **changes})
    return CoryTrainer(run, make_agents(run), task).train().folder


def test_an_agent_whose_role_is_not_in_the_chain_answers_once_with_its_own_prompt(
    config, rows, tmp_path
):
    """Here, this is an agent that reads in one prompt what the roles of a chain read piece by piece."""
    task = Task(rows, count_good, PROMPTS)
    config = replace(config, iterations=1)
    pair = trained(config, task, "pair", tmp_path, roles=ROLES[:2])
    role = RoleConfig(name="reader", prompt="all of it: {prompt}")
    alone = CoryConfig(num_agents=1)
    reader = trained(config, task, "reader", tmp_path, cory=alone, roles=[role])
    held_out = task.with_roles(ROLES[:2])
    done = evaluate([pair, reader], held_out, settings(tmp_path, queries=4))
    names = {row["name"] for row in done.rows}
    assert {"base after itself", "pair/agent_2 after agent_1", "reader/agent_1"} <= names
    assert not any(name.startswith("reader/agent_1 after") for name in names)
    records = read_responses(done.folder)
    for number, text in enumerate(rows["prompt"][:4]):
        read = records["reader/agent_1", number]
        assert read["prompt"] == f"all of it: {text}" and read["role"] == "reader"


def test_a_chain_of_roles_with_a_team_reward_and_a_frozen_agent(
    config, rows, policy_folder, tmp_path
):
    """The chain is compared with single models that answer three times, with the prompts of its three roles.

    The frozen agent contributes a KL of 0.
    """
    teamwork = Task(rows, count_good, PROMPTS, team_reward=variety)
    frozen = [{}, {"model": {"name": str(policy_folder)}, "trained": False}, {}]
    config = replace(config, iterations=2, cory=CoryConfig(num_agents=3, exchange_period=0))
    three = trained(config, teamwork, "three", tmp_path, roles=ROLES, agents=frozen)
    alone = CoryConfig(num_agents=1)
    one = trained(config, teamwork, "one", tmp_path, cory=alone, roles=ROLES[:1])
    held_out = teamwork.with_roles(ROLES)
    done = evaluate([three, one], held_out, settings(tmp_path, samples=2, queries=6))
    by_name = {row["name"]: row for row in done.rows}
    rivals = {"base after itself after itself", "one/agent_1 after itself after itself"}
    assert rivals <= {*by_name}
    assert "base of three/agent_2" not in by_name  # the frozen agent is its own base
    assert {row["calls"] for row in done.rows if "team_reward" in row} == {1, 3}

    by_row = read_responses(done.folder)
    chain = [
        "three/agent_1",
        "three/agent_2 after agent_1",
        "three/agent_3 after agent_2 after agent_1",
    ]
    writer, critic, last = (by_row[name, 0] for name in chain)
    assert [line["role"] for line in (writer, critic, last)] == ["writer", "critic", "observer_2"]
    assert critic["kl"] == pytest.approx([0, 0], abs=1e-5) and last["kl"][0] > 0
    texts = [line["completions"] for line in (writer, critic, last)]
    assert last["team_rewards"] == variety(list(zip(*texts, strict=True)))
    row = by_name[chain[2]]
    total = [sum(sum(by_row[name, query]["kl"]) / 2 for name in chain) for query in range(6)]
    assert row["chain_kl"] == pytest.approx(sum(total) / 6)
    expected = row["task_reward"] + row["team_reward"] - config.ppo.init_kl_coef * row["chain_kl"]
    assert row["combined_reward"] == pytest.approx(expected)

    twice = by_row["one/agent_1 after itself", 0]  # trained in the first role only
    first = by_row["one/agent_1", 0]["completions"][0]
    assert twice["role"] == "critic" and twice["prompt"] == f"{first} {rows['prompt'][0]}"
    page = (done.folder / "report.html").read_text()
    assert "tokens written" in page and "team reward" in page


@pytest.mark.parametrize("rank", [0, 4])
def test_the_kl_of_a_frozen_agent_of_another_run_is_to_that_runs_base(
    config, rows, llama_folder, tmp_path, rank
):
    """The second run freezes a copy of `first/agent_1`, the third a copy of that copy. Both have the original's KL."""
    task = Task(rows, count_good, PROMPTS)
    config = replace(config, iterations=2)
    first = trained(config, task, "first", tmp_path, lora=LoraConfig(rank=rank))
    frozen = {"model": {"name": str(first / "agent_1")}, "trained": False}
    second = trained(config, task, "second", tmp_path, agents=[{}, frozen])
    frozen = {"model": {"name": str(second / "agent_2")}, "trained": False}
    llama = {"model": {"name": str(llama_folder)}}
    third = trained(config, task, "third", tmp_path, agents=[llama, frozen])

    done = evaluate([first, second, third], task, settings(tmp_path, queries=6))
    kl = {row["name"]: row["kl"] for row in done.rows}
    assert kl["first/agent_1"] > 1e-3
    for name in ("second/agent_2", "third/agent_2"):
        assert kl[name] == pytest.approx(kl["first/agent_1"], rel=1e-3)
    # The base of the first run's agent is `base` and gets no further row.
    bases = {name for name in kl if name.startswith("base")}
    assert bases == {"base", "base after itself", "base of third/agent_1"}


def test_team_rewards_are_the_same_whichever_runs_are_named_first(finished, config, rows, tmp_path):
    """Pairs and single agents that answer after themselves both get team rewards."""
    teamwork = Task(rows, count_good, PROMPTS, team_reward=variety)
    alone = CoryConfig(num_agents=1)
    one = trained(config, teamwork, "one", tmp_path, iterations=1, cory=alone)
    for first, second in ((one, finished.folder), (finished.folder, one)):
        chosen = settings(tmp_path / f"{first.name} both", queries=3)
        by_name = {row["name"]: row for row in evaluate([first, second], teamwork, chosen).rows}
        rows = evaluate([first], teamwork, settings(tmp_path / first.name, queries=3)).rows
        assert all(row == by_name[row["name"]] for row in rows if row["calls"] == 2)
        calls = {row["calls"] for row in rows if "team_reward" in row}
        assert calls == ({1, 2} if first == one else {2})
        chains = [row for row in by_name.values() if row["calls"] == 2]
        assert len(chains) == 4 and all("team_reward" in row for row in chains)
