"""Compares models on held-out word problems: pass@k, greedy accuracy, unparseable answers, length, KL to the base.

    python gsm8k_train/evaluate.py runs/gsm8k_cory_tiny runs/gsm8k_ppo_tiny    # all agents of two runs, and their base
    python gsm8k_train/evaluate.py Qwen/Qwen2.5-0.5B-Instruct --samples 16 --ks "[1, 4, 16]"   # any model

Every model answers the question alone (solo). The agents of one CORY run also answer in chains (joint): one as pioneer,
the other as observer that reads the pioneer's solution. Base, dataset and prompts are those of the first run unless
stated. pass@k is the unbiased estimate from n samples a problem (Chen et al., 2021).

Each finished problem is a line of problems.jsonl in the output folder: the same command with the same --output goes on
where it stopped.
"""

import itertools
import json
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # see imdb_train/cory.py

from jsonargparse import ArgumentError, ArgumentParser  # noqa: E402

from cory.config import ModelConfig, SamplingConfig, UserError, expect  # noqa: E402
from cory.console import main  # noqa: E402
from cory.evaluation import OVER_SEEDS, markdown_table, over_seeds, respond, run_agents, run_config  # noqa: E402
from cory.metrics import mean_interval, pass_at_k  # noqa: E402
from cory.models import choose_device, load_policy  # noqa: E402
from cory.plots import plot_pass_at_k  # noqa: E402
from cory.prompts import RolePrompts, fit_responses  # noqa: E402
from cory.sampling import context_length, encode  # noqa: E402
from cory.tracking import new_folder  # noqa: E402
from gsm8k_train.answers import correct, extract, gold  # noqa: E402
from gsm8k_train.task import Gsm8kTaskConfig, problems, resolve_tiny_names  # noqa: E402

DIFFERENCES = 5  # problems shown for each pair of models


@dataclass
class Evaluation:
    """What to compare, and on what.

    Args:
        models: Hub ids, local folders, or folders of runs (all their agents).
        base: Hub id, local folder or `tiny`: the model that KL is measured to, shown first. null: the first run's, or
            the first model.
        dataset: Hub id, local file or folder, or `tiny`. null: the first run's, or openai/gsm8k.
        split: The held-out split.
        problems: Number of problems, from the first. 0: all.
        samples: Samples n a problem.
        ks: The k of pass@k, at most n.
        temperature: Of the samples.
        max_new_tokens: Longest response. null: the first run's, or 256.
        stop: Texts that end a response.
        chat_template: Render prompts with the chat template. null: the first run's, or false.
        quantization: none, 4bit or 8bit. null: the first run's, or none.
        batch_size: Responses that are sampled at a time.
        seed: Of sampling.
        device: auto, cpu, cuda or cuda:N.
        output: Folder of the results; one that was begun with the same settings is gone on with. null: a new one.
    """

    models: list[str] = field(default_factory=list)
    base: str | None = None
    dataset: str | None = None
    split: str = "test"
    problems: int = 0
    samples: int = 8
    ks: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    temperature: float = 1.0
    max_new_tokens: int | None = None
    stop: list[str] = field(default_factory=lambda: ["Question:"])
    chat_template: bool | None = None
    quantization: str | None = None
    batch_size: int = 128
    seed: int = 0
    device: str = "auto"
    output: str | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size"):
            expect(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        expect(self.problems >= 0, "problems", "0 (all) or more", self.problems)
        expect(bool(self.ks), "ks", "at least one k", self.ks)
        for k in self.ks:
            pass_at_k(self.samples, 0, k)  # refuses a k that is larger than the number of samples


def read_command_line(argv: list[str] | None = None) -> Evaluation:
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, description=__doc__)
    parser.add_argument("models", nargs="+", help="Hub ids, local folders, or folders of runs (all their agents)")
    parser.add_class_arguments(Evaluation, skip={"models"})
    try:
        return Evaluation(**vars(parser.instantiate(parser.parse_args(argv))))
    except ArgumentError as error:
        raise UserError(" ".join(str(error).split())) from None


