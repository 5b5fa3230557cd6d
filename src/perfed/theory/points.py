"""Clients' examples as points, and their distributions over them.

A client's distribution p_i gives each of its training examples the same weight, and the average is
the paper's p = (1/n) sum_i p_i: every client counts the same, however many examples it has.

Inputs are taken as a model sees them, scaled, and the distance of two examples z = (x, y) is

    d(z, z') = sqrt(|x - x'|^2 + c^2 [y != y'])   for classes,
    d(z, z') = sqrt(|x - x'|^2 + c^2 (y - y')^2)  for a regression,

with `label_cost` c. Where inputs are symbols, |x - x'|^2 is the number of places that differ.
Unless given, c is the root mean square distance of inputs from their mean, so that another class
counts as much as a typical difference of inputs; in a regression it is that divided by the targets'
spread.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite, sqrt
from typing import NamedTuple, final

import numpy as np
from jaxtyping import Bool, Float, Int

from perfed.core.errors import require
from perfed.data import Federation

Rows = Int[np.ndarray, " rows"]

# Weights that differ by less differ by rounding.
_ROUNDING = 1e-13


@final
@dataclass(frozen=True)
class ExamplePoints:
    """Training examples as points whose Euclidean distance is d(z, z'), computed when needed.

    Attributes:
        federation: whose examples.
        owner: the client of each.
        weight: the weight of each in p.
        center: the mean of the inputs, flat; distances are worked out from there, for precision.
        label_cost: c.
    """

    federation: Federation
    owner: Int[np.ndarray, " total"]
    weight: Float[np.ndarray, " total"]
    center: Float[np.ndarray, " inputs"]
    label_cost: float

    @classmethod
    def of(cls, federation: Federation, label_cost: float | None) -> "ExamplePoints":
        """Of a federation's training examples."""
        if label_cost is not None:
            good = isfinite(label_cost) and label_cost >= 0
            require(good, "label_cost", label_cost, "must be a number, at least 0")
        size = np.asarray(federation.train.size)
        owner = np.repeat(np.arange(len(size)), size)
        weight = 1.0 / (len(size) * size[owner])
        raw = cls(federation, owner, weight, np.zeros(1), 0.0)
        mean = np.asarray(sum(weight[rows] @ raw.inputs(rows) for rows in raw.blocks()))
        space = cls(federation, owner, weight, mean, 0.0)
        if label_cost is None:
            label_cost = space._typical_cost()
        return cls(federation, owner, weight, mean, float(label_cost))

    def _typical_cost(self) -> float:
        """The c that the module's docstring defines; 1 where inputs or targets never vary."""
        squares = sum(
            float(self.weight[rows] @ (self.inputs(rows) ** 2).sum(axis=1))
            for rows in self.blocks()
        )
        spread = 1.0
        if self.federation.labels is None:
            y = regression_targets(self.federation)
            spread = sqrt(self.weight @ (y - self.weight @ y) ** 2)
        # What never varies is not exactly at its mean, which is rounded.
        varies = squares > 1e-24 * float(self.center @ self.center)
        return sqrt(squares) / spread if varies and spread > 0 else 1.0

    def blocks(self) -> Iterator[Rows]:
        """All rows, in blocks whose points need little memory."""
        symbols = len(self.federation.vocabulary or " ")
        step = max(1, 2**22 // max(1, symbols * int(np.prod(self.federation.example_shape))))
        total = len(self.owner)
        return (np.arange(i, min(i + step, total)) for i in range(0, total, step))

    def model_inputs(self, rows: Rows) -> np.ndarray:
        """Inputs as a model sees them, flat."""
        x, scaling = np.asarray(self.federation.train.x)[rows], self.federation.scaling
        if scaling is not None:
            x = scaling(x, self.owner[rows])
        return np.asarray(x.reshape(len(rows), -1))

    def inputs(self, rows: Rows) -> Float[np.ndarray, "rows inputs"]:
        """Inputs as points."""
        x = self.model_inputs(rows)
        if self.federation.vocabulary is not None:
            # Two different symbols are at distance 1.
            x = np.eye(len(self.federation.vocabulary))[x.astype(int)] / sqrt(2)
        return np.asarray(x.reshape(len(rows), -1) - self.center, np.float64)

    def points(self, rows: Rows) -> Float[np.ndarray, "rows dimensions"]:
        """Examples as points: inputs, and c / sqrt(2) in the place of the class, or c y."""
        if self.label_cost == 0:
            return self.inputs(rows)
        labels = self.federation.labels
        y = np.asarray(self.federation.train.y)[rows]
        more = y[:, None] if labels is None else (y[:, None] == np.arange(len(labels))) / sqrt(2)
        return np.concatenate([self.inputs(rows), self.label_cost * more], axis=1)

    def costs(self, rows: Rows, others: Rows) -> Float[np.ndarray, "rows others"]:
        """d(z, z') between two sets of examples."""
        a, b = self.inputs(rows), self.inputs(others)
        scale = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1)
        squares = scale - 2 * (a @ b.T)
        # The difference of large numbers loses small ones: those are done again, directly.
        near = np.argwhere(squares <= 1e-6 * scale)
        step = max(1, 2**22 // a.shape[1])
        for i, j in (near[k : k + step].T for k in range(0, len(near), step)):
            squares[i, j] = ((a[i] - b[j]) ** 2).sum(axis=1)
        u, v = (np.asarray(self.federation.train.y)[part] for part in (rows, others))
        by_class = self.federation.labels is not None
        more = u[:, None] != v if by_class else (u[:, None] - v.astype(np.float64)) ** 2
        return np.asarray(np.sqrt(squares + self.label_cost**2 * more))


def regression_targets(federation: Federation) -> Float[np.ndarray, " total"]:
    """The targets of all training examples."""
    return np.asarray(federation.train.y, np.float64)


class Distribution(NamedTuple):
    """Distinct examples and their weights."""

    rows: Rows
    weight: Float[np.ndarray, " rows"]


class TransportProblem(NamedTuple):
    """Excess to move from a source to a sink, each normalized, and how much of the mass it is."""

    source: Distribution
    sink: Distribution
    mass: float


def distributions(space: ExamplePoints) -> tuple[list[Distribution], Distribution]:
    """p_i of each client, and p; equal examples are merged."""
    first: dict[bytes, int] = {}
    same = np.empty(len(space.owner), int)
    y = np.asarray(space.federation.train.y)
    for rows in space.blocks():
        # Adding 0 turns -0.0 into 0.0: equal numbers with other bytes.
        for row, x, label in zip(rows, space.model_inputs(rows) + 0, y[rows] + 0, strict=True):
            written = blake2b(x.tobytes() + label.tobytes(), digest_size=16).digest()
            same[row] = first.setdefault(written, int(row))
    train, measures = space.federation.train, []
    for start, size in zip(train.start, train.size, strict=True):
        rows, counts = np.unique(same[start : start + size], return_counts=True)
        measures.append(Distribution(rows, counts / size))
    rows, at = np.unique(same, return_inverse=True)
    return measures, Distribution(rows, np.bincount(at, weights=space.weight))


def transport_problem(p: Distribution, q: Distribution) -> TransportProblem:
    """What is left of p and q without their common part; its mass is ||p - q||_TV."""
    rows, at = np.unique(np.concatenate([p.rows, q.rows]), return_inverse=True)
    excess = np.bincount(at, weights=np.concatenate([p.weight, -q.weight]))

    def part(chosen: Bool[np.ndarray, " rows"]) -> Distribution:
        weight = np.abs(excess[chosen])
        return Distribution(rows[chosen], weight / max(weight.sum(), _ROUNDING))

    above = excess > _ROUNDING
    return TransportProblem(part(above), part(excess < -_ROUNDING), float(excess[above].sum()))
