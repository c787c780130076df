"""Compares runs: training, how far they can be trusted, texts, settings; of a folder of results held-out rewards, too.

    python -m study.compare runs/imdb_cory_tiny-seed* runs/imdb_ppo_tiny-seed*
    python -m study.compare 'runs/*' --baseline PPO --over ppo.init_kl_coef --out results/frontier
    python -m study.compare results/imdb_cures                               # again from its files, without the runs
    python -m study.compare results/notes --role answerer                    # one role's curves, where others earn 0

Runs whose settings differ in their seed alone form a group. Definitions: docs/metrics.md, "Comparison".
"""

import html
from collections.abc import Callable, Container, Sequence
from filecmp import cmp
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cory.command import Arguments, main
from cory.errors import UserError, expect
from cory.plural import counted
from cory.run.folder import filled
from study.frozen import frozen_at

if TYPE_CHECKING:
    from study.frame import Study

# Of every comparison.
FILES = ("comparison.md", "runs.csv", "metrics.csv.gz", "final.csv", "held_out.csv", "curves.png", "paths.png",
         "held_out.png", "pass_at_k.png", "over.png", "frontier.png", "report.html")  # fmt: skip
CURVES_NOTE = (
    "Running means over up to 10 iterations; bands are 95 % intervals, of three runs or more."
)
EQUAL_REWARD_NOTE = (
    "Where the mean of ten iterations first reaches a task reward: {}, with the number of runs that reach it in "
    "brackets. The figure has the whole way; a marker is the mean of the last ten iterations."
)


def check_out(out: Path) -> None:
    """Raises a UserError if the results in `out` are frozen."""
    if commit := frozen_at(out / "README.md"):
        raise UserError(
            f"--out: expected a folder whose results are not frozen, got {str(out)!r}, frozen at {commit}"
        )


def write(
    study: "Study",
    out: Path,
    title: str = "Comparison",
    question: str = "",
    command: str = "",
    role: str | None = None,
    missing: Sequence[str] = (),
) -> Path:
    """Writes comparison.md with its figures, CSV files and report.html into `out`; replaces those of an earlier one.

    Args:
        role: whose curves and KL at equal task reward are shown; None: curves of each agent, and the KL of the role
            that answers the query alone.
        missing: caveats about planned runs that have not ended.

    Returns:
        comparison.md.

    Raises:
        UserError: the results in `out` are frozen.
    """
    from study.frame import write_study
    from study.report import write_comparison_page

    check_out(out)
    out.mkdir(parents=True, exist_ok=True)
    with filled(out) as complete:
        write_study(study, complete)
        for name, draw in figures(study, role).items():
            draw(complete / name)
        page = comparison_page(study, title, question, command, role, missing)
        (complete / "comparison.md").write_text(page, encoding="utf-8")
        if study.records:  # the report shows completions, which are not among the files
            write_comparison_page(study, complete / "report.html", title, question)
        written = {path.name for path in complete.iterdir()}
        outdated = set(_earlier_files(out, complete / "runs.csv")) - written
    for name in outdated:
        (out / name).unlink(missing_ok=True)
    return out / "comparison.md"


def _earlier_files(out: Path, runs_csv: Path) -> list[str]:
    """The files of the comparison that `out` holds: its rows, the figures that its page shows, and its report.

    A report of the same runs as those of `runs_csv` is none of them: it cannot be made again without the runs' folders.
    """
    files = [name for name in FILES if ".csv" in name]
    page = out / FILES[0]
    if page.exists():
        text = page.read_text(encoding="utf-8", errors="replace")
        files += [name for name in FILES if f"]({name})" in text]
        if not (out / "runs.csv").exists() or not cmp(out / "runs.csv", runs_csv, shallow=False):
            files.append("report.html")
    return files


def figures(study: "Study", role: str | None) -> dict[str, Callable[[Path], None]]:
    """The figures of which the study has the data: by file name, what draws one into a path."""
    from study import plots
    from study.equal_reward import running_means
    from study.frame import passes

    drawn: dict[str, Callable[[Path], None]] = {}
    if len(study.metrics):
        shown = study.of_role(role) if role else study
        drawn["curves.png"] = partial(plots.plot_curves, shown)
        if len(running_means(study, role or study.first_role)):  # a run has ten iterations
            drawn["paths.png"] = partial(plots.plot_paths, study, role=role)
    if len(study.held_out):
        drawn["held_out.png"] = partial(plots.plot_held_out, study)
        if len(passes(study)) > 1:
            drawn["pass_at_k.png"] = partial(plots.plot_held_out_passes, study)
    if study.over:
        drawn["over.png"] = partial(plots.plot_over, study)
        drawn["frontier.png"] = partial(plots.plot_frontier, study)
    return drawn


def comparison_page(
    study: "Study",
    title: str,
    question: str,
    command: str,
    role: str | None = None,
    missing: Sequence[str] = (),
) -> str:
    """The page of a comparison: held-out evaluation first, then training, under the same names."""
    drawn = figures(study, role)
    parts = _head(study, title, question, command, missing)
    if len(study.held_out):
        parts += _held_out(study, drawn)
    parts += _training(study, drawn, role)
    if study.over:
        parts += _over(study)
    return "\n".join(parts + _settings_and_texts(study))


