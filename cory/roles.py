"""Which agent holds which role at which iteration (role exchange, Eq. 5)."""

from dataclasses import dataclass


def role_name(role: int) -> str:
    """`pioneer`, `observer`, then `observer_2`, ... in chains of more than two agents."""
    return ("pioneer", "observer")[role] if role < 2 else f"observer_{role}"


@dataclass(frozen=True)
class RoleSchedule:
    """Roles are positions in the chain: 0 is the pioneer, 1 the observer, and so on for more agents.

    Agents stay and roles move: an exchange is a new permutation, so nothing is copied and no state is lost.
    `period`: iterations between exchanges (T_REx); 0 for never.
    """

    num_agents: int
    period: int

    def order(self, k: int) -> tuple[int, ...]:
        """The agents by role at iteration `k` (from 0): `order(k)[0]` is the index of the pioneer.

        Every `period` iterations the chain turns by one place: with two agents the roles are swapped.
        """
        turn = k // self.period if self.period else 0
        return tuple((role + turn) % self.num_agents for role in range(self.num_agents))

    def exchanges_before(self, k: int) -> bool:
        """Whether the roles at iteration `k` differ from those at `k - 1`."""
        return k > 0 and self.order(k) != self.order(k - 1)
