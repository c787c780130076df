"""A run explains itself, and continues by one flag: what a new user tries first."""

import fcntl
import functools
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, make_gpt2, sentences

from cory.agent import make_agents
from cory.config import Config, LoraConfig
from cory.errors import UserError
from cory.identity import data_hash, function_name, source_hash
from cory.roles import RolePrompts
from cory.task import Task
from cory.trainer import CoryTrainer
from imdb_train import evaluate

PROMPTS = RolePrompts(observer='Improve "{prompt}{response}": {prompt}')


def count_good(prompts, completions):
    return [float(completion.count("good")) for completion in completions]


def count_bad(prompts, completions):
    return [-float(completion.count("good")) for completion in completions]


def make_trainer(config, reward=count_good, prompts=PROMPTS, rows=24) -> CoryTrainer:
    return CoryTrainer(
        config, make_agents(config), Task.from_prompts(sentences(rows), reward, prompts)
    )


def flags(policy_folder, classifier_folder, reviews, **more):
    values = {
        "model.name": policy_folder, "task.reward_model": classifier_folder, "task.dataset": reviews,
        "ppo.batch_size": 8, "ppo.mini_batch_size": 8, "ppo.learning_rate": 1e-3, "device": "cpu", **more,
    }  # fmt: skip
    return [f"--{key}={value}" for key, value in values.items()]


@pytest.fixture(scope="module")
def world(policy_folder, classifier_folder, reviews):
    return policy_folder, classifier_folder, reviews


def run(cwd, *argv, script="imdb_train/cory.py"):
    return subprocess.run(
        [sys.executable, str(ROOT / script), *argv], cwd=cwd, capture_output=True, text=True
    )


def iterations(folder: Path) -> int:
    return len((folder / "metrics.jsonl").read_text().splitlines()) // 2


