"""Keras models as models: what Keras computes, and what it would keep."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfed import FedAvg, FieldError, PerFedAvg, PFedMe, from_keras, load, simulate
from perfed.core.trees import leaf_paths, leaves_where, path_name

pytest.importorskip("keras", reason='needs "perfed[keras]"')
import keras
from keras import layers

Key = jax.random.key


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def texts() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 20, (5, 6)).astype(np.int32)


def cnn() -> Any:
    """PFLlib's CNN, for small images."""
    return keras.Sequential(
        [
            keras.Input((16, 16, 1)),
            layers.Conv2D(32, 5, activation="relu"), layers.MaxPooling2D(),
            layers.Conv2D(64, 5, activation="relu"), layers.MaxPooling2D(),
            layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10),
        ]
    )  # fmt: skip


def resnet(norm: Callable[[], Any], activation: str = "relu") -> Any:
    act = layers.Activation(activation)
    image = keras.Input((8, 8, 3))
    x = act(norm()(layers.Conv2D(4, 3, padding="same", use_bias=False)(image)))
    y = layers.Conv2D(8, 3, 2, padding="same", use_bias=False)(x)
    y = layers.Conv2D(8, 3, padding="same", use_bias=False)(act(norm()(y)))
    y = act(norm()(y) + norm()(layers.Conv2D(8, 1, 2, use_bias=False)(x)))
    return keras.Model(image, layers.Dense(10)(layers.GlobalAveragePooling2D()(y)))


def lstm() -> Any:
    return keras.Sequential(
        [keras.Input((6,)), layers.Embedding(20, 8), layers.LSTM(12), layers.Dense(20)]
    )


def transformer(dropout: float = 0.0) -> Any:
    text = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 16)(text)
    y = layers.MultiHeadAttention(2, 8, dropout=dropout)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x + layers.Dropout(dropout)(y))
    y = layers.Dense(16)(layers.Dense(32, activation="gelu")(x))
    x = layers.LayerNormalization()(x + layers.Dropout(dropout)(y))
    return keras.Model(text, layers.Dense(20)(layers.GlobalAveragePooling1D()(x)))


CASES: dict[str, tuple[Callable[[], Any], Callable[[], np.ndarray]]] = {
    "cnn": (cnn, lambda: images(4, 16, 16, 1)),
    "resnet-group": (
        lambda: resnet(lambda: layers.GroupNormalization(2)),
        lambda: images(4, 8, 8, 3),
    ),
    "resnet-batch": (lambda: resnet(layers.BatchNormalization), lambda: images(4, 8, 8, 3)),
    "lstm": (lstm, texts),
    "transformer": (transformer, texts),
}


def close(a: Any, b: Any) -> None:
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(b).max())))


