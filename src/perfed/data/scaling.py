"""How inputs are brought to a common scale: (x - shift) * scale, before a model sees them."""

from dataclasses import dataclass
from typing import Any, Literal, Self, final

import numpy as np
from jaxtyping import Float, Int, Shaped

Standardise = Literal["none", "unit", "feature", "client"]


@final
@dataclass(frozen=True)
class Scaling:
    """One (shift, scale) for everyone, or one for each client, stacked along the first axis."""

    shift: Float[Any, "one_or_clients ..."]
    scale: Float[Any, "one_or_clients ..."]

    @classmethod
    def fitted(
        cls,
        kind: Standardise,
        x: Shaped[np.ndarray, "examples ..."],
        size: Int[np.ndarray, " clients"],
        limits: tuple[float, float] | None = None,
    ) -> Self | None:
        """What the training data, client after client, ask for; None if nothing is to be done.

        `unit` maps the inputs' known limits, or else each feature's range, to 0..1. `feature` gives
        every feature mean 0 and variance 1 over the training data of all clients, `client` over
        each client's own. A feature that never varies becomes 0.
        """
        if kind == "none":
            return None
        if kind == "unit":
            low, high = limits or (x.min(axis=0), x.max(axis=0))
            return cls._of(np.asarray(low)[None], np.subtract(high, low, dtype=np.float64)[None])
        if kind == "feature":
            mean, std = _moments(x)
            return cls._of(mean[None], std[None])
        # One client at a time into float32: for many clients of many features this is large.
        shift = np.empty((len(size), *x.shape[1:]), np.float32)
        scale = np.empty_like(shift)
        for i, own in enumerate(np.split(x, np.cumsum(size)[:-1])):
            mean, std = _moments(own)
            shift[i], scale[i] = mean, _inverse(std)
        return cls(shift, scale)

    @classmethod
    def _of(cls, shift: np.ndarray, spread: np.ndarray) -> Self:
        return cls(shift.astype(np.float32), _inverse(spread).astype(np.float32))

    def of_client(self, client: int) -> "Scaling":
        """What one client needs of it."""
        shift, scale = (
            np.asarray(own_row(part, client))[None] for part in (self.shift, self.scale)
        )
        return Scaling(shift, scale)

    def __call__(self, x: Shaped[Any, "examples ..."], client: int) -> Float[Any, "examples ..."]:
        """One client's inputs, scaled."""
        shift, scale = own_row(self.shift, client), own_row(self.scale, client)
        return (np.asarray(x, np.float32) - shift) * scale


def own_row(rows: Any, client: Any) -> Any:
    """A client's row, where each has its own, or else the one row for all."""
    return rows[client if len(rows) > 1 else 0]


def _inverse(spread: np.ndarray) -> np.ndarray:
    return np.asarray(1.0 / np.where(spread > 0, spread, 1.0))


def _moments(x: Shaped[np.ndarray, "examples ..."]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each feature, without a float copy of all the rows."""
    n, step = len(x), 4096
    blocks = [slice(i, i + step) for i in range(0, n, step)]
    mean = sum(x[b].sum(axis=0, dtype=np.float64) for b in blocks) / n
    variance = sum(((x[b] - mean) ** 2).sum(axis=0) for b in blocks) / n
    return np.asarray(mean), np.sqrt(variance)
