"""Held-out evaluation of any `Task`: see `evaluator.py`."""

from cory.evaluation.evaluator import RESPONSES, TITLES, Evaluation, Evaluator, evaluate, read_responses
from cory.evaluation.responses import Responses, respond

__all__ = ["RESPONSES", "TITLES", "Evaluation", "Evaluator", "Responses", "evaluate", "read_responses", "respond"]
