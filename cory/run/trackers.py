"""wandb, TensorBoard or trackio beside the run's own files, through accelerate's trackers: `tracker`."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cory.config import Config
from cory.errors import UserError
from cory.iteration import Iteration
from cory.run.callback import Callback, Trainer
from cory.run.folder import Run, write_text
from cory.run.settings import flat
from cory.run.tables import query_label

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

COLUMNS = ("iteration", "agent", "role", "query", "completion", "task_reward")  # of samples.jsonl
WANDB_TIMEOUT = 20  # seconds to reach its server


class Trackers(Callback):
    """Passes metrics, timings and samples of each iteration on to the tracker of the settings, in the main process.

    A tracker that cannot start ends the run before its first iteration. One that fails later is left, and the run
    goes on.
    """

    def __init__(self) -> None:
        self.tracker: GeneralTracker | None = None

    def on_train_begin(self, trainer: Trainer, run: Run) -> None:
        config = trainer.config
        if config.tracker == "none" or not run.writes:
            return
        try:
            self.tracker = start_tracker(config, run)
        except Exception as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise UserError(
                f"tracker: expected {config.tracker} to start, got: {reason}. To train without it: --tracker none"
            ) from None
        run.exits.callback(self._attempt, run, self.tracker.finish)  # however the run ends

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
        # An agent that holds several roles has a curve for each of them.
        several_roles = trainer.config.cory.num_roles > trainer.config.cory.num_agents
        self._attempt(trainer.run, lambda: self._log(iteration, several_roles))

    def _attempt(self, run: Run, action: Callable[[], None]) -> None:
        """Does something with the tracker, if there is one. If that fails, it is left for the rest of the run."""
        if self.tracker is None:
            return
        try:
            action()
        except Exception as error:
            reason = " ".join(str(error).split())
            run.say(
                f"Warning: {self.tracker.name} has failed and gets nothing more of this run ({reason})."
            )
            self.tracker = None

    def _log(self, iteration: Iteration, several_roles: bool) -> None:
        assert self.tracker is not None
        timings = {
            f"time/{key}": value for key, value in iteration.timings.items() if key != "iteration"
        }
        values = curves(iteration.records, several_roles) | timings
        self.tracker.log(values, step=iteration.index)
        # accelerate has tables of texts for wandb alone.
        if iteration.samples and self.tracker.name == "wandb":
            samples = [
                {**sample, "query": query_label(sample["query"], sample["columns"])}
                for sample in iteration.samples
            ]
            rows = [[sample[column] for column in COLUMNS] for sample in samples]
            self.tracker.log_table(
                "completions", columns=list(COLUMNS), data=rows, step=iteration.index
            )


def start_tracker(config: Config, run: Run) -> GeneralTracker:
    """Starts the tracker of the settings, which continues its own run if this one is resumed."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    options: dict[str, Any] = {"name": run.folder.name}
    if config.tracker == "tensorboard":
        # Iterations that are repeated are shown once.
        purge_step = len(run.seconds) if run.resumed else None
        options = {"logging_dir": str(run.folder), "purge_step": purge_step}
    elif config.tracker == "wandb":
        options |= wandb_options(run)
    else:
        options |= {"resume": "allow" if run.resumed else "never", "embed": False}
    tracker = LOGGER_TYPE_TO_CLASS[config.tracker]("cory", **options)
    tracker.start()
    tracker.store_init_configuration(
        {
            key: value if isinstance(value, (int, float, str)) else str(value)
            for key, value in flat(asdict(config)).items()
        }
    )
    return tracker


def wandb_options(run: Run) -> dict[str, Any]:
    """Options of `wandb.init`. The id of wandb's run is kept in the run's folder."""
    import wandb

    file = run.folder / "wandb_id"
    if not file.exists():
        write_text(file, secrets.token_hex(4))
    return {
        "name": run.folder.name[:128],  # wandb takes no longer ones
        "dir": str(run.folder),
        "id": file.read_text(encoding="utf-8"),
        "resume": "allow" if run.resumed else None,
        "settings": wandb.Settings(init_timeout=WANDB_TIMEOUT),
    }


def curves(records: list[dict[str, Any]], several_roles: bool) -> dict[str, float]:
    """The numbers of an iteration by the names of their curves: `agent_1/kl`, or `agent_1/pioneer/kl`."""
    values: dict[str, float] = {}
    for record in records:
        agent, role = record["agent"], record["role"]
        prefix = f"{agent}/{role}" if several_roles else agent
        values |= {
            f"{prefix}/{key}": value
            for key, value in record.items()
            if isinstance(value, int | float) and key != "iteration"
        }
        values[f"{agent}/is_{role}"] = 1
    return values
