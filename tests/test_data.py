"""Data: the published generator, and federations from arrays."""

from typing import Any

import numpy as np
import pytest

from perfed import DataError, Federation, FieldError, synthetic
from perfed.data import FlatExamples


def test_synthetic_has_the_published_sizes() -> None:
    """pFedMe: 100 clients of 250 to 25,810 examples, three quarters of them to train on."""
    data = synthetic()
    sizes = data.train.size + data.test.size
    assert data.clients == 100
    assert (sizes.min(), sizes.max()) == (250, 25810)
    np.testing.assert_allclose(data.train.size / sizes, 0.75, atol=0.003)
    assert data.example_shape == (60,)
    assert data.labels == tuple("0123456789")
    smaller = synthetic(sizes="fedprox")
    np.testing.assert_array_equal(5 * (smaller.train.size + smaller.test.size), sizes)


def test_synthetic_follows_its_law() -> None:
    """Inputs have variance j^-1.2 around the client's center; labels are linear in them."""
    data = synthetic(clients=30, seed=3)
    x, y = data.train.client(int(np.argmax(data.train.size)))
    np.testing.assert_allclose(x.var(axis=0)[:20], np.arange(1, 21) ** -1.2, rtol=0.15)
    centers = np.array([data.train.client(i)[0].mean(axis=0) for i in range(30)])
    assert 0.8 < centers.std(axis=1).mean() < 1.2  # v_i ~ N(B_i, 1)
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


def test_a_federation_from_ones_own_arrays() -> None:
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(n, 3)), rng.integers(0, 2, n)) for n in (4, 2, 5)]
    data = Federation.from_arrays(parts, parts[::-1], names=["a", "b", "c"])
    assert data.clients == 3
    assert data.labels == ("0", "1")
    for i in range(3):
        np.testing.assert_array_equal(data.train.client(i)[0], parts[i][0])
        np.testing.assert_array_equal(data.test.client(i)[1], parts[2 - i][1])


def test_unusable_federations_are_refused() -> None:
    x, y = np.ones((2, 3)), np.array([0, 1])
    good = FlatExamples.from_arrays([(x, y), (x, y)])
    with pytest.raises(DataError, match="2 clients have data to train on and 1 have data held out"):
        Federation.from_examples(good, FlatExamples.from_arrays([(x, y)]))
    with pytest.raises(DataError, match="client b has no examples to be scored on"):
        Federation.from_examples(
            good, FlatExamples.from_arrays([(x, y), (x[:0], y[:0])]), names=["a", "b"]
        )
    with pytest.raises(DataError, match="not finite"):
        Federation.from_examples(good, FlatExamples.from_arrays([(x, y), (x * np.nan, y)]))
    with pytest.raises(DataError, match="one is -1"):
        Federation.from_examples(good, FlatExamples.from_arrays([(x, y), (x, y - 1)]))
    with pytest.raises(DataError, match=r"0..1, but one is 2"):
        Federation.from_examples(good, FlatExamples.from_arrays([(x, y), (x, y + 1)]), classes=2)


def test_parts_that_do_not_fit_together_are_refused() -> None:
    """Each of these would train some client on another's rows, or score nonsense."""
    x, y = np.ones((4, 3)), np.array([0, 1, 0, 1])
    good = FlatExamples.from_arrays([(x, y), (x, y)])
    as_regression = FlatExamples.from_arrays([(x, y + 0.5)] * 2)

    def refused(message: str, train: Any, test: Any = good, **options: Any) -> None:
        with pytest.raises(DataError, match=message):
            Federation.from_examples(FlatExamples.from_arrays(train), test, **options)

    refused("client 1 has 4 inputs but 2 labels", [(x, y), (x, y[:2])])
    refused(
        r"client 1's inputs have shape \(2,\), but client 0's have \(3,\)", [(x, y), (x[:, :2], y)]
    )
    refused("there are no clients", [])
    refused(r"held-out ones have \(3,\)", [(x[:, :2], y)] * 2)
    refused("1 names for 2 clients", [(x, y)] * 2, names=["a"])
    refused("labels to train on are float64, but held-out ones are int64", [(x, y + 0.5)] * 2)
    refused("classes must be whole numbers", [(x, y + 0.5)] * 2, as_regression, classes=2)
    refused("labels must be finite numbers", [(x, y + np.nan)] * 2, as_regression)
    refused(r"of shape \(8, 1\)", [(x, y[:, None])] * 2)
    refused("labels must be finite numbers", [(x, np.array(["a", "b", "a", "b"]))] * 2)
    with pytest.raises(DataError, match="4 inputs, 4 labels and sizes of 5 rows do not match"):
        FlatExamples.from_rows(x, y, [2, 3])
    with pytest.raises(FieldError, match=r"classes = 3\.0"):
        Federation.from_examples(good, good, classes=3.0)  # type: ignore[arg-type]
