"""Comparing runs and running experiments, on runs' folders written by hand."""

import csv
import json
import math
import statistics
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from cory.config import UserError
from study import experiment
from study.compare import command_line, write
from study.comparison import Comparison, collapsed, find, group, variance
from study.records import names, read
from study.statistics import bootstrap, hypervolume, nondominated

BASE = yaml.safe_load((ROOT / "configs/imdb/ppo_tiny.yaml").read_text())


def make_run(folder: Path, seed=0, agents=1, iterations=12, planned=None, reward=0.0, kl=1.0, distinct=1.0, **changes):
    """A run's folder: task reward rises by 0.1 an iteration from `reward`; agent_2 earns 1 more."""
    folder.mkdir(parents=True)
    settings = json.loads(json.dumps(BASE)) | {"seed": seed, "iterations": planned or iterations}
    settings["cory"]["num_agents"] = agents
    for key, value in changes.items():
        block, name = key.split("__")
        settings[block][name] = value
    (folder / "config.yaml").write_text(yaml.safe_dump({**settings, "versions": {"commit": "abc"}}))
    rows = []
    for k in range(iterations):
        for a in range(agents):
            role = ("pioneer", "observer")[(a + k // 5) % 2] if agents > 1 else "pioneer"
            r = reward + 0.1 * k + a
            rows.append(
                {"iteration": k, "agent": f"agent_{a + 1}", "role": role, "task_reward": r, "kl": kl,
                 "combined_reward": r - 0.3 * kl, "distinct_2": 1.0 if k == 0 else distinct, "response_tokens": 9.0}
            )  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if planned is None:
        texts = {
            f"agent_{a + 1}": [{"query": "the film", "completion": "was `good`|", "task_reward": 0.5}]
            for a in range(agents)
        }
        (folder / "summary.json").write_text(json.dumps({"samples": {"before": texts, "after": texts}}))
    return folder


def compared(tmp_path, **options):
    runs = [read(path) for path in find([str(tmp_path / "*")])]
    over = options.get("over")
    return Comparison(group(runs, over), options.get("baseline"), over)


def test_groups_final_values_and_differences(tmp_path):
    for seed in range(3):
        make_run(tmp_path / f"ppo{seed}", seed, reward=1.0 + seed)
        make_run(tmp_path / f"cory{seed}", seed, agents=2, reward=2.0 + seed)
    comparison = compared(tmp_path)
    assert [(g.name, len(g.whole)) for g in comparison.groups] == [("CORY", 3), ("PPO", 3)]
    assert comparison.baseline == "PPO"
    rows = {row["name"]: row for row in comparison.final_rows()}
    assert set(rows) == {"PPO", "CORY LLM1", "CORY LLM2"}
    last = statistics.fmean(0.1 * k for k in range(2, 12))
    assert rows["PPO"]["task_reward"] == pytest.approx([1 + last, 2 + last, 3 + last])
    assert rows["CORY LLM2"]["task_reward"] == pytest.approx([3 + last, 4 + last, 5 + last])
    cory, ppo = comparison.group_rows()
    assert statistics.fmean(ppo["policy_optimality"]) == pytest.approx(2 + last - 0.3)
    change, low, high = cory["optimality_change"]
    assert change == pytest.approx(1.5 / (2 + last - 0.3)) and low < change < high
    assert cory["training_variance"] == ppo["training_variance"] == pytest.approx(1.0)
    assert "optimality_change" not in ppo and not comparison.problems()
    roles = {(row["agent"], row["role"]) for row in comparison.role_rows()}
    assert ("CORY LLM1", "observer") in roles and ("CORY LLM2", "pioneer") in roles


def test_everything_is_written(tmp_path):
    for seed in range(2):
        make_run(tmp_path / "r" / f"ppo{seed}", seed, model__name="some/gpt")
        make_run(tmp_path / "r" / f"cory{seed}", seed, agents=2, ppo__learning_rate=5e-4, model__name="/a/b/c/gpt")
    text = write(compared(tmp_path / "r"), tmp_path / "out", "A title", "A question?").read_text()
    assert text.startswith("# A title\n") and "A question?" in text
    assert "| ppo.learning_rate | 0.0005 | 0.0001 |" in text  # an unfair comparison is visible at a glance
    assert "| model.name | c/gpt | some/gpt |" in text  # no path of a machine
    assert "was &#96;good&#96;&#124;" in text  # a model's text is no Markdown
    for name in ("curves.png", "curves.svg", "final.csv", "curves.csv"):
        assert (tmp_path / "out" / name).stat().st_size > 100
    runs = list(csv.DictReader(open(tmp_path / "out/runs.csv")))
    assert [row["agent"] + row["seed"] for row in runs[:3]] == ["CORY LLM10", "CORY LLM20", "CORY LLM11"]
    assert float(runs[0]["task_reward"]) == pytest.approx(0.65) and runs[0]["collapsed"] == "False"
    rows = list(csv.DictReader(open(tmp_path / "out/curves.csv")))
    assert len(rows) == 36 and rows[0]["n"] == "2" and float(rows[1]["task_reward_mean"]) == pytest.approx(0.1)


def test_unequal_incomplete_crashed_and_damaged_runs_are_named(tmp_path):
    make_run(tmp_path / "a", 0)
    make_run(tmp_path / "b", 1, iterations=30)
    make_run(tmp_path / "c", 2, iterations=5, planned=12)
    crashed = make_run(tmp_path / "d", 3, iterations=0, planned=12)
    diverged = make_run(tmp_path / "e", 4, kl=math.nan)
    damaged = make_run(tmp_path / "f", 5, planned=12)
    with open(damaged / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 12, "agent"')
    comparison = compared(tmp_path)
    (row,) = comparison.final_rows()
    assert row["n"] == 2
    said = "\n".join(comparison.problems())
    assert "PPO, c: incomplete: 5 of 12 iterations" in said and "PPO, e: diverged" in said
    assert f"PPO, {crashed.name}: no iteration is recorded" in said and "line 13 of metrics.jsonl is damaged" in said
    assert "unequal length in iterations (PPO 12, 30)" in said
    assert diverged.name in said
    write(comparison, tmp_path / "out")  # whole nonetheless
    counts = [row["n"] for row in csv.DictReader(open(tmp_path / "out/curves.csv"))]
    assert counts[:1] == ["4"] and counts[-1:] == ["1"]


def test_one_seed_and_identical_runs(tmp_path):
    make_run(tmp_path / "a", 0)
    said = compared(tmp_path).problems()
    assert said == ["PPO: a single run, so there is no spread"]
    write(compared(tmp_path), tmp_path / "out")
    make_run(tmp_path / "b", 0)
    (g,) = compared(tmp_path).groups
    assert len(g.runs) == 2
    assert any("seed 0 is there more than once" in line for line in compared(tmp_path).problems())


def test_wrong_input_is_an_error_that_says_what(tmp_path, capsys):
    for pattern, message in (
        (str(tmp_path / "none*"), "which matches none"),
        (str(tmp_path), "expected folders of runs"),
    ):
        with pytest.raises(UserError, match=message):
            find([pattern])
    make_run(tmp_path / "a", iterations=0, planned=9)
    with pytest.raises(UserError, match=r"expected at least one that ended.*no iteration"):
        compared(tmp_path)
    make_run(tmp_path / "b", 1)
    with pytest.raises(UserError, match=r"baseline: expected one of \['PPO'\], got 'CORY'"):
        compared(tmp_path, baseline="CORY")
    with pytest.raises(UserError, match="over: expected a key of the runs' settings"):
        compared(tmp_path, over="ppo.eta")
    with pytest.raises(UserError, match="--nope"):
        command_line([str(tmp_path / "b"), "--nope"])
    (tmp_path / "b/config.yaml").write_text("[1, 2")
    with pytest.raises(UserError, match="expected the folder of a run"):
        compared(tmp_path)


def test_collapse_is_seen(tmp_path):
    make_run(tmp_path / "fine", 0, distinct=0.6)
    make_run(tmp_path / "alike", 1, distinct=0.4)
    make_run(tmp_path / "far", 2, kl=51.0)
    assert [collapsed(read(tmp_path / name)) for name in ("fine", "alike", "far")] == [False, True, True]


def test_training_variance_is_over_seeds_then_iterations(tmp_path):
    runs = [read(make_run(tmp_path / str(seed), seed, reward=seed * 2.0)) for seed in range(2)]
    assert variance(runs) == pytest.approx(2.0) and variance(runs[:1]) == 0.0


def test_values_of_a_key_make_a_family_and_a_frontier(tmp_path):
    for seed in range(2):
        for eta, reward, kl in ((0.1, 3.0, 5.0), (0.3, 2.0, 2.0), (1.0, 1.0, 3.0)):
            make_run(tmp_path / f"p{eta}{seed}", seed, reward=reward, kl=kl, ppo__init_kl_coef=eta)
            make_run(tmp_path / f"c{eta}{seed}", seed, agents=2, reward=reward, kl=kl / 2, ppo__init_kl_coef=eta)
    comparison = compared(tmp_path, over="ppo.init_kl_coef")
    assert {g.name for g in comparison.groups} >= {"PPO, init_kl_coef 0.1", "CORY, init_kl_coef 1.0"}
    rows = {row["family"]: row for row in comparison.frontier_rows()}
    assert rows["PPO"]["points"] == "3" and set(rows["PPO"]["not dominated"].split(", ")) == {"0.1", "0.3"}
    assert float(rows["CORY"]["hypervolume"]) > float(rows["PPO"]["hypervolume"]) > 0
    for row in comparison.group_rows():
        if row["name"].startswith("CORY"):  # against PPO at the same eta
            assert row["optimality_change"][0] > 0
    write(comparison, tmp_path / "out")
    assert (tmp_path / "out/frontier.png").exists() and (tmp_path / "out/over.svg").exists()


def test_a_key_of_the_method_does_not_concern_ppo(tmp_path):
    make_run(tmp_path / "p", 0)
    for coef in (1.0, -1.0):
        make_run(tmp_path / f"c{coef}", 0, agents=2, cory__other_coef=coef)
    comparison = compared(tmp_path, over="cory.other_coef")
    assert {(g.name, g.value) for g in comparison.groups} == {
        ("PPO", None), ("CORY, other_coef 1.0", 1.0), ("CORY, other_coef -1.0", -1.0)
    }  # fmt: skip
    write(comparison, tmp_path / "out")


def test_names_tell_groups_apart():
    def settings(agents, **keys):
        return {"cory": {"num_agents": agents, "exchange_period": keys.pop("period", 5)}, "ppo": {"lr": 1, **keys}}

    assert names([settings(1), settings(2)]) == ["PPO", "CORY"]
    assert names([settings(2), settings(2, period=0), settings(1, lr=2)]) == [
        "CORY, exchange_period 5", "CORY, exchange_period 0", "PPO",
    ]  # fmt: skip
    assert names([settings(1), settings(1, period=0), settings(3)]) == ["PPO", "PPO", "CORY, 3 agents"]


def test_bootstrap_frontier_and_hypervolume():
    def difference(a, b):
        return statistics.fmean(a) - statistics.fmean(b)

    value, low, high = bootstrap(difference, [1.0, 2.0, 3.0, 4.0] * 10, [0.0, 1.0] * 20)
    assert value == 2.0 and 1.4 < low < 1.8 and 2.2 < high < 2.6
    assert bootstrap(difference, [1.0], [0.5]) == (0.5, 0.5, 0.5)
    assert nondominated([(1, 1), (1, 1), (0, 0)]) == [0, 1]
    assert hypervolume([(1, 3), (2, 2), (3, 1), (1, 1)], (0, 0)) == 6.0
    assert hypervolume([], (0, 0)) == hypervolume([(0, 5)], (0, 0)) == 0.0


EXPERIMENTS = sorted((ROOT / "configs/experiments").glob("*.yaml"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_validates_at_every_scale(path, tmp_path, capsys):
    spec = experiment.read_experiment(path)
    assert {"tiny", "paper"} <= set(spec.scales)
    for name, scale in spec.scales.items():
        changes = [text for key in scale.needs for text in ("--set", f"{key}=some/folder")]
        experiment.command_line([str(path), "--scale", name, "--dry-run", "--runs", str(tmp_path), *changes])
        first, *lines = capsys.readouterr().out.splitlines()
        assert "about" in first and "hours" in first and scale.hardware in first
        assert len(lines) == len(set(lines)) and len({line.split("--output ")[1] for line in lines}) == len(lines)
        assert len(lines) % len(scale.seeds) == 0
        assert all(line.startswith(("python imdb_train/", "python gsm8k_train/")) for line in lines)


def test_experiments_share_the_runs_of_a_scale(tmp_path):
    def folders(name):
        file = ROOT / f"configs/experiments/{name}.yaml"
        return {item.folder for item in experiment.plan(experiment.read_experiment(file), "tiny_full_kl", {}, tmp_path)}

    curves, rates = folders("imdb_curves"), folders("imdb_learning_rate")
    assert {folder.name for folder in curves & rates} == {
        f"imdb_{method}_tiny-seed{seed}" for method in ("cory", "ppo") for seed in range(3)
    }
    assert tmp_path / "tiny_full_kl/imdb_ppo_tiny-learning_rate=1.5e-05-seed0" in rates


def test_a_cost_follows_the_work(tmp_path):
    planned = experiment.plan(
        experiment.read_experiment(ROOT / "configs/experiments/imdb_budget.yaml"), "tiny", {}, tmp_path
    )
    minutes = {item.label: item.minutes for item in planned}
    once = minutes.pop("PPO")
    assert minutes.pop("CORY") > once > 0
    more = {"PPO, twice the queries": 2, "PPO, twice the epochs": 52 / 28, "PPO, twice the iterations": 2}
    assert minutes == pytest.approx({label: times * once for label, times in more.items()})


SMALL = """
title: A trial
question: Does it run?
over: ppo.learning_rate
runs:
  PPO: {script: imdb_train/ppo.py}
  CORY: {script: imdb_train/cory.py, flags: {cory.exchange_period: 2}}
scales:
  tiny: {config: "configs/imdb/{method}_tiny.yaml", seeds: [0, 1], values: [1.0e-4, 1.0e-3], minutes: {ppo: 6},
         hardware: a laptop, flags: {iterations: 3}}
"""


def test_finished_runs_are_skipped_and_other_settings_refused(tmp_path, capsys):
    (tmp_path / "trial.yaml").write_text(SMALL)
    runs = tmp_path / "runs"
    planned = experiment.plan(experiment.read_experiment(tmp_path / "trial.yaml"), "tiny", {}, runs)
    assert [item.folder.name for item in planned[:3]] == [
        "imdb_ppo_tiny-seed0", "imdb_ppo_tiny-seed1", "imdb_ppo_tiny-learning_rate=0.001-seed0",
    ]  # fmt: skip
    assert planned[4].folder.name == "imdb_cory_tiny-exchange_period=2-seed0"
    assert {item.state() for item in planned} == {"missing"}
    item = planned[0]
    make_run(item.folder, iterations=3)
    settings = json.loads(json.dumps(item.settings))
    settings["model"]["name"] = "somewhere/policy"  # the embedded default, built
    (item.folder / "config.yaml").write_text(yaml.safe_dump(settings))
    assert item.state() == "finished"
    dry = [str(tmp_path / "trial.yaml"), "--dry-run", "--runs", str(runs)]
    experiment.command_line(dry)
    out = capsys.readouterr().out
    assert "8 runs, 1 finished" in out and "seed0 --resume" in out and f"{item.folder} " not in out
    (item.folder / "summary.json").unlink()
    assert item.state() == "begun"
    settings["ppo"]["lam"] = 0.5
    (item.folder / "config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(UserError, match=r"expected a run of this experiment, got one of other settings \(ppo.lam"):
        experiment.command_line(dry)


@pytest.mark.parametrize(
    "change, message",
    [
        (("seeds: [0, 1]", "seeds: [a]"), "seeds"),
        (("title:", "titel:"), "titel"),
        (("ppo.learning_rate", "ppo.learning_rat"), "learning_rat"),
        (("imdb/{method}_tiny", "imdb/{method}_none"), "none.yaml"),
    ],
)
def test_a_wrong_experiment_is_an_error(tmp_path, change, message):
    (tmp_path / "trial.yaml").write_text(SMALL.replace(*change))
    with pytest.raises(UserError, match=message):
        experiment.command_line([str(tmp_path / "trial.yaml"), "--dry-run", "--runs", str(tmp_path / "runs")])


def test_what_the_user_must_name_is_asked_for(tmp_path):
    path = str(ROOT / "configs/experiments/imdb_curves.yaml")
    with pytest.raises(UserError, match=r"scale real: expected --set model.name"):
        experiment.command_line([path, "--scale", "real", "--dry-run", "--runs", str(tmp_path)])
    scales = r"\['tiny', 'tiny_full_kl', 'real', 'real_full_kl', 'paper'\]"
    with pytest.raises(UserError, match=rf"scale: expected one of {scales}, got 'huge'"):
        experiment.command_line([path, "--scale", "huge", "--dry-run"])
    with pytest.raises(UserError, match="--set: expected KEY=VALUE"):
        experiment.command_line([path, "--set", "seed", "--dry-run"])


ONE = """
title: A trial
question: Does it run?
runs:
  PPO: {script: imdb_train/ppo.py, flags: {ppo.batch_size: 8, ppo.mini_batch_size: 8}}
  no such policy: {script: imdb_train/ppo.py, flags: {model.name: none/such}}
scales:
  tiny: {config: "configs/imdb/{method}_tiny.yaml", seeds: [0], minutes: {ppo: 6}, hardware: a laptop,
         flags: {iterations: 2}}
"""


def test_an_experiment_runs_compares_and_says_what_failed(tmp_path, capfd):
    (tmp_path / "trial.yaml").write_text(ONE)
    argv = [
        str(tmp_path / "trial.yaml"),
        "--runs",
        str(tmp_path / "runs"),
        "--jobs",
        "2",
        "--out",
        str(tmp_path / "out"),
    ]
    with pytest.raises(UserError, match="1 runs failed; the same command resumes them"):
        experiment.command_line(argv)
    text = (tmp_path / "out/comparison.md").read_text()
    assert text.startswith("# A trial\n\nDoes it run?") and "| PPO | 1 |" in text
    out = capfd.readouterr().out
    assert "2 runs, 0 finished" in out and "name=such-seed0: FAILED (2), see" in out
    (log,) = (tmp_path / "runs/tiny").glob("*such*.log")
    assert "model.name" in log.read_text()
    experiment.command_line([*argv, "--dry-run"])
    assert "2 runs, 1 finished" in capfd.readouterr().out


JUDGE = """
import sys, pathlib
folder = pathlib.Path(sys.argv[-1])
folder.mkdir()
(folder / "evaluation.md").write_text(" ".join(sys.argv[1:-2]))
(folder / "figure.png").write_text("a figure")
"""


def test_runs_are_evaluated_once_and_the_results_are_beside_the_comparison(tmp_path, capsys):
    (tmp_path / "trial.yaml").write_text(SMALL)
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "out").mkdir()
    planned = experiment.plan(experiment.read_experiment(tmp_path / "trial.yaml"), "tiny", {}, tmp_path / "runs")[:2]
    arguments = f"{tmp_path / 'judge.py'} --samples 2", planned, tmp_path / "evaluation", tmp_path / "out"
    experiment.evaluate(*arguments)
    said = (tmp_path / "out/evaluation.md").read_text()
    assert said == f"{planned[0].folder} {planned[1].folder} --samples 2"
    assert (tmp_path / "out/figure.png").read_text() == "a figure"
    (tmp_path / "judge.py").unlink()
    experiment.evaluate(*arguments)
    assert "Evaluated already" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"judge.py --samples 2: failed with status 2"):
        experiment.evaluate(arguments[0], planned, tmp_path / "other", tmp_path / "out")
