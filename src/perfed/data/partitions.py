"""Splits of a labelled set over clients: each gives, for every client, the rows it gets.

A row goes to at most one client. A split that the data cannot give is refused with the numbers.
"""

import numpy as np
from jaxtyping import Int

from perfed.errors import DataError

Shares = list[Int[np.ndarray, " rows"]]
Labels = Int[np.ndarray, " examples"]


def held_out(
    labels: Labels, groups: Int[np.ndarray, " examples"], fraction: float, rng: np.random.Generator
) -> np.ndarray:
    """A mask of the rows to hold out: of each group the same fraction, spread over its labels.

    Every group of two or more rows keeps at least one on each side.
    """
    order = np.lexsort((rng.random(len(labels)), labels, groups))
    sizes = np.bincount(groups)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    size = sizes[groups[order]]
    place = np.arange(len(labels)) - first[groups[order]]
    count = np.clip(np.rint(sizes * fraction).astype(int), 1, np.maximum(sizes - 1, 1))
    count = count[groups[order]]
    # Every (size/count)-th row in label order, from a random phase: exactly `count` of `size` rows.
    phase = rng.integers(0, np.maximum(sizes, 1))[groups[order]]
    chosen = ((place + 1) * count + phase) // size > (place * count + phase) // size
    mask = np.empty(len(labels), bool)
    mask[order] = chosen
    return mask


def per_fedavg_room(labels: Labels, clients: int, classes: int, diff_hetero: bool = False) -> int:
    """The largest `a` for which `per_fedavg` can serve this many clients."""
    have = np.bincount(labels, minlength=classes)
    quarters = _per_fedavg_quarters(clients, classes, diff_hetero).sum(axis=0)
    needed = quarters > 0
    # A class is asked for quarters/4 * a images (a/2 is two quarters): keep a even.
    return int(np.min(have[needed] * 4 // quarters[needed])) // 2 * 2


def per_fedavg(
    labels: Labels,
    clients: int,
    classes: int,
    a: int,
    rng: np.random.Generator,
    diff_hetero: bool = False,
) -> Shares:
    """The split of Per-FedAvg section 5.

    The first half of the clients hold `a` images of each of the first half of the classes; each
    other client holds a/2 of one class of the first half (none with `diff_hetero`) and 2a of one
    class of the second.
    """
    if a < 2 or a % 2:
        raise DataError(f"the Per-FedAvg split needs an even a of at least 2, not {a}")
    counts = _per_fedavg_quarters(clients, classes, diff_hetero) * a // 4
    have, need = np.bincount(labels, minlength=classes), counts.sum(axis=0)
    short = np.flatnonzero(need > have)
    if len(short):
        c = short[0]
        raise DataError(
            f"the Per-FedAvg split with a = {a} and {clients} clients needs {need[c]} images of "
            f"class {c}, and there are {have[c]}; the largest a is "
            f"{per_fedavg_room(labels, clients, classes, diff_hetero)}"
        )
    return _deal(labels, counts, rng)


def dirichlet(
    labels: Labels, clients: int, classes: int, concentration: float, rng: np.random.Generator
) -> Shares:
    """Each class is shared out in Dirichlet(concentration) proportions; all rows are used.

    Clients left with fewer than two rows get rows from the client that has most, so that everyone
    has something to learn from and something held out.
    """
    if len(labels) < 2 * clients:
        raise DataError(
            f"{len(labels)} examples cannot give each of {clients} clients the two it needs, "
            "one to train on and one held out"
        )
    have = np.bincount(labels, minlength=classes)
    shares = rng.dirichlet(np.full(clients, concentration), size=classes)
    bounds = np.rint(np.cumsum(shares, axis=1) * have[:, None]).astype(int)
    bounds[:, -1] = have
    counts = np.diff(bounds, axis=1, prepend=0).T
    for poor in np.flatnonzero(counts.sum(axis=1) < 2):
        while counts[poor].sum() < 2:
            rich = np.argmax(counts.sum(axis=1))
            c = np.argmax(counts[rich])
            counts[rich, c] -= 1
            counts[poor, c] += 1
    return _deal(labels, counts, rng)


def _per_fedavg_quarters(clients: int, classes: int, diff_hetero: bool) -> np.ndarray:
    """How many quarters of `a` each client gets of each class."""
    if clients < 2 or clients % 2:
        raise DataError(f"the Per-FedAvg split needs an even number of clients, not {clients}")
    if classes < 2 or classes % 2:
        raise DataError(f"the Per-FedAvg split needs an even number of classes, not {classes}")
    half, low = clients // 2, classes // 2
    quarters = np.zeros((clients, classes), int)
    quarters[:half, :low] = 4
    other = np.arange(half)
    if not diff_hetero:
        quarters[half + other, other % low] = 2
    # Shifted by one in each turn of the classes, so that all pairs of classes come up.
    quarters[half + other, low + (other + other // low) % low] = 8
    return quarters


def _deal(labels: Labels, counts: np.ndarray, rng: np.random.Generator) -> Shares:
    """Give client i counts[i, c] random rows of class c."""
    clients, classes = counts.shape
    owner = np.full(len(labels), -1)
    for c in range(classes):
        rows = rng.permutation(np.flatnonzero(labels == c))
        owner[rows[: counts[:, c].sum()]] = np.repeat(np.arange(clients), counts[:, c])
    order = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :]
    return np.split(order, np.cumsum(counts.sum(axis=1))[:-1])
