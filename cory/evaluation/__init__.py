"""Held-out evaluation of any `Task`: see `evaluator.py`."""

from cory.evaluation.evaluator import BEST_OF_2, RESPONSES, TITLES, Evaluation, Evaluator, evaluate, read_responses
from cory.evaluation.responses import Responses, answer, respond

__all__ = [
    "BEST_OF_2", "RESPONSES", "TITLES", "Evaluation", "Evaluator", "Responses", "answer", "evaluate", "read_responses",
    "respond",
]  # fmt: skip
