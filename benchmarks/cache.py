"""Time of sampling with `sampling.cache: dynamic` and `static` (docs/scaling.md).

    python benchmarks/cache.py --model FOLDER                   # a step; gpt2 for a GPT-2-small of random weights
    python benchmarks/cache.py --model FOLDER --table batches   # a batch's sampling

`steps`: of all rows, when half of the response is written. `batches`: all of `sample`, with 8 responses to each prompt,
whose lengths are of a geometric distribution, cut off. Lengths of prompts are between three quarters of the stated one
and that. The ways run in turn; medians. `compiled` is `static` as in training; with `--static` it is also timed without
the compiler. Seconds of compiling are those of the first time less the median; they are few where torch's cache on disk
has the programs (TORCHINDUCTOR_CACHE_DIR).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers import __version__ as transformers_version

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.iteration import hardware, table  # noqa: E402
from benchmarks.shapes import word_tokenizer  # noqa: E402
from cory.config import SamplingConfig  # noqa: E402
from cory.models import sampling, static  # noqa: E402
from cory.models.drawing import Stopping  # noqa: E402
from cory.models.sampling import sample  # noqa: E402
from cory.models.static import StaticTexts  # noqa: E402
from cory.models.texts import Texts, padded, unread  # noqa: E402
from cory.parallel import devices  # noqa: E402

GROUP = 8  # responses to a prompt
STEPS = 4  # timed in turn
WAYS = ("dynamic", "static", "compiled")
TOKENIZER = word_tokenizer(100)  # of which only the token to pad with matters


def load(name: str, dtype: torch.dtype) -> PreTrainedModel:
    if name == "gpt2":
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config()).to(dtype).eval()
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()


def draw_prompts(rows: int, width: int, vocabulary: int) -> list[Tensor]:
    """Random tokens, a prompt `GROUP` times."""
    distinct = -(-rows // GROUP)
    lengths = [width - width * index // (4 * distinct) for index in range(distinct)]
    prompts = [torch.randint(vocabulary, (length,)) for length in lengths]
    return [prompts[row // GROUP] for row in range(rows)]


def draw_lengths(rows: int, mean: float, longest: int) -> list[int]:
    """Of the geometric distribution with this mean before it is cut off."""
    uniform = torch.rand(rows, dtype=torch.float64)
    lengths = (uniform.log() / torch.log1p(torch.tensor(-1 / mean))).ceil()
    return lengths.clamp(1, longest).long().tolist()


class StatedLengths(Stopping):
    """Ends each response at its stated length. `sample` asks row after row."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(TOKENIZER, (), ())
        self.stated = lengths
        self.rows: dict[int, int] = {}  # of the list that a response's tokens are appended to

    def has_ended(self, response: list[int]) -> bool:
        row = self.rows.setdefault(id(response), len(self.rows))
        return len(response) == self.stated[row]


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def compiling(way: str) -> Iterator[None]:
    """Within it the static cache's step is compiled only if `way` says so."""
    if way == "compiled":
        yield
        return
    with replaced(static, "compiled_step", lambda: static.step):
        yield


