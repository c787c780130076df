"""The toy setting: short film reviews from a small grammar, and small models trained on them.

The models are shipped in `weights/` beside this file (made by `toys/make_imdb_toy.py`). The reviews are generated,
and are the same everywhere. A review has a mood from -2 (dreadful) to 2 (wonderful) that colours its phrases. The
classifier was trained to predict the mood. The language model was trained on reviews and on examples in the
observer's prompt form. Such an example quotes a text, then repeats the text's first words and continues them in the
next better mood. A better response therefore helps the observer that reads it, as it would help a pre-trained LLM.
"""

import hashlib
import os
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from cory.errors import UserError

SHIPPED = Path(__file__).resolve().parent / "weights"
POLICY = SHIPPED / "policy"
REWARD_MODEL = SHIPPED / "reward_model"
LARGE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cory" / "imdb_large_v1"
# Numbers of reviews from which queries are cut. The models were trained on the training reviews.
TRAIN_REVIEWS = 8000
TEST_REVIEWS = 8000
# Share of all possible queries held out for testing, which gives more than 500 distinct queries.
HELD_OUT = 0.2
OBSERVER = 'I can make this sentence "{sentence}" more positive: {rewrite}'
MOODS = (-2, -1, 0, 1, 2)

OPENINGS = (
    "I watched {film} {when}", "we saw {film} {when}", "my {friend} picked {film} {when}", "{film} came out {when}",
    "I finally rented {film} {when}", "{film} was on television {when}", "they showed {film} {when}",
    "after all the talk I went to see {film}", "I had read the book before {film}", "{film} is a story about {topic}",
    "this is a film about {topic}", "here is another movie about {topic}", "I knew little about {film}",
)  # fmt: skip
SLOTS = {
    "film": "this film|this movie|the picture|that thriller|this comedy|the drama|this western|the sequel|that musical|"
    "this documentary|the remake|this little film|that old movie|the new release",
    "when": "last night|on sunday|with my family|at the festival|in a small cinema|late in the evening|"
    "on a long flight|last week|a few years ago|when it first came out|on a rainy day|after work",
    "friend": "brother|sister|wife|husband|neighbour|teacher|cousin|daughter|son|uncle",
    "topic": "a lonely detective|two brothers|a small town|the war|a lost dog|a young singer|a family on the road|"
    "an old sailor|life in the city|a bank robbery|a summer by the sea|a chess player|the end of the world",
    "part": "the acting|the plot|the music|the ending|the script|the lead actor|the camera work|the dialogue|the cast|"
    "the pacing|the story|the direction|the first half|the second half|the costume design|the humour|the villain|"
    "the love story|the opening scene|the soundtrack",
    "frame": "{part} was {very} {adjective}|{part} felt {very} {adjective}|I found {part} {very} {adjective}|"
    "{part} seemed {adjective} to me|{part} and {part} were {adjective}|in the end {part} was {adjective}|"
    "for me {part} was {very} {adjective}|{part} turned out {adjective}",
    "very": "very|quite|really|simply|truly|rather",
}  # fmt: skip
MOODY = {
    "adjective": {
        -2: "awful|dreadful|terrible|horrible|disgusting|unbearable|pathetic",
        -1: "weak|dull|clumsy|boring|disappointing|shallow|tired",
        0: "average|ordinary|standard|typical|passable|familiar|plain",
        1: "good|pleasant|solid|charming|enjoyable|nice|clever",
        2: "wonderful|brilliant|superb|magnificent|perfect|outstanding|breathtaking",
    },
    "verdict": {
        -2: "I hated every minute|it was a waste of time|it is the worst thing I have ever seen|please avoid it",
        -1: "I would not watch it again|it left me cold|I lost interest early|it was not worth the ticket",
        0: "it is what you would expect|I have no strong feelings|it passes the time|there is little to say",
        1: "I liked it|it is worth a look|I had a good time|I can recommend it",
        2: "I loved every minute|it is a masterpiece|it is the best thing I have ever seen|everyone should see it",
    },
}
JOINTS = (" and ", ", ", ". ", "; ")


