"""Evaluates an experiment's runs on held-out queries, as they end."""

import json
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cory.errors import UserError
from cory.run.folder import write_text
from study import engines
from study.plan import ROOT, Planned, is_module, start

FIRST = "first.json"  # which run is the first of an evaluation, and the command that evaluated it


@dataclass(frozen=True)
class RunEvaluation:
    """The evaluation of an experiment's runs, one by one. The base answers once, with the first of them.

    Args:
        command: the script and its options.
        folder: where the evaluation of each run has a folder of its own.
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
        first = self.first()
        if first is not None and first != item.folder:
            rows = self._evaluate(item, [str(first), str(item.folder), "--only", str(item.folder)])
            base = [row for row in self._rows_of(first) if "/" not in row["name"]]
            return base + rows
        rows = self._evaluate(item, [str(item.folder)])
        content = {"command": self.command, "run": str(item.folder)}
        write_text(self.folder / FIRST, json.dumps(content))
        return rows

    def first(self) -> Path | None:
        """The run that was evaluated first, with the base, by the same command; None if there is none."""
        if not (self.folder / FIRST).exists():
            return None
        content = json.loads((self.folder / FIRST).read_text(encoding="utf-8"))
        run = Path(content["run"])
        is_there = (run / "agent_1").exists() and self._result_of(run).exists()
        return run if content["command"] == self.command and is_there else None

    def folder_of(self, run: Path) -> Path:
        """The folder of a run's evaluation."""
        return self.folder / run.name

    def _evaluate(self, item: Planned, arguments: list[str]) -> list[dict[str, Any]]:
        """Evaluates a run, with the output in its log. An evaluation of it that is there is made anew."""
        folder = self.folder_of(item.folder)
        shutil.rmtree(folder, ignore_errors=True)
        script, *options = shlex.split(self.command)
        command = [*start(script), *arguments, *options, "--output", str(folder)]
        cwd = None if is_module(script) else ROOT
        status = engines.start(command, cwd, item.log, self.threads).wait()
        if status:
            raise UserError(f"evaluate: failed with status {status}, see {item.log}")
        return self._rows_of(item.folder)

    def _rows_of(self, run: Path) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self._result_of(run).read_text(encoding="utf-8"))[
            "rows"
        ]
        return rows

    def _result_of(self, run: Path) -> Path:
        return self.folder_of(run) / "evaluation.json"
