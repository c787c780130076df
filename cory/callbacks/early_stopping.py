"""Early stopping on the held-out reward, and the best agents: `guards.patience`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cory.callbacks.callback import Callback
from cory.callbacks.results import save_agents
from cory.config import HELD_OUT_REWARDS
from cory.iteration import Iteration
from cory.plural import counted
from cory.run.folder import BEST

if TYPE_CHECKING:
    from cory.run.folder import Run
    from cory.trainer import CoryTrainer


class EarlyStopping(Callback):
    """Ends a run after `guards.patience` held-out evaluations without a better reward: the task reward, mean over the
    roles, plus the team reward, if there is one.

    Whenever that reward is the best so far, the agents are saved in RUN/best.

    Attributes:
        best: the evaluation with the largest reward so far: `iterations`, and its rewards by name; empty before the
            first one.
        waited: evaluations since then.
    """

    def __init__(self) -> None:
        self.best: dict[str, float] = {}
        self.waited = 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]
        self.waited = state["waited"]

    def on_iteration_end(self, trainer: CoryTrainer, iteration: Iteration) -> None:
        patience = trainer.config.guards.patience
        if patience is None or not iteration.eval_task_rewards:
            return
        run = trainer.run
        rewards = held_out_rewards(iteration.records)
        largest = _sum_of_rewards(self.best) if self.best else -math.inf
        if _sum_of_rewards(rewards) > largest:
            self.best = {"iterations": iteration.index + 1, **rewards}
            self.waited = 0
            save_agents(run, trainer.agents, BEST)
            return
        self.waited += 1
        if self.waited >= patience:
            waited = counted(patience, "evaluation")
            run.say(
                f"The held-out reward has not risen above {largest:.3f} in {waited} (guards.patience). "
                f"The best agents are in {run.folder / BEST}."
            )
            trainer.state.stopped_by = "guards.patience"
            trainer.should_stop = True

    def on_train_end(self, trainer: CoryTrainer, run: Run) -> None:
        if self.best:
            run.summary["best"] = self.best


def held_out_rewards(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The held-out rewards of an iteration by name: means over the roles."""
    return {
        name: statistics.fmean(record[name] for record in records)
        for name in HELD_OUT_REWARDS
        if name in records[0]
    }


def _sum_of_rewards(rewards: Mapping[str, float]) -> float:
    return sum(rewards[name] for name in HELD_OUT_REWARDS if name in rewards)
