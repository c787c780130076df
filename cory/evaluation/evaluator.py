"""Held-out evaluation of any `Task`: every model alone, the agents of a run in a chain, one agent as its own observer.

* solo: the model answers the query.
* joint, `B after A`: B, as observer, reads A's response to the same query and answers.
* compute-matched, `A after itself`: the agent of a PPO run, or the base, answers twice, the second time as its own
  observer, so that a chain of two agents is compared with two calls of one.

KL is to the base model under the same prompt: the query for solo rows, the observer's prompt for the others. Each model
is loaded with its run's settings (chat template, quantization, remote code) and reads its run's prompts.
"""

import itertools
import json
import math
import shutil
import statistics
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from cory.cli.settings import read_settings
from cory.config import Config, ModelConfig, SamplingConfig, changed
from cory.errors import expect
from cory.evaluation.overlap import TrainedOn, in_words, shares_in_training
from cory.evaluation.responses import Responses, answer
from cory.evaluation.settings import EvaluationConfig, agent_models, output_folder, run_agents, run_config
from cory.metrics import distinct_interval, mean_interval, pass_at_k
from cory.models.load import ModelPool, choose_device
from cory.prompts import RolePrompts, query_text, text_of
from cory.report import write_evaluation_report
from cory.run.identity import check_models, model_identity, policy_models
from cory.run.output import replace_text
from cory.run.summary import text_table
from cory.task import Task

TITLES = {
    "task_reward": "task reward", "kl": "KL to base (nats)", "combined_reward": "combined reward",
    "distinct_1": "distinct-1", "distinct_2": "distinct-2", "tokens": "length (tokens)",
    "perplexity": "perplexity under base",
}  # fmt: skip
LOCAL = ("models", "base", "task", "model", "device", "output")  # settings that may name folders of a machine
SECONDS_BETWEEN_LINES = 30
RESPONSES = "responses.jsonl"  # a line for each model and query


class Candidate(NamedTuple):
    """A model that is evaluated: its settings, the folder of an adapter on it, its base, the task with its prompts."""

    model: ModelConfig
    adapter: Path | None
    base: ModelConfig
    task: Task


