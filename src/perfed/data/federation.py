"""All clients' data in flat arrays: client i is a slice. Nothing is padded."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

import numpy as np
from jaxtyping import Int, Shaped

from perfed.core.errors import DataError, require_count
from perfed.data.scaling import Scaling
from perfed.data.splits import held_out

# What holds the rows: a NumPy array here, a device array inside an engine.
AnyArray = Any


@final
@dataclass(frozen=True)
class FlatExamples:
    """The examples of all clients, one client after another.

    Attributes:
        x: inputs of all clients.
        y: labels of all clients: classes by number, or targets of a regression.
        start: the first row of each client.
        size: how many rows each client has.
    """

    x: Shaped[AnyArray, "total ..."]
    y: Shaped[AnyArray, " total"]
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
        ends = np.cumsum(size, dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        if not len(x) == len(y) == total:
            raise DataError(
                f"{len(x)} inputs, {len(y)} labels and clients of {total} rows do not fit"
            )
        return cls(x, y, (ends - size).astype(np.int32 if total < 2**31 else np.int64), size)

    def some(self, clients: Int[np.ndarray, " some"]) -> "FlatExamples":
        """The examples of some clients, in this order."""
        starts, sizes = (np.asarray(part)[clients] for part in (self.start, self.size))
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows = np.repeat(starts, sizes) + within
        return FlatExamples.joined(self.x[rows], self.y[rows], sizes)

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
        names: what each client is called.
        labels: the names of the classes, by number; None: a regression.
        vocabulary: inputs are positions in this list of symbols; None: they are numbers.
        scaling: how inputs are scaled before a model sees them; None: not at all.
        target: shift and spread of a regression's targets, which are kept as (y - shift) / spread.
        features: the names of the inputs' columns, where they have any.
        known_checksum: that of all examples, where it was computed when they were written.
        caution: what must be known before its scores are read; "": nothing out of the ordinary.
    """

    train: FlatExamples
    test: FlatExamples
    names: tuple[str, ...]
    labels: tuple[str, ...] | None
    vocabulary: tuple[str, ...] | None = None
    scaling: Scaling | None = None
    target: tuple[float, float] = (0.0, 1.0)
    features: tuple[str, ...] | None = None
    known_checksum: str | None = None
    caution: str = ""

    @classmethod
    def of(
        cls,
        train: Iterable[tuple[AnyArray, AnyArray]],
        test: Iterable[tuple[AnyArray, AnyArray]],
        classes: int | None = None,
        names: Sequence[str] | None = None,
    ) -> Self:
        """From one (x, y) to train on and one held out, for each client.

        Whole numbers in y are classes; other numbers make it a regression.
        """
        return cls.made(FlatExamples.of(train), FlatExamples.of(test), classes, names)

    @classmethod
    def made(
        cls,
        train: FlatExamples,
        test: FlatExamples,
        classes: int | None = None,
        names: Sequence[str] | None = None,
        labels: tuple[str, ...] | None = None,
        vocabulary: tuple[str, ...] | None = None,
        scaling: Scaling | None = None,
        target: tuple[float, float] = (0.0, 1.0),
        features: tuple[str, ...] | None = None,
        caution: str = "",
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
            if not _finite(part.x):
                raise DataError(
                    "some inputs are not finite numbers; clean or drop those rows first"
                )
            if part.y.ndim != 1 or not _finite(part.y) or part.y.dtype == bool:
                raise DataError(
                    "labels must be finite numbers, one an example, but are "
                    f"{part.y.dtype} of shape {part.y.shape}"
                )
        whole = [np.issubdtype(part.y.dtype, np.integer) for part in (train, test)]
        if whole[0] != whole[1]:
            raise DataError(
                f"labels to train on are {train.y.dtype}, but held-out ones are {test.y.dtype}"
            )
        if not whole[0]:
            if classes is not None or labels is not None:
                raise DataError(
                    f"classes must be whole numbers, but the labels are {train.y.dtype}"
                )
            labels = None
        else:
            labels = labels or _labels(train.y, test.y, classes)
        return cls(
            train, test, named, labels, vocabulary, scaling, target, features, caution=caution
        )

    @classmethod
    def remote(
        cls,
        names: Sequence[str],
        train: Sequence[int],
        test: Sequence[int],
        shape: tuple[int, ...],
        dtype: str,
        labels: tuple[str, ...] | None,
        features: tuple[str, ...] | None = None,
    ) -> Self:
        """What a server knows of clients elsewhere: how many examples they have, and which shape.

        Args:
            names: what each client is called.
            train: how many examples each learns from.
            test: how many it is scored on.
            shape: of an input.
            dtype: of inputs.
            labels: the names of the classes; None: a regression.
            features: the names of the inputs' columns, where they have any.
        """
        kind = np.float32 if labels is None else np.int32

        def part(sizes: Sequence[int]) -> FlatExamples:
            size = np.asarray(sizes, np.int32)
            nothing = np.zeros((0, *shape), dtype)
            return FlatExamples(nothing, np.zeros(0, kind), np.zeros_like(size), size)

        return cls(part(train), part(test), tuple(names), labels, features=features)

    def validation(self, fraction: float, seed: int = 0) -> "Federation":
        """The same clients, scored on a part of their training data instead of the held-out data.

        For choosing settings: the held-out data must not take part in that. A client with a single
        training example is left out.
        """
        n = self.clients
        owner = np.repeat(np.arange(n), self.train.size)
        enough = np.asarray(self.train.size) >= 2
        used = np.flatnonzero(enough[owner])
        strata = np.zeros(len(used), int) if self.labels is None else self.train.y[used]
        number = np.cumsum(enough) - 1
        out = held_out(strata, number[owner[used]], fraction, np.random.default_rng(seed))
        if not enough.any():
            raise DataError("no client has two training examples, one to validate on")

        def part(rows: np.ndarray) -> FlatExamples:
            sizes = np.bincount(number[owner[rows]], minlength=int(enough.sum()))
            return FlatExamples.joined(self.train.x[rows], self.train.y[rows], sizes)

        names = tuple(name for name, good in zip(self.names, enough, strict=True) if good)
        scaling = None if self.scaling is None else self.scaling.some(enough)
        return replace(
            self,
            train=part(used[~out]),
            test=part(used[out]),
            names=names,
            scaling=scaling,
            known_checksum=None,
        )

    def some(self, clients: Int[np.ndarray, " some"]) -> "Federation":
        """The same data of some clients only, in this order."""
        scaling = None if self.scaling is None else self.scaling.some(clients)
        return replace(
            self,
            train=self.train.some(clients),
            test=self.test.some(clients),
            names=tuple(self.names[i] for i in clients),
            scaling=scaling,
            known_checksum=None,
        )

    def checksum(self) -> str:
        """A checksum of all clients' examples, in their order."""
        if self.known_checksum is not None:
            return self.known_checksum
        arrays = [
            np.ascontiguousarray(array)
            for part in (self.train, self.test)
            for array in (part.x, part.y, part.size)
        ]
        return joined_checksum(
            (a, hashlib.sha256(a.data.cast("B") if a.size else b"").hexdigest()) for a in arrays
        )

    def scaled(self, x: AnyArray, client: int) -> np.ndarray:
        """A client's inputs as a model sees them, given as they were before any scaling."""
        return np.asarray(x) if self.scaling is None else self.scaling(x, client)

    def named_outputs(self, outputs: Shaped[np.ndarray, "examples ..."]) -> np.ndarray:
        """What a model's outputs say, in the words or the unit of the data (`named_outputs`)."""
        return named_outputs(outputs, self.labels, self.target)

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.train.size)

    @property
    def here(self) -> bool:
        """Whether the examples are here, and not with clients who only told how many they have."""
        return len(self.train.y) == int(np.sum(self.train.size))

    @property
    def outputs(self) -> int:
        """How many numbers a model gives: one for each class, or the one of a regression."""
        return 1 if self.labels is None else len(self.labels)

    @property
    def example_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.x.shape[1:])

    @property
    def example_type(self) -> np.dtype[Any]:
        """The type of inputs as a model sees them."""
        return np.dtype(np.float32) if self.scaling is not None else self.train.x.dtype


