"""The contract of rewards, metrics and team rewards: a finite number, or None, for each response."""

import asyncio
import math
import sys

import datasets
import numpy as np
import pytest
import torch
from conftest import sentences
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from cory.agent import make_agents
from cory.errors import UserError
from cory.rewards import (
    Classifier,
    MissingColumns,
    Reward,
    measure_responses,
    score_by_function,
    score_chains,
)
from cory.roles import RolePrompts
from cory.task import Task
from cory.trainer import CoryTrainer

TEXTS = ["first", "second", "third", "fourth"]
PROMPTS = RolePrompts(observer="{prompt}{response} {prompt}")


def score(reward, prompts, completions, columns):
    return score_by_function(reward, prompts, completions, columns).total


def scored(reward):
    return score(reward, TEXTS, TEXTS, {}).tolist()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "NoneType"),
        ({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, "dict"),
        ({1.0, 2.0, 3.0, 4.0}, "set"),
        ([0.0], "4 .*got 1"),
        ("good", "'g' in row 1"),
        ([0.0, "1.0", 0.0, 0.0], "'1.0' in row 2"),
        ([0.0, 0.0, math.nan, 0.0], "nan in row 3 .*'third'"),
        ([0.0, 0.0, 0.0, math.inf], "inf in row 4"),
        ([1e300] * 4, "row 1"),
        ([10**400] * 4, "row 1"),
        (torch.ones(4, 2), "row 1"),
    ],
)
def test_what_is_no_finite_number_for_each_response_is_refused(result, message):
    def judge(completions):
        return result

    with pytest.raises(UserError, match=f"(?s)^reward judge: .*{message}"):
        score(judge, TEXTS, TEXTS, {})


@pytest.mark.parametrize(
    "result",
    [
        torch.ones(4),
        np.ones(4),
        np.ones((4, 1)),
        [torch.tensor(1)] * 4,
        [np.float32(1)] * 4,
        [True] * 4,
        (1.0 for _ in range(4)),
    ],
)
def test_numbers_of_any_library(result):
    assert scored(lambda completions: result) == [1.0] * 4


def test_an_error_of_a_reward_is_its_own():
    calls = []

    def judge(completions):
        calls.append(completions)
        raise ZeroDivisionError("mine")

    async def slow(completions):
        calls.append(completions)
        raise ConnectionError("refused")

    for function, kind in ((judge, ZeroDivisionError), (slow, ConnectionError)):
        with pytest.raises(kind, match=r"mine|refused") as error:
            scored(function)
        assert error.traceback[-1].name == function.__name__
    assert calls == [TEXTS, TEXTS]  # once each: none is called again for its rows


def test_no_agent_learns_from_a_reward_that_raises(config):
    def judge(completions):
        raise TimeoutError("gone")

    trainer = CoryTrainer(
        config, make_agents(config), Task.from_prompts(sentences(10), judge, PROMPTS)
    )
    with pytest.raises(TimeoutError, match="gone"):
        trainer.iteration(0)
    assert [agent.optimizer_steps for agent in trainer.agents] == [0, 0]


def test_several_rewards_are_a_weighted_sum_and_none_does_not_count():
    """As TRL's GRPO trainer: the sum over the functions that apply; 0 and a warning where none does."""

    def one(completions, **columns):
        return [1.0, None, 3.0, None]

    async def other(completions):
        return [10.0, 20.0, None, None]

    with pytest.warns(UserWarning, match="one and other returned None"):
        scores = score_by_function([Reward(one), Reward(other, 0.5)], TEXTS, TEXTS, {})
    assert scores.total.tolist() == [6.0, 10.0, 3.0, 0.0] and scores.total.dtype == torch.float32
    assert scores.by_function["other"][:2].tolist() == [10.0, 20.0]


def test_async_rewards_wait_together_on_one_loop():
    loops = []
    all_wait = asyncio.Barrier(4)  # each waits until all four do

    async def together(completions):
        loops.append(asyncio.get_running_loop())
        await all_wait.wait()
        return [1.0] * len(completions)

    for _ in range(2):
        assert scored([Reward(together)] * 4) == [4.0] * 4
    assert len(set(loops)) == 1

    async def notebook():  # where a loop is running already
        async def alone(completions):
            return [1.0] * len(completions)

        return scored(alone)

    assert asyncio.run(notebook()) == [1.0] * 4


def test_an_async_judge_is_called_once_per_iteration(config):
    calls = []

    async def judge(prompts, completions):
        calls.append(len(completions))
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    task = Task.from_prompts(sentences(10), judge, PROMPTS)
    CoryTrainer(config, make_agents(config), task).iteration(0)
    assert calls == [2 * config.ppo.batch_size]  # the responses of both roles at once


