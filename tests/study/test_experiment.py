"""Planning and running experiments."""

import csv
import gzip
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import pandas as pd
import pytest
import yaml
from conftest import ROOT
from handmade import make_run

from cory.errors import UserError
from cory.identity import model_identity
from imdb_train import toy
from study import compare, experiment
from study.local_engine import shares_of_gpus
from study.plan import _fingerprint
from study.planned import Planned
from study.processes import environment
from study.results import Results
from study.run_evaluation import RunEvaluation

EXPERIMENTS = sorted((ROOT / "configs/experiments").glob("*.yaml"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_validates_at_every_scale(path, tmp_path, capsys):
    spec = experiment.read_experiment(path)
    assert any(name.startswith("tiny") for name in spec.scales) or "pilot" in path.stem
    for name, scale in spec.scales.items():
        changes = [text for key in scale.needs for text in ("--set", f"{key}=some/folder")]
        experiment.command_line(
            [str(path), "--scale", name, "--dry-run", "--runs", str(tmp_path), *changes]
        )
        first, *lines = capsys.readouterr().out.splitlines()
        assert re.search(r"about \S+ (hours|minutes)", first) and scale.hardware in first
        assert len(lines) == len(set(lines)) and len(
            {line.split("--output ")[1] for line in lines}
        ) == len(lines)
        assert len(lines) % len(scale.seeds) == 0
        assert all(line.startswith(("python imdb_train/", "python gsm8k_train/")) for line in lines)


def test_a_cost_follows_the_work(tmp_path):
    text = SMALL[: SMALL.index("over:")] + SMALL[SMALL.index("runs:") :]
    runs = """  PPO, twice the queries:
    script: imdb_train/ppo.py
    flags: {ppo.batch_size: 128, ppo.mini_batch_size: 128}
  PPO, twice the epochs: {script: imdb_train/ppo.py, flags: {ppo.ppo_epochs: 8}}
  PPO, twice the iterations: {script: imdb_train/ppo.py, flags: {iterations: 200}}
scales:"""
    text = text.replace("values: [1.0e-4, 1.0e-3], ", "").replace("scales:", runs)
    text = text.replace("flags: {iterations: 3}", "").replace(
        "hardware: a laptop,", "hardware: a laptop"
    )
    (tmp_path / "trial.yaml").write_text(text)
    spec = experiment.read_experiment(tmp_path / "trial.yaml")
    planned = experiment.plan(spec, "tiny", {}, tmp_path)
    minutes = {item.label: item.minutes for item in planned if item.label != "CORY"}
    once = minutes.pop("PPO")
    assert once == pytest.approx(6)
    more = {
        "PPO, twice the queries": 2,
        "PPO, twice the epochs": 52 / 28,
        "PPO, twice the iterations": 2,
    }
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
        "PPO_learning_rate_0.0001-seed0",
        "PPO_learning_rate_0.0001-seed1",
        "PPO_learning_rate_0.001-seed0",
    ]
    assert planned[0].folder.parent == runs / "tiny/trial"
    assert {item.state() for item in planned} == {"missing"}
    item = planned[0]
    make_run(item.folder, iterations=3)
    settings = json.loads(json.dumps(item.settings))
    assert settings["model"]["name"] == "tiny"  # symbolic, so that no path of a machine is compared
    (item.folder / "config.yaml").write_text(
        yaml.safe_dump({**settings, "fingerprint": {"reward": "a.b"}})
    )
    assert item.state() == "finished"
    dry = [str(tmp_path / "trial.yaml"), "--dry-run", "--runs", str(runs)]
    experiment.command_line(dry)
    out = capsys.readouterr().out
    assert (
        "8 runs, 0 with a row, 1 finished" in out
        and "seed0 --resume" in out
        and f"{item.folder} " not in out
    )
    (item.folder / "summary.json").unlink()
    assert item.state() == "begun"
    for block, key in (("ppo", "lam"), ("model", "name")):
        other = {**settings, block: {**settings[block], key: "other"}}
        (item.folder / "config.yaml").write_text(yaml.safe_dump(other))
        message = rf"expected a run of this experiment, got one of other settings \({block}.{key}"
        with pytest.raises(UserError, match=message):
            experiment.command_line(dry)


OWN_TASK = """
title: A trial
question: Does it run?
runs:
  PPO: {script: cory.train, flags: {cory.num_agents: 1}}
scales:
  tiny: {config: train.yaml, seeds: [0]}
"""


@pytest.mark.parametrize(
    "file, content, changed",
    [
        ("rewards.py", "def length(completions):\n    return [9.0]\n", "fingerprint.reward_sha256"),
        ("prompts.jsonl", '{"prompt": "another"}\n', "fingerprint.dataset_sha256"),
        ("models/policy/pytorch_model.bin", "other", "the model models/policy of model.name"),
    ],
)
def test_a_finished_run_of_files_that_have_changed_is_not_taken_for_one_of_the_new(
    tmp_path, monkeypatch, file, content, changed
):
    """Its old numbers would be written as those of the new files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/policy").mkdir(parents=True)
    (tmp_path / "models/policy/config.json").write_text("{}")
    (tmp_path / "rewards.py").write_text("def length(completions):\n    return [1.0]\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n')
    task = {"dataset": "prompts.jsonl", "reward": "rewards.py:length"}
    settings = {"iterations": 3, "model": {"name": "models/policy"}, "task": task}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "trial.yaml").write_text(OWN_TASK)

    def planned():
        _fingerprint.cache_clear()
        spec = experiment.read_experiment(tmp_path / "trial.yaml")
        (item,) = experiment.plan(spec, "tiny", {}, tmp_path / "runs")
        return item

    item = planned()
    make_run(item.folder, iterations=3)
    identity = model_identity("models/policy")
    models = {"model.name": {"name": "models/policy", "identity": identity}}
    recorded = {"fingerprint": {**item.fingerprint(), "models": models}}
    (item.folder / "config.yaml").write_text(
        yaml.safe_dump(json.loads(json.dumps(item.settings)) | recorded)
    )
    assert planned().state() == "finished"
    (tmp_path / file).write_text(content)
    with pytest.raises(
        UserError, match=rf"runs/tiny/.*got one of other settings \(.*{changed}.*--runs"
    ):
        planned().state()


def test_a_finished_run_of_fewer_iterations_is_continued_while_it_has_checkpoints(tmp_path):
    spec = tmp_path / "trial.yaml"
    spec.write_text(SMALL)
    item = experiment.plan(experiment.read_experiment(spec), "tiny", {}, tmp_path / "runs")[0]
    make_run(item.folder, iterations=3)
    fewer = item.settings | {"iterations": 3}
    (item.folder / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(fewer))))
    more = replace(item, settings=item.settings | {"iterations": 5})
    (item.folder / "checkpoints/iter-000003").mkdir(parents=True)
    assert more.state() == "begun"
    shutil.rmtree(item.folder / "checkpoints")
    with pytest.raises(UserError, match=r"settings \(iterations: 3 -> 5\)\. Name another folder"):
        more.state()


def test_runs_are_made_seed_by_seed_or_of_the_first_seeds_alone(tmp_path, capsys):
    (tmp_path / "trial.yaml").write_text(SMALL)
    dry = [str(tmp_path / "trial.yaml"), "--dry-run", "--runs", str(tmp_path / "runs")]

    def seeds(*flags):
        experiment.command_line([*dry, *flags])
        return re.findall(r"--seed=(\d)", capsys.readouterr().out)

    assert seeds() == ["0"] * 4 + ["1"] * 4
    assert seeds("--seeds", "1") == ["0"] * 4
    with pytest.raises(UserError, match="--seeds: expected at least 1, got 0"):
        seeds("--seeds", "0")


def test_groups_have_folders_of_their_own(tmp_path):
    content = yaml.safe_load(SMALL)
    content["over"] = "model.name"
    content["scales"]["tiny"]["values"] = ["runs/a/agent_1", "runs/b/agent_1", "runs/b/agent_2"]
    (tmp_path / "trial.yaml").write_text(yaml.safe_dump(content))
    spec = experiment.read_experiment(tmp_path / "trial.yaml")
    planned = experiment.plan(spec, "tiny", {}, tmp_path / "runs")
    assert len({item.folder for item in planned}) == len(planned) == 2 * 3 * 2
    for item in planned:
        assert item.command[item.command.index("--output") + 1] == str(item.folder)
        assert item.folder.name.endswith(f"-seed{item.seed}")

    long = 30 * "long "
    content["scales"]["tiny"]["values"] = [long + "a", long + "b"]
    (tmp_path / "trial.yaml").write_text(yaml.safe_dump(content))
    spec = experiment.read_experiment(tmp_path / "trial.yaml")
    with pytest.raises(UserError, match="runs: expected groups whose names differ in their first"):
        experiment.plan(spec, "tiny", {}, tmp_path / "runs")


def test_the_command_that_repeats_an_experiment_has_no_folder_of_this_machine(monkeypatch):
    file = experiment.ROOT / "examples/notes/experiment.yaml"
    repeated = "python -m study.experiment examples/notes/experiment.yaml --scale toy"
    monkeypatch.chdir(experiment.ROOT / "examples")
    for path in (file, "notes/experiment.yaml"):
        assert experiment._repeated(str(path), "toy", {}) == repeated
    assert " mine.yaml " in experiment._repeated("../../mine.yaml", "toy", {}).replace("../../", "")


def test_the_size_of_a_run_is_without_its_checkpoints(tmp_path):
    folder = tmp_path / "checkpoints/run"  # a disk of that name
    for name in ("agent_1", "checkpoints"):
        (folder / name).mkdir(parents=True)
        (folder / name / "weights").write_bytes(b"0" * 500_000)
    assert experiment.megabytes(folder) == 0.5


def test_flags_that_look_like_yaml_stay_texts(tmp_path):
    prompts = ["Query: {prompt}\nAnswer:", "{prompt}"]
    content = yaml.safe_load(SMALL)
    content["over"] = "task.pioneer_prompt"
    content["scales"]["tiny"]["values"] = prompts
    content["scales"]["tiny"]["flags"] = {"task.observer_prompt": "Old: {response}, new: {prompt}"}
    (tmp_path / "trial.yaml").write_text(yaml.safe_dump(content))
    spec = experiment.read_experiment(tmp_path / "trial.yaml")
    planned = experiment.plan(spec, "tiny", {}, tmp_path / "runs")
    tasks = [item.settings["task"] for item in planned]
    assert {task["pioneer_prompt"] for task in tasks} == set(prompts)
    assert {task["observer_prompt"] for task in tasks} == {"Old: {response}, new: {prompt}"}


def test_a_run_of_more_iterations_is_another_run(tmp_path):
    (tmp_path / "trial.yaml").write_text(SMALL)
    item = experiment.plan(
        experiment.read_experiment(tmp_path / "trial.yaml"), "tiny", {}, tmp_path / "runs"
    )[0]
    make_run(item.folder, iterations=5)
    for planned, schedule in ((5, "constant"), (5, "linear"), (2, "constant")):
        settings = {
            **item.settings,
            "iterations": planned,
            "ppo": {**item.settings["ppo"], "schedule": schedule},
        }
        (item.folder / "config.yaml").write_text(yaml.safe_dump(settings))
        if planned > 3:
            with pytest.raises(
                UserError, match=r"other settings \(iterations: 5 -> 3(; ppo.schedule: [^;]*)?\)"
            ):
                item.state()
    (item.folder / "metrics.jsonl").write_text(
        "".join((item.folder / "metrics.jsonl").open().readlines()[:2])
    )
    (item.folder / "checkpoints/iter-000002").mkdir(parents=True)
    assert item.state() == "begun"  # a run of fewer is continued


@pytest.mark.parametrize("change", ["ppo.learning_rate=0.5", "cory.exchange_period=7", "seed=9"])
def test_a_key_that_the_experiment_varies_is_not_set_for_all(tmp_path, change):
    (tmp_path / "trial.yaml").write_text(SMALL)
    key = change.split("=")[0]
    with pytest.raises(
        UserError, match=rf"--set: expected keys that the experiment does not vary.*, got '{key}'"
    ):
        experiment.command_line([str(tmp_path / "trial.yaml"), "--dry-run", "--set", change])


def test_a_model_that_is_another_run_s_is_not_set_for_all(tmp_path):
    file = str(ROOT / "configs/experiments/imdb_ablations.yaml")
    for scale in ("tiny", "paper"):  # by a key, and by a configuration of its own
        with pytest.raises(
            UserError, match=r"does not vary, as it does for 'PPO, larger model', got 'model.name'"
        ):
            experiment.command_line(
                [file, "--scale", scale, "--dry-run", "--set", "model.name=gpt2"]
            )


@pytest.mark.parametrize(
    "change, message",
    [
        (("seeds: [0, 1]", "seeds: [a]"), "seeds"),
        (("seeds: [0, 1]", "seeds: two"), r"trial.yaml: scales\.tiny\.seeds: "),
        (
            ("seeds: [0, 1]", "sedes: [0, 1]"),
            r"trial.yaml: scales\.tiny\.sedes: .*'scales\.tiny\.seeds'",
        ),
        (
            ("flags: {cory", "flag: {cory"),
            r"trial.yaml: runs\.CORY\.flag: .*'runs\.CORY\.flags'",
        ),
        (("title:", "titel:"), r"trial.yaml: titel: "),
        (("title:", "# title:"), r"trial.yaml: title: "),
        (("title:", "["), "trial.yaml, line"),
        (
            ("ppo.learning_rate", "ppo.learning_rat"),
            r"runs.PPO: ppo\.learning_rat: ",
        ),
        (("imdb/tiny", "imdb/none"), "none.yaml"),
        (
            ("imdb_train/ppo.py", "imdb_train/pop.py"),
            r"script: expected a file 'imdb_train/pop.py' in .*checkout",
        ),
        (
            ("imdb_train/ppo.py", "benchmarks/iteration.py"),
            "script: expected one in the folder of a registered task",
        ),
        (
            ("hardware:", "evaluate: imdb_train/eval.py, hardware:"),
            "evaluate: script: expected a file 'imdb_train/eval.py'",
        ),
        (
            ("hardware:", "evaluate: imdb_train/evaluate.py --quries 8, hardware:"),
            "evaluate: quries: ",
        ),
        (
            ("hardware:", "evaluate: cory.evaluation --sampling.temprature 1, hardware:"),
            "evaluate: sampling.temprature: ",
        ),
        (
            ("hardware:", "evaluate: cory.evaluate --queries 8, hardware:"),
            "evaluate: script: expected one of cory.evaluation, got 'cory.evaluate'",
        ),
        (
            ("flags: {cory", "at: {tyni: {seed: 1}}, flags: {cory"),
            r"CORY.at: expected some of \['tiny'\], got 'tyni'",
        ),
    ],
)
def test_a_wrong_experiment_is_an_error(tmp_path, change, message):
    (tmp_path / "trial.yaml").write_text(SMALL.replace(*change))
    with pytest.raises(UserError, match=message):
        experiment.command_line(
            [str(tmp_path / "trial.yaml"), "--dry-run", "--runs", str(tmp_path / "runs")]
        )


def test_a_missing_experiment_is_named(tmp_path):
    with pytest.raises(UserError, match=r"trail.yaml', which is none"):
        experiment.read_experiment(tmp_path / "trail.yaml")


def test_runs_of_one_scale_alone_and_their_configuration(tmp_path):
    spec = experiment.read_experiment(ROOT / "configs/experiments/gsm8k_credit.yaml")
    files = {item.label: item.command[3] for item in experiment.plan(spec, "paper", {}, tmp_path)}
    assert files["PPO"] == "configs/gsm8k/llama2_7b.yaml"
    assert files["CORY"] == "configs/gsm8k/llama2_7b_lr1e-4.yaml"
    at_one_scale = "  PPO, large: {script: imdb_train/ppo.py, at: {large: {}}}\nscales:"
    (tmp_path / "trial.yaml").write_text(
        ONE.replace("scales:", at_one_scale)
        + "  large: {config: configs/imdb/tiny.yaml, seeds: [0]}\n"
    )
    spec = experiment.read_experiment(tmp_path / "trial.yaml")
    labels = {item.label for item in experiment.plan(spec, "tiny", {}, tmp_path)}
    assert labels == {"PPO", "no such policy"}


def test_runs_of_several_tasks_are_planned(tmp_path):
    of_gsm8k = "{script: gsm8k_train/ppo.py, flags: {config: configs/gsm8k/tiny.yaml}}"
    text = ONE.replace("scales:", f"  other: {of_gsm8k}\nscales:")
    (tmp_path / "trial.yaml").write_text(text)
    spec = experiment.read_experiment(tmp_path / "trial.yaml")
    planned = experiment.plan(spec, "tiny", {}, tmp_path / "runs")
    assert {item.settings["task"]["dataset"] for item in planned} == {"tiny"}
    assert {"PPO", "other"} < {item.label for item in planned}


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
        item = Planned(
            "PPO", tmp_path / name, {"model": {"name": name}}, [sys.executable, "-c", "pass"], 0.0
        )
        assert experiment.run_all([item], experiment.Engine()) == {}
    assert made == ["tiny_large"] and "not shipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "visible", "jobs", "shares"),
    [
        (0, None, 2, [None, None]),
        (8, None, 1, [None]),
        (2, None, 2, ["0", "1"]),
        (4, None, 2, ["0,1", "2,3"]),
        (3, None, 2, ["0", "1"]),
        (2, "5,7", 3, ["5", "7", "5"]),
    ],
)
def test_jobs_share_the_gpus(monkeypatch, count, visible, jobs, shares):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert shares_of_gpus(jobs) == shares


def test_a_job_and_its_evaluation_see_its_gpus_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # A run waits until the other has begun.
    code = (
        "import os, pathlib, time; pathlib.Path('{}').touch()\n"
        "[time.sleep(0.01) for _ in range(3000) if not pathlib.Path('{}').exists()]\n"
        "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    one, two = tmp_path / "one", tmp_path / "two"
    planned = [
        Planned(
            "PPO",
            Path(f"{a}-run"),
            {"model": {"name": "gpt2"}},
            [sys.executable, "-c", code.format(a, b)],
            0.0,
        )
        for a, b in ((one, two), (two, one))
    ]
    of_evaluations = {}

    def after(item, seconds):
        of_evaluations[item.folder] = environment(None)["CUDA_VISIBLE_DEVICES"]

    assert experiment.run_all(planned, experiment.Engine(jobs=2), after) == {}
    of_runs = {item.folder: Path(f"{item.folder}.log").read_text().strip() for item in planned}
    assert of_runs == of_evaluations and sorted(of_runs.values()) == ["0", "1"]
    assert "CUDA_VISIBLE_DEVICES" not in environment(None)  # of this thread


def test_outside_a_checkout_an_experiment_says_what_it_needs(tmp_path):
    """As installed from a wheel: the packages are there, the configurations are not."""
    for package in ("cory", "study", "imdb_train", "gsm8k_train"):
        shutil.copytree(
            ROOT / package,
            tmp_path / package,
            ignore=shutil.ignore_patterns("weights", "__pycache__"),
        )
    (tmp_path / "trial.yaml").write_text(SMALL)
    for command, message in (
        (
            ["experiment", "nosuch.yaml"],
            "expected the file of an experiment, such as configs/experiments/",
        ),
        (
            ["experiment", "trial.yaml"],
            "runs.PPO: config: expected a file 'configs/imdb/tiny.yaml' in '",
        ),
        (["claims"], "experiment: expected a file 'configs/experiments/imdb_noise.yaml' in '"),
    ):
        argv = [sys.executable, "-m", f"study.{command[0]}", *command[1:]]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith(f"error: {message}"), done.stderr
        assert "of a checkout" in done.stderr and "Traceback" not in done.stderr


def test_what_the_user_must_name_is_asked_for(tmp_path):
    path = str(ROOT / "configs/experiments/imdb_curves.yaml")
    with pytest.raises(UserError, match=r"scale real: expected --set model.name"):
        experiment.command_line([path, "--scale", "real", "--dry-run", "--runs", str(tmp_path)])
    scales = r"\['tiny', 'real', 'smollm2', 'paper'\]"
    with pytest.raises(UserError, match=rf"scale: expected one of {scales}, got 'huge'"):
        experiment.command_line([path, "--scale", "huge", "--dry-run"])
    with pytest.raises(UserError, match="--set: expected KEY=VALUE"):
        experiment.command_line([path, "--set", "seed", "--dry-run"])
    with pytest.raises(UserError, match="--jobs: expected at least 1, got 0"):
        experiment.command_line([path, "--jobs", "0"])
    for key in ("seed.x", "ppo.batch_size.x"):
        with pytest.raises(UserError, match=f"{key}: "):
            experiment.command_line([path, "--set", f"{key}=1", "--dry-run"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "scales:",
            "baseline: nothing\nscales:",
            r"baseline: expected one of \['PPO', 'no such policy'\]",
        ),
        (
            "imdb_train/ppo.py,",
            "imdb_train/ppo.py, at: {large: {}},",
            "scale: expected one at which",
        ),
        ("scales:", "scales: {}\nothers:", "others: "),
    ],
)
def test_an_experiment_that_compares_nothing_is_refused(tmp_path, old, new, message):
    large = (
        "  large: {config: configs/imdb/tiny.yaml, seeds: [0], minutes: {ppo: 6}, hardware: none}\n"
    )
    (tmp_path / "trial.yaml").write_text(ONE.replace(old, new) + large)
    with pytest.raises(UserError, match=message):
        experiment.command_line([str(tmp_path / "trial.yaml"), "--dry-run"])
    (tmp_path / "trial.yaml").write_text(ONE[: ONE.index("scales:")] + "scales: {}\n")
    with pytest.raises(UserError, match="scales: expected at least one, got none"):
        experiment.command_line([str(tmp_path / "trial.yaml"), "--dry-run"])


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
    with pytest.raises(UserError, match="1 run failed; the same command resumes"):
        experiment.command_line(argv)
    text = (tmp_path / "out/comparison.md").read_text()
    assert text.startswith("# A trial\n\nDoes it run?") and "| PPO | 1 |" in text
    assert "* no such policy: planned seeds that have not ended: 0\n" in text
    assert "* no such policy, seed 0: failed (2): model.name: " in text
    # As it is pasted, without folders of this machine.
    said = shlex.split(text.split("```bash\n")[1].splitlines()[0])
    assert said[-4:] == ["--set", prompt, "--set", "task.reward_model=FOLDER"]
    # Nobody else could repeat a run that names a folder of this machine.
    assert not (tmp_path / "out/first_run.json").exists()
    rows = (tmp_path / "out/runs.csv").read_text()
    with pytest.raises(
        UserError, match=r"got one of PPO, seed 0, with task.observer_prompt .* delete its row"
    ):
        experiment.command_line(
            [
                *argv,
                "--set",
                "task.observer_prompt={prompt} {response}",
                "--runs",
                str(tmp_path / "o"),
            ]
        )
    assert (tmp_path / "out/runs.csv").read_text() == rows
    out = capfd.readouterr().out
    assert "2 runs, 0 with a row, 0 finished" in out and "no_such_policy-seed0: FAILED (2): " in out
    log = tmp_path / "runs/tiny/trial/no_such_policy-seed0.log"
    said = log.read_text().splitlines()[-1].removeprefix("error: ")
    assert said.startswith("model.name") and f"FAILED (2): {said}, see {log}" in out
    experiment.command_line([*argv, "--dry-run"])
    assert "2 runs, 1 with a row, 0 finished" in capfd.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_experiment_saves_its_runs_and_goes_on_from_there(tmp_path, number):
    (tmp_path / "trial.yaml").write_text(
        ONE[: ONE.index("  no such")] + ONE[ONE.index("scales:") :].replace(": 2}", ": 500}")
    )
    command = [
        sys.executable,
        "-m",
        "study.experiment",
        "trial.yaml",
        "--runs",
        str(tmp_path / "runs"),
    ]
    driver = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        stdout=PIPE,
        stderr=PIPE,
    )
    folder = tmp_path / "runs/tiny/trial/PPO-seed0"
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
import itertools, json, pathlib, sys
words = sys.argv[1:]
folder = pathlib.Path(words[words.index("--output") + 1])
runs = [pathlib.Path(word).name for word in itertools.takewhile(lambda word: word[:2] != "--", words)]
folder.mkdir(parents=True)
(folder.parent / "calls.txt").open("a").write(" ".join(runs) + "\\n")
names = [f"{runs[-1]}/agent_1"] if "--only" in words else ["base", f"{runs[0]}/agent_1"]
metrics = {"task_reward": 0.5, "kl": 1.0, "combined_reward": 0.2, "distinct_2": 0.9}
rows = [{"name": name, "task_reward_ci": 1.0, **metrics} for name in names]
(folder / "evaluation.json").write_text(json.dumps({"rows": rows}))
"""


@pytest.fixture
def judged(tmp_path):
    """An experiment of PPO at two learning rates and two seeds with an evaluation; its runs have ended."""
    (tmp_path / "judge.py").write_text(JUDGE)
    text = SMALL[: SMALL.index("  CORY:")] + SMALL[SMALL.index("scales:") :]
    text = text.replace("hardware:", f"evaluate: {tmp_path / 'judge.py'} --easy, hardware:")
    (tmp_path / "trial.yaml").write_text(text)
    planned = experiment.plan(
        experiment.read_experiment(tmp_path / "trial.yaml"), "tiny", {}, tmp_path / "runs"
    )
    for item in planned:
        make_ended(item)
    return planned


def make_ended(item):
    make_run(item.folder, item.seed, item.settings["cory"]["num_agents"], iterations=3)
    settings = json.loads(json.dumps(item.settings)) | {"versions": {"commit": "abc"}}
    (item.folder / "config.yaml").write_text(yaml.safe_dump(settings))
    for name in ("agent_1", "checkpoints"):
        (item.folder / name).mkdir()
        (item.folder / name / "weights").write_bytes(b"0" * 500_000)


def trial(tmp_path, *flags, out="a", runs="runs"):
    argv = [
        str(tmp_path / "trial.yaml"),
        "--runs",
        str(tmp_path / runs),
        "--out",
        str(tmp_path / "results" / out),
    ]
    experiment.command_line([*argv, *flags])


def test_each_run_that_has_ended_is_evaluated_and_its_row_written(tmp_path, judged, capsys):
    trial(tmp_path)
    out = tmp_path / "results/a"
    rows = list(csv.DictReader(open(out / "runs.csv")))
    assert [(row["group"], row["seed"]) for row in rows] == [
        (item.of.name, str(item.seed)) for item in judged
    ]
    assert float(rows[0]["megabytes"]) > 0.5
    held_out = list(csv.DictReader(open(out / "held_out.csv")))
    assert [row["group"] for row in held_out] == [
        "base (untrained)",
        *(item.of.name for item in judged),
    ]
    assert len(list(csv.DictReader(gzip.open(out / "metrics.csv.gz", "rt")))) == 4 * 3
    assert "Held out" in (out / "comparison.md").read_text() and (out / "held_out.png").exists()
    assert (
        not list((tmp_path / "runs").rglob("checkpoints"))
        and (judged[0].folder / "agent_1").exists()
    )
    # the first run is named each time, so that the base answers once
    calls = (tmp_path / "runs/tiny/trial/evaluation/calls.txt").read_text().splitlines()
    first = judged[0].folder.name
    by_seed = sorted(judged, key=lambda item: item.seed)
    assert calls == [first, *(f"{first} {item.folder.name}" for item in by_seed[1:])]


@pytest.mark.filterwarnings("error")
def test_the_report_leaves_out_runs_that_ended_but_are_of_later_seeds(tmp_path, judged):
    trial(tmp_path, "--seeds", "1")
    report = (tmp_path / "results/a/report.html").read_text()
    assert report.count(": 1 of 1 run ended") == 2


def test_a_run_with_a_row_is_not_made_again_on_another_machine(tmp_path, judged, capsys):
    trial(tmp_path)
    capsys.readouterr()
    trial(tmp_path, runs="elsewhere")
    printed = capsys.readouterr().out
    assert "4 runs, 4 with a row, 0 finished, 0 to resume. To do: nothing." in printed
    assert "4 rows of version abc, not of this one" in printed


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("--easy", "--hard", "evaluation '.*--easy' in place of '.*--hard'"),
        ("iterations: 3", "iterations: 4", "planned '3' in place of '4'"),
        ("flags: {", "flags: {ppo.init_kl_coef: 0.1, ", "eta '0.3' in place of '0.1'"),
    ],
)
def test_a_row_of_other_settings_is_an_error_that_names_the_key(
    tmp_path, judged, capsys, old, new, message
):
    trial(tmp_path)
    text = (tmp_path / "trial.yaml").read_text()
    (tmp_path / "trial.yaml").write_text(text.replace(old, new))
    with pytest.raises(
        UserError, match=rf"got one of PPO, .*, seed 0, with {message}\. To measure"
    ):
        trial(tmp_path, "--dry-run", runs="elsewhere")


