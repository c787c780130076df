"""Planning and running experiments."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from subprocess import PIPE

import pytest
import yaml
from conftest import ROOT
from handmade import make_run

from cory.errors import UserError
from cory.evaluation.folder import trained
from imdb_train import toy
from study import experiment
from study.plan import Planned

EXPERIMENTS = sorted((ROOT / "configs/experiments").glob("*.yaml"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_validates_at_every_scale(path, tmp_path, capsys):
    spec = experiment.read_experiment(path)
    assert {"tiny", "paper"} <= set(spec.scales) or path.stem == "imdb_pilot"
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
  tiny: {config: "configs/imdb/tiny.yaml", seeds: [0, 1], values: [1.0e-4, 1.0e-3], minutes: {ppo: 6},
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
    assert settings["model"]["name"] == "tiny"  # symbolic, so that no path of a machine is compared
    (item.folder / "config.yaml").write_text(yaml.safe_dump({**settings, "fingerprint": {"reward": "a.b"}}))
    assert item.state() == "finished"
    dry = [str(tmp_path / "trial.yaml"), "--dry-run", "--runs", str(runs)]
    experiment.command_line(dry)
    out = capsys.readouterr().out
    assert "8 runs, 1 finished" in out and "seed0 --resume" in out and f"{item.folder} " not in out
    (item.folder / "summary.json").unlink()
    assert item.state() == "begun"
    for block, key in (("ppo", "lam"), ("model", "name")):
        other = {**settings, block: {**settings[block], key: "other"}}
        (item.folder / "config.yaml").write_text(yaml.safe_dump(other))
        message = rf"expected a run of this experiment, got one of other settings \({block}.{key}"
        with pytest.raises(UserError, match=message):
            experiment.command_line(dry)


def test_a_run_of_more_iterations_is_another_run(tmp_path):
    (tmp_path / "trial.yaml").write_text(SMALL)
    item = experiment.plan(experiment.read_experiment(tmp_path / "trial.yaml"), "tiny", {}, tmp_path / "runs")[0]
    make_run(item.folder, iterations=5)
    for planned, schedule in ((5, "constant"), (5, "linear"), (2, "constant")):
        settings = {**item.settings, "iterations": planned, "ppo": {**item.settings["ppo"], "schedule": schedule}}
        (item.folder / "config.yaml").write_text(yaml.safe_dump(settings))
        if planned > 3:
            with pytest.raises(UserError, match=r"other settings \(iterations: 5 -> 3(; ppo.schedule: [^;]*)?\)"):
                item.state()
    (item.folder / "metrics.jsonl").write_text("".join((item.folder / "metrics.jsonl").open().readlines()[:2]))
    assert item.state() == "begun"  # a run of fewer is continued


@pytest.mark.parametrize("change", ["ppo.learning_rate=0.5", "cory.exchange_period=7", "seed=9"])
def test_a_key_that_the_experiment_varies_is_not_set_for_all(tmp_path, change):
    (tmp_path / "trial.yaml").write_text(SMALL)
    key = change.split("=")[0]
    with pytest.raises(UserError, match=rf"--set: expected keys that the experiment does not vary.*, got '{key}'"):
        experiment.command_line([str(tmp_path / "trial.yaml"), "--dry-run", "--set", change])


def test_a_model_that_is_another_run_s_is_not_set_for_all(tmp_path):
    file = str(ROOT / "configs/experiments/imdb_ablations.yaml")
    for scale in ("tiny", "paper"):  # by a key, and by a configuration of its own
        with pytest.raises(UserError, match=r"does not vary, as it does for 'PPO, larger model', got 'model.name'"):
            experiment.command_line([file, "--scale", scale, "--dry-run", "--set", "model.name=gpt2"])


@pytest.mark.parametrize(
    "change, message",
    [
        (("seeds: [0, 1]", "seeds: [a]"), "seeds"),
        (("title:", "titel:"), "titel"),
        (("ppo.learning_rate", "ppo.learning_rat"), "learning_rat"),
        (("imdb/tiny", "imdb/none"), "none.yaml"),
        (("imdb_train/ppo.py", "imdb_train/pop.py"), r"script: expected a file 'imdb_train/pop.py' in .*checkout"),
        (("imdb_train/ppo.py", "benchmarks/iteration.py"), "script: expected one beside its task's config.py"),
        (("hardware:", "evaluate: imdb_train/eval.py, hardware:"), "evaluate: expected a file 'imdb_train/eval.py'"),
        (("flags: {cory", "at: {tyni: {seed: 1}}, flags: {cory"), r"CORY.at: expected some of \['tiny'\], got 'tyni'"),
    ],
)
def test_a_wrong_experiment_is_an_error(tmp_path, change, message):
    (tmp_path / "trial.yaml").write_text(SMALL.replace(*change))
    with pytest.raises(UserError, match=message):
        experiment.command_line([str(tmp_path / "trial.yaml"), "--dry-run", "--runs", str(tmp_path / "runs")])


def test_runs_of_one_scale_alone_and_their_configuration(tmp_path):
    spec = experiment.read_experiment(ROOT / "configs/experiments/gsm8k_learning_rate.yaml")
    assert {item.label for item in experiment.plan(spec, "tiny", {}, tmp_path)} == {"PPO", "CORY"}
    files = {item.label: item.command[3] for item in experiment.plan(spec, "paper", {}, tmp_path)}
    assert files["PPO"] == "configs/gsm8k/llama2_7b.yaml"
    assert files["PPO, 13b"] == "configs/gsm8k/llama2_13b.yaml"
    assert files["CORY"] == "configs/gsm8k/llama2_7b_lr1e-4.yaml"


def test_a_key_of_cory_leaves_ppo_as_it_is(tmp_path):
    file = ROOT / "configs/experiments/imdb_cooperation.yaml"
    planned = experiment.plan(experiment.read_experiment(file), "tiny", {}, tmp_path)
    assert [sum(item.label == label for item in planned) for label in ("PPO", "CORY")] == [3, 15]


def test_the_larger_policy_is_made_before_the_runs_that_name_it(tmp_path, monkeypatch, capsys):
    made, original = [], subprocess.run

    def run(command, **options):
        if command[1:] != ["imdb_train/make_weights.py", "tiny_large"]:
            return original(command, **options)
        made.append(command[2])

    monkeypatch.setattr(subprocess, "run", run)
    for name in ("tiny", "tiny_large"):
        assert not made
        item = Planned("PPO", tmp_path / name, {"model": {"name": name}}, [sys.executable, "-c", "pass"], 0.0)
        assert experiment.run_all([item], experiment.Engine()) == []
    assert made == ["tiny_large"] and "not shipped" in capsys.readouterr().out


def test_outside_a_checkout_an_experiment_says_what_it_needs(tmp_path):
    """As installed from a wheel: the packages are there, the configurations are not."""
    for package in ("cory", "study", "imdb_train", "gsm8k_train"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("weights", "__pycache__"))
    (tmp_path / "trial.yaml").write_text(SMALL)
    for command, message in (
        (["experiment", "nosuch.yaml"], "expected the file of an experiment, such as configs/experiments/"),
        (["experiment", "trial.yaml"], "config: expected a file 'configs/imdb/tiny.yaml' in '"),
        (["claims"], "experiment: expected a file 'configs/experiments/imdb_curves.yaml' in '"),
    ):
        argv = [sys.executable, "-m", f"study.{command[0]}", *command[1:]]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith(f"error: {message}"), done.stderr
        assert "checkout" in done.stderr and "Traceback" not in done.stderr


def test_what_the_user_must_name_is_asked_for(tmp_path):
    path = str(ROOT / "configs/experiments/imdb_curves.yaml")
    with pytest.raises(UserError, match=r"scale real: expected --set model.name"):
        experiment.command_line([path, "--scale", "real", "--dry-run", "--runs", str(tmp_path)])
    scales = r"\['tiny', 'tiny_full_kl', 'real', 'real_full_kl', 'smollm2', 'paper'\]"
    with pytest.raises(UserError, match=rf"scale: expected one of {scales}, got 'huge'"):
        experiment.command_line([path, "--scale", "huge", "--dry-run"])
    with pytest.raises(UserError, match="--set: expected KEY=VALUE"):
        experiment.command_line([path, "--set", "seed", "--dry-run"])
    with pytest.raises(UserError, match="--jobs: expected at least 1, got 0"):
        experiment.command_line([path, "--jobs", "0"])


ONE = """
title: A trial
question: Does it run?
runs:
  PPO: {script: imdb_train/ppo.py, flags: {ppo.batch_size: 8, ppo.mini_batch_size: 8}}
  no such policy: {script: imdb_train/ppo.py, flags: {model.name: none/such}}
