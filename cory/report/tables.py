"""Tables as text, for the terminal and as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from cory.report.escape import markdown, one_line
from cory.report.summary import Summary


def summary_table(summary: Summary) -> str:
    """A row per agent and metric: its means at the start and at the end of training, and the change."""
    lines = ["", f"{'agent':10}{'metric':18}{'start':>9}{'end':>9}{'change':>9}"]
    for agent, metrics in summary.items():
        for metric, values in metrics.items():
            numbers = "".join(f"{values[key]:9.3f}" for key in ("start", "end", "change"))
            lines.append(f"{agent:10}{metric:18}{numbers}")
    return "\n".join(lines)


def sample_table(before: dict[str, list[dict[str, Any]]], after: dict[str, list[dict[str, Any]]]) -> str:
    """The same queries before and after training, each agent solo.

    Args:
        before, after: by agent, and as `chain` of the whole chain, a sample for each query.
    """
    solo = {agent: samples for agent, samples in after.items() if agent != "chain"}
    lines = []
    for row, sample in enumerate(next(iter(before.values()))):
        lines.append(f"\n{one_line(sample['query'])}")
        lines.append(_sample_line("before", sample))
        for agent, samples in solo.items():
            lines.append(_sample_line(agent, samples[row]))
    return "\n".join(lines)


def _sample_line(label: str, sample: Mapping[str, Any]) -> str:
    return f"  {label:10}{sample['task_reward']:+7.2f}  {one_line(sample['completion'])}"


def interval_cell(row: Mapping[str, Any], metric: str, plus_minus: str = "±") -> str:
    """A metric with the half-width of its interval, METRIC_ci; alone without one, such as a count of calls.

    Nothing where a row has no such metric.
    """
    if metric not in row:
        return ""
    if f"{metric}_ci" not in row:
        return f"{row[metric]:g}"
    return f"{row[metric]:.3f} {plus_minus} {row[f'{metric}_ci']:.3f}"


def interval_table(rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> str:
    """A line per model, each metric METRIC with the half-width of its interval, METRIC_ci."""
    cells = [[interval_cell(row, metric, "+-") for metric in titles] for row in rows]
    columns = [[title, *column] for title, column in zip(titles.values(), zip(*cells, strict=True), strict=True)]
    widths = [max(len(cell) for cell in column) for column in columns]
    names = ["", *(row["name"] for row in rows)]
    name_width = max(len(name) for name in names)

    lines = []
    for name, line in zip(names, [list(titles.values()), *cells], strict=True):
        padded = "".join(f"  {cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        lines.append(f"{name:{name_width}}{padded}")
    return "\n".join(lines)


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose cells are shown as they are, whatever a model has written into them."""
    lines = [f"| {' | '.join(markdown(cell) for cell in row)} |" for row in (titles, *rows)]
    rule = "|" + "---|" * len(titles)
    return "\n".join([lines[0], rule, *lines[1:]])
