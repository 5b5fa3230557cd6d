"""Distances between clients: by hand, and against optimal transport without any shortcuts."""

from dataclasses import replace
from typing import Any

import numpy as np
import ot
import pytest
from scipy.stats import wasserstein_distance

from perfed import Federation, FieldError, load
from perfed.data import Scaling
from perfed.theory.distances import (
    distance_matrix,
    example_distances,
    feature_distances,
    label_distances,
)
from perfed.theory.groups import groups
from perfed.theory.wasserstein import choose_method

Parts = list[tuple[np.ndarray, np.ndarray]]


def federation(parts: Parts, **more: Any) -> Federation:
    """Clients that train on these, and are scored on something else."""
    held_out = [(x[:1] + x.dtype.type(1), y[:1]) for x, y in parts]
    return replace(Federation.from_arrays(parts, held_out), **more)


def labeled(*labels: list[int]) -> Federation:
    """Clients with these labels, whose inputs say nothing."""
    return federation([(np.zeros((len(y), 1)), np.array(y)) for y in labels])


def placed(*inputs: Any) -> Federation:
    """Clients with these inputs, all of one class."""
    return federation([(np.array(x, float), np.zeros(len(x), int)) for x in inputs])


def targets(*values: Any) -> Federation:
    """Clients with these targets of a regression."""
    return federation([(np.zeros((len(y), 1)), np.array(y, float)) for y in values])


def mixed(seed: int = 0, sizes: tuple[int, ...] = (5, 40, 12, 23), dims: int = 3) -> Federation:
    """Uneven clients of different means, spreads and labels."""
    rng = np.random.default_rng(seed)
    return federation(
        [
            (
                rng.normal(size=dims) + rng.uniform(0.5, 2) * rng.normal(size=(m, dims)),
                rng.choice(4, size=m, p=rng.dirichlet(np.ones(4))),
            )
            for m in sizes
        ]
    )


def alike(sizes: tuple[int, ...], dims: int) -> Federation:
    """Clients that draw from one distribution."""
    rng = np.random.default_rng(3)
    return federation([(rng.normal(size=(m, dims)), rng.integers(0, 2, m)) for m in sizes])


def plain_cost(a: tuple[Any, Any], b: tuple[Any, Any], cost: float) -> float:
    """d(z, z') as it is written."""
    return float(np.sqrt(((a[0] - b[0]) ** 2).sum() + cost**2 * (a[1] != b[1])))


def plain_w1(data: Federation, p: np.ndarray, q: np.ndarray, cost: float) -> float:
    """W1 of two weightings of all examples: the linear program, with nothing left out."""
    z = list(zip(data.train.x, data.train.y, strict=True))
    return float(ot.emd2(p, q, np.array([[plain_cost(a, b, cost) for b in z] for a in z])))


def weightings(data: Federation) -> np.ndarray:
    """p_i of each client, over all examples."""
    size = data.train.size
    return np.array(
        [np.repeat(np.arange(len(size)) == i, size) / size[i] for i in range(len(size))]
    )


# Labels


def test_total_variation_of_labels_by_hand() -> None:
    """Of 4, 1 and 10 examples: p = (1/4, 5/12, 1/3) has a third of each client's mixture.

    Weighted by size it would be (1/5, 2/15, 2/3), and the first distance 2/3.
    """
    data = labeled([0, 0, 0, 1], [1], [2] * 10)
    np.testing.assert_allclose(label_distances(data), [1 / 2, 7 / 12, 2 / 3])
    expected = np.array([[0, 3 / 4, 1], [3 / 4, 0, 1], [1, 1, 0]])
    np.testing.assert_allclose(distance_matrix(data, "labels"), expected)


def test_total_variation_is_w1_where_different_labels_are_at_distance_1() -> None:
    data = mixed()
    p = weightings(data)
    apart = (data.train.y[:, None] != data.train.y).astype(float)
    expected = [float(ot.emd2(own, p.mean(axis=0), apart)) for own in p]
    np.testing.assert_allclose(label_distances(data), expected)
    nothing_else = federation([(0 * x, y) for x, y in map(data.train.client, range(4))])
    by_cost = feature_distances(nothing_else, label_cost=1, method="exact")
    np.testing.assert_allclose(by_cost.value, expected)