scales:
  tiny: {config: "configs/imdb/tiny.yaml", seeds: [0], minutes: {ppo: 6}, hardware: a laptop,
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
        "--set",
        (prompt := 'task.observer_prompt="{prompt}{response}", better: {prompt}'),
        "--set",
        f"task.reward_model={toy.REWARD_MODEL}",
    ]
    with pytest.raises(UserError, match="1 runs failed; the same command resumes them"):
        experiment.command_line(argv)
    text = (tmp_path / "out/comparison.md").read_text()
    assert text.startswith("# A trial\n\nDoes it run?") and "| PPO | 1 |" in text
    said = shlex.split(text.split("```bash\n")[1].splitlines()[0])  # as it is pasted, without folders of this machine
    assert said[-4:] == ["--set", prompt, "--set", "task.reward_model=FOLDER"]
    out = capfd.readouterr().out
    assert "2 runs, 0 finished" in out and "name=such-seed0: FAILED (2), see" in out
    (log,) = (tmp_path / "runs/tiny").glob("*such*.log")
    assert "model.name" in log.read_text()
    experiment.command_line([*argv, "--dry-run"])
    assert "2 runs, 1 finished" in capfd.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_experiment_saves_its_runs_and_goes_on_from_there(tmp_path, number):
    (tmp_path / "trial.yaml").write_text(
        ONE[: ONE.index("  no such")] + ONE[ONE.index("scales:") :].replace(": 2}", ": 500}")
    )
    command = [sys.executable, "-m", "study.experiment", "trial.yaml", "--runs", str(tmp_path / "runs")]
    driver = subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, stdout=PIPE, stderr=PIPE
    )
    folder = tmp_path / "runs/tiny/imdb_ppo_tiny-batch_size=8-mini_batch_size=8-seed0"
    while not (folder / "metrics.jsonl").exists():
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.05)
    driver.send_signal(number)
    if number == signal.SIGHUP:
        driver.send_signal(number)  # as a terminal that closes does
    out, err = driver.communicate(timeout=120)
    assert driver.returncode == 130 and err == "interrupted\n" and "is saved" in out
    assert f"{folder.name}: stopped; the same command continues" in out and "FAILED" not in out
    log = (tmp_path / f"{folder}.log").read_text()  # whole: the driver has waited
    assert "Continue with" in log and not (folder / "summary.json").exists()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == int(
        next(folder.glob("checkpoints/iter-*")).name.removeprefix("iter-")
    )


