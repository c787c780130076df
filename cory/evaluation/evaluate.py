"""`cory.evaluate`: models on held-out queries, as a table and a folder of responses."""

import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset

from cory.evaluation.evaluator import Evaluator
from cory.evaluation.folder import check_untouched, output_folder, trained
from cory.evaluation.lineup import check_vocabularies, line_up
from cory.evaluation.overlap import TrainedOn, in_words, shares_in_training
from cory.evaluation.rows import COSTS, table_rows, titles
from cory.evaluation.settings import EvaluationConfig
from cory.parallel.devices import choose_device
from cory.plural import counted
from cory.prompts import query_text, text_of
from cory.provenance.task import data_hash
from cory.report import write_evaluation_report
from cory.report.tables import interval_table
from cory.resume.run_name import evaluation_name
from cory.run.output import replace_text
from cory.task import Task

# Settings that may name folders of a machine, left out of evaluation.json.
OF_THE_MACHINE = ("models", "base", "task", "model", "device", "output")


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

    Raises a UserError: a model or a run cannot be loaded, or the folder holds an evaluation of other settings.
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

    with ExitStack() as locks:
        folder = output_folder(
            settings,
            name or evaluation_name(settings.models),
            task_identity(task, held_out),
            lineup.identities,
            locks,
        )
        began_with = trained(settings.models)
        with _explaining_how_to_go_on(folder):
            records = Evaluator(lineup, columns, settings, device).run(folder)
        check_untouched(began_with, trained(settings.models), folder)
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
                key: value for key, value in asdict(settings).items() if key not in OF_THE_MACHINE
            },
            "said": description,
            "distinct_queries": len(set(query_texts)),
            "in_training": shares,
            "titles": shown,
            "costs": costs,
            "queries": queries,
            "rows": rows,
        }
        replace_text(folder / "evaluation.json", json.dumps(content, indent=2))
        write_evaluation_report(folder)
    return Evaluation(folder, rows)


def task_identity(task: Task, held_out: Dataset) -> dict[str, Any]:
    """What an evaluation that goes on must have in common with its beginning: reward, prompts, and data."""
    return {
        "reward": task.fingerprint_of_reward(),
        "prompts": json.loads(json.dumps(asdict(task.prompts))),
        "data_sha256": data_hash(held_out),
    }


@contextmanager
def _explaining_how_to_go_on(folder: Path) -> Iterator[None]:
    """Says where the answers of an evaluation are that does not come to its end."""
    try:
        yield
    except BaseException:
        name = shlex.quote(str(folder))
        print(f"The answers so far are kept: --output {name} goes on with them.", file=sys.stderr)
        raise


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
