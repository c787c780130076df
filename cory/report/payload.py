"""What a report shows, as plain JSON: curves, flags, tables, settings and completions."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cory.plural import counted
from cory.report.completions import Texts, short
from cory.report.ending import explained_end
from cory.report.summary import averaged, labelled, summarise, summarise_roles
from cory.report.tables import interval_cell
from cory.run.record import read_settings

ENDS = ("start", "end", "change")
NUMBERS = 150_000  # of all curves; longer ones are averaged over neighbouring iterations
TITLES = {
    "task_reward": "Task reward", "kl": "KL to the reference (nats)", "combined_reward": "Combined reward",
    "team_reward": "Team reward", "eval_task_reward": "Task reward, held-out queries",
    "eval_team_reward": "Team reward, held-out queries", "distinct_2": "Distinct-2",
    "response_tokens": "Response length (tokens)", "entropy": "Entropy (nats per token)", "kl_coef": "KL coefficient",
    "policy_loss": "Policy loss", "value_loss": "Value loss",
    "explained_variance": "Explained variance of the critic", "clip_fraction": "Clip fraction",
    "gradient_norm": "Gradient norm", "dropped_steps": "Dropped steps",
}  # fmt: skip


@dataclass
class ReportedRun:
    """A run as a report shows it.

    Args:
        name: of its folder. group: name of the runs that differ in their seed alone.
        rows: of metrics.jsonl. samples: of samples.jsonl. fixed: samples before and after training, by agent.
        notes: on how it ended.
    """

    name: str
    group: str
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def seed(self) -> Any:
        return self.settings.get("seed")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file, without a line cut short by a kill; none if there is no file."""
    rows = []
    with suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8").split("\n"):
            with suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def read_run(folder: Path, group: str) -> ReportedRun:
    """Reads the folder of a run. Raises a UserError if it is none."""
    settings = read_settings(folder)
    summary = {}
    with suppress(FileNotFoundError):
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return ReportedRun(
        name=folder.name,
        group=group,
        settings=settings,
        rows=read_lines(folder / "metrics.jsonl"),
        samples=read_lines(folder / "samples.jsonl"),
        fixed=summary.get("samples", {}),
        notes=explained_end(folder, summary, settings["iterations"]),
    )


def of_run(folder: Path, method: str, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The payload of a single run. `notes`: caveats. Raises a UserError if the folder is no run's."""
    run = read_run(folder, method)
    done = 1 + max((row["iteration"] for row in run.rows), default=-1)
    planned = run.settings["iterations"]
    values = flat(run.settings)
    facts = [
        method,
        f"model {' and '.join(model_names(run.settings))}",
        f"{done} of {counted(planned, 'iteration')}",
        f"seed {run.seed}",
    ]
    tables = [_ends(run.rows)] if run.rows else []
    settings_rows = [[key, shown(value)] for key, value in values.items()]
    settings = {
        "title": "All settings",
        "note": "",
        "columns": ["setting", "value"],
        "rows": settings_rows,
    }
    return payload(
        folder.name,
        facts,
        [*notes, *run.notes],
        [run],
        tables,
        settings,
    )


def model_names(settings: Mapping[str, Any]) -> list[str]:
    """The models of a run's agents, by name, each once."""
    common = settings["model"]["name"]
    agents = settings.get("agents") or [{}]
    names = [(agent.get("model") or {}).get("name", common) for agent in agents]
    return list(dict.fromkeys(names))


def of_evaluation(folder: Path) -> dict[str, Any]:
    """The payload of an evaluation that has ended. Raises OSError, ValueError or LookupError if it has not."""
    tables, texts, description = evaluation_parts(folder)
    return payload(folder.name, [description], [], [], tables, None, texts)


def evaluation_parts(
    folder: Path, texts: Texts | None = None
) -> tuple[list[dict[str, Any]], Texts, str]:
    """An evaluation's tables, `texts` (or new ones) with its completions, and how it was made.

    The first table has the metrics; where there are chains, the second has what a query costs.
    """
    evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    texts = texts or Texts()
    records = {
        (record["model"], record["query"]): record
        for record in read_lines(folder / "responses.jsonl")
    }
    texts.add_evaluation(evaluation["queries"], records)
    note = "Mean ± half-width of the 95 % interval over queries."
    tables = [interval_table("Held-out evaluation", note, evaluation["rows"], evaluation["titles"])]
    if evaluation.get("costs"):
        tables.append(
            interval_table("Cost of a query", note, evaluation["rows"], evaluation["costs"])
        )
    return tables, texts, evaluation["said"]


def interval_table(
    title: str, note: str, rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]
) -> dict[str, Any]:
    """A table of an evaluation's rows: `name`, and each metric with its interval."""
    cells = [[row["name"], *(interval_cell(row, metric) for metric in titles)] for row in rows]
    return {"title": title, "note": note, "columns": ["model", *titles.values()], "rows": cells}


