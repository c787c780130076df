"""Talking to a run's agents, in the terminal or in a web page: `python -m cory.chat RUN`."""