def test_targets_of_a_regression_by_hand() -> None:
    """W1 between 0 and {1, 3} is 2; p has half of each, so that half as much has to be moved."""
    data = targets([0.0], [1.0, 3.0])
    np.testing.assert_allclose(label_distances(data), [1, 1])
    np.testing.assert_allclose(distance_matrix(data), [[0, 2], [2, 0]])


@pytest.mark.parametrize("ties", [False, True])
def test_targets_of_a_regression_against_scipy(ties: bool) -> None:
    rng = np.random.default_rng(0)
    values = [rng.normal(loc, 2, size=m) for loc, m in ((0, 1), (1, 30), (-5, 7), (100, 19))]
    if ties:
        values = [np.round(v) for v in values]
    data = targets(*values)
    p = weightings(data)
    pooled, average = np.concatenate(values), p.mean(axis=0)
    expected = [wasserstein_distance(v, pooled, None, average) for v in values]
    np.testing.assert_allclose(label_distances(data), expected, rtol=1e-10)
    matrix = [[wasserstein_distance(v, w) for w in values] for v in values]
    np.testing.assert_allclose(distance_matrix(data), matrix, rtol=1e-10, atol=1e-12)


# Examples


@pytest.mark.parametrize("method", ["exact", "sinkhorn", "sliced"])
def test_w1_on_a_line_by_hand(method: Any) -> None:
    """Pooled by size, p would have a third at 0, and the first distance would be 4/3."""
    found = feature_distances(placed([[0]], [[1], [3]]), label_cost=0, method=method)
    assert found.method == method
    np.testing.assert_allclose(found.low, [1, 1], rtol=1e-2)
    if method != "sliced":
        np.testing.assert_allclose(found.high, [1, 1], rtol=1e-2)


def test_w1_in_the_plane_by_hand() -> None:
    data = placed([[0, 0], [1, 0]], [[0, 1], [1, 1]])
    np.testing.assert_allclose(feature_distances(data, label_cost=0).value, [1 / 2, 1 / 2])
    # Half goes from (0, 0) to (1, 1), and half from (1, 0).
    data = placed([[0, 0], [1, 0]], [[1, 1], [1, 1], [1, 1]])
    expected = (1 + np.sqrt(2)) / 2
    found = distance_matrix(data, "features", label_cost=0)
    np.testing.assert_allclose(found, [[0, expected], [expected, 0]])


def test_another_class_costs_what_it_says() -> None:
    data = federation([(np.zeros((2, 1)), np.array([0, 0])), (np.full((1, 1), 3.0), np.array([1]))])
    assert distance_matrix(data, "features", label_cost=4)[0, 1] == pytest.approx(5)
    np.testing.assert_allclose(feature_distances(data, label_cost=4).value, [2.5, 2.5])
    data = federation(
        [(np.zeros((1, 1)), np.array([0.0])), (np.full((1, 1), 3.0), np.array([2.0]))]
    )
    assert distance_matrix(data, "features", label_cost=2)[0, 1] == pytest.approx(5)


@pytest.mark.parametrize("cost", [0.0, 0.7, 30.0])
def test_exact_equals_the_whole_linear_program(cost: float) -> None:
    data = mixed()
    p = weightings(data)
    found = feature_distances(data, label_cost=cost)
    assert found.method == "exact"
    expected = [plain_w1(data, own, p.mean(axis=0), cost) for own in p]
    np.testing.assert_allclose(found.value, expected, rtol=1e-9)
    np.testing.assert_array_equal(found.low, found.high)
    matrix = [[plain_w1(data, own, other, cost) for other in p] for own in p]
    found_matrix = distance_matrix(data, "features", label_cost=cost)
    np.testing.assert_allclose(found_matrix, matrix, rtol=1e-9, atol=1e-9)


def test_equal_examples_far_from_0_are_at_distance_0() -> None:
    """They come in other numbers and another order, and only one example differs."""
    a = np.array([[1e6, 1], [1e6, 2], [1e6, 3]])
    data = placed(a, np.concatenate([a[::-1], a]), a + np.array([[0, 0], [0, 0], [0, 3]]))
    matrix = distance_matrix(data, "features", label_cost=0)
    np.testing.assert_allclose(matrix, [[0, 0, 1], [0, 0, 1], [1, 1, 0]], rtol=1e-9)
    assert matrix[0, 1] == 0


