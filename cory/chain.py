"""A chain of agents that answer queries one after the other (Eq. 3), and the schedule of their roles (Eq. 5)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cory.agent import Agent
from cory.config import SamplingConfig
from cory.models.text import control_texts
from cory.roles import Prompt
from cory.rollout import Batch, Rollout
from cory.streams import Purpose, Stream
from cory.task import Task

LEAST_LOG_LIKELIHOOD = -10.0  # lower bound in `Chain.information`, in nats


@dataclass(frozen=True)
class RoleSchedule:
    """Assigns agents to roles, the positions in the chain: 0 is the pioneer, 1 the observer, and so on.

    An exchange only changes which agent has which role: no weights are copied, and no optimizer state is lost.

    Args:
        num_agents: number of agents.
        period: iterations between exchanges (T_REx); 0 for never.
        length: number of roles in the chain; 0 for one per agent. With more roles than agents, agents hold several.
    """

    num_agents: int
    period: int
    length: int = 0

    def order(self, k: int) -> tuple[int, ...]:
        """Returns the index of each role's agent at iteration `k` (from 0); `order(k)[0]` is the pioneer's.

        Roles rotate by one agent every `period` iterations; with two agents, this swaps pioneer and observer.
        """
        n, length = self.num_agents, self.length or self.num_agents
        turn = k // self.period if self.period else 0
        return tuple((role + turn) % n for role in range(length))  # Eq. 5


@dataclass(frozen=True)
class Chain:
    """Agents that answer one after the other; each later one reads earlier responses.

    Args:
        agents: the agent in each role, the pioneer first. An agent that holds several roles is listed several times.
        task: defines what each role reads.
        sampling: sampling settings; a role's own settings take precedence.
        transfer: whether later roles read earlier responses (`cory.knowledge_transfer`).
    """

    agents: Sequence[Agent]
    task: Task
    sampling: SamplingConfig
    transfer: bool = True

    def roll_out(self, batch: Batch, generators: Sequence[torch.Generator]) -> list[Rollout]:
        """Returns each role's responses to a batch of queries.

        Args:
            generators: random generators, one per role (`role_generators`).
        """
        rollouts: list[Rollout] = []
        for role in range(len(self.agents)):
            responses = None
            if role > 0 and self.transfer:
                responses = batch.earlier_responses(role, rollouts)
            # Eq. 3: a_1 ~ pi_1(. | s_0), a_2 ~ pi_2(. | s_0, a_1)
            rollouts.append(self.respond(role, batch, responses, generators[role]))
        return rollouts

    def respond(
        self,
        role: int,
        batch: Batch,
        responses: Sequence[Sequence[str]] | None,
        generator: torch.Generator,
    ) -> Rollout:
        """Returns the responses of one role.

        Args:
            responses: the earlier roles' responses, one list per role. None: the role reads only the query.
        """
        prompts = self.prompts(role, batch, responses)
        rollout = self.agents[role].respond(prompts, self.sampling_of(role, batch), generator)
        name = self.task.prompts.name(role)
        return replace(rollout, role=name)

    def prompts(
        self, role: int, batch: Batch, responses: Sequence[Sequence[str]] | None
    ) -> list[Prompt]:
        """Returns a role's prompts, one per response (Eq. 3)."""
        agent = self.agents[role]
        return self.task.prompts_of_role(
            role,
            batch.columns_of(role),
            responses,
            agent.encode,
            control_texts(agent.tokenizer),
            agent.context_length,
            self.sampling_of(role, batch).max_new_tokens,
        )

    def sampling_of(self, role: int, batch: Batch) -> SamplingConfig:
        """Returns the chain's sampling settings with the batch's length limit, changed by the role's own settings."""
        common = replace(self.sampling, max_new_tokens=batch.max_new_tokens)
        return self.task.prompts.settings(role).sampling(common)

    def roll_out_unread(self, batch: Batch, generators: Sequence[torch.Generator]) -> list[Rollout]:
        """Returns later roles' responses to prompts in which earlier responses are empty, for counterfactual credit.

        Args:
            generators: one per role; the first one is unused.
        """
        rollouts = []
        for role in range(1, len(self.agents)):
            empty = [""] * len(batch.columns_of(role)["prompt"])
            rollouts.append(self.respond(role, batch, [empty] * role, generators[role]))
        return rollouts

    def information(
        self, batch: Batch, rollouts: Sequence[Rollout], chains_per_query: int
    ) -> torch.Tensor:
        """Returns how much the first role's response raises the right answer's log-likelihood, in nats: (batch,).

        The second role's agent computes the log-likelihood of the dataset's column `answer` twice: after the second
        role's prompt, and after the same prompt with a response to another query. The result is the difference. Each
        log-likelihood is clamped to at least `LEAST_LOG_LIKELIHOOD`.

        Args:
            rollouts: the rollouts of a chain of two roles.
            chains_per_query: number of chains that answer the same query; they are adjacent in the batch.
        """
        first, second = rollouts
        # Shift the first role's responses by one query, so that each prompt holds a response to another query.
        shifted = [*first.completions[-chains_per_query:], *first.completions[:-chains_per_query]]
        responses = batch.earlier_responses(1, [replace(first, completions=shifted)])
        prompts = self.prompts(1, batch, responses)

        answers = batch.columns_of(1)["answer"]
        log_likelihoods = self.agents[1].log_likelihoods(
            [*second.prompts, *prompts], [*answers, *answers]
        )
        given_response, given_other = log_likelihoods.clamp(min=LEAST_LOG_LIKELIHOOD).chunk(2)
        return given_response - given_other


def role_generators(
    seed: int, purpose: Purpose, num_roles: int, k: int = 0, rank: int = 0
) -> list[torch.Generator]:
    """Returns one random generator per role for iteration `k` on process `rank`.

    If roles shared one seed, an observer would reuse the random draws that produced the response that it reads.
    """
    return [Stream(seed, purpose, k, role=role, process=rank).torch() for role in range(num_roles)]