def test_what_is_set_for_all_runs_is_recorded(tmp_path, judged):
    for item in judged:
        config = yaml.safe_load((item.folder / "config.yaml").read_text())
        config["ppo"]["gamma"] = 0.5
        (item.folder / "config.yaml").write_text(yaml.safe_dump(config))
    trial(tmp_path, "--set", "ppo.gamma=0.5")
    with pytest.raises(UserError, match=r"with ppo.gamma '0.5' in place of '1.0'"):
        trial(tmp_path, "--dry-run")


def test_a_group_takes_the_rows_of_another_experiment(tmp_path, judged, capsys):
    trial(tmp_path, out="trial")
    text = (tmp_path / "trial.yaml").read_text()
    taken = text.replace(
        "PPO: {script: imdb_train/ppo.py", "PPO: {script: imdb_train/ppo.py, from: trial"
    )
    (tmp_path / "other.yaml").write_text(taken)
    argv = [str(tmp_path / "other.yaml"), "--runs", str(tmp_path / "elsewhere")]
    capsys.readouterr()
    experiment.command_line([*argv, "--out", str(tmp_path / "results/other")])
    assert "4 runs, 4 with a row" in capsys.readouterr().out
    for name in ("metrics.csv.gz", "final.csv", "held_out.csv", "curves.png"):
        assert (tmp_path / "results/other" / name).read_bytes() == (
            tmp_path / "results/trial" / name
        ).read_bytes()
    rows = list(csv.DictReader(open(tmp_path / "results/other/runs.csv")))
    assert {row["experiment"] for row in rows} == {"other"} and len(rows) == 4

    # A row that is not there is of a run to make; one of another setting is refused.
    experiment.command_line([*argv, "--out", str(tmp_path / "none/other"), "--dry-run"])
    assert "4 runs, 0 with a row" in capsys.readouterr().out
    (tmp_path / "other.yaml").write_text(taken.replace("--easy", "--hard"))
    with pytest.raises(UserError, match=r"results/trial: expected rows of .* with evaluation "):
        experiment.command_line([*argv, "--out", str(tmp_path / "results/another")])


