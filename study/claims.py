"""Judges the paper's claims by the runs of the experiments: reproduced, not reproduced, or not tested.

    python -m study.claims --scales tiny real --out results/claims.md

Each claim is an estimate and the range in which its 95 % interval must lie (docs/experiments.md, "Claims"). Nothing is
run; a claim is not tested at a scale at which its experiment has not ended.
"""

import html
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cory.cli.arguments import Arguments
from cory.cli.main import main
from cory.errors import UserError
from cory.run.output import check_result_file, replace_text
from study.estimates import (
    CORY,
    PPO,
    Elsewhere,
    Estimate,
    Evidence,
    Untested,
    between,
    collapses,
    difference,
    frontiers_apart,
    kl_accelerates,
    less_variance,
    measured,
    of_gain,
    over_values,
    passes,
    ratio,
    relative,
    share,
    values_apart,
)
from study.measures import (
    agents,
    apart_and_gain,
    decline,
    distinct_share,
    early_gain,
    end,
    growth_of_kl,
    reward_and_gain,
    rewards,
    rise,
    share_of_limit,
    unsteadiness,
)
from study.plan import Experiment, checkout_file, plan, read_experiment
from study.records import Record, flat, read
from study.tables import markdown_table

COLUMNS = ("claim", "the paper says", "at", "measured", "value", "verdict")
SIMILAR = 0.2  # of the gain in task reward: values this far apart count as similar or close
MUCH = 1.5  # ratio from which on something is "much" or "well" above
ABOVE, BELOW, MORE = (0.0, math.inf), (-math.inf, 0.0), (1.0, math.inf)
NO_TRANSFER, NO_EXCHANGE = "CORY, no transfer", "CORY, no exchange"


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    Args:
        number: of its experiment. says: in words. measured: what is estimated.
        holds: the open range in which the estimate's interval must lie. experiments: that it is judged by, one a task.
        estimate: raises Untested where it cannot be had.
    """

    number: str
    says: str
    measured: str
    holds: tuple[float, float]
    experiments: tuple[str, ...]
    estimate: Callable[[Evidence], Estimate]


SUMS = "examples/arithmetic/experiment.yaml"  # where GSM8K is too hard for the model
IMDB, GSM8K, CURVES = ("imdb_curves",), ("gsm8k_curves", SUMS), ("imdb_curves", "gsm8k_curves")
PLACES = ("model.name", "task.reward_model", "task.dataset")  # may name local folders: any machine has its own
ABLATIONS, COOPERATION = ("imdb_ablations",), ("imdb_cooperation",)
RATES, FRONTIERS = ("imdb_learning_rate", "gsm8k_learning_rate"), ("imdb_frontier", "gsm8k_frontier")
CLAIMS = [
    Claim("E1", "CORY's task reward is similar to PPO's", "task reward, (CORY - PPO) / PPO's gain",
          (-SIMILAR, SIMILAR), IMDB, between(CORY, PPO, reward_and_gain, of_gain)),
    Claim("E1", "PPO's KL is more than twice CORY's", "KL, PPO / CORY", (2, math.inf), IMDB,
          between(PPO, CORY, end("kl"), ratio)),
    Claim("E1", "CORY's combined reward rises", "combined reward, last - first 10 iterations", ABOVE, IMDB,
          measured(CORY, rise)),
    Claim("E1", "PPO's combined reward falls", "combined reward, last - first 10 iterations", BELOW, IMDB,
          measured(PPO, rise)),
    Claim("E1", "agent_1 and agent_2 end close together", "combined reward, distance of agent_1 and agent_2 / gain",
          (-math.inf, SIMILAR), IMDB, measured(CORY, apart_and_gain, share)),
    Claim("E1, E5", "a larger model does not bring PPO to CORY's KL", "KL, larger PPO / CORY", MORE, ABLATIONS,
          between("PPO, larger model", CORY, end("kl"), ratio)),
    Claim("E2", "PPO's task reward peaks at half time and declines", "task reward, middle - last 10 iterations", ABOVE,
          GSM8K, measured(PPO, decline)),
    Claim("E2", "CORY's task reward does not decline", "task reward, middle - last 10 iterations", (-math.inf, 0.05),
          GSM8K, measured(CORY, decline)),
    Claim("E2", "CORY is steadier", "spread by role around running mean, PPO / CORY", MORE, GSM8K,
          between(PPO, CORY, unsteadiness, ratio)),
    Claim("E2", "PPO's KL does not converge", "growth of the KL in the last 10 iterations", (0.05, math.inf), GSM8K,
          measured(PPO, growth_of_kl, share)),
    Claim("E2", "CORY's KL converges", "growth of the KL in the last 10 iterations", (-0.05, 0.05), GSM8K,
          measured(CORY, growth_of_kl, share)),
    Claim("E2", "CORY's task reward is higher", "task reward, CORY - PPO", ABOVE, GSM8K,
          between(CORY, PPO, end("task_reward"), difference)),
    Claim("E2", "CORY's KL is lower", "KL, PPO / CORY", MORE, GSM8K, between(PPO, CORY, end("kl"), ratio)),
    Claim("E3", "CORY is above the base at every k", "pass@k, CORY - base, smallest over k", ABOVE, GSM8K,
          passes("base")),
    Claim("E3", "CORY is above PPO at every k", "pass@k, CORY - PPO, smallest over k", ABOVE, GSM8K, passes(PPO)),
    Claim("E4", "CORY's frontier lies outside PPO's", "hypervolume, (CORY - PPO) / all", ABOVE, FRONTIERS,
          frontiers_apart),
    Claim("E5", "without knowledge transfer the reward is less steady",
          "spread by role around running mean, without / with", MORE, ABLATIONS,
          between(NO_TRANSFER, CORY, unsteadiness, ratio)),
    Claim("E5", "without knowledge transfer the KL is higher", "KL, without / with", MORE, ABLATIONS,
          between(NO_TRANSFER, CORY, end("kl"), ratio)),
    Claim("E5", "without role exchange the reward is as good", "task reward, (without - with) / gain",
          (-SIMILAR, SIMILAR), ABLATIONS, between(NO_EXCHANGE, CORY, reward_and_gain, of_gain)),
    Claim("E5", "without role exchange the KL is much higher", "KL, without / with", (MUCH, math.inf), ABLATIONS,
          between(NO_EXCHANGE, CORY, end("kl"), ratio)),
    Claim("E5", "the fixed observer's KL is well below the fixed pioneer's", "KL, fixed pioneer / observer",
          (MUCH, math.inf), ABLATIONS, measured(NO_EXCHANGE, agents("kl"), share)),
    Claim("E6", "PPO collapses at learning rates at which CORY is stable", "collapse rate over all rates, PPO - CORY",
          ABOVE, RATES, collapses(1.0)),
    Claim("E6", "CORY converges near iteration 10", "gain by iterations 11 to 20 / gain, all rates", (0.8, math.inf),
          RATES, over_values(CORY, early_gain, share)),
    Claim("E6", "PPO's KL accelerates at the smallest rate", "KL, second half's gain / first half's", MORE, RATES,
          kl_accelerates),
    Claim("E7", "cooperation gives more reward than competition", "task reward, coefficient 1 - coefficient -1", ABOVE,
          COOPERATION, values_apart(-1, 0, "task_reward", difference)),
    Claim("E7", "cooperation gives a lower KL than competition", "KL, coefficient -1 / coefficient 1", MORE,
          COOPERATION, values_apart(0, -1, "kl", ratio)),
    Claim("E8", "PPO's texts repeat themselves", "distinct-2, end / start", (-math.inf, 0.5), IMDB,
          measured(PPO, distinct_share)),
    Claim("E8", "CORY's texts do not", "distinct-2, end / start", (0.5, math.inf), IMDB,
          measured(CORY, distinct_share)),
    Claim("E8", "PPO's texts run on to the token limit", "pioneer's length / limit", (0.9, math.inf), GSM8K[:1],
          measured(PPO, share_of_limit)),
    Claim("E8", "CORY's texts do not", "pioneer's length / limit", (-math.inf, 0.9), GSM8K[:1],
          measured(CORY, share_of_limit)),
    Claim("secondary", "12.3 % better policy optimality", "combined reward, (CORY - PPO) / |PPO|", (0.123, math.inf),
          CURVES, between(CORY, PPO, end("combined_reward"), relative)),
    Claim("secondary", "67 % fewer collapses", "collapse rate over all rates, 0.33 PPO - CORY", ABOVE, RATES,
          collapses(1 - 0.67)),
    Claim("secondary", "41 % lower training variance", "1 - variance of CORY / PPO", (0.41, math.inf), CURVES,
          between(CORY, PPO, rewards, less_variance, distinct=2)),
]  # fmt: skip


@cache
def experiment_of(name: str) -> Experiment:
    """A shipped experiment, by name or path. Raises a UserError if this is no checkout."""
    file = name if name.endswith(".yaml") else f"configs/experiments/{name}.yaml"
    return read_experiment(checkout_file(file, "experiment"))


def gather(name: str, scale: str, runs: Path) -> Evidence:
    """What an experiment's runs tell. Where model and data lie is as in the first run, and must be so in all.

    Raises:
        Elsewhere: not all of its runs have ended here, or they have other settings.
        UserError: a file cannot be read.
    """
    experiment = experiment_of(name)
    needs = dict.fromkeys(experiment.scales[scale].needs, "some/folder")
    there = [item for item in plan(experiment, scale, needs, runs) if (item.folder / "summary.json").exists()]
    if not there:
        raise Elsewhere("not run")
    used, stated = flat(read(there[0].folder).settings), flat(there[0].settings)
    keys = [key for key in dict.fromkeys([*needs, *PLACES]) if key in used and used[key] != stated.get(key)]
    try:
        planned = plan(experiment, scale, {key: str(used[key]) for key in keys}, runs)
        ended = [item for item in planned if item.state() == "finished"]
    except UserError:
        raise Elsewhere("runs of other settings") from None
    if len(ended) < len(planned):
        raise Elsewhere(f"{len(ended)} of {len(planned)} runs ended")
    by_name: dict[str, list[Record]] = {}
    for item in ended:
        by_name.setdefault(item.label, []).append(read(item.folder))
    values = list(experiment.scales[scale].values or [])
    evaluation = runs / scale / f"{Path(name).stem}-evaluation" / "evaluation.json"
    return Evidence(by_name, values, experiment.over, evaluation)


def judge(scales: Sequence[str], runs: Path, earlier: str = "") -> list[dict[str, str]]:
    """A row for each claim, task and scale: the estimate and the verdict.

    Args:
        earlier: a table of before. Its rows stay as they are, but for those of experiments that have ended in `runs`.
    """
    known: dict[tuple[str, str], Evidence | Elsewhere] = {}
    before = {tuple(row.values())[:3]: row for row in _rows_of(earlier)}
    rows: list[dict[str, str]] = []
    ended = set()
    for claim in CLAIMS:
        for name in claim.experiments:
            for scale in scales:
                if scale not in experiment_of(name).scales:
                    continue
                if (name, scale) not in known:
                    try:
                        known[name, scale] = gather(name, scale, runs)
                    except Elsewhere as why:
                        known[name, scale] = why
                key = claim.number, claim.says, f"{_task(name)}, {scale}"
                old = before.pop(key, None)
                try:
                    evidence = known[name, scale]
                    if isinstance(evidence, Elsewhere):
                        raise evidence
                    ended.add((key[0], key[2]))
                    found = claim.estimate(evidence)
                    text, verdict = str(found), found.verdict(claim.holds)
                except Untested as why:
                    text, verdict = str(why), "not tested"
                    if old and isinstance(why, Elsewhere):
                        rows.append(old)
                        continue
                measured = f"{claim.measured}: {_range(claim.holds)}"
                rows.append(dict(zip(COLUMNS, (*key, measured, text, verdict), strict=True)))
    # of other scales, or of claims in other words
    rows += [row for key, row in before.items() if (key[0], key[2]) not in ended]
    return sorted(rows, key=_place)


def _rows_of(text: str) -> list[dict[str, str]]:
    """The rows of a table of claims."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    return [dict(zip(COLUMNS, map(html.unescape, line), strict=True)) for line in lines if len(line) == len(COLUMNS)]