def test_small_distances_far_from_the_mean_are_not_lost() -> None:
    """In |a|^2 + |b|^2 - 2 a.b they would be, in double precision."""
    a = np.array([[1e4], [-1e4]])
    data = placed(a, a + 1e-4)
    matrix = distance_matrix(data, "features", label_cost=0, method="exact")
    assert matrix[0, 1] == pytest.approx(1e-4, rel=1e-6)
    # Single precision cannot tell them, and its interval says so.
    found = feature_distances(data, label_cost=0, method="sinkhorn")
    assert np.all((found.low <= 5e-5) & (found.high >= 5e-5) & (found.high < 5e-3))


def test_a_class_counts_as_much_as_a_typical_difference_of_inputs() -> None:
    """Root mean square distance from the mean, with every client counting the same."""
    data = mixed()
    weight = weightings(data).mean(axis=0)
    x = data.train.x - weight @ data.train.x
    typical = np.sqrt(weight @ (x**2).sum(axis=1))
    expected = feature_distances(data, label_cost=float(typical)).value
    np.testing.assert_allclose(feature_distances(data).value, expected)
    y = data.train.x.sum(axis=1)
    regression = replace(data, labels=None, train=replace(data.train, y=y))
    spread = np.sqrt(weight @ (y - weight @ y) ** 2)
    expected = feature_distances(regression, label_cost=float(typical / spread)).value
    np.testing.assert_allclose(feature_distances(regression).value, expected)
    # Inputs that never vary, at a number that is not exact: nothing is typical, and c is 1.
    still = [(np.full((3, 2), 0.1), np.array([0, 0, i])) for i in (0, 1)]
    np.testing.assert_allclose(feature_distances(federation(still)).value, [1 / 6, 1 / 6])


def test_inputs_are_taken_as_a_model_sees_them() -> None:
    rng = np.random.default_rng(0)
    parts = [(rng.integers(0, 256, (m, 2, 2)).astype(np.uint8), np.arange(m) % 2) for m in (4, 9)]
    for clients in (1, 2):
        shift = rng.normal(size=(clients, 2, 2)).astype(np.float32)
        scale = rng.uniform(0.1, 3, size=(clients, 2, 2)).astype(np.float32)
        data = federation(parts, scaling=Scaling(shift, scale, np.full(len(shift), np.inf)))
        seen = federation(
            [((x - shift[i % clients]) * scale[i % clients], y) for i, (x, y) in enumerate(parts)]
        )
        for method in ("exact", "sinkhorn", "sliced"):
            found, expected = (feature_distances(d, method=method) for d in (data, seen))
            np.testing.assert_allclose(found.value, expected.value, rtol=1e-5)
        raw = feature_distances(federation(parts))
        assert np.all(np.abs(raw.value - feature_distances(data).value) > 1e-2)


def test_symbols_differ_or_do_not() -> None:
    """Their numbers mean nothing: 0 is as far from 9 as from 1."""
    parts = [(np.array([x]), np.array([0])) for x in ([0, 0, 5], [9, 1, 5], [0, 0, 5])]
    data = federation(parts, vocabulary=tuple("abcdefghij"))
    far = np.sqrt(2)
    expected = [[0, far, 0], [far, 0, far], [0, far, 0]]
    for method in ("exact", "sinkhorn", "sliced"):
        found = distance_matrix(data, "features", label_cost=1, method=method)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-12)


def test_total_variation_of_examples_counts_equal_ones() -> None:
    """The clients are (1/2, 1/2, 0), (0, 1, 0) and (0, 0, 1) on three different examples."""
    a, b = [0.0, 1.0], [2.0, 3.0]
    x = [np.array([a, b]), np.array([b, b, b]), np.array([b])]
    y = [np.array([0, 1]), np.array([1, 1, 1]), np.array([0])]
    found = example_distances(federation(list(zip(x, y, strict=True))))
    np.testing.assert_allclose(found, [1 / 3, 1 / 2, 2 / 3])
    np.testing.assert_allclose(example_distances(mixed()), 3 / 4)
    np.testing.assert_array_equal(example_distances(placed([[0.0]], [[-0.0]])), 0)


# Bounds

SINKHORN = {
    "mixed": (mixed(), None),
    "many dimensions": (mixed(1, (30, 60, 20), dims=40), None),
    # The distance is a small part of the mean cost, which is what the entropy is measured by.
    "alike, on a line": (alike((60, 30, 90, 60), 1), None),
    "alike, in the plane": (alike((100, 100, 50), 2), 0.1),
    "classes are everything": (mixed(2), 1e5),
    "one of them far away": (placed([[0, 0], [1, 1], [1e3, 0]], [[0, 1], [2, 2]], [[3, 3]]), 0.0),
}


