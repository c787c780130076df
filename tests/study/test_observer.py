"""What the pioneer's response is worth to an observer: by a run's rewards, and by the toy setting's texts."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_gpt2
from peft import PeftModel

from cory.agent import make_agents
from cory.config import CoryConfig, LoraConfig, ModelConfig, PPOConfig, SamplingConfig, UserError
from cory.trainer import CoryTrainer
from gsm8k_train import observer as gsm8k_observer
from imdb_train import observer as imdb_observer
from imdb_train.config import ImdbConfig, ImdbTaskConfig
from imdb_train.task import make_task
from study import coupling as module
from study.coupling import correlations, coupling
from study.observer import ALONE


def test_a_correlation_through_the_response_is_within_queries():
    rng = np.random.default_rng(0)
    query = rng.normal(size=(200, 1))  # both rewards rise and fall with the query
    pioneer, noise = query + rng.normal(size=(200, 8)), rng.normal(size=(200, 8))
    apart = correlations(pioneer, query + noise)
    assert apart["all"][1] > 0.3 and apart["response"][1] < 0 < apart["response"][2]
    reads = correlations(pioneer, query + pioneer + 0.1 * noise)
    assert reads["response"][1] > 0.98
    assert all(math.isnan(x) for x in correlations(np.ones((5, 2)), pioneer[:5, :2])["response"])


@pytest.fixture
def chat_folder(tokenizer, tmp_path) -> Path:
    """A random GPT-2 whose tokenizer has a chat template."""
    folder = tmp_path / "chat"
    make_gpt2(tokenizer, n_positions=256).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<{{ m['content'] }}>{% endfor %}")
    return folder


def trained(run, model, classifier_folder, reviews, rank=0, agents=2):
    config = ImdbConfig(
        iterations=2, output=str(run), device="cpu", model=model, lora=LoraConfig(rank=rank),
        cory=CoryConfig(num_agents=agents), ppo=PPOConfig(learning_rate=1e-3, batch_size=8, mini_batch_size=8),
        sampling=SamplingConfig(3, 6),
        task=ImdbTaskConfig(dataset=str(reviews), min_chars=0, reward_model=str(classifier_folder)),
    )  # fmt: skip
    CoryTrainer(config, make_agents(config), make_task(config, torch.device("cpu"))).train()


@pytest.mark.parametrize("rank", [0, 4])
def test_agents_are_loaded_as_their_run_had_them(
    rank, chat_folder, classifier_folder, reviews, tmp_path, monkeypatch, capsys
):
    run, said = tmp_path / "run", []
    trained(run, ModelConfig(str(chat_folder), chat_template=True), classifier_folder, reviews, rank)

    def respond(model, base, tokenizer, prompts, *rest, **options):
        said.append((isinstance(model, PeftModel), base is None, options["chat_template"], prompts))
        return original(model, base, tokenizer, prompts, *rest, **options)

    original = module.respond
    monkeypatch.setattr(module, "respond", respond)
    found = coupling(run, ImdbConfig, make_task, 6, 4)
    assert set(found) == {"all", "response"} and all(-1 <= value <= 1 for value, _, _ in found.values())
    assert [row[:3] for row in said] == [(rank > 0, rank > 0, True)] * 2
    pioneer, observer = (row[3] for row in said)
    assert len(pioneer) == len(observer) == 24 and len(set(pioneer)) <= 6
    for query, text in zip(pioneer, observer, strict=True):
        assert text.startswith(f'I can make this sentence "{query}') and text.endswith(f"more positive: {query}")
    capsys.readouterr()
    imdb_observer.command_line([str(run)])
    out = capsys.readouterr().out
    assert out.startswith(f"{run}: correlation of the agents' rewards ") and "through the pioneer's response" in out


def test_a_run_of_one_agent_has_no_correlation(policy_folder, classifier_folder, reviews, tmp_path):
    trained(tmp_path / "run", ModelConfig(str(policy_folder)), classifier_folder, reviews, agents=1)
    with pytest.raises(UserError, match="expected a run with two saved agents, got 1"):
        imdb_observer.command_line([str(tmp_path / "run")])


def test_an_observer_does_better_after_a_better_response():
    """Knowledge transfer is real in the toy setting before any training."""
    imdb, gsm8k = imdb_observer.worth(queries=100), gsm8k_observer.worth(queries=100)
    assert list(imdb) == [ALONE, "negative", "neutral", "positive"] and list(gsm8k) == [ALONE, "wrong", "right"]
    assert imdb["positive"][0] - imdb["negative"][0] > 1.0
    assert imdb["positive"][0] - imdb["positive"][1] > imdb["negative"][0] + imdb["negative"][1]
    assert gsm8k["right"][0] - gsm8k["wrong"][0] > 0.1


def test_a_saved_agent_is_measured_in_place_of_the_toy_policy(tokenizer, tmp_path, capsys):
    folder = tmp_path / "agent"
    make_gpt2(tokenizer, n_positions=1024).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    found = gsm8k_observer.worth(str(folder), queries=4)
    assert all(mean == 0 for mean, _ in found.values())  # random weights solve nothing
    with pytest.raises(UserError, match=r"model.name: expected a Hub id or an existing local folder"):
        gsm8k_observer.command_line([str(tmp_path / "none")])
