"""Writes a page that compares an experiment's runs, or any runs: held-out results first, then training.

    python -m study.compare results/imdb_cures                 # a folder of results; the runs are not needed
    python -m study.compare runs/cory-seed* runs/ppo-seed*     # runs; names that differ only in -seedN form a group
    python -m study.compare results/notes --role answerer      # curves of one role, for example if the others earn 0

The output is comparison.md with its figures. Given folders of runs, the command also saves the numbers that it read
from them (runs.csv, ...), so the page can be made again without the runs. for_paper/ has the tables as CSV and LaTeX,
and the figures as PDF. Definitions: docs/metrics.md, "Comparison".
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from cory.command import Arguments, main
from cory.errors import UserError, counted
from cory.run.folder import short_labels, write_text
from cory.run.settings import FREE, differences, read_settings
from cory.run.tables import markdown
from study import comparison, held_out, plots
from study.cells import Rows, column_title, difference_cell, markdown_table
from study.frame import (
    LAST,
    Study,
    described,
    join,
    make_folder,
    metric_columns,
    names_eta,
    of_run,
    passes,
    read_study,
    write_study,
)
from study.intervals import FEWEST, difference, direction
from study.plan import is_single

# Keys that may differ between runs of a group, as the data may depend on the seed.
SEED_KEYS = FREE | {"seed", *(f"fingerprint.{key}" for key in ("dataset_sha256", "rows"))}
FOR_PAPER = "for_paper"
FIGURES = ("curves", "paths", "pass_at_k", "frontier")
INTERVALS = (
    "Values are means over n seeds ± the half-width of their 95 % interval by Student's t; bands and bars in figures "
    "show the same intervals. Differences are to {}, paired by seed. Combined reward: earned reward - {} * KL."
)
TRAINING = (
    "Values are means over a run's agents, their roles, and the last 10 iterations (all iterations of a shorter run). "
    "These numbers do not compare methods at equal calls: a pair's observer has read a first answer, a single agent "
    "has not. A run has collapsed if, over any ten iterations, an agent's distinct-2 is below half of an untrained "
    "agent's at the same response length, or its KL is above guards.kl_bound."
)
CURVES = "Running means over up to 10 iterations, {}. Bands need at least three runs."
PATHS = (
    "Lines show the KL at which {}'s task reward, averaged over ten iterations, first reaches a level; markers show "
    "the end of training. Where two groups' lines coincide, they have the same KL at the same task reward."
)


def write_page(
    study: Study,
    out: Path,
    title: str = "Comparison",
    question: str = "",
    command: str = "",
    role: str | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Writes comparison.md and its figures into `out`, and removes an earlier page's figures.

    Args:
        study: the runs.
        out: the folder to write.
        title: the page's title.
        question: the experiment's question.
        command: the command that repeats the experiment.
        role: the role whose curves and KL at equal task reward are shown. None: curves for each agent, and the KL of
            the first role, which reads only the query.
        notes: caveats to list before those that follow from the runs' data.

    Returns:
        The path of comparison.md.
    """
    (out / FOR_PAPER).mkdir(parents=True, exist_ok=True)
    for name in FIGURES:
        (out / f"{name}.png").unlink(missing_ok=True)
        (out / FOR_PAPER / f"{name}.pdf").unlink(missing_ok=True)
    parts = [f"# {title}\n", *([f"{question}\n"] if question else [])]
    if command:
        parts.append(f"```bash\n{command}\n```\n")
    versions = ", ".join(sorted({_short(version) for version in study.runs["version"]}))
    groups = counted(len(study.groups), "group")
    parts.append(f"{counted(len(study.runs), 'run')} of {groups}; commit {versions}.\n")
    eta = "each run's own eta" if study.eta is None else f"{study.eta:g}"
    if names_eta(study):
        eta += " (held out: the evaluation command's eta)"
    parts.append(INTERVALS.format(study.baseline, eta) + "\n")
    if sentences := verdicts(study):
        parts += ["**In words:**\n", *(f"* {sentence}" for sentence in sentences), ""]
    caveats = [*notes, *_caveats(study)]
    if caveats:
        parts += ["**Caveats:**\n", *(f"* {caveat}" for caveat in caveats), ""]
    if len(study.held_out):
        parts += _held_out(study, out)
    parts += _training(study, out, role)
    if study.over:
        parts.append(f"## Over {study.over}\n")
        parts.append(_figure(out, "frontier", plots.plot_frontier, study))
    write_text(out / "comparison.md", "\n".join(parts))
    return out / "comparison.md"


