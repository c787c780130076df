"""A chain of agents: who has which role (Eq. 5), what each role reads (Eq. 3), and how the chain answers queries."""

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

LEAST_LOG_LIKELIHOOD = -10.0  # nats, of an answer; a smaller one counts as this


@dataclass(frozen=True)
class RoleSchedule:
    """Roles are positions in the chain: 0 is the pioneer, 1 the observer, and so on for longer chains.

    An exchange only changes which agent holds which role, so nothing is copied and no state is lost.

    Args:
        num_agents: number of agents. period: iterations between exchanges (T_REx); 0 for never.
        length: roles in the chain; 0 for as many as agents. With more, an agent holds several roles.
    """

    num_agents: int
    period: int
    length: int = 0

    def order(self, k: int) -> tuple[int, ...]:
        """The agents by role at iteration `k` (from 0): `order(k)[0]` is the index of the pioneer.

        Every `period` iterations the chain turns by one place: with two agents the roles are swapped.
        """
        n, length = self.num_agents, self.length or self.num_agents
        turn = k // self.period if self.period else 0
        return tuple((role + turn) % n for role in range(length))  # Eq. 5


@dataclass(frozen=True)
class Chain:
    """Agents that answer one after the other, by role: the first one is the pioneer.

    Args:
        agents: by role. An agent may stand twice: one LLM in both roles.
        task: says what each role reads.
        sampling: of roles without limits of their own.
        transfer: whether later roles read the responses before them (`cory.knowledge_transfer`).
    """

    agents: Sequence[Agent]
    task: Task
    sampling: SamplingConfig
    transfer: bool = True

    def roll_out(self, batch: Batch, generators: Sequence[torch.Generator]) -> list[Rollout]:
        """Returns each role's responses to a batch of queries.

        Args:
            generators: one for each role, which draws the tokens of its responses (`role_generators`).
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
            responses: of each earlier role; None: the role answers the query alone.
        """
        prompts = self.prompts(role, batch, responses)
        rollout = self.agents[role].respond(prompts, self.sampling_of(role, batch), generator)
        name = self.task.prompts.name(role)
        return replace(rollout, role=name)

    def prompts(
        self, role: int, batch: Batch, responses: Sequence[Sequence[str]] | None
    ) -> list[Prompt]:
        """Returns what a role reads, a prompt for each of its responses (Eq. 3)."""
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
        """Returns how a role's responses are sampled: with its own limits, or the batch's."""
        common = replace(self.sampling, max_new_tokens=batch.max_new_tokens)
        return self.task.prompts.settings(role).sampling(common)

    def roll_out_unread(self, batch: Batch, generators: Sequence[torch.Generator]) -> list[Rollout]:
        """Returns the responses of each role after the first where it reads empty responses, for counterfactual credit.

        Args:
            generators: one for each role; the first one's draws nothing.
        """
        rollouts = []
        for role in range(1, len(self.agents)):
            empty = [""] * len(batch.columns_of(role)["prompt"])
            rollouts.append(self.respond(role, batch, [empty] * role, generators[role]))
        return rollouts

    def information(
        self, batch: Batch, rollouts: Sequence[Rollout], chains_per_query: int
    ) -> torch.Tensor:
        """Returns by how many nats the right answer is likelier after what the second role reads, (batch,).

        Likelier than after the same prompt with the response to another query. Answers are in the dataset's column
        `answer`; the second role's agent gives their likelihoods, at least `LEAST_LOG_LIKELIHOOD`.

        Args:
            rollouts: of a chain of two roles.
            chains_per_query: chains that answer the same query, side by side.
        """
        first, second = rollouts
        # The same prompts with the first response of a chain that answers another query.
        moved = [*first.completions[-chains_per_query:], *first.completions[:-chains_per_query]]
        responses = batch.earlier_responses(1, [replace(first, completions=moved)])
        prompts = self.prompts(1, batch, responses)

        answers = batch.columns_of(1)["answer"]
        likelihoods = self.agents[1].log_likelihoods(
            [*second.prompts, *prompts], [*answers, *answers]
        )
        after_own, after_other = likelihoods.clamp(min=LEAST_LOG_LIKELIHOOD).chunk(2)
        return after_own - after_other


def role_generators(
    seed: int, purpose: Purpose, num_roles: int, k: int = 0, rank: int = 0
) -> list[torch.Generator]:
    """Returns a generator for each role's responses in iteration `k`, in the process `rank`.

    Roles have generators of their own; otherwise an observer would reuse the draws that produced its input.
    """
    return [Stream(seed, purpose, k, role=role, process=rank).torch() for role in range(num_roles)]
