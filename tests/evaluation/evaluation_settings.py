"""Settings for evaluations."""

from cory.config import EvaluationConfig


def settings(tmp_path, **changes) -> EvaluationConfig:
    """Returns settings for an evaluation that takes seconds."""
    return EvaluationConfig(device="cpu", output=str(tmp_path / "evaluation"), **changes)
