"""The rows of a data set assigned to clients, to train on or to hold out."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from perfed.core.errors import DataError
from perfed.data.splits import (
    MIN_EXAMPLES,
    LabeledRows,
    NaturalSplit,
    Split,
    assign_by_counts,
    hold_out_counts,
    hold_out_mask,
    label_counts,
    proportional_counts,
)
from perfed.data.splits.base import Owners, Rng


class Partition(NamedTuple):
    """The clients' names, the client of each row (-1: none), and the rows of both kinds."""

    names: tuple[str, ...]
    owner: Owners
    train: Int[np.ndarray, " rows"]
    test: Int[np.ndarray, " rows"]


def hold_out_per_client(
    rows: LabeledRows, split: Split, fraction: float, gap: int | None, rng: Rng
) -> Partition:
    """Each client holds out a part of its own rows, so that both sides have its distribution."""
    owner, names = split.assign(rows, rng)
    sizes = np.bincount(owner[owner >= 0], minlength=len(names))
    small = np.flatnonzero(sizes < MIN_EXAMPLES)
    if len(small):
        hint = "; min_examples = 2 leaves such clients out"
        raise DataError(
            f"client {names[small[0]]} has {sizes[small[0]]} example(s), and needs two: one to "
            f"train on and one held out{hint if isinstance(split, NaturalSplit) else ''}"
        )
    used = np.flatnonzero(owner >= 0)
    if gap is None:
        out = hold_out_mask(rows.y[used], owner[used], fraction, rng)
        return Partition(names, owner, used[~out], used[out])
    out_sizes = hold_out_counts(sizes, fraction)
    empty = np.flatnonzero(sizes <= out_sizes + gap)
    if len(empty):
        i = empty[0]
        raise DataError(
            f"client {names[i]} has {sizes[i]} windows of text, too few to train on after "
            f"holding out {out_sizes[i]} and a gap of {gap}; use longer texts (min_characters), a "
            "shorter context or a larger stride"
        )
    # Windows overlap their neighbors: the end of each text is held out, after a gap.
    order = np.argsort(owner[used], kind="stable")
    place = np.empty(len(used), int)
    place[order] = np.arange(len(used)) - (np.cumsum(sizes) - sizes)[owner[used][order]]
    to_end = (sizes[owner[used]] - place) - out_sizes[owner[used]]
    return Partition(names, owner, used[to_end > gap], used[to_end <= 0])


def split_test_set(
    rows: LabeledRows, test: Bool[np.ndarray, " examples"], split: Split, rng: Rng
) -> Partition:
    """Training and test rows, each client's in the same proportions."""
    if isinstance(split, NaturalSplit):
        # The rows say both whose they are and what they are for.
        owner, names = split.assign(rows, rng)
        _require_all(names, owner[~test], "training")
    else:
        train_rows, test_rows = rows.select(~test), rows.select(test)
        owner = np.full(len(rows.y), -1)
        owner[~test], names = split.assign(train_rows, rng)
        _require_all(names, owner[~test], "training")
        counts = label_counts(train_rows.y, owner[~test], len(names), rows.classes or 1)
        counts = proportional_counts(counts, test_rows.class_counts, rng)
        owner[test] = assign_by_counts(test_rows.y, counts, rng)
    _require_all(names, owner[test], "test")
    used = owner >= 0
    return Partition(names, owner, np.flatnonzero(used & ~test), np.flatnonzero(used & test))


def _require_all(names: tuple[str, ...], owner: Int[np.ndarray, " rows"], kind: str) -> None:
    sizes = np.bincount(owner[owner >= 0], minlength=len(names))
    if not sizes.all():
        raise DataError(
            f"client {names[np.argmin(sizes)]} gets none of the {len(owner)} {kind} examples; use "
            'test_from = "client", or fewer clients'
        )
