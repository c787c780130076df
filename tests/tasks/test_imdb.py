"""The IMDB task, its scripts and its evaluation."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, figure_of

from cory.agent import make_agents
from cory.command import load, read_config
from cory.config import ModelConfig
from cory.errors import UserError
from cory.roles import fill
from cory.trainer import CoryTrainer
from imdb_train import evaluate, toy
from imdb_train.config import OBSERVER, ImdbConfig, ImdbTaskConfig
from imdb_train.task import held_out_rows, make_task, queries


def test_queries_are_the_first_tokens_of_each_review(reviews, tokenizer):
    config = ImdbTaskConfig(dataset=str(reviews), min_chars=0)
    texts = [json.loads(line)["text"] for line in (reviews / "train.jsonl").open()]
    prompts = queries(config, "train", tokenizer, 0)["prompt"]
    lengths = []
    for text, prompt in zip(texts, prompts, strict=True):
        assert text.startswith(prompt)
        ids = tokenizer(prompt)["input_ids"]
        lengths.append(len(ids))
        assert tokenizer(text)["input_ids"][: len(ids)] == ids
    assert set(lengths) == set(range(2, 9))
    again, other = (queries(config, "train", tokenizer, seed)["prompt"] for seed in (0, 1))
    assert prompts == again != other


def test_observer_prompt_is_the_papers():
    text = fill(OBSERVER, {"prompt": "The film", "response": " was dull"})
    assert text == 'I can make this sentence "The film was dull" more positive: The film'


def flags(policy_folder, classifier_folder, reviews):
    values = {
        "model.name": policy_folder, "task.reward_model": classifier_folder, "task.dataset": reviews, "iterations": 2,
        "ppo.batch_size": 8, "ppo.mini_batch_size": 8, "device": "cpu",
    }  # fmt: skip
    return [f"--{key}={value}" for key, value in values.items()]


def test_scripts_run_from_any_directory_without_an_install(
    policy_folder, classifier_folder, reviews, tmp_path, monkeypatch
):
    """A checkout is enough: the package is found beside the script's folder, not the script itself."""
    monkeypatch.chdir(tmp_path)
    argv = [*flags(policy_folder, classifier_folder, reviews), "--iterations=1"]
    command = [sys.executable, ROOT / "imdb_train/cory.py", *argv]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").glob("imdb_cory_tiny*")
    assert [p.name for p in sorted(folder.glob("agent_*"))] == ["agent_1", "agent_2"]
    assert f"runs/{folder.name}" in done.stdout and "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def runs(policy_folder, classifier_folder, reviews, tmp_path_factory):
    """A folder with a CORY run and a PPO run of two iterations."""
    folder = tmp_path_factory.mktemp("runs")
    common = flags(policy_folder, classifier_folder, reviews)
    for method in ("cory", "ppo"):
        argv = [f"--output={folder}/imdb_{method}_tiny", *common]
        tiny = ROOT / "configs/imdb/tiny.yaml"
        config = load(ImdbConfig, tiny, argv, single_agent=method == "ppo")
        CoryTrainer(config, make_agents(config), make_task(config)).train()
    return folder


def evaluated(monkeypatch, *argv) -> dict:
    """What an evaluation of runs writes."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *argv, "--device=cpu", "--output=out"])
    evaluate.run()
    return json.loads(Path("out/evaluation.json").read_text())


@pytest.mark.usefixtures("drawn_figures")
def test_evaluation_of_two_runs(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [f"{runs}/imdb_cory_tiny", f"{runs}/imdb_ppo_tiny"]
    result = evaluated(monkeypatch, *folders, "--queries=20")
    names = ["base", "imdb_cory_tiny/agent_1", "imdb_cory_tiny/agent_2", "imdb_ppo_tiny/agent_1"]
    names += ["base after itself", "imdb_cory_tiny/agent_2 after agent_1"]
    names += ["imdb_cory_tiny/agent_1 after agent_2", "imdb_ppo_tiny/agent_1 after itself"]
    assert [row["name"] for row in result["rows"]] == names
    for row in result["rows"]:
        combined = row["task_reward"] - 0.3 * row["chain_kl"]
        assert row["combined_reward"] == pytest.approx(combined, abs=1e-5)
        assert all(row[f"{metric}_ci"] >= 0 for metric in result["titles"])
    assert result["rows"][0]["kl"] == pytest.approx(0, abs=1e-5) and result["rows"][1]["kl"] > 0
    page = Path("out/report.html").read_text()
    assert all(name in figure_of(page) and f"<td>{name}</td>" in page for name in names)
    assert sorted(path.name for path in Path("out").iterdir()) == [
        ".lock", "evaluation.json", "report.html", "responses.jsonl", "settings.json"
    ]  # fmt: skip


@pytest.mark.parametrize("split", ["test", "train"])
def test_evaluation_reports_queries_that_were_trained_on(
    runs, reviews, tokenizer, tmp_path, monkeypatch, split
):
    """All, if it is of the training queries; of the split `test` those that reviews of both splits begin with."""
    settings = ImdbTaskConfig(dataset=str(reviews), min_chars=0)
    train, asked = (queries(settings, part, tokenizer, 0)["prompt"] for part in ("train", split))
    share = sum(query in train for query in asked) / len(asked)
    assert 0 < share < 1 or split == "train"
    monkeypatch.chdir(tmp_path)
    result = evaluated(monkeypatch, f"{runs}/imdb_ppo_tiny", f"--split={split}", "--queries=0")
    assert result["in_training"] == {"imdb_ppo_tiny": share}


def test_tiny_names_are_resolved_and_stay_symbolic(tmp_path):
    """What a run records is `tiny`, not a folder of this machine."""
    argv = ["--iterations=1", f"--output={tmp_path / 'run'}"]
    argv += ["--ppo.batch_size=4", "--ppo.mini_batch_size=4"]
    config, name = read_config(ImdbConfig, "configs/imdb/tiny.yaml", "imdb_cory", argv=argv)
    assert name.startswith("imdb_cory_tiny")
    assert Path(config.resolve("tiny")) == toy.POLICY
    assert config.resolve("some/model") == "some/model"
    CoryTrainer(config, make_agents(config), make_task(config)).train()
    text = (tmp_path / "run/config.yaml").read_text()
    recorded = yaml.safe_load(text)
    named = [recorded["model"]["name"], *map(recorded["task"].get, ("dataset", "reward_model"))]
    assert named == ["tiny"] * 3 and str(ROOT) not in text


def test_held_out_queries_are_not_those_of_training(reviews, policy_folder):
    config = ImdbConfig(eval_every=2, model=ModelConfig(str(policy_folder)))
    config.task = replace(config.task, dataset=str(reviews / "train.jsonl"), min_chars=0)
    with pytest.raises(UserError, match=r"^task\.dataset: "):
        held_out_rows(config)
    config.task = replace(config.task, dataset=str(reviews))
    assert len(held_out_rows(config)) > 0
