"""What a run prints while it trains: a progress bar in a terminal, else a few lines."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from cory.callbacks.callback import Callback
from cory.iteration import Iteration

if TYPE_CHECKING:
    from cory.run.folder import Run
    from cory.trainer import CoryTrainer

# Leaves a line of 80 for two agents.
LAYOUT = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
LINES = 10  # about so many are printed where there is no terminal, besides the first


class Progress(Callback):
    """Shows each agent's role, task reward and KL."""

    bar: tqdm

    def on_train_begin(self, trainer: CoryTrainer, run: Run) -> None:
        hidden = not (run.writes and sys.stderr.isatty())
        self.bar = tqdm(
            total=trainer.config.iterations,
            initial=len(run.seconds),
            bar_format=LAYOUT,
            disable=hidden,
            dynamic_ncols=True,
        )
        run.exits.callback(self.bar.close)

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        if not trainer.run.writes:
            return
        text = one_line(iteration.records)
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update()

        done, total = iteration.index + 1, trainer.config.iterations
        is_due = done in (1, total) or done % max(1, total // LINES) == 0
        if self.bar.disable and is_due:
            print(
                f"iteration {done}/{total} | {text} | {iteration.seconds['total']:.2f} s/it",
                flush=True,
            )

    def on_train_end(self, trainer: CoryTrainer, run: Run) -> None:
        self.bar.close()


def one_line(records: Sequence[Mapping[str, Any]]) -> str:
    """One line on an iteration: each agent's name, role, task reward and KL; for more than two roles, their means."""
    if len(records) > 2:
        task_reward = statistics.fmean(record["task_reward"] for record in records)
        kl = statistics.fmean(record["kl"] for record in records)
        return f"{len(records)} roles: reward {task_reward:+.2f} KL {kl:.2f}"
    return " | ".join(
        f"{record['agent']} {record['role'][:3]} {record['task_reward']:+.2f} KL {record['kl']:.2f}"
        for record in records
    )
