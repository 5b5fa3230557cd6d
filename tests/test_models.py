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
from perfed.core.trees import leaf_paths


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


@pytest.mark.slow
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


class FlaxNet(flax.linen.Module):  # type: ignore[misc]
    """Batch normalization and dropout, by an argument that modules call differently."""

    @flax.linen.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = flax.linen.Dense(16)(x.reshape(x.shape[0], -1))
        x = flax.linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = flax.linen.Dropout(0.5, deterministic=not train)(x)
        return flax.linen.Dense(10)(x)


class Deterministic(flax.linen.Module):  # type: ignore[misc]
    @flax.linen.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Any, *, deterministic: bool) -> Any:
        return flax.linen.Dropout(0.5)(x, deterministic=deterministic)


def test_a_flax_model_with_statistics_and_dropout() -> None:
    """Against Flax itself, with its own trees."""
    x = jax.random.normal(jax.random.key(5), (6, 4, 4, 1))
    model, module = from_flax(FlaxNet(), x), FlaxNet()
    params, key = model.init(jax.random.key(0)), jax.random.key(1)
    assert set(params["BatchNorm_0"]) == {"scale", "bias", "mean", "var"}
    assert model.is_state is not None
    state = [path for path in leaf_paths(params) if model.is_state(path)]
    assert state == [("BatchNorm_0", "mean"), ("BatchNorm_0", "var")]
    norm = params["BatchNorm_0"]
    variables = {
        "params": params | {"BatchNorm_0": {k: norm[k] for k in ("scale", "bias")}},
        "batch_stats": {"BatchNorm_0": {k: norm[k] for k in ("mean", "var")}},
    }
    np.testing.assert_allclose(model.apply(params, x), module.apply(variables, x), rtol=1e-5)
    expected, after = module.apply(
        variables, x, train=True, rngs={"dropout": key}, mutable=["batch_stats"]
    )
    outputs, renewed = model.apply(params, x, key)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5)
    for name, leaf in after["batch_stats"]["BatchNorm_0"].items():
        np.testing.assert_allclose(renewed["BatchNorm_0"][name], leaf, rtol=1e-5)
        assert not np.allclose(leaf, norm[name])
    assert not np.allclose(outputs, model.apply(params, x, jax.random.key(2))[0])
    assert model.write_back is not None
    np.testing.assert_allclose(model.write_back(renewed)(x), model.apply(renewed, x), rtol=1e-5)


def test_the_argument_of_a_flax_model_may_be_the_other_way_round() -> None:
    x = jnp.ones((50, 8))
    model = from_flax(Deterministic(), x)
    params = model.init(jax.random.key(0))
    np.testing.assert_array_equal(model.apply(params, x), x)
    share = float((model.apply(params, x, jax.random.key(0)) == 0).mean())
    assert abs(share - 0.5) < 4 * 0.5 / 400**0.5


def test_flax_models_that_are_refused() -> None:
    class Kept(flax.linen.Module):  # type: ignore[misc]
        @flax.linen.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            return x + self.variable("memory", "seen", jnp.zeros, 4).value

    class Always(flax.linen.Module):  # type: ignore[misc]
        @flax.linen.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            return flax.linen.Dropout(0.5, deterministic=False)(x)

    with pytest.raises(FieldError, match=r"Kept.*keeps memory beside parameters"):
        from_flax(Kept(), jnp.zeros((2, 4)))
    model = from_flax(Always(), jnp.ones((2, 4)))
    with pytest.raises(FieldError, match="an argument train or deterministic"):
        model.apply({}, jnp.ones((2, 4)))


class EquinoxNet(equinox.Module):  # type: ignore[misc]
    linear: Any
    drop: Any

    def __init__(self, key: Any) -> None:
        self.linear, self.drop = equinox.nn.Linear(4, 8, key=key), equinox.nn.Dropout(0.5)

    def __call__(self, x: Any, key: Any = None) -> Any:
        return self.drop(self.linear(x), key=key)


def test_an_equinox_model_with_dropout() -> None:
    model, x = from_equinox(EquinoxNet), jnp.ones((30, 4))
    params = model.init(jax.random.key(0))
    plain, a, b = (
        model.apply(params, x, key) for key in (None, jax.random.key(1), jax.random.key(2))
    )
    np.testing.assert_allclose(plain, x @ params.linear.weight.T + params.linear.bias, rtol=1e-5)
    assert not np.array_equal(a, b)
    np.testing.assert_array_equal(a, model.apply(params, x, jax.random.key(1)))
    np.testing.assert_allclose(a, jnp.where(a == 0, 0, 2 * plain), rtol=1e-5)
    assert not np.array_equal(a[0] == 0, a[1] == 0)  # each example has a mask of its own
    assert model.write_back is not None
    one = equinox.nn.inference_mode(model.write_back(params))(x[0])
    np.testing.assert_allclose(one, plain[0], rtol=1e-5)


def test_an_equinox_model_with_state_is_refused() -> None:
    def build(key: Any) -> Any:
        return equinox.nn.make_with_state(equinox.nn.BatchNorm)(3, axis_name="batch", mode="batch")

    for make in (build, lambda key: build(key)[0]):
        with pytest.raises(FieldError, match=r"BatchNorm.*layer or group normalization"):
            from_equinox(make)


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
