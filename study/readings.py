"""Reads off a run's KL where its task reward reaches a level, in three ways. Definitions: docs/metrics.md.

The ratio of two groups' KLs gives a verdict such as "lower" or "undecided". These KLs are read off a polynomial fit.
Two other readings check the verdict: a monotone fit, and the first passage, where a running mean first reaches the
level. A verdict that the three readings do not share is called fragile.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import pandas as pd
from scipy.optimize import isotonic_regression

from study.frame import LAST

# Takes one agent's rows, one per iteration, and a level of task reward. Returns a KL; NaN if the level is not reached.
Reading: TypeAlias = Callable[[pd.DataFrame, float], float]

DEGREE = 4  # degree of the polynomials in the iteration
FEWEST = DEGREE + 2  # iterations that a fit needs: one for each coefficient
STEP = 0.1  # iterations between the points at which a fit is evaluated


def readings(length: float | None) -> dict[str, Reading]:
    """Returns the three readings by name. The first one gives the verdict.

    Args:
        length: the response length, in tokens, at which fits are evaluated. None: responses have a fixed length, which
            fits ignore.
    """
    return {
        "fit": partial(fitted_kl, length=length),
        "monotone fit": partial(monotone_kl, length=length),
        "first passage": first_passage_kl,
    }


def fitted_kl(rows: pd.DataFrame, level: float, length: float | None, rise: bool = False) -> float:
    """Reads the KL off a polynomial fit where the fitted task reward first reaches a level.

    Task reward and log KL are each modelled as a polynomial in the iteration plus a multiple of the response length,
    fitted by least squares.

    Args:
        rows: one agent's metrics, a row per iteration.
        level: the level of task reward.
        length: the response length, in tokens, at which both fits are evaluated. None: fits have no term in the length.
        rise: whether the level is relative to the fitted task reward of the first iteration.
    """
    iterations = rows["iteration"].to_numpy(float)
    grid = np.arange(iterations.min(), iterations.max() + STEP / 2, STEP)
    span = max(iterations.max(), 1.0)
    longer, at_length = _lengths(rows, length)
    # The log needs a positive KL, but KL is 0 before the first update, and a sampled estimate may be negative.
    positive = rows["kl"].to_numpy(float) > 0
    if positive.sum() < FEWEST:
        return math.nan

    def on_grid(values: np.ndarray, which: np.ndarray) -> np.ndarray:
        coefficients = _coefficients(values[which], iterations[which] / span, longer[which])
        terms = [np.vander(grid / span, DEGREE + 1), np.full(len(grid), at_length)]
        return np.column_stack(terms) @ coefficients

    reward = on_grid(rows["task_reward"].to_numpy(float), np.full(len(rows), True))
    reached = reward >= (reward[0] + level if rise else level)
    if not reached.any():
        return math.nan
    log_kl = on_grid(_log_kl(rows), positive)
    return float(np.exp(log_kl[reached.argmax()]))


def monotone_kl(rows: pd.DataFrame, level: float, length: float | None) -> float:
    """Reads the KL off a monotone fit where the fitted task reward first reaches a level.

    The effect of the response length, as fitted by `fitted_kl`, is removed from task reward and log KL. Both are then
    fitted by isotonic regression.
    """
    rows = rows.sort_values("iteration")
    iterations = rows["iteration"].to_numpy(float)
    span = max(iterations.max(), 1.0)
    longer, at_length = _lengths(rows, length)
    positive = rows["kl"].to_numpy(float) > 0
    if positive.sum() < FEWEST:
        return math.nan

    def never_falling(values: np.ndarray, which: np.ndarray) -> np.ndarray:
        coefficients = _coefficients(values[which], iterations[which] / span, longer[which])
        at_one_length = values[which] - coefficients[-1] * (longer[which] - at_length)
        return isotonic_regression(at_one_length).x

    reward = never_falling(rows["task_reward"].to_numpy(float), np.full(len(rows), True))
    if reward[-1] < level:
        return math.nan
    log_kl = never_falling(_log_kl(rows), positive)
    reached_at = iterations[(reward >= level).argmax()]
    position = np.searchsorted(iterations[positive], reached_at)
    return float(np.exp(log_kl[min(position, len(log_kl) - 1)]))


def first_passage_kl(rows: pd.DataFrame, level: float) -> float:
    """Returns the mean KL of the first ten consecutive iterations whose mean task reward reaches a level."""
    means = rows.sort_values("iteration")[["task_reward", "kl"]].rolling(LAST).mean()
    reached = means.loc[means["task_reward"] >= level, "kl"]
    return float(reached.iloc[0]) if len(reached) else math.nan


def _lengths(rows: pd.DataFrame, length: float | None) -> tuple[np.ndarray, float]:
    """Returns response lengths and `length`, both minus the mean response length; zeros if `length` is None.

    Response lengths that are all equal thus become 0, and have no effect on the fit.
    """
    lengths = rows["response_tokens"].to_numpy(float)
    if length is None:
        return np.zeros(len(lengths)), 0.0
    return lengths - lengths.mean(), length - lengths.mean()


def _log_kl(rows: pd.DataFrame) -> np.ndarray:
    """Returns the log KL; 0 where the KL is not positive, as fits skip these iterations."""
    kl = rows["kl"].to_numpy(float)
    return np.log(np.where(kl > 0, kl, 1.0))


def _coefficients(values: np.ndarray, times: np.ndarray, longer: np.ndarray) -> np.ndarray:
    """Returns a polynomial's coefficients in time, highest power first, followed by the length's coefficient."""
    terms = np.column_stack([np.vander(times, DEGREE + 1), longer])
    return np.linalg.lstsq(terms, values, rcond=None)[0]
