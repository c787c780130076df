"""The statistics of an update, as metrics.jsonl records them."""

from dataclasses import dataclass, fields


@dataclass(kw_only=True)
class UpdateStats:
    """Statistics of one rollout's part in an update; names and formulas are those of
    docs/metrics.md.

    `kl` and `response_tokens` are the rollout's own: the means over its rows of a response's summed
    KL and of its length, under the policy that sampled, before the first optimizer step. The others
    are of the whole update, the same for all its rollouts; a frozen agent has none of them but
    `dropped_steps`, which is 0.
    """

    kl: float
    kl_coef: float | None = None
    entropy: float | None = None
    policy_loss: float | None = None
    value_loss: float | None = None  # PPO only
    explained_variance: float | None = None  # PPO only
    clip_fraction: float | None = None
    gradient_norm: float | None = None
    dropped_steps: int = 0
    response_tokens: float
    engine_difference: float | None = None  # where an engine has sampled

    def metrics(self) -> dict[str, float]:
        """The statistics by name, without those that this update does not have."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: float(value) for name, value in values.items() if value is not None}
