"""The paper's claims judged on runs' folders written by hand."""

import math
import random
import re
import shutil

import pandas as pd
import pytest
from handmade import make_run, write_settings

from cory.errors import UserError
from study import claims, estimates
from study.frame import held_out_rows, join, of_run, write_study
from study.intervals import Interval
from study.plan import plan
from study.results import Results


def make_results(name, tmp_path, scale="tiny", seeds=5, passes=None, **values):
    """The results of an experiment with `seeds` seeds: `values(label, settings)` gives what make_run takes.

    `passes`: pass@1 by the name of a model in an evaluation.
    """
    experiment = claims.experiment_of(name)
    experiment.scales[scale].seeds[:] = range(seeds)
    places = dict.fromkeys(experiment.scales[scale].needs, "some/folder")
    planned = plan(experiment, scale, places, tmp_path / "runs")
    for item in planned:
        if not item.folder.exists():
            changes = {key: change(item.label, item.settings) for key, change in values.items()}
            roles = item.settings["cory"]["num_agents"]
            make_run(item.folder, item.seed, roles, item.settings["iterations"], **changes)
            write_settings(item.folder, item.settings)
    out = tmp_path / "results" / f"{name}_{scale}"
    results = Results(out, name, scale, planned, experiment.over, experiment.baseline or "PPO")
    parts = [
        of_run(item.folder, results.columns(item) | {"seconds": None, "evaluation": "evaluate.py"})
        for item in planned
    ]
    if passes:
        groups = {item.folder.name: (item.group, item.seed) for item in planned}
        rows = [
            {"name": model, "pass@1": p, "pass@1_ci": 9.0, "pass@2": p + 0.1}
            for model, p in passes.items()
        ]
        parts[0].held_out = held_out_rows(rows, groups)
    out.mkdir(parents=True)
    write_study(join(parts), out)
    return out


@pytest.fixture(autouse=True)
def fresh_experiments():
    """`make_results` changes the seeds of the experiments that are read."""
    yield
    claims.experiment_of.cache_clear()


def judged(tmp_path):
    """Estimate and outcome of each claim by its words."""
    return {
        row.claim.says: (row.estimate, row.outcome) for row in claims.judge(tmp_path / "results")
    }


def verdict(low, high, *holds, n=5):
    return claims.verdict(Interval((low + high) / 2, low, high, n), holds)


def test_a_verdict_is_where_the_interval_lies():
    assert verdict(2.1, 3, 2, math.inf) == "reproduced"
    assert verdict(1.9, 3, 2, math.inf) == "undecided"
    assert verdict(1, 2, 2, math.inf) == "contradicted"
    assert verdict(-0.1, 0.1, -0.2, 0.2) == "reproduced"
    assert verdict(-0.3, 0.1, -0.2, 0.2) == "undecided"
    assert verdict(0.3, 0.4, -0.2, 0.2) == "contradicted"
    with pytest.raises(estimates.Untested, match="no interval"):
        verdict(math.nan, math.nan, 2, math.inf)
    with pytest.raises(estimates.Untested, match="4 seeds of at least 5"):
        verdict(2.1, 3, 2, math.inf, n=4)


def test_claims_of_the_curves_are_judged_by_their_rows(tmp_path):
    def kl(label, settings):
        return (6.0 if label == "PPO" else 1.0) + 0.01 * settings["seed"]

    make_results(
        "imdb_noise",
        tmp_path,
        "tiny_full_kl",
        kl=kl,
        reward=lambda label, settings: 0.1 * settings["seed"],
    )
    found = judged(tmp_path)
    value, outcome = found["PPO's KL is more than twice CORY's"]
    assert value.startswith("5.9") and value.endswith("n = 5") and outcome == "reproduced"
    # rewards rise by 0.1 an iteration: 9 from the first ten to the last ten of 100
    assert found["PPO's combined reward falls"] == (
        "9.00 (9.00 to 9.00), n = 5",
        "contradicted",
    )
    # agent_2 earns 1 more; the agents' rewards are 0.5 above PPO's, whose gain is 9.45
    assert found["CORY's task reward is similar to PPO's"] == (
        "0.05 (0.05 to 0.05), n = 5",
        "reproduced",
    )
    assert found["agent_1 and agent_2 end close together"][0].startswith("0.10 (")
    repeats = "PPO's texts repeat themselves, CORY's do not"
    assert found[repeats] == ("", "no run's texts repeat themselves")


