"""Rewards and metrics return a finite number or None for each response.

Team rewards return a finite number for each chain, that is, for the responses of all roles to one query.
"""

import asyncio
import math
import re
import sys

import datasets
import numpy as np
import pytest
import torch
from conftest import count_good
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from cory.errors import UserError
from cory.rewards import (
    Classifier,
    Reward,
    measure_responses,
    score_by_function,
    score_chains,
)
from cory.roles import RolePrompts
from cory.task import Task

TEXTS = ["first", "second", "third", "fourth"]
PROMPTS = RolePrompts(observer="{prompt}{response} {prompt}")


def score(reward, prompts, completions, columns):
    return score_by_function(reward, prompts, completions, columns).total


def scored(reward):
    return score(reward, TEXTS, TEXTS, {}).tolist()


@pytest.mark.parametrize(
    ("result", "row"),
    [
        (None, ""),
        ({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, ""),
        ({1.0, 2.0, 3.0, 4.0}, ""),
        ([0.0], ""),
        ("good", "row 1"),
        ([0.0, "1.0", 0.0, 0.0], "row 2"),
        ([0.0, 0.0, math.nan, 0.0], "row 3"),
        ([0.0, 0.0, 0.0, math.inf], "row 4"),
        ([1e300] * 4, "row 1"),
        ([10**400] * 4, "row 1"),
        (torch.ones(4, 2), "row 1"),
        (torch.ones(4, 1), "row 1"),
        (np.ones((4, 1)), "row 1"),
    ],
)
def test_results_other_than_a_finite_number_per_response_are_refused(result, row):
    """The same holds for team rewards. For a team reward, None is also refused as a chain's result."""

    def judge(completions):
        return result

    def team(chains):
        return [None] * 4 if result is None else result

    with pytest.raises(UserError, match=f"(?s)^reward judge: .*{row}"):
        score(judge, TEXTS, TEXTS, {})
    with pytest.raises(UserError, match=f"(?s)^team reward team: .*{row}"):
        score_chains(Reward(team), TEXTS, [["a", "b"]] * 4, {})


@pytest.mark.parametrize(
    "result",
    [
        torch.ones(4),
        np.ones(4, dtype=np.float16),
        [np.array(1), torch.tensor(1.0, requires_grad=True), np.bool_(True), torch.tensor(1)],
        [True] * 4,
        (1.0 for _ in range(4)),
    ],
)
def test_numbers_of_any_library_are_accepted(result):
    assert scored(lambda completions: result) == [1.0] * 4


def test_an_error_in_a_reward_is_raised_unchanged():
    calls = []

    def judge(completions):
        calls.append(completions)
        raise ZeroDivisionError("mine")

    async def slow(completions):
        calls.append(completions)
        raise ConnectionError("refused")

    async def keyless(completions):
        calls.append(completions)
        sys.exit("no API key")

    with pytest.raises(RuntimeError):  # `sys.exit` in an async reward must not hang
        scored(keyless)
    for function, kind in ((judge, ZeroDivisionError), (slow, ConnectionError)):
        with pytest.raises(kind, match=r"mine|refused") as error:
            scored(function)
        assert error.traceback[-1].name == function.__name__
    assert calls == [TEXTS] * 3  # no function is called a second time


def test_several_rewards_are_a_weighted_sum_in_which_none_does_not_count():
    """As in TRL's GRPO trainer, a function that returns None for a row is left out of its sum.

    A row for which all functions return None gets 0 and a warning.
    """

    def one(completions, **columns):
        return [1.0, None, 3.0, None]

    async def other(completions):
        return [10.0, 20.0, None, None]

    with pytest.warns(UserWarning, match="one and other returned None"):
        scores = score_by_function([Reward(one), Reward(other, 0.5)], TEXTS, TEXTS, {})
    assert scores.total.tolist() == [6.0, 10.0, 3.0, 0.0] and scores.total.dtype == torch.float32
    assert scores.by_function["other"][:2].tolist() == [10.0, 20.0]
    with pytest.warns(UserWarning, match="returned None for all rows"):
        assert scored(lambda completions: [None] * 4) == [0.0] * 4


def test_in_place_changes_by_a_function_do_not_reach_the_others():
    def shorten(completions, tags, **columns):
        for message, *_ in completions:
            message["content"] = ""
        tags[0].clear()
        completions.clear()
        return [0.0]

    def length(completions, tags):
        return [float(len(completions[0][0]["content"]) + len(tags[0]))]

    prompts, columns = [[{"role": "user", "content": "Hi"}]], {"tags": [["a", "b"]]}
    scores = score_by_function([shorten, length], prompts, ["hello"], columns)
    assert scores.total.tolist() == [7.0] and columns == {"tags": [["a", "b"]]}


def test_async_rewards_wait_together_on_one_loop():
    loops = []
    all_wait = asyncio.Barrier(4)  # passed only if all four calls wait at the same time

    async def together(completions):
        loops.append(asyncio.get_running_loop())
        await all_wait.wait()
        return [1.0] * len(completions)

    for _ in range(2):
        assert scored([Reward(together)] * 4) == [4.0] * 4
    assert len(set(loops)) == 1

    async def notebook():  # a notebook already runs an event loop
        async def alone(completions):
            return [1.0] * len(completions)

        return scored(alone)

    assert asyncio.run(notebook()) == [1.0] * 4


def test_functions_get_the_columns_that_they_name():
    seen = {}

    def named(completions, hint, other="default"):
        seen["named"] = (completions, hint, other)
        return [0.0] * len(completions)

    def every(**columns):
        seen["every"] = sorted(columns)
        return [0.0] * len(columns["prompts"])

    columns = {"hint": list("abcd"), "role": ["pioneer"] * 4}
    score([Reward(named), Reward(every)], TEXTS, TEXTS, columns)
    assert seen["named"] == (TEXTS, list("abcd"), "default")
    assert seen["every"] == ["completions", "hint", "prompts", "role"]


def test_missing_columns_are_found_before_training():
    def needs(completions, answer):
        return [0.0] * len(completions)

    def team(chains, answer):
        return [0.0] * len(chains)

    rows = datasets.Dataset.from_dict({"prompt": ["a"]})
    for arguments in ({"metrics": {"needs": needs}}, {"team_reward": team}, {"reward": needs}):
        with pytest.raises(UserError, match=r"expected parameters among .*, got \['answer'\]"):
            Task(**({"dataset": rows, "reward": count_good, "prompts": PROMPTS} | arguments))


def test_a_function_that_cannot_be_passed_columns_by_name_is_refused():
    def by_position(prompts, completions, /):
        return [0.0] * len(prompts)

    rows = datasets.Dataset.from_dict({"prompt": ["a"]})
    for function in (by_position, max):
        for argument in ({"reward": function}, {"metrics": {"m": function}}):
            with pytest.raises(UserError, match=r"^(reward|metric) .*: expected .*parameters"):
                Task(**({"dataset": rows, "reward": count_good, "prompts": PROMPTS} | argument))


def test_columns_that_a_function_would_get_twice_are_refused():
    names = ["prompts", "completions", "completion_ids", "chains", "role", "rewards"]
    rows = datasets.Dataset.from_dict({name: ["x"] for name in ["prompt", *names]})
    with pytest.raises(UserError, match=f"^dataset: .*{re.escape(str(names))}"):
        Task(rows, count_good, PROMPTS)


def test_a_metric_gets_the_rewards_and_a_team_reward_gives_a_number_per_chain():
    def doubled(rewards):
        return [2 * reward if reward else None for reward in rewards]

    numbers = measure_responses({"doubled": doubled}, TEXTS, TEXTS, [1.0, 0.0, 2.0, 3.0], {})
    assert numbers["doubled"][::2] == [2.0, 4.0] and math.isnan(numbers["doubled"][1])
    chains = [["a", "b"]] * 4
    lengths = Reward(lambda chains: [len(chain) for chain in chains])
    assert score_chains(lengths, TEXTS, chains, {}).tolist() == [2.0] * 4


# Classifiers as rewards


@pytest.fixture
def reward_model(classifier_folder, tmp_path):
    """The folder of a classifier with a single output."""
    model = AutoModelForSequenceClassification.from_pretrained(
        classifier_folder, num_labels=1, ignore_mismatched_sizes=True
    )
    model.save_pretrained(tmp_path / "reward_model")
    AutoTokenizer.from_pretrained(classifier_folder).save_pretrained(tmp_path / "reward_model")
    return str(tmp_path / "reward_model")


def test_a_text_that_is_too_long_for_a_classifier_loses_the_prompts_start(
    classifier_folder, tmp_path
):
    tokenizer = AutoTokenizer.from_pretrained(classifier_folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "max_position_embeddings": 66}
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    # RoBERTa's positions start after the padding position, so it reads fewer tokens than it has positions.
    RobertaForSequenceClassification(RobertaConfig(**sizes, **ids)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for folder, label in ((classifier_folder, "POSITIVE"), (tmp_path, "LABEL_1")):
        good, bad = Classifier(str(folder), label)(["film " * 500] * 2, [" good", " bad"])
        assert good != bad


def test_a_missing_or_unknown_label_is_refused(classifier_folder, reward_model):
    for folder, label in (
        (classifier_folder, None),
        (classifier_folder, "GOOD"),
        (reward_model, "GOOD"),
    ):
        with pytest.raises(UserError, match=r"^task\.reward_model: "):
            Classifier(str(folder), label)


def test_a_reward_that_exits_is_named():
    def ends(completions, **columns):
        raise SystemExit

    with pytest.raises(RuntimeError, match="ends has called"):
        score(ends, ["a"], ["b"], {})
