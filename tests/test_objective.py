"""One client's problem: its batches, and its derivatives against NumPy."""

from collections import Counter
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import problems
from perfed.core.objective import ALL, Batch, Examples, Objective
from perfed.core.random import Purpose, fold, permuted
from perfed.core.task import Task, cross_entropy

# Far in the tail of a chi-square: a right sampler fails here once in about 10^6 runs, and runs are
# repeatable, so a failure is a defect.
SIGMAS = 5.0


def assert_uniform(counts: np.ndarray) -> None:
    expected = counts.sum() / counts.size
    chi2 = ((counts - expected) ** 2 / expected).sum()
    degrees = counts.size - 1
    assert chi2 < degrees + SIGMAS * (2 * degrees) ** 0.5, (chi2, degrees)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_every_permutation_is_as_likely(n: int) -> None:
    keys = jax.random.split(jax.random.key(0), 20_000)
    drawn = np.asarray(jax.jit(jax.vmap(lambda k: permuted(k, jnp.arange(n), n)))(keys))
    counts = Counter(map(tuple, drawn.tolist()))
    assert set(counts) == set(permutations(range(n)))
    if n > 1:
        assert_uniform(np.array(list(counts.values())))


def test_permutations_of_one_key_are_independent() -> None:
    """Epoch after epoch: where an entry goes tells nothing of where it goes next."""
    n, keys = 5, jax.random.split(jax.random.key(1), 20_000)
    two = jax.jit(jax.vmap(lambda k: permuted(k, jnp.zeros(2, int), n, epoch=jnp.arange(2))))(keys)
    pairs = np.asarray(two)
    assert_uniform(np.bincount(pairs[:, 0] * n + pairs[:, 1], minlength=n * n))


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 5000), seed=st.integers(0, 2**31 - 1))
def test_a_permutation_is_one(n: int, seed: int) -> None:
    padded = permuted(jax.random.key(seed), jnp.arange(5000) % n, n)  # one shape: one compilation
    assert sorted(np.asarray(padded)[:n].tolist()) == list(range(n))


def test_keys_of_different_draws_differ() -> None:
    keys = [
        fold(seed, purpose, round, client)
        for seed in (0, 1)
        for purpose in Purpose
        for round in (0, 1, 2)
        for client in (0, 1, 2)
    ]
    assert len({tuple(np.asarray(jax.random.key_data(k)).tolist()) for k in keys}) == len(keys)


@pytest.mark.parametrize("n", [41, 47, 49, 55])
def test_a_perfect_client_scores_exactly_one(n: int) -> None:
    """Sums are divided by n; times 1/n they would miss 1 in float32 for these."""

    class AlwaysFirst:
        def init(self, key: object) -> object:
            return ()

        def apply(self, params: object, x: jax.Array) -> jax.Array:
            return jnp.stack([jnp.ones(len(x)), jnp.zeros(len(x))], axis=1)

    def accuracy(size: jax.Array) -> jax.Array:
        own = Examples(jnp.ones((60, 1)), jnp.zeros(60, int), 0, size)
        return Objective(Task(AlwaysFirst()), own).measure(()).score

    assert float(jax.jit(accuracy)(n)) == 1.0


def test_batches_are_uniform_with_replacement() -> None:
    data = problems.federation(sizes=(4, 10, 6))
    batch = problems.objective(data, 1).batches(jax.random.key(0), 500, 40)
    assert batch.position is not None
    assert batch.position.shape == (500, 40)
    assert_uniform(np.bincount(np.asarray(batch.position).ravel(), minlength=10))
    # With replacement, a batch of 40 from 10 examples repeats some; and no two steps agree.
    assert len({tuple(row) for row in np.asarray(batch.position).tolist()}) == 500


