"""The page of an experiment or of any runs: tables and figures, held out first, then training.

    python -m study.compare results/imdb_cures                 # from the files of a folder of results, without the runs
    python -m study.compare runs/cory-seed* runs/ppo-seed*     # runs; names that differ in -seedN alone are a group
    python -m study.compare results/notes --role answerer      # one role's curves, where others earn 0

Writes comparison.md, its figures, and of runs their rows; in for_paper/ tables as CSV and LaTeX, figures as PDF.
Definitions: docs/metrics.md, "Comparison".
"""

import re
from collections.abc import Callable, Sequence
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
    metric_columns,
    names_eta,
    of_run,
    passes,
    read_study,
    write_study,
)
from study.intervals import FEWEST, difference, direction
from study.plan import is_single

# Data may be drawn from the seed.
OF_SEED = FREE | {"seed", *(f"fingerprint.{key}" for key in ("dataset_sha256", "rows"))}
FOR_PAPER = "for_paper"
FIGURES = ("curves", "paths", "pass_at_k", "frontier")
INTERVALS = (
    "Values are means over n seeds ± the half-width of their 95 % interval by Student's t, as bands and bars in the "
    "figures are. Differences are to {}, seed by seed. Combined reward: what is earned, less {} * KL."
)
TRAINING = (
    "Means over the last 10 iterations, or all of a shorter run, and over a run's agents, in whatever role they were. "
    "A pair's observers have read a first answer there and a single agent has not, so it is no comparison at "
    "equal calls. Collapsed: on the way, over ten iterations, distinct-2 below half of an untrained agent's at the "
    "same length, or KL above guards.kl_bound."
)
CURVES = "Running means over up to 10 iterations, {}. A single run has no band, nor have two."
PATHS = (
    "KL where the mean of ten iterations of {} first reaches a task reward; a marker is the end of training. Groups on "
    "one line pay the same KL for a task reward."
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
    """Writes comparison.md and its figures into `out`; figures of an earlier page go.

    Args:
        role: whose curves, and KL at equal task reward, are shown; None: curves of each agent, and the KL of the role
            that answers the query alone.
        notes: caveats, beside those of the study.

    Returns:
        comparison.md.
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
        eta += " (held out that of the evaluation's command)"
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
    """A commit of twelve digits, with `-dirty` where it has it."""
    commit, *dirty = version.split("-", 1)
    return "-".join([commit[:12], *dirty])


def _section(out: Path, name: str, heading: str, note: str, rows: Rows) -> list[str]:
    """A table of the page, also as CSV and LaTeX."""
    table = pd.DataFrame(rows)
    write_text(out / FOR_PAPER / f"{name}.csv", table.to_csv(index=False))
    write_text(out / FOR_PAPER / f"{name}.tex", table.to_latex(index=False, escape=True))
    return [f"## {heading}\n", *([note + "\n"] if note else []), markdown_table(rows)]


def _figure(out: Path, name: str, plot: Callable[..., None], study: Study, *args: Any) -> str:
    """A figure of the page, also as PDF."""
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
        shown = study.of_role(role) if role else study
        parts.append(_figure(out, "curves", plots.plot_curves, shown))
        parts.append(CURVES.format(f"of the {role}" if role else "by agent") + "\n")
        whose = role or study.first_role
        if study.metrics["iteration"].max() >= 2 * LAST:  # else there is hardly a way to show
            parts.append(_figure(out, "paths", plots.plot_paths, study, whose))
            parts.append(PATHS.format(f"the {whose}") + "\n")
    by_agent = comparison.ends_by_agent(study)
    return parts + _section(out, "end_by_agent", "End of training, by agent", "", by_agent)


def verdicts(study: Study) -> list[str]:
    """By group, what its difference to the baseline says: held out, by calls, or at the end of training."""
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
        for where, by_seed in measured.items():
            if base == name or not {base, name} <= set(by_seed):
                continue
            apart = difference(by_seed[name].dropna(), by_seed[base].dropna())
            said = direction(apart) or f"no verdict from fewer than {FEWEST} seeds"
            text = difference_cell(by_seed, name, base, metric)
            of = f"{column_title(metric)} {where}"
            seeds = counted(apart.n, "seed")
            lines.append(f"{name} against {base}, {of}: {text}, {seeds}: {said}.")
    return lines


def _caveats(study: Study) -> list[str]:
    """What makes the comparison weaker than it looks."""
    notes = []
    rewards = ["fingerprint.reward", "fingerprint.reward_sha256"]
    if len(study.runs[rewards].drop_duplicates()) > 1:
        notes.append("runs were trained on different rewards, or versions of their source")
    seeds = study.runs.groupby("group", sort=False)["seed"].agg(set)
    for name in study.groups:
        base = study.base_of(name)
        if base is None:
            notes.append(f"{name}: no run of {study.baseline} at this value, so no difference")
        elif seeds[name] != seeds[base]:
            notes.append(f"{name}, {base}: seeds differ")
    lengths = sorted(set(study.runs["planned"].dropna()))
    if len(lengths) > 1:
        notes.append(f"runs of unequal length: {', '.join(map(str, lengths))} iterations")
    for run in study.ended_early.itertuples():
        notes.append(
            f"{run.group}, seed {run.seed}: ended after iteration {run.iterations} by "
            + markdown(str(run.stopped_by))
        )
    return notes


def read_runs(folders: Sequence[Path]) -> Study:
    """The study of runs. Those whose folders have the same name, but for `-seedN` at its end, form a group.

    A group is named by its folders, without the parts that all groups have (`short_labels`).

    The baseline is the first group of one agent, or the first.

    Raises:
        UserError: a folder is no run's, or runs of a group differ in more than their seed.
    """
    groups = [re.sub(r"-seed\d+$", "", folder.name) for folder in folders]
    labels = short_labels(groups)
    first_of: dict[str, Path] = {}
    studies = {}
    baselines = []
    for folder, group in zip(folders, groups, strict=True):
        name = labels[group]
        settings = read_settings(folder)
        first = first_of.setdefault(name, folder)
        differ = differences(read_settings(first), settings, OF_SEED)
        run = (name, settings["seed"])
        if differ or run in studies:
            what = ", ".join(differ) or f"seed {settings['seed']} twice"
            raise UserError(
                f"runs: expected runs of {name} that differ in their seed alone, got {what}"
            )
        if is_single(settings):
            baselines.append(name)
        columns = {"group": name, "family": name, "over": "", "value": "", "baseline": False}
        columns |= {"evaluation": "", "experiment": "", "scale": ""}
        studies[run] = of_run(folder, described(settings) | columns)
    return join(list(studies.values())).against([*baselines, *first_of][0])


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.compare`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument("runs", nargs="+", help="Folders of runs, or a folder of results")
    parser.add_argument("--out", default="runs/comparison", help="Folder of the page")
    parser.add_argument(
        "--baseline", help="Group to measure against. Default: the first of one agent"
    )
    parser.add_argument(
        "--role",
        help="Whose curves and paths. Default: each agent's curves, the first role's paths",
    )
    args = parser.parse_args(argv)
    if not args.out.strip():
        raise UserError(f"--out: expected the path of a folder, got {args.out!r}")
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: expected a folder, got {args.out!r} ({error})") from None
    first = Path(args.runs[0])
    if (first / "runs.csv").is_file():
        if len(args.runs) > 1:
            raise UserError(f"runs: expected runs, or one folder of results, got {first} and more")
        study = read_study(first)
    else:
        if (out / "runs.csv").is_file() and any(read_study(out).runs["experiment"]):
            raise UserError(
                f"--out: expected a folder without rows of an experiment, got {args.out!r}"
            )
        # Without the logs beside an experiment's runs, which a pattern names, too.
        folders = [Path(name) for name in args.runs if not Path(name).is_file()]
        if not folders:
            raise UserError(f"expected folders of runs, got files alone: {' '.join(args.runs)}")
        study = read_runs(folders)
        write_study(study, out)
    if args.baseline is not None:
        study = study.against(args.baseline)
    page = write_page(study, out, role=args.role)
    print(page.read_text(encoding="utf-8"))
    print(f"Written to {page}")


if __name__ == "__main__":
    main(command_line)