def _short(version: str) -> str:
    """Shortens a commit to twelve digits; a suffix such as `-dirty` stays."""
    commit, *dirty = version.split("-", 1)
    return "-".join([commit[:12], *dirty])


def _section(out: Path, name: str, heading: str, note: str, rows: Rows) -> list[str]:
    """Returns a section with a table, which is also written as CSV and LaTeX."""
    table = pd.DataFrame(rows)
    write_text(out / FOR_PAPER / f"{name}.csv", table.to_csv(index=False))
    latex = table.to_latex(index=False, escape=True)
    minus = re.sub(r"(?<![\w-])-(?=\d)", "$-$", latex)  # LaTeX sets a plain - as a hyphen
    write_text(out / FOR_PAPER / f"{name}.tex", minus)
    return [f"## {heading}\n", *([note + "\n"] if note else []), markdown_table(rows)]


def _figure(out: Path, name: str, plot: Callable[..., None], study: Study, *args: Any) -> str:
    """Draws a figure as PNG and PDF, and returns its Markdown."""
    plot(study, out / FOR_PAPER / f"{name}.pdf", *args)
    plot(study, out / f"{name}.png", *args)
    return f"![{name}]({name}.png)\n"


def _held_out(study: Study, out: Path) -> list[str]:
    metric = held_out.judged_by(study)
    rows = held_out.held_out(study, metric)
    heading = f"Held out: {column_title(metric)}"
    parts = _section(out, "held_out", heading, held_out.NOTE, rows)
    if len(passes(study)) > 1:
        parts.append(_figure(out, "pass_at_k", plots.plot_held_out_passes, study))
    by_agent = held_out.held_out_by_agent(study, metric_columns(study.held_out))
    return parts + _section(out, "held_out_by_agent", "Held out, by agent", "", by_agent)


def _training(study: Study, out: Path, role: str | None) -> list[str]:
    parts = _section(out, "end_of_training", "End of training", TRAINING, comparison.ends(study))
    if len(study.metrics):
        # The KL of a frozen agent is recorded as 0, because no update measures it.
        learning = replace(study, metrics=study.without_frozen(study.metrics))
        shown = learning.of_role(role) if role else learning
        parts.append(_figure(out, "curves", plots.plot_curves, shown))
        parts.append(CURVES.format(f"of the {role}" if role else "by agent") + "\n")
        path_role = role or study.first_role
        if (
            study.metrics["iteration"].max() >= 2 * LAST
        ):  # in shorter runs, the lines would have few points
            parts.append(_figure(out, "paths", plots.plot_paths, study, path_role))
            parts.append(PATHS.format(f"the {path_role}") + "\n")
    by_agent = comparison.ends_by_agent(study)
    return parts + _section(out, "end_by_agent", "End of training, by agent", "", by_agent)


def verdicts(study: Study) -> list[str]:
    """Returns sentences on each group's difference from the baseline.

    Each group has two sentences on held-out results, for one call and for two. Without an evaluation, it has one
    sentence on the end of training.
    """
    metric = held_out.judged_by(study)
    if len(study.held_out):
        measured = {
            f"held out, {title}": held_out.held_out_by_seed(study, metric, calls)
            for calls, title in reversed(held_out.CALLS.items())
        }
    else:
        measured = {"at the end of training": study.by_seed(metric)}
    lines = []
    for name in study.groups:
        base = study.base_of(name)
        for measurement, by_seed in measured.items():
            if base == name or not {base, name} <= set(by_seed):
                continue
            interval = difference(by_seed[name].dropna(), by_seed[base].dropna())
            verdict = direction(interval) or f"no verdict from fewer than {FEWEST} seeds"
            text = difference_cell(by_seed, name, base, metric)
            quantity = f"{column_title(metric)} {measurement}"
            seeds = counted(interval.n, "seed")
            lines.append(f"{name} against {base}, {quantity}: {text}, {seeds}: {verdict}.")
    return lines


