"""Callbacks: your own code at fixed points of a run, as in transformers' Trainer."""

from collections.abc import Mapping, Sequence
from typing import Any


class Callback:
    """Override what you need and pass it to `CoryTrainer(..., callbacks=[...])`. Called in every process.

    `trainer`: the CoryTrainer, with its `config`, `agents`, `task` and `schedule`. `run`: the Run, with its `folder`.
    """

    def on_train_begin(self, trainer: Any, run: Any) -> None:
        """Before the first iteration, also of a resumed run."""

    def on_iteration_begin(self, trainer: Any, k: int) -> None:
        """Before iteration `k`, from 0. `trainer.schedule.order(k)` says which agent has which role."""

    def on_iteration_end(self, trainer: Any, k: int, records: Sequence[Mapping[str, Any]]) -> bool | None:
        """After iteration `k`, with its records (docs/metrics.md). Returning True saves the agents and ends the run."""

    def on_train_end(self, trainer: Any, run: Any) -> None:
        """After the last iteration, when the agents are saved."""