def test_rows_without_a_comparison_are_gone_on_with(tmp_path, judged):
    out = tmp_path / "results/a"
    trial(tmp_path, "--seeds", "1")
    (out / "comparison.md").unlink()  # as in the folders of the repository
    trial(tmp_path)
    assert len(list(csv.DictReader(open(out / "runs.csv")))) == 4


def test_rows_of_another_experiment_are_not_written_over(tmp_path, judged):
    out = tmp_path / "results/a"
    out.mkdir(parents=True)
    names = ("runs.csv", "final.csv", "held_out.csv")
    for name in names:
        shutil.copy(ROOT / "results/imdb_rivals" / name, out / name)
    (out / "comparison.md").write_text("# Older\n")
    with pytest.raises(UserError, match=r"--out: .* which has 20 runs of another, such as PPO"):
        trial(tmp_path)
    for name in names:
        assert (out / name).read_bytes() == (ROOT / "results/imdb_rivals" / name).read_bytes()


def test_a_run_that_takes_the_place_of_a_longer_one_leaves_none_of_its_rows(tmp_path, judged):
    trial(tmp_path)
    out = tmp_path / "results/a"
    shutil.rmtree(tmp_path / "runs")
    shorter = (tmp_path / "trial.yaml").read_text().replace("iterations: 3", "iterations: 2")
    (tmp_path / "trial.yaml").write_text(shorter)
    spec = experiment.read_experiment(tmp_path / "trial.yaml")
    planned = experiment.plan(spec, "tiny", {}, tmp_path / "runs")
    make_run(planned[0].folder, iterations=2)
    table = (out / "runs.csv").read_text().splitlines()
    (out / "runs.csv").write_text("\n".join(table[:1]) + "\n")  # the advice of the error
    results = Results(out, "trial", "tiny", planned, "PPO")
    results.add_run(planned[0], None, None)
    metrics = list(csv.DictReader(gzip.open(out / "metrics.csv.gz", "rt")))
    assert [row["iteration"] for row in metrics] == ["0", "1"]
    assert [row["iterations"] for row in csv.DictReader(open(out / "runs.csv"))] == ["2"]
    assert not (out / "held_out.csv").exists()  # which was of an evaluation that there is no more


