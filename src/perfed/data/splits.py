"""Splits: which client gets which row of a set.

A row goes to at most one client. A split that the data cannot give is refused with the numbers.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, final

import numpy as np
from jaxtyping import Int

from perfed.core.errors import DataError, require, require_choice, require_count
from perfed.data.as_published import CLASSES, CLIENTS, Part, pfedme_parts

Owners = Int[np.ndarray, " examples"]
Counts = Int[np.ndarray, "clients classes"]
Rng = np.random.Generator

# One to train on and one held out.
LEAST = 2


class Labeled(NamedTuple):
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

    def deal(self, rows: Labeled, rng: Rng) -> Assignment:
        """The client of each row."""
        if self.needs_classes and rows.classes is None:
            raise DataError(
                f'split = "{self.name}" goes by class, and these data are a regression; '
                'use "iid", "quantity" or "natural"'
            )
        return self._deal(rows, rng)

    def parts(self, rows: Labeled) -> tuple[list[Part], list[Part]] | None:
        """Each client's rows to train on and to be scored on, where clients share rows; or None."""
        return None

    @property
    def name(self) -> str:
        """What it is called in a configuration."""
        return next(name for name, split in SPLITS.items() if split is type(self))

    @abstractmethod
    def _deal(self, rows: Labeled, rng: Rng) -> Assignment: ...


@final
@dataclass(frozen=True)
class PerFedAvg(Split):
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

    def _deal(self, rows: Labeled, rng: Rng) -> Assignment:
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
        return _numbered(by_counts(rows.y, counts, rng), self.clients)

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
class PFedMe(Split):
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

    def parts(self, rows: Labeled) -> tuple[list[Part], list[Part]] | None:
        """Each client's rows to train on and to be scored on, where clients share them."""
        if self.overlap == "none":
            return None
        if rows.classes != CLASSES:
            raise DataError(
                f'overlap = "as-published" is of {CLASSES} classes, and these data have '
                f"{rows.classes or 'none'}"
            )
        return pfedme_parts(rows.y)

    def _deal(self, rows: Labeled, rng: Rng) -> Assignment:
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
        return _numbered(by_counts(rows.y, counts, rng), self.clients)


@final
@dataclass(frozen=True)
class IID(Split):
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

    def _deal(self, rows: Labeled, rng: Rng) -> Assignment:
        n = len(rows.y) if self.examples is None else self.examples
        allowed = f"there are only {len(rows.y)} to deal out"
        require(n <= len(rows.y), "examples", n, allowed)
        _require_enough(n, self.clients)
        owner = np.full(len(rows.y), -1)
        owner[rng.permutation(len(rows.y))[:n]] = np.arange(n) * self.clients // n
        return _numbered(owner, self.clients)


@final
@dataclass(frozen=True)
class Quantity(Split):
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
        _require_alpha(self.alpha)

    def _deal(self, rows: Labeled, rng: Rng) -> Assignment:
        n = len(rows.y)
        _require_enough(n, self.clients)
        sizes = _parts(rng.dirichlet(np.full(self.clients, self.alpha)), n)
        owner = rng.permutation(np.repeat(np.arange(self.clients), sizes))
        return _numbered(_with_least(owner, self.clients, rng), self.clients)


