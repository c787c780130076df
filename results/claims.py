"""Judges the paper's claims by the files under results/: whether a claim's direction holds, and how large it is.

    python -m results.claims --out results/claims.md

The script runs no training. Definitions: docs/experiments.md, "Claims".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cory.command import Arguments, main
from cory.run.folder import write_text
from results.estimates import (
    CORY,
    OPEN,
    PPO,
    Estimate,
    Untested,
    alone,
    between,
    by_seed,
    collapsed,
    collapses_later,
    decline,
    distance_of_agents,
    early_gain,
    end,
    gain,
    kl_accelerates,
    late_growth,
    measured,
    of_fixed_roles,
    over,
    passes,
    prepared,
    provided,
    relative,
    rise,
    share_of_limit,
    spread,
    texts_collapsed,
    variance,
)
from study.cells import Rows, markdown_table
from study.frame import BASE, Study, read_study
from study.frontier import apart
from study.intervals import FEWEST, Interval, difference, ratio

SIMILAR = 0.2  # relative distance within which a size counts as similar, close, or complete
ABOVE, BELOW, MORE = (0.0, math.inf), (-math.inf, 0.0), (1.0, math.inf)
NEARLY_ALL = (1 - SIMILAR, math.inf)
SHOWN_P = (0.01, 0.05)  # p-values in this range are shown with their interval

SETTINGS = {
    "imdb_partner_full_kl": "toy, full KL, 3e-5",
    "imdb_partner_full_kl_low_rate": "toy, full KL, 1.5e-5",
    "imdb_partner_sampled_kl": "toy, sampled KL, 3e-5",
    "imdb_partner_sampled_kl_low_rate": "toy, sampled KL, 1.5e-5",
    "imdb_stability": "SmolLM2, full KL, 3e-5",
    "imdb_partner_smollm2": "SmolLM2, sampled KL, 1e-4",
    "imdb_confounders": "toy, full KL, 3e-5, published scripts",
    "imdb_ablations_full_kl": "toy, full KL, 3e-5, ablations",
    "imdb_ablations_sampled_kl": "toy, sampled KL, 3e-5, ablations",
    "imdb_frontier_full_kl": "toy, full KL, 3e-5, four etas",
    "imdb_learning_rate_full_kl": "toy, full KL, 5e-6 to 5e-5",
    "imdb_cooperation_full_kl": "toy, full KL, 3e-5, coefficients",
    "gsm8k_credit": "GSM8K's toy",
}
"""The setting of each folder under results/. "toy" is IMDB's. A folder's name begins with its task."""

IMDB = tuple(SETTINGS)[:6]
ABLATIONS = ("imdb_ablations_full_kl", "imdb_ablations_sampled_kl")
FRONTIERS, RATES = ("imdb_frontier_full_kl",), ("imdb_learning_rate_full_kl",)
COOPERATION, SCRIPTS = ("imdb_cooperation_full_kl",), ("imdb_confounders",)
GSM8K = ("gsm8k_credit",)


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    Args:
        says: the claim in words.
        number: the estimated quantity.
        paper: the size that the paper reports.
        holds: the range, without its ends, of estimates that agree with the claim's direction.
        folders: folders under results/, each with one setting in which the claim is judged.
        estimate: computes the quantity, with its interval, from a study.
    """

    says: str
    number: str
    paper: str
    holds: tuple[float, float]
    folders: Sequence[str]
    estimate: Estimate


@dataclass(frozen=True)
class Part:
    """An experiment of the paper.

    Args:
        title: the experiment and its place in the paper.
        task: the paper's task, in capitals; empty if not stated.
        claims: the claims of the experiment.
        note: a caveat for the reader.
    """

    title: str
    task: str
    claims: Sequence[Claim]
    note: str = ""


ours_minus_ppo = partial(between, CORY, PPO, statistic=difference)
ppo_over_ours = partial(between, PPO, CORY, statistic=ratio)
KL, REWARD, COMBINED = end("kl"), end("task_reward"), end("combined_reward")
NO_TRANSFER, NO_EXCHANGE = "CORY, no transfer", "CORY, no exchange"
COMPETITION = "CORY, weight -1"
OTHER_TASK = "The paper's experiment is on GSM8K; here it was made on IMDB's toy."


