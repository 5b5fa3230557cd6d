"""Scaling of inputs, before a model sees them: (x - shift) * scale, clipped."""

from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, final

import numpy as np
from jaxtyping import Float, Int, Shaped

Standardize = Literal["none", "unit", "feature", "client", "whole-set"]

# The names of its arrays in files.
SCALING_ARRAYS = ("shift", "scale", "clip")

ScalingArrays: TypeAlias = tuple[Any, Any, Any]

# By default, standardized inputs are clipped at this many standard deviations.
DEFAULT_CLIP = 10.0

# pFedMe's authors add this to every standard deviation.
_PUBLISHED_FLOOR = 0.001


@final
@dataclass(frozen=True)
class Scaling:
    """How inputs are scaled: one row for all clients, or one for each, along the first axis.

    Attributes:
        shift: is subtracted from the inputs.
        scale: multiplies the difference.
        clip: the largest absolute value of the result; infinite: any.
    """

    shift: Float[Any, "one_or_clients ..."]
    scale: Float[Any, "one_or_clients ..."]
    clip: Float[Any, " one_or_clients"]

    @classmethod
    def fit(
        cls,
        kind: Standardize,
        x: Shaped[np.ndarray, "examples ..."],
        size: Int[np.ndarray, " clients"],
        limits: tuple[float, float] | None = None,
        whole: Shaped[np.ndarray, "all ..."] | None = None,
        clip: float = DEFAULT_CLIP,
        ddof: int = 0,
    ) -> Self | None:
        """The scaling fitted to training data, client after client; None for kind `none`.

        `unit` maps the inputs' known limits, or else each feature's range, to 0..1. `feature` gives
        every feature mean 0 and variance 1 over the training data of all clients, `client` over
        each client's own; larger values are clipped, since a feature that hardly varies in the
        training data may be hundreds of deviations off elsewhere. A feature that never varies
        becomes 0. `whole-set` is `feature` over all rows of the set, held-out ones included, with
        0.001 added to each deviation and no clipping: what pFedMe's authors do, to be used for
        nothing else. The variances of `feature` and `client` divide by n - `ddof`.
        """
        if kind == "none":
            return None
        if kind == "unit":
            low, high = limits or (x.min(axis=0), x.max(axis=0))
            return cls._shared(low, np.subtract(high, low, dtype=np.float64))
        if kind == "whole-set":
            mean, std = _moments(x if whole is None else whole)
            return cls._shared(mean, std + _PUBLISHED_FLOOR)
        if kind == "feature":
            return cls._shared(*_moments(x, ddof), clip)
        # One client at a time into float32: for many clients of many features this is large.
        shift = np.empty((len(size), *x.shape[1:]), np.float32)
        scale = np.empty_like(shift)
        for i, own in enumerate(np.split(x, np.cumsum(size)[:-1])):
            mean, std = _moments(own, ddof)
            shift[i], scale[i] = mean, _inverse(std)
        return cls(shift, scale, np.full(len(size), clip, np.float32))

    @classmethod
    def _shared(cls, shift: Any, spread: Any, clip: float = np.inf) -> Self:
        """One scaling for all clients."""
        shift, scale = (np.asarray(part, np.float32)[None] for part in (shift, _inverse(spread)))
        return cls(shift, scale, np.full(1, clip, np.float32))

    @property
    def arrays(self) -> ScalingArrays:
        """Shift, scale and clip."""
        return self.shift, self.scale, self.clip

    @property
    def shared(self) -> bool:
        """Whether all clients' inputs have the same scaling."""
        return len(self.shift) == 1

    def select(self, clients: Any) -> "Scaling":
        """The scaling of some clients, by number or mask."""
        if self.shared:
            return self
        return Scaling(*(np.asarray(part)[clients] for part in self.arrays))

    def __call__(self, x: Shaped[Any, "examples ..."], client: Any) -> Float[Any, "examples ..."]:
        """Scaled inputs of one client, or, given a client for each input, of several."""
        shift, scale, clip = (client_row(np.asarray(part), client) for part in self.arrays)
        clip = np.reshape(clip, np.shape(clip) + (1,) * (np.ndim(x) - np.ndim(clip)))
        return np.clip((np.asarray(x, np.float32) - shift) * scale, -clip, clip)


def client_row(rows: Any, client: Any) -> Any:
    """A client's row, where each client has one, or else the one row for all."""
    return rows[client if len(rows) > 1 else 0]


def _inverse(spread: Any) -> np.ndarray:
    return np.asarray(1.0 / np.where(spread > 0, spread, 1.0))


def _moments(x: Shaped[np.ndarray, "examples ..."], ddof: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each feature, without a float copy of all rows."""
    n, step = len(x), 4096
    blocks = [slice(i, i + step) for i in range(0, n, step)]
    mean = sum(x[b].sum(axis=0, dtype=np.float64) for b in blocks) / n
    variance = sum(((x[b] - mean) ** 2).sum(axis=0) for b in blocks) / max(n - ddof, 1)
    return np.asarray(mean), np.sqrt(variance)
