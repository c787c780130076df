"""Makes two small models, each with its own tokenizer, and data: bills that the models pay together.

    python examples/two_models/make.py            # half a minute on one core, into examples/two_models/out
    python examples/two_models/make.py FOLDER     # into another folder

The models learn from texts in which the parts paid by Ann and Bob often miss the total.
"""

import json
import random
import sys
from pathlib import Path

if __name__ == "__main__":
    # Makes the packages importable from a checkout that is not installed.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from team import COINS

from cory.command import main
from toys.make import make_into
from toys.small_models import save_half, train_gpt2, train_tokenizer

FOLDER = Path(__file__).resolve().parent
NAMES = "Ada Ben Cleo Dan Eve Finn Gus Hana Ida Jon Kim Leo Mia Ned Ola Pia".split()


def make(folder: Path) -> None:
    """Fills `folder` with train.jsonl, test.jsonl, small/ and large/."""
    rng = random.Random(0)
    bills = [{"prompt": f"{n} owes {t} coins.", "total": t} for n in NAMES for t in range(2, 9)]
    rng.shuffle(bills)
    for split, rows in (("train", bills[28:]), ("test", bills[:28])):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)

    # In these texts, Ann pays any part of a bill, and Bob pays exactly the rest about a third of the time.
    texts = []
    for _ in range(6000):
        bill = rng.choice(bills)
        ann = rng.randrange(1, bill["total"])
        bob = bill["total"] - ann if rng.random() < 1 / 3 else rng.randint(1, 7)
        texts.append(f"{bill['prompt']} Ann pays {COINS[ann - 1]}. Bob pays {COINS[bob - 1]}.")
    for name, vocabulary, width, layers in (("small", 320, 48, 2), ("large", 400, 96, 3)):
        tokenizer = train_tokenizer(texts, vocabulary)
        model = train_gpt2(texts, tokenizer, width=width, layers=layers, positions=48, steps=300)
        save_half(model, tokenizer, folder / name)


if __name__ == "__main__":
    main(lambda: make_into(FOLDER / "out", make, __doc__))
