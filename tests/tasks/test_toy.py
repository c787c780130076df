"""Generated texts of the toy tasks."""

import collections
import hashlib

from cory.models.load import load_tokenizer
from gsm8k_train import toy as gsm8k
from imdb_train import toy as imdb
from imdb_train.config import ImdbTaskConfig
from imdb_train.task import queries


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


def test_held_out_queries_of_the_toy_reviews_are_held_out():
    """Evaluations use 500 distinct queries of every length. No seed's training queries contain them."""
    tokenizer = load_tokenizer(str(imdb.POLICY), {})
    settings = ImdbTaskConfig(dataset="tiny", min_chars=0)
    train = [queries(settings, "train", tokenizer, seed)["prompt"] for seed in range(2)]
    test = queries(settings, "test", tokenizer, 0)["prompt"]
    assert len(train[0]) > 6000 and len(set(test[:500])) == 500
    assert not {*train[0], *train[1]} & set(test)
    for asked in (train[0], test[:500]):
        lengths = collections.Counter(len(ids) for ids in tokenizer(list(asked))["input_ids"])
        assert min(lengths[length] for length in range(2, 9)) >= 10
