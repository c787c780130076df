"""What a run shows at its end: tables for the terminal."""

import re
import shutil
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

WINDOW = 10  # iterations averaged into "start" and "end"
CURVES = ("task_reward", "kl", "combined_reward")  # the metrics that every table and figure of a run has


Means = dict[str, dict[str, dict[str, float]]]


def summarise(history: Sequence[Mapping[str, Any]], agents: Sequence[str]) -> Means:
    """By agent and metric: the mean over the first and over the last iterations (10, or half of a short run).

    Args:
        history: rows of metrics.jsonl. agents: their names.
    """
    return _ends(history, "agent", agents)


def summarise_roles(history: Sequence[Mapping[str, Any]]) -> Means:
    """As `summarise`, by role instead of agent: how the chain's responses have changed. Empty for one role."""
    roles = list(dict.fromkeys(record["role"] for record in history))
    return _ends(history, "role", roles) if len(roles) > 1 else {}


def _ends(history: Sequence[Mapping[str, Any]], key: str, values: Sequence[str]) -> Means:
    result: Means = {}
    for value in values:
        rows = [record for record in history if record[key] == value]
        held = sorted({row["iteration"] for row in rows})  # iterations in which it had a role, or several
        window = min(WINDOW, max(1, len(held) // 2))
        result[value] = {}
        for metric in CURVES if rows else ():  # a member of a population may not have been drawn yet
            ends = held[:window], held[-window:]
            start, end = (statistics.fmean(r[metric] for r in rows if r["iteration"] in part) for part in ends)
            result[value][metric] = {"start": start, "end": end, "change": end - start}
    return result


def labelled(agents: Means, roles: Means) -> Means:
    """What the tables of a run show: the roles of the chain, then its agents, each over all roles that it held."""
    all_roles = ", all roles" if roles else ""
    return {f"as {role}": metrics for role, metrics in roles.items()} | {
        f"{agent}{all_roles}": metrics for agent, metrics in agents.items()
    }


def table(agents: Means, roles: Means) -> str:
    """Both summaries as text: a row per role and metric, then per agent and metric."""
    rows = labelled(agents, roles)
    first = 2 + max(map(len, rows))
    lines = ["", f"{'':{first}}{'metric':18}{'start':>9}{'end':>9}{'change':>9}"]
    for name, metrics in rows.items():
        for metric, values in metrics.items():
            numbers = "".join(f"{values[key]:9.3f}" for key in ("start", "end", "change"))
            lines.append(f"{name:{first}}{metric:18}{numbers}")
    return "\n".join(lines)


Samples = Mapping[str, Sequence[Mapping[str, Any]]]


def sample_table(before: Samples, after: Samples) -> str:
    """The same queries before and after training: the chain, then what agents answer solo.

    Args:
        before, after: samples by agent (solo), and of a run with several roles those of its first chain as `chain`,
            role by role.
    """
    agents = [name for name in after if name != "chain"]
    lines = []
    for row, sample in enumerate(before[agents[0]]):
        query = one_line(sample["query"])
        solo = {name: after[name][row] for name in agents}
        if "chain" not in after:
            answers = [("before", sample), *solo.items()]
        else:
            count = len(before[agents[0]])
            answers = [
                (f"{stage}: {step['agent']} as {step['role']}", step)
                for stage, samples in (("before", before), ("after", after))
                for step in samples["chain"][row::count]
            ]
            pioneer = after["chain"][row]  # who answers solo, too: the same response
            answers += [(f"after: {name} solo", s) for name, s in solo.items() if name != pioneer["agent"]]
        width = max(len(label) for label, _ in answers)
        lines.append(f"\n{query}")
        lines += [f"  {label:{width}} {s['task_reward']:+7.2f}  {one_line(s['completion'])}" for label, s in answers]
    return "\n".join(lines)


def text_table(rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str], width: int | None = None) -> str:
    """A line per model, each metric with the half-width of its interval.

    Metrics that do not fit beside each other go to further tables below.

    Args:
        width: characters in a line; None: those of the terminal, or 80.
    """
    width = width or shutil.get_terminal_size().columns
    names = max(len(row["name"]) for row in rows)
    values = {metric: [f"{row[metric]:.3f} ± {row[f'{metric}_ci']:.3f}" for row in rows] for metric in titles}
    heads = {metric: textwrap.wrap(title, max(map(len, values[metric]))) for metric, title in titles.items()}
    widths = {metric: max(map(len, [*heads[metric], *values[metric]])) for metric in titles}

    parts: list[list[str]] = []  # the metrics of each table
    for metric in titles:
        if not parts or names + sum(2 + widths[m] for m in [*parts[-1], metric]) > width:
            parts.append([])
        parts[-1].append(metric)

    tables = []
    for metrics in parts:
        height = max(len(heads[metric]) for metric in metrics)
        columns = [
            [f"  {cell:>{widths[m]}}" for cell in (*[""] * (height - len(heads[m])), *heads[m], *values[m])]
            for m in metrics
        ]
        first = [f"{name:{names}}" for name in (*[""] * height, *(row["name"] for row in rows))]
        tables.append("\n".join(map("".join, zip(first, *columns, strict=True))))
    return "\n\n".join(tables)


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose cells are shown as they are: a model's text cannot act as Markdown, HTML or control."""
    lines = [f"| {' | '.join(map(escaped, line))} |" for line in (titles, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(titles), *lines[1:]])


def escaped(text: str) -> str:
    """A text as one line of Markdown that shows it as it is."""
    text = one_line(text)
    harmless = {found.start() for found in re.finditer(r"(?<=[^\W_])_(?=[^\W_])", text)}  # as in agent_1
    acting = "<>&|`*_[]#~\\$"
    return "".join(f"&#{ord(c)};" if c in acting and i not in harmless else c for i, c in enumerate(text)).strip()


def one_line(text: str) -> str:
    """A model's text for a terminal or a table: control characters, line breaks among them, shown as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable(text: str) -> str:
    """A model's text with its line breaks; all other control characters are shown as escapes."""
    return "\n".join(map(one_line, text.split("\n")))
