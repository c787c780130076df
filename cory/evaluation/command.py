"""`cory.evaluate`, and the command of an evaluation. Importing this does not import torch."""

import argparse
import json
import shlex
import shutil
import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cory.code_files import announce_files
from cory.command import Arguments, add_flags, evaluation_name, flag_values, show_values
from cory.config import Config, EvaluationConfig, ModelConfig, SamplingConfig
from cory.errors import UserError, counted
from cory.evaluation.report import evaluation_page
from cory.evaluation.rows import line_up
from cory.identity import data_hash, is_local, row_keys, share_in_training
from cory.roles import query_text
from cory.run.folder import (
    as_json,
    filled,
    locked,
    new_folder,
    run_agents,
    run_label,
)
from cory.run.report import NAME, write_report
from cory.run.settings import named, read_settings
from cory.run.signals import keep_printing
from cory.run.tables import interval_table
from cory.settings import blocks, changed, from_data
from cory.task_kinds import TaskKind, kind_of_run, run_config

if TYPE_CHECKING:
    from datasets import Dataset

    from cory.task import Task

CHANGES = ("--task.", "--model.", "--sampling.")  # flags that change keys of these blocks
# Settings that may name local folders or devices, left out of evaluation.json.
MACHINE_SETTINGS = ("models", "base", "task", "model", "only", "device", "output")
RESPONSES = "responses.jsonl"  # a line for each model and query


# The evaluation


class Evaluation(NamedTuple):
    """Result of an evaluation.

    Args:
        folder: the folder with its files.
        rows: one row per model and chain: `name`, and each METRIC with METRIC_ci, its interval's half-width.
    """

    folder: Path
    rows: list[dict[str, Any]]


def evaluate(
    models: Sequence[str | Path],
    task: "Task",
    settings: EvaluationConfig | None = None,
    trained_on: "Dataset | None" = None,
) -> Evaluation:
    """Evaluates models on a held-out task, prints the table, and writes rows, responses and report.html into a folder.

    Args:
        models: Hub ids, local folders, or folders of runs (all their agents).
        task: the task, on held-out queries.
        settings: default `EvaluationConfig()`; its `models` are ignored.
        trained_on: the training rows (`task.dataset`) of runs whose task was made in Python. The evaluation reports
            the share of held-out queries that are among them.

    Files get their final names once every query is answered; an interrupted evaluation starts over.

    Raises a UserError: a model or a run cannot be loaded, or the folder is not empty.
    """
    # Imported late, as torch takes seconds to import.
    from cory.evaluation.answer import Evaluator
    from cory.evaluation.table import cost_titles, table_rows, titles
    from cory.parallel.devices import choose_device

    settings = replace(settings or EvaluationConfig(), models=[str(model) for model in models])
    settings.check()
    device = choose_device(settings.device)
    lineup = line_up(task, settings)

    # The queries, and the share of them in each run's training data.
    count = min(settings.queries or len(task.dataset), len(task.dataset))
    columns = task.dataset.select(range(count))[:]
    queries = row_keys(columns)
    shares = shares_in_training(lineup.runs, columns, trained_on)
    notes = [*lineup.notes]
    for note in notes:  # printed first, as answering takes long
        print(f"Note: {note}", file=sys.stderr)
    description = (
        f"{describe_queries(queries, shares)}, {counted(settings.samples, 'response')} each, "
        f"temperature {lineup.sampling.temperature:g}, eta = {lineup.kl_coef:g}"
    )

    folder = new_folder(settings.output, evaluation_name(settings.models))
    keep_printing()  # a pipe such as `| head` may close the output before the answers are complete
    with locked(folder), filled(folder) as new:
        with warnings.catch_warnings(record=True) as caught:
            records = Evaluator(lineup, columns, settings, device).run(new / RESPONSES)
            rows = table_rows(records, columns, task, settings, lineup.kl_coef)
        for warning in caught:
            warnings.showwarning(
                warning.message, warning.category, warning.filename, warning.lineno
            )
            # Only cory's warnings become notes, not those from libraries.
            if Path(__file__).parents[1] in Path(warning.filename).parents:
                notes.append(str(warning.message))
        shown = titles(task, settings, rows)
        has_chains = any(row.reads for row in lineup.rows)
        costs = cost_titles() if has_chains else {}
        content = {
            "settings": {
                key: value for key, value in asdict(settings).items() if key not in MACHINE_SETTINGS
            },
            "description": description,
            "notes": [*dict.fromkeys(notes)],
            "in_training": shares,
            "titles": shown,
            "costs": costs,
            "queries": [query_text(prompt) for prompt in columns["prompt"]],
            "columns": [
                {name: as_json(columns[name][query]) for name in task.columns_read()}
                for query in range(count)
            ],
            "rows": rows,
        }
        _write_json(new / "settings.json", asdict(settings))
        _write_json(new / "evaluation.json", content)
    write_report(folder, evaluation_page)
    _print_tables(description, _by_run(rows, [run_label(run) for run in lineup.runs]), shown, costs)
    print(f"\nRows and responses are in {folder}; {NAME} shows them with a figure", flush=True)
    return Evaluation(folder, rows)


