"""Writes the tables of README, docs and results from the files under results/.

    python -m study.tables            # rewrites all tables
    python -m study.tables --check    # fails if tables do not match the files, and names their pages

A table stands between two comments. The first comment describes the table:

    <!-- table: held_out imdb_noise_full_kl groups="PPO|CORY" -->
    <!-- end -->

A page with a line such as `<!-- frozen: c0f7e9e -->` is left unchanged. The line names the commit that made the page,
because the code that the page measures no longer exists. If an experiment's folder has no rows yet, the table says so.

A description has a kind, a source and options. The source is a folder under results/, or several folders with labels:
`LABEL: FOLDER|LABEL: FOLDER`. The tables of several folders are stacked, and the column `setting` has the labels. The
option `groups` names the groups, `metric` a single column, and `metrics` several columns, separated by commas.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pandas as pd

from cory.command import Arguments, main
from cory.errors import UserError
from cory.run.folder import write_text
from study import credit, held_out
from study.cells import Rows, markdown_table
from study.collapse import collapses
from study.confirmation import confirmed
from study.differences import HELD_OUT, differences
from study.equal_reward import ANY, at_all_readings, at_chosen_levels
from study.equal_reward import primary as primary_comparisons
from study.experiment_file import read_experiment
from study.frame import Study, read_study
from study.frontier import beaten, frontiers_apart
from study.method import against_one_agent
from study.plan import ROOT

NOT_RUN = "Not run yet.\n"  # replaces a table whose folder has no rows
PAGES = (
    "README.md",
    "docs/*.md",
    "results/README.md",
    "results/*/README.md",
    "examples/*/README.md",
)
START = "<!-- table: "
TABLE = re.compile(
    rf"^({START}([^\n]*?) -->\n)((?:(?!{START}).)*?)^(<!-- end -->)", re.DOTALL | re.MULTILINE
)
FROZEN = re.compile(r"^<!-- frozen: \w+ -->$", re.MULTILINE)


def held_out_table(study: Study, metric: str = "combined_reward", groups: str = "") -> Rows:
    """Compares groups with the baseline on held-out queries, in one call and in two."""
    return held_out.held_out(study, metric, _listed(groups, "|"))


def held_out_by_agent_table(study: Study, metrics: str, answers: str) -> Rows:
    """Shows groups on held-out queries, with a row for each way of answering that `answers` names."""
    rows = held_out.held_out_by_agent(study, _listed(metrics, ","))
    names = _listed(answers, "|")
    for name in names:
        if all(row["answers"] != name for row in rows):
            raise LookupError(f"no answers {name!r} among {[row['answers'] for row in rows]}")
    return [row for row in rows if row["answers"] in names]


def rivals_table(study: Study, chain: str, rivals: str, metric: str = "task_reward") -> Rows:
    """Compares a chain, `GROUP: ANSWERS`, with its rivals, `GROUP: ANSWERS|GROUP: ANSWERS`, on held-out queries."""
    answerings = [held_out.Answering(*pair) for pair in _listed_pairs(f"{chain}|{rivals}")]
    return held_out.against_rivals(study, answerings[0], answerings[1:], metric)


def primary_table(
    study: Study,
    pairs: str,
    levels: str,
    primary: str,
    columns: str,
    roles: str = "",
) -> Rows:
    """Compares pairs of groups: final values, and KL where the fitted task reward reaches a level.

    A pair has a row for each of `roles`. By default, these are `any`, which averages over an agent's roles, and the
    first role. `primary` names the primary comparisons, `ROLE: COLUMN|ROLE: COLUMN`, such as `any: ratio at 1`.
    """
    rows = primary_comparisons(
        study,
        _listed_pairs(pairs),
        [float(level) for level in _listed(levels, ",")],
        _listed_pairs(primary),
        _listed(roles, "|"),
    )
    return [{title: row[title] for title in _listed(columns, "|")} for row in rows]


def at_level_table(
    study: Study, compared: str, candidates: str, rise: str = "", corrected: str = ""
) -> Rows:
    """Compares pairs of groups in a role, `GROUP: GROUP: ROLE|...`: final values, and KL at a level of task reward.

    The level is chosen from `candidates` on the runs of the first five seeds (`chosen_level`). `rise=yes`: levels are
    relative to a run's task reward at the start. `corrected=yes`: the ratios at the level are primary.
    """
    levels = [float(level) for level in _listed(candidates, ",")]
    triples = _listed_triples(compared)
    return at_chosen_levels(study, triples, levels, rise == "yes", corrected == "yes")


def readings_table(study: Study, compared: str, candidates: str) -> Rows:
    """Compares pairs of groups in a role, `GROUP: GROUP: ROLE|...`, by the ratio of their KLs at equal task reward.

    A row has the ratio for each of three ways to read off the KL, and a verdict (study/readings.py).
    """
    levels = [float(level) for level in _listed(candidates, ",")]
    return at_all_readings(study, _listed_triples(compared), levels)


def method_table(study: Study, ours: str, candidates: str) -> Rows:
    """Compares the method with one PPO agent in a single row: in training, at equal task reward, and held out.

    `ours` names candidates for the method's group, `GROUP|GROUP`. The first one found in the folder is used.
    """
    levels = [float(level) for level in _listed(candidates, ",")]
    return against_one_agent(study, _listed(ours, "|"), "PPO", levels)


def frontier_table(study: Study, families: str) -> Rows:
    """Compares pairs of families (groups that differ in one key) by their hypervolumes. All pairs are primary."""
    return frontiers_apart(study, _listed_pairs(families))


def beaten_table(study: Study, calls: str = "0") -> Rows:
    """Counts, for each family and value of the swept key, the runs that another family's frontier beats, seed by seed.

    `calls`: see `beaten`.
    """
    return beaten(study, int(calls))


def collapses_table(study: Study, groups: str = "", primary: str = "") -> Rows:
    """Compares groups with the baseline by their time to collapse.

    `primary` names the groups whose differences are primary.
    """
    return collapses(study, _listed(groups, "|"), _listed(primary, "|"))


def differences_table(study: Study, metrics: str, calls: str = "1", groups: str = "") -> Rows:
    """Compares groups with the baseline by metrics at the end of training.

    A metric written `held out: METRIC` is taken from the evaluation, in one or two calls (`calls`).
    """
    return differences(study, _listed(metrics, ","), int(calls), _listed(groups, "|"))


KINDS: dict[str, Callable[..., Rows]] = {
    "held_out": held_out_table,
    "held_out_by_agent": held_out_by_agent_table,
    "rivals": rivals_table,
    "primary": primary_table,
    "at_level": at_level_table,
    "readings": readings_table,
    "method": method_table,
    "frontier": frontier_table,
    "beaten": beaten_table,
    "collapses": collapses_table,
    "differences": differences_table,
    "confirmed": confirmed,
}


AUDIT = "credit_audit"  # the kind of a table made from the rows of study.credit, which are not runs


@cache
def _study(source: str) -> Study:
    return read_study(ROOT / "results" / source)


def _listed_pairs(text: str) -> list[tuple[str, str]]:
    compared = []
    for pair in _listed(text, "|"):
        ours, _, rival = pair.partition(":")
        compared.append((ours.strip(), rival.strip()))
    return compared


def _listed_triples(text: str) -> list[tuple[str, str, str]]:
    triples = []
    for triple in _listed(text, "|"):
        ours, rival, role = (part.strip() for part in triple.split(":"))
        triples.append((ours, rival, role))
    return triples


def _listed(text: str, separator: str) -> list[str]:
    return [part.strip() for part in text.split(separator) if part.strip()]


def table(description: str) -> str:
    """Makes the table that a comment describes as `KIND SOURCE KEY=VALUE ...`.

    Raises:
        UserError: the kind, a source or a key does not exist.
    """
    try:
        kind, sources, options = _parsed(description)
    except ValueError as error:  # for example, an unclosed quotation mark
        raise UserError(f"table {description!r}: {error}") from None
    if kind not in (*KINDS, AUDIT):
        raise UserError(
            f"table: expected one of {sorted([*KINDS, AUDIT])} and its source, got {description!r}"
        )
    if kind == AUDIT:
        return markdown_table(
            credit.table(pd.read_csv(ROOT / "results" / sources[""] / credit.ROWS))
        )
    if any(_awaits_rows(folder) for folder in sources.values()):
        return NOT_RUN
    rows: Rows = []
    try:
        for setting, folder in sources.items():
            _check_names(_study(folder), options)
            folder_rows = KINDS[kind](_study(folder), **options)
            rows += [{"setting": setting, **row} if setting else row for row in folder_rows]
        return markdown_table(rows)
    except (TypeError, LookupError, ValueError) as error:
        raise UserError(f"table {description!r}: {type(error).__name__}: {error}") from None


def _awaits_rows(source: str) -> bool:
    """Whether a folder under results/, EXPERIMENT or EXPERIMENT_SCALE, belongs to an experiment without rows."""
    if (ROOT / "results" / source / "runs.csv").exists():
        return False
    experiments = []
    for file in (ROOT / "configs/experiments").glob("*.yaml"):
        scales = [f"{file.stem}_{scale}" for scale in read_experiment(file).scales]
        experiments += [file.stem, *scales]
    examples = [f"{file.parent.name}_{file.stem}" for file in (ROOT / "examples").glob("*/*.yaml")]
    return source in (*experiments, *examples)


def _check_names(study: Study, options: Mapping[str, str]) -> None:
    """Raises a LookupError if options name a group, role or metric that does not exist."""
    groups = _listed(options.get("groups", ""), "|")
    for pair in _listed_pairs(options.get("pairs", "")):
        groups += pair
    existing: dict[str, set[str]] = {
        "group": set(study.groups),
        "role": set(study.metrics["role"]),
        "metric": {*study.metrics, *study.final, *study.held_out},
    }
    metrics = _listed(options.get("metrics", options.get("metric", "")), ",")
    requested = {
        "group": groups,
        "role": [role for role in _listed(options.get("roles", ""), "|") if role != ANY],
        "metric": [metric.removeprefix(HELD_OUT) for metric in metrics],
    }
    for kind, names in requested.items():
        for name in names:
            if name not in existing[kind]:
                raise LookupError(f"no {kind} {name!r} among {sorted(existing[kind])}")


def _parsed(description: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """Returns a description's kind, folders by label (`setting`), and options; missing parts are empty."""
    kind, source, *words = [*shlex.split(description), "", ""]
    pairs = _listed_pairs(source) if ":" in source else [("", source)]
    sources = dict(pairs)
    if len(sources) < len(pairs) or not all(sources.values()):
        raise ValueError(f"expected a folder, or folders with distinct labels, got {source!r}")
    return kind, sources, dict(word.partition("=")[::2] for word in words if word)


