"""Settings of a chat. Importing them does not import torch."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeInt
from pydantic.dataclasses import dataclass

from cory.config import Settings


def _not_empty(order: list[int] | None) -> list[int] | None:
    if order == []:
        raise ValueError("null or the numbers of agents")
    return order


@dataclass
class ChatConfig(Settings):
    """How a run's agents answer typed queries.

    Args:
        run: Folder of a run, or of one of its checkpoints.
        order: Agents by role, pioneer first, such as "[2, 1]"; an agent may hold several roles.
            null: as the run began.
        seed: Of the sampling: the same query gets the same responses.
        sampling: Changes to the run's `sampling` block: --sampling.temperature,
            --sampling.max_new_tokens, ...
        model: Changes to the `model` block of every agent: --model.quantization, --model.dtype, ...
        task: Changes to the run's `task` block: --task.reward_model, ...
        device: auto, cpu, cuda or cuda:N.
        port: Port of the web page. null: the first free one from 7860.
    """

    run: str = ""
    order: Annotated[list[int] | None, AfterValidator(_not_empty)] = None
    seed: NonNegativeInt = 0
    sampling: dict[str, Any] = Field(default_factory=dict)
    model: dict[str, Any] = Field(default_factory=dict)
    task: dict[str, Any] = Field(default_factory=dict)
    device: str = "auto"
    port: Annotated[int | None, Field(gt=0, lt=65536)] = None
