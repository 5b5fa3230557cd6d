"""How far clients' data are apart: the distances of Per-FedAvg section 4.1, and groups by them.

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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import combinations
from math import isfinite, sqrt
from numbers import Integral
from typing import Any, Literal, NamedTuple, final

import numpy as np
from jaxtyping import Bool, Float, Float32, Int
from scipy.cluster import hierarchy
from scipy.spatial import distance

from perfed.core.errors import require, require_choice, require_count
from perfed.data import Federation
from perfed.data.splits import label_counts

On = Literal["labels", "features"]
W1Method = Literal["auto", "exact", "sinkhorn", "sliced"]
Rows = Int[np.ndarray, " rows"]

# The most entries of one cost matrix: 8 bytes each and what the simplex keeps, or two of 4 bytes.
EXACT_ENTRIES = 50_000_000
SINKHORN_ENTRIES = 200_000_000
# The most entries of all cost matrices together that `auto` takes on: minutes on two cores.
AUTO_EXACT_ENTRIES = 200_000_000
AUTO_SINKHORN_ENTRIES = 3_000_000_000

# Entropy's weight in parts of the mean cost. Bounds are worked out from `ENOUGH` on.
EPSILONS = (0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005)
ENOUGH = 0.005
# Sinkhorn steps before they are taken up into the potentials, how often that is done, and how much
# of the mass may be in the wrong place: rounding puts it right.
STEPS = 20
ROUNDS = 20
OFF = 1e-3

# Kaufman and Rousseeuw (1990): a mean silhouette up to this shows no substantial structure.
POOR_SILHOUETTE = 0.25
MOST_GROUPS = 10

# Weights that differ by less are the same weight, rounded differently.
_SAME = 1e-13


class Distances(NamedTuple):
    """W1(p_i, p) of each client, as far as it is known.

    Attributes:
        value: the distance: itself if `exact`, the middle of the interval if `sinkhorn`, and the
            interval's lower end, which may be far too small, if `sliced`.
        low: it is no less than this.
        high: it is no more than this.
        method: how it was found: `exact`, `sinkhorn` or `sliced`.
    """

    value: Float[np.ndarray, " clients"]
    low: Float[np.ndarray, " clients"]
    high: Float[np.ndarray, " clients"]
    method: str


class Sliced(NamedTuple):
    """The sliced distance of each client from the average, and its Monte-Carlo standard error."""

    value: Float[np.ndarray, " clients"]
    error: Float[np.ndarray, " clients"]


def label_distances(federation: Federation) -> Float[np.ndarray, " clients"]:
    """||p_i - p||_TV = 1/2 sum_y |p_i(y) - p(y)| of the labels alone.

    The distance in (14a) is over whole examples z = (x, y), and at least this large: it is this one
    where clients agree on how inputs look given a label, and any larger one where they do not. So
    this bounds neither gamma_G nor gamma_H; `example_distances` is the distance that does.

    It is W1 of labels as well, where two different ones are at distance 1. The targets of a
    regression are at the distance |y - y'|, in the units in which they are kept, and W1(p_i, p) is
    given for them: total variation says nothing of numbers that hardly ever come twice.
    """
    if federation.labels is None:
        line = _Line.of(_targets(federation), federation)
        return line.from_average()
    mixtures = _mixtures(federation)
    return np.asarray(0.5 * np.abs(mixtures - mixtures.mean(axis=0)).sum(axis=1))


def example_distances(federation: Federation) -> Float[np.ndarray, " clients"]:
    """||p_i - p||_TV of whole examples z = (x, y), as in (14a), by counting equal ones.

    Where no example comes twice it is 1 - 1/n for every client, whatever the data, and says
    nothing: it is meant for inputs of which there are only so many.
    """
    measures, average = _measures(_Space.of(federation, 0.0))
    return np.array([_transport(own, average).mass for own in measures])


def feature_distances(
    federation: Federation,
    *,
    label_cost: float | None = None,
    method: W1Method = "auto",
    tolerance: float = 0.01,
    directions: int = 64,
    seed: int = 0,
) -> Distances:
    """W1(p_i, p) of examples z = (x, y), as in (16), with an interval that holds it for certain.

    What p_i and p have in common stays where it is, which costs nothing: W1 is that of what is
    left, ours to theirs. Then, for this smaller problem,

    - `exact` solves the linear program (network simplex).
    - `sinkhorn` solves it with an entropy term. The entropic plan, rounded to the exact marginals
      (Altschuler et al., 2017), costs `high`; its potentials, made feasible by a c-transform, are
      worth `low`. The entropy's weight goes down until the interval is at most `tolerance` wide,
      in parts of `high`, or until 0.0005 of the mean cost.
    - `sliced` needs no cost matrix. A projection to a line is 1-Lipschitz, so the largest W1 over
      random directions, or the distance of the means if that is larger, is a lower bound; it is
      `value`, too. `high` is what independent draws cost, at the root mean square. In many
      dimensions that is a wide interval.

    Args:
        federation: whose training examples.
        label_cost: c; None: as this file's head says.
        method: `auto` is `exact` where all cost matrices together have at most
            `AUTO_EXACT_ENTRIES`, `sinkhorn` up to `AUTO_SINKHORN_ENTRIES`, and else `sliced`.
        tolerance: of `sinkhorn`.
        directions: of `sliced`: how many.
        seed: of `sliced`: what its directions are drawn from.
    """
    _require_settings(method, tolerance, directions, seed)
    space = _Space.of(federation, label_cost)
    if method == "sliced":
        return _sliced_bounds(space, directions, seed)
    measures, average = _measures(space)
    chosen = _chosen(method, np.array([len(own.rows) for own in measures]) * len(average.rows))
    if chosen == "sliced":
        return _sliced_bounds(space, directions, seed)
    found = [_w1(space, chosen, _transport(own, average), tolerance) for own in measures]
    low, high = np.array(found).T
    return Distances((low + high) / 2, low, high, chosen)


def sliced_distances(
    federation: Federation,
    *,
    label_cost: float | None = None,
    directions: int = 64,
    seed: int = 0,
) -> Sliced:
    """The mean W1 of examples projected to random directions, between p_i and p.

    Each projection's W1 is exact. The mean is a distance of its own, below W1 but not near it: in
    many dimensions a random direction sees little of a difference. The error is of the mean over
    these directions as an estimate of the mean over all.
    """
    _require_settings("sliced", 0.5, directions, seed)
    table = _sliced_table(_Space.of(federation, label_cost), directions, seed, _Line.from_average)
    return Sliced(table.mean(axis=0), table.std(axis=0, ddof=1) / sqrt(directions))


def distance_matrix(
    federation: Federation,
    on: On = "labels",
    *,
    label_cost: float | None = None,
    method: W1Method = "auto",
    tolerance: float = 0.01,
    directions: int = 64,
    seed: int = 0,
) -> Float[np.ndarray, "clients clients"]:
    """The distance of every two clients, p_i from p_j: symmetric, zero for a client and itself.

    On `labels` it is total variation, or W1 of a regression's targets. On `features` it is W1 of
    examples, with the settings and limits of `feature_distances`: in `sinkhorn` the middle of its
    interval, in `sliced` its lower bound. All but `sinkhorn` keep to the triangle inequality.
    """
    require_choice("on", on, ("labels", "features"))
    _require_settings(method, tolerance, directions, seed)
    if on == "labels":
        if federation.labels is None:
            return _Line.of(_targets(federation), federation).from_each_other()
        mixtures = _mixtures(federation)
        return np.asarray(0.5 * distance.cdist(mixtures, mixtures, "cityblock"))
    space = _Space.of(federation, label_cost)
    if method == "sliced":
        return _sliced_matrix(space, directions, seed)
    measures, _ = _measures(space)
    sizes = np.array([len(own.rows) for own in measures])
    pairs = list(combinations(range(federation.clients), 2))
    chosen = _chosen(method, np.array([sizes[i] * sizes[j] for i, j in pairs] or [0]))
    if chosen == "sliced":
        return _sliced_matrix(space, directions, seed)
    matrix = np.zeros((federation.clients, federation.clients))
    for i, j in pairs:
        low, high = _w1(space, chosen, _transport(measures[i], measures[j]), tolerance)
        matrix[i, j] = matrix[j, i] = (low + high) / 2
    return matrix


def groups(
    matrix: Float[np.ndarray, "clients clients"], count: int | None = None
) -> Int[np.ndarray, " clients"]:
    """The group of each client, by average-linkage clustering of a distance matrix.

    Group 0 is the largest; of groups of one size, that of the first client comes first.

    Args:
        matrix: distances, client by client.
        count: how many groups; None: the number of 2..10, less than the number of clients, with the
            best mean silhouette, the smallest if several have it, but one group if that silhouette
            is at most 0.25, or nobody is further than 1e-9 from anybody.
    """
    matrix = np.asarray(matrix, np.float64)
    n = len(matrix) if matrix.ndim else 0
    require(n > 0 and matrix.shape == (n, n), "matrix", matrix.shape, "must be square")
    good = np.isfinite(matrix).all() and matrix.min() >= 0 and not matrix.diagonal().any()
    good = good and np.allclose(matrix, matrix.T, rtol=1e-9, atol=0)
    allowed = "must be finite, not negative, symmetric, and zero from each client to itself"
    require(bool(good), "matrix", matrix.shape, allowed)
    if count is not None:
        require_count("count", count)
        require(count <= n, "count", count, f"must be at most the number of clients, {n}")
    if n == 1:
        return np.zeros(1, int)
    tree = hierarchy.average(distance.squareform(matrix, checks=False))

    def cut(count: int) -> Int[np.ndarray, " clients"]:
        return np.asarray(hierarchy.cut_tree(tree, n_clusters=count)[:, 0], int)

    if count is not None:
        return _numbered(cut(count))
    counts = range(2, min(MOST_GROUPS, n - 1) + 1)
    scores = [_silhouette(matrix, cut(c)) for c in counts]
    if matrix.max() <= 1e-9 or max(scores, default=0.0) <= POOR_SILHOUETTE:
        return np.zeros(n, int)
    # The same score, rounded differently, is the same score: the first of them.
    best = int(np.argmax(np.array(scores) >= max(scores) - 1e-9))
    return _numbered(cut(counts[best]))


# Examples as points


@final
@dataclass(frozen=True)
class _Space:
    """Training examples as points whose Euclidean distance is d(z, z'), made when asked for.

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
    def of(cls, federation: Federation, label_cost: float | None) -> "_Space":
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
            label_cost = space._typical()
        return cls(federation, owner, weight, mean, float(label_cost))

    def _typical(self) -> float:
        """The c that this file's head promises; 1 where inputs or targets never vary."""
        squares = sum(
            float(self.weight[rows] @ (self.inputs(rows) ** 2).sum(axis=1))
            for rows in self.blocks()
        )
        spread = 1.0
        if self.federation.labels is None:
            y = _targets(self.federation)
            spread = sqrt(self.weight @ (y - self.weight @ y) ** 2)
        # What never varies is not exactly at its mean, which is rounded.
        varies = squares > 1e-24 * float(self.center @ self.center)
        return sqrt(squares) / spread if varies and spread > 0 else 1.0

    def blocks(self) -> Iterator[Rows]:
        """All rows, so many at a time that their points need little memory."""
        symbols = len(self.federation.vocabulary or " ")
        step = max(1, 2**22 // max(1, symbols * int(np.prod(self.federation.example_shape))))
        total = len(self.owner)
        return (np.arange(i, min(i + step, total)) for i in range(0, total, step))

    def seen(self, rows: Rows) -> np.ndarray:
        """Inputs as a model sees them, flat."""
        x, scaling = np.asarray(self.federation.train.x)[rows], self.federation.scaling
        if scaling is not None:
            x = scaling(x, self.owner[rows])
        return np.asarray(x.reshape(len(rows), -1))

    def inputs(self, rows: Rows) -> Float[np.ndarray, "rows inputs"]:
        """Inputs as points."""
        x = self.seen(rows)
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


def _targets(federation: Federation) -> Float[np.ndarray, " total"]:
    return np.asarray(federation.train.y, np.float64)


def _mixtures(federation: Federation) -> Float[np.ndarray, "clients classes"]:
    """p_i(y) of each client."""
    train, n = federation.train, federation.clients
    owner = np.repeat(np.arange(n), train.size)
    counts = label_counts(np.asarray(train.y), owner, n, federation.outputs)
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))


