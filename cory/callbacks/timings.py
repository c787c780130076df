"""How long each iteration takes: timings.jsonl."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cory.callbacks.callback import Callback
from cory.iteration import Iteration
from cory.parallel import distributed
from cory.run.clock import peak_memory_mb

if TYPE_CHECKING:
    from cory.trainer import CoryTrainer


class Timings(Callback):
    """Writes `iteration.timings`, the seconds by phase, to timings.jsonl.

    They are kept out of metrics.jsonl, so that repeating a run reproduces that file bit for bit.
    """

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        run = trainer.run
        iteration.seconds["total"] = time.perf_counter() - iteration.started
        run.seconds.append(iteration.seconds["total"])

        # The means are over all processes, which have equally many rows.
        tokens = distributed.world_size() * sum(
            stats.response_tokens * len(rollout.completions)
            for stats, rollout in zip(iteration.stats, iteration.rollouts, strict=True)
        )
        iteration.timings = {
            "iteration": iteration.index,
            **{
                f"seconds_{phase}": round(seconds, 6)
                for phase, seconds in iteration.seconds.items()
            },
            "tokens_per_second": round(tokens / iteration.seconds["total"], 3),
            "peak_memory_mb": round(peak_memory_mb(), 1),
        }
        run.write("timings", [iteration.timings])
