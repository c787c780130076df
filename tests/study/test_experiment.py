"""Experiments: planning, running on this machine, evaluation and result rows."""

import csv
import gzip
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from planned import SMALL, planned_in
from written import write_run as make_run
from written import write_settings

from cory.build import make_agents
from cory.command import load
from cory.errors import UserError
from cory.trainer import CoryTrainer
from imdb_train.config import ImdbConfig
from imdb_train.task import make_task
from study import engines, experiment
from study import plan as planning
from study.experiment_file import read_experiment
from study.frame import FRAMES, read_study
from study.plan import plan

EXPERIMENTS = sorted((ROOT / "configs/experiments").glob("*.yaml"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_validates_at_every_scale(path, tmp_path):
    spec = read_experiment(path)
    for name, scale in spec.scales.items():
        planned = plan(spec, name, dict.fromkeys(scale.needs, "some/folder"), tmp_path)
        assert len({item.folder for item in planned}) == len(planned)
        assert len(planned) % len(scale.seeds) == 0


def test_each_planned_run_has_a_group_a_folder_and_a_command(tmp_path):
    planned = planned_in(tmp_path)
    assert [item.group for item in planned[::2]] == [
        "PPO, learning_rate 0.0001",
        "PPO, learning_rate 0.001",
        "CORY, learning_rate 0.0001",
        "CORY, learning_rate 0.001",
    ]
    first = planned[0]
    assert first.folder == tmp_path / "runs/tiny/trial/PPO_learning_rate_0.0001-seed0"
    assert (first.value, first.seed, first.settings["iterations"]) == (0.0001, 0, 3)
    assert first.command[-3:] == [str(first.folder), "--resume", "auto"]
    assert first.command[-5:-3] == ["--seed=0", "--output"]


def test_values_of_a_key_for_several_agents_do_not_multiply_ppos_runs(tmp_path):
    text = SMALL.replace("ppo.learning_rate", "cory.weight").replace("[1.0e-4, 1.0e-3]", "[0, 1]")
    groups = [item.group for item in planned_in(tmp_path, text)[::2]]
    assert groups == ["PPO", "CORY, weight 0.0", "CORY, weight 1.0"]


@pytest.mark.parametrize(
    "old, new, key",
    [
        ("seeds: [0, 1]", "seeds: two", r"scales\.tiny\.seeds: "),
        ("seeds: [0, 1]", "sedes: [0, 1]", r"scales\.tiny\.sedes: "),
        ("seeds: [0, 1]", "seeds: [0, 1, 0]", r"scales\.tiny\.seeds: .*0 twice"),
        ("[1.0e-4, 1.0e-3]", "[1.0e-4, 1.0e-4]", r"scales\.tiny\.values: .*0.0001 twice"),
        ("flags: {cory", "flag: {cory", r"runs\.CORY\.flag: "),
        ("title:", "# title:", "title: "),
        ("over: ppo.learning_rate", "over: ppo.learning_rat", r"ppo\.learning_rat: "),
        ("over: ppo.learning_rate\n", "", r"scales\.tiny\.values: "),
        ("imdb/tiny", "imdb/none", "config: "),
        ("imdb_train/ppo.py", "benchmarks/iteration.py", "script: "),
        ("values:", "evaluate: imdb_train/eval.py, values:", "evaluate: script: "),
        ("values:", "evaluate: imdb_train/evaluate.py --quries 8, values:", "evaluate: quries: "),
        ("flags: {cory", "at: {tyni: {seed: 1}}, flags: {cory", r"CORY\.at: "),
        ("over:", "baseline: APO\nover:", "baseline: "),
    ],
)  # fmt: skip
def test_a_wrong_experiment_is_refused_by_its_key(tmp_path, old, new, key):
    with pytest.raises(UserError, match=key):
        planned_in(tmp_path, SMALL.replace(old, new))


def test_an_unknown_scale_and_a_scale_without_its_needed_settings_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"scale: "):
        planned_in(tmp_path, scale="paper")
    needs = SMALL.replace("values:", "needs: [model.name], values:")
    with pytest.raises(UserError, match=r"--set: .*model\.name"):
        planned_in(tmp_path, needs)
    planned = planned_in(tmp_path, needs, changes={"model.name": "a/b"})
    assert planned[0].settings["model"]["name"] == "a/b"
    for key in (
        "ppo.learning_rate",
        "cory.exchange_period",
        "seed",
    ):  # set by the experiment itself
        with pytest.raises(UserError, match=f"--set: .*{key}"):
            planned_in(tmp_path, changes={key: "7"})


VERSIONS = {"commit": "abc", "machine": "EPYC, AVX512"}
JUDGE = """
import itertools, json, pathlib, sys
words = sys.argv[1:]
folder = pathlib.Path(words[words.index("--output") + 1])
runs = [pathlib.Path(word).name for word in itertools.takewhile(lambda word: word[:2] != "--", words)]
folder.mkdir(parents=True)
(folder.parent / "calls.txt").open("a").write(" ".join(runs) + "\\n")
if (folder.parent / "fail").exists():
    sys.exit(3)
names = [f"{runs[-1]}/agent_1"] if "--only" in words else ["base", f"{runs[0]}/agent_1"]
metrics = {"task_reward": 0.5, "kl": 1.0, "combined_reward": 0.2, "distinct_2": 0.9}
rows = [{"name": name, "task_reward_ci": 1.0, **metrics} for name in names]
(folder / "evaluation.json").write_text(json.dumps({"rows": rows}))
"""


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """An experiment with PPO at two learning rates and two seeds, whose runs and evaluations are simulated.

    Returns the list to which each run is added when it is made.
    """
    (tmp_path / "judge.py").write_text(JUDGE)
    text = SMALL[: SMALL.index("  CORY:")] + SMALL[SMALL.index("scales:") :]
    text = text.replace("values:", f"evaluate: {tmp_path / 'judge.py'} --easy, values:")
    (tmp_path / "trial.yaml").write_text(text)
    made = []

    def run_here(missing, jobs, threads, ended):
        for item in missing:
            made.append(item)
            if not item.folder.exists():
                make_run(item.folder, item.seed, iterations=3)
                recorded = {"versions": VERSIONS, "fingerprint": {"task": "imdb"}}
                write_settings(item.folder, item.settings | recorded)
                for name in ("agent_1", "checkpoints"):
                    (item.folder / name).mkdir()
                    (item.folder / name / "weights").write_bytes(b"0" * 500_000)
            ended(item, 0, 1.0)

    monkeypatch.setattr(engines, "run_here", run_here)
    return made


def trial(tmp_path, *flags, out="a", runs="runs"):
    argv = [str(tmp_path / "trial.yaml"), "--runs", str(tmp_path / runs)]
    experiment.command_line([*argv, "--out", str(tmp_path / "results" / out), *flags])


def rows_of(tmp_path, out="a"):
    return list(csv.DictReader(open(tmp_path / "results" / out / "runs.csv")))


def test_each_completed_run_is_evaluated_and_its_row_written(tmp_path, judged):
    trial(tmp_path)
    assert [item.seed for item in judged] == [0, 0, 1, 1]  # all runs of a seed before the next
    rows = rows_of(tmp_path)
    first, second = "PPO, learning_rate 0.0001", "PPO, learning_rate 0.001"
    in_order = [(first, "0"), (first, "1"), (second, "0"), (second, "1")]
    assert [(row["group"], row["seed"]) for row in rows] == in_order
    assert {(row["version"], row["machine"]) for row in rows} == {("abc", "EPYC, AVX512")}
    out = tmp_path / "results/a"
    held_out = list(csv.DictReader(open(out / "held_out.csv")))
    assert [row["group"] for row in held_out] == ["base (untrained)", first, first, second, second]
    assert len(list(csv.DictReader(gzip.open(out / "metrics.csv.gz", "rt")))) == 4 * 3
    assert "Held out" in (out / "comparison.md").read_text() and (out / "frontier.png").exists()
    assert not list((tmp_path / "runs").rglob("checkpoints"))
    # Later evaluations name the first run, too: the base model was evaluated with it and is not evaluated again.
    names = [item.folder.name for item in judged]
    calls = (tmp_path / "runs/tiny/trial/evaluation/calls.txt").read_text().splitlines()
    assert calls == [names[0], *(f"{names[0]} {name}" for name in names[1:])]


def test_a_run_with_a_row_is_not_repeated_even_on_another_machine(tmp_path, judged):
    trial(tmp_path, "--seeds", "1")
    assert len(judged) == 2
    before = rows_of(tmp_path)
    trial(tmp_path, runs="elsewhere")
    assert [item.seed for item in judged[2:]] == [1, 1]
    assert [row for row in rows_of(tmp_path) if row["seed"] == "0"] == before
    # Deleting a run's row makes the experiment repeat the run.
    runs = tmp_path / "results/a/runs.csv"
    whole = read_study(runs.parent)
    runs.write_text("".join(runs.read_text().splitlines(keepends=True)[:-1]))
    trial(tmp_path, runs="third")
    assert len(judged) == 5 and len(rows_of(tmp_path)) == 4
    # The repeated run's old rows are also removed from the other files.
    for frame in FRAMES:
        assert len(getattr(read_study(runs.parent), frame)) == len(getattr(whole, frame))


def test_rows_of_other_settings_or_of_another_experiment_are_refused(tmp_path, judged):
    trial(tmp_path)
    text = (tmp_path / "trial.yaml").read_text()
    (tmp_path / "trial.yaml").write_text(text.replace("--easy", "--hard"))
    with pytest.raises(UserError, match="evaluation"):
        trial(tmp_path)
    (tmp_path / "trial.yaml").write_text(text)
    with pytest.raises(UserError, match=r"sampling\.max_new_tokens"):
        trial(tmp_path, "--set", "sampling.max_new_tokens=9")
    with pytest.raises(UserError, match=r"ppo\.vf_coef"):  # rows have no such column
        trial(tmp_path, "--set", "ppo.vf_coef=0.5")
    with pytest.raises(UserError, match="expected planned 4 "):
        trial(tmp_path, "--set", "iterations=4")
    (tmp_path / "trial.yaml").write_text(text.replace("1.0e-3]", "1.0e-2]"))
    with pytest.raises(UserError, match="--out: "):
        trial(tmp_path)
    assert len(judged) == 4


def test_a_failed_evaluation_is_a_failed_run_and_keeps_its_checkpoints(tmp_path, judged):
    (tmp_path / "runs/tiny/trial/evaluation").mkdir(parents=True)
    (tmp_path / "runs/tiny/trial/evaluation/fail").touch()
    with pytest.raises(UserError):
        trial(tmp_path)
    assert len(list((tmp_path / "runs").rglob("checkpoints"))) == 4
    (tmp_path / "runs/tiny/trial/evaluation/fail").unlink()
    trial(tmp_path)
    assert len(rows_of(tmp_path)) == 4


def test_discard_agents_removes_all_agents_except_the_first_runs(tmp_path, judged):
    trial(tmp_path, "--discard-agents")
    assert [path.parent for path in (tmp_path / "runs").rglob("agent_1")] == [judged[0].folder]


def test_the_larger_toy_policy_needs_a_checkout(tmp_path, monkeypatch):
    planned = planned_in(tmp_path, changes={"model.name": "tiny_large"})
    monkeypatch.setattr(planning, "ROOT", tmp_path)  # like an installed wheel, without toys/
    with pytest.raises(UserError, match="tiny_large: expected a file of a checkout"):
        experiment._make_missing_models(planned)


STOPPED = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
pathlib.Path("ready").touch()
time.sleep(60)
"""


def test_local_runs_get_their_threads_and_are_ended_with_the_driver(tmp_path):
    first, second, third = planned_in(tmp_path)[:3]

    def program(item, code):
        return replace(item, command=[sys.executable, "-c", code], cwd=tmp_path)

    counts = program(first, "import os; print(os.environ['OMP_NUM_THREADS'])")
    fails = program(second, "raise SystemExit(3)")
    ended = {}

    def note(item, status, seconds):
        ended[item.folder] = status

    engines.run_here([counts, fails], 2, 5, note)
    assert ended == {first.folder: 0, second.folder: 3} and counts.log.read_text() == "5\n"

    def end_this_process():
        while not (tmp_path / "ready").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_this_process).start()
    with pytest.raises(KeyboardInterrupt):
        engines.run_here([program(third, STOPPED), counts], 1, 1, note)
    assert ended[third.folder] == 143 and counts.log.read_text() == "5\n"


ONE = """
title: A trial
question: Does it run?
runs: {PPO: {script: imdb_train/ppo.py}}
scales:
  tiny: {config: "configs/imdb/tiny.yaml", seeds: [0],
         flags: {iterations: 20, ppo.batch_size: 8, ppo.mini_batch_size: 8, device: cpu}}
"""


@pytest.mark.slow
def test_an_experiment_that_is_interrupted_continues_to_the_same_rows(tmp_path):
    (item,) = planned_in(tmp_path, ONE)
    command = [sys.executable, "-m", "study.experiment", "trial.yaml", "--runs", "a", "--out"]

    def driver() -> subprocess.Popen:
        return subprocess.Popen(
            [*command, "a/rows"], cwd=tmp_path, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    stopped = driver()
    run = tmp_path / "a/tiny/trial/PPO-seed0"
    while not (run / "metrics.jsonl").exists():
        assert stopped.poll() is None, stopped.communicate()
        time.sleep(0.05)
    stopped.send_signal(signal.SIGTERM)
    out, _ = stopped.communicate(timeout=120)
    assert stopped.returncode == 130, out
    assert list((run / "checkpoints").glob("iter-*"))
    assert not (tmp_path / "a/rows/runs.csv").exists()
    continued = driver()
    out, _ = continued.communicate(timeout=300)
    assert continued.returncode == 0, out
    assert (tmp_path / "a/rows/first_run.json").exists()
    config = load(ImdbConfig, None, item.command[2:], single_agent=True)
    whole = CoryTrainer(config, make_agents(config), make_task(config)).train().folder
    assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("flag", ["--out", "--runs"])
def test_a_file_in_place_of_a_folder_is_refused(tmp_path, judged, flag):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"^{flag}: expected a folder"):
        trial(tmp_path, flag, str(tmp_path / "file"))
    assert judged == []
