"""Data: the published generator and splits, in their exact numbers."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfed import DataError, Federation, FieldError, digits, synthetic
from perfed.data import partitions
from perfed.data.federation import FlatExamples


def test_synthetic_has_the_published_sizes() -> None:
    """pFedMe: 100 clients of 250 to 25,810 examples, three quarters of them to train on."""
    data = synthetic()
    sizes = data.train.size + data.test.size
    assert data.clients == 100
    assert (sizes.min(), sizes.max()) == (250, 25810)
    np.testing.assert_allclose(data.train.size / sizes, 0.75, atol=0.003)
    assert data.example_shape == (60,)
    assert data.classes == 10
    smaller = synthetic(sizes="fedprox")
    np.testing.assert_array_equal(5 * (smaller.train.size + smaller.test.size), sizes)


def test_synthetic_follows_its_law() -> None:
    """Inputs have variance j^-1.2 around the client's centre; labels are linear in them."""
    data = synthetic(clients=30, seed=3)
    x, y = data.train.client(int(np.argmax(data.train.size)))
    np.testing.assert_allclose(x.var(axis=0)[:20], np.arange(1, 21) ** -1.2, rtol=0.15)
    centres = np.array([data.train.client(i)[0].mean(axis=0) for i in range(30)])
    assert 0.8 < centres.std(axis=1).mean() < 1.2  # v_i ~ N(B_i, 1)
    # A linear rule made the labels, so a linear fit to their one-hot recovers most of them.
    onehot = np.eye(10)[y] - 0.1
    design = np.c_[x, np.ones(len(x))]
    fit = design @ np.linalg.lstsq(design, onehot, rcond=None)[0]
    assert (fit.argmax(axis=1) == y).mean() > 0.75


def test_alpha_and_beta_move_the_clients_apart() -> None:
    def spread(beta: float) -> float:
        data = synthetic(clients=60, beta=beta, sizes="fedprox", seed=1)
        return float(np.std([data.train.client(i)[0].mean() for i in range(60)]))

    assert spread(0.0) < 0.2 < spread(1.0)


def test_the_per_fedavg_split_of_the_digits() -> None:
    data = digits(clients=20, a=12)
    histograms = np.array([np.bincount(data.train.client(i)[1], minlength=10) for i in range(20)])
    np.testing.assert_array_equal(histograms[:10], [[12] * 5 + [0] * 5] * 10)
    for histogram in histograms[10:]:
        assert sorted(histogram[:5]) == [0, 0, 0, 0, 6]
        assert sorted(histogram[5:]) == [0, 0, 0, 0, 24]
    np.testing.assert_array_equal(histograms[10:].sum(axis=0), [12] * 5 + [48] * 5)
    # Held-out data have the same proportions.
    for i in range(20):
        held_out = np.bincount(data.test.client(i)[1], minlength=10)
        np.testing.assert_allclose(
            held_out / held_out.sum(), histograms[i] / histograms[i].sum(), atol=1e-9
        )


def test_diff_hetero_drops_the_minor_class() -> None:
    data = digits(clients=20, diff_hetero=True)
    for i in range(10, 20):
        assert len(set(data.train.client(i)[1].tolist())) == 1


def test_a_split_larger_than_the_data_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        DataError, match=r"needs 2200 images of class 0, and there are \d+; .* is 12"
    ):
        digits(clients=20, a=200)
    with pytest.raises(FieldError, match="clients = 7: must be even for the Per-FedAvg split"):
        digits(clients=7)
    with pytest.raises(DataError, match="ask for fewer clients"):
        digits(clients=400)
    with pytest.raises(DataError, match="1797 examples cannot give each of 1000 clients"):
        digits(clients=1000, split="dirichlet")


def pixels(data: Federation) -> list[bytes]:
    return [row.tobytes() for part in (data.train, data.test) for row in part.x]


@pytest.mark.parametrize("split", ["per-fedavg", "dirichlet"])
def test_no_digit_goes_to_two_places(split: str) -> None:
    data = digits(clients=10, split=split, seed=5)  # type: ignore[arg-type]
    rows = pixels(data)
    assert len(set(rows)) == len(rows)
    if split == "dirichlet":
        assert len(rows) == 1797
        assert data.train.size.min() >= 1
        assert data.test.size.min() >= 1


def test_splits_follow_their_seed() -> None:
    a, b, c = (digits(clients=10, split="dirichlet", seed=s) for s in (1, 1, 2))
    np.testing.assert_array_equal(a.train.x, b.train.x)
    assert a.train.size.tolist() != c.train.size.tolist()


