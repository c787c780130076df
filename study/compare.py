"""Compares runs: curves, final values, how far they can be trusted, texts, and the settings in which they differ.

    python -m study.compare runs/imdb_cory_tiny-seed* runs/imdb_ppo_tiny-seed*
    python -m study.compare 'runs/*' --baseline PPO --over ppo.init_kl_coef --out results/frontier

Runs whose settings differ in their seed alone form a group. Definitions: docs/metrics.md, "Comparison".
"""

import html
from collections.abc import Sequence
from pathlib import Path

from cory.cli.arguments import Arguments
from cory.cli.main import main
from cory.run.output import check_results_folder, staged
from study.comparison import FINAL, ROLE_WINDOW, Comparison
from study.groups import find, group
from study.measures import LAST
from study.page import write_comparison_page
from study.records import read
from study.tables import eta_shown, final_table, group_table, markdown_table, method_note

# Of every comparison; the first marks its folder.
FILES = ("comparison.md", "curves.png", "curves.svg", "runs.csv", "final.csv", "curves.csv", "report.html",
         "over.png", "over.svg", "frontier.png", "frontier.svg")  # fmt: skip


def check_out(out: Path) -> None:
    """Raises a UserError if a comparison cannot be written into `out`: a file, or a folder with other results."""
    check_results_folder(out, FILES)


def write(comparison: Comparison, out: Path, title: str = "Comparison", question: str = "", command: str = "") -> Path:
    """Writes comparison.md with its figures (PNG and SVG), csv files and report.html into `out`; replaces older ones.

    Returns:
        comparison.md.

    Raises:
        UserError: `out` is a file, or a folder with results of another kind.
    """
    check_out(out)
    out.mkdir(parents=True, exist_ok=True)
    with staged(out) as complete:
        _write(comparison, complete, title, question, command)
    return out / "comparison.md"


def _write(comparison: Comparison, out: Path, title: str, question: str, command: str) -> None:
    from study.plots import plot_comparison, plot_frontier, plot_over  # here, as importing matplotlib takes a while

    plot_comparison(comparison.curves(), out / "curves")
    parts = [f"# {title}\n", *([question + "\n"] if question else [])]
    if command:
        parts.append(f"```bash\n{command}\n```\n")
    runs = sum(len(g.whole) for g in comparison.groups)
    versions = [run.settings.get("versions") or {} for g in comparison.groups for run in g.whole]
    commits = sorted(
        {str(v.get("commit", "unknown"))[:12] + "-dirty" * str(v.get("commit")).endswith("dirty") for v in versions}
    )
    parts.append(f"{runs} runs of {len(comparison.groups)} groups; commit {', '.join(commits)}. `n` counts seeds; "
                 "values are mean ± standard deviation over them.\n")  # fmt: skip
    said = comparison.problems()
    if said:
        parts += ["**Caveats:**\n", *(f"* {line}" for line in said), ""]
    parts += [
        "![curves](curves.png)\n",
        "Running means over 10 iterations; bands are one standard deviation over seeds.\n",
    ]
    parts += [f"## Last {LAST} iterations of training, by agent\n", markdown_table(final_table(comparison))]
    parts.append(f"Combined reward: task reward - {eta_shown(comparison)} * KL.\n")
    parts += ["## By group\n", markdown_table(group_table(comparison)), method_note(comparison)]
    roles = comparison.role_rows()
    if len({row["role"] for row in roles}) > 1:
        parts += [f"## By role, last {ROLE_WINDOW} iterations\n", markdown_table(roles)]
    if comparison.over:
        plot_over(comparison.points(), comparison.over, out / "over")
        plot_frontier(comparison.points(), comparison.over, out / "frontier")
        parts += [f"## Over {comparison.over}\n", "![over](over.png)\n", "## Frontier\n"]
        parts += ["![frontier](frontier.png)\n", markdown_table(comparison.frontier_rows()),
                  "Points are (task reward, -KL), means over seeds and agents at the end of training; the hypervolume "
                  "is measured from the worst task reward and the worst KL of all points.\n"]  # fmt: skip
    settings = comparison.setting_rows()
    parts += ["## Settings that differ between groups\n", markdown_table(settings) if settings else "None.\n"]
    texts = comparison.texts()
    if texts:
        parts += ["## The same queries, each agent alone\n", "Task reward in brackets; the first seed of each group.\n"]
        parts.append(markdown_table(texts))
    write_csv(comparison, out)
    (out / "comparison.md").write_text("\n".join(parts), encoding="utf-8")
    write_comparison_page(comparison, out / "report.html", title, question)


def write_csv(comparison: Comparison, out: Path) -> None:
    """Writes the final values of every run (runs.csv) and of every agent (final.csv), and the curves (curves.csv)."""
    import pandas as pd  # here, as importing it takes a while

    runs = pd.DataFrame(comparison.run_rows())
    by_agent = runs.groupby("agent", sort=False)
    final = by_agent[list(FINAL)].agg(["mean", "std"])
    final.columns = ["_".join(column) for column in final.columns]
    final.insert(0, "n", by_agent.size())
    curves = []
    for curve in comparison.curves():
        over_runs = {"iteration": curve.values["kl"].index, "agent": curve.name, "n": curve.values["kl"].count(axis=1)}
        for metric, values in curve.values.items():
            over_runs |= {f"{metric}_mean": values.mean(axis=1), f"{metric}_std": values.std(axis=1)}
        curves.append(pd.DataFrame(over_runs))
    for name, frame in (("runs", runs), ("final", final.reset_index()), ("curves", pd.concat(curves))):
        frame.to_csv(out / f"{name}.csv", index=False, float_format="%.6g")


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.compare`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument("runs", nargs="+", help="Folders of runs, or globs that match some")
    parser.add_argument("--out", type=str, default="runs/comparison", help="Folder of the results")
    parser.add_argument(
        "--baseline", type=str | None, help="Group or family to measure against. null: PPO, or the first"
    )
    parser.add_argument("--over", type=str | None, help="Key of the settings to plot results against: ppo.init_kl_coef")
    args = parser.of(argv)
    check_out(Path(args.out))
    comparison = Comparison(group([read(path) for path in find(args.runs)], args.over), args.baseline, args.over)
    path = write(comparison, Path(args.out))
    print(html.unescape(path.read_text(encoding="utf-8").split("## Settings")[0]))
    print(f"Written to {path}")


if __name__ == "__main__":
    main(command_line)