def test_texts_that_repeat_themselves_are_counted_by_run(tmp_path):
    """From 1 at the start to 0.4 in all of PPO's runs and in one of five of CORY's."""

    def distinct(label, settings):
        return 0.4 if label == "PPO" or (label == "CORY" and settings["seed"] == 0) else 0.9

    make_results("imdb_noise", tmp_path, "tiny_full_kl", distinct=distinct)
    value, outcome = judged(tmp_path)["PPO's texts repeat themselves, CORY's do not"]
    assert value.startswith("0.80 (") and outcome == "reproduced"


def test_pass_at_k_is_above_at_every_k_if_all_intervals_are(tmp_path):
    passes = {"base": 0.3}
    for seed in range(5):
        passes[f"PPO-seed{seed}/agent_1"] = 0.5
        passes[f"CORY-seed{seed}/agent_1"] = 0.4
        passes[f"CORY-seed{seed}/agent_2"] = 0.5
        passes[f"CORY-seed{seed}/agent_2 after agent_1"] = 0.9
        passes[f"PPO-seed{seed}/agent_1 after itself"] = 0.9
    make_results("gsm8k_credit", tmp_path, passes=passes)
    found = judged(tmp_path)
    assert found["CORY is above the base at every k"] == (
        "0.15 (0.15 to 0.15), n = 5",
        "reproduced",
    )
    assert found["CORY is above PPO at every k"][0].startswith("-0.05 ")
    assert found["PPO's texts run on to the token limit"][0].startswith(f"{9 / 40:.2f}")


def test_what_is_over_all_values_is_the_mean_of_each_seed(tmp_path):
    def distinct(label, settings):
        return 0.4 if label == "PPO" and settings["ppo"]["learning_rate"] > 2e-4 else 0.9

    make_results("imdb_learning_rate", tmp_path, distinct=distinct)
    found = judged(tmp_path)
    rate = "PPO collapses at learning rates at which CORY is stable"
    # At two of the four rates, every seed.
    assert found[rate] == ("0.50 (0.50 to 0.50), n = 5", "reproduced")
    # agent_2 earns 1 more than the pioneer of the first iteration, and rewards rise by 0.1 an iteration: the gain is
    # 0.5 + 0.1 * 14.5 by iterations 11 to 20, and 0.5 + 0.1 * 94.5 at the end
    assert (
        found["CORY converges near iteration 10"][0] == f"{1.95 / 9.95:.2f} (0.20 to 0.20), n = 5"
    )


def test_frontiers_and_values_are_compared_seed_by_seed(tmp_path):
    def kl(label, settings):
        return (6.0 if label == "PPO" else 1.0) * (1 + settings["ppo"]["init_kl_coef"])

    def weighted(label, settings):
        return settings["cory"]["weight"] + 0.1 * settings["seed"]

    make_results("imdb_frontier", tmp_path, kl=kl)
    assert judged(tmp_path)["CORY's frontier lies outside PPO's"][1] == "reproduced"
    make_results("imdb_cooperation", tmp_path / "other", reward=weighted, kl=lambda *_: 2.0)
    found = judged(tmp_path / "other")
    reward = found["cooperation gives more reward than competition"]
    assert reward == ("2.00 (2.00 to 2.00), n = 5", "reproduced")
    assert found["cooperation gives a lower KL than competition"][0] == "1.00 (1.00 to 1.00), n = 5"


def test_claims_are_judged_by_the_seeds_that_every_group_has_ended(tmp_path):
    def kl(label, settings):
        return 6.0 if label == "PPO" and settings["seed"] < 5 else 1.0

    out = make_results("imdb_noise", tmp_path, "tiny_full_kl", seeds=6, kl=kl)
    name = "PPO's KL is more than twice CORY's"
    assert judged(tmp_path)[name][0].endswith(", n = 6")
    runs = pd.read_csv(out / "runs.csv", dtype=str, keep_default_na=False)
    of_one_group = runs["group"] == "CORY, mean"  # no part of the claim, but of the experiment
    runs[~(of_one_group & (runs["seed"] == "5"))].to_csv(out / "runs.csv", index=False)
    # Without seed 5, whose KLs are equal.
    assert judged(tmp_path)[name] == ("6.00 (6.00 to 6.00), n = 5 of 6 planned", "reproduced")
    runs[~(of_one_group & runs["seed"].isin(["4", "5"]))].to_csv(out / "runs.csv", index=False)
    assert judged(tmp_path)[name] == ("", "4 seeds of at least 5")