def ppo_declines(study: Study) -> bool:
    """Whether PPO's task reward falls in the second half of training."""
    return measured(PPO, decline)(study).low > 0


def ppo_collapses(study: Study) -> bool:
    """Whether at least one run of PPO collapses."""
    return bool(by_seed(study, PPO, collapsed).any())


def ppo_runs_on(study: Study) -> bool:
    """Whether PPO's responses come near their length limit."""
    return measured(PPO, share_of_limit)(study).low > NEARLY_ALL[0]


PAPER = [
    Part("E1: subjective reward (Fig. 3)", "IMDB", [
        Claim("CORY's task reward is similar to PPO's", "task reward, (CORY - PPO) / PPO's gain", "similar",
              (-SIMILAR, SIMILAR), IMDB, relative(CORY, PPO, REWARD, gain)),
        Claim("PPO's KL is higher", "KL, PPO / CORY", "more than 2", MORE, IMDB, ppo_over_ours(KL)),
        Claim("PPO's KL is higher, each with its published script's settings", "KL, PPO / CORY", "more than 2", MORE,
              SCRIPTS, between("PPO, repetition penalty", "CORY, all three and repetition penalty", KL, ratio)),
        Claim("CORY's combined reward is higher", "combined reward, CORY - PPO", "higher", ABOVE, IMDB,
              ours_minus_ppo(COMBINED)),
        Claim("CORY's combined reward rises", "combined reward, last - first 10 iterations", "rises", ABOVE, IMDB,
              measured(CORY, rise)),
        Claim("PPO's combined reward falls", "combined reward, last - first 10 iterations", "falls", BELOW, IMDB,
              measured(PPO, rise)),
        Claim("CORY's agents end close together", "combined reward, distance of the agents / gain", "close",
              (-math.inf, SIMILAR), IMDB, measured(CORY, over(distance_of_agents, gain))),
    ]),
    Part("E2: objective reward (Fig. 4)", "GSM8K", [
        Claim("PPO's task reward declines after half time", "task reward, middle - last 10 iterations",
              "peak near iteration 50 of 100", ABOVE, GSM8K, measured(PPO, decline)),
        Claim("CORY's does not decline", "task reward, middle - last 10 iterations", "no decline", BELOW, GSM8K,
              provided(ppo_declines, "PPO's does not decline either", measured(CORY, decline))),
        Claim("CORY is steadier", "spread around the running mean, PPO / CORY", "steadier", MORE, GSM8K,
              ppo_over_ours(spread)),
        Claim("PPO's KL does not converge", "growth in the last 10 iterations / KL", "grows", ABOVE, GSM8K,
              measured(PPO, over(late_growth, KL))),
        Claim("CORY's KL grows less at the end", "growth in the last 10 iterations / KL, CORY - PPO", "less", BELOW,
              GSM8K, ours_minus_ppo(over(late_growth, KL))),
        Claim("CORY's task reward is higher", "task reward, CORY - PPO", "higher", ABOVE, GSM8K,
              ours_minus_ppo(REWARD)),
        Claim("CORY's KL is lower", "KL, PPO / CORY", "lower", MORE, GSM8K, ppo_over_ours(KL)),
        Claim("CORY's combined reward is higher", "combined reward, CORY - PPO", "follows from both", ABOVE, GSM8K,
              ours_minus_ppo(COMBINED)),
    ]),
    Part("E3: pass@k (Fig. 5)", "GSM8K", [
        Claim("CORY is above the base at every k", "pass@k, CORY - base, smallest over k", "pass@1 of 0.18", ABOVE,
              GSM8K, passes(BASE)),
        Claim("CORY is above PPO at every k", "pass@k, CORY - PPO, smallest over k", "above", ABOVE, GSM8K,
              passes(PPO)),
    ]),
    Part("E4: sub-optimal frontier (Fig. 2c)", "GSM8K", [
        Claim("CORY's frontier lies outside PPO's", "hypervolume, (CORY - PPO) / all", "outside", ABOVE, FRONTIERS,
              lambda study: apart(study, CORY, PPO)),
    ], f"{OTHER_TASK} There, an eta from 0.1 to 0.6 is not shown to move PPO's KL."),
    Part("E5: ablations (Fig. 6)", "IMDB", [
        Claim("A larger model does not bring PPO to CORY's KL", "KL, larger PPO / CORY", "higher", MORE, ABLATIONS[:1],
              between("PPO, larger model", CORY, KL, ratio)),
        Claim("Without knowledge transfer the reward is less steady", "spread around the running mean, without / with",
              "unstable", MORE, ABLATIONS, between(NO_TRANSFER, CORY, spread, ratio)),
        Claim("Without knowledge transfer the KL is higher", "KL, without / with", "higher", MORE, ABLATIONS,
              between(NO_TRANSFER, CORY, KL, ratio)),
        Claim("Without role exchange the reward is as good", "task reward, (without - with) / gain", "good",
              (-SIMILAR, SIMILAR), ABLATIONS, relative(NO_EXCHANGE, CORY, REWARD, gain)),
        Claim("Without role exchange the KL is higher", "KL, without / with", "much higher", MORE, ABLATIONS,
              between(NO_EXCHANGE, CORY, KL, ratio)),
        Claim("A fixed observer's KL is below the fixed pioneer's", "KL, pioneer / observer", "well below", MORE,
              ABLATIONS, of_fixed_roles(NO_EXCHANGE, KL)),
    ]),
    Part("E6: learning rates (Figs. 7 to 10)", "GSM8K", [
        Claim("PPO collapses at a rate at which CORY is stable", "time to collapse at 5e-5, CORY - PPO",
              "PPO alone collapses", ABOVE, RATES, collapses_later),
        Claim("CORY converges near iteration 10", "gain by iterations 11 to 20 / gain, mean over rates", "about 1",
              NEARLY_ALL, RATES, measured(CORY, over(early_gain, gain))),
        Claim("PPO's KL accelerates at the smallest rate", "KL, second half's growth / first half's", "accelerates",
              MORE, RATES, kl_accelerates),
    ], OTHER_TASK),
    Part("E7: cooperation against competition", "", [
        Claim("Cooperation gives more task reward", "task reward, coefficient 1 - coefficient -1", "higher", ABOVE,
              COOPERATION, between(CORY, COMPETITION, REWARD, difference)),
        Claim("Cooperation gives a lower KL", "KL, coefficient -1 / coefficient 1", "lower", MORE, COOPERATION,
              between(COMPETITION, CORY, KL, ratio)),
    ], "The first row rests on one p-value just below 0.05. The coefficient also changes how much the rewards weigh "
       "against the KL penalty, so weight and cooperation are confounded."),
    Part("E8: text samples, IMDB (Tables 3 and 4)", "IMDB", [
        Claim("PPO's texts repeat themselves, CORY's do not", "share of runs whose texts collapse, PPO - CORY",
              "PPO's samples alone", ABOVE, IMDB,
              provided(ppo_collapses, "no run of PPO collapses", between(PPO, CORY, texts_collapsed, difference))),
    ]),
    Part("E8: text samples, GSM8K (Table 5)", "GSM8K", [
        Claim("PPO's texts run on to the token limit", "pioneer's length / limit", "1", NEARLY_ALL, GSM8K,
              measured(PPO, share_of_limit)),
        Claim("CORY's texts do not", "length, PPO / CORY", "more than 1", MORE, GSM8K,
              provided(ppo_runs_on, "PPO's do not either", ppo_over_ours(share_of_limit))),
    ]),
    Part("Method: role exchange (Eq. 5)", "IMDB and GSM8K", [
        Claim("Either agent alone is as good as PPO's",
              "held out, one call, mean over agents: combined reward, of GSM8K pass@1, CORY - PPO", "usable alone",
              ABOVE, IMDB + GSM8K, alone),
    ]),
    Part("A secondary source", "", [
        Claim("Better policy optimality", "combined reward, (CORY - PPO) / PPO's", "0.123", ABOVE, IMDB + GSM8K,
              relative(CORY, PPO, COMBINED, COMBINED)),
        Claim("Fewer collapses", "share of runs that collapse, (CORY - PPO) / PPO's", "-0.67", BELOW, IMDB + GSM8K,
              provided(ppo_collapses, "no run of PPO collapses", relative(CORY, PPO, collapsed, collapsed))),
        Claim("Lower training variance", "variance around the running mean, (CORY - PPO) / PPO's", "-0.41", BELOW,
              IMDB + GSM8K, relative(CORY, PPO, variance, variance)),
    ], "These figures about CORY are not the paper's and came without definitions; the definitions here are ours."),
]  # fmt: skip


