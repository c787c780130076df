"""Callbacks: what watches a run. The loop in `cory/trainer.py` does not know what they do."""

from collections.abc import Sequence

from cory.callbacks.callback import Callback
from cory.callbacks.early_stopping import EarlyStopping
from cory.callbacks.guards import Flags, StopAtKL
from cory.callbacks.held_out import HeldOut
from cory.callbacks.metrics import Metrics
from cory.callbacks.progress import Progress
from cory.callbacks.report import Report
from cory.callbacks.results import Results
from cory.callbacks.samples import Samples
from cory.callbacks.timings import Timings
from cory.callbacks.trackers import Trackers

__all__ = ["Callback", "in_order"]


def in_order(users: Sequence[Callback]) -> list[Callback]:
    """All callbacks of a run, in the order in which each event reaches them; `users` were passed to the trainer."""
    return [
        HeldOut(),  # first, as its result is one of the metrics
        Metrics(),  # before everyone who reads `iteration.records`
        Samples(),  # at the end, before Results saves the texts after training
        Timings(),  # after all that counts as part of the iteration
        Trackers(),  # after metrics, samples and timings, which it passes on
        Flags(),
        Progress(),  # at the end it closes the progress bar, before Results prints tables
        StopAtKL(),
        EarlyStopping(),
        Results(),  # at the end: agents, curves, summary
        Report(),  # shows what Results has saved
        *users,  # after all that they may read
    ]
