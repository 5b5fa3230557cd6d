"""A federation: its clients, each with data to train on and data held out."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

import numpy as np
from jaxtyping import Int, Shaped

from perfed.core.errors import DataError, require_count
from perfed.data.examples import AnyArray, FlatExamples
from perfed.data.scaling import Scaling
from perfed.data.splits import hold_out_mask


@final
@dataclass(frozen=True)
class Federation:
    """The clients of a federation, each with data to train on and data held out.

    Attributes:
        train: the examples that clients train on.
        test: the examples that models are scored on.
        names: the clients' names.
        labels: the names of the classes, by number; None: a regression.
        vocabulary: the symbols that inputs are indices of; None: inputs are numbers.
        scaling: how inputs are scaled before a model sees them; None: not at all.
        target: shift and spread of a regression's targets, stored as (y - shift) / spread.
        features: the names of the inputs' columns, if they have any.
        stored_checksum: the checksum of all examples, if it was computed when they were written.
        caution: what one must know before reading its scores; "": nothing unusual.
    """

    train: FlatExamples
    test: FlatExamples
    names: tuple[str, ...]
    labels: tuple[str, ...] | None
    vocabulary: tuple[str, ...] | None = None
    scaling: Scaling | None = None
    target: tuple[float, float] = (0.0, 1.0)
    features: tuple[str, ...] | None = None
    stored_checksum: str | None = None
    caution: str = ""

    @classmethod
    def from_arrays(
        cls,
        train: Iterable[tuple[AnyArray, AnyArray]],
        test: Iterable[tuple[AnyArray, AnyArray]],
        classes: int | None = None,
        names: Sequence[str] | None = None,
    ) -> Self:
        """From one (x, y) to train on and one held out, for each client.

        Whole numbers in y are classes; other numbers make it a regression.

        Args:
            train: each client's training data.
            test: each client's held-out data.
            classes: the number of classes; None: up to the largest in y.
            names: the clients' names; None: their numbers.
        """
        flat_train, flat_test = (FlatExamples.from_arrays(part) for part in (train, test))
        return cls.from_examples(flat_train, flat_test, classes, names)

    @classmethod
    def from_examples(
        cls,
        train: FlatExamples,
        test: FlatExamples,
        classes: int | None = None,
        names: Sequence[str] | None = None,
    ) -> Self:
        """From flat examples; every client must have some to train on and some held out."""
        n = len(train.size)
        if n == 0 or n != len(test.size):
            raise DataError(
                f"{n} clients have data to train on and {len(test.size)} have data held out; give "
                "both for every client"
            )
        if names is not None and len(names) != n:
            raise DataError(f"{len(names)} names for {n} clients")
        named = tuple(str(i) for i in range(n)) if names is None else tuple(names)
        _check_examples(train, "train on", named)
        _check_examples(test, "be scored on", named)
        if train.x.shape[1:] != test.x.shape[1:]:
            raise DataError(
                f"inputs to train on have shape {train.x.shape[1:]}, but held-out ones have "
                f"{test.x.shape[1:]}"
            )
        return cls(train, test, named, _class_names(train.y, test.y, classes))

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
        """What a server knows of clients elsewhere: their numbers of examples, and the shape.

        Args:
            names: the clients' names.
            train: how many examples each client trains on.
            test: how many each client holds out.
            shape: of an input.
            dtype: of inputs.
            labels: the names of the classes; None: a regression.
            features: the names of the inputs' columns, if they have any.
        """
        y_dtype = np.float32 if labels is None else np.int32

        def without_rows(sizes: Sequence[int]) -> FlatExamples:
            size = np.asarray(sizes, np.int32)
            x, y = np.zeros((0, *shape), dtype), np.zeros(0, y_dtype)
            return FlatExamples(x, y, np.zeros_like(size), size)

        return cls(without_rows(train), without_rows(test), tuple(names), labels, features=features)

    def validation(self, fraction: float, seed: int = 0) -> "Federation":
        """The same clients, scored on a part of their training data instead of the held-out data.

        For choosing settings, which must not use the held-out data. A client with a single training
        example is left out.
        """
        enough = np.flatnonzero(np.asarray(self.train.size) >= 2)
        if not len(enough):
            raise DataError("no client has two training examples, one of them to validate on")
        selected = self if len(enough) == self.clients else self.select(enough)
        examples, n = selected.train, selected.clients
        owner = np.repeat(np.arange(n), examples.size)
        strata = np.zeros(len(owner), int) if self.labels is None else examples.y
        out = hold_out_mask(strata, owner, fraction, np.random.default_rng(seed))
        train, test = (
            FlatExamples.from_rows(
                examples.x[rows], examples.y[rows], np.bincount(owner[rows], minlength=n)
            )
            for rows in (~out, out)
        )
        return replace(selected, train=train, test=test, stored_checksum=None)

    def select(self, clients: Int[np.ndarray, " some"]) -> "Federation":
        """The same data of some clients only, in this order."""
        return replace(
            self,
            train=self.train.select(clients),
            test=self.test.select(clients),
            names=tuple(self.names[i] for i in clients),
            scaling=None if self.scaling is None else self.scaling.select(clients),
            stored_checksum=None,
        )

    def checksum(self) -> str:
        """A checksum of all clients' examples, in their order."""
        if self.stored_checksum is not None:
            return self.stored_checksum
        arrays = [
            np.ascontiguousarray(array)
            for part in (self.train, self.test)
            for array in (part.x, part.y, part.size)
        ]
        return joint_checksum(
            (a, hashlib.sha256(a.data.cast("B") if a.size else b"").hexdigest()) for a in arrays
        )

    def scale(self, x: AnyArray, client: int) -> np.ndarray:
        """A client's unscaled inputs, scaled as its model sees them."""
        return np.asarray(x) if self.scaling is None else self.scaling(x, client)

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.train.size)

    @property
    def has_examples(self) -> bool:
        """Whether the examples themselves are here, and not only their numbers (`remote`)."""
        return len(self.train.y) == int(np.sum(self.train.size))

    @property
    def outputs(self) -> int:
        """The number of a model's outputs: one for each class, or one for a regression."""
        return 1 if self.labels is None else len(self.labels)

    @property
    def example_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.x.shape[1:])

    @property
    def example_dtype(self) -> np.dtype[Any]:
        """The type of inputs as a model sees them."""
        return np.dtype(np.float32) if self.scaling is not None else self.train.x.dtype


