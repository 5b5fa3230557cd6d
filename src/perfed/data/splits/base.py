"""The interface of splits: which client gets which row of a data set.

A row goes to at most one client. A split that the data do not allow is an error that gives the
numbers.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Int, Shaped

from perfed.core.errors import DataError

Owners: TypeAlias = Int[np.ndarray, " examples"]
Counts: TypeAlias = Int[np.ndarray, "clients classes"]
Rng: TypeAlias = np.random.Generator

# Each client needs one example to train on and one held out.
MIN_EXAMPLES = 2


class LabeledRows(NamedTuple):
    """What a split knows of the rows.

    Attributes:
        y: the class of each row; all 0 for a regression.
        classes: the number of classes; None: a regression.
        client: the number of each row's natural client, if the data have any.
        names: the natural clients' names.
    """

    y: Int[np.ndarray, " examples"]
    classes: int | None
    client: Owners | None = None
    names: tuple[str, ...] | None = None

    @property
    def class_counts(self) -> Int[np.ndarray, " classes"]:
        """The number of rows of each class."""
        return np.bincount(self.y, minlength=self.classes or 1)

    def select(self, rows: Shaped[np.ndarray, "..."]) -> "LabeledRows":
        """Some of the rows, by index or mask."""
        client = None if self.client is None else self.client[rows]
        return self._replace(y=self.y[rows], client=client)


class Assignment(NamedTuple):
    """The client of each row, -1 for unused rows, and the clients' names."""

    owner: Owners
    names: tuple[str, ...]


class Part(NamedTuple):
    """Some rows of a data set, and the labels they are given."""

    row: Int[np.ndarray, " rows"]
    label: Int[np.ndarray, " rows"]


class Split(ABC):
    """Assigns rows to clients.

    Attributes:
        name: its name in a configuration.
        test_set: whether, by default, held-out data come from a common test set, split in the same
            proportions, and not from each client's own rows.
        needs_classes: whether it needs class labels.
    """

    name: ClassVar[str]
    test_set: ClassVar[bool] = False
    needs_classes: ClassVar[bool] = True

    def assign(self, rows: LabeledRows, rng: Rng) -> Assignment:
        """The client of each row."""
        if self.needs_classes and rows.classes is None:
            raise DataError(
                f'split = "{self.name}" needs classes, and these data are a regression; '
                'use "iid", "quantity" or "natural"'
            )
        return self._assign(rows, rng)

    @property
    def caution(self) -> str:
        """What one must know before reading scores on this split; "": nothing unusual."""
        return ""

    def overlapping_parts(self, rows: LabeledRows) -> tuple[list[Part], list[Part]] | None:
        """Each client's training and held-out rows, where clients share rows; None: they do not."""
        return None

    @abstractmethod
    def _assign(self, rows: LabeledRows, rng: Rng) -> Assignment: ...
