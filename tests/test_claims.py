"""The paper's claims judged on runs' folders written by hand."""

import json

import pytest
from conftest import ROOT
from test_compare import make_run

from cory import claims
from cory.claims import Figure
from cory.config import UserError
from cory.experiment import plan, read_experiment


def make_experiment(name, runs, **values):
    """All runs of an experiment at the tiny scale: `values(label, settings)` gives what make_run takes."""
    for item in plan(read_experiment(ROOT / f"configs/experiments/{name}.yaml"), "tiny", {}, runs):
        if not item.folder.exists():
            agents = item.settings["cory"]["num_agents"]
            changes = {key: change(item.label, item.settings) for key, change in values.items()}
            make_run(item.folder, item.settings["seed"], agents, iterations=20, **changes,
                     ppo__init_kl_coef=item.settings["ppo"]["init_kl_coef"])  # fmt: skip


def test_a_verdict_is_where_the_interval_lies():
    def verdict(low, high, *holds):
        return Figure((low + high) / 2, low, high, (3, 3)).verdict(holds)

    assert verdict(2.1, 3, 2, float("inf")) == "reproduced"
    assert verdict(1.9, 3, 2, float("inf")) == "not reproduced (undecided)"
    assert verdict(1, 2, 2, float("inf")) == "not reproduced (contradicted)"
    assert verdict(-0.1, 0.1, -0.2, 0.2) == "reproduced"
    assert verdict(-0.3, 0.1, -0.2, 0.2) == "not reproduced (undecided)"
    assert verdict(0.3, 0.4, -0.2, 0.2) == "not reproduced (contradicted)"


def test_every_claim_is_judged_by_experiments_that_there_are(tmp_path):
    def kl(label, settings):
        ppo = 6.0 if label == "PPO" else 3.0 if label.startswith("PPO") else 1.0
        return ppo * (1 + settings["ppo"]["init_kl_coef"]) + 0.01 * settings["seed"]

    for name in dict.fromkeys(name for claim in claims.CLAIMS for name in claim.experiments):
        make_experiment(name, tmp_path, kl=kl, reward=lambda label, settings: 0.1 * settings["seed"],
                        distinct=lambda label, settings: 0.4 if label == "PPO" else 1.0)  # fmt: skip
    folder = tmp_path / "tiny/gsm8k_curves-evaluation"
    folder.mkdir()
    passes = {"base": 0.3, "gsm8k_ppo_tiny-seed0/agent_1": 0.5, "gsm8k_cory_tiny-seed0/agent_1": 0.4,
              "gsm8k_cory_tiny-seed0/agent_2": 0.5, "gsm8k_cory_tiny-seed0/agent_2 after agent_1": 0.9}  # fmt: skip
    rows = [{"name": name, "pass@1": p, "pass@1_ci": 9.0, "pass@2": p + 0.1} for name, p in passes.items()]
    (folder / "evaluation.json").write_text(json.dumps(rows))
    judged = claims.judge(["tiny"], tmp_path)
    assert len(judged) == sum(len(claim.experiments) for claim in claims.CLAIMS)
    assert not [row for row in judged if row["verdict"] == "not tested"]
    verdicts = {(row["the paper says"], row["at"]): (row["value"], row["verdict"]) for row in judged}
    value, verdict = verdicts["PPO's KL is more than twice CORY's", "imdb, tiny"]
    assert value.startswith("5.9") and value.endswith("n = 5)") and verdict == "reproduced"
    assert verdicts["PPO's combined reward falls", "imdb, tiny"][1] == "not reproduced (contradicted)"
    assert verdicts["CORY is above the base at every k", "gsm8k, tiny"] == ("0.15 (0.15 to 0.15; n = 1)", "reproduced")
    assert verdicts["CORY is above PPO at every k", "gsm8k, tiny"][0].startswith("-0.05 ")
    assert verdicts["67 % fewer collapses", "imdb, tiny"] == ("1.00 (1.00 to 1.00; n = 12)", "reproduced")
    assert verdicts["CORY's frontier lies outside PPO's", "gsm8k, tiny"][1] == "reproduced"


def test_what_has_not_ended_is_not_tested(tmp_path, capsys):
    claims.command_line(["--runs", str(tmp_path / "none"), "--scales", "tiny", "paper"])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) >= 2 * len(claims.CLAIMS) and all("| not run | not tested |" in line for line in lines if line)
    make_experiment("imdb_curves", tmp_path, kl=lambda label, settings: 1.0)
    last = tmp_path / "tiny/imdb_cory_tiny-seed4"
    (last / "summary.json").unlink()
    rows = claims.judge(["tiny"], tmp_path)
    assert rows[0]["verdict"] == "not tested" and rows[0]["value"] == "9 of 10 runs ended"
    (last / "summary.json").write_text("{}")
    rows = claims.judge(["tiny"], tmp_path)
    assert rows[2]["verdict"] == "reproduced" and rows[2]["at"] == "imdb, tiny"  # the combined reward rises
    assert rows[-1]["at"] == "gsm8k, tiny" and rows[-1]["value"] == "not run"
    claims.command_line(["--runs", str(tmp_path), "--out", str(tmp_path / "claims.md")])
    assert (tmp_path / "claims.md").read_text().startswith("# The paper's claims\n")
    with pytest.raises(UserError, match=r"scales: expected some of those in configs/experiments/, got \['huge'\]"):
        claims.command_line(["--runs", str(tmp_path), "--scales", "huge"])
