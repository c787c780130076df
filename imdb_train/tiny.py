"""The embedded default's world: short film reviews from a small grammar, and the models trained on them.

    python imdb_train/tiny.py        # builds what is missing, prints where it is

A review has a mood from -2 (dreadful) to 2 (wonderful) that colours its phrases. The classifier learns the mood; the
language model learns reviews and, in the observer's prompt form, rewriting examples in which a text goes on one mood
better than the quoted sentence. So a better reference helps, as it does for a pre-trained LLM that reads the prompt.
"""

import json
import random
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # see imdb_train/cory.py

from transformers import PreTrainedTokenizerFast

from cory import tiny
from cory.console import main

OBSERVER = 'I can make this sentence "{sentence}" more positive: {rewrite}'
MOODS = (-2, -1, 0, 1, 2)
POSITIVE = {-2: 0.003, -1: 0.15, 0: 0.5, 1: 0.85, 2: 0.997}  # what the classifier is taught

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
        start, end = template.index("{"), template.index("}")
        template = template[:start] + _pick(rng, template[start + 1 : end], mood) + template[end + 1 :]
    return template


def _phrases(rng: random.Random, mood: int, seed: int) -> list[str]:
    """One review as phrases. The skeleton (opening, number of clauses, joints) follows `seed`, the words `rng`."""
    skeleton = random.Random(seed)
    phrases = [fill(skeleton, skeleton.choice(OPENINGS), mood)] if skeleton.random() < 0.6 else []
    phrases += [fill(rng, "{frame}", mood) for _ in range(skeleton.randint(1, 3))]
    return [phrase + skeleton.choice(JOINTS) for phrase in phrases] + [fill(rng, "{verdict}", mood) + "."]


def review(rng: random.Random) -> tuple[str, int]:
    """A review and its mood."""
    mood = rng.choice(MOODS)
    return "".join(_phrases(rng, mood, rng.getrandbits(32))), mood


def rewriting(rng: random.Random) -> str:
    """An example in the observer's prompt form: the query of the quoted sentence, continued one mood better."""
    mood, seed = rng.choice(MOODS), rng.getrandbits(32)
    phrases = _phrases(rng, mood, seed)
    words = "".join(phrases).split(" ")
    quoted, query = words[: rng.randint(5, 22)], words[: rng.randint(2, 7)]
    kept, length = 0, 0  # the phrase in which the query ends stays as it is
    while length < len(" ".join(query)):
        length += len(phrases[kept])
        kept += 1
    better = phrases[:kept] + _phrases(rng, min(mood + 1, 2), seed)[kept:]
    return OBSERVER.format(sentence=" ".join(quoted), rewrite="".join(better))


def corpus(rng: random.Random) -> tuple[list[tuple[str, int]], list[str]]:
    """All reviews with their moods, and the rewriting examples."""
    return [review(rng) for _ in range(9000)], [rewriting(rng) for _ in range(9000)]


def build(folder: Path) -> None:
    """Fills `folder` with policy/, reward_model/, train.jsonl and test.jsonl."""
    rng = random.Random(0)
    reviews, rewritings = corpus(rng)
    texts = [text for text, _ in reviews]
    for split, rows in (("train", texts[:8000]), ("test", texts[8000:])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    texts, reviews = texts[:8000], reviews[:8000]

    tokenizer = tiny.train_tokenizer(texts + rewritings, vocab_size=1024)
    policy = tiny.train_gpt2(texts + rewritings, tokenizer, width=112, layers=3, positions=128, steps=320)
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")

    windows, positive = [], []  # the reward model reads cut-off texts, so it learns on cut-off texts
    for text, mood in reviews:
        words = text.split(" ")
        windows.append(" ".join(words[: rng.randint(4, len(words))]))
        positive.append(POSITIVE[mood])
    classifier = tiny.train_distilbert(windows, positive, tokenizer, width=64, layers=2, positions=128, steps=250)
    classifier.save_pretrained(folder / "reward_model")
    tokenizer.save_pretrained(folder / "reward_model")


def paths() -> Path:
    """The folder of the embedded default, built on first use."""
    return tiny.cached("imdb", [Path(__file__), Path(tiny.__file__)], build)


def build_large(folder: Path) -> None:
    """Fills `folder` with policy/: twice the parameters, of the same tokenizer and texts."""
    reviews, rewritings = corpus(random.Random(0))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(paths() / "policy")
    texts = [text for text, _ in reviews[:8000]] + rewritings
    policy = tiny.train_gpt2(texts, tokenizer, width=144, layers=4, positions=128, steps=320)
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")


def large() -> Path:
    """The folder of the larger policy (`model.name: tiny_large`), built on first use."""
    return tiny.cached("imdb_large", [Path(__file__), Path(tiny.__file__)], build_large)


def report() -> None:
    """Builds what is missing, and prints where it is."""
    print(f"Small models and reviews: {paths()}")


if __name__ == "__main__":
    main(report)