def _pick(rng: random.Random, slot: str, mood: int) -> str:
    options = MOODY[slot][mood] if slot in MOODY else SLOTS[slot]
    return fill(rng, rng.choice(options.split("|")), mood)


def fill(rng: random.Random, template: str, mood: int) -> str:
    while "{" in template:
        start = template.index("{")
        end = template.index("}")
        template = (
            template[:start] + _pick(rng, template[start + 1 : end], mood) + template[end + 1 :]
        )
    return template


def _phrases(rng: random.Random, mood: int, seed: int) -> list[str]:
    """Returns a review as phrases. `seed` draws the skeleton (opening, number of clauses, joints), `rng` the words."""
    skeleton = random.Random(seed)
    phrases = [fill(skeleton, skeleton.choice(OPENINGS), mood)] if skeleton.random() < 0.6 else []
    phrases += [fill(rng, "{frame}", mood) for _ in range(skeleton.randint(1, 3))]
    return [phrase + skeleton.choice(JOINTS) for phrase in phrases] + [
        fill(rng, "{verdict}", mood) + "."
    ]


def review(rng: random.Random) -> tuple[str, int]:
    """Returns a review and its mood."""
    mood = rng.choice(MOODS)
    return "".join(_phrases(rng, mood, rng.getrandbits(32))), mood


def rewriting(rng: random.Random) -> str:
    """Returns an example in the observer's prompt form: a quoted text, then its start, continued in a better mood."""
    mood = rng.choice(MOODS)
    seed = rng.getrandbits(32)
    phrases = _phrases(rng, mood, seed)
    words = "".join(phrases).split(" ")
    quoted = words[: rng.randint(5, 22)]
    query = words[: rng.randint(2, 7)]
    kept = 0  # number of phrases of which the query has at least a part; these stay unchanged
    length = 0
    while length < len(" ".join(query)):
        length += len(phrases[kept])
        kept += 1
    better = phrases[:kept] + _phrases(rng, min(mood + 1, 2), seed)[kept:]
    return OBSERVER.format(sentence=" ".join(quoted), rewrite="".join(better))


@cache
def _reviews() -> list[tuple[str, int]]:
    """Returns all reviews with their moods, the training reviews first."""
    rng = random.Random(0)
    return [review(rng) for _ in range(TRAIN_REVIEWS + TEST_REVIEWS)]


def reviews(split: str) -> list[str]:
    """Returns the texts of a split.

    Raises:
        UserError: the split does not exist.
    """
    parts = {"train": slice(0, TRAIN_REVIEWS), "test": slice(TRAIN_REVIEWS, None)}
    if split not in parts:
        raise UserError(
            f"task.split: expected one of {list(parts)} of the toy reviews, got {split!r}"
        )
    return [text for text, _ in _reviews()[parts[split]]]


def is_held_out(query: str) -> bool:
    """Whether a query is held out for testing. Only its text decides, so other reviews and seeds change nothing."""
    start = hashlib.sha256(query.encode()).digest()[:8]
    return int.from_bytes(start, "big") < HELD_OUT * 2**64


def of_split(queries: Sequence[str], split: str) -> list[str]:
    """Returns the queries that belong to a split, in order; split `test` has no duplicates.

    Splitting the reviews instead would leak test queries into training, as different reviews often share their first
    words.
    """
    if split == "test":
        return [query for query in dict.fromkeys(queries) if is_held_out(query)]
    return [query for query in queries if not is_held_out(query)]


def folder(name: str) -> str:
    """Returns the folder of a built-in policy, `tiny` or `tiny_large` (twice the parameters); else the name itself."""
    if name == "tiny_large":
        if not LARGE.exists():
            raise UserError(
                "model.name: tiny_large is not shipped. To make it, in a checkout of the repository: "
                "python -m toys.make_imdb_toy tiny_large"
            )
        return str(LARGE)
    return str(POLICY) if name == "tiny" else name
