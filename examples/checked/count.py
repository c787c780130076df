"""Counts chains by what the pioneer wrote and whether the observer was right.

A chain is a pioneer's solution with the observer's answer to it.

python examples/checked/count.py runs/experiments/tiny/checked/evaluation > results/checked/corrections.csv
"""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

from cory.run.folder import read_rows  # noqa: E402
from examples.checked.check import corrections  # noqa: E402


def main() -> None:
    chains: Counter[tuple[str, bool, bool]] = Counter()
    right: Counter[tuple[str, bool, bool]] = Counter()
    for file in sorted(Path(sys.argv[1]).glob("*/responses.jsonl")):
        group = file.parent.name.rpartition("-seed")[0]
        records = read_rows(file)
        by_query = {(record["model"], record["query"]): record for record in records}
        for record in records:
            if record["read"] is None or record["model"].startswith("base"):
                continue
            first = by_query[record["read"], record["query"]]
            answers = zip(first["completions"], first["rewards"], record["rewards"], strict=True)
            for solution, solution_reward, reward in answers:
                kind = (group, solution_reward == 1, bool(corrections(solution)))
                chains[kind] += 1
                right[kind] += reward == 1

    print("group,pioneer_right,wrong_calculation,chains,observer_right")
    for kind in sorted(chains):
        print(*kind, chains[kind], right[kind], sep=",")


if __name__ == "__main__":
    main()
