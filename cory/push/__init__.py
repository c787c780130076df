"""Passing a run on: its model cards and its upload. `python -m cory.push`."""
