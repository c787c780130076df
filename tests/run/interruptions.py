"""Interruptions of a run, in a call of its reward or after an iteration."""

import functools
import os
import signal

from cory import Callback


def after(reward, calls: int, do):
    """Wraps the reward: just before its call number `calls`, counted from 1, `do` runs."""
    count = [0]

    @functools.wraps(reward)  # so that a run records the same reward
    def wrapped(prompts, completions):
        count[0] += 1
        if count[0] == calls:
            do()
        return reward(prompts, completions)

    return wrapped


def interrupt(number=signal.SIGTERM):
    """Sends this process a signal."""
    os.kill(os.getpid(), number)


class Interrupt(Callback):
    """Sends SIGTERM at the end of an iteration, counted from 1."""

    def __init__(self, iteration):
        self.iteration = iteration

    def on_iteration_end(self, trainer, iteration):
        if iteration.index + 1 == self.iteration:
            os.kill(os.getpid(), signal.SIGTERM)