def _section(heading: str, note: str, rows: Sequence[dict[str, str]]) -> list[str]:
    from study.markdown import markdown_table

    return [f"## {heading}\n", *([note + "\n"] if note else []), markdown_table(rows)]


def _head(
    study: "Study", title: str, question: str, command: str, missing: Sequence[str]
) -> list[str]:
    """What was compared, how, and what weakens it."""
    from study.caveats import caveats
    from study.comparison import what_is_compared
    from study.records import short_version

    parts = [f"# {title}\n"]
    if question:
        parts.append(f"{question}\n")
    if command:
        parts.append(f"```bash\n{command}\n```\n")
    versions = ", ".join(sorted({short_version(version) for version in study.whole["version"]}))
    parts.append(
        f"{counted(len(study.whole), 'run')} of {counted(len(study.groups), 'group')}; commit {versions}.\n"
    )
    parts.append(what_is_compared(study) + "\n")
    notes = [*missing, *caveats(study)]
    if notes:
        parts += ["**Caveats:**\n", *(f"* {note}" for note in notes), ""]
    return parts


def _held_out(study: "Study", drawn: Container[str]) -> list[str]:
    from study import held_out
    from study.cells import TITLES
    from study.frame import metric_columns

    metric = held_out.judged_by(study)
    rows = held_out.held_out(study, metric)
    parts = _section(f"Held out: {TITLES.get(metric, metric)}", held_out.NOTE, rows)
    parts.append("![held out](held_out.png)\n")
    if "pass_at_k.png" in drawn:
        parts.append("![pass@k](pass_at_k.png)\n")
    by_agent = held_out.held_out_by_agent(study, metric_columns(study.held_out))
    return parts + _section("Held out, by agent", "", by_agent)


def _training(study: "Study", drawn: Container[str], role: str | None) -> list[str]:
    from study import comparison
    from study.equal_reward import equal_reward

    parts = _section("End of training", comparison.training_note(study), comparison.ends(study))
    if not len(study.metrics):
        return parts
    parts.append("![curves](curves.png)\n")
    parts.append(f"Of the {role}. {CURVES_NOTE}\n" if role else f"{CURVES_NOTE}\n")
    if "paths.png" in drawn:
        whose = f"the {role}" if role else "the role that answers the query alone"
        note = EQUAL_REWARD_NOTE.format(whose)
        parts += _section("KL at equal task reward", note, equal_reward(study, role))
        parts.append("![paths](paths.png)\n")
    parts += _section("End of training, by agent", "", comparison.ends_by_agent(study))
    if study.metrics["role"].nunique() > 1:
        heading = comparison.role_heading(study)
        parts += _section(heading, "", comparison.ends_by_role(study))
    return parts


def _over(study: "Study") -> list[str]:
    """The values of the key that was varied, as a frontier."""
    from study.comparison import frontiers
    from study.markdown import markdown_table

    return [
        f"## Over {study.over}\n",
        "![over](over.png)\n",
        "![frontier](frontier.png)\n",
        markdown_table(frontiers(study)),
        "Points are (task reward, -KL), means over seeds and agents at the end of training; the hypervolume "
        "is measured from the worst task reward and the worst KL of all points.\n",
    ]


def _settings_and_texts(study: "Study") -> list[str]:
    from study import comparison

    rows = comparison.settings(study)
    parts = _section("Settings that differ between groups", "", rows)
    texts = comparison.texts(study)
    if texts:
        note = "Task reward in brackets; the first seed of each group."
        parts += _section("The same queries, each agent alone", note, texts)
    return parts


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.compare`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument(
        "runs", nargs="+", help="Folders of runs, or globs that match some; or a folder of results"
    )
    parser.add_argument("--out", default="runs/comparison", help="Folder of the results")
    parser.add_argument(
        "--baseline",
        help="Group or family to measure against. Default: PPO, or the first",
    )
    parser.add_argument(
        "--over",
        help="Key of the settings to plot results against: ppo.init_kl_coef",
    )
    parser.add_argument(
        "--role",
        help="Whose curves and KL at equal task reward. Default: each agent's curves, and the first role's KL",
    )
    args = parser.parse_args(argv)
    out = Path(args.out)
    check_out(out)
    from study.frame import of_records, read_study
    from study.groups import find
    from study.records import read
    from study.results import rows_in

    is_of_results = len(args.runs) == 1 and (Path(args.runs[0]) / "runs.csv").is_file()
    rows = rows_in(out)
    if rows and not (is_of_results and Path(args.runs[0]).resolve() == out.resolve()):
        raise UserError(
            f"--out: expected a folder without rows of an experiment, got {args.out!r}, which has "
            f"{counted(len(rows), 'row')} of {rows[0].experiment}. Name another folder"
        )
    if is_of_results:
        expect(
            args.over is None,
            "--over",
            "null for a folder of results, which has its own",
            args.over,
        )
        study = read_study(Path(args.runs[0]))
        if args.baseline is not None:
            study = study.against(args.baseline)
        if Path(args.runs[0]).resolve() != out.resolve():
            study.runs["experiment"] = ""  # a copy has no rows of the experiment
    else:
        study = of_records([read(path) for path in find(args.runs)], args.over, args.baseline)
    path = write(study, out, role=args.role)
    print(html.unescape(path.read_text(encoding="utf-8").split("## Settings")[0]))
    print(f"Written to {path}")


if __name__ == "__main__":
    main(command_line)
