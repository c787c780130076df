"""One run of an experiment: what decides on its numbers, and whether its folder has it already."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cory.errors import UserError
from cory.evaluation.agents import agent_folders
from cory.provenance.models import model_identity
from cory.resume.differences import FREE, ROUNDING, differences, in_words
from study.groups import Group, group_name, value_of
from study.records import flat, read
from study.scripts import ROOT

FIRST_RUN = "first_run.json"  # of a folder of results: see `study/check_results.py`

# Keys that came after results had been measured, and the value at which they change nothing. There they
# are no part of a run's hash, so that the rows of earlier versions still count.
LATER_KEYS: dict[str, Any] = {}
# Keys that do not change what is trained, but what is measured of it.
MEASURES = {"task.metrics", "task.extract"}


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
        resolve: the folder of a built-in model, or the name itself.
        fingerprint: hashes of what the reward and data files of an own task hold now; empty for a script's task.
    """

    label: str
    folder: Path
    settings: dict[str, Any]
    command: list[str]
    minutes: float
    cwd: Path | None = ROOT
    over: str | None = None
    resolve: Callable[[str], str] = str
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

    def key(self) -> str:
        """A hash of what decides on its numbers: the settings, and the content of local models, data and rewards.

        It is the same on every machine. The code's version is no part of it, nor is a key of `LATER_KEYS`, or one of
        `MEASURES` that is not set.
        """
        free = FREE - {"iterations"} - ROUNDING - MEASURES
        decisive = {}
        for key, value in flat(self.settings).items():
            if key in free or key.split(".")[0] in free:
                continue
            if key in LATER_KEYS and value == LATER_KEYS[key]:
                continue
            if key in MEASURES and not value:
                continue
            decisive[key] = self._content(value)
        return hashlib.sha256(
            json.dumps(decisive, sort_keys=True, default=str).encode()
        ).hexdigest()[:12]

    def _content(self, value: Any) -> Any:
        """A hash in place of the name of a local file, such as FILE.py:NAME, or of a local folder."""
        if isinstance(value, list):
            return [self._content(one) for one in value]
        if isinstance(value, dict):
            return {key: self._content(one) for key, one in value.items()}
        if not isinstance(value, str) or not value or "\n" in value:
            return value
        try:
            name, colon, function = self.resolve(value).partition(":")
        except UserError:  # a built-in model that is not made yet
            return value
        path = (self.cwd or Path()) / name
        # A name such as `train` may happen to be that of a folder, too, and so may a stop text such as `.`.
        if ("/" not in name and "." not in name) or path.name in ("", "..") or name == ".":
            return value
        identity = _identity(path)
        return value if identity is None else identity + colon + function

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
        changed = dict.fromkeys(map(str, differences(run.settings, self.settings)))
        planned = run.settings["iterations"]
        wanted = self.settings["iterations"]
        can_go_on = run.problems or any((self.folder / "checkpoints").glob("iter-*"))
        if planned > wanted or (planned < wanted and not can_go_on):
            changed[f"iterations: {planned} -> {wanted}"] = None
        ended = run.stopped or run.iterations >= wanted
        finished = ended and not run.problems
        if finished and not changed:
            changed = dict.fromkeys(self._changed_files(run.settings))
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
        yield from in_words(list(differences(recorded, now)), recorded, now)
        models = (recorded.get("fingerprint") or {}).get("models") or {}
        for key, model in models.items():
            folder = (self.cwd or Path()) / model["name"]
            # A name such as `tiny` is that of a built-in model, whatever folder has it, too.
            if "/" not in model["name"] or not folder.is_dir():
                continue
            if model["identity"] not in (None, model_identity(str(folder))):
                yield f"the model {model['name']} of {key} has changed"


@cache
def _identity(path: Path) -> str | None:
    """A hash of a file, or of a folder's model and of the names and sizes of its files; None: there is none."""
    try:
        if path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        if not path.is_dir():
            return None
    except OSError:  # a prompt, which is too long for a name
        return None
    files = sorted(
        (str(file.relative_to(path)), file.stat().st_size)
        for file in path.rglob("*")
        if file.is_file()
    )
    sizes = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:8]
    return f"{model_identity(str(path))} {sizes}"
