"""Numbers with an interval, and the intervals of means over sampled examples or clients."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import stats


class Estimate(NamedTuple):
    """A number, and an interval it lies in."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> "Estimate":
        """A number without sampling error."""
        return cls(float(value), float(value), float(value))

    def root(self) -> "Estimate":
        """The square root."""
        return Estimate(*(float(np.sqrt(max(part, 0.0))) for part in self))


def mean_estimate(
    seen: Float[np.ndarray, " some"],
    n: int,
    upper: Float[np.ndarray, " some"] | None = None,
    doubt: float = 0.05,
) -> Estimate:
    """The mean of n values, from some of them drawn without replacement.

    Args:
        seen: the values that were drawn.
        n: how many there are.
        upper: an upper bound of each, where it is not the value itself.
        doubt: the probability that the interval misses the mean.
    """
    mean = float(seen.mean())
    low = mean - _half_width(seen, n, doubt)
    upper = seen if upper is None else upper
    return Estimate(mean, low, float(upper.mean()) + _half_width(upper, n, doubt))


def _half_width(seen: Float[np.ndarray, " some"], n: int, doubt: float) -> float:
    """Half the width of Student's interval, with the correction for a finite population."""
    k = len(seen)
    if k == n:
        return 0.0
    if k < 2:
        return float("inf")
    error = seen.std(ddof=1) / np.sqrt(k) * np.sqrt(1 - k / n)
    return float(stats.t.ppf(1 - doubt / 2, k - 1) * error)


def largest(estimates: Sequence[Estimate]) -> Estimate:
    """The largest of several numbers, each in its interval."""
    return Estimate(*(max(ends) for ends in zip(*estimates, strict=True)))


def smallest(estimates: Sequence[Estimate]) -> Estimate:
    """The smallest of several numbers, each in its interval."""
    return Estimate(*(min(ends) for ends in zip(*estimates, strict=True)))