@torch.no_grad()
def measure_steps(
    model: PreTrainedModel,
    rows: int,
    width: int,
    response: int,
    ways: Sequence[str],
    repeats: int,
) -> dict[str, list[float]]:
    """Seconds of each step, by way; of the first compiled one; and how far its logits are from the dynamic cache's."""
    prompts = draw_prompts(rows, width + response // 2 - STEPS // 2, model.config.vocab_size)
    tokens = torch.randint(model.config.vocab_size, (STEPS, rows, 1))
    read = read_prompts(model, prompts)
    seconds: dict[str, list[float]] = {"first": [], "difference": []}
    for _ in range(repeats):
        logits: dict[str, Tensor] = {}
        for way in ways:
            texts: Texts | StaticTexts
            if way == "dynamic":
                texts = replace(read, cache=deepcopy(read.cache))
            else:
                texts = StaticTexts(read, response // 2 + STEPS)
            for new in tokens:
                start = time.perf_counter()
                texts.append(new)
                with compiling(way):
                    logits[way] = texts.read()
                took = time.perf_counter() - start
                is_first = way == "compiled" and not seconds["first"]
                seconds.setdefault("first" if is_first else way, []).append(took)
        seconds["difference"].append((logits["dynamic"] - logits["compiled"]).abs().max().item())
    return seconds


def read_prompts(model: PreTrainedModel, prompts: list[Tensor]) -> Texts:
    """The prompts, read, with a row for each response."""
    distinct = list(dict.fromkeys(tuple(prompt.tolist()) for prompt in prompts))
    ids, mask = padded(distinct, 0, torch.device("cpu"))
    texts = unread(model, ids, mask, [len(prompt) < ids.shape[1] for prompt in distinct])
    texts.read()
    texts.select([distinct.index(tuple(prompt.tolist())) for prompt in prompts])
    return texts


def measure_batches(
    model: PreTrainedModel,
    rows: int,
    width: int,
    response: int,
    mean: float,
    ways: Sequence[str],
    repeats: int,
) -> dict[str, list[float]]:
    """Seconds of a batch, by way; of the first compiled one; and the share of responses that are the same."""
    torch.manual_seed(rows)
    lengths = draw_lengths(rows, mean, response)
    prompts = draw_prompts(rows, width, model.config.vocab_size)

    def run(way: str) -> list[Tensor]:
        settings = SamplingConfig(
            max_new_tokens=response, cache="dynamic" if way == "dynamic" else "static"
        )
        generator = torch.Generator().manual_seed(0)
        stopping = lambda *_: StatedLengths(lengths)  # noqa: E731
        with compiling(way), replaced(sampling, "Stopping", stopping):
            return sample(model, TOKENIZER, prompts, settings, response, generator).responses

    seconds: dict[str, list[float]] = {"difference": []}
    for repeat in range(repeats + 1):
        responses = {}
        for way in ways if repeat else ["compiled"]:
            start = time.perf_counter()
            responses[way] = run(way)
            seconds.setdefault(way if repeat else "first", []).append(time.perf_counter() - start)
        if repeat:
            pairs = zip(responses["dynamic"], responses["compiled"], strict=True)
            differs = statistics.fmean(not torch.equal(a, b) for a, b in pairs)
            seconds["difference"].append(differs)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt2", help="a folder, or gpt2")
    parser.add_argument("--table", choices=["steps", "batches"], default="steps")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--prompts", type=int, nargs="+", default=[40, 150], help="tokens")
    parser.add_argument("--response", type=int, default=60, help="tokens at most")
    parser.add_argument("--mean", type=float, default=30, help="tokens of a response")
    parser.add_argument("--static", action="store_true", help="also without compiling")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    ways = WAYS if options.static else ("dynamic", "compiled")

    devices.configure(torch.device("cpu"))
    model = load(options.model, getattr(torch, options.dtype))
    is_step = options.table == "steps"
    rows = []
    for count in options.rows:
        for prompt in options.prompts:
            torch.manual_seed(count)
            sizes = (count, prompt, options.response)
            if is_step:
                runs = measure_steps(model, *sizes, ways, options.repeats)
            else:
                runs = measure_batches(model, *sizes, options.mean, ways, options.repeats)
            numbers = {name: statistics.median(values) for name, values in runs.items()}
            times = [f"{numbers[way] * (1000 if is_step else 1):.3g}" for way in ways]
            rows.append(
                [
                    str(count),
                    str(prompt),
                    *times,
                    f"{numbers['compiled'] / numbers['dynamic']:.2f}",
                    f"{numbers['first'] - numbers['compiled']:.0f}",
                    f"{max(runs['difference']):.2g}",
                ]
            )
            print("\t".join(rows[-1]), file=sys.stderr, flush=True)
    print(f"{hardware()}, transformers {transformers_version}; {options.model}, {options.dtype}\n")
    unit = "ms" if is_step else "s"
    last = "largest difference of logits" if is_step else "responses that differ"
    header = [
        "rows",
        "prompt",
        *(f"{way}, {unit}" for way in ways),
        "compiled / dynamic",
        "compiling, s",
        last,
    ]
    print(table(rows, header))


if __name__ == "__main__":
    main()
