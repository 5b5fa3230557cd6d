"""Which rows of a client are held out."""

import numpy as np
from jaxtyping import Bool, Int

from perfed.data.splits.base import Owners, Rng


def hold_out_mask(
    y: Int[np.ndarray, " examples"], groups: Owners, fraction: float, rng: Rng
) -> Bool[np.ndarray, " examples"]:
    """The rows to hold out: the same fraction of each group, stratified by label.

    Every group of two or more rows keeps at least one on each side.
    """
    order = np.lexsort((rng.random(len(y)), y, groups))
    sizes = np.bincount(groups)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    size = sizes[groups[order]]
    place = np.arange(len(y)) - first[groups[order]]
    count = hold_out_counts(sizes, fraction)[groups[order]]
    # Every (size/count)-th row in label order, from a random phase: exactly `count` of `size` rows.
    phase = rng.integers(0, np.maximum(sizes, 1))[groups[order]]
    chosen = ((place + 1) * count + phase) // size > (place * count + phase) // size
    mask = np.empty(len(y), bool)
    mask[order] = chosen
    return mask


def hold_out_counts(sizes: Int[np.ndarray, " groups"], fraction: float) -> np.ndarray:
    """How many rows to hold out of groups of these sizes: at least one, and never all."""
    counts = np.rint(sizes * fraction).astype(int)
    return np.asarray(np.clip(counts, 1, np.maximum(sizes - 1, 1)))
