"""The splits of the papers."""

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import numpy as np

from perfed.core.errors import DataError, require, require_choice, require_count
from perfed.data.splits.as_published import CAUTION, CLASSES, CLIENTS, class_pieces, pfedme_parts
from perfed.data.splits.base import Assignment, Counts, LabeledRows, Part, Rng, Split
from perfed.data.splits.counts import assign_by_counts, numbered


@final
@dataclass(frozen=True)
class PerFedAvgSplit(Split):
    """Per-FedAvg, section 5: half of the clients hold half of the classes, the others two each.

    The first half of the clients hold `a` examples of each of the first half of the classes; each
    other client holds a/2 of one class of the first half and 2a of one class of the second. The
    paper has 50 clients and a = 196 for MNIST, 68 for CIFAR-10; its test set is split alike.

    Args:
        clients: number of clients; even.
        a: the paper's parameter, even; None: the largest that the data allow.
        diff_hetero: the paper's "diff. hetero.": leave out the a/2 examples.
    """

    name: ClassVar[str] = "per-fedavg"
    test_set: ClassVar[bool] = True

    clients: int = 50
    a: int | None = None
    diff_hetero: bool = False

    def __post_init__(self) -> None:
        require_count("clients", self.clients)
        even = "must be even for the Per-FedAvg split, which has two kinds of clients"
        require(self.clients % 2 == 0, "clients", self.clients, even)
        good = self.a is None or (self.a >= 2 and self.a % 2 == 0)
        require(good, "a", self.a, "must be an even number, at least 2")

    def _assign(self, rows: LabeledRows, rng: Rng) -> Assignment:
        quarters = self._quarters(rows.classes or 0)
        available, needed = rows.class_counts, quarters.sum(axis=0)
        # Of each class, needed/4 * a examples are assigned, and a/2 must be whole.
        largest = int(np.min(available[needed > 0] * 4 // needed[needed > 0])) // 2 * 2
        if largest < 2:
            raise DataError(
                f"{len(rows.y)} examples are too few for the Per-FedAvg split over {self.clients} "
                "clients; use fewer clients"
            )
        counts = quarters * (self.a or largest) // 4
        short = np.flatnonzero(counts.sum(axis=0) > available)
        if len(short):
            c = short[0]
            raise DataError(
                f"the Per-FedAvg split with a = {self.a} and {self.clients} clients needs "
                f"{counts[:, c].sum()} examples of class {c}, and there are {available[c]}; the "
                f"largest a is {largest}"
            )
        return numbered(assign_by_counts(rows.y, counts, rng), self.clients)

    def _quarters(self, classes: int) -> Counts:
        """How many quarters of `a` each client gets of each class."""
        if classes < 2 or classes % 2:
            raise DataError(f"the Per-FedAvg split needs an even number of classes, not {classes}")
        half, low = self.clients // 2, classes // 2
        quarters = np.zeros((self.clients, classes), int)
        quarters[:half, :low] = 4
        other = np.arange(half)
        if not self.diff_hetero:
            quarters[half + other, other % low] = 2
        # Shifted by one after each pass over the classes, so that all pairs of classes occur.
        quarters[half + other, low + (other + other // low) % low] = 8
        return quarters


@final
@dataclass(frozen=True)
class PFedMeSplit(Split):
    """pFedMe, section 5.1: all data, a few labels per client, very different sizes.

    Client i holds classes (L*i, ..., L*i + L-1) mod C. A class that k clients hold is cut into k
    pieces: each gets a uniform part between 1/(k+1) and 1/2 of what is left, the last the rest.
    With 20 clients and MNIST that gives 1167 to 3834 training examples; the paper says 1165 to
    3834. The sizes are always the same; the seed decides which examples.

    Args:
        clients: number of clients.
        labels_per_client: number of classes that a client holds, L.
        overlap: `none`: clients share no rows. `as-published`: the very rows of the paper's Table 1
            on MNIST, most of which belong to several clients (see `as_published`).
    """

    name: ClassVar[str] = "pfedme"

    clients: int = 20
    labels_per_client: int = 2
    overlap: Literal["none", "as-published"] = "none"

    def __post_init__(self) -> None:
        require_count("clients", self.clients)
        require_count("labels_per_client", self.labels_per_client)
        require_choice("overlap", self.overlap, ("none", "as-published"))
        if self.overlap == "as-published":
            only = 'must be {} with overlap = "as-published", as in the paper'
            require(self.clients == CLIENTS, "clients", self.clients, only.format(CLIENTS))
            two = self.labels_per_client == 2
            require(two, "labels_per_client", self.labels_per_client, only.format(2))

    @property
    def caution(self) -> str:
        """What overlapping rows do to scores."""
        return "" if self.overlap == "none" else CAUTION

    def overlapping_parts(self, rows: LabeledRows) -> tuple[list[Part], list[Part]] | None:
        """Each client's training and held-out rows, with `overlap = "as-published"`."""
        if self.overlap == "none":
            return None
        if rows.classes != CLASSES:
            raise DataError(
                f'overlap = "as-published" needs {CLASSES} classes, and these data have '
                f"{rows.classes or 'none'}"
            )
        return pfedme_parts(rows.y)

    def _assign(self, rows: LabeledRows, rng: Rng) -> Assignment:
        classes, each = rows.classes or 0, self.labels_per_client
        allowed = f"must be at most the number of classes, {classes}"
        require(each <= classes, "labels_per_client", each, allowed)
        place = np.arange(self.clients * each)
        holder, held = place // each, place % classes
        # NumPy's older generator, seed 1: the published sizes come from it.
        sizes = np.random.RandomState(1)
        counts = np.zeros((self.clients, classes), int)
        for c, total in enumerate(rows.class_counts.tolist()):
            holders = holder[held == c]
            if len(holders):
                counts[holders, c] = class_pieces(total, len(holders), sizes)
        return numbered(assign_by_counts(rows.y, counts, rng), self.clients)
