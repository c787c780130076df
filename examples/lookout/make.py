"""Makes the lookout's data (train.jsonl, test.jsonl) and a small language model that knows its phrases.

    python examples/lookout/make.py            # half a minute on one core, into examples/lookout/out
    python examples/lookout/make.py FOLDER     # into another folder

The model, a GPT-2 of 0.1 M parameters, learns from generated calls of an unreliable crew, in both roles' prompt forms.
The lookout reports where land lies, rightly or wrongly, or guesses an order. The helmsman often steers by the report
and otherwise guesses.
"""

import json
import random
import sys
from pathlib import Path

import yaml

if __name__ == "__main__":
    # Makes the packages importable from a checkout that is not installed.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from rewards import ORDERS, WINDS, right_call

from cory.command import main
from cory.roles import fill
from toys.make import make_into
from toys.small_models import save_half, train_gpt2, train_tokenizer

FOLDER = Path(__file__).resolve().parent
SHIPS = "Albatross Anna Aurora Beagle Bounty Comet Diana Eagle Flora Gannet Heron Hope Iris Juno Kestrel Lark".split()
PLACES = "Bell Rock, Cape Fear, Gull Island, Hook Bay, Long Sand, Mill Point, Raven Head, Seal Reef".split(
    ", "
)
TRUE_REPORTS, FALSE_REPORTS = 0.4, 0.2  # shares of the lookout's calls; the rest are guessed orders
FOLLOWED = 0.7  # share of the reports by which a helmsman steers
TEXTS, STEPS = 12000, 600
SIZE = {"width": 64, "layers": 2, "positions": 64}
TRAINING = {"learning_rate": 2e-3, "beta2": 0.98, "sinusoids": True, "initializer_range": 0.15}


def rows(split: str) -> list[dict[str, str]]:
    """Returns a split's rows in random order: each voyage combined with every land and course.

    A quarter of the voyages are for tests.
    """
    voyages = [f"The {ship} sails in fog off {place}." for ship in SHIPS for place in PLACES]
    random.Random(0).shuffle(voyages)
    cut = len(voyages) * 3 // 4
    chosen = voyages[:cut] if split == "train" else voyages[cut:]
    made = [
        {"prompt": v, "land": land, "course": course}
        for v in chosen
        for land in WINDS
        for course in WINDS
    ]
    random.Random(0).shuffle(made)
    return made


def guess(rng: random.Random) -> str:
    """Returns a random order."""
    return f"Steer {rng.choice(ORDERS)}!"


def text(rng: random.Random, row: dict[str, str], templates: dict[str, str]) -> str:
    """Returns a prompt of either role, followed by the unreliable crew's answer."""
    kind = rng.choices(
        ["true", "false", "guess"], [TRUE_REPORTS, FALSE_REPORTS, 1 - TRUE_REPORTS - FALSE_REPORTS]
    )[0]
    reported = row["land"] if kind == "true" else rng.choice(WINDS)
    call = guess(rng) if kind == "guess" else f"Land {reported}!"
    if rng.random() < 0.5:
        return f"{fill(templates['pioneer_prompt'], row)} {call}"
    follows = kind != "guess" and rng.random() < FOLLOWED
    answer = right_call(reported, row["course"]) if follows else guess(rng)
    return f"{fill(templates['observer_prompt'], {**row, 'response': ' ' + call})} {answer}"


def make(folder: Path, texts: int = TEXTS, steps: int = STEPS) -> None:
    """Fills `folder` with train.jsonl, test.jsonl and model/."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows(split))
        )
    templates = yaml.safe_load((FOLDER / "lookout.yaml").read_text())["task"]
    rng, train = random.Random(0), rows("train")
    corpus = [text(rng, rng.choice(train), templates) for _ in range(texts)]
    tokenizer = train_tokenizer(corpus, vocab_size=512)
    model = train_gpt2(corpus, tokenizer, **SIZE, **TRAINING, steps=steps, after="calls:")
    save_half(model, tokenizer, folder / "model")


def command_line() -> None:
    """Runs the script; see the module's docstring."""
    make_into(FOLDER / "out", make, __doc__)


if __name__ == "__main__":
    main(command_line)
