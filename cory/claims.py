"""Judges the paper's claims by the runs of the experiments: reproduced, not reproduced, or not tested.

    python -m cory.claims --scales tiny real --out results/claims.md

Each claim is a figure and the range in which its 95 % interval must lie (docs/experiments.md, "Claims"). Nothing is
run; claims whose experiment has not ended at a scale are not tested there.
"""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jsonargparse import ArgumentError, ArgumentParser

from cory.comparison import LAST, collapsed, final, rewards
from cory.config import UserError
from cory.console import main
from cory.evaluation import markdown_table
from cory.experiment import ROOT, plan, read_experiment
from cory.metrics import bootstrap, hypervolume
from cory.records import Record, flat, read
from cory.tracking import replace_text

SIMILAR = 0.2  # of the gain in task reward: how far apart values may be that count as similar
ABOVE, BELOW, MORE = (0.0, math.inf), (-math.inf, 0.0), (1.0, math.inf)
PPO, CORY = "PPO", "CORY"
NO_TRANSFER, NO_EXCHANGE = "CORY, no transfer", "CORY, no exchange"
M = TypeVar("M")
mean = statistics.fmean


@dataclass(frozen=True)
class Figure:
    """A measured value, the ends of its 95 % interval, and how many runs of each side it is from."""

    value: float
    low: float
    high: float
    runs: tuple[int, int]

    def verdict(self, holds: tuple[float, float]) -> str:
        """Whether the interval lies where a claim needs it."""
        if holds[0] < self.low and self.high < holds[1]:
            return "reproduced"
        outside = self.high <= holds[0] or self.low >= holds[1]
        return f"not reproduced ({'contradicted' if outside else 'undecided'})"

    def __str__(self) -> str:
        count = f"{self.runs[0]}" if self.runs[0] == self.runs[1] else f"{self.runs[0]} and {self.runs[1]}"
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f}; n = {count})"


@dataclass(frozen=True)
class Evidence:
    """An experiment that has ended: runs by name, and by name and value (`CORY, 0.5`); rows of its evaluation."""

    runs: dict[str, list[Record]]
    evaluation: list[dict[str, Any]]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    Args:
        number: of its experiment. says: in words. measured: what the figure is.
        holds: the open range in which the figure's interval must lie. experiments: that it is judged by, one a task.
        figure: raises LookupError, with the reason, where it cannot be had.
    """

    number: str
    says: str
    measured: str
    holds: tuple[float, float]
    experiments: tuple[str, ...]
    figure: Callable[[Evidence], Figure]


def _two(
    first: str, second: str, of: Callable[[Record], M], statistic: Callable[[Sequence[M], Sequence[M]], float]
) -> Callable[[Evidence], Figure]:
    """A figure from what `of` gives for each run of two groups."""

    def figure(evidence: Evidence) -> Figure:
        one, two = ([of(run) for run in evidence.runs[name]] for name in (first, second))
        return Figure(*bootstrap(statistic, one, two), (len(one), len(two)))

    return figure


def _one(
    name: str, of: Callable[[Record], M], statistic: Callable[[Sequence[M]], float]
) -> Callable[[Evidence], Figure]:
    """A figure from one group of runs."""

    def figure(evidence: Evidence) -> Figure:
        values = [of(run) for run in evidence.runs[name]]
        value, low, high = bootstrap(lambda one, _: statistic(one), values, values[:1])
        return Figure(value, low, high, (len(values), len(values)))

    return figure


def _end(metric: str) -> Callable[[Record], float]:
    return lambda run: final(run, metric)


def _ratio(one: Sequence[float], two: Sequence[float]) -> float:
    return mean(one) / mean(two)


def _difference(one: Sequence[float], two: Sequence[float]) -> float:
    return mean(one) - mean(two)


def _relative(one: Sequence[float], two: Sequence[float]) -> float:
    return (mean(one) - mean(two)) / abs(mean(two))


def _of_gain(one: Sequence[tuple[float, float]], two: Sequence[tuple[float, float]]) -> float:
    """Difference of the first numbers over the mean of the second side's second ones, its gain."""
    return (mean(x for x, _ in one) - mean(x for x, _ in two)) / mean(gain for _, gain in two)


def _share(runs: Sequence[tuple[float, float]]) -> float:
    """The mean of the first numbers over that of the second ones."""
    return mean(x for x, _ in runs) / mean(y for _, y in runs)


def _reward_and_gain(run: Record) -> tuple[float, float]:
    """Task reward at the end, and how far that is above the first iteration of the pioneer (or PPO's only agent)."""
    start = next(row["task_reward"] for row in run.rows if row["iteration"] == 0)
    return final(run, "task_reward"), final(run, "task_reward") - start


