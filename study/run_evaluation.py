"""Evaluates an experiment's runs on held-out queries, as they end."""

import json
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cory.errors import NotContinued, UserError
from cory.evaluation.folder import RESPONSES, extends, read_responses, run_agents
from cory.run.output import replace_text
from study.planned import Planned
from study.processes import die_with_parent, environment
from study.scripts import ROOT, is_module, start


@dataclass(frozen=True)
class RunEvaluation:
    """The evaluation of all runs of an experiment, in one folder, so that the base answers once.

    Args:
        command: the script and its options.
        folder: where responses are stored, on this machine alone.
        threads: of the script; None: as many as it takes.
    """

    command: str
    folder: Path
    threads: int | None = None

    def rows(self, item: Planned) -> list[dict[str, Any]]:
        """The rows of a run, and of the base. The run is evaluated for them.

        An evaluation goes on with further models if its first one stays the same, so that one is always named. Where it
        cannot, as after a change of its options or of the reward, another one is begun.

        Raises:
            UserError: the script failed.
        """
        models = self._models(item)
        status = self._run(models, item) if models else NotContinued.status
        if status == NotContinued.status and self.folder.exists():
            number = 1
            while Path(f"{self.folder}-older-{number}").exists():
                number += 1
            self.folder.rename(f"{self.folder}-older-{number}")
            status = self._run([str(item.folder)], item)
        if status:
            raise UserError(f"{self.command}: failed with status {status}, see {item.folder}.log")
        rows: list[dict[str, Any]] = json.loads(
            (self.folder / "evaluation.json").read_text("utf-8")
        )["rows"]
        return rows

    def _run(self, models: Sequence[str], item: Planned) -> int:
        """Evaluates runs, with the output in the log of one of them. Returns the exit status."""
        script, *options = shlex.split(self.command)
        command = [*start(script), *models, *options, "--output", str(self.folder)]
        with open(f"{item.folder}.log", "a", encoding="utf-8") as log:
            done = subprocess.run(
                command,
                cwd=None if is_module(script) else ROOT,
                stdout=log,
                stderr=log,
                env=environment(self.threads),
                preexec_fn=die_with_parent,
            )
        return done.returncode

    def needs_agents_of(self, item: Planned) -> bool:
        """Whether a run's agents are needed by the evaluation of further runs, as it is their first."""
        try:
            settings = json.loads((self.folder / "settings.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return str(item.folder) in settings.get("models", [])[:1]

    def forget(self, item: Planned) -> None:
        """Removes a run's held-out responses, which each further evaluation would read again."""
        if not (self.folder / RESPONSES).exists():
            return
        others = [
            json.dumps(record)
            for (model, _), record in read_responses(self.folder).items()
            if not model.startswith(f"{item.folder.name}/")
        ]
        replace_text(self.folder / RESPONSES, "".join(f"{line}\n" for line in others))

    def _models(self, item: Planned) -> list[str]:
        """The runs to name: the first of the evaluation so far, and this one; none if it cannot go on with them."""
        try:
            settings = json.loads((self.folder / "settings.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return [str(item.folder)]
        try:
            models = list(dict.fromkeys([settings["models"][0], str(item.folder)]))
            return models if run_agents(Path(models[0])) and extends(models, settings) else []
        except (LookupError, TypeError, UserError):
            return []
