"""Which agent holds which role at which iteration (role exchange, Eq. 5)."""

from dataclasses import dataclass

from cory.errors import one_of

EXCHANGES = ("rotate", "none")


@dataclass(frozen=True)
class RoleSchedule:
    """Roles are positions in the chain: 0 is the pioneer, 1 the observer, and so on for longer chains.

    An exchange only changes which agent holds which role, so nothing is copied and no state is lost.

    Args:
        num_agents: number of agents. period: iterations between exchanges (T_REx); 0 for never.
        length: roles in the chain; 0 for as many as agents. With fewer, the others wait; with more, an agent holds
            several roles.
        exchange: `rotate` or `none`: see `CoryConfig`.
    """

    num_agents: int
    period: int
    length: int = 0
    exchange: str = "rotate"

    def __post_init__(self) -> None:
        one_of("cory.exchange", EXCHANGES, self.exchange)

    def order(self, k: int) -> tuple[int, ...]:
        """The agents by role at iteration `k` (from 0): `order(k)[0]` is the index of the pioneer.

        Every `period` iterations the chain turns by one place: with two agents the roles are swapped.
        """
        n, length = self.num_agents, self.length or self.num_agents
        turn = k // self.period if self.period and self.exchange != "none" else 0
        return tuple((role + turn) % n for role in range(length))  # Eq. 5