def _decline_and_gain(run: Record) -> tuple[float, float]:
    """How far the task reward ends below its best 10 iterations, and its gain."""
    best = max(_window(run, "task_reward", end) for end in range(LAST, run.iterations + 1))
    return best - _window(run, "task_reward", run.iterations), _reward_and_gain(run)[1]


def _window(run: Record, metric: str, end: int) -> float:
    """Mean over agents and the 10 iterations before `end`."""
    return mean(row[metric] for row in run.rows if end - LAST <= row["iteration"] < end)


def _rise(run: Record) -> float:
    """Change of the combined reward from the first 10 iterations to the last 10."""
    return _window(run, "combined_reward", run.iterations) - _window(run, "combined_reward", LAST)


def _growth_of_kl(run: Record) -> float:
    """The share of its KL that a run gained in its last 10 iterations."""
    return 1 - _window(run, "kl", run.iterations - LAST) / _window(run, "kl", run.iterations)


def _agents(metric: str) -> Callable[[Record], tuple[float, float]]:
    return lambda run: (final(run, metric, run.agents[0]), final(run, metric, run.agents[1]))


def _apart_and_gain(run: Record) -> tuple[float, float]:
    """How far the first agent's combined reward ends above the second's, and the gain in task reward."""
    one, two = _agents("combined_reward")(run)
    return one - two, _reward_and_gain(run)[1]


def _variance(series: Sequence[Sequence[float]]) -> float:
    """Over runs, mean over iterations."""
    if len(series) < 2:
        return math.nan
    return mean(statistics.variance(values) for values in zip(*series, strict=False))


def _ratio_of_variances(one: Sequence[Sequence[float]], two: Sequence[Sequence[float]]) -> float:
    return _variance(one) / _variance(two) if _variance(two) else math.nan


def _fewer_collapses(evidence: Evidence) -> Figure:
    """1 - CORY's collapse rate over PPO's."""
    if not any(map(collapsed, evidence.runs[PPO])):
        raise LookupError("no run of PPO collapsed")
    statistic = lambda cory, ppo: 1 - mean(cory) / mean(ppo) if any(ppo) else math.nan  # noqa: E731
    return _two(CORY, PPO, lambda run: float(collapsed(run)), statistic)(evidence)


def _frontiers_apart(evidence: Evidence) -> Figure:
    """CORY's hypervolume minus PPO's, over that of all points; seeds are resampled, with their runs at all values."""
    Points = dict[Any, tuple[float, float]]
    seeds: dict[str, dict[int, Points]] = {CORY: {}, PPO: {}}
    for name, family in seeds.items():
        for run in evidence.runs[name]:
            value = flat(run.settings)["ppo.init_kl_coef"]
            family.setdefault(run.settings["seed"], {})[value] = (final(run, "task_reward"), -final(run, "kl"))
    every = [point for family in seeds.values() for points in family.values() for point in points.values()]
    worst = (min(x for x, _ in every), min(y for _, y in every))

    def volume(family: Sequence[Points]) -> float:
        means = [tuple(mean(points[value][i] for points in family) for i in (0, 1)) for value in family[0]]
        return hypervolume(means, worst)  # type: ignore[arg-type]

    cory, ppo = ([*seeds[name].values()] for name in (CORY, PPO))
    whole = hypervolume(every, worst)
    figures = bootstrap(lambda one, two: (volume(one) - volume(two)) / whole if whole else math.nan, cory, ppo)
    return Figure(*figures, (len(cory), len(ppo)))


def _passes(other: str) -> Callable[[Evidence], Figure]:
    """The smallest difference over k of CORY's pass@k, mean over its agents alone, to that of PPO or of the base."""

    def figure(evidence: Evidence) -> Figure:
        runs: dict[str, dict[str, list[list[float]]]] = {"base": {}, PPO: {}, CORY: {}}
        for row in evidence.evaluation:
            folder = row["name"].split("/")[0]
            kind = "base" if folder == "base" else CORY if "_cory" in folder else PPO
            if " after " not in row["name"]:
                passes = [value for key, value in row.items() if key.startswith("pass@") and not key.endswith("_ci")]
                runs[kind].setdefault(folder, []).append(passes)
        one, two = ([*map(_means, runs[kind].values())] for kind in (CORY, other))
        if not one or not two:
            raise LookupError("no evaluation")
        smallest = lambda a, b: min(x - y for x, y in zip(_means(a), _means(b), strict=True))  # noqa: E731
        return Figure(*bootstrap(smallest, one, two), (len(one), len(two)))

    return figure


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [mean(values) for values in zip(*rows, strict=True)]


