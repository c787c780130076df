"""The paper's claims judged on runs' folders written by hand."""

import json
import math
import re
import statistics

import pytest
import yaml
from handmade import make_run

from cory.errors import UserError
from study import claims
from study.estimates import Estimate, difference, estimate, less_variance, share
from study.experiment import plan


def make_experiment(name, runs, scale="tiny", places={}, **values):  # noqa: B006
    """All runs of an experiment at a scale: `values(label, settings)` gives what make_run takes."""
    for item in plan(claims.experiment_of(name), scale, places, runs):
        if not item.folder.exists():
            settings = item.settings
            changes = {key: change(item.label, settings) for key, change in values.items()}
            make_run(item.folder, settings["seed"], settings["cory"]["num_agents"], settings["iterations"], **changes)
            (item.folder / "config.yaml").write_text(yaml.safe_dump(settings))


def verdict(low, high, *holds, seeds=(3, 3)):
    return Estimate((low + high) / 2, low, high, seeds).verdict(holds)


def test_a_verdict_is_where_the_interval_lies():
    assert verdict(2.1, 3, 2, math.inf) == "reproduced"
    assert verdict(1.9, 3, 2, math.inf) == "not reproduced (undecided)"
    assert verdict(1, 2, 2, math.inf) == "not reproduced (contradicted)"
    assert verdict(-0.1, 0.1, -0.2, 0.2) == "reproduced"
    assert verdict(-0.3, 0.1, -0.2, 0.2) == "not reproduced (undecided)"
    assert verdict(0.3, 0.4, -0.2, 0.2) == "not reproduced (contradicted)"
    assert verdict(2.1, 3, 2, math.inf, seeds=(3, 1)) == verdict(math.nan, math.nan, 2, math.inf) == "not tested"


def test_a_single_seed_has_no_interval_and_no_verdict():
    one, unequal = estimate(statistics.fmean, [0.5]), estimate(difference, [1.0, 1.2], [0.6])
    assert (str(one), str(unequal)) == ("0.50 (n = 1)", "0.50 (n = 2 and 1)")
    assert one.verdict((0, math.inf)) == unequal.verdict((0, math.inf)) == "not tested"
    two = estimate(less_variance, [[0.5], [0.6]], [[0.1], [0.8]], distinct=2)  # nor have two one of a variance
    assert str(two) == "0.98 (n = 2)" and two.verdict((0, math.inf)) == "not tested"


def test_a_share_of_a_gain_that_may_be_0_has_no_verdict():
    gains = [(0.9, 1.0), (1.0, 0.4), (1.1, -1.1)]
    found = estimate(share, gains)
    assert found.value == pytest.approx(10) and found.verdict((0.8, math.inf)) == "not tested"
    assert estimate(share, [(x, gain + 2) for x, gain in gains]).verdict((0.2, math.inf)) == "reproduced"


