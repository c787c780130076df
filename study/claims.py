"""Judges the paper's claims by the results of the experiments: reproduced, contradicted, undecided, or not tested.

    python -m study.claims --out results/claims.md

Each claim is an estimate and the range in which its 95 % interval must lie (docs/experiments.md, "Claims"). Nothing is
run: the files of `study.experiment` under `--results` suffice. A claim is judged by the seeds that every group of its
experiment has ended, and not tested where they are fewer than five.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cory.command import Arguments, main
from cory.errors import UserError, counted
from cory.run.folder import write_text
from study.cells import markdown_table
from study.estimates import (
    CORY,
    PPO,
    Estimate,
    Untested,
    agents,
    between,
    collapses,
    decline,
    distance_of_agents,
    early_gain,
    end,
    gain,
    growth_of_kl,
    kl_accelerates,
    measured,
    passes,
    per_gain,
    rise,
    share,
    share_of_limit,
    texts_collapse,
    unsteadiness,
)
from study.experiment_file import Experiment, read_experiment
from study.frame import Study, read_study
from study.frontier import apart
from study.intervals import FEWEST, Interval, difference, ratio
from study.plan import checkout_file, plan

SIMILAR = 0.2  # of the gain in task reward: values this far apart count as similar or close
MUCH = 1.5  # ratio from which on something is "much" or "well" above
ABOVE, BELOW, MORE = (0.0, math.inf), (-math.inf, 0.0), (1.0, math.inf)
NO_TRANSFER, NO_EXCHANGE = "CORY, no transfer", "CORY, no exchange"
COMPETITION = "CORY, weight -1"
IMDB, GSM8K = "imdb_noise", "gsm8k_credit"
ABLATIONS, COOPERATION = "imdb_ablations", "imdb_cooperation"
RATES, FRONTIERS = "imdb_learning_rate", "imdb_frontier"


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    Args:
        number: of its experiment. says: in words. measured: what is estimated.
        holds: the open range in which the estimate's interval must lie. experiment: that it is judged by.
        estimate: raises Untested where it cannot be had.
    """

    number: str
    says: str
    measured: str
    holds: tuple[float, float]
    experiment: str
    estimate: Estimate


CLAIMS = [
    Claim("E1", "CORY's task reward is similar to PPO's", "task reward, (CORY - PPO) / PPO's gain",
          (-SIMILAR, SIMILAR), IMDB, per_gain(CORY, PPO, "task_reward")),
    Claim("E1", "PPO's KL is more than twice CORY's", "KL, PPO / CORY", (2, math.inf), IMDB,
          between(PPO, CORY, end("kl"), ratio)),
    Claim("E1", "PPO's KL is more than twice CORY's, each with its published script's settings",
          "KL, PPO, repetition penalty / CORY, all three and repetition penalty", (2, math.inf), "imdb_confounders",
          between("PPO, repetition penalty", "CORY, all three and repetition penalty", end("kl"), ratio)),
    Claim("E1", "CORY's combined reward rises", "combined reward, last - first 10 iterations", ABOVE, IMDB,
          measured(CORY, rise)),
    Claim("E1", "PPO's combined reward falls", "combined reward, last - first 10 iterations", BELOW, IMDB,
          measured(PPO, rise)),
    Claim("E1", "agent_1 and agent_2 end close together", "combined reward, distance of agent_1 and agent_2 / gain",
          (-math.inf, SIMILAR), IMDB, share(CORY, distance_of_agents, gain)),
    Claim("E1, E5", "a larger model does not bring PPO to CORY's KL", "KL, larger PPO / CORY", MORE, ABLATIONS,
          between("PPO, larger model", CORY, end("kl"), ratio)),
    Claim("E2", "PPO's task reward peaks at half time and declines", "task reward, middle - last 10 iterations", ABOVE,
          GSM8K, measured(PPO, decline)),
    Claim("E2", "CORY's task reward does not decline", "task reward, middle - last 10 iterations", (-math.inf, 0.05),
          GSM8K, measured(CORY, decline)),
    Claim("E2", "CORY is steadier", "spread by role around running mean, PPO / CORY", MORE, GSM8K,
          between(PPO, CORY, unsteadiness, ratio)),
    Claim("E2", "PPO's KL does not converge", "growth of the KL in the last 10 iterations", (0.05, math.inf), GSM8K,
          share(PPO, growth_of_kl, end("kl"))),
    Claim("E2", "CORY's KL converges", "growth of the KL in the last 10 iterations", (-0.05, 0.05), GSM8K,
          share(CORY, growth_of_kl, end("kl"))),
    Claim("E2", "CORY's task reward is higher", "task reward, CORY - PPO", ABOVE, GSM8K,
          between(CORY, PPO, end("task_reward"), difference)),
    Claim("E2", "CORY's KL is lower", "KL, PPO / CORY", MORE, GSM8K, between(PPO, CORY, end("kl"), ratio)),
    Claim("E3", "CORY is above the base at every k", "pass@k, CORY - base, smallest over k", ABOVE, GSM8K,
          passes(None)),
    Claim("E3", "CORY is above PPO at every k", "pass@k, CORY - PPO, smallest over k", ABOVE, GSM8K, passes(PPO)),
    Claim("E4", "CORY's frontier is ahead of PPO's", "hypervolume, (CORY - PPO) / all", ABOVE, FRONTIERS,
          lambda study: apart(study, CORY, PPO)),
    Claim("E5", "without knowledge transfer the reward is less steady",
          "spread by role around running mean, without / with", MORE, ABLATIONS,
          between(NO_TRANSFER, CORY, unsteadiness, ratio)),
    Claim("E5", "without knowledge transfer the KL is higher", "KL, without / with", MORE, ABLATIONS,
          between(NO_TRANSFER, CORY, end("kl"), ratio)),
    Claim("E5", "without role exchange the reward is as good", "task reward, (without - with) / gain",
          (-SIMILAR, SIMILAR), ABLATIONS, per_gain(NO_EXCHANGE, CORY, "task_reward")),
    Claim("E5", "without role exchange the KL is much higher", "KL, without / with", (MUCH, math.inf), ABLATIONS,
          between(NO_EXCHANGE, CORY, end("kl"), ratio)),
    Claim("E5", "the fixed observer's KL is well below the fixed pioneer's", "KL, fixed pioneer / observer",
          (MUCH, math.inf), ABLATIONS, agents(NO_EXCHANGE, "kl", ratio)),
    Claim("E6", "PPO collapses at learning rates at which CORY is stable",
          "iterations to collapse, mean over all rates, CORY - PPO", ABOVE, RATES, collapses),
    Claim("E6", "CORY converges near iteration 10", "gain by iterations 11 to 20 / gain, all rates", (0.8, math.inf),
          RATES, share(CORY, early_gain, gain)),
    Claim("E6", "PPO's KL accelerates at the smallest rate", "KL, second half's gain / first half's", MORE, RATES,
          kl_accelerates),
    Claim("E7", "cooperation gives more reward than competition", "task reward, coefficient 1 - coefficient -1", ABOVE,
          COOPERATION, between(CORY, COMPETITION, end("task_reward"), difference)),
    Claim("E7", "cooperation gives a lower KL than competition", "KL, coefficient -1 / coefficient 1", MORE,
          COOPERATION, between(COMPETITION, CORY, end("kl"), ratio)),
    Claim("E8", "PPO's texts repeat themselves, CORY's do not",
          "share of runs whose distinct-2 falls below half of the first iteration's, PPO - CORY", ABOVE, IMDB,
          texts_collapse),
    Claim("E8", "PPO's texts run on to the token limit", "pioneer's length / limit", (0.9, math.inf), GSM8K,
          measured(PPO, share_of_limit)),
    Claim("E8", "CORY's texts do not run on", "pioneer's length / limit", (-math.inf, 0.9), GSM8K,
          measured(CORY, share_of_limit)),
]  # fmt: skip