def payload(
    title: str,
    facts: Sequence[str],
    notes: Sequence[str],
    runs: Sequence[ReportedRun],
    tables: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any] | None,
    texts: Texts | None = None,
) -> dict[str, Any]:
    """All that a report shows.

    Args:
        facts: what was run, in a few phrases. notes: caveats. settings: a table of settings.
        tables: each with `title`, `note`, `columns` and `rows` of text.
        texts: completions besides those of the runs.
    """
    texts = texts or Texts()
    for run in runs:
        texts.add_run(run.group, run.seed, run.samples, run.fixed)
    groups = list(dict.fromkeys(run.group for run in runs))
    return {
        "title": title,
        "facts": list(facts),
        "notes": list(notes),
        "groups": groups,
        "runs": [
            {"name": run.name, "group": groups.index(run.group), "seed": run.seed} for run in runs
        ],
        **curves(runs),
        "flags": flags(runs),
        "tables": list(tables),
        "settings": settings,
        "queries": texts.queries,
        "chains": texts.in_order(),
        "left_out": 0,
    }


def curves(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """The metrics of the runs: `agents`, `roles`, `metrics` (title by key), `every`, and `points`, one for each run.

    Points are columns of equal length: `iteration`, `agent` and `role` (indices), and `values` by metric. One point is
    the mean over `every` neighbouring iterations.
    """
    rows = [row for run in runs for row in run.rows]
    agents = _agents(rows)
    roles = list(dict.fromkeys(row["role"] for row in rows))
    recorded = dict.fromkeys(
        key for row in rows for key, value in row.items() if is_number(value) and key != "iteration"
    )
    titled = [key for key in TITLES if key in recorded]
    others = [key for key in recorded if key not in TITLES]
    metrics = {key: TITLES.get(key, key) for key in [*titled, *others]}
    every = max(1, math.ceil(len(rows) * len(metrics) / NUMBERS))
    points = []
    for run in runs:
        bins: dict[tuple[int, int, int], list[Mapping[str, Any]]] = {}
        for row in run.rows:
            key = (
                row["iteration"] // every * every,
                agents.index(row["agent"]),
                roles.index(row["role"]),
            )
            bins.setdefault(key, []).append(row)
        columns = [list(column) for column in zip(*bins, strict=True)] or [[], [], []]
        values = {metric: [_mean(part, metric) for part in bins.values()] for metric in metrics}
        points.append(
            {**dict(zip(("iteration", "agent", "role"), columns, strict=True)), "values": values}
        )
    return {"agents": agents, "roles": roles, "metrics": metrics, "every": every, "points": points}


def _agents(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    # agent_2 before agent_10.
    return sorted({row["agent"] for row in rows}, key=lambda name: (len(name), name))


def is_number(value: Any) -> bool:
    """Whether a value of metrics.jsonl is one of a curve."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _mean(rows: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    values = [value for row in rows if (value := short(row.get(metric))) is not None]
    return short(sum(values) / len(values)) if values else None


def flags(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Signs of trouble (docs/metrics.md, `flags`): by run, agent and kind the iterations, and what it means."""
    flagged: dict[tuple[int, str, str], list[Mapping[str, Any]]] = {}
    for number, run in enumerate(runs):
        for row in run.rows:
            for flag in row.get("flags") or []:
                flagged.setdefault((number, row["agent"], flag), []).append(row)
    if not flagged:
        return []
    from cory.run.flags import MEANING  # here, as importing torch takes seconds

    result = []
    for (number, agent, flag), rows in flagged.items():
        worst = max(rows, key=lambda row: row["kl"])
        meaning = MEANING[flag].format_map(worst) if flag in MEANING else flag
        iterations = [row["iteration"] for row in rows]
        result.append(
            {
                "run": number,
                "agent": agent,
                "flag": flag,
                "iterations": iterations,
                "meaning": meaning,
            }
        )
    return result


def _ends(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table of a run's start and end."""
    table = [
        [f"{name}: {TITLES[metric]}", *(f"{values[key]:.3f}" for key in ENDS)]
        for name, metrics in labelled(summarise(rows, _agents(rows)), summarise_roles(rows)).items()
        for metric, values in metrics.items()
    ]
    window = averaged(len({row["iteration"] for row in rows}))
    ends = "iteration" if window == 1 else f"{window} iterations"
    note = f"Means over the first and the last {ends}. A single run has no interval."
    return {
        "title": "Start and end",
        "note": note,
        "columns": ["role or agent, metric", *ENDS],
        "rows": table,
    }


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted keys."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        result |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
        )
    return result


def shown(value: Any) -> str:
    """A setting as tables show it: the last two parts of an absolute path, as the rest depends on the machine."""
    path = Path(value) if isinstance(value, str) else None
    return "/".join(path.parts[-2:]) if path and path.is_absolute() else str(value)
