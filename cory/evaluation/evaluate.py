"""`cory.evaluate`: models on held-out queries, as a table and a folder of responses."""

import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from cory.command import evaluation_name
from cory.evaluation.evaluator import Evaluator
from cory.evaluation.folder import RESPONSES, check_untouched, trained
from cory.evaluation.lineup import check_vocabularies, line_up
from cory.evaluation.overlap import TrainedOn, in_words, shares_in_training
from cory.evaluation.rows import COSTS, table_rows, titles
from cory.evaluation.settings import EvaluationConfig
from cory.parallel.devices import choose_device
from cory.plural import counted
from cory.roles import query_text, text_of
from cory.run.folder import filled, locked, new_folder
from cory.run.report import write_evaluation_report
from cory.run.tables import interval_table
from cory.task import Task

# Settings that may name folders of a machine, left out of evaluation.json.
OF_THE_MACHINE = ("models", "base", "task", "model", "only", "device", "output")


class Evaluation(NamedTuple):
    """Its folder, and a row per model and chain: `name`, and each METRIC with its interval's half-width METRIC_ci."""

    folder: Path
    rows: list[dict[str, Any]]


def evaluate(
    models: Sequence[str | Path],
    task: Task,
    settings: EvaluationConfig | None = None,
    name: str | None = None,
    trained_on: TrainedOn | None = None,
) -> Evaluation:
    """Evaluates models on a held-out task, prints the table, and writes rows and responses into a folder.

    Args:
        models: Hub ids, local folders, or folders of runs (all their agents).
        task: on held-out queries.
        settings: default `EvaluationConfig()`; its `models` are ignored.
        name: of the folder if `settings.output` is null; by default it names the models.
        trained_on: of runs whose task was made in Python, the rows that they were trained on, as `task.dataset` of
            their task, or a function that makes them from a run's configuration. The share of held-out queries among
            them is reported.

    The files get their names when all is answered: an evaluation that was interrupted begins anew.

    Raises a UserError: a model or a run cannot be loaded, or the folder is not empty.
    """
    settings = replace(settings or EvaluationConfig(), models=[str(model) for model in models])
    settings.check()
    device = choose_device(settings.device)
    lineup = line_up(task, settings)
    check_vocabularies(lineup)

    count = min(settings.queries or len(task.dataset), len(task.dataset))
    held_out = task.dataset.select(range(count))
    columns = held_out[:]
    query_texts = [query_text(prompt) for prompt in columns["prompt"]]
    queries = [text_of(prompt) for prompt in columns["prompt"]]
    shares = shares_in_training(lineup.runs, query_texts, trained_on)

    folder = new_folder(settings.output, name or evaluation_name(settings.models))
    with locked(folder):
        with filled(folder) as new:
            began_with = trained(settings.models)
            records = Evaluator(lineup, columns, settings, device).run(new / RESPONSES)
            check_untouched(began_with, trained(settings.models))
            rows = table_rows(records, columns, task, settings, lineup.kl_coef)
            shown = {
                metric: title
                for metric, title in titles(task, settings).items()
                if any(metric in row for row in rows)
            }
            costs = COSTS if lineup.chains else {}

            responses = counted(settings.samples, "response")
            description = (
                f"{in_words(query_texts, shares)}, {responses} each, temperature {lineup.sampling.temperature:g}, "
                f"eta = {lineup.kl_coef:g}"
            )
            _print_tables(description, rows, shown, costs)
            content = {
                "settings": {
                    key: value
                    for key, value in asdict(settings).items()
                    if key not in OF_THE_MACHINE
                },
                "said": description,
                "distinct_queries": len(set(query_texts)),
                "in_training": shares,
                "titles": shown,
                "costs": costs,
                "queries": queries,
                "rows": rows,
            }
            _write_json(new / "settings.json", {**asdict(settings), "trained": began_with})
            _write_json(new / "evaluation.json", content)
        write_evaluation_report(folder)
    return Evaluation(folder, rows)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _print_tables(
    description: str,
    rows: Sequence[dict[str, Any]],
    shown: Mapping[str, str],
    costs: Mapping[str, str],
) -> None:
    """Prints the table of metrics and, of chains, that of costs; `shown` and `costs` have the titles of columns."""
    heading = f"{description}; mean ± half-width of the 95 % interval over queries"
    print()
    print(textwrap.fill(heading, shutil.get_terminal_size().columns))
    print(interval_table(rows, shown))
    if costs:
        print()
        print("Cost of a query")
        print(interval_table(rows, costs))
