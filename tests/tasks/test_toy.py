"""The toy setting's shipped models: small, good, and what their script makes."""

import collections
import hashlib

import pytest
import torch
from conftest import ROOT

from cory.config import ModelConfig, SamplingConfig
from cory.evaluation.answer import Answerer
from cory.metrics import mean_interval
from cory.models.load import load_policy, load_tokenizer
from cory.rewards import Classifier
from gsm8k_train import make_weights as gsm8k_weights
from gsm8k_train import toy as gsm8k
from imdb_train import make_weights as imdb_weights
from imdb_train import toy as imdb
from imdb_train.config import ImdbTaskConfig
from imdb_train.task import queries

# By machine and number of threads a training comes out within these distances of what is shipped.
WITHIN = {"loss": 0.05, "reward": 0.5, "classifier_error": 0.02, "accuracy": 0.1}


def test_shipped_models_are_small_and_good():
    files = [*ROOT.glob("*_train/weights/*/*.safetensors")]
    assert len(files) == 3 and sum(file.stat().st_size for file in files) < 4e6
    policy, tokenizer = load_policy(ModelConfig(name=str(imdb.POLICY)))
    assert 0.4e6 < policy.num_parameters() < 1.1e6 and policy.dtype == torch.float32
    reward = Classifier(str(imdb.REWARD_MODEL), "POSITIVE")
    texts = [
        "the acting was truly wonderful and I loved every minute.",
        "the acting was truly awful and I hated every minute.",
    ]
    good, bad = reward(prompts=texts, completions=["", ""])
    assert good > 1.5 and bad < -1.5
    answers = Answerer(policy, policy, tokenizer).respond(["the plot was"] * 50, SamplingConfig())
    mean, _ = mean_interval(reward(prompts=["the plot was"] * 50, completions=answers.completions))
    assert abs(mean) < 1.0  # no mood is preferred before training


def test_shipped_models_are_as_good_as_is_said():
    """The numbers that every toy run starts from; docs/experiments.md has them."""
    measured = imdb_weights.measure() | gsm8k_weights.measure()
    expected = {"loss": 1.14, "reward": -0.23, "classifier_error": 0.02, "accuracy": 0.378}
    assert measured == pytest.approx(expected, abs=0.02)


@pytest.mark.slow
def test_the_scripts_make_models_as_good_as_the_shipped_ones(tmp_path):
    for scripts, name in ((imdb_weights, "imdb"), (gsm8k_weights, "gsm8k")):
        scripts.make(tmp_path / name)
        shipped, made = scripts.measure(), scripts.measure(tmp_path / name)
        for metric, value in shipped.items():
            assert made[metric] == pytest.approx(value, abs=WITHIN[metric]), metric


def test_generated_texts_are_the_same_everywhere():
    def digest(generate):
        return hashlib.sha256(
            repr([generate(split) for split in ("train", "test")]).encode()
        ).hexdigest()[:16]

    assert [len(imdb.reviews(split)) for split in ("train", "test")] == [8000, 8000]
    assert [len(gsm8k.problems(split)) for split in ("train", "test")] == [6000, 500]
    assert (digest(imdb.reviews), digest(gsm8k.problems)) == (
        "0f1a1d2de26e9321",
        "0eec83b5817c325f",
    )


@pytest.mark.parametrize("seed", range(3))
def test_held_out_queries_of_the_toy_reviews_are_held_out(seed):
    """As the runs have them: 500 distinct ones, of every length, none among those of training."""
    tokenizer = load_tokenizer(str(imdb.POLICY), {})
    settings = ImdbTaskConfig(dataset="tiny", min_chars=0)
    train = queries(settings, "train", tokenizer, seed)["prompt"]
    test = queries(settings, "test", tokenizer, seed)["prompt"][:500]
    assert len(train) > 6000 and len(set(test)) == len(test) == 500
    assert not set(train) & set(test)
    for asked in (train, test):
        lengths = collections.Counter(len(ids) for ids in tokenizer(list(asked))["input_ids"])
        assert set(range(2, 9)) <= set(lengths)
        assert min(lengths[length] for length in range(2, 9)) >= 10


def test_a_query_is_of_the_same_split_whatever_it_was_drawn_with():
    """An evaluation cuts reviews at other places than a run of another seed; their queries still do not meet."""
    tokenizer = load_tokenizer(str(imdb.POLICY), {})
    settings = ImdbTaskConfig(dataset="tiny", min_chars=0)
    train = {
        query
        for seed in range(3)
        for query in queries(settings, "train", tokenizer, seed)["prompt"]
    }
    assert not train & set(queries(settings, "test", tokenizer, 3)["prompt"])


def test_held_out_problems_are_held_out():
    train, test = (
        [problem["question"] for problem in gsm8k.problems(split)] for split in ("train", "test")
    )
    assert len(set(test)) == 500 and not set(train) & set(test)


def test_a_cache_is_atomic(tmp_path):
    from study.small_models import cached

    built = []

    def build(folder):
        built.append(folder)
        (folder / "config.json").write_text("{}")

    def fail(folder):
        build(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path / "cache/it", fail)
    assert list((tmp_path / "cache").rglob("*")) == [tmp_path / "cache/it"]  # empty
    first = cached(tmp_path / "cache/it", build)
    assert (first / "config.json").exists() and cached(tmp_path / "cache/it", fail) == first
    assert len(built) == 2