def test_the_page_says_which_planned_runs_are_missing(tmp_path, judged):
    trial(tmp_path, "--seeds", "1")
    page = (tmp_path / "results/a/comparison.md").read_text()
    assert "* planned seeds that no group has ended: 1\n" in page
    trial(tmp_path)
    page = (tmp_path / "results/a/comparison.md").read_text()
    assert "planned seeds that" not in page
    runs = pd.read_csv(tmp_path / "results/a/runs.csv")
    one_is_missing = runs[(runs["seed"] == 0) | (runs["group"] == judged[0].of.name)]
    (note,) = experiment._missing_runs(judged, one_is_missing)
    assert note == f"{judged[-1].of.name}: planned seeds that have not ended: 1"


def test_a_comparison_of_runs_leaves_an_experiment_s_rows_alone(tmp_path, judged):
    trial(tmp_path)
    out = tmp_path / "results/a"
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(
        UserError, match=r"--out: expected a folder without rows.*has 4 rows of trial"
    ):
        compare.command_line([str(judged[0].folder), str(judged[1].folder), "--out", str(out)])
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    for _ in range(2):  # a copy is no folder of the experiment
        compare.command_line([str(out), "--out", str(tmp_path / "copy")])
    compare.command_line([str(out), "--out", str(out)])  # again from its own files
    assert len((out / "runs.csv").read_text().splitlines()) == 5