def direction(interval: Interval, holds: tuple[float, float]) -> str:
    """Returns whether an interval lies in a claim's range: yes, no, or open."""
    if interval.n < FEWEST or not all(map(math.isfinite, interval[:3])):
        return OPEN
    if holds[0] < interval.low and interval.high < holds[1]:
        return "yes"
    return "no" if interval.high <= holds[0] or interval.low >= holds[1] else OPEN


def judged(claim: Claim, study: Study) -> dict[str, str]:
    """Returns a claim's direction, estimate and n in a setting."""
    try:
        interval = claim.estimate(study)
    except Untested as untested:
        answer, reason = untested.args
        return {"direction": answer, "here": reason, "n": ""}
    text = str(interval)
    if claim.holds in (ABOVE, BELOW, MORE) and SHOWN_P[0] < interval.p < SHOWN_P[1]:
        text += f", p = {interval.p:.3f}"
    return {"direction": direction(interval, claim.holds), "here": text, "n": str(interval.n)}


def table(part: Part, studies: Mapping[str, Study]) -> Rows:
    """Returns a row per claim and setting. A cell that is equal in all rows of a claim is shown only in the first."""
    rows = []
    for claim in part.claims:
        for folder in claim.folders:
            is_first = folder == claim.folders[0]
            on_task = folder.partition("_")[0].upper() in part.task
            cells = judged(claim, studies[folder])
            row = {
                "claim": claim.says if is_first else "",
                "what is measured": claim.number if is_first else "",
                "setting": SETTINGS[folder],
                "the paper's task": ("yes" if on_task else "no") if part.task else "not stated",
                "n": cells["n"],
                "direction": cells["direction"],
                "here": cells["here"],
                "reported": claim.paper if is_first else "",
            }
            rows.append(row)
    return rows


