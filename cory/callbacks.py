"""Callbacks: code of your own at fixed places of a run, as in transformers' Trainer."""

from collections.abc import Mapping, Sequence
from typing import Any


class Callback:
    """Override what you need, and give it to `CoryTrainer(..., callbacks=[...])`. Called in every process.

    `trainer`: the CoryTrainer, with its `config`, `agents`, `task` and `schedule`. `run`: the Run, with its `folder`.
    """

    def on_train_begin(self, trainer: Any, run: Any) -> None:
        """Before the first iteration, of a resumed run, too."""

    def on_iteration_begin(self, trainer: Any, k: int) -> None:
        """Before iteration `k`, from 0. `trainer.schedule.order(k)` says which agent has which role."""

    def on_iteration_end(self, trainer: Any, k: int, records: Sequence[Mapping[str, Any]]) -> bool | None:
        """After iteration `k`, with its records (docs/metrics.md). True ends the run here, its agents saved."""

    def on_train_end(self, trainer: Any, run: Any) -> None:
        """After the last iteration, when the agents are saved."""
