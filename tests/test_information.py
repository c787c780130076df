"""Information credit rewards the first response for raising the second role's likelihood of the right answer."""

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
    """Returns a text's log-likelihood after a prompt, from one pass over both."""
    prompt_ids = agent.tokenizer(prompt)["input_ids"]
    text_ids = agent.tokenizer(text)["input_ids"]
    ids = torch.tensor([[*prompt_ids, *text_ids]])
    with torch.no_grad():
        logprobs = (agent.policy(input_ids=ids).logits[0] / temperature).log_softmax(-1)
    start = len(prompt_ids) - 1
    return sum(logprobs[start + t, token].item() for t, token in enumerate(text_ids))


def disturb(agent):
    """Perturbs the trained weights, so that the agents differ from each other and from their base."""
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
def test_likelihoods_equal_those_of_a_plain_pass_over_each_text(config, changes, temperature):
    """Texts have different lengths and fill several passes, and some prompts share a prefix. One agent is frozen."""
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
    # The first agent's turn comes while the second one's adapter is active.
    for agent in (second, first, frozen):
        agent.policy.train()
        likelihoods = agent.log_likelihoods(prompts, texts)
        assert likelihoods.dtype == torch.float32 and likelihoods.shape == (8,)
        spaces = ["" if prompt.endswith(" ") else " " for prompt in prompts]
        with agent._answering():
            expected[agent.name] = torch.tensor(
                [
                    likelihood(agent, prompt, space + text, temperature)
                    for prompt, space, text in zip(prompts, spaces, texts, strict=True)
                ]
            )
        torch.testing.assert_close(likelihoods, expected[agent.name], rtol=1e-5, atol=1e-5)
        assert torch.equal(agent.log_likelihoods(prompts, texts), likelihoods)  # not random
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
def test_likelihoods_are_computed_in_micro_batches(config, monkeypatch, changes, rows_of_passes):
    (agent, _) = make_agents(replace(config, ppo=replace(config.ppo, **changes)))
    rows = []

    def counted(policy, prompts, *rest):
        rows.append(len(prompts))
        return response_logits(policy, prompts, *rest)

    monkeypatch.setattr(cory.agent, "response_logits", counted)
    agent.log_likelihoods(sentences(8), ["good"] * 8)
    assert rows == rows_of_passes


@pytest.mark.parametrize("index", [0, 1], ids=["trained", "frozen"])
def test_likelihoods_use_smaller_passes_if_memory_runs_out(config, monkeypatch, index):
    agents = make_agents(replace(config, agents=[{}, {"trained": False}]))
    expected = agents[index].log_likelihoods(sentences(8), ["good"] * 8)

    def limited(policy, prompts, *rest):
        if len(prompts) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return response_logits(policy, prompts, *rest)

    monkeypatch.setattr(cory.agent, "response_logits", limited)
    with pytest.warns(UserWarning, match="ppo.micro_batch"):
        likelihoods = agents[index].log_likelihoods(sentences(8), ["good"] * 8)
    torch.testing.assert_close(likelihoods, expected, rtol=1e-5, atol=1e-5)


def test_in_a_chat_the_text_is_the_whole_turn_without_a_space(config, monkeypatch):
    (agent, _) = make_agents(config)
    monkeypatch.setattr(agent.tokenizer, "chat_template", CHAT)
    messages = [[{"role": "user", "content": text}] for text in ("the film", "bad")]
    expected = [
        likelihood(agent, "<user>the film<bot>", "good"),
        likelihood(agent, "<user>bad<bot>", "a good story"),
    ]
    likelihoods = agent.log_likelihoods(messages, ["good", "a good story"])
    assert likelihoods.tolist() == pytest.approx(expected, rel=1e-5)


def test_the_row_of_a_text_that_is_too_long_is_named(config):
    (agent, _) = make_agents(config)
    with pytest.raises(UserError, match=r"^prompt in row 2: .* 96 tokens"):
        agent.log_likelihoods(["good", "good"], ["good", "good " * 100])


