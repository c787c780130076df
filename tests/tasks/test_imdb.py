"""The IMDB task, its scripts and its evaluation."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from datasets import Dataset

from cory.build import make_agents
from cory.command import load, read_config
from cory.config import ModelConfig
from cory.errors import UserError
from cory.roles import fill
from cory.run.folder import read_rows
from cory.trainer import CoryTrainer
from imdb_train import toy
from imdb_train.config import OBSERVER, ImdbConfig, ImdbTaskConfig
from imdb_train.task import held_out_rows, make_task, queries


def test_queries_are_the_first_tokens_of_each_review(reviews, tokenizer):
    config = ImdbTaskConfig(dataset=str(reviews), min_chars=0)
    texts = [row["text"] for row in read_rows(reviews / "train.jsonl")]
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


@pytest.fixture(scope="module")
def run(policy_folder, classifier_folder, reviews, tmp_path_factory) -> Path:
    """The folder of a PPO run of two iterations."""
    values = {
        "model.name": policy_folder, "task.reward_model": classifier_folder, "task.dataset": reviews, "iterations": 2,
        "ppo.batch_size": 8, "ppo.mini_batch_size": 8, "device": "cpu",
        "output": tmp_path_factory.mktemp("runs") / "ppo",
    }  # fmt: skip
    argv = [f"--{key}={value}" for key, value in values.items()]
    config = load(ImdbConfig, ROOT / "configs/imdb/tiny.yaml", argv, single_agent=True)
    return CoryTrainer(config, make_agents(config), make_task(config)).train().folder


def test_evaluation_reports_queries_that_were_trained_on(
    run, reviews, tokenizer, tmp_path, monkeypatch, command
):
    """Reviews of both splits may begin with the same words."""
    settings = ImdbTaskConfig(dataset=str(reviews), min_chars=0)
    train, asked = (queries(settings, part, tokenizer, 0)["prompt"] for part in ("train", "test"))
    share = sum(query in train for query in asked) / len(asked)
    assert 0 < share < 1
    monkeypatch.chdir(tmp_path)
    argv = ["--split=test", "--queries=0", "--device=cpu", "--output=out"]
    ended = command(ROOT / "imdb_train/evaluate.py", run, *argv)
    assert ended.status == 0, ended.error
    assert json.loads(Path("out/evaluation.json").read_text())["in_training"] == {"ppo": share}


def test_the_name_tiny_is_resolved_but_recorded_as_it_is(tmp_path):
    """A run records `tiny` and not a folder of this machine."""
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


def test_a_chat_response_is_scored_after_a_space_and_the_reward_records_that():
    """An evaluation scores all its runs with one reward function.

    It compares the runs' recorded fingerprints of the reward, and so can warn if only some used a chat template.
    """
    config = load(ImdbConfig, ROOT / "configs/imdb/tiny.yaml", [])
    continued = make_task(config, Dataset.from_dict({"prompt": ["A film"]}))
    config.model.chat_template = True
    turns = make_task(config, Dataset.from_dict({"prompt": ["A film"]}))
    assert turns.fingerprint_of_reward() != continued.fingerprint_of_reward()
    scores = [task.rewards[0].function(["A film"], ["is good"]) for task in (continued, turns)]
    assert scores[0] != scores[1] == continued.rewards[0].function(["A film "], ["is good"])


def test_held_out_queries_need_a_split_other_than_training(reviews, policy_folder):
    config = ImdbConfig(eval_every=2, model=ModelConfig(str(policy_folder)))
    config.task = replace(config.task, dataset=str(reviews / "train.jsonl"), min_chars=0)
    with pytest.raises(UserError, match=r"^task\.dataset: "):
        held_out_rows(config)
    config.task = replace(config.task, dataset=str(reviews))
    assert len(held_out_rows(config)) > 0
