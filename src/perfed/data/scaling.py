"""How inputs are brought to a common scale before a model sees them: (x - shift) * scale."""

from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, final

import numpy as np
from jaxtyping import Float, Int, Shaped

Standardize = Literal["none", "unit", "feature", "client", "whole-set"]

# What its arrays are called in files.
SCALING = ("shift", "scale", "clip")

ScalingArrays: TypeAlias = tuple[Any, Any, Any]

# What pFedMe's authors add to every deviation.
_PUBLISHED_FLOOR = 0.001


# Unless one asks otherwise, inputs past so many deviations are held there.
CLIP = 10.0


@final
@dataclass(frozen=True)
class Scaling:
    """How inputs are scaled, once for everyone or once for each client, along the first axis.

    Attributes:
        shift: what is taken off.
        scale: what the rest is multiplied by.
        clip: the largest size that is left as it is; infinite: any.
    """

    shift: Float[Any, "one_or_clients ..."]
    scale: Float[Any, "one_or_clients ..."]
    clip: Float[Any, " one_or_clients"]

    @classmethod
    def fitted(
        cls,
        kind: Standardize,
        x: Shaped[np.ndarray, "examples ..."],
        size: Int[np.ndarray, " clients"],
        limits: tuple[float, float] | None = None,
        whole: Shaped[np.ndarray, "all ..."] | None = None,
        clip: float = CLIP,
    ) -> Self | None:
        """What the training data, client after client, ask for; None if nothing is to be done.

        `unit` maps the inputs' known limits, or else each feature's range, to 0..1. `feature` gives
        every feature mean 0 and variance 1 over the training data of all clients, `client` over
        each client's own; what is then larger than `clip` is held there, since a feature that
        hardly varies in the training data may be hundreds of deviations off elsewhere. A feature
        that never varies becomes 0. `whole-set` is `feature` over all rows of the set, held-out
        ones included, with 0.001 added to each deviation and no limit: what pFedMe's authors do,
        and no choice for anything else.
        """
        if kind == "none":
            return None
        if kind == "unit":
            low, high = limits or (x.min(axis=0), x.max(axis=0))
            return cls._of(np.asarray(low)[None], np.subtract(high, low, dtype=np.float64)[None])
        if kind == "whole-set":
            mean, std = _moments(x if whole is None else whole)
            return cls._of(mean[None], std[None] + _PUBLISHED_FLOOR)
        if kind == "feature":
            mean, std = _moments(x)
            return cls._of(mean[None], std[None], clip)
        # One client at a time into float32: for many clients of many features this is large.
        shift = np.empty((len(size), *x.shape[1:]), np.float32)
        scale = np.empty_like(shift)
        for i, own in enumerate(np.split(x, np.cumsum(size)[:-1])):
            mean, std = _moments(own)
            shift[i], scale[i] = mean, _inverse(std)
        return cls(shift, scale, np.full(len(size), clip, np.float32))

    @classmethod
    def _of(cls, shift: np.ndarray, spread: np.ndarray, clip: float = np.inf) -> Self:
        scale = _inverse(spread).astype(np.float32)
        return cls(shift.astype(np.float32), scale, np.full(1, clip, np.float32))

    @property
    def arrays(self) -> ScalingArrays:
        """Shift, scale and clip."""
        return self.shift, self.scale, self.clip

    @property
    def shared(self) -> bool:
        """Whether all clients' inputs are scaled alike."""
        return len(self.shift) == 1

    def some(self, clients: Any) -> "Scaling":
        """That of some clients, by number or mask."""
        if self.shared:
            return self
        return Scaling(*(np.asarray(part)[clients] for part in self.arrays))

    def of_client(self, client: int) -> "Scaling":
        """What one client needs of it."""
        return Scaling(*(np.asarray(own_row(part, client))[None] for part in self.arrays))

    def __call__(self, x: Shaped[Any, "examples ..."], client: Any) -> Float[Any, "examples ..."]:
        """Inputs of one client, or of a client each, scaled."""
        shift, scale, clip = (own_row(np.asarray(part), client) for part in self.arrays)
        clip = np.reshape(clip, np.shape(clip) + (1,) * (np.ndim(x) - np.ndim(clip)))
        return np.clip((np.asarray(x, np.float32) - shift) * scale, -clip, clip)


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
