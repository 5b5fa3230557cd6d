"""The splits of the papers."""

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import numpy as np

from perfed.core.errors import DataError, require, require_choice, require_count
from perfed.data.splits.as_published import CLASSES, CLIENTS, Part, pfedme_parts
from perfed.data.splits.base import Assignment, Counts, LabeledRows, Rng, Split
from perfed.data.splits.counts import by_counts, numbered


@final
@dataclass(frozen=True)
class PerFedAvgSplit(Split):
    """Per-FedAvg section 5: half of the clients hold half of the classes, the others two each.

    The first half of the clients hold `a` examples of each of the first half of the classes; each
    other client holds a/2 of one class of the first half and 2a of one class of the second. The
    paper has 50 clients and a = 196 for MNIST, 68 for CIFAR-10; its test set is dealt out alike.

    Args:
        clients: how many clients; even.
        a: the paper's parameter, even; None: the largest the data allow.
        diff_hetero: the paper's "diff. hetero.": leave out the a/2 examples.
    """

    clients: int = 50
    a: int | None = None
    diff_hetero: bool = False

    test_set: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_count("clients", self.clients)
        even = "must be even for the Per-FedAvg split: half are of each kind"
        require(self.clients % 2 == 0, "clients", self.clients, even)
        good = self.a is None or (self.a >= 2 and self.a % 2 == 0)
        require(good, "a", self.a, "must be an even number, at least 2")

    def _assign(self, rows: LabeledRows, rng: Rng) -> Assignment:
        quarters = self._quarters(rows.classes or 0)
        have, asked = rows.have, quarters.sum(axis=0)
        # A class is asked for asked/4 * a examples, and a/2 must be whole.
        room = int(np.min(have[asked > 0] * 4 // asked[asked > 0])) // 2 * 2
        if room < 2:
            raise DataError(
                f"{len(rows.y)} examples are too few for the Per-FedAvg split over {self.clients} "
                "clients; ask for fewer clients"
            )
        counts = quarters * (self.a or room) // 4
        short = np.flatnonzero(counts.sum(axis=0) > have)
        if len(short):
            c = short[0]
            raise DataError(
                f"the Per-FedAvg split with a = {self.a} and {self.clients} clients needs "
                f"{counts[:, c].sum()} examples of class {c}, and there are {have[c]}; the largest "
                f"a is {room}"
            )
        return numbered(by_counts(rows.y, counts, rng), self.clients)

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
        # Shifted by one in each turn of the classes, so that all pairs of classes come up.
        quarters[half + other, low + (other + other // low) % low] = 8
        return quarters


@final
@dataclass(frozen=True)
class PFedMeSplit(Split):
    """pFedMe section 5.1: all data, a few labels a client, very different sizes.

    Client i holds classes (L*i, ..., L*i + L-1) mod C. A class that k clients hold is cut into k
    pieces: each takes a uniform part between 1/(k+1) and 1/2 of what is left, the last the rest.
    With 20 clients and MNIST that gives 1167 to 3834 training examples; the paper says 1165 to
    3834. The sizes are always the same; the seed decides which examples.

    Args:
        clients: how many clients.
        labels_per_client: how many classes a client holds, L.
        overlap: `none`: nobody's rows are another's. `as-published`: the very rows of the paper's
            Table 1 on MNIST, most of which are several clients' (see `as_published`).
    """

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

    def parts(self, rows: LabeledRows) -> tuple[list[Part], list[Part]] | None:
        """Each client's rows to train on and to be scored on, where clients share them."""
        if self.overlap == "none":
            return None
        if rows.classes != CLASSES:
            raise DataError(
                f'overlap = "as-published" is of {CLASSES} classes, and these data have '
                f"{rows.classes or 'none'}"
            )
        return pfedme_parts(rows.y)

    def _assign(self, rows: LabeledRows, rng: Rng) -> Assignment:
        classes = rows.classes or 0
        allowed = f"must be at most the number of classes, {classes}"
        require(
            self.labels_per_client <= classes, "labels_per_client", self.labels_per_client, allowed
        )
        place = np.arange(self.clients * self.labels_per_client)
        holder, held = place // self.labels_per_client, place % classes
        # NumPy's older generator, seed 1: it is what the published sizes come from.
        sizes = np.random.RandomState(1)
        counts = np.zeros((self.clients, classes), int)
        for c, left in enumerate(rows.have):
            holders = holder[held == c]
            for i in holders[:-1]:
                low, high = left // (len(holders) + 1), left // 2
                if low < 1 or high <= low:
                    raise DataError(
                        f"the pFedMe split over {self.clients} clients cuts class {c} into "
                        f"{len(holders)} pieces, and its {rows.have[c]} examples are too few; ask "
                        "for fewer clients"
                    )
                counts[i, c] = sizes.randint(low, high)
                left -= counts[i, c]
            counts[holders[-1:], c] = left
        return numbered(by_counts(rows.y, counts, rng), self.clients)
