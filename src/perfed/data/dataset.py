"""A data set before it is split over clients, and the federation that a split makes of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, final, get_args

import numpy as np
from jaxtyping import Bool, Int, Shaped

from perfed.core.errors import DataError, require, require_choice
from perfed.data.examples import FlatExamples
from perfed.data.federation import Federation
from perfed.data.partition import hold_out_per_client, split_test_set
from perfed.data.scaling import DEFAULT_CLIP, Scaling, Standardize
from perfed.data.splits import LabeledRows, NaturalSplit, Part, Split, hold_out_mask

TestFrom = Literal["client", "test-set"]

DEFAULT_TEST_FRACTION = 0.25


@final
@dataclass(frozen=True)
class Dataset:
    """Examples as they are published or stored, not yet split over clients.

    Attributes:
        x: inputs, in the type they are stored in.
        y: class numbers (int32), or targets of a regression (float32).
        labels: the names of the classes, by number; None: a regression.
        test: which rows are meant for testing; None: not known.
        client: the number of each row's natural client; None: rows have none.
        names: the natural clients' names, by number.
        limits: the least and the largest value an input can have, if known.
        vocabulary: the symbols that inputs are indices of; None: inputs are numbers.
        gap: rows are overlapping windows of texts, in order: the end of each client's text is held
            out, and this many rows before it are dropped, so that the two share nothing. None: rows
            are independent.
        standardize: the default scaling of inputs.
        test_from: where held-out data come from by default; None: it depends on the split.
        features: the names of the inputs' columns, if they have any.
        ddof: what is taken from the number of rows in the variances that inputs are standardized
            by; 1 where a published protocol divides by n - 1.
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
    ddof: int = 0

    def federation(
        self,
        split: Split,
        *,
        test_from: TestFrom | None = None,
        test_fraction: float | None = None,
        standardize: Standardize | None = None,
        clip: float | Literal["none"] = DEFAULT_CLIP,
        standardize_target: bool = False,
        seed: int = 0,
    ) -> Federation:
        """Split the rows over clients.

        Args:
            split: which client gets which rows.
            test_from: where held-out data come from. `client`: each client holds out a part of its
                own rows. `test-set`: the set's own test rows (or a part held out first, if it has
                none) are split in the proportions of the training rows. None: `test-set` for rows
                that are marked in your own data and for the split `per-fedavg`, else `client`.
            test_fraction: the part that is held out; None: a quarter, or the set's own test rows.
            standardize: how inputs are scaled (`Scaling.fit`); None: the source's default.
            clip: standardized inputs are clipped at this many deviations; "none": they are not.
            standardize_target: give a regression's targets mean 0 and variance 1 over the training
                data of all clients; scores are in the targets' own unit all the same.
            seed: the seed of the split.
        """
        kind, limit = self._scaling_options(standardize, clip, standardize_target)
        require(0 <= seed < 2**32, "seed", seed, "must be between 0 and 2^32 - 1")
        names, train, test = self._split(split, test_from, test_fraction, seed)
        target = _target_scaling(train.y) if standardize_target else (0.0, 1.0)
        if standardize_target:
            train, test = (
                replace(part, y=((part.y.astype(float) - target[0]) / target[1]).astype(np.float32))
                for part in (train, test)
            )
        classes = None if self.labels is None else len(self.labels)
        return replace(
            Federation.from_examples(train, test, classes, names),
            labels=self.labels,
            vocabulary=self.vocabulary,
            scaling=Scaling.fit(kind, train.x, train.size, self.limits, self.x, limit, self.ddof),
            target=target,
            features=self.features,
            caution=split.caution,
        )

    def _scaling_options(
        self, standardize: Standardize | None, clip: float | str, standardize_target: bool
    ) -> tuple[Standardize, float]:
        """The kind of scaling and where it clips, checked."""
        kind = standardize or self.standardize
        require_choice("standardize", kind, get_args(Standardize))
        limit = float("inf") if clip == "none" else clip
        positive = isinstance(limit, int | float) and limit > 0
        require(positive, "clip", clip, 'must be a number greater than 0, or "none"')
        text = 'these inputs are characters of texts, which are not scaled; use "none"'
        require(self.vocabulary is None or kind == "none", "standardize", kind, text)
        classes = "is for regressions, and these data have classes; leave it out"
        fits = self.labels is None or not standardize_target
        require(fits, "standardize_target", standardize_target, classes)
        return kind, float(limit)

    def _test_source(
        self, split: Split, test_from: TestFrom | None, test_fraction: float | None
    ) -> tuple[TestFrom, float]:
        """Where held-out data come from, and which part of the rows they are, checked."""
        if test_from is not None:
            require_choice("test_from", test_from, get_args(TestFrom))
        natural, marked = isinstance(split, NaturalSplit), self.test is not None
        usual: TestFrom = "test-set" if split.test_set and (marked or not natural) else "client"
        source = test_from or self.test_from or usual
        if source == "test-set":
            none = 'these data have no test rows of their own; use "client"'
            require(marked or not natural, "test_from", test_from, none)
            own = "the data have test rows of their own, which are held out; leave it out"
            require(not marked or test_fraction is None, "test_fraction", test_fraction, own)
        fraction = DEFAULT_TEST_FRACTION if test_fraction is None else test_fraction
        require(0 < fraction < 1, "test_fraction", test_fraction, "must be between 0 and 1")
        return source, fraction

    def _split(
        self, split: Split, test_from: TestFrom | None, test_fraction: float | None, seed: int
    ) -> tuple[tuple[str, ...], FlatExamples, FlatExamples]:
        """The clients' names, their training examples and their held-out examples."""
        if self.gap is not None and not isinstance(split, NaturalSplit):
            raise DataError(
                f'split = "{split.name}" would put overlapping windows of a text into several '
                'clients; use split = "natural" for texts'
            )
        source, fraction = self._test_source(split, test_from, test_fraction)
        classes = None if self.labels is None else len(self.labels)
        y = np.zeros(len(self.y), np.int32) if classes is None else self.y
        rows = LabeledRows(y, classes, self.client, self.names)
        parts = split.overlapping_parts(rows)
        if parts is not None:
            given = 'is fixed by overlap = "as-published"; leave it out'
            require(test_from is None, "test_from", test_from, given)
            require(test_fraction is None, "test_fraction", test_fraction, given)
            train, test = map(self._join, parts)
            return tuple(str(i) for i in range(len(train.size))), train, test
        rng = np.random.default_rng(seed)
        if source == "client":
            partition = hold_out_per_client(rows, split, fraction, self.gap, rng)
        else:
            held_out = self.test
            if held_out is None:
                held_out = hold_out_mask(y, np.zeros(len(y), int), fraction, rng)
            partition = split_test_set(rows, held_out, split, rng)
        names, owner, *row_sets = partition
        train, test = (self._take(part, owner[part], len(names)) for part in row_sets)
        return names, train, test

    def _join(self, parts: Sequence[Part]) -> FlatExamples:
        """The rows of each client, with the labels they are given."""
        row, label = (np.concatenate(whole) for whole in zip(*parts, strict=True))
        sizes = [len(part.row) for part in parts]
        return FlatExamples.from_rows(self.x[row], label.astype(self.y.dtype), sizes)

    def _take(
        self, rows: Int[np.ndarray, " rows"], owner: Int[np.ndarray, " rows"], clients: int
    ) -> FlatExamples:
        """These rows as flat examples, client after client."""
        order = rows[np.argsort(owner, kind="stable")]
        sizes = np.bincount(owner, minlength=clients)
        return FlatExamples.from_rows(self.x[order], self.y[order], sizes)


def _target_scaling(y: Shaped[np.ndarray, " examples"]) -> tuple[float, float]:
    """Mean and standard deviation of targets."""
    mean, spread = (float(f(y, dtype=np.float64)) for f in (np.mean, np.std))
    # Targets that are all equal have no spread, whatever rounding says.
    return mean, spread if np.ptp(y) > 0 else 1.0
