"""Evaluates an experiment's runs on held-out queries, as they end."""

import json
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cory.errors import UserError
from cory.evaluation.rows import run_agents
from cory.run.folder import write_text
from study.planned import Planned
from study.processes import die_with_parent, environment
from study.scripts import ROOT, is_module, start

FIRST = "first.json"  # which run is the first of an evaluation, and the command that evaluated it


@dataclass(frozen=True)
class RunEvaluation:
    """The evaluation of an experiment's runs, one by one. The base answers once, with the first of them.

    Args:
        command: the script and its options.
        folder: where the evaluation of each run has a folder of its own, on this machine alone.
        threads: of the script; None: as many as it takes.
    """

    command: str
    folder: Path
    threads: int | None = None

    def rows(self, item: Planned) -> list[dict[str, Any]]:
        """The rows of a run, and of the base. The run is evaluated for them.

        The first run decides on base, task and sampling, so each evaluation names it. Where it is not there any more,
        or the options have changed, this run is the first.

        Raises:
            UserError: the script failed.
        """
        first = self._first()
        if first is not None and first != item.folder:
            rows = self._evaluate(item, [str(first), str(item.folder), "--only", str(item.folder)])
            base = [row for row in self._rows_of(first) if "/" not in row["name"]]
            return base + rows
        rows = self._evaluate(item, [str(item.folder)])
        content = {"command": self.command, "run": str(item.folder)}
        write_text(self.folder / FIRST, json.dumps(content))
        return rows

    def needs_agents_of(self, item: Planned) -> bool:
        """Whether a run's agents are needed by the evaluation of further runs, as it is their first."""
        return self._first() == item.folder

    def forget(self, item: Planned) -> None:
        """Removes a run's held-out responses."""
        shutil.rmtree(self._folder_of(item.folder))

    def _first(self) -> Path | None:
        """The run that was evaluated first, with the base, by the same command; None if there is none."""
        try:
            content = json.loads((self.folder / FIRST).read_text(encoding="utf-8"))
            run = Path(content["run"])
            if content["command"] == self.command and run_agents(run) and self._rows_of(run):
                return run
        except (OSError, ValueError, UserError):
            pass
        return None

    def _evaluate(self, item: Planned, arguments: Sequence[str]) -> list[dict[str, Any]]:
        """Evaluates a run, with the output in its log. An evaluation of it that is there is made anew."""
        folder = self._folder_of(item.folder)
        shutil.rmtree(folder, ignore_errors=True)
        script, *options = shlex.split(self.command)
        command = [*start(script), *arguments, *options, "--output", str(folder)]
        with open(f"{item.folder}.log", "a", encoding="utf-8") as log:
            done = subprocess.run(
                command,
                cwd=None if is_module(script) else ROOT,
                stdout=log,
                stderr=log,
                env=environment(self.threads),
                preexec_fn=die_with_parent,
            )
        if done.returncode:
            raise UserError(
                f"{self.command}: failed with status {done.returncode}, see {item.folder}.log"
            )
        return self._rows_of(item.folder)

    def _rows_of(self, run: Path) -> list[dict[str, Any]]:
        path = self._folder_of(run) / "evaluation.json"
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return rows

    def _folder_of(self, run: Path) -> Path:
        return self.folder / run.name
