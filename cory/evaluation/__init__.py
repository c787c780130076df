"""Held-out evaluation of any `Task`: see `evaluator.py`."""

from cory.evaluation.evaluator import RESPONSES, TITLES, Evaluation, Evaluator, evaluate, read_responses
from cory.evaluation.responses import Responses, answer, reply, respond

__all__ = [
    "RESPONSES", "TITLES", "Evaluation", "Evaluator", "Responses", "answer", "evaluate", "read_responses",
    "reply", "respond",
]  # fmt: skip
