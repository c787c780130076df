"""The statistics of an update, as metrics.jsonl records them."""

from dataclasses import dataclass, fields


@dataclass(kw_only=True)
class UpdateStats:
    """Statistics of one rollout's part in an update; names and formulas are those of
    docs/metrics.md.

    `kl` and `response_tokens` are the rollout's own. The others are of the whole update, the same
    for all its rollouts.
    """

    kl: float
    kl_coef: float
    entropy: float
    policy_loss: float
    value_loss: float | None = None  # PPO only
    clip_fraction: float
    gradient_norm: float
    skipped_steps: int
    dropped_steps: int
    response_tokens: float
    engine_difference: float | None = None  # where an engine has sampled

    def metrics(self) -> dict[str, float]:
        """The statistics by name, without those that this update does not have."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: float(value) for name, value in values.items() if value is not None}