@dataclass(frozen=True)
class Judgement:
    """What became of a claim at one scale of its experiment.

    Args:
        regime: the experiment and the scale.
        estimate: with its interval and n; empty where the claim was not tested.
        outcome: the verdict, or why there is none.
    """

    claim: Claim
    regime: str
    estimate: str
    outcome: str

    @property
    def tested(self) -> bool:
        """Whether there is a verdict."""
        return self.estimate != ""


@cache
def experiment_of(name: str) -> Experiment:
    """A shipped experiment, by name. Raises a UserError if this is no checkout."""
    return read_experiment(checkout_file(f"configs/experiments/{name}.yaml", "experiment"))


def verdict(interval: Interval, holds: tuple[float, float]) -> str:
    """Whether an interval lies where a claim needs it. Raises Untested if it decides nothing."""
    if interval.n < FEWEST:
        raise Untested(few(interval.n))
    if not all(map(math.isfinite, interval[:3])):
        raise Untested("no interval")
    if holds[0] < interval.low and interval.high < holds[1]:
        return "reproduced"
    if interval.high <= holds[0] or interval.low >= holds[1]:
        return "contradicted"
    return "undecided"


def few(seeds: int) -> str:
    """Why so many seeds decide nothing."""
    return f"{counted(seeds, 'seed')} of at least {FEWEST}"


def read_studies(results: Path) -> dict[tuple[str, str], Study]:
    """The studies of the folders under `results`, by experiment and scale.

    Raises:
        UserError: a file cannot be read, or two folders are of one experiment and scale.
    """
    studies: dict[tuple[str, str], Study] = {}
    folders: dict[tuple[str, str], Path] = {}
    for file in sorted(results.glob("*/runs.csv")):
        study = read_study(file.parent)
        if not any(study.runs["experiment"]):
            continue  # a comparison
        first = study.runs.iloc[0]
        of = (first["experiment"], first["scale"])
        if of in folders:
            raise UserError(
                f"--results: expected one folder for each experiment and scale, got {str(folders[of])!r} and "
                f"{str(file.parent)!r} of {of[0]}, {of[1]}"
            )
        folders[of] = file.parent
        studies[of] = study
    return studies