def shares_in_training(
    runs: Mapping[Path, Config],
    columns: Mapping[str, Sequence[Any]],
    trained_on: "Dataset | None" = None,
) -> dict[str, float | None]:
    """Returns, for each run's name, the share of held-out queries that are also in its training data.

    The share is None, and the reason is printed, if the data is unknown or has changed since the run recorded it.

    Args:
        runs: the runs' settings, by folder.
        columns: the held-out queries' columns.
        trained_on: the training data. None: loaded by the kind of each run's task.
    """
    shares: dict[str, float | None] = {}
    by_hash: dict[str, float] = {}  # computed once per dataset, which runs usually share
    for run, config in runs.items():
        settings = read_settings(run)
        recorded = settings["fingerprint"]["dataset_sha256"]
        try:
            if recorded not in by_hash:
                rows = trained_on
                if rows is None:
                    kind = kind_of_run(settings)
                    if kind is None:
                        raise UserError(
                            "expected evaluate(..., trained_on=task.dataset), got no trained_on"
                        )
                    rows = kind.training_rows(config)
                if data_hash(rows) != recorded:
                    raise UserError("expected the training rows that the run recorded, got others")
                by_hash[recorded] = share_in_training(columns, rows[:])
            shares[run_label(run)] = by_hash[recorded]
        except UserError as error:
            shares[run_label(run)] = None
            print(
                f"Unknown how many held-out queries {run} was trained on: {error}",
                file=sys.stderr,
            )
    return shares


def describe_queries(queries: Sequence[str], shares: Mapping[str, float | None]) -> str:
    """Describes the number of queries, how many are distinct, and the share that is also in each run's training data.

    >>> describe_queries(["a", "b", "a"], {"one": 0.0, "two": 1 / 3, "three": None})
    '3 queries (2 distinct), 0 to 33.3 % of them also in training, unknown for three'
    """
    text = "1 query" if len(queries) == 1 else f"{len(queries)} queries"
    distinct = len(set(queries))
    if distinct < len(queries):
        text += f" ({distinct} distinct)"
    numbers = [share for share in shares.values() if share is not None]
    unknown = [name for name, share in shares.items() if share is None]
    if numbers:
        ends = dict.fromkeys(f"{100 * share:.3g}" for share in (min(numbers), max(numbers)))
        text += f", {' to '.join(ends)} % of them also in training"
    elif unknown:
        text += ", share also in training"
    if unknown:
        text += f", unknown for {', '.join(unknown)}"
    return text


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _by_run(rows: Sequence[dict[str, Any]], runs: Sequence[str]) -> list[dict[str, Any]]:
    """Groups rows by run under heading rows, and removes the run's name from each. Rows of other models come first."""
    result = [row for row in rows if not row["name"].startswith(tuple(f"{run}/" for run in runs))]
    for run in runs:
        result.append({"name": run})
        for row in rows:
            if row["name"].startswith(f"{run}/"):
                result.append(row | {"name": "  " + row["name"].removeprefix(f"{run}/")})
    return result


def _print_tables(
    description: str,
    rows: Sequence[dict[str, Any]],
    shown: Mapping[str, str],
    costs: Mapping[str, str],
) -> None:
    """Prints the metrics and, if there are chains, the costs; `shown` and `costs` map metrics to column titles."""
    heading = f"{description}; mean ± half-width of the 95 % interval over queries"
    print()
    print(textwrap.fill(heading, shutil.get_terminal_size().columns))
    print(interval_table(rows, shown))
    if costs:
        print()
        print("Cost of a query")
        print(interval_table(rows, costs))


# The command


