"""Settings of an evaluation. Importing them does not import torch."""

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from cory.config import Settings
from cory.errors import UserError


@dataclass
class EvaluationConfig(Settings):
    """What to compare, and on what.

    Args:
        models: Hub ids, local folders, or folders of runs (all their agents).
        base: The model that KL is measured to, shown first. null: the first run's, or the first
            model.
        task: Changes to the first run's `task` block: --task.dataset, --task.reward_model, ...
        model: Changes to the `model` block of every model: --model.chat_template,
            --model.quantization, ...
        sampling: Changes to the first run's `sampling` block: --sampling.temperature,
            --sampling.max_new_tokens, ...
        split: The held-out split. null: that of the task, by default test.
        queries: Number of queries, from the first. 0: all.
        samples: Responses sampled for each query.
        ks: The k of pass@k, at most `samples`; there is none where a reward is neither 0 nor 1. Empty: none.
        greedy: Also answer each query once with the likeliest tokens.
        only: The one of the runs whose rows are made. The first run still decides on base, task and
            sampling, so that the rows stand beside those of an earlier evaluation of it. null: all.
        kl_coef: eta of the combined reward. null: the first run's initial KL coefficient, or 0.3.
        batch_size: Responses that are sampled at a time.
        precision: fp32, or bf16: autocast, faster where the hardware has it; weights keep their
            type.
        seed: Of sampling and, on IMDB, of the lengths of queries.
        device: auto, cpu, cuda or cuda:N.
        output: Folder of the results, new or empty. null: a new one under runs/, by the names of the
            models.
        shown: Queries whose responses are shown side by side.
    """

    models: list[str] = Field(default_factory=list)
    base: str | None = None
    task: dict[str, Any] = Field(default_factory=dict)
    model: dict[str, Any] = Field(default_factory=dict)
    sampling: dict[str, Any] = Field(default_factory=dict)
    split: str | None = None
    queries: NonNegativeInt = 500
    samples: PositiveInt = 1
    ks: list[int] = Field(default_factory=list)
    greedy: bool = False
    only: str | None = None
    kl_coef: float | None = None
    batch_size: PositiveInt = 100
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: NonNegativeInt = 0
    device: str = "auto"
    output: str | None = None
    shown: NonNegativeInt = 5

    def check(self) -> None:
        for k in self.ks:
            if not 1 <= k <= self.samples:
                raise UserError(
                    f"pass@k: expected k from 1 to the number of samples, {self.samples}, got {k}"
                )