@final
@dataclass(frozen=True)
class Dirichlet(Split):
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
        _require_alpha(self.alpha)

    def _deal(self, rows: Labeled, rng: Rng) -> Assignment:
        n, have = len(rows.y), rows.have
        _require_enough(n, self.clients)
        if not self.balanced:
            shares = rng.dirichlet(np.full(self.clients, self.alpha), size=len(have)).T
            owner = by_counts(rows.y, _parts(shares, have), rng)
            return _numbered(_with_least(owner, self.clients, rng), self.clients)
        target = np.diff(np.arange(self.clients + 1) * n // self.clients)
        mixtures = rng.dirichlet(np.full(len(have), self.alpha), size=self.clients)
        # A mixture may leave a class out, but someone must take it, unless it has no rows at all.
        wanted = (mixtures + 1e-9) * target[:, None] * (have > 0)
        for _ in range(100):
            wanted *= have / np.where(have > 0, wanted.sum(axis=0), 1)
            wanted *= (target / wanted.sum(axis=1))[:, None]
        owner = by_counts(rows.y, _parts(wanted, have), rng)
        size = np.bincount(owner, minlength=self.clients)
        give, need = np.maximum(size - target, 0), np.maximum(target - size, 0)
        return _numbered(_moved(owner, give, need, rng), self.clients)


@final
@dataclass(frozen=True)
class Shards(Split):
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

    def _deal(self, rows: Labeled, rng: Rng) -> Assignment:
        n, pieces = len(rows.y), self.clients * self.shards
        if n < max(pieces, LEAST * self.clients):
            raise DataError(
                f"{n} examples cannot be cut into {pieces} shards for {self.clients} clients of at "
                f"least {LEAST} examples; ask for fewer clients or shards"
            )
        by_label = np.lexsort((rng.random(n), rows.y))
        owner = np.empty(n, int)
        owner[by_label] = rng.permutation(pieces)[np.arange(n) * pieces // n] // self.shards
        return _numbered(owner, self.clients)


@final
@dataclass(frozen=True)
class Natural(Split):
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

    def _deal(self, rows: Labeled, rng: Rng) -> Assignment:
        if rows.client is None or rows.names is None:
            others = ", ".join(f'"{name}"' for name in SPLITS if name != self.name)
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


SPLITS: dict[str, type[Split]] = {
    "per-fedavg": PerFedAvg,
    "pfedme": PFedMe,
    "iid": IID,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "quantity": Quantity,
    "natural": Natural,
}


def by_counts(y: Int[np.ndarray, " examples"], counts: Counts, rng: Rng) -> Owners:
    """Give client i counts[i, c] random rows of class c."""
    owner = np.full(len(y), -1)
    for c in range(counts.shape[1]):
        rows = rng.permutation(np.flatnonzero(y == c))
        owner[rows[: counts[:, c].sum()]] = np.repeat(np.arange(len(counts)), counts[:, c])
    return owner


def label_counts(
    y: Int[np.ndarray, " examples"], owner: Owners, clients: int, classes: int
) -> Counts:
    """How many rows of each class each client has."""
    mine = owner >= 0
    cells = owner[mine] * classes + y[mine]
    return np.bincount(cells, minlength=clients * classes).reshape(clients, classes)


def alike(counts: Counts, have: Int[np.ndarray, " classes"], rng: Rng) -> Counts:
    """As many rows as `have` allows, with every client in the proportions of `counts`."""
    asked = counts.sum(axis=0)
    low, high = 0.0, float(np.min((have / np.maximum(asked, 1))[asked > 0]))
    phase = rng.random((len(counts), 1))

    def scaled(factor: float) -> Counts:
        due = counts * factor
        nearest = np.floor(due + 0.5)
        # Where a client is due only a few of a class, rounding each by itself would drop or double
        # many: there its rows are laid end to end, and whole ones cut off from a random phase.
        ends = np.floor(np.cumsum(due, axis=1) + phase)
        in_a_row = np.diff(ends, axis=1, prepend=0)
        few = np.where(counts > 0, due, np.inf).min(axis=1, keepdims=True) < 3
        return np.where(few, in_a_row, nearest).astype(int)

    # Rounding may ask for a few too many at the largest factor: the largest that fits instead.
    if np.all(scaled(high).sum(axis=0) <= have):
        return scaled(high)
    for _ in range(40):
        middle = (low + high) / 2
        fits = np.all(scaled(middle).sum(axis=0) <= have)
        low, high = (middle, high) if fits else (low, middle)
    return scaled(low)


def held_out(
    y: Int[np.ndarray, " examples"], groups: Owners, fraction: float, rng: Rng
) -> np.ndarray:
    """A mask of the rows to hold out: of each group the same fraction, spread over its labels.

    Every group of two or more rows keeps at least one on each side.
    """
    order = np.lexsort((rng.random(len(y)), y, groups))
    sizes = np.bincount(groups)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    size = sizes[groups[order]]
    place = np.arange(len(y)) - first[groups[order]]
    count = held_out_counts(sizes, fraction)[groups[order]]
    # Every (size/count)-th row in label order, from a random phase: exactly `count` of `size` rows.
    phase = rng.integers(0, np.maximum(sizes, 1))[groups[order]]
    chosen = ((place + 1) * count + phase) // size > (place * count + phase) // size
    mask = np.empty(len(y), bool)
    mask[order] = chosen
    return mask


def held_out_counts(sizes: Int[np.ndarray, " groups"], fraction: float) -> np.ndarray:
    """How many rows to hold out of groups of these sizes: at least one, and never all."""
    wanted = np.rint(sizes * fraction).astype(int)
    return np.asarray(np.clip(wanted, 1, np.maximum(sizes - 1, 1)))


def _numbered(owner: Owners, clients: int) -> Assignment:
    return Assignment(owner, tuple(str(i) for i in range(clients)))


def _parts(shares: np.ndarray, whole: np.ndarray | int) -> np.ndarray:
    """Whole numbers in these proportions along the first axis that add up to `whole`."""
    share = np.cumsum(shares, axis=0)
    # A class of which nobody holds any share is empty.
    ends = np.rint(share / np.where(share[-1] > 0, share[-1], 1) * whole).astype(int)
    parts: np.ndarray = np.diff(ends, axis=0, prepend=np.zeros_like(ends[:1]))
    return parts


def _with_least(owner: Owners, clients: int, rng: Rng) -> Owners:
    """Bring everyone up to `LEAST` rows, with random rows of those that have most."""
    size = np.bincount(owner, minlength=clients)
    need = np.maximum(LEAST - size, 0)
    # The highest level such that what lies above it covers the need.
    low, high = LEAST, int(size.max())
    while low < high:
        middle = (low + high + 1) // 2
        if np.maximum(size - middle, 0).sum() >= need.sum():
            low = middle
        else:
            high = middle - 1
    give = np.maximum(size - low, 0)
    givers = np.flatnonzero(give)
    give[rng.permutation(givers)[: give.sum() - need.sum()]] -= 1
    return _moved(owner, give, need, rng)


def _moved(
    owner: Owners, give: Int[np.ndarray, " clients"], need: Int[np.ndarray, " clients"], rng: Rng
) -> Owners:
    """Take `give` random rows from each client, and give them to those in need."""
    order = np.lexsort((rng.random(len(owner)), owner))
    size = np.bincount(owner, minlength=len(give))
    rank = np.arange(len(owner)) - (np.cumsum(size) - size)[owner[order]]
    taken = order[rank < give[owner[order]]]
    moved = owner.copy()
    moved[rng.permutation(taken)] = np.repeat(np.arange(len(need)), need)
    return moved


def _require_enough(n: int, clients: int) -> None:
    if n < LEAST * clients:
        raise DataError(
            f"{n} examples cannot give each of {clients} clients the two it needs, one to train on "
            "and one held out"
        )


def _require_alpha(alpha: float) -> None:
    good = 0 < alpha <= 1e100
    require(good, "alpha", alpha, "must be greater than 0, and at most 1e100")
