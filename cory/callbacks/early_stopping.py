"""Early stopping on the held-out reward, and the best agents: `guards.patience`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cory.callbacks.callback import Callback
from cory.config import HELD_OUT_REWARDS
from cory.iteration import Iteration
from cory.parallel import distributed
from cory.plural import counted
from cory.run.record import BEST

if TYPE_CHECKING:
    from cory.run.folder import Run
    from cory.trainer import CoryTrainer


class EarlyStopping(Callback):
    """Ends a run after `guards.patience` held-out evaluations without a better reward: the task reward, mean over the
    roles, plus the team reward, if there is one.

    Whenever that reward is the best so far, the agents are saved in RUN/best. What was reached before an interruption
    is read from the run's history.

    Attributes:
        best: the largest reward so far; None before the first evaluation.
        waited: evaluations since then.
    """

    collective = True  # of sharded agents each process has a part

    def __init__(self) -> None:
        self.best: float | None = None
        self.waited = 0

    def on_train_begin(self, trainer: CoryTrainer, run: Run) -> None:
        self.best = None
        self.waited = 0
        if trainer.config.guards.patience is not None:
            for index, rewards in held_out_rewards(run.history).items():
                self._is_best(rewards, index, run)

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        patience = trainer.config.guards.patience
        if patience is None or not iteration.eval_task_rewards:
            return
        run = trainer.run
        if self._is_best(
            held_out_rewards(iteration.records)[iteration.index], iteration.index, run
        ):
            save_best(trainer)
        elif self.waited >= patience:
            waited = counted(patience, "evaluation")
            run.say(
                f"The held-out reward has not risen above {self.best:.3f} in {waited} (guards.patience). "
                f"The best agents are in {run.folder / BEST}."
            )
            trainer.state.stopped_by = "guards.patience"
            trainer.should_stop = True

    def _is_best(self, rewards: Mapping[str, float], index: int, run: Run) -> bool:
        """Whether the evaluation of an iteration is the best so far, which summary.json then names."""
        reward = sum(rewards.values())
        if self.best is not None and reward <= self.best:
            self.waited += 1
            return False
        self.best = reward
        self.waited = 0
        run.summary["best"] = {"iterations": index + 1, **rewards}
        return True


def held_out_rewards(records: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """By iteration, of those that have any, the held-out rewards by name: means over the roles."""
    by_iteration: dict[int, dict[str, list[float]]] = {}
    for record in records:
        for name in HELD_OUT_REWARDS:
            if name in record:
                rewards = by_iteration.setdefault(record["iteration"], {})
                rewards.setdefault(name, []).append(record[name])
    return {
        index: {name: statistics.fmean(values) for name, values in rewards.items()}
        for index, rewards in by_iteration.items()
    }


def save_best(trainer: CoryTrainer) -> None:
    """Saves the agents in RUN/best, in the place of those before, all of them or none. All processes must call this."""
    with trainer.run.staged() as folder:
        for agent in trainer.agents:
            distributed.fail_together(partial(agent.save, folder / BEST / agent.name))
