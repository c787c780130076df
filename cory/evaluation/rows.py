"""The table of an evaluation: a row of numbers per model and chain. Formulas are in docs/metrics.md."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cory.evaluation.settings import EvaluationConfig
from cory.metrics import distinct_interval, mean_interval, pass_at_k
from cory.prompts import query_text
from cory.task import Task
from cory.task_metrics import measure_responses

TITLES = {
    "task_reward": "task reward",
    "kl": "KL to base (nats)",
    "combined_reward": "combined reward",
    "distinct_1": "distinct-1",
    "distinct_2": "distinct-2",
    "tokens": "length (tokens)",
    "perplexity": "perplexity under base",
}


def best_of_2(rewards: Sequence[float]) -> float:
    """Mean of the larger reward over all pairs: the expected reward of the better of two responses.

    >>> best_of_2([1.0, 2.0, 0.0])
    1.6666666666666667
    """
    ranked = sorted(rewards)
    return sum(rank * reward for rank, reward in enumerate(ranked)) / math.comb(len(ranked), 2)


def table_rows(
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    columns: Mapping[str, Sequence[Any]],
    task: Task,
    settings: EvaluationConfig,
    kl_coef: float,
) -> list[dict[str, Any]]:
    """A row per model: each number of docs/metrics.md with `NAME_ci`, the half-width of its 95 % interval.

    Intervals cluster by the text of the query (`query_text`).

    Args:
        records: by model, one for each query.
        columns: of the queries, `prompt` among them.
    """
    query_texts = [query_text(prompt) for prompt in columns["prompt"]]
    rows = []
    for name, of_model in records.items():
        row: dict[str, Any] = {"name": name}
        values = _values_by_query(records, of_model, settings, kl_coef) | _values_of_task(of_model, columns, task)
        for metric, by_query in values.items():
            # One that applies to none of a query's responses has no value there.
            applies = [index for index, value in enumerate(by_query) if not math.isnan(value)]
            if applies:
                numbers = [by_query[index] for index in applies]
                clusters = [query_texts[index] for index in applies]
                row[metric], row[f"{metric}_ci"] = mean_interval(numbers, clusters)

        nats_per_token = [sum(record["base_nll"]) / sum(record["tokens"]) for record in of_model]
        nats, half_width = mean_interval(nats_per_token, query_texts)
        row["perplexity"] = math.exp(nats)
        row["perplexity_ci"] = math.exp(nats) * half_width

        completions = [text for record in of_model for text in record["completions"]]
        text_clusters = [
            text for text, record in zip(query_texts, of_model, strict=True) for _ in record["completions"]
        ]
        for n in (1, 2):
            row[f"distinct_{n}"], row[f"distinct_{n}_ci"] = distinct_interval(completions, n, text_clusters)
        rows.append(row)
    return rows


def _values_by_query(
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    of_model: Sequence[Mapping[str, Any]],
    settings: EvaluationConfig,
    kl_coef: float,
) -> dict[str, list[float]]:
    """By metric, one value for each query: the mean over its samples."""
    mean = statistics.fmean
    task_rewards = [mean(record["rewards"]) for record in of_model]
    kl = [mean(record["kl"]) for record in of_model]
    values = {
        "task_reward": task_rewards,
        "kl": kl,
        "combined_reward": [reward - kl_coef * nats for reward, nats in zip(task_rewards, kl, strict=True)],
        "tokens": [mean(record["tokens"]) for record in of_model],
    }
    if settings.samples > 1:
        values["best_of_2"] = [best_of_2(record["rewards"]) for record in of_model]
    for k in settings.ks:
        values[f"pass@{k}"] = [
            pass_at_k(len(record["rewards"]), record["rewards"].count(1.0), k) for record in of_model
        ]
    if settings.greedy:
        values["greedy"] = [record["greedy_reward"] for record in of_model]
    read_row = of_model[0].get("read") or ""
    if read_row in records:
        values["copied"] = [
            mean(float(text.strip() == read_text.strip()) for text, read_text in _pairs(record, read))
            for record, read in zip(of_model, records[read_row], strict=True)
        ]
    return values


def _values_of_task(
    of_model: Sequence[Mapping[str, Any]], columns: Mapping[str, Sequence[Any]], task: Task
) -> dict[str, list[float]]:
    """By metric of the task, and by reward function where there are several, a value for each query.

    That is the mean over the samples to which it applies, nan where it applies to none.
    """
    values: dict[str, list[float]] = {}
    for name in of_model[0].get("rewards_by_function", {}):
        values[f"reward_{name}"] = [_mean(record["rewards_by_function"][name]) for record in of_model]
    if not task.metrics:
        return values

    # All responses of the model at once, query by query.
    samples = len(of_model[0]["completions"])
    repeated = {name: [value for value in column for _ in range(samples)] for name, column in columns.items()}
    prompts = repeated.pop("prompt")
    repeated["role"] = [record["role"] for record in of_model for _ in range(samples)]
    completions = [text for record in of_model for text in record["completions"]]
    rewards = [reward for record in of_model for reward in record["rewards"]]
    for name, numbers in measure_responses(task.metrics, prompts, completions, rewards, repeated).items():
        values[name] = [_mean(numbers[start : start + samples]) for start in range(0, len(numbers), samples)]
    return values


def _mean(values: Sequence[float | None]) -> float:
    """The mean of those that apply; nan if none does."""
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    return statistics.fmean(numbers) if numbers else math.nan


def _pairs(record: Mapping[str, Any], read: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Responses to a query, each with the one that it has read."""
    return list(zip(record["completions"], read["completions"], strict=True))


def titles(task: Task, settings: EvaluationConfig) -> dict[str, str]:
    """The metrics of the tables and their titles: pass@k where it is asked for, else reward, KL and diversity."""
    of_task = {name: name for name in [*task.reward_metrics, *task.metrics]}
    if settings.ks:
        passes = {f"pass@{k}": f"pass@{k}" for k in settings.ks}
        if settings.greedy:
            passes["greedy"] = "greedy"
        return {**passes, **of_task, "tokens": "tokens", "kl": "KL to base"}
    if settings.samples > 1:
        return {**TITLES, "best_of_2": "task reward, best of 2", **of_task}
    return {**TITLES, **of_task}
