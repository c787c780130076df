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

import numpy as np
from jsonargparse import ArgumentError, ArgumentParser

from cory.comparison import LAST, collapsed, final, rewards
from cory.config import UserError
from cory.console import main
from cory.evaluation import markdown_table
from cory.experiment import ROOT, plan, read_experiment
from cory.linefile import replace_text
from cory.metrics import bootstrap, hypervolume
from cory.records import Record, flat, read

SIMILAR = 0.2  # of the gain in task reward: how far apart values may be that count as similar or close
MUCH = 1.5  # ratio from which on something is "much" or "well" above
ABOVE, BELOW, MORE = (0.0, math.inf), (-math.inf, 0.0), (1.0, math.inf)
PPO, CORY = "PPO", "CORY"
NO_TRANSFER, NO_EXCHANGE = "CORY, no transfer", "CORY, no exchange"
M = TypeVar("M")
mean = statistics.fmean


class Untested(Exception):
    """Why a claim cannot be judged."""


@dataclass(frozen=True)
class Figure:
    """A measured value, the ends of its 95 % interval, and of how many seeds each side is."""

    value: float
    low: float
    high: float
    seeds: tuple[int, ...]

    def verdict(self, holds: tuple[float, float]) -> str:
        """Whether the interval lies where a claim needs it."""
        if not all(map(math.isfinite, (self.value, self.low, self.high))) or min(self.seeds) < 2:
            return "not tested"
        if holds[0] < self.low and self.high < holds[1]:
            return "reproduced"
        outside = self.high <= holds[0] or self.low >= holds[1]
        return f"not reproduced ({'contradicted' if outside else 'undecided'})"

    def __str__(self) -> str:
        count = " and ".join(map(str, dict.fromkeys(self.seeds)))
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f}; n = {count})"


@dataclass(frozen=True)
class Evidence:
    """An experiment that has ended.

    Args:
        runs: by name. values: of the experiment's `over`, in its order; empty where it has none.
        over: that key. evaluation: where the evaluation's rows are, if there are any.
    """

    runs: dict[str, list[Record]]
    values: list[Any]
    over: str | None
    evaluation: Path

    def of(self, name: str, value: Any = None) -> list[Record]:
        """The runs of a name, and of a value where one is named."""
        found = self.runs.get(name, [])
        if value is not None:
            found = [run for run in found if self.value(run) == value]
        if not found:
            raise Untested(f"no runs of {name} at this scale")
        return found

    def value(self, run: Record) -> Any:
        """What a run has for `over`."""
        return flat(run.settings)[self.over] if self.over else None

    def by_seed(self, name: str) -> list[list[Record]]:
        """The runs of each seed, at all values."""
        seeds: dict[Any, list[Record]] = {}
        for run in self.of(name):
            seeds.setdefault(run.settings["seed"], []).append(run)
        return list(seeds.values())


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    Args:
        number: of its experiment. says: in words. measured: what the figure is.
        holds: the open range in which the figure's interval must lie. experiments: that it is judged by, one a task.
        figure: raises Untested where it cannot be had.
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
    return lambda evidence: _figure(statistic, *([of(run) for run in evidence.of(name)] for name in (first, second)))


def _one(
    name: str, of: Callable[[Record], M], statistic: Callable[[Sequence[Any]], float] = mean
) -> Callable[[Evidence], Figure]:
    """A figure from one group of runs."""

    def figure(evidence: Evidence) -> Figure:
        values = [of(run) for run in evidence.of(name)]
        found = bootstrap(lambda one, _: statistic(one), values, values[:1])
        return Figure(*found, (len(values),))

    return figure


def _figure(statistic: Callable[[Sequence[M], Sequence[M]], float], one: Sequence[M], two: Sequence[M]) -> Figure:
    return Figure(*bootstrap(statistic, one, two), (len(one), len(two)))


def _end(metric: str) -> Callable[[Record], float]:
    return lambda run: final(run, metric)


def _over(a: float, b: float) -> float:
    """A ratio; undefined where the denominator is not above 0."""
    return a / b if b > 0 else math.nan


def _ratio(one: Sequence[float], two: Sequence[float]) -> float:
    return _over(mean(one), mean(two))


def _difference(one: Sequence[float], two: Sequence[float]) -> float:
    return mean(one) - mean(two)


def _relative(one: Sequence[float], two: Sequence[float]) -> float:
    return _over(mean(one) - mean(two), abs(mean(two)))


