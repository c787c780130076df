"""Held-out evaluation of any `Task`: `cory.evaluate` in Python, `python -m cory.evaluation` as a command.

This file imports nothing, so that the package's settings can be imported without torch.
"""
