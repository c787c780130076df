"""Records the agents' training data and reads their trained weights."""

import torch


def spy(trainer):
    """Returns a list to which each iteration adds what `agent.learn` is given: {agent: (rollouts, rewards)}."""
    seen = []
    for agent in trainer.agents:

        def learn(rollouts, rewards, *args, learn=agent.learn, name=agent.name):
            seen[-1][name] = rollouts, rewards
            return learn(rollouts, rewards, *args)

        agent.learn = learn
    run = trainer.iteration

    def iteration(k):
        seen.append({})
        return run(k)

    trainer.iteration = iteration
    return seen


def state(agent):
    """Returns a trained agent's weights as one vector."""
    return torch.cat([p.detach().flatten() for p in agent.learner.model.parameters()])
