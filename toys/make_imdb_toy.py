"""Makes the models of IMDB's toy setting, which are shipped in `imdb_train/weights/`, and measures them.

    python -m toys.make_imdb_toy FOLDER             # makes both models in FOLDER: a minute on two cores
    python -m toys.make_imdb_toy FOLDER --untaught  # a policy that has never seen the observer's prompt form
    python -m toys.make_imdb_toy tiny_large         # the larger policy, which is not shipped, in the cache
    python -m toys.make_imdb_toy                    # prints the shipped models' quality

The models, a small GPT-2 and a small DistilBERT, are trained from scratch on generated reviews and saved as ordinary
Hugging Face folders, in half precision. Weights are shipped because models trained on another machine may be better or
worse.
"""

import random
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from cory.command import main
from cory.config import ModelConfig, SamplingConfig
from cory.models.load import load_policy
from cory.rewards import Classifier
from cory.run.folder import new_folder
from imdb_train import toy
from toys.small_models import (
    answered,
    cached,
    save_half,
    train_distilbert,
    train_gpt2,
    train_tokenizer,
)

# Target probabilities of the classifier, by mood.
POSITIVE = {-2: 0.003, -1: 0.15, 0: 0.5, 1: 0.85, 2: 0.997}
DRAWN = (
    9000  # reviews drawn before the rewritings; models learn only from the first toy.TRAIN_REVIEWS
)
REWRITINGS = 9000  # examples in the observer's prompt form that the policy learns from


def make(folder: Path) -> None:
    """Fills `folder` with policy/ and reward_model/."""
    rng = random.Random(0)
    reviews, rewritings = _texts(rng)
    texts = [text for text, _ in reviews]
    tokenizer = train_tokenizer(texts + rewritings, vocab_size=1024)
    policy = train_gpt2(
        texts + rewritings, tokenizer, width=112, layers=3, positions=128, steps=320
    )
    save_half(policy, tokenizer, folder / "policy")
    # The reward model reads cut-off texts, so it learns on cut-off texts.
    windows, positive = [], []
    for text, mood in reviews:
        words = text.split(" ")
        windows.append(" ".join(words[: rng.randint(4, len(words))]))
        positive.append(POSITIVE[mood])
    classifier = train_distilbert(
        windows, positive, tokenizer, width=64, layers=2, positions=128, steps=250
    )
    save_half(classifier, tokenizer, folder / "reward_model")


def make_untaught(folder: Path) -> None:
    """Fills `folder` with a policy of the shipped size and tokenizer that learns only from reviews.

    The shipped policy also learns from rewritings, which puts an observer ahead of a pioneer before RL begins.
    """
    reviews, _ = _texts(random.Random(0))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(toy.POLICY)
    texts = [text for text, _ in reviews]
    policy = train_gpt2(texts, tokenizer, width=112, layers=3, positions=128, steps=320)
    save_half(policy, tokenizer, folder)


def make_large(folder: Path) -> None:
    """Fills `folder` with a policy of twice the parameters, with the same tokenizer and training texts."""
    reviews, rewritings = _texts(random.Random(0))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(toy.POLICY)
    texts = [text for text, _ in reviews] + rewritings
    policy = train_gpt2(texts, tokenizer, width=144, layers=4, positions=128, steps=320)
    save_half(policy, tokenizer, folder)


def large() -> Path:
    """Returns the cached folder of the larger policy, making the policy if it is missing."""
    return cached(toy.LARGE, make_large)


def _texts(rng: random.Random) -> tuple[list[tuple[str, int]], list[str]]:
    """Returns the training reviews with their moods, and the rewriting examples."""
    reviews = [toy.review(rng) for _ in range(DRAWN)]
    return reviews[: toy.TRAIN_REVIEWS], [toy.rewriting(rng) for _ in range(REWRITINGS)]


def quality_of(folder: Path = toy.SHIPPED) -> dict[str, float]:
    """Measures the models in a folder on 500 held-out reviews.

    Returns:
        `loss`: the policy's loss in nats per token; `reward`: the task reward of its continuations; `classifier_error`:
        the mean distance of the classifier's probability from its target.
    """
    rng = random.Random(1)
    policy, tokenizer = load_policy(ModelConfig(str(folder / "policy")))
    reward = Classifier(str(folder / "reward_model"), "POSITIVE", 100, policy.device)
    held_out = [toy.review(rng) for _ in range(500)]
    texts = [text for text, _ in held_out]
    starts = [" ".join(text.split(" ")[:4]) for text in texts]
    written = answered(policy, tokenizer, starts, SamplingConfig())
    with torch.no_grad():
        rows = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
        losses = [(policy(input_ids=row, labels=row).loss.item(), row.shape[1] - 1) for row in rows]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        logits = reward.model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits
    taught = torch.tensor([POSITIVE[mood] for _, mood in held_out])
    return {
        "loss": sum(loss * n for loss, n in losses) / sum(n for _, n in losses),
        "reward": sum(reward(starts, written)) / len(starts),
        "classifier_error": (logits.softmax(-1)[:, reward.index] - taught).abs().mean().item(),
    }


def command_line() -> None:
    """Runs `python -m toys.make_imdb_toy`; see the module's docstring."""
    if sys.argv[1:] == ["tiny_large"]:
        print(f"The larger policy: {large()}")
    elif len(sys.argv) == 3 and sys.argv[2] == "--untaught":
        make_untaught(new_folder(sys.argv[1], "untaught"))
        print(f"Done. Train it with --model.name {sys.argv[1]}")
    elif len(sys.argv) == 2 and not sys.argv[1].startswith("-"):
        make(new_folder(sys.argv[1], "weights"))
        print(f"Done. To ship it, copy {sys.argv[1]} to imdb_train/weights")
    elif len(sys.argv) == 1:
        print("\n".join(f"{name}: {value:.3f}" for name, value in quality_of().items()))
    else:
        print(__doc__)


if __name__ == "__main__":
    main(command_line)
