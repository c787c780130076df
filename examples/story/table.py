"""The team reward of stories and its parts, as a Markdown table; then the first stories before and after.

    python examples/story/table.py PAIR ALONE

Both are folders of evaluations (`python -m cory.evaluation RUN`): of the pair's run, and of the run of one agent that
writes both paragraphs in one call.
"""

import statistics
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # For a checkout that is not installed.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from rewards import parts

from cory.evaluation.folder import read_responses
from cory.metrics import mean_interval
from cory.report.escape import printable

SHOWN = 5
Chains = list[list[list[str]]]  # query by query, the responses of each chain by role


def chains_of(folder: Path, row: str) -> Chains:
    """All stories of the row whose name ends so, such as `agent_2 after agent_1`."""
    records = read_responses(folder)
    name = next(model for model, _ in records if model.split("/")[-1] == row)
    chains = []
    for query in sorted(query for model, query in records if model == name):
        record: dict[str, Any] = records[name, query]
        roles = [record["completions"]]
        if record["read"] is not None:
            roles.insert(0, records[record["read"], query]["completions"])
        chains.append([list(chain) for chain in zip(*roles, strict=True)])
    return chains


def table(pair: Path, alone: Path) -> str:
    """A row for each writer: the mean team reward and its parts, with intervals over queries."""
    writers = {
        "pair, untrained": chains_of(pair, "base after itself"),
        "pair": chains_of(pair, "agent_2 after agent_1"),
        "one agent, untrained": chains_of(alone, "base"),
        "one agent": chains_of(alone, "agent_1"),
    }
    names = list(parts(writers["pair"][0][0]))
    lines = [
        f"| writer | team reward | standard deviation | {' | '.join(names)} |",
        "|---|---|---|" + "---|" * len(names),
    ]
    for writer, queries in writers.items():
        by_query = [[parts(chain) for chain in chains] for chains in queries]
        rewards = [
            [statistics.fmean(values.values()) for values in of_query] for of_query in by_query
        ]
        mean, half_width = mean_interval([statistics.fmean(of_query) for of_query in rewards])
        spread = statistics.stdev([reward for of_query in rewards for reward in of_query])
        cells = [
            f"{statistics.fmean(values[name] for of_query in by_query for values in of_query):.2f}"
            for name in names
        ]
        lines.append(
            f"| {writer} | {mean:.3f} ± {half_width:.3f} | {spread:.3f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def stories(pair: Path) -> str:
    """The pair's stories to the first queries, untrained and trained."""
    before = chains_of(pair, "base after itself")
    after = chains_of(pair, "agent_2 after agent_1")
    lines = ["| before | after |", "|---|---|"]
    for old, new in list(zip(before, after, strict=True))[:SHOWN]:
        cells = ["<br>".join(f"`{in_a_cell(text)}`" for text in chains[0]) for chains in (old, new)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def in_a_cell(text: str) -> str:
    """A model's text as it can stand in a cell of a table, as code."""
    return " ".join(printable(text).replace("`", "'").replace("|", "/").split())


if __name__ == "__main__":
    of_pair, of_alone = map(Path, sys.argv[1:])
    print(table(of_pair, of_alone))
    print(f"\n{stories(of_pair)}")