def by_name(params: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves(params)
    return dict(zip(map(path_name, leaf_paths(params)), leaves, strict=True))


def written(model: Any, params: Any) -> Any:
    """The user's model with these weights."""
    return model.write_back(params)


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_keras_computes(case: str) -> None:
    """Outputs; one step of Keras's own `fit`: gradients, and the statistics that it keeps."""
    build, inputs = CASES[case]
    module, x = build(), inputs()
    model = from_keras(module)
    params, y = model.init(Key(0)), jnp.arange(len(x)) % 4
    close(jax.jit(model.apply)(params, x), module(x, training=False))

    def loss(params: Any) -> Any:
        outputs = model.apply(params, x, key=Key(0))
        outputs, renewed = outputs if model.is_state else (outputs, params)
        picked = jax.nn.log_softmax(outputs)[jnp.arange(len(x)), y]
        return -picked.mean(), renewed

    grads, renewed = jax.jit(jax.grad(loss, has_aux=True))(params)
    lossless = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    own = written(model, params)
    own.compile(keras.optimizers.SGD(1.0), lossless)
    own.fit(x, np.asarray(y), batch_size=len(x), epochs=1, verbose=0, shuffle=False)
    after = by_name(from_keras(own).init(Key(0)))
    assert set(after) == set(by_name(params))
    for name, start in by_name(params).items():
        state = model.is_state is not None and model.is_state(tuple(name.split(".")))
        assert state == ("moving" in name)
        close(after[name], by_name(renewed)[name] if state else start - by_name(grads)[name])


@pytest.mark.parametrize("case", ["resnet", "lstm"])
def test_clients_at_once_and_second_derivatives(case: str) -> None:
    module = lstm() if case == "lstm" else resnet(layers.BatchNormalization, "tanh")
    model, x = from_keras(module), texts() if case == "lstm" else images(4, 8, 8, 3)
    params = model.init(Key(0))
    clients = jax.tree.map(lambda p: jnp.stack([p, 1.1 * p]), params)
    state = model.is_state or (lambda path: False)

    def loss(params: Any) -> Any:
        return (model.apply(params, x) ** 2).mean()

    def product(params: Any) -> Any:
        direction = leaves_where(lambda path: not state(path), params)
        return jax.jvp(jax.grad(loss), (params,), (direction,))[1]

    found = jax.jit(jax.vmap(product))(clients)
    one = jax.tree.map(lambda leaf: leaf[1], clients)
    # Along a line: the difference of gradients.
    direction = leaves_where(lambda path: not state(path), one)
    up, down = (
        jax.jit(jax.grad(loss))(jax.tree.map(lambda p, d, h=h: p + h * d, one, direction))
        for h in (1e-3, -1e-3)
    )
    for name, leaf in by_name(jax.tree.map(lambda a, b: (a - b) / 2e-3, up, down)).items():
        largest = max(1.0, float(jnp.abs(leaf).max()))
        np.testing.assert_allclose(by_name(found)[name][1], leaf, atol=2e-2 * largest)


def test_names_do_not_depend_on_what_was_made_before() -> None:
    first = by_name(from_keras(cnn()).init(Key(0)))
    for _ in range(12):
        layers.Dense(1)
    assert list(by_name(from_keras(cnn()).init(Key(0)))) == list(first)
    assert {"conv2d.kernel", "conv2d_1.bias", "dense.kernel", "dense_1.kernel"} <= set(first)
    named = keras.Sequential([keras.Input((3,)), layers.Dense(2, name="head_7")])
    assert set(by_name(from_keras(named).init(Key(0)))) == {"head_7.kernel", "head_7.bias"}


def test_statistics_are_beside_their_layer() -> None:
    model = from_keras(keras.Sequential([keras.Input((3,)), layers.BatchNormalization()]))
    assert set(model.init(Key(0))["batch_normalization"]) == {
        "gamma", "beta", "moving_mean", "moving_variance",
    }  # fmt: skip


def test_what_is_not_trained_is_frozen() -> None:
    module = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6, name="base", activation="tanh"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(3, name="head"),
        ]
    )
    module.get_layer("base").enable_lora(2)
    module.get_layer("norm").trainable = False
    model, x = from_keras(module), images(5, 4)
    params = model.init(Key(0))
    assert set(by_name(params)) == {
        "base.bias", "base.lora_kernel_a", "base.lora_kernel_b", "head.kernel", "head.bias",
    }  # fmt: skip
    assert set(by_name(model.frozen)) == {
        "base.kernel", "norm.gamma", "norm.beta", "norm.moving_mean", "norm.moving_variance",
    }  # fmt: skip
    assert model.is_state is None
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)
    own = written(model, params)
    close(model.apply(params, x), own(x))
    zero = jax.tree.map(jnp.zeros_like, model.frozen)
    assert not np.allclose(model.apply(params, x), model.apply(params, x, frozen=zero))


