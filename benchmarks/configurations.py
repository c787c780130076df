"""What the configurations of configs/imdb and configs/gsm8k need, by formula: a table of docs/gpu.md.

    python -m benchmarks.configurations            # prints it
    python -m benchmarks.configurations --write    # writes it, and what benchmarks/gpu.py expects, into docs/gpu.md

The models are made without weights, from their published sizes (benchmarks/published.py). Memory is
that of benchmarks/fits.py for one process, and of IMDB's reward model.
"""

import argparse
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from transformers import AutoConfig, DistilBertConfig, DistilBertForSequenceClassification

from benchmarks import fits, gpu
from benchmarks.iteration import table
from benchmarks.published import PUBLISHED, on_meta
from cory.cli.load import load
from cory.config import Config
from gsm8k_train.config import Gsm8kConfig
from imdb_train.config import ImdbConfig

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/gpu.md"
KINDS: dict[str, type[Config]] = {"imdb": ImdbConfig, "gsm8k": Gsm8kConfig}
FILES = sorted(path for kind in KINDS for path in (ROOT / "configs" / kind).glob("*.yaml"))
GPUS = (16, 24, 40, 80)  # GiB
# Tokens of the longest prompt, an observer's. IMDB: a query of 8, a response of at most 20, and the
# template. GSM8K: as in docs/scaling.md.
PROMPT = {"imdb": 50, "gsm8k": 512}


def read(file: Path) -> Config:
    """The settings of a file."""
    return load(KINDS[file.parent.name], None, ["--config", str(file)])


@cache
def sizes(model: str) -> fits.Model:
    """Of a published model, or of one that is in a folder."""
    return fits.Model.of(on_meta(PUBLISHED.get(model) or AutoConfig.from_pretrained(model)))


@cache
def reward_model() -> int:
    """Bytes of IMDB's classifier, a DistilBERT of two labels (https://huggingface.co/lvwerra/distilbert-imdb)."""
    import torch

    with torch.device("meta"):
        return 4 * fits.count(DistilBertForSequenceClassification(DistilBertConfig()).parameters())


def needed(file: Path, config: Config) -> dict[str, float]:
    """Bytes of one process: `held` between iterations, and `peak`; and of a `checkpoint` on disk."""
    kind = file.parent.name
    model = sizes(config.resolve(config.model.name))
    held = fits.held(config, model, 1)
    has_classifier = kind == "imdb" and file.stem != "tiny"  # the toy's is small
    others = reward_model() if has_classifier else 0
    return {
        "held": held["weights"] + held["Adam"] + others,
        "peak": fits.peak(config, model, 1, PROMPT[kind]) + others,
        "checkpoint": fits.checkpoint(config, model),
    }


def largest_micro_batch(file: Path, config: Config, gpu: float) -> int | None:
    """Rows of the largest pass that fits a GPU of so many GiB: what `auto` comes to by halving."""
    rows = config.ppo.mini_batch_size
    while rows:
        smaller = replace(config, ppo=replace(config.ppo, micro_batch=rows))
        if needed(file, smaller)["peak"] <= (1 - fits.FREE) * gpu * fits.GIB:
            return rows
        rows //= 2
    return None


def row(file: Path) -> list[str]:
    """A line of the table."""
    config = read(file)
    model = sizes(config.resolve(config.model.name))
    parts = needed(file, config)
    trained = "all" if not config.lora.rank else f"LoRA {config.lora.rank}"
    if config.model.quantization != "none":
        trained += f", {config.model.quantization}"
    rows = [largest_micro_batch(file, config, gpu) for gpu in GPUS]
    return [
        f"`{file.parent.name}/{file.stem}`",
        f"{model.parameters / 1e6:,.1f}",
        trained,
        f"{parts['held'] / fits.GIB:.1f}",
        f"{parts['peak'] / fits.GIB:.1f}",
        *(f"{count}" if count else "" for count in rows),
        f"{parts['checkpoint'] / fits.GIB:.1f}",
    ]


def text() -> str:
    """The table, in Markdown."""
    header = ["configuration", "parameters, M", "trained", "held, GiB", "peak, GiB"]
    rows = [f"rows, {gpu} GiB" for gpu in GPUS]
    return table([row(file) for file in FILES], [*header, *rows, "disk, GiB"])


def written(page: str) -> str:
    """The page with its tables made anew, each between `<!-- formula: NAME -->` and `<!-- formula end -->`."""
    tables = {"configurations": text(), "benchmark": gpu.expected(list(gpu.SIZES))}
    between = re.compile(r"(<!-- formula: (\w+) -->\n).*?(<!-- formula end -->)", re.DOTALL)
    return between.sub(lambda match: f"{match[1]}{tables[match[2]]}\n{match[3]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into docs/gpu.md")
    options = parser.parse_args()
    if options.write:
        page = written(PAGE.read_text(encoding="utf-8"))
        PAGE.write_text(page, encoding="utf-8")
    else:
        print(text())


if __name__ == "__main__":
    main()
