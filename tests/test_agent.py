"""An agent's answers."""

import torch
from conftest import sentences

from cory.agent import make_agents


def test_it_samples_without_dropout_up_to_the_first_end_token(config):
    (agent, _), ends = make_agents(config), [0, 7]
    bias = torch.zeros(len(agent.tokenizer))
    bias[ends] = 3.0
    agent.policy.lm_head.register_forward_hook(lambda module, args, output: output + bias)
    agent.policy.generation_config.eos_token_id = ends
    drawn = []
    for _ in range(2):
        agent.policy.train()
        rollout = agent.respond(sentences(16), 12, torch.Generator().manual_seed(0))
        drawn.append([row.tolist() for row in rollout.response_ids])
    assert drawn[0] == drawn[1]
    lengths = list(map(len, drawn[0]))
    assert 1 <= min(lengths) < 12 <= max(lengths)
    for row in drawn[0]:
        assert not set(row[:-1]) & set(ends)
        assert len(row) == 12 or row[-1] in ends
