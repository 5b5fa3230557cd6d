"""Which rows of a client are held out."""

import numpy as np
from jaxtyping import Int

from perfed.data.splits.base import Owners, Rng


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
