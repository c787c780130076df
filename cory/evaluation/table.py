"""The table of an evaluation: one row per model and chain. Formulas are in docs/metrics.md."""

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from cory.config import EvaluationConfig
from cory.identity import row_keys
from cory.metrics import TITLES, distinct_interval, mean_interval, pass_at_k
from cory.rewards import measure_responses
from cory.task import Task

Records = Sequence[Mapping[str, Any]]  # the records of one model or chain, one per query

SHOWN = (
    "task_reward",
    "team_reward",
    "chain_kl",
    "chain_sampled_kl",  # only if a run penalizes it
    "combined_reward",
    "distinct_1",
    "distinct_2",
    "tokens",
    "perplexity",
    "best_of_2",  # only with several samples
)
SHOWN_WITH_PASSES = ("team_reward", "tokens", "chain_kl")  # besides pass@k
# The cost of a query, shown if the evaluation has chains.
COSTS = ("calls", "tokens_read", "tokens_written", "chain_kl", "kl")


def titles(
    task: Task, settings: EvaluationConfig, rows: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Returns the metrics that some row has, and their titles.

    These are pass@k if it was requested and rewards are 0 or 1, otherwise reward, KL and diversity.
    """
    measured = {metric for row in rows for metric in row}
    if any(f"pass@{k}" in measured for k in settings.ks):
        shown = {f"{kind}@{k}": f"{kind}@{k}" for kind in ("pass", "maj") for k in settings.ks}
        if settings.greedy:
            shown["greedy"] = "greedy"
        shown |= _titled(SHOWN_WITH_PASSES)
    else:
        shown = _titled(SHOWN)
        if not task.rewards:  # the team reward is the only one
            measured -= {"task_reward", "best_of_2"}
    shown |= {name: name for name in [*task.reward_metrics, *task.metrics]}
    return {metric: title for metric, title in shown.items() if metric in measured}


def cost_titles() -> dict[str, str]:
    """Returns the metrics of the cost table and their titles."""
    return _titled(COSTS)


def _titled(metrics: Sequence[str]) -> dict[str, str]:
    return {metric: TITLES[metric] for metric in metrics}


def table_rows(
    records: Mapping[str, Records],
    columns: Mapping[str, Sequence[Any]],
    task: Task,
    settings: EvaluationConfig,
    kl_coef: float,
) -> list[dict[str, Any]]:
    """Returns one row per model: the metrics of docs/metrics.md, each with `NAME_ci`, its 95 % interval's half-width.

    Intervals cluster by query (`row_keys`). `NAME_ci` is None if there is a single query, or if the interval would
    reach below 0 although no value does.

    Args:
        records: records by model, one per query.
        columns: the queries' columns, including `prompt`.
    """
    queries = row_keys(columns)
    are_zero_or_one = bool(task.rewards) and all(
        reward in (0, 1)
        for model_records in records.values()
        for record in model_records
        for reward in record["rewards"]
    )
    rows = []
    for name, model_records in records.items():
        chain = chain_of(records, model_records)
        row: dict[str, Any] = {"name": name, "calls": len(chain)}
        values = {
            **_values_by_query(chain, task, settings, kl_coef),
            **(_solved_values(model_records, task, settings) if are_zero_or_one else {}),
            **_task_values(model_records, columns, task),
        }
        for metric, by_query in values.items():
            # A metric that applies to none of a query's responses is nan for this query.
            applies = [index for index, value in enumerate(by_query) if not math.isnan(value)]
            if applies:
                numbers = [by_query[index] for index in applies]
                clusters = [queries[index] for index in applies]
                row[metric], row[f"{metric}_ci"] = mean_interval(numbers, clusters)

        nats_per_token = [
            sum(record["base_nll"]) / sum(record["tokens"]) for record in model_records
        ]
        nats, half_width = mean_interval(nats_per_token, queries)
        row["perplexity"] = math.exp(nats)
        row["perplexity_ci"] = None if half_width is None else math.exp(nats) * half_width

        completions = [text for record in model_records for text in record["completions"]]
        text_clusters = [
            query
            for query, record in zip(queries, model_records, strict=True)
            for _ in record["completions"]
        ]
        for n in (1, 2):
            row[f"distinct_{n}"], row[f"distinct_{n}_ci"] = distinct_interval(
                completions, n, text_clusters
            )

        # An interval that leaves the metric's range comes from too few queries.
        unsigned = [
            metric
            for metric, by_query in values.items()
            if metric in row and not any(value < 0 for value in by_query)
        ]
        for metric in [*unsigned, "perplexity", "distinct_1", "distinct_2"]:
            half_width = row[f"{metric}_ci"]
            if half_width is not None and half_width > row[metric]:
                row[f"{metric}_ci"] = None
        rows.append(row)
    return rows


def chain_of(records: Mapping[str, Records], row_records: Records) -> list[Records]:
    """Returns the records of all model calls (answers) that led to a row's responses, the last call first.

    Args:
        records: records by model.
        row_records: the row's records.
    """
    chain = [row_records]
    while chain[-1][0]["read"] in records:
        chain.append(records[chain[-1][0]["read"]])
    return chain


def _values_by_query(
    chain: Sequence[Records], task: Task, settings: EvaluationConfig, kl_coef: float
) -> dict[str, list[float]]:
    """Returns each metric's mean over samples, one per query. `chain`: see `chain_of`."""
    mean = statistics.fmean
    last_call = chain[0]
    task_rewards = [mean(record["rewards"]) for record in last_call]
    chain_kl = _summed(chain, "kl")
    earned = task_rewards
    values = {
        "task_reward": task_rewards,
        "kl": [mean(record["kl"]) for record in last_call],
        "chain_kl": chain_kl,
        "tokens": [mean(record["tokens"]) for record in last_call],
        "tokens_read": _summed(chain, "prompt_tokens"),
        "tokens_written": _summed(chain, "tokens"),
    }
    if "sampled_kl" in last_call[0]:
        values["chain_sampled_kl"] = _summed(chain, "sampled_kl")
    has_team_reward = "team_rewards" in last_call[0]
    if has_team_reward:
        team_rewards = [mean(record["team_rewards"]) for record in last_call]
        values["team_reward"] = team_rewards
        earned = [
            task_reward + team_reward
            for task_reward, team_reward in zip(task_rewards, team_rewards, strict=True)
        ]
    # If this chain does not earn the task's team reward, its combined reward cannot be compared with a full chain's.
    if has_team_reward or task.team is None:
        values["combined_reward"] = [
            reward - kl_coef * nats for reward, nats in zip(earned, chain_kl, strict=True)
        ]
    if settings.samples > 1:
        values["best_of_2"] = [best_of_2(record["rewards"]) for record in last_call]
    if len(chain) > 1:
        values["copied"] = [
            mean(
                float(text.strip() == read_text.strip())
                for text, read_text in zip(record["completions"], read["completions"], strict=True)
            )
            for record, read in zip(last_call, chain[1], strict=True)
        ]
    return values


def _summed(chain: Sequence[Records], key: str) -> list[float]:
    """Returns one value per query: the mean over samples, summed over all calls."""
    return [
        sum(statistics.fmean(record[key]) for record in calls) for calls in zip(*chain, strict=True)
    ]


def best_of_2(rewards: Sequence[float]) -> float:
    """Returns the expected reward of the better of two responses: the larger reward, averaged over all pairs.

    >>> best_of_2([1.0, 2.0, 0.0])
    1.6666666666666667
    """
    ranked = sorted(rewards)
    return sum(rank * reward for rank, reward in enumerate(ranked)) / math.comb(len(ranked), 2)


def _solved_values(
    records: Records, task: Task, settings: EvaluationConfig
) -> dict[str, list[float]]:
    """Returns pass@k, the greedy response's reward, and maj@k for each k above 1: one value per query.

    maj@k is the mean reward if k responses vote on the answer.
    """
    values = {
        f"pass@{k}": [
            pass_at_k(len(record["rewards"]), record["rewards"].count(1.0), k) for record in records
        ]
        for k in settings.ks
    }
    if settings.greedy:
        values["greedy"] = [record["greedy_reward"] for record in records]
    ks = [k for k in settings.ks if k > 1]
    if ks and task.extract is not None:
        answers = [[task.extract(text) for text in record["completions"]] for record in records]
        for k in ks:
            values[f"maj@{k}"] = [
                majority_at_k(query_answers, record["rewards"], k)
                for query_answers, record in zip(answers, records, strict=True)
            ]
    return values


def majority(answers: Sequence[Hashable | None]) -> int:
    """Returns the index of the response chosen by a vote: the first one with the most frequent answer.

    Ties go to the answer that comes first. None means no answer and casts no vote. Without any vote, the first
    response is chosen.

    >>> majority(["7", None, "5", "5"]), majority(["7", "5"]), majority([None, None])
    (2, 0, 0)
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0
    winner, _ = votes.most_common(1)[0]  # a tie goes to the answer that was counted first
    return answers.index(winner)


def majority_at_k(answers: Sequence[Hashable | None], rewards: Sequence[float], k: int) -> float:
    """Splits the responses into consecutive groups of k and returns the mean reward of the groups' choices.

    Each group chooses a response by `majority`. Responses that do not fill the last group are left out.

    >>> majority_at_k(["7", "5", "5", "3", "8", "8"], [0.0, 1.0, 1.0, 0.0, 0.0, 0.0], 3)
    0.5
    """
    starts = range(0, len(answers) - k + 1, k)
    return statistics.fmean(
        rewards[start + majority(answers[start : start + k])] for start in starts
    )


def _task_values(
    records: Records, columns: Mapping[str, Sequence[Any]], task: Task
) -> dict[str, list[float]]:
    """Returns the values of each task metric, and of each reward function if there are several, one per query.

    A value is the mean over the samples to which the metric applies; nan if it applies to none.
    """
    values: dict[str, list[float]] = {}
    for name in records[0].get("rewards_by_function", {}):
        values[f"reward_{name}"] = [
            _mean(record["rewards_by_function"][name]) for record in records
        ]
    if not task.metrics:
        return values

    # Each metric function is called once, with all of the model's responses, ordered by query.
    samples = len(records[0]["completions"])
    repeated = {
        name: [value for value in column for _ in range(samples)]
        for name, column in columns.items()
    }
    prompts = repeated.pop("prompt")
    repeated["role"] = [record["role"] for record in records for _ in range(samples)]
    completions = [text for record in records for text in record["completions"]]
    rewards = [reward for record in records for reward in record["rewards"]]
    for name, numbers in measure_responses(
        task.metrics, prompts, completions, rewards, repeated
    ).items():
        values[name] = [
            _mean(numbers[start : start + samples]) for start in range(0, len(numbers), samples)
        ]
    return values


def _mean(values: Sequence[float | None]) -> float:
    """Returns the mean of the values that apply; nan if none does."""
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    return statistics.fmean(numbers) if numbers else math.nan
