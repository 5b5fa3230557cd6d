"""Who gains and who loses: each client's score with one model, against its score with another."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from perfed.evaluation.metrics import ERRORS, Values

# Scores come from float32: a difference up to this is rounding, and the two are a tie. Whoever has
# a tie neither gains nor loses.
TIE = 1e-6

# A loss of more than this is counted by itself; of accuracy it is one point.
POINT = 0.01


class Gain(NamedTuple):
    """What one model brings every client over another: more is better, whatever the score.

    Attributes:
        clients: each client's gain; NaN where one of its scores is not defined.
        better: how many gain.
        worse: how many lose.
        much_worse: how many lose more than `POINT`.
        defined: how many have both scores.
    """

    clients: Float[np.ndarray, " clients"]
    better: int
    worse: int
    much_worse: int
    defined: int

    @property
    def share_worse(self) -> float:
        """The part of the clients with both scores that lose; NaN: there are none."""
        return self.worse / self.defined if self.defined else float("nan")


def gain_over(own: Values, other: Values, score: str) -> Gain:
    """What `own` scores are above `other` ones, client by client; of errors, below."""
    gain = (-1.0 if score in ERRORS else 1.0) * (np.asarray(own) - np.asarray(other))
    known = gain[np.isfinite(gain)]
    return Gain(
        gain,
        int((known > TIE).sum()),
        int((known < -TIE).sum()),
        int((known < -POINT - TIE).sum()),
        len(known),
    )


def by_name(
    values: Sequence[float | None] | Values, names: Sequence[str], wanted: Sequence[str]
) -> Values:
    """The values of the clients that are wanted, in that order; NaN for those there is none of."""
    found = dict(zip(names, values, strict=True))
    known = (found.get(name) for name in wanted)
    return np.array([np.nan if value is None else value for value in known], dtype=np.float64)
