"""Models: shapes, starts, a convolution against JAX's own, and models of other libraries."""

import dataclasses
from typing import Any

import equinox
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfed import CNN, GRU, MLP, MLR, FedAvg, FieldError, from_equinox, from_flax, load, simulate
from perfed.core.task import Model


@pytest.mark.parametrize(
    "model",
    [MLR(64, 10), MLP(64, 10, (80, 60), "relu"), MLP(64, 10, ()), CNN((8, 8, 1), 10, (4, 6), 16)],
)
def test_outputs_and_starts(model: Any) -> None:
    params = model.init(jax.random.key(0))
    assert model.apply(params, jnp.ones((5, 8, 8, 1))).shape == (5, 10)
    for layer in jax.tree.leaves(params, is_leaf=lambda t: isinstance(t, dict) and "w" in t):
        bound = layer["w"].shape[1] ** -0.5
        values = np.concatenate([np.ravel(layer["w"]), np.ravel(layer["b"])])
        assert np.abs(values).max() <= bound
        assert np.abs(values).max() > 0.8 * bound
        assert np.abs(values.mean()) < 4 * bound / (3 * values.size) ** 0.5


@pytest.mark.parametrize("name", ["elu", "relu", "tanh", "gelu"])
def test_an_mlp_by_hand(name: Any) -> None:
    model = MLP(3, 2, (4,), name)
    (one, two), x = model.init(jax.random.key(1)), np.random.default_rng(0).normal(size=(5, 3))
    hidden = x @ one["w"].T + one["b"]
    expected = getattr(jax.nn, name)(hidden) @ two["w"].T + two["b"]
    np.testing.assert_allclose(
        model.apply([one, two], jnp.asarray(x, jnp.float32)), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("side", [7, 8])
def test_the_convolution_is_one(side: int) -> None:
    """Patches and a product against JAX's convolution and pooling."""
    model = CNN((side, side, 2), 3, (5,), 4)
    params = model.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (6, side, side, 2))
    layer = params["convolutions"][0]
    kernel = layer["w"].T.reshape(3, 3, 2, 5)
    convolved = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    pooled = jax.lax.reduce_window(
        jax.nn.relu(convolved + layer["b"]),
        -jnp.inf,
        jax.lax.max,
        (1, 2, 2, 1),
        (1, 2, 2, 1),
        "VALID",
    )
    dense = pooled.reshape(6, -1) @ params["dense"]["w"].T + params["dense"]["b"]
    expected = jax.nn.relu(dense) @ params["out"]["w"].T + params["out"]["b"]
    np.testing.assert_allclose(model.apply(params, x), expected, rtol=1e-4, atol=1e-5)


def learns(model: Model) -> None:
    result = simulate(
        load("digits", clients=4), model, FedAvg(lr=0.2, tau=20, batch=32), rounds=15, cohort=4
    )
    first, last = (e.scores["global"].accuracy.mean() for e in result.history)
    assert last > max(0.7, first + 0.3)
    own = result.personal_model(2)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), own, result.global_model)


def test_a_cnn_learns() -> None:
    learns(CNN((8, 8, 1), 10, (8,), 32))


def test_a_flax_model_learns() -> None:
    class Net(flax.linen.Module):  # type: ignore[misc]
        @flax.linen.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            x = flax.linen.relu(flax.linen.Dense(32)(x.reshape(x.shape[0], -1)))
            return flax.linen.Dense(10)(x)

    learns(from_flax(Net(), jnp.zeros((1, 8, 8, 1))))


def test_an_equinox_model_learns() -> None:
    class Net(equinox.Module):  # type: ignore[misc]
        mlp: Any

        def __init__(self, key: Any) -> None:
            self.mlp = equinox.nn.MLP(64, 10, 32, 1, key=key)

        def __call__(self, x: Any) -> Any:
            return self.mlp(x.ravel())

    learns(from_equinox(Net))


def test_any_object_with_init_and_apply_learns() -> None:
    class Mine:
        def init(self, key: Any) -> Any:
            return {"w": jax.random.normal(key, (64, 10)) / 8}

        def apply(self, params: Any, x: Any) -> Any:
            return x.reshape(x.shape[0], -1) @ params["w"]

    learns(Mine())


def test_a_flax_model_with_state_is_refused() -> None:
    class Net(flax.linen.Module):  # type: ignore[misc]
        @flax.linen.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            return flax.linen.BatchNorm(use_running_average=False)(x)

    with pytest.raises(ValueError, match="batch_stats"):
        from_flax(Net(), jnp.zeros((2, 4))).init(jax.random.key(0))


def test_a_cnn_that_pools_the_image_away_is_refused() -> None:
    with pytest.raises(FieldError, match="8x8 allows fewer"):
        CNN((8, 8, 1), 10, (4, 4, 4, 4))


@pytest.mark.parametrize(
    ("model", "shape"),
    [(MLP(50, 3, (200,) * 8, "elu"), (600, 50)), (GRU(11, 3, 4, 32), (64, 40))],
    ids=["mlp", "gru"],
)
def test_less_is_kept_for_the_same_gradient(model: Any, shape: tuple[int, ...]) -> None:
    x = jax.random.randint(jax.random.key(0), shape, 0, 11)
    x = x if isinstance(model, GRU) else x.astype(jnp.float32) / 11
    w = model.init(jax.random.key(1))

    def compiled(model: Any) -> Any:
        return jax.jit(jax.grad(lambda w: (model.apply(w, x) ** 2).sum())).lower(w).compile()

    plain, again = compiled(model), compiled(dataclasses.replace(model, remat=True))
    for a, b in zip(*map(jax.tree.leaves, (plain(w), again(w))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(np.abs(b).max()))
    kept = [program.memory_analysis().temp_size_in_bytes for program in (plain, again)]
    assert kept[1] < 0.8 * kept[0], kept