def test_an_evaluation_has_the_threads_of_a_run(tmp_path, judged):
    judge = tmp_path / "judge.py"
    says = f"import os\nopen({str(tmp_path / 'threads')!r}, 'w').write(os.environ['OMP_NUM_THREADS'])\n"
    judge.write_text(says + judge.read_text())
    trial(tmp_path, "--cpus", "3")
    assert (tmp_path / "threads").read_text() == "3"


def test_time_and_disk_are_those_of_earlier_runs(tmp_path, judged, capsys):
    results = Results(tmp_path / "results/a", "trial", "tiny", judged, "PPO")
    results.write([results.frames_of(item, 7200.0, 250.0) for item in judged[:-1]])
    assert results.estimate(judged) == (4 * 7200.0, 4) and results.disk(judged) == 1000.0
    fresh = Results(tmp_path / "results/none/a", "trial", "tiny", judged, "PPO")
    assert fresh.estimate(judged) == (pytest.approx(sum(60 * item.minutes for item in judged)), 0)
    assert math.isnan(fresh.disk(judged))


def test_an_evaluation_starts_anew_if_the_first_run_has_changed(tmp_path, judged):
    trial(tmp_path)
    folder = tmp_path / "runs/tiny/trial/evaluation"
    shutil.rmtree(judged[0].folder / "agent_1")
    evaluation = RunEvaluation(f"{tmp_path / 'judge.py'} --easy", folder)
    results = Results(tmp_path / "results/c", "trial", "tiny", judged, "PPO", evaluation)
    results.add_run(judged[1], None, None)
    assert (folder / "calls.txt").read_text().splitlines()[-1] == judged[1].folder.name


