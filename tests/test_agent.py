"""An agent's answers."""

import pytest
import torch
from conftest import sentences

from cory.agent import make_agents


@pytest.fixture
def agent(config):
    return make_agents(config)[0]


def test_it_samples_without_dropout(agent):
    drawn = []
    for _ in range(2):
        agent.policy.train()
        rollout = agent.respond(sentences(4), 6, torch.Generator().manual_seed(0))
        drawn.append(rollout.response_ids)
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))


def test_responses_stop_at_their_first_end_token(agent):
    ends = [0, 7]
    bias = torch.zeros(len(agent.tokenizer))
    bias[ends] = 3.0
    agent.policy.lm_head.register_forward_hook(lambda module, args, output: output + bias)
    agent.policy.generation_config.eos_token_id = ends
    rollout = agent.respond(sentences(16), 12, torch.Generator().manual_seed(0))
    lengths = [len(row) for row in rollout.response_ids]
    assert min(lengths) < 12 <= max(lengths)
    for row in rollout.response_ids:
        assert len(row) >= 1
        assert not set(row[:-1].tolist()) & set(ends)
        assert len(row) == 12 or row[-1].item() in ends
