"""Settings of evaluations."""

from cory.config import EvaluationConfig


def settings(tmp_path, **changes) -> EvaluationConfig:
    """The settings of an evaluation of seconds."""
    return EvaluationConfig(device="cpu", output=str(tmp_path / "evaluation"), **changes)
