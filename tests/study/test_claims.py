"""The paper's claims, judged on frames made by hand."""

import math
import random
import shutil
from pathlib import Path

import pandas as pd
import pytest
from handmade import make_study

from cory.errors import UserError
from study import claims, estimates
from study.estimates import CORY, PPO, end
from study.frame import LIMIT, write_study
from study.frontier import apart
from study.intervals import Interval, difference, ratio
from study.plan import plan

ROLES = ("pioneer", "observer")


def rising(factor, distinct=1.0):
    """Rewards rise by 0.1 an iteration, the observer earns 1 more; the KL grows in proportion to seed + 1."""

    def values(seed, k, role):
        return 0.1 * k + (role == "observer"), factor * (1 + seed) * k, distinct if k else 1.0

    return values


def verdict(low, high, *holds, n=5):
    return claims.verdict(Interval((low + high) / 2, low, high, n), holds)


def test_a_verdict_is_where_the_interval_lies():
    assert verdict(2.1, 3, 2, math.inf) == "reproduced"
    assert verdict(1.9, 3, 2, math.inf) == "undecided"
    assert verdict(1, 2, 2, math.inf) == "contradicted"
    assert verdict(-0.1, 0.1, -0.2, 0.2) == "reproduced"
    assert verdict(-0.3, 0.1, -0.2, 0.2) == "undecided"
    assert verdict(0.3, 0.4, -0.2, 0.2) == "contradicted"
    for low, n in ((math.nan, 5), (2.1, 4)):
        with pytest.raises(estimates.Untested):
            verdict(low, low, 2, math.inf, n=n)


def test_estimates_of_the_curves():
    """By hand, of 40 iterations: the means of k are 4.5, 14.5, 19.5, 24.5, 34.5 in the first ten and so on."""
    study = make_study({PPO: rising(6.0), CORY: rising(1.0)}, roles=ROLES)
    study.runs[LIMIT] = 18
    e = estimates
    values = {
        6.0: e.between(PPO, CORY, end("kl"), ratio),
        # The agents' mean is 0.5 above PPO, whose gain is 3.45.
        0.5 / 3.45: e.per_gain(CORY, PPO, "task_reward"),
        1 / 3.95: e.share(CORY, e.distance_of_agents, e.gain),
        -1.5: e.measured(PPO, e.decline),
        1.95 / 3.95: e.share(CORY, e.early_gain, e.gain),
        10 / 34.5: e.share(PPO, e.growth_of_kl, end("kl")),
        15 / 19.5: e.share(PPO, e.second_half_of_kl, e.first_half_of_kl),
        -1.0: e.agents(CORY, "task_reward", difference),
        0.5: e.measured(PPO, e.share_of_limit),
        # 3 more reward, and 0.3 times 30 times the KL of an iteration, which is 3 in the mean of the seeds.
        3 - 0.3 * 30 * 3: e.measured(CORY, e.rise),
        # PPO after 14, 10, 10, 10 and 10 iterations, CORY after 31, 23, 19 and 16, and not in the first seed.
        25.8 - 10.8: e.collapses,
    }
    for expected, estimate in values.items():
        interval = estimate(study)
        assert interval.value == pytest.approx(expected, rel=1e-6) and interval.n == 5
    with pytest.raises(estimates.Untested):
        e.measured("GRPO", e.gain)(study)
    assert e.measured(CORY, e.gain)(study).low == pytest.approx(3.95)  # alike in all seeds


def test_a_share_of_a_gain_that_may_be_0_has_no_interval():
    def loses(seed, k, role):
        return (-1.0 if k and seed == 0 else 0.1 * k), 1.0, 1.0

    study = make_study({CORY: loses}, roles=ROLES)
    assert math.isnan(estimates.share(CORY, estimates.early_gain, estimates.gain)(study).low)


def test_texts_that_repeat_themselves_are_counted_by_run():
    """From 1 at the start to 0.4 in all of PPO's runs and in one of five of CORY's."""

    def cory(seed, k, role):
        return 1.0, 1.0, (0.4 if k and seed == 0 else 1.0)

    study = make_study({PPO: rising(0.0, distinct=0.4), CORY: cory}, roles=ROLES)
    assert estimates.texts_collapse(study).value == pytest.approx(0.8)
    for none in (estimates.texts_collapse, estimates.collapses):
        with pytest.raises(estimates.Untested):
            none(make_study({PPO: rising(0.0), CORY: rising(0.0)}, roles=ROLES))


