"""Splits of any set: alike, by Dirichlet mixtures, by shards, in uneven amounts, by clients."""

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from perfed.core.errors import DataError, require, require_count
from perfed.data.splits.base import LEAST, Assignment, LabeledRows, Rng, Split, split_names
from perfed.data.splits.counts import (
    by_counts,
    moved,
    numbered,
    parts,
    require_alpha,
    require_enough,
    with_least,
)


@final
@dataclass(frozen=True)
class IIDSplit(Split):
    """Everyone draws from the same distribution: rows are shuffled and cut into equal parts.

    FedPAQ's experiments: 10,000 training examples over 50 clients, 200 each, of CIFAR-10 or of
    MNIST's digits 0 and 8 (`only`), with `test_from = "test-set"`.

    Args:
        clients: how many clients.
        examples: use so many, chosen at random; None: all.
    """

    clients: int = 20
    examples: int | None = None

    needs_classes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_count("clients", self.clients)
        if self.examples is not None:
            require_count("examples", self.examples)

    def _assign(self, rows: LabeledRows, rng: Rng) -> Assignment:
        n = len(rows.y) if self.examples is None else self.examples
        allowed = f"there are only {len(rows.y)} to deal out"
        require(n <= len(rows.y), "examples", n, allowed)
        require_enough(n, self.clients)
        owner = np.full(len(rows.y), -1)
        owner[rng.permutation(len(rows.y))[:n]] = np.arange(n) * self.clients // n
        return numbered(owner, self.clients)


@final
@dataclass(frozen=True)
class QuantitySplit(Split):
    """Quantity skew: the same distribution for everyone, in Dirichlet(alpha) amounts.

    Args:
        clients: how many clients.
        alpha: small is uneven, large is alike.
    """

    clients: int = 20
    alpha: float = 0.5

    needs_classes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_count("clients", self.clients)
        require_alpha(self.alpha)

    def _assign(self, rows: LabeledRows, rng: Rng) -> Assignment:
        n = len(rows.y)
        require_enough(n, self.clients)
        sizes = parts(rng.dirichlet(np.full(self.clients, self.alpha)), n)
        owner = rng.permutation(np.repeat(np.arange(self.clients), sizes))
        return numbered(with_least(owner, self.clients, rng), self.clients)


@final
@dataclass(frozen=True)
class DirichletSplit(Split):
    """Label skew: client mixtures of classes are drawn from a Dirichlet distribution.

    Every row is used. Unless `balanced`, each class is shared out in Dirichlet(alpha)
    proportions, so sizes differ too; a client left with fewer than two rows gets some from those
    that have most. If `balanced`, clients are of equal size, and each has a Dirichlet mixture,
    bent as little as possible (iterative proportional fitting) to use up every class.

    Args:
        clients: how many clients.
        alpha: small is uneven, large is alike.
        balanced: all clients of one size.
    """

    clients: int = 20
    alpha: float = 0.3
    balanced: bool = False

    def __post_init__(self) -> None:
        require_count("clients", self.clients)
        require_alpha(self.alpha)

    def _assign(self, rows: LabeledRows, rng: Rng) -> Assignment:
        n, have = len(rows.y), rows.have
        require_enough(n, self.clients)
        if not self.balanced:
            shares = rng.dirichlet(np.full(self.clients, self.alpha), size=len(have)).T
            owner = by_counts(rows.y, parts(shares, have), rng)
            return numbered(with_least(owner, self.clients, rng), self.clients)
        target = np.diff(np.arange(self.clients + 1) * n // self.clients)
        mixtures = rng.dirichlet(np.full(len(have), self.alpha), size=self.clients)
        # A mixture may leave a class out, but someone must take it, unless it has no rows at all.
        wanted = (mixtures + 1e-9) * target[:, None] * (have > 0)
        for _ in range(100):
            wanted *= have / np.where(have > 0, wanted.sum(axis=0), 1)
            wanted *= (target / wanted.sum(axis=1))[:, None]
        owner = by_counts(rows.y, parts(wanted, have), rng)
        size = np.bincount(owner, minlength=self.clients)
        give, need = np.maximum(size - target, 0), np.maximum(target - size, 0)
        return numbered(moved(owner, give, need, rng), self.clients)


@final
@dataclass(frozen=True)
class ShardSplit(Split):
    """FedAvg's label shards: rows sorted by label, cut into shards, a few shards to each client.

    Args:
        clients: how many clients.
        shards: how many shards each client gets.
    """

    clients: int = 20
    shards: int = 2

    def __post_init__(self) -> None:
        require_count("clients", self.clients)
        require_count("shards", self.shards)

    def _assign(self, rows: LabeledRows, rng: Rng) -> Assignment:
        n, pieces = len(rows.y), self.clients * self.shards
        if n < max(pieces, LEAST * self.clients):
            raise DataError(
                f"{n} examples cannot be cut into {pieces} shards for {self.clients} clients of at "
                f"least {LEAST} examples; ask for fewer clients or shards"
            )
        by_label = np.lexsort((rng.random(n), rows.y))
        owner = np.empty(n, int)
        owner[by_label] = rng.permutation(pieces)[np.arange(n) * pieces // n] // self.shards
        return numbered(owner, self.clients)


@final
@dataclass(frozen=True)
class NaturalSplit(Split):
    """By the data's own clients: writers, speakers, hospitals, or a column of a table.

    Args:
        clients: use so many of them, chosen at random; None: all.
        min_examples: leave out clients that have fewer.
    """

    clients: int | None = None
    min_examples: int = 1

    test_set: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.clients is not None:
            require_count("clients", self.clients)
        require_count("min_examples", self.min_examples)

    def _assign(self, rows: LabeledRows, rng: Rng) -> Assignment:
        if rows.client is None or rows.names is None:
            others = ", ".join(f'"{name}"' for name in split_names() if name != self.name)
            raise DataError(
                "these data name no clients of their own; say which column does (client = ...) if "
                f"they are a table, or choose one of the other splits: {others}"
            )
        sizes = np.bincount(rows.client, minlength=len(rows.names))
        kept = np.flatnonzero(sizes >= self.min_examples)
        allowed = f"the largest client has {sizes.max()}"
        require(len(kept) > 0, "min_examples", self.min_examples, allowed)
        if self.clients is not None:
            allowed = f"there are only {len(kept)} with at least {self.min_examples} examples"
            require(self.clients <= len(kept), "clients", self.clients, allowed)
            kept = np.sort(rng.permutation(kept)[: self.clients])
        number = np.full(len(rows.names), -1)
        number[kept] = np.arange(len(kept))
        return Assignment(number[rows.client], tuple(rows.names[i] for i in kept))
