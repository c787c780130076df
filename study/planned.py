"""One run of an experiment, and whether its folder has it already."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cory.errors import UserError
from cory.evaluation.rows import agent_folders
from cory.identity import model_identity
from cory.run.settings import differences
from study.groups import Group, group_name, value_of
from study.records import read
from study.scripts import ROOT

FIRST_RUN = "first_run.json"  # of a folder of results: see `study/check_results.py`


@dataclass(frozen=True)
class Planned:
    """One run.

    Args:
        label: its name in the experiment's file.
        folder: where it is made.
        settings: all of them.
        command: that makes it, in the folder `cwd`; None: the current one.
        minutes: what the file says that it takes.
        over: the experiment's key.
        source: an experiment that has the same run, whose row is taken; None: there is none.
        fingerprint: hashes of what the reward and data files of an own task hold now; empty for a script's task.
    """

    label: str
    folder: Path
    settings: dict[str, Any]
    command: list[str]
    minutes: float
    cwd: Path | None = ROOT
    over: str | None = None
    source: str | None = None
    fingerprint: Callable[[], dict[str, Any]] = dict

    @property
    def of(self) -> Group:
        """Its group in tables."""
        value = value_of(self.settings, self.over)
        return Group(group_name(self.label, self.over, value), self.label, value)

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.settings["seed"]

    def state(self) -> str:
        """`missing`, `begun` or `finished`.

        Raises:
            UserError: the folder holds a run of other settings, a finished one of other rewards, data or models, or one
                of fewer iterations that is finished and has no checkpoints. One that has begun compares its rewards,
                data and models itself when it is resumed.
        """
        if not (self.folder / "config.yaml").exists():
            return "missing"
        if not (self.folder / "metrics.jsonl").exists():
            return "begun"
        run = read(self.folder)
        changes = differences(run.settings, self.settings)
        planned = run.settings["iterations"]
        wanted = self.settings["iterations"]
        can_go_on = run.problems or any((self.folder / "checkpoints").glob("iter-*"))
        if planned > wanted or (planned < wanted and not can_go_on):
            changes["iterations"] = (planned, wanted)
        changed = _listed(changes)
        ended = run.stopped or run.iterations >= wanted
        finished = ended and not run.problems
        if finished and not changed:
            changed = list(self._changed_files(run.settings))
        if changed:
            raise UserError(
                f"{self.folder}: expected a run of this experiment, got one of other settings ({'; '.join(changed)}). "
                "Name another folder with --runs, or remove that one"
            )
        return "finished" if finished else "begun"

    def check_agents(self) -> None:
        """Raises a UserError if the run, which is finished, has no agents that could be evaluated."""
        if not agent_folders(self.folder):
            raise UserError(
                f"{self.folder}: expected a run with its agents, to evaluate them, got one that has none, as after "
                "--discard-agents. Name another folder with --runs, or remove that one, to train it again"
            )

    def _changed_files(self, recorded: dict[str, Any]) -> Iterator[str]:
        """What has changed since a run of these settings recorded it: rewards, data, and the folders of its models."""
        now = self.settings | {"fingerprint": self.fingerprint()}
        yield from _listed(differences(recorded, now))
        models = (recorded.get("fingerprint") or {}).get("models") or {}
        for key, model in models.items():
            folder = (self.cwd or Path()) / model["name"]
            # A name such as `tiny` is that of a built-in model, whatever folder has it, too.
            if "/" not in model["name"] or not folder.is_dir():
                continue
            if model["identity"] not in (None, model_identity(str(folder))):
                yield f"the model {model['name']} of {key} has changed"


def _listed(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Differences of two runs, for a message."""
    return [f"{key}: {old!r} -> {new!r}" for key, (old, new) in changes.items()]
