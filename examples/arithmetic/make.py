"""Makes sums for a small LLM to solve: train.jsonl and test.jsonl, from Reasoning Gym's `chain_sum`.

    pip install reasoning-gym
    python examples/arithmetic/make.py            # seconds, into examples/arithmetic/out
    python examples/arithmetic/make.py FOLDER     # into another folder

Two numbers of one or two digits, added or subtracted. No sum of test.jsonl is in train.jsonl, in either order.
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    # For a checkout that is not installed.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from cory.cli.main import main
from study.make import make_into

FOLDER = Path(__file__).resolve().parent
ROWS = {"train": 4000, "test": 500}
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def make(folder: Path) -> None:
    """Fills `folder` with train.jsonl and test.jsonl: `prompt`, the question, and `answer`, a whole number."""
    import reasoning_gym

    drawn = reasoning_gym.create_dataset("chain_sum", size=4 * sum(ROWS.values()), seed=0, **SUMS)
    # 3 + 5 and 5 + 3 are one.
    unique = {(*sorted(row["question"].split()),): row for row in drawn}.values()
    rows = [
        json.dumps({"prompt": row["question"], "answer": row["answer"]}) + "\n" for row in unique
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(rows[: ROWS["train"]]))
    (folder / "test.jsonl").write_text("".join(rows[ROWS["train"] : sum(ROWS.values())]))


def command_line() -> None:
    """See the module."""
    make_into(FOLDER / "out", "arithmetic", ("train.jsonl", "test.jsonl"), make, __doc__)


if __name__ == "__main__":
    main(command_line)
