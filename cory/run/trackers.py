"""Logs to the configured `tracker` (wandb, TensorBoard or trackio) through accelerate."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from cory.config import Config
from cory.errors import UserError
from cory.iteration import Iteration
from cory.run.callback import Callback, Trainer
from cory.run.folder import Run, write_text
from cory.run.settings import flat
from cory.run.tables import query_label

COLUMNS = ("iteration", "agent", "role", "query", "completion", "task_reward")  # from samples.jsonl
WANDB_TIMEOUT = 20  # seconds to reach wandb's server


class Trackers(Callback):
    """Logs metrics, timings and samples of each iteration to the configured tracker, in the main process.

    A tracker that cannot start ends the run before its first iteration. A tracker that fails later is dropped, and the
    run goes on without it.
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
        run.exits.callback(self._attempt, run, self.tracker.finish)  # called however the run ends

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
        # An agent that holds several roles has a curve per role.
        several_roles = trainer.config.cory.num_roles > trainer.config.cory.num_agents
        self._attempt(trainer.run, lambda: self._log(iteration, several_roles))

    def _attempt(self, run: Run, action: Callable[[], None]) -> None:
        """Calls the tracker, if any, and drops it for the rest of the run if it fails."""
        if self.tracker is None:
            return
        try:
            action()
        except Exception as error:
            reason = " ".join(str(error).split())
            run.say(
                f"Warning: {self.tracker.name} has failed; the rest of this run is not logged to it ({reason})."
            )
            self.tracker = None

    def _log(self, iteration: Iteration, several_roles: bool) -> None:
        assert self.tracker is not None
        timings = {
            f"time/{key}": value for key, value in iteration.timings.items() if key != "iteration"
        }
        values = curves(iteration.records, several_roles) | timings
        self.tracker.log(values, step=iteration.index)
        # accelerate supports tables of texts only for wandb.
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
    """Starts the configured tracker. A resumed run continues its earlier record in the tracker."""
    options: dict[str, Any] = {"name": run.folder.name}
    if config.tracker == "tensorboard":
        # Drops logged steps of iterations that the resumed run repeats.
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
    """Returns options for `wandb.init`. The id of wandb's run is kept in the run's folder."""
    import wandb

    file = run.folder / "wandb_id"
    if not file.exists():
        write_text(file, secrets.token_hex(4))
    return {
        "name": run.folder.name[:128],  # wandb's longest name
        "dir": str(run.folder),
        "id": file.read_text(encoding="utf-8"),
        "resume": "allow" if run.resumed else None,
        "settings": wandb.Settings(init_timeout=WANDB_TIMEOUT),
    }


def curves(records: list[dict[str, Any]], several_roles: bool) -> dict[str, float]:
    """Returns an iteration's numbers by curve: `agent_1/kl`, or `agent_1/pioneer/kl` with several roles."""
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
