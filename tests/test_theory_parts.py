"""The small parts that theory stands on: intervals, conditions, groups; by hand."""

from dataclasses import astuple
from math import inf, sqrt
from typing import Any

import numpy as np
import pytest
from scipy import stats

from perfed.data import Federation, FlatExamples
from perfed.theory.conditions import ROUNDING, Condition
from perfed.theory.constants import Effort
from perfed.theory.estimates import Estimate, largest, mean_estimate, smallest
from perfed.theory.groups import _silhouette, groups
from perfed.theory.points import ExamplePoints
from perfed.theory.projections import sliced_bounds


def test_how_much_is_measured() -> None:
    assert astuple(Effort()) == (30, 256, 6, 16, 12, 3, 8)


def test_students_interval_of_a_finite_population() -> None:
    """Of 4 of 10: standard deviation sqrt(14/3), 3 degrees of freedom, sqrt(1 - 4/10)."""
    seen = np.array([1.0, 2.0, 3.0, 6.0])
    half = stats.t.ppf(0.975, 3) * sqrt(14 / 3) / 2 * sqrt(0.6)
    found = mean_estimate(seen, 10, doubt=0.05)
    np.testing.assert_allclose(found, (3.0, 3 - half, 3 + half))
    upper = mean_estimate(seen, 10, seen + 1, doubt=0.05)
    np.testing.assert_allclose(upper, (3.0, 3 - half, 4 + half))
    assert mean_estimate(seen, 4, doubt=0.05) == (3.0, 3.0, 3.0)  # all there are
    assert mean_estimate(seen[:1], 10, doubt=0.05) == (1.0, -inf, inf)


def test_roots_of_estimates() -> None:
    assert Estimate(4.0, -1.0, 9.0).root() == (2.0, 0.0, 3.0)
    assert Estimate.exact(3) == (3.0, 3.0, 3.0)


def test_the_largest_and_the_smallest() -> None:
    some = [Estimate(1.0, 0.0, 5.0), Estimate(2.0, -1.0, 3.0)]
    assert largest(some) == (2.0, 0.0, 5.0)
    assert smallest(some) == (1.0, -1.0, 3.0)


@pytest.mark.parametrize(
    ("value", "sense", "limit", "factor", "holds"),
    [
        (2.0, "at most", 4.0, 0.5, True),
        (4.0, "at most", 4.0, 1.0, True),
        (4.1, "at most", 4.0, 1.025, False),
        (2.0, "at least", 4.0, 2.0, False),
        (8.0, "at least", 4.0, 0.5, True),
        (0.0, "at most", 0.0, 1.0, True),
        (1e-30, "at most", 0.0, inf, False),
        (0.0, "at least", 4.0, inf, False),
        (0.0, "at least", 0.0, 1.0, True),
        (1 + ROUNDING, "at most", 1.0, 1 + ROUNDING, True),
        (1 + 2 * ROUNDING, "at most", 1.0, 1 + 2 * ROUNDING, False),
    ],
)
def test_conditions_at_their_edges(
    value: float, sense: Any, limit: float, factor: float, holds: bool
) -> None:
    one = Condition("x", "practice", value, sense, limit, "")
    assert one.factor == pytest.approx(factor, rel=1e-12)
    assert one.holds is holds


def spread(*places: float) -> np.ndarray:
    at = np.array(places)
    return np.asarray(np.abs(at[:, None] - at))


def silhouette(matrix: np.ndarray, group: list[int]) -> float:
    """Client by client."""
    scores = []
    for i, own in enumerate(group):
        mine = [j for j, other in enumerate(group) if other == own and j != i]
        if not mine:
            scores.append(0.0)
            continue
        a = np.mean([matrix[i, j] for j in mine])
        others = {g: [j for j, other in enumerate(group) if other == g] for g in group if g != own}
        b = min(np.mean([matrix[i, j] for j in members]) for members in others.values())
        scores.append((b - a) / max(a, b) if max(a, b) > 0 else 0.0)
    return float(np.mean(scores))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("group", [[0, 0, 1, 1, 1], [0, 1, 1, 2, 2], [0, 1, 0, 1, 0]])
