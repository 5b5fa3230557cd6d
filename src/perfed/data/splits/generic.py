"""Splits of any data set: IID, Dirichlet, shards, uneven sizes, natural clients."""

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from perfed.core.errors import DataError, require, require_count
from perfed.data.splits.base import MIN_EXAMPLES, Assignment, LabeledRows, Rng, Split
from perfed.data.splits.counts import (
    assign_by_counts,
    fill_up,
    move_rows,
    numbered,
    require_alpha,
    require_enough,
    whole_shares,
)


@final
@dataclass(frozen=True)
class IIDSplit(Split):
    """IID: rows are shuffled and cut into equal parts.

    FedPAQ's experiments: 10,000 training examples over 50 clients, 200 each, of CIFAR-10 or of
    MNIST's digits 0 and 8 (`only`), with `test_from = "test-set"`.

    Args:
        clients: number of clients.
        examples: use only this many rows, chosen at random; None: all.
    """

    name: ClassVar[str] = "iid"
    needs_classes: ClassVar[bool] = False

    clients: int = 20
    examples: int | None = None

    def __post_init__(self) -> None:
        require_count("clients", self.clients)
        if self.examples is not None:
            require_count("examples", self.examples)

    def _assign(self, rows: LabeledRows, rng: Rng) -> Assignment:
        n = len(rows.y) if self.examples is None else self.examples
        allowed = f"there are only {len(rows.y)}"
        require(n <= len(rows.y), "examples", n, allowed)
        require_enough(n, self.clients)
        owner = np.full(len(rows.y), -1)
        owner[rng.permutation(len(rows.y))[:n]] = np.arange(n) * self.clients // n
        return numbered(owner, self.clients)


@final
@dataclass(frozen=True)
class QuantitySplit(Split):
    """Quantity skew: one distribution for all clients, sizes from Dirichlet(alpha).

    Args:
        clients: number of clients.
        alpha: small: very different sizes; large: similar sizes.
    """

    name: ClassVar[str] = "quantity"
    needs_classes: ClassVar[bool] = False

    clients: int = 20
    alpha: float = 0.5

    def __post_init__(self) -> None:
        require_count("clients", self.clients)
        require_alpha(self.alpha)

    def _assign(self, rows: LabeledRows, rng: Rng) -> Assignment:
        n = len(rows.y)
        require_enough(n, self.clients)
        sizes = whole_shares(rng.dirichlet(np.full(self.clients, self.alpha)), n)
        owner = rng.permutation(np.repeat(np.arange(self.clients), sizes))
        return numbered(fill_up(owner, self.clients, rng), self.clients)


@final
@dataclass(frozen=True)
class DirichletSplit(Split):
    """Label skew: each client's mix of classes comes from Dirichlet(alpha).

    Every row is used. Unless `balanced`, each class is divided among clients in Dirichlet(alpha)
    proportions, so sizes differ too; a client with fewer than two rows gets some of the largest
    clients'. If `balanced`, clients are of equal size, and each has a Dirichlet mixture, changed as
    little as possible (iterative proportional fitting) to use up every class.

    Args:
        clients: number of clients.
        alpha: small: very different clients; large: similar clients.
        balanced: all clients have the same number of rows.
    """

    name: ClassVar[str] = "dirichlet"

    clients: int = 20
    alpha: float = 0.3
    balanced: bool = False

    def __post_init__(self) -> None:
        require_count("clients", self.clients)
        require_alpha(self.alpha)

    def _assign(self, rows: LabeledRows, rng: Rng) -> Assignment:
        require_enough(len(rows.y), self.clients)
        assign = self._balanced if self.balanced else self._unbalanced
        return numbered(assign(rows, rng), self.clients)

    def _unbalanced(self, rows: LabeledRows, rng: Rng) -> np.ndarray:
        available = rows.class_counts
        shares = rng.dirichlet(np.full(self.clients, self.alpha), size=len(available)).T
        owner = assign_by_counts(rows.y, whole_shares(shares, available), rng)
        return fill_up(owner, self.clients, rng)

    def _balanced(self, rows: LabeledRows, rng: Rng) -> np.ndarray:
        n, available = len(rows.y), rows.class_counts
        target = np.diff(np.arange(self.clients + 1) * n // self.clients)
        mixtures = rng.dirichlet(np.full(len(available), self.alpha), size=self.clients)
        # All mixtures may leave a class out, but its rows, if there are any, must be used.
        counts = (mixtures + 1e-9) * target[:, None] * (available > 0)
        for _ in range(100):
            counts *= available / np.where(available > 0, counts.sum(axis=0), 1)
            counts *= (target / counts.sum(axis=1))[:, None]
        owner = assign_by_counts(rows.y, whole_shares(counts, available), rng)
        size = np.bincount(owner, minlength=self.clients)
        give, need = np.maximum(size - target, 0), np.maximum(target - size, 0)
        return move_rows(owner, give, need, rng)


@final
@dataclass(frozen=True)
class ShardSplit(Split):
    """FedAvg's shards: rows sorted by label, cut into shards, a few shards per client.

    Args:
        clients: number of clients.
        shards_per_client: number of shards that each client gets.
    """

    name: ClassVar[str] = "shards"

    clients: int = 20
    shards_per_client: int = 2

    def __post_init__(self) -> None:
        require_count("clients", self.clients)
        require_count("shards_per_client", self.shards_per_client)

    def _assign(self, rows: LabeledRows, rng: Rng) -> Assignment:
        n, shards = len(rows.y), self.clients * self.shards_per_client
        if n < max(shards, MIN_EXAMPLES * self.clients):
            raise DataError(
                f"{n} examples cannot be cut into {shards} shards for {self.clients} clients of at "
                f"least {MIN_EXAMPLES} examples; use fewer clients or shards"
            )
        by_label = np.lexsort((rng.random(n), rows.y))
        owner = np.empty(n, int)
        shard = np.arange(n) * shards // n
        owner[by_label] = rng.permutation(shards)[shard] // self.shards_per_client
        return numbered(owner, self.clients)


@final
@dataclass(frozen=True)
class NaturalSplit(Split):
    """The data's own clients: writers, speakers, hospitals, or a column of a table.

    Args:
        clients: use only this many of them, chosen at random; None: all.
        min_examples: leave out clients with fewer rows.
    """

    name: ClassVar[str] = "natural"
    test_set: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = False

    clients: int | None = None
    min_examples: int = 1

    def __post_init__(self) -> None:
        if self.clients is not None:
            require_count("clients", self.clients)
        require_count("min_examples", self.min_examples)

    def _assign(self, rows: LabeledRows, rng: Rng) -> Assignment:
        if rows.client is None or rows.names is None:
            raise DataError(
                "these data have no natural clients; choose another split, such as "
                'split = "dirichlet" or "iid", or, for a table, name the column that has them '
                '(client = "...")'
            )
        sizes = np.bincount(rows.client, minlength=len(rows.names))
        selected = np.flatnonzero(sizes >= self.min_examples)
        allowed = f"the largest client has {sizes.max()}"
        require(len(selected) > 0, "min_examples", self.min_examples, allowed)
        if self.clients is not None:
            allowed = f"there are only {len(selected)} with at least {self.min_examples} examples"
            require(self.clients <= len(selected), "clients", self.clients, allowed)
            selected = np.sort(rng.permutation(selected)[: self.clients])
        number = np.full(len(rows.names), -1)
        number[selected] = np.arange(len(selected))
        return Assignment(number[rows.client], tuple(rows.names[i] for i in selected))