def evaluate_command(kind: TaskKind[Any] | None, doc: str | None) -> None:
    """Evaluates the models on the command line.

    Args:
        kind: the kind of task. None: that of the first run's task.
        doc: the script's docstring, for `--help`.
    """
    settings = parse_settings(kind, doc)
    run = first_run(settings.models)
    if run is not None:
        kind = checked_kind(run, kind)
    if kind is None:
        raise UserError(
            "models: expected at least one run's folder (RUN, not RUN/agent_1), got "
            f"{settings.models}. Prompts come from the first run"
        )
    settings.task = flag_values(blocks(kind.config)["task"], settings.task)
    config = task_config(kind, run, settings)
    if run is not None:
        announce_files(run, config, {f"task.{key}" for key in settings.task})
    task = kind.make_task(config, kind.held_out_rows(config, settings.split))
    evaluate(settings.models, task, settings)


def parse_settings(
    kind: TaskKind[Any] | None, description: str | None, argv: Sequence[str] | None = None
) -> EvaluationConfig:
    """Parses an evaluation's command line. Values of `task` remain text until the run's task is known.

    Args:
        kind: the script's kind of task. None: the command evaluates any task.
        description: the text of `--help`.
        argv: the arguments. None: those of the process.
    """
    settings_class = (kind and kind.evaluation) or EvaluationConfig
    parser = Arguments(description)
    add_flags(parser, settings_class, without=["models"])
    show_values(parser, asdict(settings_class()))
    parser.add_argument(
        "models", nargs="+", help="Hub ids, local folders, or folders of runs (all their agents)"
    )
    words = sys.argv[1:] if argv is None else argv
    # Any --task.KEY is accepted: which keys exist is known only after the run's settings are read.
    for flag in {word.partition("=")[0] for word in words}:
        if flag.startswith(CHANGES):
            parser.add_argument(flag, default=argparse.SUPPRESS)
    texts = vars(parser.parse_args(words))
    models = texts.pop("models")
    changes = {key: texts.pop(key) for key in list(texts) if "." in key}
    values = flag_values(settings_class, texts)
    for key, text in changes.items():
        block, _, name = key.partition(".")
        values.setdefault(block, {})[name] = text
    settings = from_data(settings_class, values)
    settings.models = [str(named(Path(name))) for name in models]
    settings.model = flag_values(ModelConfig, settings.model)
    settings.sampling = flag_values(SamplingConfig, settings.sampling)
    settings.check()
    return settings


def first_run(models: Sequence[str]) -> Path | None:
    """Returns the first model that is the folder of a run. Raises a UserError if a folder does not exist."""
    for name in models:
        names_folder = is_local(name) or name.startswith("runs/")
        if names_folder and not Path(name).exists():
            raise UserError(
                f"models: expected Hub ids, or existing folders of runs or models, got {name!r}"
            )
    return next((Path(name) for name in models if run_agents(Path(name))), None)


def checked_kind(run: Path, expected: TaskKind[Any] | None) -> TaskKind[Any]:
    """Returns the kind of a run's task. Raises a UserError if the task was made in Python or is of another kind."""
    kind = kind_of_run(read_settings(run))
    if kind is None:
        raise UserError(
            f"{run}: expected a run of a registered task, got one that was made in Python. Evaluate it in Python, with "
            f"its held-out task: cory.evaluate([{str(run)!r}], task)"
        )
    if expected is not None and kind.name != expected.name:
        raise UserError(
            f"{run}: expected a run of {expected.name}, got one of {kind.name}. This command evaluates any run: "
            f"python -m cory.evaluation {shlex.quote(str(run))}"
        )
    return kind


def task_config(kind: TaskKind[Any], run: Path | None, settings: EvaluationConfig) -> Config:
    """Returns the settings of the evaluation's task: the first run's settings, changed by `settings.task`.

    Raises a UserError if a key is unknown.
    """
    if run is None:
        config = kind.config()
        config.model.name = settings.base or settings.models[0]
    else:
        config = run_config(run)
    config.seed = settings.seed
    if "chat_template" in settings.model:  # the task's prompts and reward depend on it
        config.model.chat_template = settings.model["chat_template"]
    config = config.on(settings.device)
    held_out = getattr(config.task, "eval_dataset", None)
    if held_out and "dataset" in settings.task and "eval_dataset" not in settings.task:
        raise UserError(
            f"task.dataset: expected task.eval_dataset, got task.dataset = {settings.task['dataset']!r}. The run has "
            f"its own held-out prompts, {held_out!r}, which only task.eval_dataset replaces"
        )
    config.task = changed(config.task, settings.task)
    return config