# Rewards


FLOOR = -53.0  # some answers have a log-likelihood this low under the tests' models


def plain_information(config, batch, rollouts, agent):
    """Returns, for each row of the second role, how much the first response raises the answer's log-likelihood.

    The comparison is with the first response to another query. Likelihoods come from plain passes of the model.
    """
    first, second = rollouts
    columns = batch.columns_of(1)
    information = []
    for row, prompt in enumerate(second.prompts):
        values = {name: column[row] for name, column in columns.items()}
        chain = row // config.branches
        assert prompt == PROMPTS.render(1, values, [first.completions[chain]])
        # The first role's response to the preceding query; the first query takes the last query's.
        other = first.completions[chain - config.chains_per_query]
        other_prompt = PROMPTS.render(1, values, [other])
        answer = f" {values['answer']}"
        after_own, after_other = (
            likelihood(agent, text, answer) for text in (prompt, other_prompt)
        )
        information.append(max(after_own, FLOOR) - max(after_other, FLOOR))
    return torch.tensor(information)


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
def test_the_first_role_earns_the_information_that_it_gives_about_the_answer(
    config, changes, monkeypatch
):
    """Information is measured with the second role's weights before the update and averaged over branches."""
    monkeypatch.setattr(cory.chain, "LEAST_LOG_LIKELIHOOD", FLOOR)
    chain = replace(changes.get("cory", INFORMATION), weight=0.5)
    trainer = make_questions(replace(config, **changes | {"cory": chain}))
    for agent in trainer.agents:
        if agent.is_trained:
            disturb(agent)
    batch = draw_batch(trainer.task, trainer.config, 0)
    learned = spy(trainer)
    information = []
    update = trainer.update

    def measure_and_update(k, chain, rollouts, rewards):
        with chain[1]._answering():
            information.append(plain_information(trainer.config, batch, rollouts, chain[1]))
        return update(k, chain, rollouts, rewards)

    trainer.update = measure_and_update
    iteration = trainer.iteration(0)
    r1, r2 = iteration.task_rewards
    mean = information[0].view(len(r1), -1).mean(1)
    assert len(information[0]) == 8 and mean.abs().max() > 0.01
    torch.testing.assert_close(iteration.rewards[0], r1 + 0.5 * mean, rtol=1e-4, atol=1e-4)
    assert torch.equal(iteration.rewards[1], r2)
    given = [rewards for _, agent_rewards in learned[0].values() for rewards in agent_rewards]
    for reward, expected in zip(given, iteration.rewards, strict=True):
        assert torch.equal(reward, expected)


def test_log_likelihoods_are_cut_off_at_a_lower_bound(config, monkeypatch):
    trainer = make_questions(replace(config, cory=INFORMATION))
    likelihoods = torch.tensor([-1.0, -100.0] * 4 + [-100.0, -1.0, -100.0, -100.0] * 2)
    monkeypatch.setattr(trainer.agents[1], "log_likelihoods", lambda prompts, texts: likelihoods)
    iteration = trainer.iteration(0)
    gained = iteration.rewards[0] - iteration.task_rewards[0]
    assert cory.chain.LEAST_LOG_LIKELIHOOD == -10.0
    torch.testing.assert_close(gained, torch.tensor([9.0, -9.0, 9.0, 0.0] * 2))


def test_a_single_agent_with_the_same_settings_earns_its_task_reward(config):
    """The single-agent baseline can therefore use the same configuration file."""
    trainer = make_questions(replace(config, cory=replace(INFORMATION, num_agents=1)))
    iteration = trainer.iteration(0)
    assert torch.equal(iteration.rewards[0], iteration.task_rewards[0])


# Refused data


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
    CoryTrainer(config, agents, task)  # other credit modes need no answers
    with pytest.raises(UserError, match=match):
        CoryTrainer(replace(config, cory=INFORMATION), agents, task)