def test_a_smaller_concentration_is_more_uneven() -> None:
    def classes_held(concentration: float) -> float:
        data = digits(clients=10, split="dirichlet", concentration=concentration)
        shares = [np.bincount(data.train.client(i)[1], minlength=10) for i in range(10)]
        return float(np.mean([(s / s.sum()).max() for s in shares]))

    assert classes_held(0.1) > classes_held(1.0) + 0.1 > classes_held(100.0) + 0.2


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=2, max_size=200),
    groups=st.integers(1, 8),
    fraction=st.floats(0.05, 0.95),
    seed=st.integers(0, 99),
)
def test_held_out_parts(labels: list[int], groups: int, fraction: float, seed: int) -> None:
    """Each group gives its fraction, to the nearest row, evenly over labels; never all of it."""
    y = np.array(labels)
    owner = np.arange(len(y)) % groups
    out = partitions.held_out(y, owner, fraction, np.random.default_rng(seed))
    for g in range(min(groups, len(y))):
        n, held = int((owner == g).sum()), int(out[owner == g].sum())
        if n >= 2:
            assert held == min(max(round(n * fraction), 1), n - 1)
        for c in range(5):
            cell = (owner == g) & (y == c)
            assert abs(out[cell].sum() - cell.sum() * held / n) <= 1


def test_a_federation_from_ones_own_arrays() -> None:
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(n, 3)), rng.integers(0, 2, n)) for n in (4, 2, 5)]
    data = Federation.of(parts, parts[::-1], names=["a", "b", "c"])
    assert data.clients == 3
    assert data.classes == 2
    for i in range(3):
        np.testing.assert_array_equal(data.train.client(i)[0], parts[i][0])
        np.testing.assert_array_equal(data.test.client(i)[1], parts[2 - i][1])


def test_unusable_federations_are_refused() -> None:
    x, y = np.ones((2, 3)), np.array([0, 1])
    good = FlatExamples.of([(x, y), (x, y)])
    with pytest.raises(DataError, match="2 clients have data to train on and 1 have data held out"):
        Federation.made(good, FlatExamples.of([(x, y)]))
    with pytest.raises(DataError, match="client b has no examples to be scored on"):
        Federation.made(good, FlatExamples.of([(x, y), (x[:0], y[:0])]), names=["a", "b"])
    with pytest.raises(DataError, match="not finite"):
        Federation.made(good, FlatExamples.of([(x, y), (x * np.nan, y)]))
    with pytest.raises(DataError, match="one is -1"):
        Federation.made(good, FlatExamples.of([(x, y), (x, y - 1)]))
    with pytest.raises(DataError, match=r"0..1, but one is 2"):
        Federation.made(good, FlatExamples.of([(x, y), (x, y + 1)]), classes=2)


def test_parts_that_do_not_fit_together_are_refused() -> None:
    """Each of these would train some client on another's rows, or score nonsense."""
    x, y = np.ones((4, 3)), np.array([0, 1, 0, 1])
    good = FlatExamples.of([(x, y), (x, y)])

    def refused(message: str, train: Any, test: Any = good, **options: Any) -> None:
        with pytest.raises(DataError, match=message):
            Federation.made(FlatExamples.of(train), test, **options)

    refused("client 1 has 4 inputs but 2 labels", [(x, y), (x, y[:2])])
    refused(
        r"client 1's inputs have shape \(2,\), but client 0's have \(3,\)", [(x, y), (x[:, :2], y)]
    )
    refused("there are no clients", [])
    refused(r"held-out ones have \(3,\)", [(x[:, :2], y)] * 2)
    refused("1 names for 2 clients", [(x, y)] * 2, names=["a"])
    refused("are float64 of shape", [(x, y + 0.5)] * 2)
    refused(r"of shape \(8, 1\)", [(x, y[:, None])] * 2)
    refused("labels must be whole numbers", [(x, np.array(["a", "b", "a", "b"]))] * 2)
    with pytest.raises(DataError, match="4 inputs, 4 labels and clients of 5 rows do not fit"):
        FlatExamples.joined(x, y, [2, 3])
    with pytest.raises(FieldError, match=r"classes = 3\.0"):
        Federation.made(good, good, classes=3.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"clients": 0}, "clients"),
        ({"test_fraction": 1.0}, "test_fraction"),
        ({"concentration": 0.0}, "concentration"),
        ({"a": 5}, "a"),
        ({"split": "iid"}, "split"),
        ({"seed": -1}, "seed"),
        ({"clients": 2.5}, "clients"),
    ],
)
def test_bad_settings_name_themselves(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        digits(**settings)
    assert caught.value.field == field