def test_frontiers_and_values_are_compared_seed_by_seed():
    points = {"PPO 1": (1, 6), "PPO 10": (2, 9), "CORY 1": (1, 1), "CORY 10": (4, 2)}
    study = make_study(
        {
            name: lambda seed, k, role, of=of: (of[0] + seed, of[1] * (1 + k / 40), 1.0)
            for name, of in points.items()
        }
    )
    study.runs[["family", "value"]] = study.runs["group"].str.split(" ", expand=True).to_numpy()
    assert estimates.sorted_values(study) == ["1", "10"]
    of_all_values = estimates.by_seed(study, PPO, end("task_reward"))
    assert of_all_values.tolist() == pytest.approx([1.5 + seed for seed in range(5)])
    assert apart(study, CORY, PPO).value == pytest.approx(1.0, abs=0.2)
    second, first = 34.5 - 19.5, 40 + 19.5
    assert estimates.kl_accelerates(study).value == pytest.approx(second / first)


def test_pass_at_k_is_above_at_every_k_if_all_intervals_are():
    study = make_study({PPO: rising(1.0), CORY: rising(1.0)})
    rows = [("base", None, "base", 1, 0.3, 0.5)]
    for seed in range(5):
        rows.append((PPO, seed, "agent_1", 1, 0.5, 0.5))
        rows += [(CORY, seed, agent, 1, p, p) for agent, p in (("agent_1", 0.4), ("agent_2", 0.5))]
        rows.append((CORY, seed, "agent_2", 2, 0.9, 0.9))
    columns = ["group", "seed", "agent", "calls", "pass@1", "pass@2"]
    study.held_out = pd.DataFrame(rows, columns=columns)
    assert estimates.passes(None)(study).value == pytest.approx(-0.05)
    assert estimates.passes(PPO)(study)[:2] == pytest.approx((-0.05, -0.05))


def test_two_agents_as_noisy_as_one_are_as_unsteady():
    """Not steadier, as the mean of their rewards would be."""
    noise = random.Random(0)
    rows = [
        {"iteration": k, "role": ROLES[(place + k // 5) % 2], "task_reward": noise.choice([-1.0, 1.0])}
        for k in range(4000)
        for place in range(2)
    ]  # fmt: skip
    run = pd.DataFrame(rows)
    one = estimates.unsteadiness(run[run["role"] == "pioneer"])
    # Of unit noise less a mean over 10 in which it is.
    assert one == pytest.approx(0.9**0.5, abs=0.02)
    assert estimates.unsteadiness(run) == pytest.approx(one, abs=0.02)


SCALE = "tiny_full_kl"
TWICE = "PPO's KL is more than twice CORY's"


@pytest.fixture
def results(tmp_path):
    """Six seeds of each group of imdb_noise. In the last one, PPO's KL is as low as CORY's."""
    experiment = claims.experiment_of("imdb_noise")
    needs = dict.fromkeys(experiment.scales[SCALE].needs, "some/folder")
    groups = {item.group for item in plan(experiment, SCALE, needs, Path("runs"))}

    def kl(name):
        return lambda seed, k, role: (1.0, 6.0 if name == PPO and seed < 5 else 1.0, 1.0)

    study = make_study({name: kl(name) for name in groups}, roles=ROLES, seeds=6, iterations=20)
    study.runs["experiment"] = "imdb_noise"
    study.runs["scale"] = SCALE
    folder = tmp_path / "results/noise"
    folder.mkdir(parents=True)
    write_study(study, folder)
    return folder.parent


def without(results, seeds):
    """Deletes the rows of a group that no claim names, for these seeds."""
    file = results / "noise/runs.csv"
    runs = pd.read_csv(file, dtype=str, keep_default_na=False)
    left_out = (runs["group"] == "CORY, mean") & runs["seed"].isin(seeds)
    runs[~left_out].to_csv(file, index=False)


def judged(results):
    """Estimate and outcome of each claim by its words."""
    return {row.claim.says: (row.estimate, row.outcome) for row in claims.judge(results)}


def test_claims_are_judged_by_the_seeds_that_every_group_has_ended(results):
    assert ", n = 6" in judged(results)[TWICE][0]
    without(results, ["5"])  # whose KLs are equal
    estimate, outcome = judged(results)[TWICE]
    assert estimate.startswith("6.00 (6.00 to 6.00), n = 5 of ") and outcome == "reproduced"
    without(results, ["4"])
    assert judged(results)[TWICE][0] == ""


def test_the_page_has_each_claim_once_or_with_its_verdict(results, tmp_path):
    def page(folder):
        out = tmp_path / "new/claims.md"
        claims.command_line(["--results", str(folder), "--out", str(out)])
        return out.read_text().split("\n## Without a verdict\n")

    tested, untested = page(tmp_path / "none")
    assert "| the paper says |" not in tested and untested.count("\n* ") == len(claims.CLAIMS)
    tested, untested = page(results)
    assert f": {TWICE} | imdb_noise at {SCALE} |" in tested
    of_page = tested.count(f"| imdb_noise at {SCALE} |") + untested.count("\n* ")
    assert of_page == len(claims.CLAIMS)
    shutil.copytree(results / "noise", results / "again")
    with pytest.raises(UserError, match=r"^--results: .*again"):
        claims.read_studies(results)
