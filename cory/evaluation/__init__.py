"""Held-out evaluation of any `Task`: `cory.evaluate` in Python, `python -m cory.evaluation` as a command.

The settings import without torch, so nothing is imported here.
"""
