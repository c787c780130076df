"""Right answers by who chooses among several, at equal calls, as a Markdown table; then five queries before and after.

    python examples/verifier/table.py EVALUATION PAIR [PAIR ...] ALONE

EVALUATION is the folder of `python -m cory.evaluation PAIR [PAIR ...] ALONE --samples 8`: runs of solver and verifier
and the run of one agent alone. A verified choice among n answers makes 2n calls, as a vote of 2n answers does.
"""

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # For a checkout that is not installed.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from rewards import accepts, number

from cory.evaluation.choices import answers, first_accepted, majority, reward_at_k, verdicts
from cory.evaluation.folder import read_responses
from cory.metrics import mean_interval, pass_at_k
from cory.report.escape import printable

N = 4  # answers that the verifier chooses from
SHOWN = 5
Records = list[dict[str, Any]]  # of one row of the evaluation, query by query


def of_row(folder: Path, name: str) -> Records:
    """The records of a row, such as `verifier_toy/agent_2 after agent_1`."""
    records = read_responses(folder)
    return [records[key] for key in sorted(records) if key[0] == name]


def of_run(folder: Path, name: str) -> tuple[Records, Records]:
    """The answers of a run's solver, and the verdicts on them."""
    of_pair = of_row(folder, f"{name}/agent_2 after agent_1")
    return of_row(folder, f"{name}/agent_1"), of_pair or of_row(
        folder, f"{name}/agent_1 after itself"
    )


def one(solver: Records) -> list[float]:
    """Share of right answers, for each query."""
    return [sum(row["rewards"]) / len(row["rewards"]) for row in solver]


def vote(solver: Records, k: int) -> list[float]:
    """Share of right answers by a vote of k, for each query."""
    return [
        reward_at_k(majority, answers(number, row["completions"]), row["rewards"], k)
        for row in solver
    ]


def verified(solver: Records, verifier: Records) -> list[float]:
    """Share of right answers by the first one of N that the verifier accepts, for each query."""
    return [
        reward_at_k(first_accepted, verdicts(accepts, judge["completions"]), row["rewards"], N)
        for row, judge in zip(solver, verifier, strict=True)
    ]


def oracle(solver: Records) -> list[float]:
    """The probability that one of N answers is right, for each query: a choice by who knows the right one."""
    return [pass_at_k(len(row["rewards"]), row["rewards"].count(1.0), N) for row in solver]


def table(folder: Path, runs: list[str]) -> str:
    """A row for each run, and below it the differences that decide. The last run is that of one agent alone."""
    choices = {
        "one answer, 1 call": lambda solver, _: one(solver),
        f"vote of {N}, {N} calls": lambda solver, _: vote(solver, N),
        f"vote of {2 * N}, {2 * N} calls": lambda solver, _: vote(solver, 2 * N),
        f"verified, of {N}, {2 * N} calls": verified,
        f"best of {N}, oracle": lambda solver, _: oracle(solver),
    }
    records = {"untrained": (of_row(folder, "base"), of_row(folder, "base after itself"))}
    records |= {run: of_run(folder, run) for run in runs}
    lines = [f"| | {' | '.join(choices)} |", "|---|" + "---|" * len(choices)]
    for name, of_name in records.items():
        cells = [interval(choose(*of_name)) for choose in choices.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")

    lines += [
        "",
        f"| verified, of {N}, minus | vote of {2 * N}, same solver | vote of {2 * N}, {runs[-1]} |",
    ]
    lines.append("|---|---|---|")
    alone = vote(records[runs[-1]][0], 2 * N)
    for name in runs[:-1]:
        solver, verifier = records[name]
        chosen = verified(solver, verifier)
        cells = [
            interval([a - b for a, b in zip(chosen, votes, strict=True)])
            for votes in (vote(solver, 2 * N), alone)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def interval(values: list[float]) -> str:
    """Mean ± half-width of the 95 % interval over queries."""
    mean, half_width = mean_interval(values)
    return f"{mean:.3f} ± {half_width:.3f}"


def samples(folder: Path, run: str) -> str:
    """The first queries with an answer and its verdict, untrained and trained."""
    before = of_row(folder, "base"), of_row(folder, "base after itself")
    lines = [
        "| query's prompt | answer before | verdict | answer after | verdict |",
        "|---|---|---|---|---|",
    ]
    for rows in list(zip(*before, *of_run(folder, run), strict=True))[:SHOWN]:
        prompt = rows[0]["prompt"].splitlines()[-1]
        texts = [f"`{in_a_cell(row['completions'][0])}`" for row in rows]
        lines.append(f"| `{prompt}` | {' | '.join(texts)} |")
    return "\n".join(lines)


def in_a_cell(text: str) -> str:
    """A model's text as it can stand in a cell of a table, as code."""
    return " ".join(printable(text).replace("`", "'").replace("|", "/").split())


if __name__ == "__main__":
    evaluation = Path(sys.argv[1])
    names = [Path(run).name for run in sys.argv[2:]]
    print(table(evaluation, names))
    print(f"\n{samples(evaluation, names[0])}")