# Distributions, and what has to be moved to make one of another


class _Measure(NamedTuple):
    """A distribution: examples, of which no two are equal, and their weights."""

    rows: Rows
    weight: Float[np.ndarray, " rows"]


class _Transport(NamedTuple):
    """What has to be moved from where to where, each made to add up to 1, and how much it is."""

    source: _Measure
    sink: _Measure
    mass: float


def _measures(space: _Space) -> tuple[list[_Measure], _Measure]:
    """p_i of each client, and p, where equal examples are one."""
    first: dict[bytes, int] = {}
    same = np.empty(len(space.owner), int)
    y = np.asarray(space.federation.train.y)
    for rows in space.blocks():
        # Adding 0 makes -0.0 of it 0.0, which is equal to it but written differently.
        for row, x, label in zip(rows, space.seen(rows) + 0, y[rows] + 0, strict=True):
            written = blake2b(x.tobytes() + label.tobytes(), digest_size=16).digest()
            same[row] = first.setdefault(written, int(row))
    train, measures = space.federation.train, []
    for start, size in zip(train.start, train.size, strict=True):
        rows, counts = np.unique(same[start : start + size], return_counts=True)
        measures.append(_Measure(rows, counts / size))
    rows, at = np.unique(same, return_inverse=True)
    return measures, _Measure(rows, np.bincount(at, weights=space.weight))


