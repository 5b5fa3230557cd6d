"""What a split is: it says which client gets which row of a set.

A row goes to at most one client. A split that the data cannot give is refused with the numbers.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Int

from perfed.core.errors import DataError
from perfed.data.splits.as_published import Part

Owners: TypeAlias = Int[np.ndarray, " examples"]
Counts: TypeAlias = Int[np.ndarray, "clients classes"]
Rng: TypeAlias = np.random.Generator

# One to train on and one held out.
LEAST = 2


class LabeledRows(NamedTuple):
    """What a split sees of the rows.

    Attributes:
        y: their classes; all 0 in a regression.
        classes: how many classes there are; None: a regression.
        client: their natural clients, by number, if they have any.
        names: the natural clients' names.
    """

    y: Int[np.ndarray, " examples"]
    classes: int | None
    client: Owners | None = None
    names: tuple[str, ...] | None = None

    @property
    def have(self) -> Int[np.ndarray, " classes"]:
        """How many rows there are of each class."""
        return np.bincount(self.y, minlength=self.classes or 1)


class Assignment(NamedTuple):
    """The client of each row, -1 for rows that nobody gets, and the clients' names."""

    owner: Owners
    names: tuple[str, ...]


class Split(ABC):
    """A way to deal rows out to clients."""

    # Whether held-out data come from a set of their own, dealt out in the same proportions, rather
    # than from each client's rows, unless one asks otherwise.
    test_set: ClassVar[bool] = False
    needs_classes: ClassVar[bool] = True

    def assign(self, rows: LabeledRows, rng: Rng) -> Assignment:
        """The client of each row."""
        if self.needs_classes and rows.classes is None:
            raise DataError(
                f'split = "{self.name}" goes by class, and these data are a regression; '
                'use "iid", "quantity" or "natural"'
            )
        return self._assign(rows, rng)

    def parts(self, rows: LabeledRows) -> tuple[list[Part], list[Part]] | None:
        """Each client's rows to train on and to be scored on, where clients share rows; or None."""
        return None

    @property
    def name(self) -> str:
        """What it is called in a configuration."""
        from perfed.data.splits import SPLITS

        return next(name for name, split in SPLITS.items() if split is type(self))

    @abstractmethod
    def _assign(self, rows: LabeledRows, rng: Rng) -> Assignment: ...


def split_names() -> list[str]:
    """What all splits are called in a configuration."""
    from perfed.data.splits import SPLITS

    return list(SPLITS)
