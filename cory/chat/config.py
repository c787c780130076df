"""Settings of a chat. Importing them does not import torch."""

from dataclasses import dataclass, field
from typing import Any

from cory.config import Settings, expect


@dataclass
class ChatConfig(Settings):
    """How a run's agents answer typed queries.

    Args:
        run: Folder of a run, or of one of its checkpoints.
        order: Agents by role, pioneer first, such as "[2, 1]"; an agent may hold several roles. null: as the run began.
        seed: Of the sampling: the same query gets the same responses.
        sampling: Changes to the run's `sampling` block: --sampling.temperature, --sampling.max_new_tokens, ...
        model: Changes to the `model` block of every agent: --model.quantization, --model.dtype, ...
        task: Changes to the run's `task` block: --task.reward_model, ...
        device: auto, cpu, cuda, cuda:N or mps.
        port: Port of the web page. null: the first free one from 7860.
    """

    run: str = ""
    order: list[int] | None = None
    seed: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    device: str = "auto"
    port: int | None = None

    def __post_init__(self) -> None:
        expect(self.seed >= 0, "seed", "0 or more", self.seed)
        expect(self.order is None or bool(self.order), "order", "null or the numbers of agents", self.order)
        expect(self.port is None or 0 < self.port < 65536, "port", "null or a number from 1 to 65535", self.port)