def test_every_claim_is_judged_by_experiments_that_there_are(tmp_path):
    def kl(label, settings):
        ppo = 6.0 if label == "PPO" else 3.0 if label.startswith("PPO") else 1.0
        return ppo * (1 + settings["ppo"]["init_kl_coef"]) + 0.01 * settings["seed"]

    def distinct(label, settings):
        return 0.4 if label == "PPO" and settings["ppo"]["learning_rate"] > 2e-4 else 0.9

    tiny = [name for claim in claims.CLAIMS for name in claim.experiments if name != claims.SUMS]
    for name in dict.fromkeys(tiny):
        make_experiment(name, tmp_path, kl=kl, distinct=distinct, reward=lambda label, settings: 0.1 * settings["seed"])
    folder = tmp_path / "tiny/gsm8k_curves-evaluation"
    folder.mkdir()
    passes = {"base": 0.3}
    for seed in range(3):
        passes[f"gsm8k_ppo_tiny-seed{seed}/agent_1"] = 0.5
        passes[f"gsm8k_cory_tiny-seed{seed}/agent_1"] = 0.4
        passes[f"gsm8k_cory_tiny-seed{seed}/agent_2"] = 0.5
        passes[f"gsm8k_cory_tiny-seed{seed}/agent_2 after agent_1"] = 0.9
        passes[f"gsm8k_ppo_tiny-seed{seed}/agent_1 after itself"] = 0.9
    rows = [{"name": name, "pass@1": p, "pass@1_ci": 9.0, "pass@2": p + 0.1} for name, p in passes.items()]
    (folder / "evaluation.json").write_text(json.dumps({"settings": {}, "rows": rows}))
    judged = claims.judge(["tiny"], tmp_path)
    assert len(judged) == len(tiny)
    assert not [row for row in judged if row["verdict"] == "not tested"]
    found = {(row["the paper says"], row["at"].split(",")[0]): (row["value"], row["verdict"]) for row in judged}
    value, said = found["PPO's KL is more than twice CORY's", "imdb"]
    assert value.startswith("5.9") and value.endswith("n = 5)") and said == "reproduced"
    assert found["PPO's combined reward falls", "imdb"][1] == "not reproduced (contradicted)"
    assert found["CORY is above the base at every k", "gsm8k"] == ("0.15 (0.15 to 0.15; n = 3)", "reproduced")
    assert found["CORY is above PPO at every k", "gsm8k"][0].startswith("-0.05 ")
    rate = "PPO collapses at learning rates at which CORY is stable"
    assert found[rate, "imdb"] == ("0.50 (0.50 to 0.50; n = 3)", "reproduced")  # at two of the four rates, every seed
    assert found["67 % fewer collapses", "imdb"][0].startswith("0.16 ")  # 0.33 of 0.5
    assert found["CORY's frontier lies outside PPO's", "gsm8k"][1] == "reproduced"
    assert found["PPO's texts run on to the token limit", "gsm8k"][0].startswith(f"{9 / 40:.2f}")
    (folder / "evaluation.json").write_text(json.dumps({"settings": {}, "rows": rows})[:99])
    values = [row["value"] for row in claims.judge(["tiny"], tmp_path) if row["claim"] == "E3"]
    assert values == ["evaluation.json is damaged"] * 2
    (folder / "evaluation.json").write_text(json.dumps(rows))  # as it was written before it had its settings
    assert [row["value"] for row in claims.judge(["tiny"], tmp_path) if row["claim"] == "E3"] == values


def test_runs_of_local_models_and_data_are_judged_if_all_name_the_same(tmp_path):
    def judged():
        rows = claims.judge(["smollm2"], tmp_path)
        return {row["the paper says"]: row["value"] for row in rows if row["claim"] in ("E1", "E2", "E3")}

    reward = lambda label, settings: 0.1 * settings["seed"] + 0.2 * (label == "CORY")  # noqa: E731
    make_experiment(
        "imdb_curves", tmp_path, "smollm2", {"model.name": "my/model", "task.dataset": "my/data"}, kl=lambda *_: 1.0
    )
    make_experiment(claims.SUMS, tmp_path, "smollm2", {"model.name": "my/model"}, reward=reward)
    folder = tmp_path / "smollm2/experiment-evaluation"
    folder.mkdir()
    passes = {"base": 0.3, "sums-num_agents=1-seed0/agent_1": 0.5, "sums-num_agents=1-seed1/agent_1": 0.5}
    for seed in (0, 1):
        passes |= {
            f"sums-seed{seed}/agent_1": 0.6,
            f"sums-seed{seed}/agent_2": 0.8,
            f"sums-credit=causal-seed{seed}/agent_1": 9,
        }
    rows = [{"name": name, "pass@1": p, "pass@1_ci": 9.0} for name, p in passes.items()]
    (folder / "evaluation.json").write_text(json.dumps({"settings": {}, "rows": rows}))
    found = judged()
    assert found["PPO's KL is more than twice CORY's"].startswith("1.00 (")
    assert found["CORY's task reward is higher"].startswith("0.70 (")  # agent_2 earns 1 more, and CORY 0.2
    assert found["CORY is above PPO at every k"].startswith("0.20 (")
    for folder in (tmp_path / "smollm2").glob("imdb_cory*seed1"):
        settings = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(settings.replace("my/model", "another/model"))
    assert judged()["PPO's KL is more than twice CORY's"] == "runs of other settings"


def test_what_has_not_ended_is_not_tested(tmp_path, capsys):
    claims.command_line(["--runs", str(tmp_path / "none"), "--scales", "tiny", "paper"])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) >= 2 * len(claims.CLAIMS) and all("| not run | not tested |" in line for line in lines if line)
    make_experiment("imdb_curves", tmp_path, kl=lambda label, settings: 0.0)

    def first():
        row = claims.judge(["tiny"], tmp_path)[1]
        return row["value"], row["verdict"]

    assert first() == ("nan (n = 5)", "not tested")  # a ratio of KLs that are 0
    last = tmp_path / "tiny/imdb_cory_tiny-seed4"
    (last / "summary.json").rename(last / "summary")
    assert first() == ("9 of 10 runs ended", "not tested")
    (last / "summary").rename(last / "summary.json")
    (last / "config.yaml").write_text((last / "config.yaml").read_text().replace("lam: 0.95", "lam: 0.5"))
    assert first() == ("runs of other settings", "not tested")