def test_an_async_reward_that_calls_exit_does_not_hang():
    async def keyless(completions):
        sys.exit("no API key")

    with pytest.raises(RuntimeError):
        scored(keyless)


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
        with pytest.raises(MissingColumns) as error:
            Task(**({"dataset": rows, "reward": len, "prompts": PROMPTS} | arguments))
        assert error.value.names == ["answer"]


@pytest.mark.parametrize("column", ["prompts", "completions", "role", "chains", "rewards"])
def test_a_column_that_a_function_would_get_twice_is_refused(column):
    rows = datasets.Dataset.from_dict({"prompt": ["a"], column: ["x"]})
    with pytest.raises(UserError, match=f"^dataset: .*'{column}'"):
        Task(rows, len, PROMPTS)


def test_rewards_have_names_of_their_own():
    rows = datasets.Dataset.from_dict({"prompt": ["a"]})
    with pytest.raises(UserError, match=r"^task\.reward"):
        Task(rows, [Reward(len, name="a.py:good"), Reward(len, name="b.py:good")], PROMPTS)
    with pytest.raises(UserError, match=r"^task\.reward"):
        Task(rows, [], PROMPTS)


def test_metrics_also_get_rewards_and_team_rewards_need_a_number():
    def doubled(rewards):
        return [2 * reward if reward else None for reward in rewards]

    numbers = measure_responses({"doubled": doubled}, TEXTS, TEXTS, [1.0, 0.0, 2.0, 3.0], {})
    assert numbers["doubled"][::2] == [2.0, 4.0] and math.isnan(numbers["doubled"][1])
    chains = [["a", "b"]] * 4
    lengths = Reward(lambda chains: [len(chain) for chain in chains])
    assert score_chains(lengths, TEXTS, chains, {}).tolist() == [2.0] * 4
    with pytest.raises(UserError, match=r"^team reward .*None in row 1 .*chain \['a', 'b'\]"):
        score_chains(Reward(lambda chains: [None] * 4), TEXTS, chains, {})


# A classifier


@pytest.fixture
def reward_model(classifier_folder, tmp_path):
    """A classifier of a single output."""
    model = AutoModelForSequenceClassification.from_pretrained(
        classifier_folder, num_labels=1, ignore_mismatched_sizes=True
    )
    model.save_pretrained(tmp_path / "reward_model")
    AutoTokenizer.from_pretrained(classifier_folder).save_pretrained(tmp_path / "reward_model")
    return str(tmp_path / "reward_model")


def logits(folder, texts):
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")
        rows.append(model(ids["input_ids"], ids["attention_mask"]).logits[0].tolist())
    return rows


def test_a_classifier_gives_the_logit_of_its_label(classifier_folder, reward_model):
    prompts = ["the film", "a", "some very fine acting"]
    completions = ["was good", "bad film", "was awful " * 4]
    texts = [f"{prompt} {text}" for prompt, text in zip(prompts, completions, strict=True)]
    expected = logits(classifier_folder, texts)
    for label, index in (("NEGATIVE", 0), ("positive", 1)):
        reward = Classifier(str(classifier_folder), label, batch_size=2, separator=" ")
        assert score(reward, prompts, completions, {}).tolist() == pytest.approx(
            [row[index] for row in expected], rel=1e-4
        )
    single = [row[0] for row in logits(reward_model, texts)]
    reward = Classifier(reward_model, separator=" ")
    assert score(reward, prompts, completions, {}).tolist() == pytest.approx(single, rel=1e-4)
    assert Task.from_prompts(["a"], reward, PROMPTS).models().keys() == {"task.reward_model"}


def test_a_text_longer_than_a_classifier_reads_is_cut(classifier_folder, tmp_path):
    reward = Classifier(str(classifier_folder), "POSITIVE")
    assert len(reward(["good " * 500], [" film"])) == 1
    tokenizer = AutoTokenizer.from_pretrained(classifier_folder)
    roberta = RobertaForSequenceClassification(  # whose positions begin after that of padding
        RobertaConfig(
            vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=66, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    roberta.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert len(Classifier(str(tmp_path), "LABEL_1")(["good " * 500], [" film"])) == 1


@pytest.mark.parametrize("label", [None, "GOOD"])
def test_a_label_that_a_classifier_lacks(classifier_folder, reward_model, label):
    with pytest.raises(UserError, match=r"^task\.reward_model: .*POSITIVE"):
        Classifier(str(classifier_folder), label)
    if label:
        with pytest.raises(UserError, match=r"^task\.reward_model: .*GOOD"):
            Classifier(reward_model, label)
