"""Rows assigned by counts per client and class, and moved until every client has enough."""

import numpy as np
from jaxtyping import Int

from perfed.core.errors import DataError, require
from perfed.data.splits.base import MIN_EXAMPLES, Assignment, Counts, Owners, Rng


def assign_by_counts(y: Int[np.ndarray, " examples"], counts: Counts, rng: Rng) -> Owners:
    """Give client i counts[i, c] random rows of class c."""
    owner = np.full(len(y), -1)
    for c in range(counts.shape[1]):
        rows = rng.permutation(np.flatnonzero(y == c))
        owner[rows[: counts[:, c].sum()]] = np.repeat(np.arange(len(counts)), counts[:, c])
    return owner


def label_counts(
    y: Int[np.ndarray, " examples"], owner: Owners, clients: int, classes: int
) -> Counts:
    """The number of rows of each client and class."""
    used = owner >= 0
    cells = owner[used] * classes + y[used]
    return np.bincount(cells, minlength=clients * classes).reshape(clients, classes)


def proportional_counts(counts: Counts, available: Int[np.ndarray, " classes"], rng: Rng) -> Counts:
    """As many rows as are available, with every client in the proportions of `counts`."""
    needed = counts.sum(axis=0)
    low, high = 0.0, float(np.min((available / np.maximum(needed, 1))[needed > 0]))
    phase = rng.random((len(counts), 1))

    def scaled(factor: float) -> Counts:
        exact = counts * factor
        nearest = np.floor(exact + 0.5)
        # Where a client gets only a few rows of a class, rounding each class by itself would drop
        # or double many: there the client's cumulative counts are rounded, from a random phase.
        ends = np.floor(np.cumsum(exact, axis=1) + phase)
        cumulative = np.diff(ends, axis=1, prepend=0)
        few = np.where(counts > 0, exact, np.inf).min(axis=1, keepdims=True) < 3
        return np.where(few, cumulative, nearest).astype(int)

    # Rounding may need a few rows too many at the largest factor: then the largest that fits.
    if np.all(scaled(high).sum(axis=0) <= available):
        return scaled(high)
    for _ in range(40):
        middle = (low + high) / 2
        fits = np.all(scaled(middle).sum(axis=0) <= available)
        low, high = (middle, high) if fits else (low, middle)
    return scaled(low)


def numbered(owner: Owners, clients: int) -> Assignment:
    """An assignment to clients named by their numbers."""
    return Assignment(owner, tuple(str(i) for i in range(clients)))


def whole_shares(shares: np.ndarray, total: np.ndarray | int) -> np.ndarray:
    """Whole numbers in the proportions of `shares` along the first axis that add up to `total`."""
    share = np.cumsum(shares, axis=0)
    # A class of which no client has a share stays unused.
    ends = np.rint(share / np.where(share[-1] > 0, share[-1], 1) * total).astype(int)
    return np.asarray(np.diff(ends, axis=0, prepend=np.zeros_like(ends[:1])))


def fill_up(owner: Owners, clients: int, rng: Rng) -> Owners:
    """Bring every client up to `MIN_EXAMPLES` rows, with random rows of the largest clients."""
    size = np.bincount(owner, minlength=clients)
    need = np.maximum(MIN_EXAMPLES - size, 0)
    # The highest level such that the rows above it cover the need.
    low, high = MIN_EXAMPLES, int(size.max())
    while low < high:
        middle = (low + high + 1) // 2
        if np.maximum(size - middle, 0).sum() >= need.sum():
            low = middle
        else:
            high = middle - 1
    give = np.maximum(size - low, 0)
    givers = np.flatnonzero(give)
    give[rng.permutation(givers)[: give.sum() - need.sum()]] -= 1
    return move_rows(owner, give, need, rng)


def move_rows(
    owner: Owners, give: Int[np.ndarray, " clients"], need: Int[np.ndarray, " clients"], rng: Rng
) -> Owners:
    """Take `give` random rows from each client, and assign them to the clients in need."""
    order = np.lexsort((rng.random(len(owner)), owner))
    size = np.bincount(owner, minlength=len(give))
    rank = np.arange(len(owner)) - (np.cumsum(size) - size)[owner[order]]
    moved = order[rank < give[owner[order]]]
    result = owner.copy()
    result[rng.permutation(moved)] = np.repeat(np.arange(len(need)), need)
    return result


def require_enough(examples: int, clients: int) -> None:
    """Raise unless each client can have one row to train on and one held out."""
    if examples < MIN_EXAMPLES * clients:
        raise DataError(
            f"{examples} examples are too few for {clients} clients: each needs one to train on "
            "and one held out; use fewer clients"
        )


def require_alpha(alpha: float) -> None:
    """Raise unless a Dirichlet distribution can have this parameter."""
    good = 0 < alpha <= 1e100
    require(good, "alpha", alpha, "must be greater than 0, and at most 1e100")