def named_outputs(
    outputs: Shaped[np.ndarray, "examples ..."],
    labels: tuple[str, ...] | None,
    target: tuple[float, float],
) -> np.ndarray:
    """The names of the most likely classes, or a regression's targets in their own unit."""
    if labels is None:
        return np.asarray(outputs.reshape(len(outputs)) * target[1] + target[0])
    names = np.array(labels, dtype=object)
    return np.asarray(names[outputs.argmax(axis=1)], dtype=str)


def joined_checksum(arrays: Iterable[tuple[AnyArray, str]]) -> str:
    """One checksum of several arrays, given with their own (SHA-256, in hexadecimal)."""
    digest = hashlib.sha256()
    for array, own in arrays:
        digest.update(f"{array.dtype.str}{tuple(array.shape)}{own}".encode())
    return digest.hexdigest()


def _labels(train: AnyArray, test: AnyArray, classes: int | None) -> tuple[str, ...]:
    """The classes 0, 1, 2, ..., named by their numbers."""
    if classes is not None:
        require_count("classes", classes)
    lowest, highest = min(train.min(), test.min()), max(train.max(), test.max())
    if lowest < 0 or (classes is not None and highest >= classes):
        allowed = "0, 1, 2, ..." if classes is None else f"0..{classes - 1}"
        wrong = lowest if lowest < 0 else highest
        raise DataError(f"labels must be {allowed}, but one is {wrong}")
    return tuple(str(c) for c in range(int(highest) + 1 if classes is None else classes))


def _finite(x: AnyArray) -> bool:
    """Whether all entries are finite numbers, seen in blocks to need little memory."""
    if not np.issubdtype(x.dtype, np.number):
        return False
    if np.issubdtype(x.dtype, np.integer):
        return True
    return all(bool(np.isfinite(x[i : i + 4096]).all()) for i in range(0, len(x), 4096))
