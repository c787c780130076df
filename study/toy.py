"""Makes the models of the toy settings, which are shipped with the tasks, and measures them.

    python -m study.toy FOLDER          # makes all of them in FOLDER: minutes on two cores
    python -m study.toy tiny_large      # makes IMDB's larger policy, which is not shipped, in the cache
    python -m study.toy --measure       # the quality of what is shipped

Real architectures, trained from scratch on the tasks' generated texts and saved as ordinary Hugging Face folders, in half
precision. How good a training comes out depends on the machine, so everybody is given the same weights.
"""

import random
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from cory.config import ModelConfig, SamplingConfig
from cory.evaluation import respond
from cory.policies.load import load_policy
from cory.prompts import fill
from cory.run.command_line import main
from gsm8k_train import toy as gsm8k
from gsm8k_train.config import PIONEER
from gsm8k_train.task import rule_reward
from imdb_train import toy as imdb
from imdb_train.task import PositiveLogit
from study import small_models

POSITIVE = {-2: 0.003, -1: 0.15, 0: 0.5, 1: 0.85, 2: 0.997}  # what IMDB's classifier is taught, by mood
REWRITINGS = 9000  # examples in the observer's prompt form that IMDB's policy learns from
TEXTS, DRILLS, STEPS = 24000, 4000, 4200  # GSM8K: solutions, texts of ten calculations each, steps of training


def make_imdb(folder: Path) -> None:
    """Fills `folder` with policy/ and reward_model/."""
    rng = random.Random(0)
    reviews, rewritings = _imdb_texts(rng)
    texts = [text for text, _ in reviews]
    tokenizer = small_models.train_tokenizer(texts + rewritings, vocab_size=1024)
    settings = {"width": 112, "layers": 3, "positions": 128, "steps": 320}
    _save(small_models.train_gpt2(texts + rewritings, tokenizer, **settings), tokenizer, folder / "policy")
    windows, positive = [], []  # the reward model reads cut-off texts, so it learns on cut-off texts
    for text, mood in reviews:
        words = text.split(" ")
        windows.append(" ".join(words[: rng.randint(4, len(words))]))
        positive.append(POSITIVE[mood])
    settings = {"width": 64, "layers": 2, "positions": 128, "steps": 250}
    classifier = small_models.train_distilbert(windows, positive, tokenizer, **settings)
    _save(classifier, tokenizer, folder / "reward_model")


def make_imdb_large(folder: Path) -> None:
    """Fills `folder` with a policy of twice the parameters, of the same tokenizer and texts."""
    reviews, rewritings = _imdb_texts(random.Random(0))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(imdb.POLICY)
    texts = [text for text, _ in reviews] + rewritings
    settings = {"width": 144, "layers": 4, "positions": 128, "steps": 320}
    _save(small_models.train_gpt2(texts, tokenizer, **settings), tokenizer, folder)


def make_gsm8k(folder: Path) -> None:
    """Fills `folder` with policy/."""
    rng = random.Random(0)
    drawn = [gsm8k.problem(rng) for _ in range(TEXTS * 10 // 8)]
    train = [p for p in drawn if not p.held_out][:TEXTS]
    texts = [gsm8k.lesson(rng, p) for p in train] + [gsm8k.drill(rng) for _ in range(DRILLS)]
    tokenizer = small_models.train_tokenizer(texts, vocab_size=1024)
    policy = small_models.train_gpt2(
        texts,
        tokenizer,
        width=128,
        layers=3,
        positions=256,
        steps=STEPS,
        batch=8,
        learning_rate=3e-3,
        after="Answer:",
        sinusoids=True,
        beta2=0.98,
    )
    _save(policy, tokenizer, folder / "policy")


def _imdb_texts(rng: random.Random) -> tuple[list[tuple[str, int]], list[str]]:
    """The training reviews with their moods, and the rewriting examples."""
    reviews = [imdb.review(rng) for _ in range(imdb.ALL_REVIEWS)]
    return reviews[: imdb.TRAIN_REVIEWS], [imdb.rewriting(rng) for _ in range(REWRITINGS)]


def _save(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure(folder_imdb: Path = imdb.SHIPPED, folder_gsm8k: Path = gsm8k.POLICY.parent) -> dict[str, float]:
    """The quality of the models in two folders, by numbers that training a toy run starts from.

    Returns:
        `imdb_loss`: nats a token of the policy on held-out reviews; `imdb_reward`: task reward of what it writes;
        `classifier_error`: mean distance of the classifier's probability from what it was taught, on held-out reviews;
        `gsm8k_accuracy`: share of 500 held-out problems that a sampled answer solves.
    """
    rng = random.Random(1)
    policy, tokenizer = load_policy(ModelConfig(str(folder_imdb / "policy")))
    reward = PositiveLogit(str(folder_imdb / "reward_model"), 100, policy.device)
    held_out = [imdb.review(rng) for _ in range(500)]
    texts = [text for text, _ in held_out]
    starts = [" ".join(text.split(" ")[:4]) for text in texts]
    written = respond(policy, policy, tokenizer, starts, SamplingConfig()).completions
    with torch.no_grad():
        rows = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
        losses = [(policy(input_ids=row, labels=row).loss.item(), row.shape[1] - 1) for row in rows]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        logits = reward.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    given = logits.softmax(-1)[:, reward.index]
    taught = torch.tensor([POSITIVE[mood] for _, mood in held_out])
    solver, words = load_policy(ModelConfig(str(folder_gsm8k / "policy")))
    problems = gsm8k.problems("test")
    prompts = [fill(PIONEER, {"prompt": p["question"]}) for p in problems]
    answers = respond(solver, solver, words, prompts, SamplingConfig(max_new_tokens=40, stop=["Question:"])).completions
    return {
        "imdb_loss": sum(loss * n for loss, n in losses) / sum(n for _, n in losses),
        "imdb_reward": sum(reward(starts, written)) / len(starts),
        "classifier_error": (given - taught).abs().mean().item(),
        "gsm8k_accuracy": sum(rule_reward(prompts, answers, [p["answer"] for p in problems])) / len(problems),
    }


def large() -> Path:
    """The folder of IMDB's larger policy in the cache, made where it is missing."""
    return small_models.cached(imdb.LARGE, make_imdb_large)


def command_line() -> None:
    """`python -m study.toy`: see the module."""
    if "--measure" in sys.argv:
        print("\n".join(f"{name}: {value:.3f}" for name, value in measure().items()))
    elif sys.argv[1:] == ["tiny_large"]:
        print(f"IMDB's larger policy: {large()}")
    elif len(sys.argv) == 2 and not sys.argv[1].startswith("-"):
        for name, make in (("imdb_train", make_imdb), ("gsm8k_train", make_gsm8k)):
            make(Path(sys.argv[1]) / name)
        print(
            f"To ship them: copy {sys.argv[1]}/imdb_train to imdb_train/weights, {sys.argv[1]}/gsm8k_train to gsm8k_train/weights"
        )
    else:
        print(__doc__)


if __name__ == "__main__":
    main(command_line)