IMDB, GSM8K, CURVES = ("imdb_curves",), ("gsm8k_curves",), ("imdb_curves", "gsm8k_curves")
ABLATIONS, COOPERATION = ("imdb_ablations",), ("imdb_cooperation",)
RATES, FRONTIERS = ("imdb_learning_rate", "gsm8k_learning_rate"), ("imdb_frontier", "gsm8k_frontier")
CLAIMS = [
    Claim("E1", "CORY's task reward is similar to PPO's", "(CORY - PPO) / PPO's gain", (-SIMILAR, SIMILAR), IMDB,
          _two(CORY, PPO, _reward_and_gain, _of_gain)),
    Claim("E1", "PPO's KL is more than twice CORY's", "KL of PPO / CORY", (2, math.inf), IMDB,
          _two(PPO, CORY, _end("kl"), _ratio)),
    Claim("E1", "CORY's combined reward rises", "change, first to last 10 iterations", ABOVE, IMDB,
          _one(CORY, _rise, mean)),
    Claim("E1", "PPO's combined reward falls", "change, first to last 10 iterations", BELOW, IMDB,
          _one(PPO, _rise, mean)),
    Claim("E1", "LLM1 and LLM2 end close together", "combined reward, (LLM1 - LLM2) / gain", (-SIMILAR, SIMILAR), IMDB,
          _one(CORY, _apart_and_gain, _share)),
    Claim("E1, E5", "PPO with a larger model has a higher KL than CORY", "KL of the larger PPO / CORY", MORE, ABLATIONS,
          _two("PPO, larger model", CORY, _end("kl"), _ratio)),
    Claim("E2", "PPO's task reward peaks and declines, CORY's does not", "(PPO's decline - CORY's) / CORY's gain",
          ABOVE, GSM8K, _two(PPO, CORY, _decline_and_gain, _of_gain)),
    Claim("E2", "PPO's KL does not converge, CORY's does", "growth of KL in the last 10 iterations, PPO - CORY", ABOVE,
          GSM8K, _two(PPO, CORY, _growth_of_kl, _difference)),
    Claim("E2", "CORY's task reward is higher", "task reward, CORY - PPO", ABOVE, GSM8K,
          _two(CORY, PPO, _end("task_reward"), _difference)),
    Claim("E2", "CORY's KL is lower", "KL of PPO / CORY", MORE, GSM8K, _two(PPO, CORY, _end("kl"), _ratio)),
    Claim("E3", "CORY is above the base at every k", "pass@k, CORY - base, smallest over k", ABOVE, GSM8K,
          _passes("base")),
    Claim("E3", "CORY is above PPO at every k", "pass@k, CORY - PPO, smallest over k", ABOVE, GSM8K, _passes(PPO)),
    Claim("E4", "CORY's frontier lies outside PPO's", "hypervolume, (CORY - PPO) / all", ABOVE, FRONTIERS,
          _frontiers_apart),
    Claim("E5", "without knowledge transfer the reward is less steady", "training variance, without / with", MORE,
          ABLATIONS, _two(NO_TRANSFER, CORY, rewards, _ratio_of_variances)),
    Claim("E5", "without knowledge transfer the KL is higher", "KL, without / with", MORE, ABLATIONS,
          _two(NO_TRANSFER, CORY, _end("kl"), _ratio)),
    Claim("E5", "without role exchange the reward is as good", "(without - with) / gain", (-SIMILAR, SIMILAR),
          ABLATIONS, _two(NO_EXCHANGE, CORY, _reward_and_gain, _of_gain)),
    Claim("E5", "without role exchange the KL is much higher", "KL, without / with", MORE, ABLATIONS,
          _two(NO_EXCHANGE, CORY, _end("kl"), _ratio)),
    Claim("E5", "the fixed observer's KL is well below the fixed pioneer's", "KL, fixed pioneer / observer", MORE,
          ABLATIONS, _one(NO_EXCHANGE, _agents("kl"), _share)),
    Claim("E6", "PPO collapses at learning rates at which CORY is stable", "collapse rate, PPO - CORY, all rates",
          ABOVE, RATES, _two(PPO, CORY, lambda run: float(collapsed(run)), _difference)),
    Claim("E7", "cooperation gives more reward than competition", "task reward, coefficient 1 - coefficient -1", ABOVE,
          COOPERATION, _two("CORY, 1.0", "CORY, -1.0", _end("task_reward"), _difference)),
    Claim("E7", "cooperation gives a lower KL than competition", "KL, coefficient -1 / coefficient 1", MORE,
          COOPERATION, _two("CORY, -1.0", "CORY, 1.0", _end("kl"), _ratio)),
    Claim("E8", "PPO's texts repeat themselves, CORY's do not", "distinct-2, CORY - PPO", ABOVE, IMDB,
          _two(CORY, PPO, _end("distinct_2"), _difference)),
    Claim("E8", "PPO's texts run on to the token limit, CORY's do not", "tokens, PPO - CORY", ABOVE, GSM8K,
          _two(PPO, CORY, _end("response_tokens"), _difference)),
    Claim("secondary", "12.3 % better policy optimality", "(CORY - PPO) / PPO", (0.123, math.inf), CURVES,
          _two(CORY, PPO, _end("combined_reward"), _relative)),
    Claim("secondary", "67 % fewer collapses", "1 - collapse rate of CORY / PPO, all rates", (0.67, math.inf), RATES,
          _fewer_collapses),
    Claim("secondary", "41 % lower training variance", "1 - variance of CORY / PPO", (0.41, math.inf), CURVES,
          _two(CORY, PPO, rewards, lambda c, p: 1 - _ratio_of_variances(c, p))),
]  # fmt: skip