def page(results: Path) -> str:
    """Returns the page of claims in Markdown, grouped by the paper's experiments.

    Raises:
        UserError: a folder of `SETTINGS` is not under `results`.
    """
    studies = {folder: prepared(read_study(results / folder)) for folder in SETTINGS}
    sections = [HEAD]
    for part in PAPER:
        note = f"{part.note}\n\n" if part.note else ""
        sections.append(f"## {part.title}\n\n{note}{markdown_table(table(part, studies))}")
    sections.append("## Settings\n")
    sections += [f"* {text}: [{folder}]({folder}/runs.csv)" for folder, text in SETTINGS.items()]
    return "\n".join([*sections, ""])


def command_line(argv: Sequence[str] | None = None) -> None:
    """Runs `python -m results.claims`; see the module's docstring."""
    parser = Arguments(__doc__)
    parser.add_argument("--results", default="results", help="Folder of the experiments' results")
    parser.add_argument("--out", help="File for the page. Default: print it only")
    args = parser.parse_args(argv)
    text = page(Path(args.results))
    print(text)
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(args.out), text)
        print(f"Written to {args.out}")


HEAD = f"""# The paper's claims

Claims are grouped by the paper's experiments. *Direction* is *yes* if the 95 % interval lies wholly in the claim's
side, *no* if it lies wholly on the other side, and *open* otherwise. *Here* is our estimate, *reported* the paper's
size. A claim about a failure of PPO is *not testable here* if PPO does not fail that way.

No row is on the paper's models. *The paper's task* says whether a setting has the task of the paper's experiment. *Toy*
is IMDB's toy, a GPT-2 of 0.57 M parameters. It was also trained on examples in the observer's prompt form, so an
observer is ahead before any training. SmolLM2 has 135 M parameters, quantized to 4 bits and dequantized to float32, and
reads real reviews. GSM8K's toy has generated word problems.

Rows share runs and are not corrected for their number, so do not count them. Unless a row says otherwise, numbers
describe training: an agent's own reward and KL in all its roles, averaged over the last ten iterations. Intervals are
Student's t over n seeds, paired by seed; fewer than {FEWEST} seeds decide nothing. A p-value between {SHOWN_P[0]} and
{SHOWN_P[1]} is shown with its interval. [Definitions](../docs/experiments.md#claims)
"""


if __name__ == "__main__":
    main(command_line)