def _transport(p: _Measure, q: _Measure) -> _Transport:
    """What p has more of goes to where q has more; the mass is ||p - q||_TV."""
    rows, at = np.unique(np.concatenate([p.rows, q.rows]), return_inverse=True)
    excess = np.bincount(at, weights=np.concatenate([p.weight, -q.weight]))

    def part(chosen: Bool[np.ndarray, " rows"]) -> _Measure:
        weight = np.abs(excess[chosen])
        return _Measure(rows[chosen], weight / max(weight.sum(), _SAME))

    above = excess > _SAME
    return _Transport(part(above), part(excess < -_SAME), float(excess[above].sum()))


# W1 with a cost matrix


def _chosen(method: W1Method, entries: Int[np.ndarray, " problems"]) -> W1Method:
    """The method for cost matrices of so many entries; refuses what would not fit in memory."""
    total, largest = int(entries.sum()), int(entries.max())
    if method == "auto":
        if total <= AUTO_EXACT_ENTRIES and largest <= EXACT_ENTRIES:
            return "exact"
        fits = total <= AUTO_SINKHORN_ENTRIES and largest <= SINKHORN_ENTRIES
        return "sinkhorn" if fits else "sliced"
    limit, instead = {
        "exact": (EXACT_ENTRIES, '"sinkhorn", "sliced" or "auto"'),
        "sinkhorn": (SINKHORN_ENTRIES, '"sliced" or "auto"'),
    }[method]
    allowed = (
        f"needs a cost matrix of {largest:,} entries for these clients, and can do with {limit:,}; "
        f"use {instead}"
    )
    require(largest <= limit, "method", method, allowed)
    return method


