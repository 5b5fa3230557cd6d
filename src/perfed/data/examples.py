"""The examples of all clients in flat arrays: client i is a slice. Nothing is padded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
from jaxtyping import Int, Shaped

from perfed.core.errors import DataError

# A NumPy array here; a device array inside an engine.
AnyArray = Any


@final
@dataclass(frozen=True)
class FlatExamples:
    """The examples of all clients, one client after another.

    Attributes:
        x: inputs of all clients.
        y: labels of all clients: class numbers, or targets of a regression.
        start: the first row of each client.
        size: the number of rows of each client.
    """

    x: Shaped[AnyArray, "total ..."]
    y: Shaped[AnyArray, " total"]
    start: Int[AnyArray, " clients"]
    size: Int[AnyArray, " clients"]

    @classmethod
    def from_arrays(cls, clients: Iterable[tuple[AnyArray, AnyArray]]) -> Self:
        """From one (x, y) for each client."""
        pairs = [(np.asarray(x), np.asarray(y)) for x, y in clients]
        if not pairs:
            raise DataError("there are no clients; give one (x, y) for each")
        for i, (x, y) in enumerate(pairs):
            if len(x) != len(y):
                raise DataError(f"client {i} has {len(x)} inputs but {len(y)} labels")
            if x.shape[1:] != pairs[0][0].shape[1:]:
                raise DataError(
                    f"client {i}'s inputs have shape {x.shape[1:]}, but client 0's have "
                    f"{pairs[0][0].shape[1:]}"
                )
        xs, ys = zip(*pairs, strict=True)
        return cls.from_rows(np.concatenate(xs), np.concatenate(ys), [len(y) for y in ys])

    @classmethod
    def from_rows(cls, x: AnyArray, y: AnyArray, sizes: Sequence[int] | AnyArray) -> Self:
        """From rows in client order, and the number of rows of each client."""
        size = np.asarray(sizes, np.int32)
        ends = np.cumsum(size, dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        if not len(x) == len(y) == total:
            raise DataError(
                f"{len(x)} inputs, {len(y)} labels and sizes of {total} rows do not match"
            )
        return cls(x, y, (ends - size).astype(np.int32 if total < 2**31 else np.int64), size)

    def select(self, clients: Int[np.ndarray, " some"]) -> "FlatExamples":
        """The examples of some clients, in this order."""
        starts, sizes = (np.asarray(part)[clients] for part in (self.start, self.size))
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows = np.repeat(starts, sizes) + within
        return FlatExamples.from_rows(self.x[rows], self.y[rows], sizes)

    def client(self, i: int) -> tuple[AnyArray, AnyArray]:
        """One client's (x, y)."""
        rows = slice(self.start[i], self.start[i] + self.size[i])
        return self.x[rows], self.y[rows]
