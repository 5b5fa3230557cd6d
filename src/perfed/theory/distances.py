"""How far clients' data are apart: the distances of Per-FedAvg section 4.1."""

from itertools import combinations
from numbers import Integral
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.spatial import distance

from perfed.core.errors import require, require_choice, require_count
from perfed.data import Federation
from perfed.data.splits import label_counts
from perfed.theory.points import (
    ExamplePoints,
    distributions,
    regression_targets,
    transport_problem,
)
from perfed.theory.projections import ClientNumbers, sliced_bounds, sliced_matrix
from perfed.theory.wasserstein import W1Method, choose_method, w1_bounds

On = Literal["labels", "features"]


class Distances(NamedTuple):
    """W1(p_i, p) of each client, with an interval.

    Attributes:
        value: the distance: itself if `exact`, the middle of the interval if `sinkhorn`, and the
            interval's lower end, which may be far too small, if `sliced`.
        low: a lower bound.
        high: an upper bound.
        method: how it was computed: `exact`, `sinkhorn` or `sliced`.
    """

    value: Float[np.ndarray, " clients"]
    low: Float[np.ndarray, " clients"]
    high: Float[np.ndarray, " clients"]
    method: str


def label_distances(federation: Federation) -> Float[np.ndarray, " clients"]:
    """||p_i - p||_TV = 1/2 sum_y |p_i(y) - p(y)| of the labels alone.

    The distance in (14a) is over whole examples z = (x, y), and at least this large: it is this one
    where clients agree on how inputs look given a label, and any larger one where they do not. So
    this bounds neither gamma_G nor gamma_H; `example_distances` is the distance that does.

    It is W1 of labels as well, where two different ones are at distance 1. The targets of a
    regression are at the distance |y - y'|, in their stored units, and W1(p_i, p) is
    given for them: total variation says nothing about numbers that hardly ever repeat.
    """
    if federation.labels is None:
        line = ClientNumbers.of(regression_targets(federation), federation)
        return line.from_average()
    mixtures = _mixtures(federation)
    return np.asarray(0.5 * np.abs(mixtures - mixtures.mean(axis=0)).sum(axis=1))


def example_distances(federation: Federation) -> Float[np.ndarray, " clients"]:
    """||p_i - p||_TV of whole examples z = (x, y), as in (14a), by counting equal ones.

    Where no example comes twice it is 1 - 1/n for every client, whatever the data, and says
    nothing: it is meant for inputs with few distinct values.
    """
    clients, average = distributions(ExamplePoints.of(federation, 0.0))
    return np.array([transport_problem(own, average).mass for own in clients])


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

    The common part of p_i and p costs nothing to move, so W1 is that of the rest. For this smaller
    problem,

    - `exact` solves the linear program (network simplex).
    - `sinkhorn` solves it with an entropy term. The entropic plan, rounded to the exact marginals
      (Altschuler et al., 2017), costs `high`; its potentials, made feasible by a c-transform, have
      the value `low`. The entropy's weight goes down until the interval's width is at most
      `tolerance` times `high`, or until 0.0005 of the mean cost.
    - `sliced` needs no cost matrix. A projection to a line is 1-Lipschitz, so the largest W1 over
      random directions, or the distance of the means if that is larger, is a lower bound; it is
      `value`, too. `high` is what independent draws cost, at the root mean square. In many
      dimensions that is a wide interval.

    Args:
        federation: whose training examples.
        label_cost: c; None: as the docstring of `perfed.theory.points` says.
        method: `auto` is `exact` where all cost matrices together have at most
            `AUTO_EXACT_ENTRIES`, `sinkhorn` up to `AUTO_SINKHORN_ENTRIES`, and else `sliced`.
        tolerance: the relative width of the interval at which `sinkhorn` stops.
        directions: how many random directions `sliced` takes.
        seed: the seed of those directions.
    """
    _require_settings(method, tolerance, directions, seed)
    points = ExamplePoints.of(federation, label_cost)
    if method == "sliced":
        return _sliced(points, directions, seed)
    clients, average = distributions(points)
    chosen = choose_method(method, np.array([len(own.rows) for own in clients]) * len(average.rows))
    if chosen == "sliced":
        return _sliced(points, directions, seed)
    intervals = [
        w1_bounds(points, chosen, transport_problem(own, average), tolerance) for own in clients
    ]
    low, high = np.array(intervals).T
    return Distances((low + high) / 2, low, high, chosen)


def _sliced(points: ExamplePoints, directions: int, seed: int) -> Distances:
    low, high = sliced_bounds(points, directions, seed)
    return Distances(low, low, high, "sliced")


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
    interval, in `sliced` its lower bound. All but `sinkhorn` satisfy the triangle inequality.
    """
    require_choice("on", on, ("labels", "features"))
    _require_settings(method, tolerance, directions, seed)
    if on == "labels":
        if federation.labels is None:
            return ClientNumbers.of(regression_targets(federation), federation).from_each_other()
        mixtures = _mixtures(federation)
        return np.asarray(0.5 * distance.cdist(mixtures, mixtures, "cityblock"))
    points = ExamplePoints.of(federation, label_cost)
    if method == "sliced":
        return sliced_matrix(points, directions, seed)
    clients, _ = distributions(points)
    sizes = np.array([len(own.rows) for own in clients])
    pairs = list(combinations(range(federation.clients), 2))
    chosen = choose_method(method, np.array([sizes[i] * sizes[j] for i, j in pairs] or [0]))
    if chosen == "sliced":
        return sliced_matrix(points, directions, seed)
    matrix = np.zeros((federation.clients, federation.clients))
    for i, j in pairs:
        low, high = w1_bounds(points, chosen, transport_problem(clients[i], clients[j]), tolerance)
        matrix[i, j] = matrix[j, i] = (low + high) / 2
    return matrix


def _mixtures(federation: Federation) -> Float[np.ndarray, "clients classes"]:
    """p_i(y) of each client."""
    train, n = federation.train, federation.clients
    owner = np.repeat(np.arange(n), train.size)
    counts = label_counts(np.asarray(train.y), owner, n, federation.outputs)
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))


def _require_settings(method: Any, tolerance: Any, directions: Any, seed: Any) -> None:
    require_choice("method", method, ("auto", "exact", "sinkhorn", "sliced"))
    require(0 < tolerance < 1, "tolerance", tolerance, "must be between 0 and 1")
    require_count("directions", directions)
    require(directions >= 2, "directions", directions, "must be at least 2")
    whole = isinstance(seed, Integral) and not isinstance(seed, bool)
    require(whole and seed >= 0, "seed", seed, "must be a whole number, at least 0")