def _caveats(study: Study) -> list[str]:
    """Returns notes on what makes the comparison weaker than it looks."""
    notes = []
    rewards = ["fingerprint.reward", "fingerprint.reward_sha256"]
    if len(study.runs[rewards].drop_duplicates()) > 1:
        notes.append(
            "runs were trained with different rewards, or with different versions of a reward's source code"
        )
    seeds = study.runs.groupby("group", sort=False)["seed"].agg(set)
    for name in study.groups:
        base = study.base_of(name)
        if base is None:
            notes.append(
                f"{name}: not compared, because {study.baseline} has no run with the same value"
            )
        elif seeds[name] != seeds[base]:
            notes.append(f"{name} and {base} have different seeds")
    lengths = sorted(set(study.runs["planned"]))
    if len(lengths) > 1:
        notes.append(f"runs have different lengths: {', '.join(map(str, lengths))} iterations")
    for run in study.ended_early.itertuples():
        notes.append(
            f"{run.group}, seed {run.seed}: ended after iteration {run.iterations} by "
            + markdown(str(run.stopped_by))
        )
    return notes


def read_runs(folders: Sequence[Path]) -> Study:
    """Reads runs into a study. Runs whose folder names differ only in a final `-seedN` form a group.

    Groups are named after their folders, without the parts that all groups share (`short_labels`). The baseline is the
    first group with a single agent, or the first group if none has.

    Raises:
        UserError: a folder is not a run's, or a group's runs differ in more than their seed.
    """
    groups = [re.sub(r"-seed\d+$", "", folder.name) for folder in folders]
    labels = short_labels(groups)
    first_folders: dict[str, Path] = {}
    studies = {}
    baselines = []
    for folder, group in zip(folders, groups, strict=True):
        name = labels[group]
        settings = read_settings(folder)
        first = first_folders.setdefault(name, folder)
        changes = differences(read_settings(first), settings, SEED_KEYS)
        run = (name, settings["seed"])
        if changes or run in studies:
            problem = ", ".join(changes) or f"seed {settings['seed']} twice"
            raise UserError(
                f"runs: expected runs of {name} that differ only in their seed, got {problem}"
            )
        if is_single(settings):
            baselines.append(name)
        columns = {"group": name, "family": name, "over": "", "value": "", "baseline": False}
        columns |= {"evaluation": "", "experiment": "", "scale": ""}
        studies[run] = of_run(folder, described(settings) | columns)
    return join(list(studies.values())).against([*baselines, *first_folders][0])


def command_line(argv: Sequence[str] | None = None) -> None:
    """Runs `python -m study.compare`; see the module's docstring."""
    parser = Arguments(__doc__)
    parser.add_argument("runs", nargs="+", help="Folders of runs, or a folder of results")
    parser.add_argument("--out", default="runs/comparison", help="Folder for the page")
    parser.add_argument(
        "--baseline", help="Group to compare with. Default: the first with a single agent"
    )
    parser.add_argument(
        "--role",
        help="Role whose curves and KL at equal task reward are shown. Default: curves for each agent, and the first "
        "role's KL",
    )
    args = parser.parse_args(argv)
    if not args.out.strip():
        raise UserError(f"--out: expected the path of a folder, got {args.out!r}")
    out = Path(args.out)
    make_folder("--out", out)
    first = Path(args.runs[0])
    if (first / "runs.csv").is_file():
        if len(args.runs) > 1:
            raise UserError(
                f"runs: expected folders of runs, or one folder of results, got {first} and others"
            )
        study = read_study(first)
    else:
        if (out / "runs.csv").is_file() and any(read_study(out).runs["experiment"]):
            raise UserError(
                f"--out: expected a folder without an experiment's rows, got {args.out!r}"
            )
        # A pattern also matches the log files beside an experiment's runs.
        folders = [Path(name) for name in args.runs if not Path(name).is_file()]
        if not folders:
            raise UserError(f"expected folders of runs, got only files: {' '.join(args.runs)}")
        study = read_runs(folders)
        write_study(study, out)
    if args.baseline is not None:
        study = study.against(args.baseline)
    page = write_page(study, out, role=args.role)
    print(page.read_text(encoding="utf-8"))
    print(f"Written to {page}")


if __name__ == "__main__":
    main(command_line)