def test_a_failed_evaluation_is_a_failed_run_and_keeps_its_checkpoints(tmp_path, judged, capsys):
    (tmp_path / "judge.py").write_text("raise SystemExit(2)")
    with pytest.raises(UserError, match="no run has ended well"):
        trial(tmp_path)
    assert len(list((tmp_path / "runs").rglob("checkpoints"))) == 4
    said = capsys.readouterr().out
    for item in judged:  # each is tried, as another's failure says nothing of it
        assert (
            f"{item.folder.name}: FAILED (" in said
            and "judge.py --easy: failed with status 2" in said
        )


def test_the_base_stays_that_of_the_runs_that_stay(tmp_path, judged):
    """An evaluation that is begun anew, as on another machine, may begin with another run, whose base is another."""

    def base_rewards():
        rows = list(csv.DictReader(open(tmp_path / "results/a/held_out.csv")))
        return [float(row["task_reward"]) for row in rows if row["group"] == "base (untrained)"]

    trial(tmp_path, "--seeds", "1")
    shutil.rmtree(tmp_path / "runs/tiny/trial/evaluation")
    text = (tmp_path / "judge.py").read_text()
    of_another = text.replace(
        "for name in names]\n(folder", "for name in names]\nrows[0]['task_reward'] = 0.9\n(folder"
    )
    assert of_another != text
    (tmp_path / "judge.py").write_text(of_another)
    trial(tmp_path)
    assert base_rewards() == [0.5]
    assert len(list(csv.DictReader(open(tmp_path / "results/a/runs.csv")))) == 4


