"""Text tables for terminals and Markdown: a run's means at its start and end, its samples, and evaluations.

Models' texts are escaped, so that they cannot act as Markdown, HTML or terminal control sequences.
"""

import re
import shutil
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cory.metrics import CURVES

Sample = Mapping[str, Any]
WINDOW = 10  # iterations averaged into "start" and "end"

# `start`, `end` and `change` by agent or role, and by metric.
Summary = dict[str, dict[str, dict[str, float]]]


def summarise(history: Sequence[Mapping[str, Any]], agents: Sequence[str]) -> Summary:
    """Averages each agent's metrics over the first 10 and over the last 10 iterations.

    In runs shorter than 20 iterations, averages over the first and over the last half.

    Args:
        history: rows of metrics.jsonl.
        agents: the agents' names.
    """
    return _summary(history, "agent", agents)


def summarise_roles(history: Sequence[Mapping[str, Any]]) -> Summary:
    """Averages metrics like `summarise`, by role instead of agent. Empty if there is a single role."""
    roles = list(dict.fromkeys(record["role"] for record in history))
    return _summary(history, "role", roles) if len(roles) > 1 else {}


def _summary(history: Sequence[Mapping[str, Any]], key: str, names: Sequence[str]) -> Summary:
    result: Summary = {}
    for name in names:
        rows = [record for record in history if record[key] == name]
        result[name] = {}
        iterations = sorted({row["iteration"] for row in rows})
        window = min(WINDOW, max(1, len(iterations) // 2))
        first = iterations[:window]
        last = iterations[-window:]
        shown = [*CURVES[:1], "team_reward", *CURVES[1:]] if "team_reward" in rows[0] else CURVES
        for metric in shown:
            start = statistics.fmean(row[metric] for row in rows if row["iteration"] in first)
            end = statistics.fmean(row[metric] for row in rows if row["iteration"] in last)
            result[name][metric] = {"start": start, "end": end, "change": end - start}
    return result


def labelled(agents: Summary, roles: Summary) -> Summary:
    """Labels the rows of a run's tables: first the roles, then the agents, each over all roles that it held.

    If roles were not exchanged, an agent and its role share one row. Task rewards are left out if only a team reward
    was earned.
    """
    rows = {f"as {role}": metrics for role, metrics in roles.items()}
    for agent, metrics in agents.items():
        rows[f"{agent}, all roles" if roles else agent] = metrics
    if list(roles.values()) == list(agents.values()):  # each agent has held a single role
        rows = {
            f"{agent} as {role}": agents[agent] for agent, role in zip(agents, roles, strict=True)
        }
    has_team_reward = any("team_reward" in metrics for metrics in rows.values())
    earned = [
        value for metrics in rows.values() for value in metrics.get("task_reward", {}).values()
    ]
    if has_team_reward and not any(earned):
        rows = {
            name: {metric: values for metric, values in metrics.items() if metric != "task_reward"}
            for name, metrics in rows.items()
        }
    return rows


def natural(names: Iterable[str]) -> list[str]:
    """Sorts agents' names: `agent_2` before `agent_10`."""
    return sorted(names, key=lambda name: (len(name), name))


def ended_early(summary: Mapping[str, Any], planned: int) -> str:
    """Describes when and why a run ended early; empty if it did not.

    Args:
        summary: the contents of summary.json.
        planned: the planned number of iterations.
    """
    if not summary.get("stopped"):
        return ""
    return f"ended early, after iteration {summary['iterations']} of {planned}, by {summary['stopped_by']}"


def summary_table(agents: Summary, roles: Summary) -> str:
    """Formats each role's and agent's means at the start and end of training, and their change."""
    rows = labelled(agents, roles)
    name_width = 2 + max(len(name) for name in rows)
    lines = ["", f"{'':{name_width}}{'metric':18}{'start':>9}{'end':>9}{'change':>9}"]
    for name, metrics in rows.items():
        for metric, values in metrics.items():
            # Round first; otherwise -0.0001 would be printed as -0.000.
            numbers = "".join(
                f"{round(values[key], 3) + 0.0:9.3f}" for key in ("start", "end", "change")
            )
            lines.append(f"{name:{name_width}}{metric:18}{numbers}")
    lines.append(
        f"Means over the first {WINDOW} and the last {WINDOW} iterations; in runs shorter than {2 * WINDOW}, over the "
        "first and the last half."
    )
    return "\n".join(lines)


def sample_table(
    before: Mapping[str, Sequence[Sample]], after: Mapping[str, Sequence[Sample]]
) -> str:
    """Formats responses to the same queries before and after training, first the chain's, then the agents' own (solo).

    Args:
        before, after: solo samples by agent, one per query. With several roles, the key `chain` holds the whole
            chains' responses, role by role; each agent has its role of the first iteration.
    """
    first_agent = next(name for name in before if name != "chain")
    lines = []
    for row, sample in enumerate(before[first_agent]):
        if "chain" in after:
            answers = _chain_answers(before, after, row, queries=len(before[first_agent]))
        else:
            answers = {"before": sample} | {agent: samples[row] for agent, samples in after.items()}
        width = max(len(label) for label in answers)
        lines.append(f"\n{one_line(sample['query'])}")
        lines += [f"{name}: {one_line(str(value))}" for name, value in sample["columns"].items()]
        for label, answer in answers.items():
            lines.append(
                f"  {label:{width}} {_reward(answer):+7.2f}  {one_line(answer['completion'])}"
            )
    return "\n".join(lines)


def _reward(answer: Sample) -> float:
    """Returns the task reward plus any team reward, as in the progress lines."""
    return answer["task_reward"] + answer.get("team_reward", 0.0)


def _chain_answers(
    before: Mapping[str, Sequence[Sample]],
    after: Mapping[str, Sequence[Sample]],
    row: int,
    queries: int,
) -> dict[str, Sample]:
    """Returns the answers to one query, by label."""
    answers = {}
    for stage, by_agent in (("before", before), ("after", after)):
        for answer in by_agent["chain"][row::queries]:
            answers[f"{stage}: {answer['agent']} as {answer['role']}"] = answer
    pioneer = after["chain"][row]["agent"]  # the pioneer answers alone in the chain, too
    for agent, samples in after.items():
        if agent not in ("chain", pioneer):
            answers[f"after: {agent} solo"] = samples[row]
    return answers


def interval_cell(row: Mapping[str, Any], metric: str) -> str:
    """Formats a metric with METRIC_ci, the half-width of its interval, which may be None.

    A metric without METRIC_ci, such as a number of calls, stands alone. The cell is empty if the row lacks the metric.
    """
    if metric not in row:
        return ""
    if f"{metric}_ci" not in row:
        return f"{row[metric]:g}"
    half_width = row[f"{metric}_ci"]
    if half_width is None:
        return f"{row[metric]:.3f} (no interval)"
    return f"{row[metric]:.3f} ± {half_width:.3f}"


def interval_rows(
    rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]
) -> list[dict[str, str]]:
    """Returns an evaluation's rows by column title: `model`, and each metric with its interval."""
    return [
        {"model": row["name"]}
        | {title: interval_cell(row, metric) for metric, title in titles.items()}
        for row in rows
    ]


def interval_table(
    rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str], width: int | None = None
) -> str:
    """Formats a line per model, with each metric and the half-width of its interval (METRIC_ci).

    Metrics that do not fit side by side go into further tables below.

    Args:
        rows: numbers, each row with the `name` of its model. A row with only a name is a heading.
        titles: the metrics' titles.
        width: characters per line; None: the terminal's width, or 80.
    """
    width = width or shutil.get_terminal_size().columns
    names = [row["name"] for row in rows]
    name_width = max(len(row["name"]) for row in rows if len(row) > 1)
    tables: list[list[str]] = []  # the lines of each table
    for part in _parts(rows, titles, width - name_width):
        height = max(len(title) for title, _ in part)
        lines = [f"{name:{name_width}}" for name in [*[""] * height, *names]]
        for title, cells in part:
            column = [*[""] * (height - len(title)), *title, *cells]
            column_width = max(len(cell) for cell in column)
            lines = [
                f"{line}  {cell:>{column_width}}" for line, cell in zip(lines, column, strict=True)
            ]
        tables.append([line.rstrip() for line in lines])
    return "\n\n".join("\n".join(lines) for lines in tables)


