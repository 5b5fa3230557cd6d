"""Rows of data before they are dealt out to clients, and the way from there to a federation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, final, get_args

import numpy as np
from jaxtyping import Bool, Int, Shaped

from perfed.core.errors import DataError, require, require_choice
from perfed.data.federation import Federation, FlatExamples
from perfed.data.scaling import CLIP, Scaling, Standardize
from perfed.data.splits import (
    LEAST,
    LabeledRows,
    NaturalSplit,
    Split,
    alike,
    by_counts,
    held_out,
    held_out_counts,
    label_counts,
)
from perfed.data.splits.as_published import CAUTION, Part

TestFrom = Literal["client", "test-set"]


@final
@dataclass(frozen=True)
class Dataset:
    """A set of examples as it is published or kept.

    Attributes:
        x: inputs, in whatever type they are kept.
        y: classes as whole numbers (int32), or targets of a regression (float32).
        labels: the classes' names, by number; None: a regression.
        test: which rows are meant for testing; None: the set does not say.
        client: the natural client of each row, by number; None: it has none.
        names: the natural clients' names, by number.
        limits: the least and the largest value an input can take, where that is known.
        vocabulary: inputs are positions in this list of symbols; None: they are numbers.
        gap: rows are overlapping windows of a text, in its order. The last part of each client's
            is held out, and so many rows before it are dropped, so that the two share nothing.
            None: the rows are independent.
        standardize: how inputs are scaled unless one asks otherwise.
        test_from: where held-out data come from unless one asks otherwise; None: as the split says.
        features: the names of the inputs' columns, where they have any.
    """

    x: Shaped[np.ndarray, "examples ..."]
    y: Shaped[np.ndarray, " examples"]
    labels: tuple[str, ...] | None
    test: Bool[np.ndarray, " examples"] | None = None
    client: Int[np.ndarray, " examples"] | None = None
    names: tuple[str, ...] | None = None
    limits: tuple[float, float] | None = None
    vocabulary: tuple[str, ...] | None = None
    gap: int | None = None
    standardize: Standardize = "none"
    test_from: TestFrom | None = None
    features: tuple[str, ...] | None = None

    def federation(
        self,
        split: Split,
        *,
        test_from: TestFrom | None = None,
        test_fraction: float | None = None,
        standardize: Standardize | None = None,
        clip: float | Literal["none"] = CLIP,
        standardize_target: bool = False,
        seed: int = 0,
    ) -> Federation:
        """Deal the rows out to clients.

        Args:
            split: which client gets which rows.
            test_from: where held-out data come from. `client`: each client holds out a part of its
                own rows. `test-set`: the set's own test rows (or a part set aside first, where it
                has none) are dealt out in the proportions of the training rows. None: from rows
                that own data mark as such, or else as the split is published, `test-set` for
                `per-fedavg` and `client` for most.
            test_fraction: the part that is held out; None: a quarter, or what the set itself says.
            standardize: how inputs are scaled (`Scaling.fitted`); None: as is usual for the source.
            clip: standardized inputs past so many deviations are held there; "none": they are not.
            standardize_target: give a regression's targets mean 0 and variance 1 over the training
                data of all clients; scores are in the targets' own unit all the same.
            seed: the seed of the split.
        """
        if test_from is not None:
            require_choice("test_from", test_from, get_args(TestFrom))
        kind = standardize or self.standardize
        require_choice("standardize", kind, get_args(Standardize))
        limit = float("inf") if clip == "none" else clip
        require(limit > 0, "clip", clip, 'must be a number greater than 0, or "none"')
        no_scale = "these inputs are symbols of a text, which have no scale"
        require(self.vocabulary is None or kind == "none", "standardize", kind, no_scale)
        no_target = "is for regressions; these data have classes"
        fits = self.labels is None or not standardize_target
        require(fits, "standardize_target", standardize_target, no_target)
        require(0 <= seed < 2**32, "seed", seed, "must be between 0 and 2^32 - 1")
        natural = isinstance(split, NaturalSplit)
        if self.gap is not None and not natural:
            raise DataError(
                "these rows are overlapping windows of texts, which other splits would tear apart; "
                'use split = "natural"'
            )
        usual = "test-set" if split.test_set and not (natural and self.test is None) else "client"
        chosen = test_from or self.test_from or usual
        marked = self.test is not None or not natural or chosen == "client"
        require(marked, "test_from", test_from, "these data have no test rows of their own")
        given = chosen == "test-set" and self.test is not None
        said = "the set has test rows of its own, which are what is held out"
        require(not given or test_fraction is None, "test_fraction", test_fraction, said)
        fraction = 0.25 if test_fraction is None else test_fraction
        require(0 < fraction < 1, "test_fraction", test_fraction, "must be between 0 and 1")
        rng = np.random.default_rng(seed)
        shared = split.parts(self._labeled(slice(None)))
        if shared is not None:
            said = "is given by the published rows"
            require(test_from is None, "test_from", test_from, said)
            require(test_fraction is None, "test_fraction", test_fraction, said)
            names = tuple(str(i) for i in range(len(shared[0])))
            train, test = (self._joined(parts) for parts in shared)
        else:
            assign = self._assign_both if chosen == "test-set" else self._assign_then_hold_out
            names, train_rows, test_rows = assign(split, fraction, rng)
            train, test = (self._taken(rows, len(names)) for rows in (train_rows, test_rows))
        target = (0.0, 1.0)
        if standardize_target:
            mean, spread = (f(train.y, dtype=np.float64) for f in (np.mean, np.std))
            # Targets that are all alike have no spread, whatever rounding says.
            target = (float(mean), float(spread) if np.ptp(train.y) > 0 else 1.0)
            train, test = (
                replace(part, y=((part.y.astype(float) - mean) / target[1]).astype(np.float32))
                for part in (train, test)
            )
        return Federation.made(
            train,
            test,
            target=target,
            names=names,
            labels=self.labels,
            vocabulary=self.vocabulary,
            features=self.features,
            scaling=Scaling.fitted(kind, train.x, train.size, self.limits, self.x, limit),
            caution="" if shared is None else CAUTION,
        )

    def _labeled(self, rows: np.ndarray | slice) -> LabeledRows:
        classes = None if self.labels is None else len(self.labels)
        y = self.y[rows]
        client = None if self.client is None else self.client[rows]
        y = np.zeros(len(y), np.int32) if classes is None else y
        return LabeledRows(y, classes, client, self.names)

    def _assign_then_hold_out(
        self, split: Split, fraction: float, rng: np.random.Generator
    ) -> tuple[tuple[str, ...], "_Owned", "_Owned"]:
        """Every client holds out a part of its own rows: both sides have its distribution."""
        rows = self._labeled(slice(None))
        owner, names = split.assign(rows, rng)
        sizes = np.bincount(owner[owner >= 0], minlength=len(names))
        poor = np.flatnonzero(sizes < LEAST)
        if len(poor):
            hint = (
                "; min_examples = 2 leaves such clients out"
                if isinstance(split, NaturalSplit)
                else ""
            )
            raise DataError(
                f"client {names[poor[0]]} has {sizes[poor[0]]} example(s), and needs two: one to "
                f"train on and one held out{hint}"
            )
        used = np.flatnonzero(owner >= 0)
        if self.gap is None:
            out = held_out(rows.y[used], owner[used], fraction, rng)
            return names, _Owned(used[~out], owner), _Owned(used[out], owner)
        # Windows overlap their neighbors: the end of each text is held out, after a gap.
        order = np.argsort(owner[used], kind="stable")
        place = np.empty(len(used), int)
        place[order] = np.arange(len(used)) - (np.cumsum(sizes) - sizes)[owner[used][order]]
        to_end = sizes[owner[used]] - place
        count = held_out_counts(sizes, fraction)[owner[used]]
        out, kept = to_end <= count, to_end > count + self.gap
        left = np.bincount(owner[used][kept], minlength=len(names))
        if not left.all():
            short = int(np.argmin(left))
            raise DataError(
                f"client {names[short]} has {sizes[short]} windows, of which nothing is left to "
                f"train on after holding out {held_out_counts(sizes, fraction)[short]} and a gap "
                f"of {self.gap}; ask for longer texts, a shorter context or a larger stride"
            )
        return names, _Owned(used[kept], owner), _Owned(used[out], owner)

    def _assign_both(
        self, split: Split, fraction: float, rng: np.random.Generator
    ) -> tuple[tuple[str, ...], "_Owned", "_Owned"]:
        """A training set and a test set, dealt out in the same proportions."""
        everything = self._labeled(slice(None))
        test = self.test
        if test is None:
            test = held_out(everything.y, np.zeros(len(self.y), int), fraction, rng)
        owner = np.full(len(self.y), -1)
        if isinstance(split, NaturalSplit):
            # The rows say both whose they are and what they are for.
            owner, names = split.assign(everything, rng)
            _require_all(names, owner[~test], "training")
        else:
            rows, held = self._labeled(~test), self._labeled(test)
            owner[~test], names = split.assign(rows, rng)
            _require_all(names, owner[~test], "training")
            counts = label_counts(rows.y, owner[~test], len(names), rows.classes or 1)
            owner[test] = by_counts(held.y, alike(counts, held.have, rng), rng)
        _require_all(names, owner[test], "test")
        used = np.flatnonzero(owner >= 0)
        return names, _Owned(used[~test[used]], owner), _Owned(used[test[used]], owner)

    def _joined(self, parts: Sequence[Part]) -> FlatExamples:
        """The rows of each client, with the labels they are given."""
        row, label = (np.concatenate(whole) for whole in zip(*parts, strict=True))
        sizes = [len(part.row) for part in parts]
        return FlatExamples.joined(self.x[row], label.astype(self.y.dtype), sizes)

    def _taken(self, rows: "_Owned", clients: int) -> FlatExamples:
        """The rows as flat examples, client after client."""
        owner = rows.owner[rows.row]
        order = rows.row[np.argsort(owner, kind="stable")]
        return FlatExamples.joined(
            self.x[order], self.y[order], np.bincount(owner, minlength=clients)
        )


class _Owned(NamedTuple):
    """Some rows, and the client of every row."""

    row: Int[np.ndarray, " rows"]
    owner: Int[np.ndarray, " examples"]


def _require_all(names: tuple[str, ...], owner: Int[np.ndarray, " rows"], what: str) -> None:
    sizes = np.bincount(owner[owner >= 0], minlength=len(names))
    if not sizes.all():
        raise DataError(
            f"client {names[np.argmin(sizes)]} gets none of the {len(owner)} {what} examples; use "
            'test_from = "client", or fewer clients'
        )
