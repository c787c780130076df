"""Makes the lookout's data in changing weather, which sets how much a helmsman gains from reading the lookout's call.

    python examples/lookout/weather.py            # half a minute on one core, into examples/lookout/out/weather
    python examples/lookout/weather.py FOLDER     # into another folder

In fog, as in `make.py`, only the lookout sees the land and only the helmsman knows the course. In clear weather each
of them sees both, and can find the right order alone. FOLDER/fog_0, fog_25, ... fog_100 hold queries with 0, 25, ...
100 % of the voyages in fog. FOLDER/model is one small language model for all these folders. In its training texts, the
crew knows the right order half of the time in clear weather, and otherwise guesses.
"""

import json
import random
import sys
from pathlib import Path

import yaml

if __name__ == "__main__":
    # Makes the packages importable from a checkout that is not installed.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from make import FALSE_REPORTS, FOLDER, FOLLOWED, SIZE, STEPS, TEXTS, TRAINING, TRUE_REPORTS, guess
from make import rows as foggy_rows
from rewards import WINDS, right_call

from cory.command import main
from cory.roles import fill
from toys.make import make_into
from toys.small_models import save_half, train_gpt2, train_tokenizer

FOG = (0, 25, 50, 75, 100)  # percent of the queries
RIGHT = 0.5  # share of orders in clear weather that the crew knows; the rest are guesses


def rows(split: str, fog: float, seed: int = 0) -> list[dict[str, str]]:
    """Returns the voyages of `make.py`, a share `fog` of them in fog.

    The columns `sees` and `knows` describe what the lookout sees and what the helmsman knows.
    """
    rng, made = random.Random(seed), []
    for row in foggy_rows(split):
        land, course = row["land"], row["course"]
        if rng.random() < fog:
            made.append(row | {"sees": f"sees land in the {land}", "knows": f"heads {course}"})
        else:
            voyage = row["prompt"].replace("in fog", "in clear weather")
            sees = f"sees land in the {land} and the ship head {course}"
            made.append(
                row
                | {
                    "prompt": voyage,
                    "sees": sees,
                    "knows": f"heads {course}, sees land in the {land}",
                }
            )
    return made


def text(rng: random.Random, row: dict[str, str], templates: dict[str, str]) -> str:
    """Returns a prompt of either role, followed by the unreliable crew's answer."""
    right = right_call(row["land"], row["course"])
    clear = "clear" in row["prompt"]
    kind = rng.choices(
        ["true", "false", "guess"], [TRUE_REPORTS, FALSE_REPORTS, 1 - TRUE_REPORTS - FALSE_REPORTS]
    )[0]
    reported = row["land"] if kind == "true" else rng.choice(WINDS)
    order = right if clear and rng.random() < RIGHT else guess(rng)
    call = order if clear or kind == "guess" else f"Land {reported}!"
    if rng.random() < 0.5:
        return f"{fill(templates['pioneer_prompt'], row)} {call}"
    follows = not clear and kind != "guess" and rng.random() < FOLLOWED
    answer = (
        right_call(reported, row["course"])
        if follows
        else right
        if clear and rng.random() < RIGHT
        else guess(rng)
    )
    return f"{fill(templates['observer_prompt'], {**row, 'response': ' ' + call})} {answer}"


def make(folder: Path, texts: int = 2 * TEXTS, steps: int = 2 * STEPS) -> None:
    """Fills `folder` with fog_0/, ..., fog_100/ and model/."""
    for fog in FOG:
        (folder / f"fog_{fog}").mkdir(parents=True, exist_ok=True)
        for split in ("train", "test"):
            lines = [json.dumps(row) + "\n" for row in rows(split, fog / 100)]
            (folder / f"fog_{fog}/{split}.jsonl").write_text("".join(lines))
    templates = yaml.safe_load((FOLDER / "weather.yaml").read_text())["task"]
    rng, train = random.Random(0), rows("train", 0.5) + rows("train", 0.5, seed=1)
    corpus = [text(rng, rng.choice(train), templates) for _ in range(texts)]
    tokenizer = train_tokenizer(corpus, vocab_size=512)
    model = train_gpt2(
        corpus, tokenizer, **SIZE | {"positions": 80}, **TRAINING, steps=steps, after="calls:"
    )
    save_half(model, tokenizer, folder / "model")


def command_line() -> None:
    """Runs the script; see the module's docstring."""
    make_into(FOLDER / "out/weather", make, __doc__)


if __name__ == "__main__":
    main(command_line)