@pytest.mark.parametrize(("n", "size", "steps"), [(10, 4, 5), (7, 3, 7), (3, 8, 3), (1, 5, 2)])
def test_epochs_use_every_example_once_before_any_twice(n: int, size: int, steps: int) -> None:
    data = problems.federation(sizes=(4, n, 6))
    own = problems.objective(data, 1, sampling="epochs")
    drawn = np.asarray(own.batches(jax.random.key(2), steps, size).position).ravel()
    for epoch in range(len(drawn) // n):
        assert sorted(drawn[epoch * n : epoch * n + n].tolist()) == list(range(n))


def test_epochs_are_shuffled_anew() -> None:
    own = problems.objective(problems.federation(sizes=(50,)), 0, sampling="epochs")
    first, second = np.asarray(own.batches(jax.random.key(0), 2, 50).position)
    third = np.asarray(own.batches(jax.random.key(1), 1, 50).position)[0]
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, third)
    assert not np.array_equal(first, np.arange(50))


def test_examples_stay_within_the_client() -> None:
    """Whatever positions a method asks for, it sees its own client's rows only."""
    x = jnp.arange(10.0)[:, None]
    own = Examples(x, jnp.arange(10), 3, 4)
    rows, labels = own.rows(jnp.array([-100, -1, 0, 3, 4, 100]))
    assert rows.ravel().tolist() == [3, 3, 3, 6, 6, 6]
    assert labels.tolist() == [3, 3, 3, 6, 6, 6]


@pytest.mark.parametrize("n", [1, 255, 256, 257, 1000])
def test_all_data_block_by_block(n: int) -> None:
    """The blocks' edges lose and repeat nothing, and other clients' rows do not leak in."""
    data = problems.federation(sizes=(30, n, 300))
    own, f = problems.objective(data, 1), problems.quadratics(data)[1]
    w, v = problems.start(), problems.start(8)
    x, y = (part.astype(np.float64) for part in data.train.client(1))
    loss = 0.5 * np.mean((x @ w - y) ** 2)
    np.testing.assert_allclose(own.loss(problems.f32(w)), loss, rtol=1e-5)
    np.testing.assert_allclose(own.grad(problems.f32(w)), f.grad(w), rtol=1e-4, atol=1e-5)
    hvp = own.hvp(problems.f32(w), problems.f32(v))
    np.testing.assert_allclose(hvp, f.A @ v, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(own.measure(problems.f32(w)).loss, loss, rtol=1e-5)


def test_a_batch_counts_repeated_examples() -> None:
    data = problems.federation()
    x, y = (part.astype(np.float64) for part in data.train.client(3))
    batch, w = [0, 2, 2, 11], problems.start()
    expected = x[batch].T @ (x[batch] @ w - y[batch]) / 4
    got = problems.objective(data, 3).grad(problems.f32(w), Batch(jnp.array(batch)))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", [ALL, Batch(jnp.array([1, 0, 1]))])
def test_l2(batch: Batch) -> None:
    data, l2 = problems.federation(), 0.7
    plain = problems.objective(data, 0)
    own = Objective(Task(problems.Linear(), l2, problems.half_squared), plain.examples)
    w, v = problems.f32(problems.start()), problems.f32(problems.start(8))
    np.testing.assert_allclose(
        own.loss(w, batch) - plain.loss(w, batch), 0.35 * jnp.sum(w**2), rtol=1e-4
    )
    np.testing.assert_allclose(own.grad(w, batch) - plain.grad(w, batch), l2 * w, rtol=1e-4)
    np.testing.assert_allclose(own.hvp(w, v, batch) - plain.hvp(w, v, batch), l2 * v, rtol=1e-4)
    # What is reported is the data's loss alone.
    np.testing.assert_allclose(own.measure(w).loss, plain.measure(w).loss, rtol=1e-6)


def test_cross_entropy() -> None:
    logits, y = np.random.default_rng(0).normal(size=(6, 4)) * 30, np.array([0, 3, 1, 2, 2, 0])
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    got = cross_entropy(jnp.asarray(logits, jnp.float32), jnp.asarray(y))
    np.testing.assert_allclose(got, -log_softmax[np.arange(6), y], rtol=1e-5, atol=1e-5)
