"""Makes the toy's sums (train.jsonl, test.jsonl) and a small language model that can do some of them.

    python examples/verifier/make.py            # a minute or two on one core, into examples/verifier/out
    python examples/verifier/make.py FOLDER     # into another folder

The model, a GPT-2 of 0.1 M parameters, learns from answers and verdicts in both prompt forms of toy.yaml. Its texts
have a habit and a weakness. Whoever answers mostly rounds down to a multiple of ten. Whoever judges an answer is often
wrong.
"""

import json
import random
import sys
from pathlib import Path

import yaml

if __name__ == "__main__":
    # For a checkout that is not installed.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from cory.cli.main import main
from cory.prompts import fill
from study.make import make_into
from study.small_models import save_half, train_gpt2, train_tokenizer

FOLDER = Path(__file__).resolve().parent
ROWS = {"train": 2000, "test": 300}

ROUNDS = 0.6  # share of the answers that are rounded down to a multiple of ten
JUDGES = 0.8  # share of the verdicts that are right
TEXTS, STEPS = 40000, 2500
SIZE = {"width": 64, "layers": 2, "positions": 40}
TRAINING = {"learning_rate": 3e-3, "beta2": 0.98, "sinusoids": True, "initializer_range": 0.15}


def sums() -> list[tuple[int, int]]:
    """All sums of two numbers of two digits, the smaller one first, in random order."""
    pairs = [(first, second) for first in range(10, 100) for second in range(first, 100)]
    random.Random(0).shuffle(pairs)
    return pairs


def rows(split: str) -> list[dict[str, str]]:
    """The dataset's rows: `prompt` and `answer`. No sum is in both splits."""
    first = 0 if split == "train" else ROWS["train"]
    return [
        {"prompt": f"{a} + {b}", "answer": str(a + b)}
        for a, b in sums()[first : first + ROWS[split]]
    ]


def attempt(rng: random.Random, first: int, second: int) -> int:
    """What one answers who often rounds."""
    total = first + second
    return total - total % 10 if rng.random() < ROUNDS else total


def text(rng: random.Random, templates: dict[str, str], pairs: list[tuple[int, int]]) -> str:
    """A prompt of either role with what is written there."""
    first, second = rng.choice(pairs)
    answer = attempt(rng, first, second)
    row = {"prompt": f"{first} + {second}"}
    if rng.random() < 0.5:
        return f"{fill(templates['pioneer_prompt'], row)} {answer}"
    is_right = answer == first + second
    verdict = is_right if rng.random() < JUDGES else not is_right
    prompt = fill(templates["observer_prompt"], {**row, "response": f" {answer}"})
    return f"{prompt} {'yes' if verdict else 'no'}"


def make(folder: Path, texts: int = TEXTS, steps: int = STEPS) -> None:
    """Fills `folder` with train.jsonl, test.jsonl and model/."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ROWS:
        (folder / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows(split))
        )
    templates = yaml.safe_load((FOLDER / "toy.yaml").read_text())["task"]
    pairs = sums()[: ROWS["train"]] + sums()[sum(ROWS.values()) :]
    rng = random.Random(0)
    corpus = [text(rng, templates, pairs) for _ in range(texts)]
    # Without digits in what it learns from, the tokenizer keeps each digit a token.
    words = ["".join(letter for letter in row if not letter.isdigit()) for row in corpus]
    tokenizer = train_tokenizer(words, vocab_size=300)
    # Both roles' prompts end with a colon, and no answer or verdict has one.
    model = train_gpt2(corpus, tokenizer, **SIZE, **TRAINING, steps=steps, after=":")
    save_half(model, tokenizer, folder / "model")


def command_line() -> None:
    """See the module."""
    make_into(FOLDER / "out", "verifier", ("model", "train.jsonl", "test.jsonl"), make, __doc__)


if __name__ == "__main__":
    main(command_line)