def read_responses(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The records of an evaluation's folder, by model and query, without a line cut short by a kill."""
    found = {}
    for line in (folder / RESPONSES).read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            record = json.loads(line)
            found[record["model"], record["query"]] = record
    return found


def reward_differs(run: Path, made_of: Mapping[str, Any], task: Task) -> str:
    """A warning if the reward of `task` is not that of the run with this fingerprint, else nothing."""
    mine, trained = task.fingerprint_of_reward(), made_of.get("reward")
    if made_of and trained != mine["reward"]:
        return f"Warning: {run} was trained on the reward {trained}, not {mine['reward']}."
    if made_of and made_of.get("reward_sha256") != mine["reward_sha256"]:
        return f"Warning: the source of the reward {trained} has changed since {run} was trained."
    recorded = made_of.get("models") or {}
    for key, model in task.models().items():
        if recorded.get(key) and recorded[key]["identity"] != model["identity"]:
            return f"Warning: {run} was trained with {key} {recorded[key]['name']!r}, not {model['name']!r}."
    return ""


class Evaluator:
    """Answers every query with every model, in chunks of queries, and stores what is finished.

    `kind` is the runs' configuration class, which knows the task's built-in models.
    """

    def __init__(self, task: Task, settings: EvaluationConfig, kind: type[Config] = Config) -> None:
        self.settings, self.task = settings, task
        device = choose_device(settings.device)
        runs = {Path(name): run_config(kind, Path(name)) for name in settings.models if run_agents(Path(name))}
        self.runs = runs
        different = "runs with folders of different names, which name the rows"
        expect(len({run.name for run in runs}) == len(runs), "models", different, list(map(str, runs)))
        first = next(iter(runs.values()), None) or kind()
        self.kl_coef = (first.ppo.init_kl_coef if runs else 0.3) if settings.kl_coef is None else settings.kl_coef
        self.sampling = first.sampling.after_training(settings.sampling)
        longest, stop = self.sampling.max_new_tokens, self.sampling.stop
        self.greedy = SamplingConfig(1, longest, top_k=1, stop=stop)  # the likeliest token is the only one left
        model = first.of_agent(0).model if runs else ModelConfig(settings.models[0])
        name, revision = (settings.base, None) if settings.base else (model.name, model.revision)
        base = changed(replace(model, name=first.resolve(name), revision=revision), settings.model)
        self.candidates = {"base": Candidate(base, None, base, self._as_read_by(next(iter(runs)))[0] if runs else task)}
        self.chains: dict[str, tuple[str, str, int]] = {}  # read (a model or a chain), who answers, role
        if runs:
            self.chains["base after itself"] = ("base", "base", 1)
        self.models = task.models()  # what identifies the models of this evaluation
        self.models["base"] = {"name": base.name, "identity": model_identity(base.name, base.revision)}
        for name in settings.models:
            path = Path(name)
            if path in runs:
                self._add_run(path, runs[path])
            elif first.resolve(name) != base.name:
                model = replace(base, name=first.resolve(name), revision=None)
                self.candidates[name] = Candidate(model, None, base, task)
                self.models[name] = {"name": model.name, "identity": model_identity(model.name)}
        self.pool = ModelPool(device)
        count = min(settings.queries or len(task.dataset), len(task.dataset))
        self.columns = task.dataset[:count]
        self.query_texts = [query_text(prompt) for prompt in self.columns["prompt"]]
        self.done: dict[tuple[str, int], dict[str, Any]] = {}
        self.last_line = time.monotonic()  # when progress was printed

    def _as_read_by(self, run: Path) -> tuple[Task, dict[str, Any]]:
        """The task with the prompts that a run recorded, and the run's fingerprint."""
        made_of = read_settings(run).get("fingerprint") or {}
        return (replace(self.task, prompts=RolePrompts(**made_of["prompts"])) if made_of else self.task), made_of

    def _add_run(self, run: Path, config: Config) -> None:
        """Adds a run's agents and their chains, with the run's prompts; warns if it was trained on another reward."""
        task, made_of = self._as_read_by(run)
        agents = agent_models(run_agents(run), config, self.settings.model)
        first = self.candidates["base"].model
        recorded = made_of.get("models") or {}
        adapters = any(adapter for _, adapter, _ in agents.values())
        if adapters or not self.settings.base:  # else the run's own base is not loaded
            check_models(recorded, policy_models(config), str(run))
        check_models(recorded, self.task.models(), str(run), chosen=True)
        if differs := reward_differs(run, made_of, self.task):
            print(differs, file=sys.stderr)
        for agent, (model, adapter, base) in agents.items():
            # Agents of different models may differ in their vocabulary: each one's KL is to its own base.
            own = base if config.agents and not self.settings.base else first
            if replace(own, chat_template=first.chat_template) != first:  # a template changes prompts, not weights
                shown = f"base of {agent}"
                known = any(c.model == own for c in self.candidates.values())
                self.candidates |= {} if known else {shown: Candidate(own, None, own, task)}
            self.candidates[agent] = Candidate(model, adapter, own, task)
        names = list(agents)
        for pioneer, observer in itertools.permutations(names, 2):
            self.chains[f"{observer} after {pioneer.split('/')[-1]}"] = (pioneer, observer, 1)
        if len(names) == 1:
            self.chains[f"{names[0]} after itself"] = (names[0], names[0], 1)
        for start in range(len(names) if 2 < config.cory.roles <= len(names) else 0):  # longer chains, role by role
            read, so_far = names[start], names[start].split("/")[-1]
            for place in range(1, config.cory.roles):
                agent = names[(start + place) % len(names)]
                name, so_far = f"{agent} after {so_far}", f"{agent.split('/')[-1]} after {so_far}"
                self.chains[name], read = (read, agent, place), name

    def run(self, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """The records of every model and chain, in the order of the queries; those in the folder are not made again."""
        with (folder / RESPONSES).open("a", encoding="utf-8") as file:
            self.done = read_responses(folder)
            if file.tell():
                file.write("\n")  # ends a line that was cut short; empty lines are skipped
            for name in self.candidates:
                self._answer(name, name, None, 0, file)
            for name, (pioneer, observer, role) in self.chains.items():
                self._answer(name, observer, pioneer, role, file)
        count = len(self.columns["prompt"])
        return {name: [self.done[name, i] for i in range(count)] for name in [*self.candidates, *self.chains]}

    def _answer(self, name: str, model: str, pioneer: str | None, role: int, file: TextIO) -> None:
        """Adds the missing responses of the row `name`: by `model` alone, or in a `role` after `pioneer`."""
        n, count = self.settings.samples, len(self.columns["prompt"])
        size = max(1, self.settings.batch_size // n)
        chunks = [list(range(start, min(start + size, count))) for start in range(0, count, size)]
        # One that was stored in part is answered whole, as its samples are drawn together.
        missing = [index for index in chunks if any((name, i) not in self.done for i in index)]
        if not missing:
            return
        candidate = self.candidates[model]
        with self.pool.loaded(*candidate[:3]) as loaded:
            for index in missing:
                sampled, rewards = self._respond(candidate, loaded, index, pioneer, role, n, self.sampling)
                rows = [slice(place * n, (place + 1) * n) for place in range(len(index))]
                records: list[dict[str, Any]] = [
                    {"model": name, "query": i, "rewards": rewards[at], "kl": sampled.kl[at],
                     "base_nll": sampled.base_nll[at], "tokens": sampled.tokens[at],
                     "completions": sampled.completions[at], "read": pioneer, "prompt": sampled.prompts[at.start],
                     "token_texts": sampled.token_texts[at.start], "log_ratios": sampled.log_ratios[at.start]}
                    for i, at in zip(index, rows, strict=True)
                ]  # fmt: skip
                if self.settings.greedy:
                    best, best_rewards = self._respond(candidate, loaded, index, pioneer, role, 1, self.greedy)
                    for record, text, reward in zip(records, best.completions, best_rewards, strict=True):
                        record |= {"greedy": text, "greedy_reward": reward}
                for record in records:
                    if (name, record["query"]) not in self.done:
                        self.done[name, record["query"]] = record
                        file.write(json.dumps(record) + "\n")
                file.flush()
                self._show_progress(name, index[-1] + 1, count)

    def _show_progress(self, name: str, done: int, count: int) -> None:
        """Counts in a terminal; elsewhere, prints a line when a row is complete, and in long ones twice a minute."""
        if sys.stderr.isatty():
            print(f"\r{name}: {done}/{count} queries ", end="", file=sys.stderr)
        elif done == count or time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            print(f"{name}: {done}/{count} queries", flush=True)
            self.last_line = time.monotonic()

    def _respond(
        self,
        candidate: Candidate,
        loaded: Any,
        index: list[int],
        pioneer: str | None,
        role: int,
        n: int,
        sampling: SamplingConfig,
    ) -> tuple[Responses, list[float]]:
        """n responses to each of the queries `index`, query by query, and their rewards."""
        columns = {name: [values[i] for i in index for _ in range(n)] for name, values in self.columns.items()}
        read = None
        if pioneer is not None:
            records = [self.done[pioneer, i] for i in index]
            read = [t for r in records for t in ([r["greedy"]] if sampling is self.greedy else r["completions"])]
        with torch.autocast(self.pool.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16"):
            return answer(
                loaded, candidate.task, columns, sampling, read, role, batch_size=self.settings.batch_size,
                # The same samples, however often it is interrupted; of each role its own random numbers, or an observer
                # would draw from those that drew what it reads.
                seed=self.settings.seed * 1_000_003 + index[0] + role * 2**64,
                chat_template=candidate.model.chat_template,
            )  # fmt: skip


def best_of_2(rewards: Sequence[float]) -> float:
    """Mean of the larger reward over all pairs: the expected reward of the better of two responses.

    >>> best_of_2([1.0, 2.0, 0.0])
    1.6666666666666667
    """
    ranked = sorted(rewards)
    return sum(i * reward for i, reward in enumerate(ranked)) / math.comb(len(ranked), 2)


def summarise(
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    query_texts: Sequence[str],
    task: Task,
    settings: EvaluationConfig,
    kl_coef: float,
) -> list[dict[str, Any]]:
    """A row per model: each number of docs/metrics.md with `NAME_ci`, the half-width of its 95 % interval.

    Args:
        records: by model, one for each query. query_texts: by which intervals cluster (`query_text`).
    """
    mean, rows = statistics.fmean, []
    for name, queries in records.items():
        completions = [text for r in queries for text in r["completions"]]
        asked = [query for query, r in zip(query_texts, queries, strict=True) for _ in r["completions"]]
        values = {
            "task_reward": [mean(r["rewards"]) for r in queries],
            "kl": [mean(r["kl"]) for r in queries],
            "combined_reward": [mean(r["rewards"]) - kl_coef * mean(r["kl"]) for r in queries],
            "tokens": [mean(r["tokens"]) for r in queries],
        }
        if settings.samples > 1:
            values["best_of_2"] = [best_of_2(r["rewards"]) for r in queries]
        for k in settings.ks:
            values[f"pass@{k}"] = [pass_at_k(len(r["rewards"]), r["rewards"].count(1.0), k) for r in queries]
        if settings.greedy:
            values["greedy"] = [r["greedy_reward"] for r in queries]
        for metric, measure in task.metrics.items():
            values[metric] = [mean(map(measure, r["completions"])) for r in queries]
        if others := records.get(queries[0].get("read") or ""):
            pairs = [
                zip(own["completions"], r["completions"], strict=True) for own, r in zip(queries, others, strict=True)
            ]
            values["copied"] = [mean(float(own.strip() == read.strip()) for own, read in pair) for pair in pairs]
        row: dict[str, Any] = {"name": name}
        for key, numbers in values.items():
            row[key], row[f"{key}_ci"] = mean_interval(numbers, query_texts)
        nats, half = mean_interval([sum(r["base_nll"]) / sum(r["tokens"]) for r in queries], query_texts)
        row["perplexity"], row["perplexity_ci"] = math.exp(nats), math.exp(nats) * half
        for n in (1, 2):
            row[f"distinct_{n}"], row[f"distinct_{n}_ci"] = distinct_interval(completions, n, asked)
        rows.append(row)
    return rows


def columns_shown(task: Task, settings: EvaluationConfig) -> dict[str, str]:
    """The metrics of the tables and their titles: pass@k where it is asked for, else reward, KL and diversity."""
    own = {name: name for name in task.metrics}
    passes = {name: name for name in [*(f"pass@{k}" for k in settings.ks), *(["greedy"] if settings.greedy else [])]}
    if settings.ks:
        return {**passes, **own, "tokens": "tokens", "kl": "KL to base"}
    return {**TITLES, **({"best_of_2": "task reward, best of 2"} if settings.samples > 1 else {}), **own}


class Evaluation(NamedTuple):
    """Its folder, and a row per model and chain: `name`, and each METRIC with its interval's half-width METRIC_ci."""

    folder: Path
    rows: list[dict[str, Any]]


def evaluate(
    models: Sequence[str | Path],
    task: Task,
    settings: EvaluationConfig | None = None,
    kind: type[Config] = Config,
    name: str = "evaluation",
    trained_on: TrainedOn | None = None,
) -> Evaluation:
    """Evaluates models on a held-out task, prints the table, and writes rows and responses into a folder.

    Args:
        models: Hub ids, local folders, or folders of runs (all their agents). task: on held-out queries.
        settings: default `EvaluationConfig()`; its `models` are ignored.
        kind: the configuration class of the runs, if their task has one.
        name: of the folder if `settings.output` is null.
        trained_on: the rows that the runs were trained on, as `task.dataset` of their task, or a function that makes
            them from a run's configuration: the share of held-out queries among them is reported.

    Raises a UserError: a model or a run cannot be loaded, or the folder holds an evaluation of other settings.
    """
    settings = replace(settings or EvaluationConfig(), models=[str(model) for model in models])
    settings.check()
    evaluator = Evaluator(task, settings, kind)
    queries = list(map(text_of, evaluator.columns["prompt"]))
    reward = task.fingerprint_of_reward()["reward_sha256"]
    texts = evaluator.query_texts
    shares = shares_in_training(evaluator.runs, texts, trained_on)
    with ExitStack() as locks:
        folder = output_folder(settings, name, reward, evaluator.models, queries, locks)
        rows = summarise(evaluator.run(folder), texts, task, settings, evaluator.kl_coef)
        titles = {key: title for key, title in columns_shown(task, settings).items() if all(key in row for row in rows)}
        each, heat = settings.samples, evaluator.sampling.temperature
        said = f"{in_words(texts, shares)}, {each} response{'s' * (each > 1)} each, temperature {heat:g}, "
        said += f"eta = {evaluator.kl_coef:g}"
        how = f"{said}; mean ± half-width of the 95 % interval over queries"
        print(f"\n{textwrap.fill(how, shutil.get_terminal_size().columns)}\n{text_table(rows, titles)}")
        shown = {key: value for key, value in asdict(settings).items() if key not in LOCAL}
        overlap = {"distinct_queries": len(set(texts)), "in_training": shares}
        result = {"settings": shown, "said": said, **overlap, "titles": titles, "queries": queries, "rows": rows}
        replace_text(folder / "evaluation.json", json.dumps(result, indent=2))
        write_evaluation_report(folder)
    return Evaluation(folder, rows)
