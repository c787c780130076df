"""Which agent holds which role at which iteration (role exchange, Eq. 5)."""

from dataclasses import dataclass
from math import gcd

from cory.errors import one_of
from cory.streams import Purpose, Stream

EXCHANGES = ("rotate", "shuffle", "none")


@dataclass(frozen=True)
class RoleSchedule:
    """Roles are positions in the chain: 0 is the pioneer, 1 the observer, and so on for longer chains.

    An exchange only changes which agent holds which role, so nothing is copied and no state is lost.

    Args:
        num_agents: number of agents. period: iterations between exchanges (T_REx); 0 for never.
        length: roles in the chain; 0 for as many as agents. With fewer, the others wait; with more, an agent holds
            several roles.
        exchange: `rotate`, `shuffle` or `none`: see `CoryConfig`. seed: of `shuffle`.
    """

    num_agents: int
    period: int
    length: int = 0
    exchange: str = "rotate"
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("cory.exchange", EXCHANGES, self.exchange)

    def order(self, k: int) -> tuple[int, ...]:
        """The agents by role at iteration `k` (from 0): `order(k)[0]` is the index of the pioneer.

        Every `period` iterations the chain turns by one place: with two agents the roles are swapped. With `shuffle`,
        agents are dealt like cards, and all have been in the chain equally often when they are shuffled again.
        """
        n, length = self.num_agents, self.length or self.num_agents
        turn = k // self.period if self.period and self.exchange != "none" else 0
        if self.exchange != "shuffle":
            return tuple((role + turn) % n for role in range(length))  # Eq. 5
        round_, deal = divmod(turn, n // gcd(n, length))
        cards = Stream(self.seed, Purpose.ROLES, iteration=round_).numpy().permutation(n).tolist()
        return tuple(cards[(deal * length + role) % n] for role in range(length))