def test_a_claim_without_an_interval_is_not_tested(tmp_path):
    make_results("imdb_noise", tmp_path, "tiny_full_kl", kl=lambda label, settings: 0.0)
    assert judged(tmp_path)["PPO's KL is more than twice CORY's"] == ("", "no interval")


def test_the_page_has_a_row_for_each_regime_and_other_claims_once(tmp_path, capsys):
    def page():
        claims.command_line(["--results", str(tmp_path / "results"), "--out", str(file)])
        capsys.readouterr()
        text = file.read_text()
        assert text.startswith("# The paper's claims\n")
        return text.split("\n## Not tested\n")

    file = tmp_path / "new/claims.md"
    tested, untested = page()
    assert "| the paper says |" not in tested
    assert untested.count("\n* ") == len(claims.CLAIMS)
    assert re.findall(r"^(.+):$", untested, re.MULTILINE) == [claims.WITHDRAWN]

    for scale in ("tiny_full_kl", "tiny_sampled_kl"):
        make_results("imdb_noise", tmp_path, scale, kl=lambda *_: 2.0, distinct=lambda *_: 0.4)
    make_results("imdb_cooperation", tmp_path, seeds=3)
    tested, untested = page()
    of_imdb = [claim for claim in claims.CLAIMS if claim.experiments == claims.IMDB]
    for claim in of_imdb:
        rows = [line for line in tested.splitlines() if f"| {claim.number}: {claim.says} |" in line]
        regimes = [row.split(" | ")[1] for row in rows]
        assert regimes == ["imdb_noise at tiny_full_kl", "imdb_noise at tiny_sampled_kl"]
    assert untested.count("\n* ") == len(claims.CLAIMS) - len(of_imdb)
    assert "\nimdb_cooperation at tiny (3 seeds of at least 5):\n" in untested


def test_two_folders_of_one_experiment_and_scale_are_refused(tmp_path):
    """Which of them counts would be by their names."""
    out = make_results("imdb_noise", tmp_path, "tiny_full_kl", seeds=2)
    shutil.copytree(out, out.with_name("again"))
    with pytest.raises(UserError, match=r"--results: .*again"):
        claims.read_studies(tmp_path / "results")


def test_two_agents_as_noisy_as_one_are_as_unsteady():
    """Not steadier, as the mean of their rewards would be."""
    noise = random.Random(0)
    rewards = {
        name: [noise.choice([-1.0, 1.0]) for _ in range(4000)] for name in ("agent_1", "agent_2")
    }
    rows = [
        {
            "iteration": k,
            "agent": name,
            "role": ("pioneer", "observer")[(place + k // 5) % 2],
            "task_reward": values[k],
        }
        for k in range(4000)
        for place, (name, values) in enumerate(rewards.items())
    ]
    run = pd.DataFrame(rows)
    one = estimates.unsteadiness(run[run["role"] == "pioneer"])
    # Of unit noise less a mean over 10 in which it is.
    assert one == pytest.approx(0.9**0.5, abs=0.02)
    assert estimates.unsteadiness(run) == pytest.approx(one, abs=0.02)


def test_a_share_of_a_gain_that_may_be_0_has_no_verdict(tmp_path):
    def drop(label, settings):
        return 0.0 if settings["seed"] else 1.0

    out = make_results("imdb_learning_rate", tmp_path, reward=drop)
    metrics = pd.read_csv(out / "metrics.csv.gz")
    metrics.loc[
        (metrics["seed"] == 0) & (metrics["iteration"] > 0), "task_reward"
    ] = -1.0  # it loses, and gains nothing
    metrics.to_csv(out / "metrics.csv.gz", index=False)
    found = judged(tmp_path)["CORY converges near iteration 10"]
    assert found == ("", "no interval")
