"""Task reward by role at the end of runs, mean ± standard deviation over seeds, as a Markdown table.

python examples/lookout/table.py runs/lookouts/*      # folders GROUP-SEED
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

LAST = 10  # iterations


def table(runs: list[Path]) -> str:
    """A row per group of runs: mean task reward of both roles' responses over the last iterations."""
    ends: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        last = [row for row in rows if row["iteration"] > rows[-1]["iteration"] - LAST]
        for role in ("pioneer", "observer"):
            rewards = [row["task_reward"] for row in last if row["role"] == role]
            ends[run.name.rpartition("-")[0] or run.name][role] += (
                [statistics.fmean(rewards)] if rewards else []
            )
    lines = ["| runs | n | lookout | helmsman |", "|---|---|---|---|"]
    for group, roles in ends.items():
        cells = [spread(roles["pioneer"]), spread(roles["observer"])]
        lines.append(f"| {group} | {len(roles['pioneer'])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Mean ± standard deviation."""
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else ""
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"


if __name__ == "__main__":
    print(table(sorted(map(Path, sys.argv[1:]))))
