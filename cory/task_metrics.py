"""Metrics of a task's responses: numbers that are recorded, and that no agent is trained on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cory.row_functions import Columns, Function, RowFunction, numbers_per_row, responses_as_columns

# metric(prompts, completions, rewards, **columns) -> one number per completion, None where it does not apply: as a
# reward function, and `rewards` are the responses' task rewards.
MetricFunction = Function


@dataclass(frozen=True)
class Metric(RowFunction):
    """A metric function and the name by which it is recorded."""

    what: ClassVar[str] = "metric function"
    plural: ClassVar[str] = "numbers"
    function: MetricFunction
    name: str


def measure_responses(
    metrics: Mapping[str, MetricFunction],
    prompts: Sequence[Any],
    completions: Sequence[str],
    rewards: Sequence[float],
    columns: Columns,
) -> dict[str, list[float]]:
    """What each metric gives each response; nan where it does not apply.

    Raises a UserError, with the metric and the row, if one raises or does not return one finite
    number or None per completion.
    """
    if not metrics:
        return {}
    rows = responses_as_columns(prompts, completions, columns) | {"rewards": rewards}
    functions = [Metric(function, name) for name, function in metrics.items()]
    return dict(zip(metrics, numbers_per_row(functions, rows).tolist(), strict=True))