class Evaluator:
    """Answers every problem with every model, a chunk of problems at a time, and keeps what is finished.

    Args:
        settings: what to compare.
        folder: of the results; finished problems in its problems.jsonl are not answered again.
    """

    def __init__(self, settings: Evaluation, folder: Path) -> None:
        self.settings = settings
        device = choose_device(settings.device)
        runs = [Path(name) for name in settings.models if run_agents(Path(name))]
        first = run_config(runs[0]) if runs else {}
        task = Gsm8kTaskConfig(**first.get("task", {}))
        task.dataset = settings.dataset or task.dataset
        base_name = settings.base or first.get("model", {}).get("name") or settings.models[0]
        base_name, task = resolve_tiny_names(base_name, task)
        pick = lambda own, key, default: own if own is not None else first.get("model", {}).get(key, default)  # noqa: E731
        self.chat_template = pick(settings.chat_template, "chat_template", False)
        quantization = pick(settings.quantization, "quantization", "none")
        length = settings.max_new_tokens or first.get("sampling", {}).get("max_new_tokens", 256)
        self.sampling = SamplingConfig(1, length, temperature=settings.temperature, stop=settings.stop)
        self.greedy = SamplingConfig(1, length, top_k=1, stop=settings.stop)  # the likeliest token is the only one left
        self.templates = RolePrompts(task.pioneer_prompt, task.observer_prompt)

        rows = problems(task, settings.split)
        count = min(settings.problems or len(rows), len(rows))
        self.questions, self.answers = rows["prompt"][:count], [gold(text) for text in rows["answer"][:count]]
        folders = {"base": base_name}
        for name in settings.models:
            agents = {agent: str(path) for agent, path in run_agents(Path(name)).items()}
            path = resolve_tiny_names(name, task)[0]
            folders |= agents or ({name: path} if path != base_name else {})
        loaded = {
            name: load_policy(ModelConfig(path, quantization=quantization), merge=False)
            for name, path in folders.items()
        }
        self.models = {name: model.to(device).eval() for name, (model, _) in loaded.items()}
        self.tokenizer = loaded["base"][1]
        self.chains = {
            f"{second} after {first.split('/')[-1]}": (first, second)
            for run in runs
            for first, second in itertools.permutations(run_agents(run), 2)
        }
        self.file = folder / "problems.jsonl"
        self.done: dict[tuple[str, int], dict[str, Any]] = {}
        if self.file.exists():
            for line in self.file.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:  # the line at which an earlier evaluation was killed
                    continue
                self.done[record["model"], record["problem"]] = record

    def run(self) -> dict[str, list[dict[str, Any]]]:
        """The records of every model or chain, in the order of the problems."""
        with self.file.open("a", encoding="utf-8") as file:
            if self.file.stat().st_size:
                file.write("\n")  # ends a line that was cut short; empty lines are skipped
            for name in self.models:
                self._answer(name, self.models[name], None, file)
            for name, (pioneer, observer) in self.chains.items():
                self._answer(name, self.models[observer], pioneer, file)
        names = [*self.models, *self.chains]
        return {name: [self.done[name, i] for i in range(len(self.questions))] for name in names}

    def _answer(self, name: str, model: Any, pioneer: str | None, file: Any) -> None:
        n = self.settings.samples
        chunk = max(1, self.settings.batch_size // n)
        missing = [i for i in range(len(self.questions)) if (name, i) not in self.done]
        for start in range(0, len(missing), chunk):
            index = missing[start : start + chunk]
            sampled = self._respond(model, index, pioneer, n, self.sampling)
            greedy = self._respond(model, index, pioneer, 1, self.greedy)
            for place, i in enumerate(index):
                at = slice(place * n, (place + 1) * n)
                texts, best = sampled.completions[at], greedy.completions[place]
                record = {
                    "model": name,
                    "problem": i,
                    "correct": [correct(text, self.answers[i]) for text in texts],
                    "greedy_correct": correct(best, self.answers[i]),
                    "unparseable": sum(extract(text) is None for text in texts) / n,
                    "tokens": sum(sampled.tokens[at]) / n,
                    "kl": sum(sampled.kl[at]) / n,
                    "greedy": best,
                    "completions": texts,
                }
                self.done[name, i] = record
                file.write(json.dumps(record) + "\n")
            file.flush()
            if sys.stderr.isatty():
                print(f"\r{name}: {start + len(index)}/{len(missing)} problems", end="", file=sys.stderr)

    def _respond(self, model: Any, index: list[int], pioneer: str | None, n: int, sampling: SamplingConfig) -> Any:
        """n responses to each of the problems `index`, problem by problem; after the pioneer's, where there is one."""
        rows = [{"prompt": self.questions[i]} for i in index for _ in range(n)]
        if pioneer is None:
            prompts = [self.templates.render(0, row) for row in rows]
        else:
            records = [self.done[pioneer, i] for i in index]
            read = [t for r in records for t in ([r["greedy"]] if sampling is self.greedy else r["completions"])]
            prompts = fit_responses(
                lambda texts: [self.templates.render(1, row, text) for row, text in zip(rows, texts, strict=True)],
                read,
                partial(encode, self.tokenizer, chat_template=self.chat_template),
                (context_length(model) or sys.maxsize) - sampling.max_new_tokens,
            )
        seed = self.settings.seed * 1_000_003 + index[0]  # the same samples, however often the evaluation was stopped
        batch = self.settings.batch_size
        return respond(model, self.models["base"], self.tokenizer, prompts, sampling, batch, seed, self.chat_template)


def summarise(records: dict[str, list[dict[str, Any]]], settings: Evaluation) -> list[dict[str, Any]]:
    """A row per model: each number with `NAME_ci`, the half-width of its 95 % interval over problems."""
    rows = []
    for name, problem_records in records.items():
        values = {
            f"pass@{k}": [pass_at_k(len(r["correct"]), sum(r["correct"]), k) for r in problem_records]
            for k in settings.ks
        }
        values["greedy"] = [float(r["greedy_correct"]) for r in problem_records]
        values |= {key: [r[key] for r in problem_records] for key in ("unparseable", "tokens", "kl")}
        row: dict[str, Any] = {"name": name}
        for key, numbers in values.items():
            row[key], row[f"{key}_ci"] = mean_interval(numbers)
        rows.append(row)
    return rows


def differences(records: dict[str, list[dict[str, Any]]], questions: list[str]) -> list[dict[str, str]]:
    """Problems that one model solves greedily and the base does not, and the other way round, with both texts."""
    base, rows = records["base"], []
    for name, others in records.items():
        for gained in (True, False):
            found = [
                (a, b)
                for a, b in zip(base, others, strict=True)
                if (b["greedy_correct"], a["greedy_correct"]) == (gained, not gained)
            ]
            for a, b in found[:DIFFERENCES]:
                rows.append(
                    {
                        "model": name,
                        "": "solves, base does not" if gained else "fails, base solves",
                        "question": questions[a["problem"]],
                        "its answer": b["greedy"],
                        "base's answer": a["greedy"],
                    }
                )
    return rows


def interval(row: dict[str, Any], metric: str, sign: str = "+-") -> str:
    return f"{row[metric]:.3f} {sign} {row[metric + '_ci']:.3f}"


def run() -> None:
    settings = read_command_line()
    known = asdict(settings)
    folder = Path(settings.output) if settings.output else None
    if folder is not None and (folder / "settings.json").exists():
        before = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        changed = sorted(key for key in known if known[key] != before.get(key) and key not in ("device", "ks"))
        if changed:
            raise UserError(
                f"output: expected the settings with which {str(folder)!r} was begun, got others: {changed}"
            )
    else:
        folder = new_folder(settings.output, "gsm8k-evaluation")
        (folder / "settings.json").write_text(json.dumps(known, indent=2), encoding="utf-8")
    evaluator = Evaluator(settings, folder)
    records = evaluator.run()
    rows = summarise(records, settings)
    metrics = [*(f"pass@{k}" for k in settings.ks), "greedy", "unparseable", "tokens", "kl"]
    print(
        f"\n{len(evaluator.questions)} problems, {settings.samples} samples each, temperature {settings.temperature:g};"
    )
    print("mean +- half-width of the 95 % interval over problems")
    print(f"{'':30}" + "".join(f"{metric:>18}" for metric in metrics))
    for row in rows:
        print(f"{row['name']:30}" + "".join(f"{interval(row, metric):>18}" for metric in metrics))

    def table(rows: list[dict[str, Any]]) -> str:
        cells = [{"model": row["name"], **{metric: interval(row, metric, "±") for metric in metrics}} for row in rows]
        return markdown_table(cells)

    groups = over_seeds(rows)
    text = f"{OVER_SEEDS}{table(groups)}\n" if groups else ""
    text += f"Mean ± half-width of the 95 % interval over problems.\n\n{table(rows)}"
    apart = differences(records, evaluator.questions)
    text += "\n## Where models differ from the base\n\n" + markdown_table(apart)
    (folder / "evaluation.md").write_text(text, encoding="utf-8")
    (folder / "evaluation.json").write_text(json.dumps(rows, indent=2), encoding="utf-8")
    plot_pass_at_k(groups or rows, settings.ks, folder / "pass_at_k.png")
    print(f"\nTables, texts and figure are in {folder}")


if __name__ == "__main__":
    main(run)
