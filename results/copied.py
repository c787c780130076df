"""Measures how much agents copy from the answer that they read: the share of their answer's word four-grams that
also occur in the answer read.

    python -m results.copied runs/experiments/SCALE/NAME/evaluation --out results/NAME_SCALE/copied.csv

Each folder of the evaluation belongs to a run, GROUP-seedN. Rows already in --out are kept, because they could not
be computed again: the repository does not keep the responses. The answers to each run's first five queries, with the
answers that they read, go to texts.jsonl beside --out. The command prints a table with the mean share of each group.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from cory.command import Arguments, main
from cory.run.folder import read_rows, write_text
from study.cells import Rows, markdown_table

N = 4  # words per gram
EXAMPLES = 5  # number of queries whose answers are kept
COLUMNS = ("run", "answers", "copied_four_grams", "responses")


def share_copied(text: str, read: str) -> float | None:
    """Returns the share of a text's word four-grams that also occur in `read`; None without a four-gram.

    >>> share_copied("a good film with love in it", "it was a good film with joy")
    0.25
    """
    grams = four_grams(text)
    if not grams:
        return None
    read_grams = set(four_grams(read))
    return sum(gram in read_grams for gram in grams) / len(grams)


def four_grams(text: str) -> list[tuple[str, ...]]:
    """Returns a text's sequences of four words."""
    words = text.split()
    return [tuple(words[start : start + N]) for start in range(len(words) - N + 1)]


def of_run(folder: Path) -> tuple[list[dict[str, str]], list[dict[str, object]]]:
    """Returns a row per chain of a run, such as `agent_2 after agent_1`, and the run's answers to the first queries."""
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
            "copied_four_grams": f"{sum(chain_shares) / len(chain_shares):.4f}",
            "responses": str(len(chain_shares)),
        }
        for answers, chain_shares in shares.items()
    ]
    return rows, examples


def by_group(rows: Sequence[Mapping[str, str]]) -> Rows:
    """Returns a row per group and way of answering: the mean share over runs, the smallest and the largest."""
    shares: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        group = row["run"].rpartition("-seed")[0]
        shares.setdefault((group, row["answers"]), []).append(float(row["copied_four_grams"]))
    return [
        {
            "group": group,
            "answers": answers,
            "n": str(len(values)),
            "copied four-grams": f"{fmean(values):.2f}",
            "smallest, largest run": f"{min(values):.2f}, {max(values):.2f}",
        }
        for (group, answers), values in sorted(shares.items())
    ]


def command_line(argv: Sequence[str] | None = None) -> None:
    """Runs `python -m results.copied`; see the module's docstring."""
    parser = Arguments(__doc__)
    parser.add_argument("folder", help="Folder with the evaluations of an experiment's runs")
    parser.add_argument("--out", required=True, help="CSV file; texts.jsonl is written beside it")
    args = parser.parse_args(argv)
    out = Path(args.out)
    texts = out.with_name("texts.jsonl")
    rows = list(csv.DictReader(out.open(encoding="utf-8"))) if out.exists() else []
    examples = read_rows(texts)
    measured = {row["run"] for row in rows}
    for file in sorted(Path(args.folder).glob("*/responses.jsonl")):
        if file.parent.name not in measured:
            run_rows, run_examples = of_run(file.parent)
            rows += run_rows
            examples += run_examples
    lines = [",".join(COLUMNS), *(",".join(row[name] for name in COLUMNS) for row in rows)]
    write_text(out, "\n".join(lines) + "\n")
    write_text(texts, "".join(json.dumps(example) + "\n" for example in examples))
    print(markdown_table(by_group(rows)))


if __name__ == "__main__":
    main(command_line)
