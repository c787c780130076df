"""Makes the data of this example (train.jsonl, test.jsonl, fresh.jsonl) and a small language model, the toy.

A row is a flat's listing with a question. questions.jsonl has each listing of train.jsonl with all four questions.

    python examples/notes/make.py            # a minute on one core, into examples/notes/out
    python examples/notes/make.py FOLDER     # into another folder

The model, a GPT-2 of 0.1 M parameters, learns from the notes and answers of an unreliable pair, in both prompt forms of
toy.yaml. A note gives some facts in any order, some of them wrong, or only a remark such as "The kitchen is new." An
answer often follows the note; otherwise it is a guess.
"""

import itertools
import json
import random
import sys
from pathlib import Path

import yaml

if __name__ == "__main__":
    # Makes the packages importable from a checkout that is not installed.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from cory.command import main
from cory.roles import fill
from toys.make import make_into
from toys.small_models import save_half, train_gpt2, train_tokenizer

FOLDER = Path(__file__).resolve().parent
TREES = (
    "Ash Birch Cedar Elm Hazel Holly Juniper Larch Linden Maple Oak Pine Poplar Rowan Spruce Willow"
)
FACTS = {
    "street": [f"{tree} Street" for tree in TREES.split()],
    "rooms": [str(number) for number in range(2, 7)],
    "rent": [str(euros) for euros in range(500, 1500, 50)],
    "pets": ["cats", "dogs", "birds", "none"],
}
SENTENCES = {
    "street": ["It lies in {street}.", "You will find it in {street}.", "The address is {street}."],
    "rooms": ["It has {rooms} rooms.", "There are {rooms} rooms.", "You get {rooms} rooms."],
    "rent": [
        "The rent is {rent} euros.",
        "It costs {rent} euros a month.",
        "We ask {rent} euros a month.",
    ],
    "pets": ["Pets: {pets}.", "Allowed pets: {pets}.", "As to pets, {pets} may move in."],
}
ASIDES = [
    "The kitchen is new.",
    "The view is lovely.",
    "The balcony is sunny.",
    "The tram stops nearby.",
    "The house is quiet.",
    "The cellar is dry.",
]
QUESTIONS = {
    "street": "Which street?",
    "rooms": "How many rooms?",
    "rent": "What is the rent?",
    "pets": "Which pets are allowed?",
}
IN_A_NOTE = {"street": "{street}", "rooms": "{rooms} rooms", "rent": "{rent}", "pets": "{pets}"}
ROWS = {"train": 2000, "test": 200, "fresh": 1000}
LEAD = 8  # words of a listing; they take 12 tokens of SmolLM2 on average, like a short note

# The toy's unreliable pair.
ABOUT_FACTS = 0.7  # share of the notes that hold facts; the rest are remarks (ASIDES)
TRUE = 0.7  # share of a note's facts that are right
FOLLOWED = 0.7  # if a note holds the fact asked for: share of the answers that follow the note
TEXTS, STEPS = 12000, 900
SIZE = {"width": 64, "layers": 2, "positions": 80}
TRAINING = {"learning_rate": 2e-3, "beta2": 0.98, "sinusoids": True, "initializer_range": 0.15}


def any_flat(rng: random.Random) -> dict[str, str]:
    """Draws a value of each fact."""
    return {fact: rng.choice(values) for fact, values in FACTS.items()}


def listing(rng: random.Random, flat: dict[str, str]) -> str:
    """Writes a flat's facts and a remark, in random order."""
    sentences = [rng.choice(SENTENCES[fact]).format(**flat) for fact in FACTS] + [
        rng.choice(ASIDES)
    ]
    rng.shuffle(sentences)
    return " ".join(sentences)


def flats(rng: random.Random) -> list[dict[str, str]]:
    """Draws flats that differ in at least one fact, each with its listing and the fact asked for."""
    made: dict[tuple[str, ...], dict[str, str]] = {}
    while len(made) < sum(ROWS.values()):
        flat = any_flat(rng)
        if tuple(flat.values()) in made:
            continue
        asked = rng.choice(list(FACTS))
        text = listing(rng, flat)
        made[tuple(flat.values())] = flat | {"listing": text, "asked": asked}
    return list(made.values())


def flats_of(split: str) -> list[dict[str, str]]:
    """Returns the flats of a split. No flat is in two splits."""
    made = iter(flats(random.Random(0)))
    return {name: list(itertools.islice(made, size)) for name, size in ROWS.items()}[split]


def row(flat: dict[str, str], asked: str) -> dict[str, str]:
    """Returns a row with the question about one fact: `listing`, its first words as `lead`, `question`, `answer`."""
    return {
        "listing": flat["listing"],
        "lead": " ".join(flat["listing"].split()[:LEAD]),
        "question": QUESTIONS[asked],
        "answer": flat[asked],
    }


def rows(split: str) -> list[dict[str, str]]:
    """Returns a row for each flat of a split, with the question about one fact."""
    return [row(flat, flat["asked"]) for flat in flats_of(split)]


def questions() -> list[dict[str, str]]:
    """Returns four consecutive rows for each training flat, one per fact."""
    return [row(flat, fact) for flat in flats_of("train") for fact in FACTS]


def text(rng: random.Random, templates: dict[str, str]) -> str:
    """Returns a prompt of either role, followed by the unreliable pair's response."""
    flat = any_flat(rng)
    noted: dict[str, str] = {}
    if rng.random() < ABOUT_FACTS:
        for fact in rng.sample(list(FACTS), rng.randint(1, len(FACTS))):
            noted[fact] = flat[fact] if rng.random() < TRUE else rng.choice(FACTS[fact])
    note = (
        ", ".join(IN_A_NOTE[fact].format(**noted) for fact in noted)
        if noted
        else rng.choice(ASIDES)
    )
    if rng.random() < 0.5:
        return f"{fill(templates['note_taker'], {'prompt': listing(rng, flat)})} {note}"
    asked = rng.choice(list(FACTS))
    follows = asked in noted and rng.random() < FOLLOWED
    answer = noted[asked] if follows else rng.choice(FACTS[asked])
    return f"{fill(templates['answerer'], {'note_taker': ' ' + note, 'question': QUESTIONS[asked]})} {answer}"


def make(folder: Path, texts: int = TEXTS, steps: int = STEPS) -> None:
    """Fills `folder` with train.jsonl, test.jsonl, fresh.jsonl, questions.jsonl and model/."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in [*((split, rows(split)) for split in ROWS), ("questions", questions())]:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    roles = yaml.safe_load((FOLDER / "toy.yaml").read_text())["roles"]
    templates = {role["name"]: role["prompt"] for role in roles}
    rng = random.Random(0)
    corpus = [text(rng, templates) for _ in range(texts)]
    tokenizer = train_tokenizer(corpus, vocab_size=512)
    # Both roles' prompts end with a colon; notes and answers contain none.
    model = train_gpt2(corpus, tokenizer, **SIZE, **TRAINING, steps=steps, after=":")
    save_half(model, tokenizer, folder / "model")


def command_line() -> None:
    """Runs the script; see the module's docstring."""
    make_into(FOLDER / "out", make, __doc__)


if __name__ == "__main__":
    main(command_line)