def _parts(
    rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str], width: int
) -> list[list[tuple[list[str], list[str]]]]:
    """Splits columns into tables that fit `width`. A column is the lines of its title, and its cells."""
    parts: list[list[tuple[list[str], list[str]]]] = []
    free = 0
    for metric, title in titles.items():
        cells = [interval_cell(row, metric) for row in rows]
        title_lines = textwrap.wrap(title, max(len(cell) for cell in cells), break_long_words=False)
        column_width = 2 + max(len(text) for text in [*title_lines, *cells])
        if not parts or column_width > free:
            parts.append([])
            free = width
        parts[-1].append((title_lines, cells))
        free -= column_width
    return parts


def query_label(query: str, columns: Mapping[str, Any]) -> str:
    """Formats a query with the columns that prompts and rewards use, as in `Name one. [letter: a]`."""
    shown = ", ".join(f"{name}: {value}" for name, value in columns.items())
    return f"{query} [{shown}]" if shown else query


# Escapes

MARKUP = "<>&|`*_[]#~\\$"  # characters with a meaning in Markdown or HTML
# Characters that act on their surroundings: control characters, direction marks, line separators, lone surrogates,
# and tags, which carry invisible text. Spaces of other widths, and the joiners of Persian words and emoji, are kept.
ACTING = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
    r"|[\U000e0000-\U000e007f]"
)


def one_line(text: str) -> str:
    """Escapes characters that act on their surroundings, including line breaks."""
    return ACTING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable(text: str) -> str:
    """Escapes characters that act on their surroundings, except line breaks."""
    return "\n".join(one_line(line) for line in text.split("\n"))


def markdown(text: str) -> str:
    """Escapes a text so that Markdown shows it verbatim, on one line."""
    text = one_line(text)
    # Underscores inside a word, as in agent_1, have no effect.
    harmless = {match.start() for match in re.finditer(r"(?<=[^\W_])_(?=[^\W_])", text)}
    characters = []
    for position, character in enumerate(text):
        is_markup = character in MARKUP and position not in harmless
        characters.append(f"&#{ord(character)};" if is_markup else character)
    return "".join(characters).strip()