@keras.saving.register_keras_serializable(package="perfed-tests")
class Net(keras.Model):  # type: ignore[misc]
    """A subclass, which Keras can copy by its registration."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden, self.drop, self.out = layers.Dense(8), layers.Dropout(0.5), layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.drop(self.hidden(x), training=training)
        return {"logits": self.out(hidden), "hidden": hidden}


def test_weights_go_in_and_out() -> None:
    module, x = Net(), images(2, 4)
    with pytest.raises(FieldError, match="call it on a batch first"):
        from_keras(module)
    module(x)
    before = [np.array(v) for v in module.variables]
    model = from_keras(module, output="logits")
    params = jax.tree.map(lambda leaf: leaf + 1, model.init(Key(0)))
    back = written(model, params)
    assert type(back) is Net
    close(model.apply(params, x), back(x)["logits"])
    for v, b in zip(module.variables, before, strict=True):
        np.testing.assert_array_equal(v, b)
    with pytest.raises(FieldError, match="'logits', 'hidden'"):
        from_keras(module, output="scores").apply(params, x)
    assert set(from_keras(module).apply(params, x)) == {"logits", "hidden"}


def test_a_key_drives_dropout() -> None:
    model = from_keras(transformer(0.5))
    params, x = model.init(Key(0)), texts()
    out = jax.jit(lambda key: model.apply(params, x, key))
    a, again, b = out(Key(1)), out(Key(1)), out(Key(2))
    np.testing.assert_array_equal(a, again)
    assert not np.allclose(a, b)
    assert not np.allclose(a, jax.jit(model.apply)(params, x))
    keys = jax.random.split(Key(3), 2)
    for i, own in enumerate(jax.jit(jax.vmap(lambda k: model.apply(params, x, k)))(keys)):
        close(own, out(keys[i]))


def test_layers_of_dropout_draw_their_own() -> None:
    """And each layer a part of its own of the mean."""
    image = keras.Input((400,))
    both = [layers.Dropout(0.25)(image), layers.Dropout(0.25)(image)]
    model = from_keras(keras.Model(image, layers.Concatenate()(both)))
    masks = np.asarray(model.apply({}, jnp.ones((8, 400)), Key(0))).reshape(8, 2, 400)
    np.testing.assert_allclose(np.unique(masks), [0, 4 / 3], rtol=1e-6)
    assert abs((masks == 0).mean() - 0.25) < 4 * (0.25 * 0.75 / masks.size) ** 0.5
    assert not np.array_equal(masks[:, 0], masks[:, 1])


def test_what_is_refused() -> None:
    with pytest.raises(FieldError, match=r"keras\.Model"):
        from_keras(layers.Dense(3))
    module = keras.Sequential([keras.Input((3,)), layers.Dense(2, kernel_regularizer="l2")])
    with pytest.raises(FieldError, match="use l2"):
        from_keras(module)
    twin = keras.Sequential([keras.Input((3,)), layers.SpectralNormalization(layers.Dense(2)),
        layers.BatchNormalization()])  # fmt: skip
    model = from_keras(twin)
    with pytest.raises(FieldError, match="changes in training"):
        model.apply(model.init(Key(0)), jnp.ones((2, 3)), Key(0))


def test_another_backend_is_refused() -> None:
    code = "import perfed; perfed.from_keras(None)"
    environment = {"KERAS_BACKEND": "numpy", "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert "set the environment variable KERAS_BACKEND=jax" in run.stderr


@pytest.mark.slow
def test_fedavg_learns_a_keras_model() -> None:
    module = keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(32, "elu"), layers.Dense(10)]
    )
    data, method = load("digits", clients=4), FedAvg(lr=0.2, tau=20, batch=32)
    result = simulate(data, from_keras(module), method, rounds=15, cohort=4)
    first, last = (e.scores["global"].accuracy.mean() for e in result.history)
    assert last > max(0.8, first + 0.3)


METHODS = {
    "exact": PerFedAvg(alpha=0.01, beta=0.01, tau=1, variant="exact"),
    "hf": PerFedAvg(alpha=0.01, beta=0.01, tau=1, variant="hf"),
    "fo": PerFedAvg(alpha=0.01, beta=0.01, tau=1, variant="fo"),
    "pfedme": PFedMe(lam=5.0, eta=0.01, local_rounds=1, inner_lr=0.01, inner_steps=2),
}


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name == "exact" else pytest.mark.slow) for name in METHODS],
)
def test_methods_run(method: str) -> None:
    module = keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Conv2D(2, 3, 2), layers.Flatten(), layers.Dense(10)]
    )
    model = from_keras(module)
    result = simulate(load("digits", clients=4), model, METHODS[method], rounds=1, cohort=2)
    before, after = model.init(Key(0)), result.global_model
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    assert not np.allclose(before["dense"]["kernel"], after["dense"]["kernel"])
