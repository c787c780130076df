"""Information credit: how much likelier the right answer is to the second role once it has read the first."""

from dataclasses import replace

import datasets
import pytest
import torch
from conftest import count_good, sentences
from learning import spy
from questions import PROMPTS, make_questions, rows_of

import cory.agent
import cory.chain
from cory.build import make_agents
from cory.config import CoryConfig, LoraConfig, SamplingConfig
from cory.errors import UserError
from cory.models.prefixes import response_logits
from cory.task import Task, draw_batch
from cory.trainer import CoryTrainer

INFORMATION = CoryConfig(credit="information", exchange_period=0)
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<bot>"


def likelihood(agent, prompt, text, temperature=1.0):
    """Of a text after a prompt, by a pass over both alone."""
    prompt_ids = agent.tokenizer(prompt)["input_ids"]
    text_ids = agent.tokenizer(text)["input_ids"]
    ids = torch.tensor([[*prompt_ids, *text_ids]])
    with torch.no_grad():
        logprobs = (agent.policy(input_ids=ids).logits[0] / temperature).log_softmax(-1)
    before = len(prompt_ids) - 1
    return sum(logprobs[before + place, token].item() for place, token in enumerate(text_ids))


def disturb(agent):
    """Moves the trained weights, so that an adapter is not its base, nor one agent the other."""
    generator = torch.Generator().manual_seed(len(agent.name) + int(agent.name[-1]))
    with torch.no_grad():
        for parameter in agent.learner.model_params:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


# Likelihoods


@pytest.mark.parametrize(
    ("changes", "temperature"),
    [
        ({}, 1.0),
        ({"algorithm": "grpo", "group_size": 2}, 0.6),
        ({"lora": LoraConfig(rank=4)}, 0.6),
    ],
    ids=["ppo", "grpo", "lora"],
)
def test_likelihoods_are_those_of_a_plain_pass_over_each_text(config, changes, temperature):
    """Of texts of different lengths, in several passes, also where prompts begin alike; of a frozen agent, too."""
    sampling = SamplingConfig(3, 6, temperature=temperature)
    agents = [{}, {}, {"trained": False}]
    cory = CoryConfig(num_agents=3)
    ppo = replace(config.ppo, mini_batch_size=4)
    config = replace(config, sampling=sampling, agents=agents, cory=cory, ppo=ppo, **changes)
    first, second, frozen = make_agents(config)
    disturb(first)
    disturb(second)
    prompts = [*sentences(5), *(f"{sentences(1)[0]} {end}" for end in ("good", "bad", "was a "))]
    texts = ["good", "the film was", "a", "bad music in every scene", "fine", "some", "very", "in"]
    expected = {}
    # The second's adapter is the active one when the first is asked.
    for agent in (second, first, frozen):
        agent.policy.train()
        found = agent.log_likelihoods(prompts, texts)
        assert found.dtype == torch.float32 and found.shape == (8,)
        spaces = ["" if prompt.endswith(" ") else " " for prompt in prompts]
        with agent._answering():
            expected[agent.name] = torch.tensor(
                [
                    likelihood(agent, prompt, space + text, temperature)
                    for prompt, space, text in zip(prompts, spaces, texts, strict=True)
                ]
            )
        torch.testing.assert_close(found, expected[agent.name], rtol=1e-5, atol=1e-5)
        assert torch.equal(agent.log_likelihoods(prompts, texts), found)  # nothing is drawn
    assert (expected["agent_1"] - expected["agent_2"]).abs().min() > 1e-3
    assert (expected["agent_1"] - expected["agent_3"]).abs().min() > 1e-3


@pytest.mark.parametrize(
    ("changes", "rows_of_passes"),
    [
        ({"mini_batch_size": 8}, [8]),
        ({"mini_batch_size": 4}, [4, 4]),
        ({"micro_batch": 3}, [3, 3, 2]),
    ],
)
def test_likelihoods_take_a_micro_batch_at_a_time(config, monkeypatch, changes, rows_of_passes):
    (agent, _) = make_agents(replace(config, ppo=replace(config.ppo, **changes)))
    rows = []

    def counted(policy, prompts, *rest):
        rows.append(len(prompts))
        return response_logits(policy, prompts, *rest)

    monkeypatch.setattr(cory.agent, "response_logits", counted)
    agent.log_likelihoods(sentences(8), ["good"] * 8)
    assert rows == rows_of_passes


@pytest.mark.parametrize("index", [0, 1], ids=["trained", "frozen"])
def test_likelihoods_take_fewer_rows_where_memory_runs_out(config, monkeypatch, index):
    agents = make_agents(replace(config, agents=[{}, {"trained": False}]))
    expected = agents[index].log_likelihoods(sentences(8), ["good"] * 8)

    def limited(policy, prompts, *rest):
        if len(prompts) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return response_logits(policy, prompts, *rest)

    monkeypatch.setattr(cory.agent, "response_logits", limited)
    with pytest.warns(UserWarning, match="ppo.micro_batch"):
        found = agents[index].log_likelihoods(sentences(8), ["good"] * 8)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_turn_of_a_chat_is_the_text_as_it_is(config, monkeypatch):
    (agent, _) = make_agents(config)
    monkeypatch.setattr(agent.tokenizer, "chat_template", CHAT)
    messages = [[{"role": "user", "content": text}] for text in ("the film", "bad")]
    expected = [
        likelihood(agent, "<user>the film<bot>", "good"),
        likelihood(agent, "<user>bad<bot>", "a good story"),
    ]
    found = agent.log_likelihoods(messages, ["good", "a good story"])
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_text_that_is_too_long_is_named(config):
    (agent, _) = make_agents(config)
    with pytest.raises(UserError, match=r"^prompt in row 2: .* 96 tokens"):
        agent.log_likelihoods(["good", "good"], ["good", "good " * 100])