def _of_gain(one: Sequence[tuple[float, float]], two: Sequence[tuple[float, float]]) -> float:
    """Difference of the first numbers over the mean of the second side's second ones, its gain."""
    return _over(mean(x for x, _ in one) - mean(x for x, _ in two), mean(gain for _, gain in two))


def _share(runs: Sequence[tuple[float, float]]) -> float:
    """The mean of the first numbers over that of the second ones."""
    return _over(mean(x for x, _ in runs), mean(y for _, y in runs))


def _start(run: Record) -> float:
    """Task reward of the pioneer (or PPO's only agent) in the first iteration, before any update."""
    return next(row["task_reward"] for row in run.rows if row["iteration"] == 0 and row["role"] == "pioneer")


def _reward_and_gain(run: Record) -> tuple[float, float]:
    return final(run, "task_reward"), final(run, "task_reward") - _start(run)


def _window(run: Record, metric: str, end: int) -> float:
    """Mean over agents and the 10 iterations before `end`."""
    return mean(row[metric] for row in run.rows if end - LAST <= row["iteration"] < end)


def _rise(run: Record) -> float:
    """Change of the combined reward from the first 10 iterations to the last 10."""
    return _window(run, "combined_reward", run.iterations) - _window(run, "combined_reward", LAST)


def _decline(run: Record) -> float:
    """How far the task reward of the last 10 iterations is below that of the 10 about the middle."""
    middle = _window(run, "task_reward", run.iterations // 2 + LAST // 2)
    return middle - _window(run, "task_reward", run.iterations)


def _growth_of_kl(run: Record) -> tuple[float, float]:
    """What the KL gained in the last 10 iterations, and the KL."""
    end = _window(run, "kl", run.iterations)
    return end - _window(run, "kl", run.iterations - LAST), end


def _halves_of_kl(run: Record) -> tuple[float, float]:
    """What the KL gained in the second half of the run, and in the first."""
    middle = _window(run, "kl", run.iterations // 2 + LAST // 2)
    return _window(run, "kl", run.iterations) - middle, middle


def _early_gain(run: Record) -> tuple[float, float]:
    """Gain in task reward by iterations 11 to 20, and by the end."""
    return _window(run, "task_reward", 2 * LAST) - _start(run), _reward_and_gain(run)[1]


def _unsteadiness(run: Record) -> float:
    """Standard deviation of the task reward (mean over agents) around its running mean over 10 iterations."""
    series = np.array(rewards(run))
    smooth = np.convolve(series, np.ones(LAST) / LAST, "valid")
    return float((series[LAST // 2 : LAST // 2 + len(smooth)] - smooth).std())


def _distinct_share(run: Record) -> float:
    """Distinct-2 at the end over that of the same role in the first iteration, mean over agents."""
    start = {row["role"]: row["distinct_2"] for row in run.rows if row["iteration"] == 0}
    return mean(_over(row["distinct_2"], start[row["role"]]) for agent in run.agents for row in run.of(agent, LAST))


def _share_of_limit(run: Record) -> float:
    """Length of the pioneer's responses at the end over the longest allowed."""
    rows = [row for row in run.rows if row["role"] == "pioneer" and row["iteration"] >= run.iterations - LAST]
    return mean(row["response_tokens"] for row in rows) / flat(run.settings)["sampling.max_new_tokens"]


def _agents(metric: str) -> Callable[[Record], tuple[float, float]]:
    return lambda run: (final(run, metric, run.agents[0]), final(run, metric, run.agents[1]))


def _apart_and_gain(run: Record) -> tuple[float, float]:
    """How far apart the agents' combined rewards end, and the gain in task reward."""
    one, two = _agents("combined_reward")(run)
    return abs(one - two), _reward_and_gain(run)[1]


def _less_variance(cory: Sequence[Sequence[float]], ppo: Sequence[Sequence[float]]) -> float:
    """1 - CORY's training variance over PPO's."""

    def variance(series: Sequence[Sequence[float]]) -> float:
        return float(np.var(np.array(series), axis=0, ddof=1).mean()) if len(series) > 1 else math.nan

    return 1 - _over(variance(cory), variance(ppo))


def _collapses(weight: float) -> Callable[[Evidence], Figure]:
    """PPO's collapse rate times `weight`, minus CORY's; seeds are resampled, each with its runs at all values."""

    def figure(evidence: Evidence) -> Figure:
        if not any(map(collapsed, evidence.of(PPO) + evidence.of(CORY))):
            raise Untested("no run collapsed")
        ppo, cory = ([mean(map(collapsed, runs)) for runs in evidence.by_seed(name)] for name in (PPO, CORY))
        return _figure(lambda one, two: weight * mean(one) - mean(two), ppo, cory)

    return figure


def _at(name: str, index: int, of: Callable[[Record], M]) -> Callable[[Evidence], list[M]]:
    """What `of` gives for the runs of a name at one of the values, by its place among them sorted."""
    return lambda evidence: [of(run) for run in evidence.of(name, sorted(evidence.values)[index])]


def _values_apart(
    first: int, second: int, metric: str, statistic: Callable[[Sequence[float], Sequence[float]], float]
) -> Callable[[Evidence], Figure]:
    """CORY's runs at two of the values."""
    one, two = (_at(CORY, index, _end(metric)) for index in (first, second))
    return lambda evidence: _figure(statistic, one(evidence), two(evidence))


def _kl_accelerates(evidence: Evidence) -> Figure:
    """PPO's, at the smallest value."""
    values = _at(PPO, 0, _halves_of_kl)(evidence)
    return Figure(*bootstrap(lambda one, _: _share(one), values, values[:1]), (len(values),))


def _frontiers_apart(evidence: Evidence) -> Figure:
    """CORY's hypervolume minus PPO's, over that of all points; seeds are resampled, with their runs at all values."""

    def points(seeds: Sequence[Sequence[Record]]) -> list[tuple[float, float]]:
        at: dict[Any, list[Record]] = {}
        for run in (run for runs in seeds for run in runs):
            at.setdefault(evidence.value(run), []).append(run)
        return [
            (mean(final(run, "task_reward") for run in runs), -mean(final(run, "kl") for run in runs))
            for runs in at.values()
        ]

    cory, ppo = evidence.by_seed(CORY), evidence.by_seed(PPO)
    every = points(cory) + points(ppo)
    worst = (min(x for x, _ in every), min(y for _, y in every))
    whole = hypervolume(every, worst)
    statistic = lambda one, two: _over(  # noqa: E731
        hypervolume(points(one), worst) - hypervolume(points(two), worst), whole
    )
    return _figure(statistic, cory, ppo)


def _passes(other: str) -> Callable[[Evidence], Figure]:
    """The smallest difference over k of CORY's pass@k, mean over its agents alone, to that of PPO or of the base."""

    def figure(evidence: Evidence) -> Figure:
        runs: dict[str, dict[str, list[list[float]]]] = {"base": {}, PPO: {}, CORY: {}}
        try:
            for row in json.loads(evidence.evaluation.read_text(encoding="utf-8")):
                folder = row["name"].split("/")[0]
                kind = "base" if folder == "base" else CORY if "_cory" in folder else PPO
                if " after " not in row["name"]:
                    passes = [row[key] for key in row if key.startswith("pass@") and not key.endswith("_ci")]
                    runs[kind].setdefault(folder, []).append(passes)
        except FileNotFoundError:
            raise Untested("no evaluation") from None
        except (ValueError, TypeError, KeyError):
            raise Untested(f"{evidence.evaluation.name} is damaged") from None
        if not len(runs[CORY]) == len(evidence.of(CORY)) or not runs["base"] or not runs[PPO]:
            raise Untested("the evaluation is of other runs")
        one, two = ([*map(_means, runs[kind].values())] for kind in (CORY, other))
        smallest = lambda a, b: min(x - y for x, y in zip(_means(a), _means(b), strict=True))  # noqa: E731
        found = _figure(smallest, one, two)
        return found if other == PPO else Figure(found.value, found.low, found.high, (len(one),))

    return figure


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [mean(values) for values in zip(*rows, strict=True)]


IMDB, GSM8K, CURVES = ("imdb_curves",), ("gsm8k_curves",), ("imdb_curves", "gsm8k_curves")
ABLATIONS, COOPERATION = ("imdb_ablations",), ("imdb_cooperation",)
RATES, FRONTIERS = ("imdb_learning_rate", "gsm8k_learning_rate"), ("imdb_frontier", "gsm8k_frontier")
CLAIMS = [
    Claim("E1", "CORY's task reward is similar to PPO's", "task reward, (CORY - PPO) / PPO's gain",
          (-SIMILAR, SIMILAR), IMDB, _two(CORY, PPO, _reward_and_gain, _of_gain)),
    Claim("E1", "PPO's KL is more than twice CORY's", "KL, PPO / CORY", (2, math.inf), IMDB,
          _two(PPO, CORY, _end("kl"), _ratio)),
    Claim("E1", "CORY's combined reward rises", "combined reward, last - first 10 iterations", ABOVE, IMDB,
          _one(CORY, _rise)),
    Claim("E1", "PPO's combined reward falls", "combined reward, last - first 10 iterations", BELOW, IMDB,
          _one(PPO, _rise)),
    Claim("E1", "LLM1 and LLM2 end close together", "combined reward, distance of LLM1 and LLM2 / gain",
          (-math.inf, SIMILAR), IMDB, _one(CORY, _apart_and_gain, _share)),
    Claim("E1, E5", "a larger model does not bring PPO to CORY's KL", "KL, larger PPO / CORY", MORE, ABLATIONS,
          _two("PPO, larger model", CORY, _end("kl"), _ratio)),
    Claim("E2", "PPO's task reward peaks at half time and declines", "task reward, middle - last 10 iterations", ABOVE,
          GSM8K, _one(PPO, _decline)),
    Claim("E2", "CORY's task reward does not decline", "task reward, middle - last 10 iterations", (-math.inf, 0.05),
          GSM8K, _one(CORY, _decline)),
    Claim("E2", "CORY is steadier", "spread around running mean, PPO / CORY", MORE, GSM8K,
          _two(PPO, CORY, _unsteadiness, _ratio)),
    Claim("E2", "PPO's KL does not converge", "growth of the KL in the last 10 iterations", (0.05, math.inf), GSM8K,
          _one(PPO, _growth_of_kl, _share)),
    Claim("E2", "CORY's KL converges", "growth of the KL in the last 10 iterations", (-0.05, 0.05), GSM8K,
          _one(CORY, _growth_of_kl, _share)),
    Claim("E2", "CORY's task reward is higher", "task reward, CORY - PPO", ABOVE, GSM8K,
          _two(CORY, PPO, _end("task_reward"), _difference)),
    Claim("E2", "CORY's KL is lower", "KL, PPO / CORY", MORE, GSM8K, _two(PPO, CORY, _end("kl"), _ratio)),
    Claim("E3", "CORY is above the base at every k", "pass@k, CORY - base, smallest over k", ABOVE, GSM8K,
          _passes("base")),
    Claim("E3", "CORY is above PPO at every k", "pass@k, CORY - PPO, smallest over k", ABOVE, GSM8K, _passes(PPO)),
    Claim("E4", "CORY's frontier lies outside PPO's", "hypervolume, (CORY - PPO) / all", ABOVE, FRONTIERS,
          _frontiers_apart),
    Claim("E5", "without knowledge transfer the reward is less steady", "spread around running mean, without / with",
          MORE, ABLATIONS, _two(NO_TRANSFER, CORY, _unsteadiness, _ratio)),
    Claim("E5", "without knowledge transfer the KL is higher", "KL, without / with", MORE, ABLATIONS,
          _two(NO_TRANSFER, CORY, _end("kl"), _ratio)),
    Claim("E5", "without role exchange the reward is as good", "task reward, (without - with) / gain",
          (-SIMILAR, SIMILAR), ABLATIONS, _two(NO_EXCHANGE, CORY, _reward_and_gain, _of_gain)),
    Claim("E5", "without role exchange the KL is much higher", "KL, without / with", (MUCH, math.inf), ABLATIONS,
          _two(NO_EXCHANGE, CORY, _end("kl"), _ratio)),
    Claim("E5", "the fixed observer's KL is well below the fixed pioneer's", "KL, fixed pioneer / observer",
          (MUCH, math.inf), ABLATIONS, _one(NO_EXCHANGE, _agents("kl"), _share)),
    Claim("E6", "PPO collapses at learning rates at which CORY is stable", "collapse rate over all rates, PPO - CORY",
          ABOVE, RATES, _collapses(1.0)),
    Claim("E6", "CORY converges near iteration 10", "gain by iterations 11 to 20 / gain, all rates", (0.8, math.inf),
          RATES, _one(CORY, _early_gain, _share)),
    Claim("E6", "PPO's KL accelerates at the smallest rate", "KL, second half's gain / first half's", MORE, RATES,
          _kl_accelerates),
    Claim("E7", "cooperation gives more reward than competition", "task reward, coefficient 1 - coefficient -1", ABOVE,
          COOPERATION, _values_apart(-1, 0, "task_reward", _difference)),
    Claim("E7", "cooperation gives a lower KL than competition", "KL, coefficient -1 / coefficient 1", MORE,
          COOPERATION, _values_apart(0, -1, "kl", _ratio)),
    Claim("E8", "PPO's texts repeat themselves", "distinct-2, end / start", (-math.inf, 0.5), IMDB,
          _one(PPO, _distinct_share)),
    Claim("E8", "CORY's texts do not", "distinct-2, end / start", (0.5, math.inf), IMDB, _one(CORY, _distinct_share)),
    Claim("E8", "PPO's texts run on to the token limit", "pioneer's length / limit", (0.9, math.inf), GSM8K,
          _one(PPO, _share_of_limit)),
    Claim("E8", "CORY's texts do not", "pioneer's length / limit", (-math.inf, 0.9), GSM8K,
          _one(CORY, _share_of_limit)),
    Claim("secondary", "12.3 % better policy optimality", "combined reward, (CORY - PPO) / |PPO|", (0.123, math.inf),
          CURVES, _two(CORY, PPO, _end("combined_reward"), _relative)),
    Claim("secondary", "67 % fewer collapses", "collapse rate over all rates, 0.33 PPO - CORY", ABOVE, RATES,
          _collapses(1 - 0.67)),
    Claim("secondary", "41 % lower training variance", "1 - variance of CORY / PPO", (0.41, math.inf), CURVES,
          _two(CORY, PPO, rewards, _less_variance)),
]  # fmt: skip


def gather(name: str, scale: str, runs: Path) -> Evidence:
    """What an experiment's runs tell.

    Raises:
        Untested: not all of its runs have ended, or they have other settings.
        UserError: a file cannot be read.
    """
    experiment = read_experiment(ROOT / f"configs/experiments/{name}.yaml")
    needs = dict.fromkeys(experiment.scales[scale].needs, "some/folder")
    there = [p.folder for p in plan(experiment, scale, needs, runs) if (p.folder / "summary.json").exists()]
    if not there:
        raise Untested("not run")
    first = flat(read(there[0]).settings)
    planned = plan(experiment, scale, {key: str(first[key]) for key in needs}, runs)
    try:
        ended = [item for item in planned if item.state() == "finished"]
    except UserError:
        raise Untested("runs of other settings") from None
    if len(ended) < len(planned):
        raise Untested(f"{len(ended)} of {len(planned)} runs ended")
    by_name: dict[str, list[Record]] = {}
    for item in ended:
        by_name.setdefault(item.label, []).append(read(item.folder))
    values = list(experiment.scales[scale].values or [])
    return Evidence(by_name, values, experiment.over, runs / scale / f"{name}-evaluation" / "evaluation.json")


def judge(scales: Sequence[str], runs: Path) -> list[dict[str, str]]:
    """A row for each claim, task and scale: the figure and the verdict."""
    known: dict[tuple[str, str], Evidence | Untested] = {}
    rows = []
    for claim in CLAIMS:
        for name in claim.experiments:
            for scale in scales:
                if scale not in read_experiment(ROOT / f"configs/experiments/{name}.yaml").scales:
                    continue
                if (name, scale) not in known:
                    try:
                        known[name, scale] = gather(name, scale, runs)
                    except Untested as why:
                        known[name, scale] = why
                try:
                    evidence = known[name, scale]
                    if isinstance(evidence, Untested):
                        raise evidence
                    figure = claim.figure(evidence)
                    text, verdict = str(figure), figure.verdict(claim.holds)
                except Untested as why:
                    text, verdict = str(why), "not tested"
                rows.append(
                    {"claim": claim.number, "the paper says": claim.says, "at": f"{name.split('_')[0]}, {scale}",
                     "measured": f"{claim.measured}: {_range(claim.holds)}", "value": text, "verdict": verdict}
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
    files = {name for claim in CLAIMS for name in claim.experiments}
    known = {scale for name in files for scale in read_experiment(ROOT / f"configs/experiments/{name}.yaml").scales}
    for scale in args.scales:
        if scale not in known:
            raise UserError(f"scales: expected some of {sorted(known)}, got {scale!r}")
    rows = judge(args.scales, Path(args.runs).resolve())
    text = markdown_table(rows)
    print(text)
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        replace_text(Path(args.out), HEAD + "\n" + text)
        print(f"Written to {args.out}")


HEAD = """# The paper's claims

A claim is reproduced where the 95 % interval of the figure (bootstrap over seeds) lies wholly in the range that is
named with it. Else it is not: contradicted where the interval lies wholly outside, undecided where it does not. That is
said of the scale in the table, not of the paper's own models. Figures are of training, over both agents and their
roles, as in the paper's curves, where nothing else is said; those of pass@k are of each agent alone, and their
intervals leave out the spread over problems. With three seeds such an interval is too narrow: it covers about three
cases in four. Definitions: docs/metrics.md, "Comparison"; docs/experiments.md, "Claims".
"""


if __name__ == "__main__":
    main(command_line)
