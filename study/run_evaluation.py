"""Evaluates an experiment's runs on held-out queries when they end."""

import json
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cory.errors import UserError
from cory.run.folder import write_text
from study import engines
from study.plan import ROOT, Planned, is_module, python_command

FIRST = "first.json"  # names the run evaluated first, and the command that evaluated it


@dataclass(frozen=True)
class RunEvaluation:
    """Evaluates an experiment's runs one by one. The untrained base model is evaluated once, with the first run.

    Args:
        command: the script and its options.
        folder: the parent folder of the runs' evaluations.
        threads: the script's number of threads. None: the script decides.
    """

    command: str
    folder: Path
    threads: int | None = None

    def rows(self, item: Planned) -> list[dict[str, Any]]:
        """Evaluates a run and returns its rows and the base model's rows.

        The evaluation script takes base model, task and sampling from the first run on its command line. This is always
        the run that was evaluated first. If its folder is gone or the options have changed, the current run takes its
        place.

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
        """Returns the run that this command evaluated first, with the base model beside it; None if there is none."""
        if not (self.folder / FIRST).exists():
            return None
        content = json.loads((self.folder / FIRST).read_text(encoding="utf-8"))
        run = Path(content["run"])
        exists = (run / "agent_1").exists() and self._result_of(run).exists()
        return run if content["command"] == self.command and exists else None

    def folder_of(self, run: Path) -> Path:
        """Returns the folder of a run's evaluation."""
        return self.folder / run.name

    def _evaluate(self, item: Planned, arguments: list[str]) -> list[dict[str, Any]]:
        """Evaluates a run and replaces an earlier evaluation. The output is appended to the run's log."""
        folder = self.folder_of(item.folder)
        shutil.rmtree(folder, ignore_errors=True)
        script, *options = shlex.split(self.command)
        command = [*python_command(script), *arguments, *options, "--output", str(folder)]
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
