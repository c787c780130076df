"""An engine's log-probabilities are compared at the temperature that it sampled with."""

from dataclasses import replace

import torch
from test_engine import learner, server, settings, train  # noqa: F401


def test_rollouts_of_an_engine_are_learned_from_at_their_temperature(settings, server):  # noqa: F811
    complete = server.complete

    def processed(model, prompt, body):
        """As with `--logprobs-mode processed_logprobs`."""
        answer = complete(model, prompt, body)
        ids = answer["token_ids"]
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / body["temperature"]).log_softmax(-1)
        tokens = logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0]
        return answer | {"logprobs": {"token_logprobs": tokens.tolist()}}

    server.complete = processed
    job = learner(settings, "grpo", 0)
    records = train(replace(job, sampling=replace(job.sampling, temperature=0.5)))
    assert max(record["engine_difference"] for record in records) < 1e-5