def _place(row: dict[str, str]) -> int:
    """Where a row stands: with its claim, or, if no claim has its words, after those of its number."""
    alike = [i for i, claim in enumerate(CLAIMS) if claim.number == row["claim"]]
    task = row["at"].split(", ")[0]
    same = [i for i in alike if CLAIMS[i].says == row["the paper says"] and task in map(_task, CLAIMS[i].experiments)]
    return max(same or alike, default=len(CLAIMS))


def _task(name: str) -> str:
    return Path(name).parent.name or name.split("_")[0]


def _range(holds: tuple[float, float]) -> str:
    low, high = holds
    if math.isinf(high):
        return f"above {low:g}"
    return f"below {high:g}" if math.isinf(low) else f"{low:g} to {high:g}"


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.claims`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument("--scales", nargs="+", default=["tiny"], help="tiny, real, smollm2, paper")
    parser.add_argument("--runs", type=str, default="runs/experiments", help="Folder of the experiments' runs")
    parser.add_argument("--out", type=str | None, help="File for the table. null: print it only")
    parser.add_argument("--keep", action="store_true", help="Keep the rows in that file of experiments not ended here")
    args = parser.of(argv)
    files = dict.fromkeys(name for claim in CLAIMS for name in claim.experiments)
    known = {scale for name in files for scale in experiment_of(name).scales}
    for scale in args.scales:
        if scale not in known:
            raise UserError(f"scales: expected some of {sorted(known)}, got {scale!r}")
    if args.out:
        check_result_file(Path(args.out), HEAD.splitlines()[0])
    keep = args.keep and args.out and Path(args.out).exists()
    earlier = Path(args.out).read_text(encoding="utf-8") if keep else ""
    rows = judge(args.scales, Path(args.runs).resolve(), earlier)
    text = markdown_table(rows)
    print(text)
    if args.out:
        counts = Counter(row["verdict"].removeprefix("not reproduced (").removesuffix(")") for row in rows)
        tally = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
        replace_text(Path(args.out), f"{HEAD}\nOf {len(rows)} judgements: {tally}.\n\n{text}")
        print(f"Written to {args.out}")


HEAD = """# The paper's claims

The claims of the paper, judged by the runs of this repository. A claim is reproduced if the 95 % interval of the
estimate (bootstrap over seeds) lies wholly in the range named with it. It is contradicted if the interval lies wholly
outside that range, and undecided otherwise. Verdicts apply to the scale in the table, not to the paper's models.
Estimates are from training, over both agents and their roles as in the paper's curves, unless stated otherwise. Those
of pass@k are of each agent solo, and their intervals leave out the spread over problems. With few seeds an interval
is too narrow: with three it covers about three cases in four, with two little more than half. Definitions:
docs/metrics.md, "Comparison", and docs/experiments.md, "Claims".
"""


if __name__ == "__main__":
    main(command_line)