def _w1(
    space: _Space, method: W1Method, moved: _Transport, tolerance: float
) -> tuple[float, float]:
    """Bounds of W1: what is moved, times how far."""
    source, sink, mass = moved
    if mass == 0 or not len(sink.rows):
        return 0.0, 0.0
    if method == "sinkhorn":
        low, high = _sinkhorn(space, source, sink, tolerance)
        return mass * low, mass * high
    value = mass * _exact(space.costs(source.rows, sink.rows), source.weight, sink.weight)
    return value, value


def _exact(
    costs: Float[np.ndarray, "sources sinks"],
    a: Float[np.ndarray, " sources"],
    b: Float[np.ndarray, " sinks"],
) -> float:
    """The cheapest plan's cost, by network simplex."""
    # Only here: it takes in every array library there is, which is seconds where there is PyTorch.
    import ot

    value, log = ot.emd2(a, b, costs, numItermax=10**9, log=True)
    require(not log["warning"], "method", "exact", f"found no solution ({log['warning']})")
    return float(value)


@final
@dataclass(frozen=True)
class _Entropic:
    """Transport with an entropy term: the plan is v_j K_ji u_i, for sources i and sinks j.

    Sinks are the rows, in blocks that fit in a core's cache: one pass over memory does it all.
    """

    costs: Float32[np.ndarray, "sinks sources"]
    a: Float[np.ndarray, " sources"]
    b: Float[np.ndarray, " sinks"]

    def blocks(self) -> Iterator[slice]:
        step = max(1, 2**18 // len(self.a))
        return (slice(k, k + step) for k in range(0, len(self.b), step))

    def kernel(
        self, f: Float[np.ndarray, " sources"], epsilon: float
    ) -> Float32[np.ndarray, "sinks sources"]:
        """K = exp((f_i - C_ji) / epsilon), each row brought to add up to b_j."""
        kernel = np.empty_like(self.costs)
        for at in self.blocks():
            part = kernel[at]
            np.subtract(f.astype(np.float32), self.costs[at], out=part)
            part /= np.float32(epsilon)
            part -= part.max(axis=1, keepdims=True)
            np.exp(part, out=part)
            part *= (self.b[at] / part.sum(axis=1)).astype(np.float32)[:, None]
        return kernel

    def scaled(
        self, kernel: Float32[np.ndarray, "sinks sources"]
    ) -> tuple[Float[np.ndarray, " sources"], float]:
        """The u of some Sinkhorn steps, and how far the sources' marginal was off at the last."""
        u = np.ones(len(self.a), np.float32)
        for _ in range(STEPS):
            reached = np.zeros(len(self.a))
            for at in self.blocks():
                v = self.b[at] / np.maximum(kernel[at] @ u, 1e-37)
                reached += v.astype(np.float32) @ kernel[at]
            off = float(np.abs(u * reached - self.a).sum())
            u = np.clip(self.a / np.maximum(reached, 1e-37), 1e-25, 1e25).astype(np.float32)
            if off <= OFF:
                break
        return u.astype(np.float64), off

    def low(self, f: Float[np.ndarray, " sources"]) -> float:
        """What the best g that is feasible with f is worth: g_j = min_i C_ji - f_i."""
        worth = float(self.a @ f)
        for at in self.blocks():
            worth += float(self.b[at] @ (self.costs[at].astype(np.float64) - f).min(axis=1))
        return worth

    def high(
        self,
        kernel: Float32[np.ndarray, "sinks sources"],
        u: Float[np.ndarray, " sources"],
    ) -> float:
        """The cost of the plan, rounded to its marginals.

        Altschuler et al. (2017), Algorithm 2: the plan is scaled down to at most its marginals, and
        what is missing is added as a product.
        """

        def plan(at: slice) -> Float[np.ndarray, "some sources"]:
            part = kernel[at] * u
            part *= (self.b[at] / np.maximum(part.sum(axis=1), 1e-300))[:, None]
            return np.asarray(part)

        reached = sum(plan(at).sum(axis=0) for at in self.blocks())
        fit = np.minimum(1.0, self.a / np.maximum(reached, 1e-300))
        left, cost = self.a - fit * reached, 0.0
        short = np.zeros(len(self.b))
        product = np.zeros(len(self.a))
        for at in self.blocks():
            part, costs = plan(at) * fit, self.costs[at].astype(np.float64)
            cost += float((part * costs).sum())
            short[at] = np.maximum(self.b[at] - part.sum(axis=1), 0)
            product += short[at] @ costs
        missing = short.sum()
        return cost + float(product @ left / missing) if missing > 0 else cost


def _sinkhorn(
    space: _Space, source: _Measure, sink: _Measure, tolerance: float
) -> tuple[float, float]:
    """Bounds of W1 between two distributions, by entropic transport."""
    costs = np.empty((len(sink.rows), len(source.rows)), np.float32)
    problem = _Entropic(costs, source.weight, sink.weight)
    step = max(1, 2**22 // max(len(source.rows), len(space.center)))
    for k in range(0, len(costs), step):
        costs[k : k + step] = space.costs(source.rows, sink.rows[k : k + step]).T
    # Costs are kept in single precision, and the bounds give way by what that may have changed.
    mean, rounding = float(costs.mean(dtype=np.float64)), 2.0**-24 * float(costs.max())
    if mean == 0:
        return 0.0, 0.0
    low, high = 0.0, np.inf
    # From here every source is the best one for some sink, so that none is lost to underflow.
    f = costs.min(axis=0).astype(np.float64)
    for epsilon in EPSILONS:
        # Large scalings are taken up into f, where they cannot overflow.
        for _ in range(ROUNDS):
            kernel = problem.kernel(f, epsilon * mean)
            u, off = problem.scaled(kernel)
            f = f + epsilon * mean * np.log(u)
            if off <= OFF:
                break
        if epsilon > ENOUGH:
            continue
        low = max(low, problem.low(f) - rounding)
        high = min(high, problem.high(kernel, u) + rounding)
        if high - low <= tolerance * high:
            break
    return low, high


# W1 on a line


@final
@dataclass(frozen=True)
class _Line:
    """Numbers of all clients, each client's in order; the numbers of a client weigh the same.

    Attributes:
        values: the numbers.
        start: the first of each client.
        size: how many each client has.
        level: the share of its client's numbers up to and with each number.
        weight: the weight of each in p.
    """

    values: Float[np.ndarray, " total"]
    start: Int[np.ndarray, " clients"]
    size: Int[np.ndarray, " clients"]
    level: Float[np.ndarray, " total"]
    weight: Float[np.ndarray, " total"]

    @classmethod
    def of(cls, values: Float[np.ndarray, " total"], federation: Federation) -> "_Line":
        """From one number for each training example."""
        start, size = (np.asarray(part) for part in (federation.train.start, federation.train.size))
        owner = np.repeat(np.arange(len(size)), size)
        level = (np.arange(len(owner)) - start[owner] + 1) / size[owner]
        weight = 1.0 / (len(size) * size[owner])
        return cls(values[np.lexsort((values, owner))], start, size, level, weight)

    def from_average(self) -> Float[np.ndarray, " clients"]:
        """W1(p_i, p)."""
        return self._from(self.values, self.weight)

    def from_each_other(self) -> Float[np.ndarray, "clients clients"]:
        """W1(p_i, p_j)."""
        rows = [slice(k, k + m) for k, m in zip(self.start, self.size, strict=True)]
        matrix = np.array(
            [self._from(self.values[own], np.ones(len(self.values[own]))) for own in rows]
        )
        # The two ways to work out a distance differ in rounding.
        upper = np.triu(matrix, 1)
        return np.asarray(upper + upper.T)

    def _from(
        self, values: Float[np.ndarray, " some"], weight: Float[np.ndarray, " some"]
    ) -> Float[np.ndarray, " clients"]:
        """The integral of |F_i - F| for each client, F being of these values with these weights.

        Between two of its numbers F_i is constant, F rises, and they cross at most once; so the
        integral there is that of F up to both ends and to where they cross.
        """
        order = np.argsort(values, kind="stable")
        t, F = values[order], np.cumsum(weight[order])
        F /= F[-1]
        area = np.concatenate([[0.0], np.cumsum(F[:-1] * np.diff(t))])

        def integral(upto: Float[np.ndarray, " any"]) -> Float[np.ndarray, " any"]:
            k = np.maximum(np.searchsorted(t, upto, side="right") - 1, 0)
            return np.asarray(area[k] + F[k] * np.maximum(upto - t[k], 0))

        last = self.start + self.size - 1
        here, there = self.values, np.append(self.values[1:], 0.0)
        # After its last number F_i is 1, and F is 1 after all.
        there[last] = np.maximum(here[last], t[-1])
        to_here = integral(here)
        to_there = np.append(to_here[1:], 0.0)
        to_there[last] = integral(there[last])
        crossing = np.clip(t[np.minimum(np.searchsorted(F, self.level), len(t) - 1)], here, there)
        pieces = self.level * (2 * crossing - here - there)
        pieces += to_here + to_there - 2 * integral(crossing)
        before = to_here[self.start]
        return np.asarray(np.maximum(before + np.add.reduceat(pieces, self.start), 0.0))


def _sliced_table(
    space: _Space, directions: int, seed: int, distances: Callable[[_Line], np.ndarray]
) -> Float[np.ndarray, "directions ..."]:
    """The distances on a line, for each of these random directions."""
    dimensions = space.points(np.arange(1)).shape[1]
    normal = np.random.default_rng(seed).normal(size=(directions, dimensions))
    units = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    table = []
    # A few at a time, so that all examples' projections need little memory.
    for k in range(0, directions, 16):
        some = units[k : k + 16].T
        projected = np.concatenate([space.points(rows) @ some for rows in space.blocks()])
        table += [distances(_Line.of(values, space.federation)) for values in projected.T]
    return np.array(table)


def _moments(
    space: _Space,
) -> tuple[Float[np.ndarray, "clients dimensions"], Float[np.ndarray, " clients"]]:
    """The mean of each client's points, and the mean of their squares."""
    n = space.federation.clients
    own = n * space.weight
    means = np.zeros((n, space.points(np.arange(1)).shape[1]))
    squares = np.zeros(n)
    for rows in space.blocks():
        points, owner = space.points(rows) * own[rows, None], space.owner[rows]
        clients, first = np.unique(owner, return_index=True)
        means[clients] += np.add.reduceat(points, first)
        norms = (points**2).sum(axis=1) / own[rows]
        squares[clients] += np.add.reduceat(norms, first)
    return means, squares


def _sliced_bounds(space: _Space, directions: int, seed: int) -> Distances:
    """Bounds of W1(p_i, p) without a cost matrix."""
    n = space.federation.clients
    means, squares = _moments(space)
    low = _sliced_table(space, directions, seed, _Line.from_average).max(axis=0)
    low = np.maximum(low, np.linalg.norm(means - means.mean(axis=0), axis=1))
    # p has p_i in it with weight 1/n: the rest of p is what p_i has to be moved to.
    others = max(n - 1, 1)
    rest, rest_squares = ((m.sum(axis=0) - m) / others for m in (means, squares))
    apart = squares + rest_squares - 2 * (means * rest).sum(axis=1)
    high = (1 - 1 / n) * np.sqrt(np.maximum(apart, 0))
    return Distances(low, low, np.maximum(low, high), "sliced")


def _sliced_matrix(
    space: _Space, directions: int, seed: int
) -> Float[np.ndarray, "clients clients"]:
    """A lower bound of W1(p_i, p_j), which is a distance itself, as the largest of some are."""
    means, _ = _moments(space)
    sliced = _sliced_table(space, directions, seed, _Line.from_each_other).max(axis=0)
    return np.asarray(np.maximum(sliced, distance.squareform(distance.pdist(means))))


# Groups


def _silhouette(
    matrix: Float[np.ndarray, "clients clients"], group: Int[np.ndarray, " clients"]
) -> float:
    """The mean of (b - a) / max(a, b): a to one's own group, b to the nearest other one.

    Rousseeuw (1987); 0 for a client that is a group of its own.
    """
    member = (group[:, None] == np.arange(group.max() + 1)).astype(float)
    totals, size = matrix @ member, member.sum(axis=0)
    own = size[group]
    a = (totals * member).sum(axis=1) / np.maximum(own - 1, 1)
    b = np.where(member > 0, np.inf, totals / size).min(axis=1)
    larger = np.maximum(a, b)
    score = (b - a) / np.where(larger > 0, larger, 1)
    return float(np.where(own > 1, score, 0).mean())


def _numbered(group: Int[np.ndarray, " clients"]) -> Int[np.ndarray, " clients"]:
    """The same groups, numbered by size and then by their first member."""
    _, first, inverse, size = np.unique(
        group, return_index=True, return_inverse=True, return_counts=True
    )
    number = np.empty(len(first), int)
    number[np.lexsort((first, -size))] = np.arange(len(first))
    return np.asarray(number[inverse])


def _require_settings(method: Any, tolerance: Any, directions: Any, seed: Any) -> None:
    require_choice("method", method, ("auto", "exact", "sinkhorn", "sliced"))
    require(0 < tolerance < 1, "tolerance", tolerance, "must be between 0 and 1")
    require_count("directions", directions)
    require(directions >= 2, "directions", directions, "must be at least 2, to tell an error")
    whole = isinstance(seed, Integral) and not isinstance(seed, bool)
    require(whole and seed >= 0, "seed", seed, "must be a whole number, at least 0")