@pytest.mark.parametrize("name", SINKHORN)
def test_sinkhorn_interval_holds_the_exact_distance(name: str) -> None:
    """And is at most 1% of it wide."""
    data, cost = SINKHORN[name]
    exact = feature_distances(data, label_cost=cost, method="exact").value
    value, low, high, method = feature_distances(data, label_cost=cost, method="sinkhorn")
    assert method == "sinkhorn"
    assert np.all(low <= exact)
    assert np.all(exact <= high)
    assert np.all(high - low <= 0.01 * high)
    np.testing.assert_allclose(value, (low + high) / 2)


def test_sinkhorn_interval_is_true_and_narrows_with_the_tolerance() -> None:
    data = SINKHORN["alike, in the plane"][0]
    exact = feature_distances(data, label_cost=0.1, method="exact").value
    widths = []
    for tolerance in (0.5, 0.003):
        _, low, high, _ = feature_distances(
            data, label_cost=0.1, method="sinkhorn", tolerance=tolerance
        )
        assert np.all((low <= exact) & (exact <= high))
        assert np.all(high - low <= tolerance * high)
        widths.append(high - low)
    assert np.all(widths[0] > 2 * widths[1])
    matrices = [
        distance_matrix(data, "features", label_cost=0.1, method=method)
        for method in ("exact", "sinkhorn")
    ]
    np.testing.assert_allclose(matrices[1], matrices[0], rtol=0.01)


@pytest.mark.parametrize("name", SINKHORN)
def test_sliced_bounds_hold_the_exact_distance(name: str) -> None:
    data, cost = SINKHORN[name]
    exact = feature_distances(data, label_cost=cost, method="exact").value
    _, low, high, method = feature_distances(data, label_cost=cost, method="sliced")
    assert method == "sliced"
    assert np.all((low > 0) & (low <= exact) & (exact <= high))


def test_what_does_not_fit_is_refused_or_sliced() -> None:
    rng = np.random.default_rng(0)
    data = federation([(rng.normal(size=(11_000, 1)), np.arange(11_000) % 2) for _ in range(2)])
    for method in ("exact", "sinkhorn"):
        with pytest.raises(
            FieldError, match=r'method = .* matrix of 242,000,000 entries .* "auto"'
        ):
            feature_distances(data, method=method)
    assert feature_distances(data, directions=4).method == "sliced"


def test_auto_goes_by_what_all_cost_matrices_take() -> None:
    assert choose_method("auto", np.array([40_000_000] * 5)) == "exact"
    assert choose_method("auto", np.array([40_000_000] * 6)) == "sinkhorn"
    assert choose_method("auto", np.array([60_000_000])) == "sinkhorn"
    assert choose_method("auto", np.array([60_000_000] * 51)) == "sliced"
    assert choose_method("auto", np.array([201_000_000])) == "sliced"


# Matrices


@pytest.mark.parametrize("method", ["exact", "sliced"])
@pytest.mark.parametrize("on", ["labels", "features"])
def test_a_matrix_of_distances(on: Any, method: Any) -> None:
    data = mixed(4, (5, 9, 20, 14, 3, 8))
    matrix = distance_matrix(data, on, method=method)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_array_equal(matrix.diagonal(), 0)
    assert np.all(matrix[~np.eye(6, dtype=bool)] > 0)
    assert np.all(matrix[:, None] <= matrix[:, :, None] + matrix[None] + 1e-9)


def test_sliced_matrix_is_below_the_exact_one() -> None:
    data = mixed(4)
    exact, sliced = (distance_matrix(data, "features", method=m) for m in ("exact", "sliced"))
    assert np.all(sliced <= exact)
    assert np.all(sliced >= 0.2 * exact)


# Groups


def planted(seed: int = 0) -> tuple[Federation, np.ndarray]:
    """Clients of labels 0 to 4 and of 5 to 9, in no order; inputs follow the labels."""
    rng = np.random.default_rng(seed)
    kind = rng.permutation([0] * 5 + [1] * 8)
    parts = []
    for k in kind:
        y = rng.integers(5 * k, 5 * k + 5, size=rng.integers(30, 80))
        parts.append((3 * np.eye(10)[y] + rng.normal(size=(len(y), 10)), y))
    return federation(parts), 1 - kind