def decode_predictions(
    outputs: Shaped[np.ndarray, "examples ..."],
    labels: tuple[str, ...] | None,
    target: tuple[float, float],
) -> np.ndarray:
    """The names of the most likely classes, or a regression's predictions in the targets' unit."""
    if labels is None:
        return np.asarray(outputs.reshape(len(outputs)) * target[1] + target[0])
    names = np.array(labels, dtype=object)
    return np.asarray(names[outputs.argmax(axis=1)], dtype=str)


def joint_checksum(arrays: Iterable[tuple[AnyArray, str]]) -> str:
    """One checksum of several arrays, given each with its own (SHA-256, in hexadecimal)."""
    digest = hashlib.sha256()
    for array, own in arrays:
        digest.update(f"{array.dtype.str}{tuple(array.shape)}{own}".encode())
    return digest.hexdigest()


def _check_examples(part: FlatExamples, use: str, names: Sequence[str]) -> None:
    """Raise unless every client has examples, and all of them are finite numbers."""
    empty = np.flatnonzero(np.asarray(part.size) == 0)
    if len(empty):
        raise DataError(f"client {names[empty[0]]} has no examples to {use}")
    if not _finite(part.x):
        raise DataError("some inputs are not finite numbers; correct or drop those rows first")
    if part.y.ndim != 1 or not _finite(part.y):
        raise DataError(
            f"labels must be finite numbers, one per example, but are {part.y.dtype} of shape "
            f"{part.y.shape}"
        )


def _class_names(train: AnyArray, test: AnyArray, classes: int | None) -> tuple[str, ...] | None:
    """The classes 0, 1, 2, ..., named by their numbers; None for a regression."""
    if classes is not None:
        require_count("classes", classes)
    whole = [np.issubdtype(y.dtype, np.integer) for y in (train, test)]
    if whole[0] != whole[1]:
        raise DataError(f"labels to train on are {train.dtype}, but held-out ones are {test.dtype}")
    if not whole[0]:
        if classes is not None:
            raise DataError(f"classes must be whole numbers, but the labels are {train.dtype}")
        return None
    lowest, highest = min(train.min(), test.min()), max(train.max(), test.max())
    if lowest < 0 or (classes is not None and highest >= classes):
        allowed = "0, 1, 2, ..." if classes is None else f"0..{classes - 1}"
        wrong = lowest if lowest < 0 else highest
        raise DataError(f"labels must be {allowed}, but one is {wrong}")
    return tuple(str(c) for c in range(int(highest) + 1 if classes is None else classes))


def _finite(x: AnyArray) -> bool:
    """Whether all entries are finite numbers, checked in blocks to need little memory."""
    if not np.issubdtype(x.dtype, np.number):
        return False
    if np.issubdtype(x.dtype, np.integer):
        return True
    return all(bool(np.isfinite(x[i : i + 4096]).all()) for i in range(0, len(x), 4096))