def gather(name: str, scale: str, runs: Path) -> Evidence:
    """What an experiment's finished runs tell.

    Raises:
        LookupError: the experiment has not this scale, or not all of its runs have ended.
    """
    experiment = read_experiment(ROOT / f"configs/experiments/{name}.yaml")
    if scale not in experiment.scales:
        raise LookupError("no such scale")
    planned = plan(experiment, scale, dict.fromkeys(experiment.scales[scale].needs, "some/folder"), runs)
    ended: dict[str, list[Record]] = {}
    for item in planned:
        if (item.folder / "summary.json").exists():
            record = read(item.folder)
            value = flat(item.settings)[experiment.over] if experiment.over else None
            ended.setdefault(item.label, []).append(record)
            ended.setdefault(f"{item.label}, {value}", []).append(record)
    count = sum(record.complete for label in experiment.runs for record in ended.get(label, []))
    if count < len(planned):
        raise LookupError(f"{count} of {len(planned)} runs ended" if count else "not run")
    evaluation = runs / scale / f"{name}-evaluation" / "evaluation.json"
    rows = json.loads(evaluation.read_text(encoding="utf-8")) if evaluation.exists() else []
    return Evidence(ended, rows if isinstance(rows, list) else rows["rows"])


def judge(scales: Sequence[str], runs: Path) -> list[dict[str, str]]:
    """A row for each claim, task and scale: the figure and the verdict."""
    known: dict[tuple[str, str], Evidence | str] = {}
    rows = []
    for claim in CLAIMS:
        for name in claim.experiments:
            for scale in scales:
                if (name, scale) not in known:
                    try:
                        known[name, scale] = gather(name, scale, runs)
                    except LookupError as error:
                        known[name, scale] = str(error.args[0])
                evidence, verdict, text = known[name, scale], "not tested", ""
                if evidence == "no such scale":
                    continue
                if isinstance(evidence, Evidence):
                    try:
                        figure = claim.figure(evidence)
                        text, verdict = str(figure), figure.verdict(claim.holds)
                    except LookupError as error:
                        text = str(error.args[0])
                else:
                    text = evidence
                rows.append(
                    {"claim": claim.number, "the paper says": claim.says, "at": f"{name.split('_')[0]}, {scale}",
                     "measured": f"{claim.measured}, {_range(claim.holds)}", "value": text, "verdict": verdict}
                )  # fmt: skip
    return rows


def _range(holds: tuple[float, float]) -> str:
    low, high = holds
    if math.isinf(high):
        return f"above {low:g}"
    return f"below {high:g}" if math.isinf(low) else f"{low:g} to {high:g}"


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m cory.claims`: see the module."""
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, description=__doc__)
    parser.add_argument("--scales", nargs="+", default=["tiny"], help="tiny, real, paper")
    parser.add_argument("--runs", type=str, default="runs/experiments", help="Folder of the experiments' runs")
    parser.add_argument("--out", type=str | None, help="File for the table. null: print it only")
    try:
        args = parser.parse_args(argv)
    except ArgumentError as error:
        raise UserError(" ".join(str(error).split())) from None
    rows = judge(args.scales, Path(args.runs).resolve())
    if not rows:
        raise UserError(f"scales: expected some of those in configs/experiments/, got {args.scales}")
    text = markdown_table(rows)
    print(text)
    if args.out:
        replace_text(Path(args.out), HEAD + "\n" + text)
        print(f"Written to {args.out}")


HEAD = """# The paper's claims

A claim is reproduced where the 95 % interval of the figure (bootstrap over seeds) lies wholly in the range that is
named with it. Else it is not: contradicted where the interval lies wholly outside, undecided where it does not. With
two or three seeds an interval is rough. Definitions: docs/metrics.md, "Comparison"; docs/experiments.md, "Claims".
"""


if __name__ == "__main__":
    main(command_line)