def test_the_command_that_an_interrupted_run_prints_continues_it(
    world, tmp_path, monkeypatch, command
):
    start = [
        sys.executable,
        str(ROOT / "imdb_train/cory.py"),
        *flags(*world, iterations=40),
        "--output=runs/mine",
    ]
    process = subprocess.Popen(
        start, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    folder = tmp_path / "runs/mine"
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    printed = re.search(r"Continue with: (.+)", said).group(1)
    assert printed.startswith("python ") and "--resume runs/mine" in printed
    done = iterations(folder)
    _, *argv = shlex.split(printed)
    monkeypatch.chdir(tmp_path)
    again = command(*argv)
    assert again.status == 0, again.error
    assert iterations(folder) == 40 and f"next is iteration {done + 1}" in again.out
    other = command(
        ROOT / "imdb_train/cory.py", "--resume", "runs/mine", "--ppo.learning_rate", "0.5"
    )
    assert other.status == 2 and "ppo.learning_rate" in other.error


def test_a_runs_file_is_a_configuration(world, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    script = ROOT / "imdb_train/cory.py"
    first = command(script, *flags(*world, iterations=1), "--output=runs/mine")
    assert first.status == 0, first.error
    file = "runs/mine/config.yaml"
    for argv in (["--config", file], [f"--config=./{file}"]):
        again = command(script, *argv, "--seed", "1")
        assert again.status == 0, again.error
    saved = [
        yaml.safe_load((tmp_path / f"runs/mine{n}/config.yaml").read_text())
        for n in ("", "-seed1", "-seed1-2")
    ]
    assert [one["seed"] for one in saved] == [0, 1, 1] and saved[1]["ppo"] == saved[0]["ppo"]
    assert {"versions", "fingerprint"} < set(saved[1]) and saved[1]["resume"] is None


def test_a_reward_is_known_by_its_file(tmp_path):
    class Scaled:
        def __call__(self, prompts, completions):
            return [1.0] * len(completions)

    here = source_hash(count_good)
    assert here and here == source_hash(count_bad) == source_hash(Scaled())
    assert source_hash(functools.partial(count_good)) == here
    assert source_hash(make_gpt2) not in (here, "")
    typed = {}
    exec("def typed(prompts, completions): return []", typed)
    assert source_hash(typed["typed"]) == source_hash(len) == ""
    assert function_name(Scaled()).endswith("Scaled")
    assert function_name(functools.partial(count_good)).endswith("count_good")


def test_data_are_known_by_their_rows():
    import datasets

    rows = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"], "answer": [1, 2, 3]})
    same = datasets.Dataset.from_list([{"prompt": p, "answer": i} for i, p in enumerate("abc", 1)])
    assert data_hash(rows) == data_hash(same)
    others = [rows.select([0, 1]), rows.select([1, 0, 2]), rows.rename_column("answer", "gold")]
    assert len({data_hash(each) for each in [rows, *others]}) == 4


def test_evaluating_a_run_of_ones_own_task_says_how(config, monkeypatch):
    folder = make_trainer(replace(config, iterations=1)).train().folder
    monkeypatch.setattr(sys, "argv", ["evaluate.py", str(folder)])
    message = r"expected a run of a registered task, got one .* in Python.*cory.evaluate\("
    with pytest.raises(UserError, match=message):
        evaluate.run()


def test_evaluating_a_run_that_has_not_ended_says_so(config, monkeypatch, tmp_path):
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/config.yaml").write_text("seed: 0\n")
    monkeypatch.setattr(sys, "argv", ["evaluate.py", str(tmp_path / "begun")])
    with pytest.raises(
        UserError, match="expected a run with saved agents, got one that has not ended"
    ):
        evaluate.run()


def test_cards_name_library_and_base(config):
    adapter = replace(config, iterations=1, lora=LoraConfig(rank=2))
    card = (make_trainer(adapter).train().folder / "agent_1/README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert "base_model" not in header  # a folder of this machine
    assert header["library_name"] == "peft"
    assert "PeftModel.from_pretrained" in card


def test_piped_output_is_lines_of_text_alone(world, tmp_path):
    """No bars of loading, no warnings, no word of libraries that are not used."""
    seed = 1  # with which no iteration of so few responses is flagged
    done = run(tmp_path, *flags(*world, iterations=2, seed=seed, **{"lora.rank": 2}))
    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = done.stdout.splitlines()
    name, method = lines[0].split(": ", 1)
    assert name.startswith("imdb_cory_tiny-rank=2-")
    assert method.startswith("CORY with 2 agents, model ") and method.endswith(
        ", 2 iterations. Loading ..."
    )
    assert lines[1].startswith("iteration 1/2 | agent_1 ")


def test_a_terminal_of_80_columns_shows_both_agents(world, tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        argv = [sys.executable, str(ROOT / "imdb_train/cory.py"), *flags(*world, iterations=12)]
        os.execv(sys.executable, argv)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    output = b""
    try:
        while chunk := os.read(terminal, 4096):
            output += chunk
    except OSError:  # the other end is closed
        pass
    os.waitpid(pid, 0)
    text = re.sub(r"\x1b\[\w", "", output.decode())
    assert text.splitlines()[0].endswith("Loading ...")
    shown = [line.strip() for line in re.split(r"[\r\n]+", text) if re.match(r"\s*\d+/12 \[", line)]
    last = [line for line in shown if line.startswith("12/12")][-1]
    assert (
        re.search(r"\| agent_2 (pio|obs) [+-]\d+\.\d\d KL -?\d+\.\d\d", last) and "agent_1" in last
    ), shown
    assert max(map(len, shown)) <= 80


def test_settings_in_python_are_checked_as_those_of_a_file():
    config = Config()
    with pytest.raises(UserError, match=r"ppo\.batch_sise: "):
        config.ppo.batch_sise = 3
    with pytest.raises(UserError, match=r"ppo\.batch_size: "):
        config.ppo.batch_size = "3"
    with pytest.raises(UserError, match=r"ppo\.kl_penalty: "):
        config.ppo.kl_penalty = "fool"
    with pytest.raises(UserError, match=r"sampling\.stop: "):
        config.sampling.stop = "x"
    with pytest.raises(UserError, match=r"lora: "):
        config.lora = 4
    config.ppo.learning_rate, config.output = 1, None  # a whole number will do for a float
    config.ppo.batch_size = config.ppo.mini_batch_size = 16  # checked together, when they are used
    config.check()
    config.ppo.mini_batch_size = 7
    with pytest.raises(
        UserError, match=r"ppo.batch_size: expected a multiple of mini_batch_size .* = 7, got 16"
    ):
        make_agents(config)
