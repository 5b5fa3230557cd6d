"""Rows dealt out by counts, and moved so that nobody has too few."""

import numpy as np
from jaxtyping import Int

from perfed.core.errors import DataError, require
from perfed.data.splits.base import LEAST, Assignment, Counts, Owners, Rng


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


def numbered(owner: Owners, clients: int) -> Assignment:
    """Clients called by their numbers."""
    return Assignment(owner, tuple(str(i) for i in range(clients)))


def parts(shares: np.ndarray, whole: np.ndarray | int) -> np.ndarray:
    """Whole numbers in these proportions along the first axis that add up to `whole`."""
    share = np.cumsum(shares, axis=0)
    # A class of which nobody holds any share is empty.
    ends = np.rint(share / np.where(share[-1] > 0, share[-1], 1) * whole).astype(int)
    parts: np.ndarray = np.diff(ends, axis=0, prepend=np.zeros_like(ends[:1]))
    return parts


def with_least(owner: Owners, clients: int, rng: Rng) -> Owners:
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
    return moved(owner, give, need, rng)


def moved(
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


def require_enough(n: int, clients: int) -> None:
    """Raise unless each client can have one row to train on and one held out."""
    if n < LEAST * clients:
        raise DataError(
            f"{n} examples cannot give each of {clients} clients the two it needs, one to train on "
            "and one held out"
        )


def require_alpha(alpha: float) -> None:
    """Raise unless a Dirichlet distribution can have this parameter."""
    good = 0 < alpha <= 1e100
    require(good, "alpha", alpha, "must be greater than 0, and at most 1e100")