def of_ended_seeds(study: Study, experiment: Experiment, scale: str) -> Study:
    """The study of the planned seeds that every planned group has ended.

    Raises:
        Untested: they are fewer than `FEWEST`.
    """
    needs = dict.fromkeys(experiment.scales[scale].needs, "some/folder")
    groups = {item.group for item in plan(experiment, scale, needs, Path("runs"))}
    ended = set(zip(study.runs["group"], study.runs["seed"], strict=True))
    seeds = [
        seed
        for seed in experiment.scales[scale].seeds
        if all((group, seed) in ended for group in groups)
    ]
    if len(seeds) < FEWEST:
        raise Untested(few(len(seeds)))
    return study.of_seeds(seeds)


def judge(results: Path) -> list[Judgement]:
    """Each claim at each scale of its experiment, where there are results of it."""
    studies = read_studies(results)
    judged_by: dict[tuple[str, str], Study | Untested] = {}
    judgements = []
    for claim in CLAIMS:
        name = claim.experiment
        experiment = experiment_of(name)
        for scale in experiment.scales:
            if (name, scale) not in studies:
                continue
            if (name, scale) not in judged_by:
                try:
                    study = of_ended_seeds(studies[name, scale], experiment, scale)
                    judged_by[name, scale] = study
                except Untested as reason:
                    judged_by[name, scale] = reason
            planned = len(experiment.scales[scale].seeds)
            study_or_reason = judged_by[name, scale]
            judgements.append(_judged(claim, f"{name} at {scale}", study_or_reason, planned))
    return judgements


def _judged(claim: Claim, regime: str, study: Study | Untested, planned: int) -> Judgement:
    try:
        if isinstance(study, Untested):
            raise study
        interval = claim.estimate(study)
        outcome = verdict(interval, claim.holds)
    except Untested as reason:
        return Judgement(claim, regime, "", str(reason))
    of_planned = f" of {planned} planned" if interval.n < planned else ""
    return Judgement(claim, regime, f"{interval}, n = {interval.n}{of_planned}", outcome)


def page(judgements: Sequence[Judgement]) -> str:
    """The claims in Markdown: a row for each regime in which a claim was tested, then the others, once each."""
    tested = [row for row in judgements if row.tested]
    verdicts = Counter(row.outcome for row in tested)
    tally = ", ".join(f"{number} {outcome}" for outcome, number in sorted(verdicts.items()))
    rows = [
        {
            "the paper says": _statement(row.claim),
            "regime": row.regime,
            "measured": f"{row.claim.measured}: {_range(row.claim.holds)}",
            "estimate": row.estimate,
            "verdict": row.outcome,
        }
        for row in tested
    ]
    parts = [HEAD, f"## Tested\n\n{tally or 'None'}.\n"]
    if rows:
        parts.append(markdown_table(rows))
    parts.append("## Without a verdict\n")
    for reason, statements in _untested(judgements).items():
        parts.append(f"{reason}:\n")
        parts += [f"* {statement}" for statement in statements] + [""]
    return "\n".join(parts)


def _untested(judgements: Sequence[Judgement]) -> dict[str, list[str]]:
    """The claims without a verdict in any regime, by the reasons."""
    by_reason: dict[str, list[str]] = {}
    for claim in CLAIMS:
        of_claim = [row for row in judgements if row.claim is claim]
        if not any(row.tested for row in of_claim):
            reasons = "; ".join(f"{row.regime} ({row.outcome})" for row in of_claim)
            by_reason.setdefault(reasons or "Not run", []).append(_statement(claim))
    return by_reason


def _statement(claim: Claim) -> str:
    return f"{claim.number}: {claim.says}"


def _range(holds: tuple[float, float]) -> str:
    low, high = holds
    if math.isinf(high):
        return f"above {low:g}"
    return f"below {high:g}" if math.isinf(low) else f"{low:g} to {high:g}"


def command_line(argv: Sequence[str] | None = None) -> None:
    """`python -m study.claims`: see the module."""
    parser = Arguments(__doc__)
    parser.add_argument("--results", default="results", help="Folder of the experiments' results")
    parser.add_argument("--out", help="File for the page. Default: print it only")
    args = parser.parse_args(argv)
    text = page(judge(Path(args.results)))
    print(text)
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(args.out), text)
        print(f"Written to {args.out}")


HEAD = f"""# The paper's claims

The claims of the paper, judged by the runs of this repository. A claim is *reproduced* if the 95 %
interval of the estimate lies wholly in the range named with it, *contradicted* if it lies wholly
outside that range, and *undecided* otherwise. With fewer than {FEWEST} seeds there is no verdict. A
regime is an experiment at a scale; verdicts apply to it, not to the paper's models, and are not
corrected for their number.

Estimates are from training, over both agents and their roles as in the paper's curves, unless stated
otherwise; those of pass@k are of each agent solo. Intervals are Student's t over the n seeds that
every group of the experiment has ended, paired by seed. Definitions, and what words such as *similar*
stand for: [experiments](../docs/experiments.md#claims).
"""


if __name__ == "__main__":
    main(command_line)
