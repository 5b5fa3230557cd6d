"""`difference` is f(a + b) - f(a - b), whatever f is made of, for fewer products."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from perfed import CNN, GRU, MLP, MLR, PerFedAvg, Task, load, simulate
from perfed.core.differences import difference
from perfed.core.objective import ALL, Examples, Objective
from perfed.core.task import Model
from perfed.models import FunctionModel

RNG = np.random.default_rng(0)


def objective(model: Model, x: np.ndarray, l2: float = 0.0) -> Objective:
    y = jnp.asarray(RNG.integers(0, 3, len(x)))
    return Objective(Task(model, l2), Examples(jnp.asarray(x), y, 0, len(x)))


def direction(w: Any, scale: float) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(RNG.normal(0, scale, leaf.shape), leaf.dtype), w)


def moved(w: Any, by: Any, sign: int) -> Any:
    return jax.tree.map(lambda a, b: a + sign * b, w, by)


def two_gradients(problem: Objective, w: Any, by: Any) -> Any:
    ahead, behind = (problem.grad(moved(w, by, sign)) for sign in (1, -1))
    return moved(ahead, behind, -1)


def assert_alike(a: Any, b: Any, tolerance: float) -> None:
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        scale = float(jnp.abs(right).max())
        np.testing.assert_allclose(left, right, rtol=0, atol=tolerance * max(scale, 1e-3))


FEATURES = RNG.normal(size=(12, 8)).astype(np.float32)
MODELS: dict[str, tuple[Model, np.ndarray]] = {
    "mlr": (MLR(8, 3), FEATURES),
    "elu": (MLP(8, 3, (7, 6)), FEATURES),
    "relu": (MLP(8, 3, (7, 6), "relu"), FEATURES),
    "gelu, computed again": (MLP(8, 3, (7,), "gelu", remat=True), FEATURES),
    "cnn": (
        CNN((6, 6, 2), 3, (4,), 5),
        RNG.normal(size=(12, 6, 6, 2)).astype(np.float32),
    ),
    "bytes": (CNN((6, 6, 1), 3, (4,), 5), RNG.integers(0, 9, (12, 6, 6, 1), np.uint8)),
    "gru": (GRU(5, 3, 4, 6), RNG.integers(0, 5, (12, 4)).astype(np.int32)),
}


@pytest.mark.parametrize("l2", [0.0, 0.3])
@pytest.mark.parametrize("name", MODELS)
def test_two_gradients_of_a_model(name: str, l2: float) -> None:
    model, x = MODELS[name]
    problem = objective(model, x, l2)
    w = model.init(jax.random.key(0))
    # So far apart that a derivative would be something else.
    by = direction(w, 0.1)
    found = jax.jit(problem.grad_difference)(w, by, ALL)
    assert_alike(found, two_gradients(problem, w, by), 1e-4)
    derivative = jax.tree.map(lambda leaf: 2 * leaf, problem.hvp(w, by))
    with pytest.raises(AssertionError):
        assert_alike(found, derivative, 1e-3)


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "constant": lambda a: jnp.ones_like(a),
    "itself": lambda a: a,
    "a sum with what is constant": lambda a: 3.0 - a + 1.0,
    "a square": lambda a: a * a,
    "a product with itself": lambda a: (a[:, None] * a) @ a,
    "products with what is constant": lambda a: (jnp.arange(16.0).reshape(4, 4) @ a) * 2.0 / 3.0,
    "a divisor": lambda a: 1.0 / (2.0 + a),
    "a constant divided after a curve": lambda a: jnp.exp(a) / 4.0,
    "curves around products": lambda a: jnp.tanh(jnp.ones((4, 4)) @ jnp.sin(a)),
    "rounded": lambda a: a.astype(jnp.int32).astype(a.dtype),
    "products of whole numbers": lambda a: (
        jnp.ones((4, 4), jnp.int32) @ (a > 0.2).astype(jnp.int32)
    ).astype(a.dtype),
    "products of truths": lambda a: jax.lax.dot(
        jnp.eye(4, dtype=bool), a > 0.2, preferred_element_type=jnp.float32
    ),
    "a choice": lambda a: jnp.where(a > 0.2, a, -a),
    "parts": lambda a: jnp.concatenate([a[2:], jnp.zeros(1), a[:1]]),
    "own derivative": jax.nn.relu,
    "a loop": lambda a: jax.lax.scan(lambda c, s: (c * s + a, None), a, jnp.arange(3.0))[0],
    "a loop of no fixed length": lambda a: jax.lax.while_loop(
        lambda c: jnp.abs(c).max() < 5, lambda c: 2 * c + 1, a
    ),
    "a branch": lambda a: jax.lax.cond(a.sum() > 0, jnp.sin, jnp.cos, a),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_function(name: str) -> None:
    function = FUNCTIONS[name]
    at, by = jnp.array([0.5, -0.3, 1.2, 0.1]), jnp.array([0.2, 0.7, -0.9, 0.05])
    expected = function(at + by) - function(at - by)
    np.testing.assert_allclose(difference(function, at, by), expected, atol=2e-6)
    together = jax.vmap(lambda at: difference(function, at, by))(jnp.stack([at, at]))
    np.testing.assert_allclose(together, jnp.stack([expected] * 2), atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_models_of_short_floats_learn_by_differences_too(dtype: Any) -> None:
    model = MLR(64, 10)
    short = FunctionModel(
        lambda key: jax.tree.map(lambda leaf: leaf.astype(dtype), model.init(key)),
        lambda params, x: model.apply(params, x.astype(dtype)),
    )
    method = PerFedAvg("hf", alpha=0.1, beta=0.1, tau=2, batch=8, delta=0.1)
    result = simulate(load("digits", clients=4), short, method, rounds=2, cohort=2)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(result.state.params))


def test_it_takes_one_large_product_less_than_two_gradients() -> None:
    inputs, width, n = 512, 16, 32
    model = MLP(inputs, 3, (width,))
    problem = objective(model, RNG.normal(size=(n, inputs)).astype(np.float32))
    w = model.init(jax.random.key(0))
    batch = problem.batches(jax.random.key(1), (), n)

    def flops(function: Callable[..., Any]) -> float:
        cost: Any = jax.jit(function).lower(w, w).compile().cost_analysis()
        return float(cost["flops"])

    saved = flops(
        lambda w, by: moved(
            problem.grad(moved(w, by, 1), batch), problem.grad(moved(w, by, -1), batch), -1
        )
    ) - flops(lambda w, by: problem.grad_difference(w, by, batch))
    assert saved > 0.99 * 2 * n * inputs * width
