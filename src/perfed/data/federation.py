"""All clients' data in flat arrays: client i is a slice. Nothing is padded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
from jaxtyping import Int, Shaped

from perfed.errors import DataError, require_count

# What holds the rows: a NumPy array here, a device array inside an engine.
AnyArray = Any


@final
@dataclass(frozen=True)
class FlatExamples:
    """The examples of all clients, one client after another.

    Attributes:
        x: inputs of all clients.
        y: labels of all clients.
        start: the first row of each client.
        size: how many rows each client has.
    """

    x: Shaped[AnyArray, "total ..."]
    y: Int[AnyArray, " total"]
    start: Int[AnyArray, " clients"]
    size: Int[AnyArray, " clients"]

    @classmethod
    def of(cls, parts: Iterable[tuple[AnyArray, AnyArray]]) -> Self:
        """From one (x, y) for each client."""
        pairs = [(np.asarray(x), np.asarray(y)) for x, y in parts]
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
        return cls.joined(np.concatenate(xs), np.concatenate(ys), [len(y) for y in ys])

    @classmethod
    def joined(cls, x: AnyArray, y: AnyArray, sizes: Sequence[int] | AnyArray) -> Self:
        """From rows that are in client order already."""
        size = np.asarray(sizes, np.int32)
        if not len(x) == len(y) == size.sum():
            raise DataError(
                f"{len(x)} inputs, {len(y)} labels and clients of {size.sum()} rows do not fit"
            )
        start = np.concatenate([[0], np.cumsum(size)[:-1]]).astype(np.int32)
        return cls(x, y, start, size)

    def client(self, i: int) -> tuple[AnyArray, AnyArray]:
        """One client's (x, y)."""
        rows = slice(self.start[i], self.start[i] + self.size[i])
        return self.x[rows], self.y[rows]


@final
@dataclass(frozen=True)
class Federation:
    """The clients of a federation, each with data to train on and data held out.

    Attributes:
        train: what clients learn from.
        test: what their models are scored on.
        classes: the number of labels.
        names: what each client is called.
    """

    train: FlatExamples
    test: FlatExamples
    classes: int
    names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        train: Iterable[tuple[AnyArray, AnyArray]],
        test: Iterable[tuple[AnyArray, AnyArray]],
        classes: int | None = None,
        names: Sequence[str] | None = None,
    ) -> Self:
        """From one (x, y) to train on and one held out, for each client."""
        return cls.made(FlatExamples.of(train), FlatExamples.of(test), classes, names)

    @classmethod
    def made(
        cls,
        train: FlatExamples,
        test: FlatExamples,
        classes: int | None = None,
        names: Sequence[str] | None = None,
    ) -> Self:
        """From flat examples; refuses clients that have nothing to learn from or be scored on."""
        n = len(train.size)
        if n == 0 or n != len(test.size):
            raise DataError(
                f"{n} clients have data to train on and {len(test.size)} have data held out; give "
                "both for every client"
            )
        if names is not None and len(names) != n:
            raise DataError(f"{len(names)} names for {n} clients")
        named = tuple(names) if names is not None else tuple(str(i) for i in range(n))
        if train.x.shape[1:] != test.x.shape[1:]:
            raise DataError(
                f"inputs to train on have shape {train.x.shape[1:]}, but held-out ones have "
                f"{test.x.shape[1:]}"
            )
        for part, what in ((train, "train on"), (test, "be scored on")):
            empty = np.flatnonzero(np.asarray(part.size) == 0)
            if len(empty):
                raise DataError(f"client {named[empty[0]]} has no examples to {what}")
            if not np.issubdtype(part.x.dtype, np.number) or not np.all(np.isfinite(part.x)):
                raise DataError(
                    "some inputs are not finite numbers; clean or drop those rows first"
                )
            if part.y.ndim != 1 or not np.issubdtype(part.y.dtype, np.integer):
                raise DataError(
                    "labels must be whole numbers, one an example, but are "
                    f"{part.y.dtype} of shape {part.y.shape}"
                )
        if classes is not None:
            require_count("classes", classes)
        lowest, highest = min(train.y.min(), test.y.min()), max(train.y.max(), test.y.max())
        if lowest < 0 or (classes is not None and highest >= classes):
            allowed = "0, 1, 2, ..." if classes is None else f"0..{classes - 1}"
            wrong = lowest if lowest < 0 else highest
            raise DataError(f"labels must be {allowed}, but one is {wrong}")
        return cls(train, test, int(highest) + 1 if classes is None else classes, named)

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.train.size)

    @property
    def example_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.x.shape[1:])
