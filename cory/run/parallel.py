"""How a run's agents are spread over its processes. Importing it does not import torch."""

from dataclasses import dataclass
from typing import Literal

from cory.run.checks import Settings, UserError


@dataclass
class ParallelConfig(Settings):
    """How several processes, started by torchrun or accelerate launch, share the agents (docs/scaling.md).

    Args:
        shard: `full`: policies, references, gradients and optimizer states are split over the processes, layer by layer
            (PyTorch's FSDP2). `none`: each process holds them whole.
        gather: When the weights of a sharded policy are put together for sampling: once for a `rollout`, or each
            `layer` at each token, which needs less memory and much more time.
        offload: Keep the shards in the host's memory, not the GPU's.
        agents: `together`: all agents in each process, which answers its part of the queries. `apart`: each agent in
            one process, which answers all queries; agents are updated at the same time.
    """

    shard: Literal["none", "full"] = "none"
    gather: Literal["rollout", "layer"] = "rollout"
    offload: bool = False
    agents: Literal["together", "apart"] = "together"

    def __post_init__(self) -> None:
        if self.offload and self.shard == "none":
            raise UserError("parallel.offload: expected false with parallel.shard: none, got true")
        if self.agents == "apart" and self.shard != "none":
            raise UserError("parallel.agents: expected together with parallel.shard: full, got 'apart'")

    @property
    def split(self) -> bool:
        """Whether a process holds only part of the agents' state."""
        return self.shard != "none" or self.agents == "apart"