def test_agents_are_removed_if_asked(tmp_path, judged):
    (tmp_path / "judge.py").write_text(JUDGE)
    trial(tmp_path, "--discard-agents")
    # but for those of the first run, which all evaluations name
    assert [path.parent for path in (tmp_path / "runs").rglob("agent_1")] == [judged[0].folder]
    evaluation = tmp_path / "runs/tiny/trial/evaluation"
    assert [path.name for path in evaluation.iterdir() if path.is_dir()] == [judged[0].folder.name]


def test_a_run_whose_agents_were_removed_is_not_evaluated_again(tmp_path, judged):
    """Before, its evaluation failed, and the advice to repeat the command did not help."""
    trial(tmp_path, "--discard-agents")
    text = (tmp_path / "trial.yaml").read_text()
    (tmp_path / "trial.yaml").write_text(text.replace("--easy", "--hard"))
    with pytest.raises(UserError, match=r"expected a run with its agents, .* --runs, or remove"):
        trial(tmp_path, out="b")
    assert not (tmp_path / "results/b").exists()


def test_an_evaluation_with_other_options_is_begun_anew(tmp_path, judged):
    trial(tmp_path)
    calls = (tmp_path / "runs/tiny/trial/evaluation/calls.txt").read_text()
    text = (tmp_path / "trial.yaml").read_text()
    (tmp_path / "trial.yaml").write_text(text.replace("--easy", "--hard"))
    trial(tmp_path, out="b")
    assert len(list(csv.DictReader(open(tmp_path / "results/b/runs.csv")))) == 4
    assert (tmp_path / "runs/tiny/trial/evaluation/calls.txt").read_text() == 2 * calls
    held_out = list(csv.DictReader(open(tmp_path / "results/b/held_out.csv")))
    assert [row["group"] for row in held_out].count("base (untrained)") == 1