def page_with_tables(text: str) -> str:
    """Makes all tables of a page again.

    Raises:
        UserError: a table cannot be made, or has no end.
    """
    for line in TABLE.sub("", text).splitlines():
        if line.startswith(START):
            raise UserError(f"expected <!-- end --> below each table, got none below {line}")
    return TABLE.sub(lambda match: f"{match[1]}{table(match[2])}{match[4]}", text)


def pages() -> list[Path]:
    """Returns the pages that may have tables, except frozen ones."""
    files = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    return [path for path in files if not FROZEN.search(path.read_text(encoding="utf-8"))]


def command_line(argv: Sequence[str] | None = None) -> None:
    """Runs `python -m study.tables`; see the module's docstring."""
    parser = Arguments(__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="Write nothing; fail if a table does not match the files",
    )
    args = parser.parse_args(argv)
    differ = []
    tables = 0
    for path in pages():
        text = path.read_text(encoding="utf-8")
        tables += len(TABLE.findall(text))
        try:
            made = page_with_tables(text)
        except UserError as error:
            raise UserError(f"{path.relative_to(ROOT)}: {error}") from None
        if made != text:
            differ.append(str(path.relative_to(ROOT)))
            if not args.check:
                write_text(path, made)
    if args.check and differ:
        raise UserError(
            f"expected the tables that python -m study.tables writes, got other tables in {', '.join(differ)}"
        )
    print(
        f"{tables} tables; {'written: ' + ', '.join(differ) if differ else 'all match the files'}"
    )


if __name__ == "__main__":
    main(command_line)
