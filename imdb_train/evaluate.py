"""Compares models on held-out reviews: task reward, KL to the base, combined reward, diversity, length, sample texts.

    python imdb_train/evaluate.py runs/imdb_cory_tiny runs/imdb_ppo_tiny      # all agents of two runs, and their base
    python imdb_train/evaluate.py gpt2 my/folder --base gpt2        # any models, on stanfordnlp/imdb

Every model answers the query alone (solo). The agents of one CORY run also answer in chains (joint): one as pioneer,
the other as observer that reads the pioneer's response. Base, dataset, reward model and prompts are those of the first
run unless stated. KL is to the base under the same prompt: the query for solo rows, the observer's prompt for joint.
"""

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # see imdb_train/cory.py

from jsonargparse import ArgumentError, ArgumentParser  # noqa: E402

from cory.config import ModelConfig, SamplingConfig, UserError, expect  # noqa: E402
from cory.console import main  # noqa: E402
from cory.evaluation import OVER_SEEDS, Responses, markdown_table, over_seeds, respond, run_agents, run_config  # noqa: E402
from cory.metrics import distinct_interval, mean_interval  # noqa: E402
from cory.models import choose_device, load_policy  # noqa: E402
from cory.plots import plot_bars  # noqa: E402
from cory.prompts import RolePrompts, fit_responses  # noqa: E402
from cory.sampling import context_length, encode  # noqa: E402
from cory.tracking import new_folder, one_line  # noqa: E402
from imdb_train.task import ImdbTaskConfig, PositiveLogit, queries, resolve_tiny_names  # noqa: E402

METRICS = {
    "task_reward": "task reward", "kl": "KL to base (nats)", "combined_reward": "combined reward",
    "distinct_1": "distinct-1", "distinct_2": "distinct-2", "tokens": "length (tokens)",
}  # fmt: skip


@dataclass
class Evaluation:
    """What to compare, and on what.

    Args:
        models: Hub ids, local folders, or folders of runs (all their agents).
        base: Hub id, local folder or `tiny`: the model that KL is measured to, shown first. null: the first run's, or
            the first model.
        dataset: Hub id, local file or folder, or `tiny`. null: the first run's.
        split: The held-out split.
        text_column: Its column with the reviews. null: the first run's.
        reward_model: Hub id, local folder or `tiny`. null: the first run's.
        prompts: Number of queries.
        kl_coef: eta of the combined reward. null: the first run's initial KL coefficient, or 0.3.
        sampling: How responses are sampled.
        batch_size: Prompts that are answered at a time.
        seed: Of the choice of queries and of sampling.
        device: auto, cpu, cuda or cuda:N.
        output: Folder of the results; must be new. null: the first free one of runs/evaluation, runs/evaluation-2, ...
        samples: Queries whose responses are shown side by side.
    """

    models: list[str] = field(default_factory=list)
    base: str | None = None
    dataset: str | None = None
    split: str = "test"
    text_column: str | None = None
    reward_model: str | None = None
    prompts: int = 500
    kl_coef: float | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    batch_size: int = 100
    seed: int = 0
    device: str = "auto"
    output: str | None = None
    samples: int = 5

    def __post_init__(self) -> None:
        for name in ("prompts", "batch_size"):
            expect(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        expect(self.samples >= 0, "samples", "0 or more", self.samples)


def read_command_line(argv: list[str] | None = None) -> Evaluation:
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, description=__doc__)
    parser.add_argument("models", nargs="+", help="Hub ids, local folders, or folders of runs (all their agents)")
    parser.add_class_arguments(Evaluation, skip={"models"})
    try:
        return Evaluation(**vars(parser.instantiate(parser.parse_args(argv))))
    except ArgumentError as error:
        raise UserError(" ".join(str(error).split())) from None


def measure(texts: list[str], rewards: list[float], answers: Responses, kl_coef: float) -> dict[str, float]:
    """Each metric of docs/metrics.md with `METRIC_ci`, the half-width of its 95 % interval."""
    combined = [reward - kl_coef * kl for reward, kl in zip(rewards, answers.kl, strict=True)]
    values = {"task_reward": rewards, "kl": answers.kl, "combined_reward": combined, "tokens": answers.tokens}
    row = {}
    for name, (mean, half) in {name: mean_interval(v) for name, v in values.items()}.items():
        row |= {name: mean, f"{name}_ci": half}
    for n in (1, 2):
        row[f"distinct_{n}"], row[f"distinct_{n}_ci"] = distinct_interval(texts, n)
    return row


