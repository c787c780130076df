"""Measures how much of an answer is copied from the answer that it reads: the share of its word four-grams.

    python -m results.copied runs/experiments/SCALE/NAME/evaluation --out results/NAME_SCALE/copied.csv

Each folder of the evaluation is a run, GROUP-seedN. Rows that --out has are kept, as responses are not committed. The
chains of each run's first five queries go to texts.jsonl beside --out.
"""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from cory.command import Arguments, main
from cory.run.folder import read_rows, write_text

N = 4  # words of a gram
EXAMPLES = 5  # queries whose chains are kept
COLUMNS = ("run", "answers", "copied_four_grams", "responses")


def share_copied(text: str, read: str) -> float | None:
    """Returns the share of a text's word four-grams that stand in what was read; None without a four-gram.

    >>> share_copied("a good film with love in it", "it was a good film with joy")
    0.25
    """
    grams = four_grams(text)
    if not grams:
        return None
    known = set(four_grams(read))
    return sum(gram in known for gram in grams) / len(grams)


def four_grams(text: str) -> list[tuple[str, ...]]:
    """Returns the runs of four words in a text."""
    words = text.split()
    return [tuple(words[start : start + N]) for start in range(len(words) - N + 1)]


def of_run(folder: Path) -> tuple[list[dict[str, str]], list[dict[str, object]]]:
    """Returns a row for each chain of a run's evaluation, and the chains of its first queries."""
    records = read_rows(folder / "responses.jsonl")
    by_query = {(record["model"], record["query"]): record for record in records}
    shares: dict[str, list[float]] = {}
    examples: list[dict[str, object]] = []
    for record in records:
        if record["read"] is None:
            continue
        first = by_query[record["read"], record["query"]]
        answers = record["model"].removeprefix(f"{folder.name}/")
        pairs = list(zip(record["completions"], first["completions"], strict=True))
        measured = [share_copied(text, read) for text, read in pairs]
        shares.setdefault(answers, []).extend(share for share in measured if share is not None)
        if record["query"] < EXAMPLES:
            text, read = pairs[0]
            example = {"run": folder.name, "answers": answers, "query": first["prompt"]}
            examples.append(example | {"read": read, "wrote": text})
    rows = [
        {
            "run": folder.name,
            "answers": answers,
            "copied_four_grams": f"{sum(of_chain) / len(of_chain):.4f}",
            "responses": str(len(of_chain)),
        }
        for answers, of_chain in shares.items()
    ]
    return rows, examples


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m results.copied`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument("folder", help="The evaluations of an experiment's runs")
    parser.add_argument("--out", required=True, help="CSV file; texts.jsonl is written beside it")
    args = parser.parse_args(argv)
    out = Path(args.out)
    texts = out.with_name("texts.jsonl")
    rows = list(csv.DictReader(out.open(encoding="utf-8"))) if out.exists() else []
    examples = read_rows(texts)
    known = {row["run"] for row in rows}
    for file in sorted(Path(args.folder).glob("*/responses.jsonl")):
        if file.parent.name not in known:
            rows_of_run, examples_of_run = of_run(file.parent)
            rows += rows_of_run
            examples += examples_of_run
    lines = [",".join(COLUMNS), *(",".join(row[name] for name in COLUMNS) for row in rows)]
    write_text(out, "\n".join(lines) + "\n")
    write_text(texts, "".join(json.dumps(example) + "\n" for example in examples))


if __name__ == "__main__":
    main(command_line)