@pytest.mark.parametrize("on", ["labels", "features"])
@pytest.mark.parametrize("count", [None, 2])
def test_planted_groups_are_found(on: Any, count: int | None) -> None:
    """The larger one is group 0."""
    data, kind = planted()
    np.testing.assert_array_equal(groups(distance_matrix(data, on), count), kind)


def test_groups_of_the_per_fedavg_split() -> None:
    """Half of the clients hold half of the classes; no two of the others need be alike."""
    found = groups(distance_matrix(load("digits", clients=20, a=12)))
    assert set(found[:10]) == {0}
    assert 0 not in found[10:]


def test_identical_clients_are_one_group() -> None:
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6) % 3
    data = federation([(x, y), (x[::-1], y[::-1]), (np.tile(x, (3, 1)), np.tile(y, 3)), (x, y)])
    np.testing.assert_allclose(label_distances(data), 0, atol=1e-12)
    np.testing.assert_array_equal(feature_distances(data).high, 0)
    for on in ("labels", "features"):
        matrix = distance_matrix(data, on)
        np.testing.assert_allclose(matrix, 0, atol=1e-12)
        np.testing.assert_array_equal(groups(matrix), 0)


def test_clients_that_draw_from_one_distribution_are_one_group() -> None:
    data = alike((40,) * 12, 5)
    np.testing.assert_array_equal(groups(distance_matrix(data, "features")), 0)


def test_groups_are_numbered_by_size_then_by_first_member() -> None:
    place = np.array([50.0, 0, 20, 0.1, 20.1, 90])
    matrix = np.abs(place[:, None] - place)
    np.testing.assert_array_equal(groups(matrix, 4), [2, 0, 1, 0, 1, 3])
    np.testing.assert_array_equal(groups(matrix, 6), np.arange(6))
    np.testing.assert_array_equal(groups(matrix, 1), 0)
    # Ties: as many groups as asked for all the same.
    assert len(set(groups(np.ones((4, 4)) - np.eye(4), 3))) == 3


def test_the_number_of_groups_has_the_best_silhouette() -> None:
    place = np.concatenate([c + np.array([0, 0.1, 0.2]) for c in (0, 10, 20, 30)])
    found = groups(np.abs(place[:, None] - place))
    np.testing.assert_array_equal(found, np.repeat(np.arange(4), 3))


def test_few_clients() -> None:
    one = labeled([0, 1])
    np.testing.assert_array_equal(label_distances(one), 0)
    for method in ("exact", "sinkhorn", "sliced"):
        np.testing.assert_array_equal(feature_distances(one, method=method).high, 0)
        np.testing.assert_array_equal(distance_matrix(one, "features", method=method), [[0]])
    np.testing.assert_array_equal(groups(np.zeros((1, 1))), [0])
    two = np.array([[0, 1.0], [1, 0]])
    np.testing.assert_array_equal(groups(two), [0, 0])
    np.testing.assert_array_equal(groups(two, 2), [0, 1])


# Settings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", "quick"),
        ("label_cost", -1.0),
        ("label_cost", np.nan),
        ("tolerance", 0.0),
        ("tolerance", 1.5),
        ("directions", 1),
        ("directions", 2.5),
        ("seed", -1),
        ("seed", 0.5),
    ],
)
def test_a_bad_setting_is_named(field: str, value: Any) -> None:
    for call in (feature_distances, lambda d, **k: distance_matrix(d, "features", **k)):
        with pytest.raises(FieldError, match=f"^{field} = ") as error:
            call(mixed(), **{field: value})
        assert error.value.field == field


def test_a_bad_matrix_or_count_is_named() -> None:
    good = np.array([[0, 1.0], [1, 0]])
    with pytest.raises(FieldError, match=r"^on = 'rows': .*\"labels\", \"features\""):
        distance_matrix(mixed(), "rows")  # type: ignore[arg-type]
    for bad in (
        good[:1],
        np.zeros(()),
        np.zeros((0, 0)),
        -good,
        good + 1,
        good * np.nan,
        good * [[1], [2]],
    ):
        with pytest.raises(FieldError, match=r"^matrix = "):
            groups(bad)
    for count in (0, 3, 1.5):
        with pytest.raises(FieldError, match=r"^count = "):
            groups(good, count)  # type: ignore[arg-type]