def evaluate(settings: Evaluation) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Answers with every model.

    Returns:
        a row of metrics per model or chain, and per query its response by each of them.
    """
    device = choose_device(settings.device)
    runs = [Path(name) for name in settings.models if run_agents(Path(name))]
    first = run_config(runs[0]) if runs else {"model": {}, "task": {}, "ppo": {}}
    task = ImdbTaskConfig(**first["task"])
    task.dataset = settings.dataset or task.dataset
    task.text_column = settings.text_column or task.text_column
    task.reward_model = settings.reward_model or task.reward_model
    base_name = settings.base or first["model"].get("name") or settings.models[0]
    kl_coef = first["ppo"].get("init_kl_coef", 0.3) if settings.kl_coef is None else settings.kl_coef
    base_name, task = resolve_tiny_names(base_name, task)

    base, tokenizer = load_policy(ModelConfig(name=base_name))
    base = base.to(device).eval()
    reward = PositiveLogit(task.reward_model, task.reward_batch_size, device)
    prompts = queries(task, settings.split, tokenizer, settings.seed)["prompt"][: settings.prompts]
    templates = RolePrompts(task.pioneer_prompt, task.observer_prompt)

    folders: dict[str, str] = {"base": base_name}
    for name in settings.models:
        agents = {agent: str(folder) for agent, folder in run_agents(Path(name)).items()}
        folder = resolve_tiny_names(name, task)[0]
        folders |= agents or ({name: folder} if folder != base_name else {})
    rows: list[dict[str, Any]] = []
    answers: dict[str, list[str]] = {}
    models = {
        name: load_policy(ModelConfig(name=folder), merge=False)[0].to(device) for name, folder in folders.items()
    }

    def answer(name: str, model: str, role: int, references: list[str] | None) -> None:
        def render(read: Sequence[str | None]) -> list[str]:
            return [templates.render(role, {"prompt": p}, r) for p, r in zip(prompts, read, strict=True)]

        if references is None:
            texts = render([None] * len(prompts))
        else:
            room = (context_length(models[model]) or sys.maxsize) - settings.sampling.max_new_tokens
            texts = fit_responses(render, references, partial(encode, tokenizer), room)
        got = respond(models[model], base, tokenizer, texts, settings.sampling, settings.batch_size, settings.seed)
        rewards = reward(prompts=prompts, completions=got.completions)
        rows.append({"name": name, **measure(got.completions, rewards, got, kl_coef)})
        answers[name] = got.completions
        print(text_row(rows[-1]), flush=True)

    print(f"{len(prompts)} queries, eta = {kl_coef:g}; mean +- half-width of the 95 % interval")
    print(f"{'':30}" + "".join(f"{title:>19}" for title in METRICS.values()))
    for name in models:
        answer(name, name, 0, None)
    for run in runs:
        for pioneer, observer in itertools.permutations(run_agents(run), 2):
            answer(f"{observer} after {pioneer.split('/')[-1]}", observer, 1, answers[pioneer])
    shown = [{"query": p, **{name: texts[i] for name, texts in answers.items()}} for i, p in enumerate(prompts)]
    return rows, shown[: settings.samples]


def text_row(row: dict[str, Any]) -> str:
    cells = (f"{row[metric]:.3f} +- {row[f'{metric}_ci']:.3f}" for metric in METRICS)
    return f"{row['name']:30}" + "".join(f"{cell:>19}" for cell in cells)


def markdown(rows: list[dict[str, Any]], samples: list[dict[str, Any]]) -> str:
    """The tables of metrics, over seeds where there are several, and of sample texts."""

    def table(rows: list[dict[str, Any]]) -> str:
        return markdown_table(
            [
                {
                    "model": row["name"],
                    **{title: f"{row[m]:.3f} ± {row[f'{m}_ci']:.3f}" for m, title in METRICS.items()},
                }
                for row in rows
            ]
        )

    text = f"Mean ± half-width of the 95 % interval over queries.\n\n{table(rows)}\n{markdown_table(samples)}"
    groups = over_seeds(rows)
    return f"{OVER_SEEDS}{table(groups)}\n{text}" if groups else text


def run() -> None:
    settings = read_command_line()
    rows, samples = evaluate(settings)
    folder = new_folder(settings.output, "evaluation")
    (folder / "evaluation.json").write_text(json.dumps({"rows": rows, "samples": samples}, indent=2), encoding="utf-8")
    (folder / "evaluation.md").write_text(markdown(rows, samples), encoding="utf-8")
    plot_bars(over_seeds(rows) or rows, METRICS, folder / "evaluation.png")
    for sample in samples:
        print(f"\n{one_line(sample['query'])}")
        print("\n".join(f"  {name:30}{one_line(text)}" for name, text in sample.items() if name != "query"))
    print(f"\nTables and figure are in {folder}")


if __name__ == "__main__":
    main(run)
