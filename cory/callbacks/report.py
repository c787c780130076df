"""The run as one HTML file: report.html."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cory.callbacks.callback import Callback
from cory.report.page import write_run_report

if TYPE_CHECKING:
    from cory.run.folder import Run
    from cory.trainer import CoryTrainer


class Report(Callback):
    """Writes report.html from what the run's folder holds; a failure is a warning."""

    def on_train_end(self, trainer: CoryTrainer, run: Run) -> None:
        if run.writes:
            write_run_report(run.folder, trainer.config.method())
