"""The command of a task's evaluation, with its report."""

from typing import TypeVar

from cory.config import Config
from cory.evaluation import command
from cory.evaluation.settings import EvaluationConfig
from study.report import write_report

C = TypeVar("C", bound=Config)
E = TypeVar("E", bound=EvaluationConfig)


def run(doc: str | None, settings_kind: type[E], kind: type[C], task_module: str, name: str) -> None:
    """Evaluates the models on the command line, and writes the report. See `cory.evaluation.command`."""
    write_report(command.run(doc, settings_kind, kind, task_module, name).folder)
