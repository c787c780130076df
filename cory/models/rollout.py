"""A batch of responses of one agent: what it reads, and what it answers."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor


@dataclass
class Rollout:
    """A batch of responses of one agent: lists of equal length, one entry per row.

    Args:
        prompts: what the agent read, text or chat messages.
        completions: the text of its responses.
        prompt_ids, response_ids: token ids as 1-d tensors, always on the CPU; `window.pack`
            moves a batch to the learner's device.
        logprobs: 1-d tensors, of the response tokens, by the engine that sampled them; empty
            without an engine.
        agent: name of the agent.
        role: name of its role in the chain.
        finished: of each row, whether its response ended by itself, and was not cut at its limit.
            Only DAPO's learner needs it.
    """

    prompts: list[Any]
    completions: list[str]
    prompt_ids: list[Tensor]
    response_ids: list[Tensor]
    logprobs: list[Tensor] = field(default_factory=list)
    agent: str = ""
    role: str = ""
    finished: list[bool] = field(default_factory=list)

    def rows(self, index: slice) -> "Rollout":
        """Some of its rows."""
        return replace(
            self,
            prompts=self.prompts[index],
            completions=self.completions[index],
            prompt_ids=self.prompt_ids[index],
            response_ids=self.response_ids[index],
            logprobs=self.logprobs[index],
            finished=self.finished[index],
        )