# Rewards


FLOOR = -53.0  # which some answers of these models reach


def by_hand(config, batch, rollouts, agent):
    """I of each response of the second role, under the agent's model."""
    first, second = rollouts
    columns = batch.columns_of(1)
    told = []
    for row, prompt in enumerate(second.prompts):
        values = {name: column[row] for name, column in columns.items()}
        chain = row // config.branches
        assert prompt == PROMPTS.render(1, values, [first.completions[chain]])
        other = first.completions[
            chain - config.chains_per_query
        ]  # the last one's before the first
        other_prompt = PROMPTS.render(1, values, [other])
        answer = f" {values['answer']}"
        after_own, after_other = (
            likelihood(agent, text, answer) for text in (prompt, other_prompt)
        )
        told.append(max(after_own, FLOOR) - max(after_other, FLOOR))
    return torch.tensor(told)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"branches": 2},
        {"branches": 2, "algorithm": "rloo", "group_size": 2},
        {"cory": replace(INFORMATION, num_agents=1, chain_length=2), "branches": 2},
        {"lora": LoraConfig(rank=4), "agents": [{}, {"trained": False}]},
    ],
    ids=["pair", "questions", "groups", "one LLM", "frozen reader"],
)
def test_the_first_role_earns_what_it_tells_about_the_answer(config, changes, monkeypatch):
    """Under the reader's weights before its update; of the rows' mean where there are several."""
    monkeypatch.setattr(cory.chain, "LEAST_LOG_LIKELIHOOD", FLOOR)
    chain = replace(changes.get("cory", INFORMATION), weight=0.5)
    trainer = make_questions(replace(config, **changes | {"cory": chain}))
    for agent in trainer.agents:
        if agent.is_trained:
            disturb(agent)
    batch = draw_batch(trainer.task, trainer.config, 0)
    learned = spy(trainer)
    told = []
    update = trainer.update

    def before_update(k, chain, rollouts, rewards):
        with chain[1]._answering():
            told.append(by_hand(trainer.config, batch, rollouts, chain[1]))
        return update(k, chain, rollouts, rewards)

    trainer.update = before_update
    iteration = trainer.iteration(0)
    r1, r2 = iteration.task_rewards
    mean = told[0].view(len(r1), -1).mean(1)
    assert len(told[0]) == 8 and mean.abs().max() > 0.01
    torch.testing.assert_close(iteration.rewards[0], r1 + 0.5 * mean, rtol=1e-4, atol=1e-4)
    assert torch.equal(iteration.rewards[1], r2)
    given = [rewards for _, of_agent in learned[0].values() for rewards in of_agent]
    for reward, expected in zip(given, iteration.rewards, strict=True):
        assert torch.equal(reward, expected)


def test_one_answer_gives_at_most_so_much(config, monkeypatch):
    trainer = make_questions(replace(config, cory=INFORMATION))
    far = torch.tensor([-1.0, -100.0] * 4 + [-100.0, -1.0, -100.0, -100.0] * 2)
    monkeypatch.setattr(trainer.agents[1], "log_likelihoods", lambda prompts, texts: far)
    iteration = trainer.iteration(0)
    gained = iteration.rewards[0] - iteration.task_rewards[0]
    assert cory.chain.LEAST_LOG_LIKELIHOOD == -10.0
    torch.testing.assert_close(gained, torch.tensor([9.0, -9.0, 9.0, 0.0] * 2))


def test_a_single_agent_of_the_same_settings_earns_its_own(config):
    """The baseline reads the same file."""
    trainer = make_questions(replace(config, cory=replace(INFORMATION, num_agents=1)))
    iteration = trainer.iteration(0)
    assert torch.equal(iteration.rewards[0], iteration.task_rewards[0])


# What is refused


@pytest.mark.parametrize(
    ("answers", "match"),
    [
        (None, "^dataset: expected a column 'answer'"),
        (["good"] * 8 + [None, "bad"], "^dataset, column 'answer', row 9: .*None"),
        (["good", ""] * 5, "^dataset, column 'answer', row 2: .*''"),
        (
            ["good"] * 4 + ["good " * 80] + ["bad"] * 5,
            "^dataset, column 'answer', row 5: expected at most",
        ),
    ],
)
def test_rows_need_answers(config, answers, match):
    rows = rows_of([text[:20] for text in sentences(10)], ["plot"])
    for number, row in enumerate(rows):
        row.pop("answer")
        if answers is not None:
            row["answer"] = answers[number]
    task = Task(datasets.Dataset.from_list(rows), count_good, PROMPTS)
    agents = make_agents(config)
    CoryTrainer(config, agents, task)  # with another credit they do not
    with pytest.raises(UserError, match=match):
        CoryTrainer(replace(config, cory=INFORMATION), agents, task)
