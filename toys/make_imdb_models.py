"""Trains small models on IMDB's reviews, from scratch: a DistilBERT reward model and a GPT-2 policy.

    python -m toys.make_imdb_models FOLDER                          # IMDB from the Hub
    python -m toys.make_imdb_models FOLDER --dataset IMDB_FOLDER    # with {train,test,unsupervised}.parquet
    python -m toys.make_imdb_models FOLDER --only reward_model

Fills FOLDER/reward_model and FOLDER/policy, two ordinary Hugging Face folders. Prints their quality on the test reviews
and keeps it in FOLDER/quality.json. The same seed, kind of processor and number of threads (default 1) give the same
models. The models are for machines without access to the Hub. With access, use `lvwerra/distilbert-imdb` and a
pre-trained LLM.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from cory.command import Arguments, main
from cory.errors import UserError
from cory.run.folder import write_text

VOCABULARY = 8192
PIECES_PER_REVIEW = 4  # training texts per review for the classifier
PIECE_WORDS = (4, 60)  # shortest and longest piece, in words
LM_TOKENS = 96  # tokens per review for the language model
LM_REVIEWS = 70_000  # reviews for the language model, out of 75,000 outside the test split
QUALITY_WORDS = (16, 32, 96)  # lengths of beginnings on which the classifier is tested
QUALITY_REVIEWS = 2000
MINUTES = {"reward_model": 20, "policy": 30}  # measured
LEAST = 0.6  # required accuracy on the longest beginnings: in some trainings, it stays at chance


def make(
    folder: Path, dataset: str, only: str | None, seed: int, threads: int = 1
) -> dict[str, float]:
    """Fills `folder` with reward_model/ and policy/, keeping what already exists, and measures them.

    Raises a UserError if the dataset is not available.
    """
    import torch  # imported late, as it takes seconds

    from cory.data import load_dataset
    from toys.small_models import (
        cached,
        is_model,
        save,
        train_distilbert,
        train_gpt2,
        train_tokenizer,
    )

    def reviews(split: str) -> tuple[list[str], list[int]]:
        rows = load_dataset(dataset, split, ["text", "label"])
        return [plain(text) for text in rows["text"]], rows["label"]

    texts, labels = reviews("train")
    test, test_labels = reviews("test")
    more = [] if only == "reward_model" else reviews("unsupervised")[0]
    rng = random.Random(seed)
    tokenizer = train_tokenizer(texts, VOCABULARY)

    def reward_model(target: Path) -> None:
        pieces = []
        positive = []
        for text, label in zip(texts, labels, strict=True):
            for _ in range(PIECES_PER_REVIEW):
                pieces.append(piece(rng, text))
                positive.append(float(label))
        steps = len(pieces) // 64
        model = train_distilbert(
            pieces,
            positive,
            tokenizer,
            width=256,
            layers=3,
            positions=256,
            steps=steps,
            learning_rate=5e-4,
            seed=seed,
        )
        save(model, tokenizer, target)

    def policy(target: Path) -> None:
        learnt = (texts + more)[:LM_REVIEWS]
        model = train_gpt2(
            learnt, tokenizer, width=256, layers=4, positions=256, length=LM_TOKENS, steps=len(learnt) // 64,
            learning_rate=1e-3, seed=seed,
        )  # fmt: skip
        save(model, tokenizer, target)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for name, build in (("reward_model", reward_model), ("policy", policy)):
        if only in (None, name):
            exists = is_model(folder / name)
            if not exists:
                print(
                    f"Making {folder / name}: about {MINUTES[name]} minutes on one core of a CPU",
                    flush=True,
                )
            print(
                f"{'Already made' if exists else 'Made'}: {cached(folder / name, build)}",
                flush=True,
            )
    torch.set_num_threads(before)
    chosen = random.Random(seed).sample(range(len(test)), min(QUALITY_REVIEWS, len(test)))
    with torch.no_grad():
        quality = quality_of(folder, [test[i] for i in chosen], [test_labels[i] for i in chosen])
    write_text(folder / "quality.json", json.dumps(quality, indent=2))
    return quality


def plain(text: str) -> str:
    """Removes HTML line breaks from a review."""
    return " ".join(text.replace("<br />", " ").split())


def piece(rng: random.Random, text: str) -> str:
    """Draws a piece of a review: half of the time its beginning, as the reward model reads beginnings."""
    words = text.split(" ")
    length = min(rng.randint(*PIECE_WORDS), len(words))
    start = rng.choice((0, rng.randint(0, len(words) - length)))
    return " ".join(words[start : start + length])


def quality_of(folder: Path, texts: Sequence[str], labels: Sequence[int]) -> dict[str, float]:
    """Measures the models that exist: the reward model's accuracy on reviews' first words, and the policy's loss."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from cory.models.load import quiet

    quality = {}
    if (folder / "reward_model").exists():
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder / "reward_model")
            classifier = AutoModelForSequenceClassification.from_pretrained(folder / "reward_model")
        for count in QUALITY_WORDS:
            right = 0
            for text, label in zip(texts, labels, strict=True):
                start = " ".join(text.split(" ")[:count])
                ids = tokenizer(start, truncation=True, max_length=256, return_tensors="pt")[
                    "input_ids"
                ]
                right += int(classifier(ids).logits.argmax().item() == label)
            quality[f"accuracy on {count} words"] = right / len(texts)
    if (folder / "policy").exists():
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
            model = AutoModelForCausalLM.from_pretrained(folder / "policy")
        rows = [torch.tensor([tokenizer(text)["input_ids"][:LM_TOKENS]]) for text in texts[:500]]
        losses = [(model(input_ids=row, labels=row).loss.item(), row.shape[1] - 1) for row in rows]
        quality["loss"] = sum(loss * n for loss, n in losses) / sum(n for _, n in losses)
    return quality


def command_line(argv: Sequence[str] | None = None) -> None:
    """Runs `python -m toys.make_imdb_models`; see the module's docstring."""
    parser = Arguments(__doc__)
    parser.add_argument("folder", help="Folder for the models")
    parser.add_argument(
        "--dataset", default="stanfordnlp/imdb", help="Hub id or folder of the reviews"
    )
    parser.add_argument("--only", choices=["reward_model", "policy"], help="Make one of the two")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="Threads of the training; other numbers give other weights",
    )
    args = parser.parse_args(argv)
    if args.threads < 1:
        raise UserError(f"--threads: expected at least 1, got {args.threads}")
    quality = make(Path(args.folder), args.dataset, args.only, args.seed, args.threads)
    for name, value in quality.items():
        print(f"{name}: {value:.3f}")
    if quality.get(f"accuracy on {QUALITY_WORDS[-1]} words", 1.0) < LEAST:
        print(
            f"Warning: the reward model has not learned. Remove {args.folder}/reward_model and try another --seed."
        )


if __name__ == "__main__":
    main(command_line)
