"""Makes the model of GSM8K's toy setting, which is shipped in `gsm8k_train/weights/`, and measures it.

    python -m toys.make_gsm8k_toy FOLDER     # makes the model in FOLDER: minutes on two cores
    python -m toys.make_gsm8k_toy            # prints the shipped model's quality

The model, a small GPT-2, is trained from scratch on generated problems and saved as an ordinary Hugging Face folder,
in half precision. Weights are shipped because a model trained on another machine may be better or worse.
"""

import random
import sys
from pathlib import Path

from cory.command import main
from cory.config import ModelConfig, SamplingConfig
from cory.models.load import load_policy
from cory.roles import fill
from cory.run.folder import new_folder
from gsm8k_train import toy
from gsm8k_train.config import PIONEER
from gsm8k_train.task import rule_reward
from toys.small_models import answered, save_half, train_gpt2, train_tokenizer

TEXTS = 24000  # solutions
DRILLS = 4000  # texts of ten calculations each
STEPS = 4200  # training steps


def make(folder: Path) -> None:
    """Fills `folder` with policy/."""
    rng = random.Random(0)
    drawn = [toy.problem(rng) for _ in range(TEXTS * 10 // 8)]
    train = [p for p in drawn if not p.held_out][:TEXTS]
    texts = [toy.lesson(rng, p) for p in train] + [toy.drill(rng) for _ in range(DRILLS)]
    tokenizer = train_tokenizer(texts, vocab_size=1024)
    policy = train_gpt2(
        texts,
        tokenizer,
        width=128,
        layers=3,
        positions=256,
        steps=STEPS,
        batch=8,
        learning_rate=3e-3,
        beta2=0.98,
        after="Answer:",
        sinusoids=True,
    )
    save_half(policy, tokenizer, folder / "policy")


def quality_of(folder: Path = toy.POLICY.parent) -> dict[str, float]:
    """Returns `accuracy`: the share of the 500 held-out problems that a sampled answer solves."""
    policy, tokenizer = load_policy(ModelConfig(str(folder / "policy")))
    problems = toy.problems("test")
    prompts = [fill(PIONEER, {"prompt": p["question"]}) for p in problems]
    settings = SamplingConfig(max_new_tokens=40, stop=["Question:"])
    answers = answered(policy, tokenizer, prompts, settings)
    return {
        "accuracy": sum(rule_reward(prompts, answers, [p["answer"] for p in problems]))
        / len(problems)
    }


def command_line() -> None:
    """Runs `python -m toys.make_gsm8k_toy`; see the module's docstring."""
    if len(sys.argv) == 2 and not sys.argv[1].startswith("-"):
        make(new_folder(sys.argv[1], "weights"))
        print(f"Done. To ship it, copy {sys.argv[1]} to gsm8k_train/weights")
    elif len(sys.argv) == 1:
        print("\n".join(f"{name}: {value:.3f}" for name, value in quality_of().items()))
    else:
        print(__doc__)


if __name__ == "__main__":
    main(command_line)