def test_the_table_is_written_and_an_unknown_scale_refused(tmp_path):
    claims.command_line(["--runs", str(tmp_path), "--out", str(tmp_path / "new/claims.md")])
    assert (tmp_path / "new/claims.md").read_text().startswith("# The paper's claims\n")
    assert re.search(r"\nOf \d+ judgements: .*\d+ not tested\.\n", (tmp_path / "new/claims.md").read_text())
    scales = r"\['paper', 'real', 'real_full_kl', 'smollm2', 'tiny', 'tiny_full_kl'\]"
    with pytest.raises(UserError, match=rf"scales: expected some of {scales}, got 'huge'"):
        claims.command_line(["--runs", str(tmp_path), "--scales", "tiny", "huge"])


def kept(runs, out, *scales):
    """The table after it was written again with `--keep` and these runs."""
    claims.command_line(["--runs", str(runs), "--out", str(out), "--keep", "--scales", *scales])
    return out.read_text()


def test_a_table_can_be_completed_by_runs_of_another_machine(tmp_path):
    make_experiment("imdb_curves", tmp_path / "here", kl=lambda label, settings: 1.0)
    make_experiment("imdb_curves", tmp_path / "here", "tiny_full_kl", kl=lambda label, settings: 2.0)
    out = tmp_path / "claims.md"
    claims.command_line(["--runs", str(tmp_path / "here"), "--out", str(out), "--scales", "tiny", "tiny_full_kl"])
    first = out.read_text()
    assert "| not run | not tested |" in first
    assert kept(tmp_path / "none", out, "tiny", "tiny_full_kl") == first
    for runs in ("none", "here"):
        assert sorted(kept(tmp_path / runs, out, "tiny").splitlines()) == sorted(
            first.splitlines()
        )  # other scales stay
    before = first.replace("CORY's texts do not |", "CORY's do not |")
    out.write_text(before)
    rows = kept(tmp_path / "none", out, "tiny", "tiny_full_kl").splitlines()
    assert set(before.splitlines()[12:]) < set(rows)  # nor is a claim lost that had other words
    assert not any(
        "CORY's do not" in row and "imdb" in row for row in kept(tmp_path / "here", out, "tiny_full_kl", "tiny")
    )
    claims.command_line(["--runs", str(tmp_path / "none"), "--out", str(out)])
    assert out.read_text() != first


def test_of_runs_that_are_here_no_earlier_row_is_kept(tmp_path):
    out, rate = tmp_path / "claims.md", "PPO collapses at learning rates at which CORY is stable"

    def said(text):
        (row,) = (line for line in text.splitlines() if rate in line and "imdb" in line)
        return row.split(" | ")[4:]

    make_experiment("imdb_learning_rate", tmp_path / "a", distinct=lambda label, _: 0.3 if label == "PPO" else 0.9)
    make_experiment("imdb_learning_rate", tmp_path / "b", distinct=lambda label, _: 0.9)
    assert said(kept(tmp_path / "a", out, "tiny"))[1].startswith("reproduced")
    assert said(kept(tmp_path / "none", out, "tiny"))[1].startswith("reproduced")
    assert said(kept(tmp_path / "b", out, "tiny"))[0] == "no run collapsed"


def test_what_is_over_all_rates_resamples_seeds_with_all_their_rates(tmp_path):
    make_experiment("imdb_learning_rate", tmp_path)

    def judged():
        rows = claims.judge(["tiny"], tmp_path)
        return {row["at"]: row["value"] for row in rows if row["the paper says"] == "CORY converges near iteration 10"}

    # agent_2 earns 1 more than the pioneer of the first iteration, and rewards rise by 0.1 an iteration: the gain is
    # 0.5 + 0.1 * 14.5 by iterations 11 to 20, and 0.5 + 0.1 * 94.5 at the end
    assert judged()["imdb, tiny"] == f"{1.95 / 9.95:.2f} (0.20 to 0.20; n = 3)"
    runs = list((tmp_path / "tiny").glob("imdb_cory*learning_rate*"))  # at all rates but the configuration's
    assert len(runs) == 9
    for run in runs:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            row["task_reward"] *= 2 if row["iteration"] > 20 else 1
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    value = 4 * 1.95 / (9.95 + 3 * (2 * 9.95))
    assert judged()["imdb, tiny"] == f"{value:.2f} ({value:.2f} to {value:.2f}; n = 3)"  # seeds are alike
