"""Means over seeds, and their 95 % intervals by Student's t."""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class Spread(NamedTuple):
    """Means over seeds, and half the width of their 95 % intervals (NaN: only one seed)."""

    mean: Float[np.ndarray, "*shape"]
    half: Float[np.ndarray, "*shape"]


def over_seeds(values: Float[np.ndarray, "seeds *shape"]) -> Spread:
    """The mean over the first axis and half of its 95 % interval, by Student's t."""
    n, mean = len(values), values.mean(axis=0)
    if n == 1:
        return Spread(mean, np.full_like(mean, np.nan))
    return Spread(mean, student_t(n - 1) * values.std(axis=0, ddof=1) / math.sqrt(n))


@cache
def student_t(freedom: int) -> float:
    """The t that a variable of so many degrees of freedom exceeds in size in 5 of 100 cases."""
    low, high = 1.9, 13.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return (low + high) / 2


def _within(t: float, freedom: int) -> float:
    """P(|T| < t), by the finite series for whole degrees (Abramowitz and Stegun, 26.7.3-4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, freedom + 1, 2):  # cos^(k - 2) and its coefficient
        total += term
        term *= cosine**2 * (k - 1) / k
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
