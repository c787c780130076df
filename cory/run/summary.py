"""What a run shows at its end: tables for the terminal."""

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

WINDOW = 10  # iterations averaged into "start" and "end"
CURVES = ("task_reward", "kl", "combined_reward")  # the metrics that every table and figure of a run has


def summarise(history: Sequence[Mapping[str, Any]], agents: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    """By agent and metric: the mean over the first and over the last iterations (10, or half of a short run).

    Args:
        history: rows of metrics.jsonl. agents: their names.
    """
    result: dict[str, dict[str, dict[str, float]]] = {}
    for agent in agents:
        rows = [record for record in history if record["agent"] == agent]
        held = sorted({row["iteration"] for row in rows})  # iterations in which it had a role, or several
        window = min(WINDOW, max(1, len(held) // 2))
        result[agent] = {}
        for metric in CURVES if rows else ():  # a member of a population may not have been drawn yet
            ends = held[:window], held[-window:]
            start, end = (statistics.fmean(r[metric] for r in rows if r["iteration"] in part) for part in ends)
            result[agent][metric] = {"start": start, "end": end, "change": end - start}
    return result


def table(summary: dict[str, dict[str, dict[str, float]]]) -> str:
    """The summary as text: a row per agent and metric."""
    lines = ["", f"{'agent':10}{'metric':18}{'start':>9}{'end':>9}{'change':>9}"]
    for agent, metrics in summary.items():
        for metric, values in metrics.items():
            numbers = "".join(f"{values[key]:9.3f}" for key in ("start", "end", "change"))
            lines.append(f"{agent:10}{metric:18}{numbers}")
    return "\n".join(lines)


def sample_table(before: dict[str, list[dict[str, Any]]], after: dict[str, list[dict[str, Any]]]) -> str:
    """The same queries before and after training, each agent solo."""
    lines = []
    for row, sample in enumerate(next(iter(before.values()))):
        lines.append(f"\n{one_line(sample['query'])}")
        answers = [("before", sample)] + [(who, rows[row]) for who, rows in after.items() if who != "chain"]
        lines += [f"  {who:10}{s['task_reward']:+7.2f}  {one_line(s['completion'])}" for who, s in answers]
    return "\n".join(lines)


def text_table(rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> str:
    """A line per model, each metric with the half-width of its interval."""
    name = max(len(row["name"]) for row in rows)
    cells = [[f"{row[m]:.3f} +- {row[f'{m}_ci']:.3f}" for m in titles] for row in rows]
    widths = [max(len(title), *(len(line[i]) for line in cells)) for i, title in enumerate(titles.values())]
    lines = [" " * name + "".join(f"  {title:>{w}}" for title, w in zip(titles.values(), widths, strict=True))]
    for row, line in zip(rows, cells, strict=True):
        lines.append(f"{row['name']:{name}}" + "".join(f"  {c:>{w}}" for c, w in zip(line, widths, strict=True)))
    return "\n".join(lines)


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