def test_rows_of_before_have_what_the_plan_says_now(tmp_path, judged):
    """The baseline, and the settings in which groups differ."""
    trial(tmp_path, "--seeds", "1")
    text = (tmp_path / "trial.yaml").read_text()
    (tmp_path / "trial.yaml").write_text(
        text.replace("scales:", "  CORY: {script: imdb_train/cory.py}\nbaseline: CORY\nscales:")
    )
    planned = experiment.plan(
        experiment.read_experiment(tmp_path / "trial.yaml"), "tiny", {}, tmp_path / "runs"
    )
    for item in planned:
        if item.label == "CORY":
            make_ended(item)
    trial(tmp_path)
    rows = list(csv.DictReader(open(tmp_path / "results/a/runs.csv")))
    assert {row["group"] for row in rows if row["baseline"] == "True"} == {
        row["group"] for row in rows if row["family"] == "CORY"
    }
    assert all(row["cory.num_agents"] for row in rows)


def test_texts_are_of_the_runs_whose_rows_they_stand_beside(tmp_path, judged):
    trial(tmp_path)
    for item in judged:  # as made again with --set, for another folder of results
        path = item.folder / "config.yaml"
        path.write_text(path.read_text().replace("gamma: 1.0", "gamma: 0.5"))
    trial(tmp_path)
    assert "The same queries" not in (tmp_path / "results/a/comparison.md").read_text()


def test_experiments_into_one_folder_are_run_one_after_the_other(tmp_path, judged, monkeypatch):
    write = experiment._write
    refused = []

    def while_another_writes(*args):
        if not refused:
            refused.append(1)
            with pytest.raises(UserError, match="expected a folder that no other process is"):
                trial(tmp_path, runs="others")
        return write(*args)

    monkeypatch.setattr(experiment, "_write", while_another_writes)
    trial(tmp_path)
    assert refused


def test_groups_of_the_same_runs_are_refused(tmp_path):
    """Of a slip, a comparison would find no difference with certainty."""
    flags = "{cory.num_agents: 1, ppo.batch_size: 8, ppo.mini_batch_size: 8}"
    same = f"  CORY: {{script: imdb_train/cory.py, flags: {flags}}}\nscales:"
    (tmp_path / "trial.yaml").write_text(ONE.replace("scales:", same))
    with pytest.raises(UserError, match="got 'PPO' and 'CORY', which"):
        experiment.command_line([str(tmp_path / "trial.yaml"), "--dry-run"])


def test_agents_that_no_evaluation_judges_are_not_removed(tmp_path):
    (tmp_path / "trial.yaml").write_text(SMALL)
    with pytest.raises(
        UserError,
        match=r"--discard-agents: expected a scale with `evaluate`.*got 'tiny' of .*trial",
    ):
        trial(tmp_path, "--discard-agents", "--dry-run")