def test_silhouettes(scale: float, group: list[int]) -> None:
    matrix = scale * spread(0.0, 1.0, 4.0, 4.5, 9.0)
    found = _silhouette(matrix, np.array(group))
    assert found == pytest.approx(silhouette(matrix, group), abs=1e-12)
    assert _silhouette(np.zeros((3, 3)), np.array([0, 0, 1])) == 0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_groups_of_clients(scale: float) -> None:
    """The largest is group 0; of two of one size, the first client's."""
    near = scale * spread(0.0, 0.1, 5.0, 5.1, 5.2, 9.0, 9.1)
    assert groups(near).tolist() == [1, 1, 0, 0, 0, 2, 2]
    assert groups(near, 2).tolist() == [1, 1, 0, 0, 0, 0, 0]
    assert groups(near, 1).tolist() == [0] * 7
    assert sorted(groups(near, 7).tolist()) == list(range(7))
    assert groups(scale * (1 - np.eye(6))).tolist() == [0] * 6  # nobody is nearer to anybody
    assert groups(np.zeros((4, 4))).tolist() == [0] * 4
    assert groups(np.full((3, 3), 1e-9) * (1 - np.eye(3))).tolist() == [0] * 3
    assert groups(scale * spread(0.0)).tolist() == [0]
    pair = scale * spread(0.0, 1.0)
    assert groups(pair).tolist() == [0, 0]  # of two clients none are groups
    assert groups(pair, 2).tolist() == [0, 1]


def test_a_weak_structure_is_none() -> None:
    """The best mean silhouette has to be above 0.25."""
    rng = np.random.default_rng(0)
    found = {}
    for dimensions in (1, 40):
        at = rng.normal(size=(30, dimensions))
        matrix = np.sqrt(((at[:, None] - at) ** 2).sum(-1))
        best = max(silhouette(matrix, groups(matrix, count).tolist()) for count in range(2, 11))
        found[dimensions] = (best > 0.25, len(set(groups(matrix))) > 1)
    assert found == {1: (True, True), 40: (False, False)}


def test_at_most_ten_groups_are_found() -> None:
    twelve = spread(*(100.0 * i + d for i in range(12) for d in (0.0, 0.1)))
    assert len(set(groups(twelve))) == 10
    eight = spread(*(100.0 * i + d for i in range(8) for d in (0.0, 0.1)))
    assert len(set(groups(eight))) == 8
    two_and_one = spread(0.0, 0.1, 7.0)
    assert groups(two_and_one).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "matrix",
    [
        np.zeros((0, 0)),
        np.zeros((2, 3)),
        np.array([[0.0, 1.0], [1.1, 0.0]]),
        np.array([[0.0, 1.0], [1.0 + 1e-6, 0.0]]),
        np.array([[0.0, -1.0], [-1.0, 0.0]]),
        np.array([[0.0, inf], [inf, 0.0]]),
        np.array([[0.1, 1.0], [1.0, 0.0]]),
    ],
)
def test_what_is_no_distance_matrix(matrix: np.ndarray) -> None:
    with pytest.raises(ValueError, match="matrix"):
        groups(matrix)


@pytest.mark.parametrize(
    ("places", "low", "high"),
    [
        ([[0, 0], [3]], [1.5, 1.5], [1.5, 1.5]),  # half of the way from the average, which is both
        # The first two are moved to a mixture of 0 and 3, a mean square of 9/2 away.
        ([[0], [0], [3]], [1, 1, 2], [2 / 3 * sqrt(4.5), 2 / 3 * sqrt(4.5), 2]),
    ],
)
def test_bounds_without_a_cost_matrix(
    places: list[list[int]], low: list[float], high: list[float]
) -> None:
    x = np.array([[place] for own in places for place in own], np.float32)
    side = FlatExamples.from_rows(x, np.zeros(len(x), np.int32), [len(own) for own in places])
    space = ExamplePoints.of(Federation.from_examples(side, side, classes=1), 1.0)
    found = sliced_bounds(space, directions=3, seed=0)
    np.testing.assert_allclose(found[0], low, rtol=1e-6)
    np.testing.assert_allclose(found[1], high, rtol=1e-6)
