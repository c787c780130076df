"""Makes the toy's headings (train.jsonl, test.jsonl) and a small language model that writes stories to them.

    python examples/story/make.py            # a minute or two on one core, into examples/story/out
    python examples/story/make.py FOLDER     # into another folder

The model, a GPT-2 of 0.2 M parameters, learns from stories of two paragraphs under a heading, in the prompt forms of
toy.yaml. Its paragraphs have one to four short sentences. A few begin with a transition word, and a second paragraph
may say anything, also what the first one has said.
"""

import itertools
import json
import random
import sys
from pathlib import Path

if __name__ == "__main__":
    # For a checkout that is not installed.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from cory.cli.main import main
from study.make import make_into
from study.small_models import save_half, train_gpt2, train_tokenizer

FOLDER = Path(__file__).resolve().parent
WHO = (
    "badger bear boy cat crow dog duck fox girl goat goose hare hen horse mouse owl pig rat".split()
)
WHERE = "attic barn cave cellar city desert field forest garden harbour kitchen market meadow mill".split()
WHAT = "apple bell book boat coin drum flute hat key kite lamp letter map mirror ring rope stone sword".split()
SENTENCES = [
    "the {who} went to the {where}.",
    "there was a {what} in the {where}.",
    "the {who} found a {what}.",
    "the {who} was happy.",
    "the {who} was tired.",
    "it was a cold day.",
    "it rained all night.",
    "the {who} looked for the {what}.",
    "the {who} took the {what} home.",
    "nobody saw the {who}.",
    "the {who} met a {other} near the {where}.",
    "the {other} wanted the {what}.",
    "the {other} gave the {what} back.",
    "they ate bread and slept.",
    "the door of the {where} was open.",
    "the {what} was old and heavy.",
]
TRANSITIONS = ["then", "but", "so", "later", "suddenly", "finally", "however", "meanwhile"]
WITH_TRANSITION = 0.1  # share of the sentences that begin with a transition word
ROWS = {"train": 1000, "test": 200}
TEXTS, STEPS = 20000, 1500
SIZE = {"width": 64, "layers": 2, "positions": 128}
TRAINING = {"learning_rate": 3e-3, "beta2": 0.98, "sinusoids": True, "initializer_range": 0.15}


def headings() -> list[dict[str, str]]:
    """Somebody, somewhere, with something: all of them, in random order."""
    rows = [
        {"who": who, "where": where, "what": what}
        for who, where, what in itertools.product(WHO, WHERE, WHAT)
    ]
    random.Random(0).shuffle(rows)
    return rows


def heading(row: dict[str, str]) -> str:
    """The prompt of a story."""
    return f"The {row['who']}, the {row['where']} and the {row['what']}"


def paragraph(rng: random.Random, row: dict[str, str]) -> str:
    """One to four sentences."""
    sentences = []
    for sentence in rng.sample(SENTENCES, rng.randint(1, 4)):
        words = sentence.format(**row, other=rng.choice(WHO))
        if rng.random() < WITH_TRANSITION:
            words = f"{rng.choice(TRANSITIONS)} {words}"
        sentences.append(words.capitalize())
    return " ".join(sentences)


def make(folder: Path, texts: int = TEXTS, steps: int = STEPS) -> None:
    """Fills `folder` with train.jsonl, test.jsonl and model/."""
    folder.mkdir(parents=True, exist_ok=True)
    made = headings()
    first = 0
    for split, count in ROWS.items():
        rows = made[first : first + count]
        (folder / f"{split}.jsonl").write_text(
            "".join(json.dumps({"prompt": heading(row)}) + "\n" for row in rows)
        )
        first += count
    rng = random.Random(0)
    corpus = []
    for _ in range(texts):
        row = rng.choice(made[: ROWS["train"]])
        corpus.append(f"{heading(row)}\n{paragraph(rng, row)}\n{paragraph(rng, row)}")
    tokenizer = train_tokenizer(corpus, vocab_size=512)
    model = train_gpt2(corpus, tokenizer, **SIZE, **TRAINING, steps=steps)
    save_half(model, tokenizer, folder / "model")


def command_line() -> None:
    """See the module."""
    make_into(FOLDER / "out", "story", ("model", "train.jsonl", "test.jsonl"), make, __doc__)


if __name__ == "__main__":
    main(command_line)