JUDGE = """
import sys, pathlib
folder = pathlib.Path(sys.argv[-1])
folder.mkdir(exist_ok=True)
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
    experiment.evaluate(f"{tmp_path / 'judge.py'} --samples 4", *arguments[1:])  # the script's to continue or refuse
    assert (tmp_path / "out/evaluation.md").read_text().endswith("--samples 4")
    experiment.evaluate(*arguments)
    (tmp_path / "judge.py").unlink()
    experiment.evaluate(*arguments)
    assert "Already evaluated" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"judge.py --samples 2: failed with status 2"):
        experiment.evaluate(arguments[0], planned, tmp_path / "other", tmp_path / "out")


def test_an_evaluation_goes_on_with_more_runs_and_starts_anew_with_changed_ones(tmp_path, capsys):
    (tmp_path / "trial.yaml").write_text(SMALL)
    (tmp_path / "judge.py").write_text(JUDGE)
    planned = experiment.plan(experiment.read_experiment(tmp_path / "trial.yaml"), "tiny", {}, tmp_path / "runs")
    for seed, item in enumerate(planned):
        make_run(item.folder, seed)
        (item.folder / "agent_1").mkdir()
        (item.folder / "summary.json").write_text(json.dumps({"iterations": seed}))
    folder, judge = tmp_path / "evaluation", str(tmp_path / "judge.py")

    def evaluated(runs):
        """Evaluates runs, as the script does, which records them; returns what it was called with."""
        experiment.evaluate(judge, runs, folder, tmp_path)
        names = [str(item.folder) for item in runs]
        (folder / "settings.json").write_text(json.dumps({"models": names, "trained": trained(names)}))
        return (folder / "evaluation.md").read_text().split()

    assert evaluated(planned[:1]) == [str(planned[0].folder)]
    assert evaluated(planned[:2]) == [str(item.folder) for item in planned[:2]]
    assert "older" not in capsys.readouterr().out and not list(tmp_path.glob("evaluation-older*"))
    experiment.evaluate(judge, planned[:2], folder, tmp_path)
    assert "Already evaluated" in capsys.readouterr().out
    (tmp_path / "judge.py").write_text("raise SystemExit(2)")  # stopped while it answers those of a third
    with pytest.raises(UserError, match="failed with status 2"):
        experiment.evaluate(judge, planned[:3], folder, tmp_path)
    (tmp_path / "judge.py").write_text(JUDGE)
    assert evaluated(planned[:3])[-1] == str(planned[2].folder)
    assert evaluated(planned[:2])[-1] == str(planned[1].folder)
    (planned[1].folder / "summary.json").write_text(json.dumps({"iterations": 9}))
    evaluated(planned[:2])
    assert "The old evaluation is now in" in capsys.readouterr().out
    assert (tmp_path / "evaluation-older-1/evaluation.md").exists()
