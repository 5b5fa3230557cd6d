"""Flax NNX modules as models: what NNX computes, and what it would keep."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfed import FedAvg, FieldError, PerFedAvg, PFedMe, from_nnx, load, simulate
from perfed.core.trees import leaf_paths, path_name

pytest.importorskip("flax", reason='needs "perfed[nnx]"')
from flax import nnx

Key = jax.random.key


def pool(x: Any) -> Any:
    return nnx.max_pool(x, (2, 2), (2, 2))


class CNN(nnx.Module):  # type: ignore[misc]
    """PFLlib's CNN, for small images."""

    def __init__(self, rngs: Any) -> None:
        self.conv1 = nnx.Conv(1, 32, (5, 5), padding="VALID", rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (5, 5), padding="VALID", rngs=rngs)
        self.fc1, self.fc = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = pool(nnx.relu(self.conv2(pool(nnx.relu(self.conv1(x))))))
        return self.fc(nnx.relu(self.fc1(x.reshape(x.shape[0], -1))))


class Residual(nnx.Module):  # type: ignore[misc]
    def __init__(self, norm: Callable[..., Any], rngs: Any) -> None:
        self.stem = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.layers = nnx.List([nnx.Conv(4, 4, (3, 3), rngs=rngs) for _ in range(2)])
        self.norms = nnx.List([norm(4, rngs=rngs) for _ in range(3)])
        self.fc = nnx.Linear(4, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = y = nnx.relu(self.norms[0](self.stem(x)))
        for conv, norm in zip(self.layers, list(self.norms)[1:], strict=True):
            y = nnx.relu(norm(conv(y)))
        return self.fc((x + y).mean((1, 2)))


class LSTM(nnx.Module):  # type: ignore[misc]
    def __init__(self, rngs: Any) -> None:
        self.embedding = nnx.Embed(20, 8, rngs=rngs)
        self.rnn = nnx.RNN(nnx.LSTMCell(8, 12, rngs=rngs))
        self.fc = nnx.Linear(12, 20, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.fc(self.rnn(self.embedding(x))[:, -1])


class Transformer(nnx.Module):  # type: ignore[misc]
    def __init__(self, rngs: Any, rate: float = 0.0) -> None:
        self.embedding = nnx.Embed(20, 16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, 16, decode=False, rngs=rngs)
        self.norm, self.drop = nnx.LayerNorm(16, rngs=rngs), nnx.Dropout(rate, rngs=rngs)
        self.more = nnx.Dropout(rate, rngs=rngs)
        self.up, self.out = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 20, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.embedding(x)
        x = self.norm(x + self.drop(self.attention(x, mask=nnx.make_causal_mask(x[..., 0]))))
        return self.out(self.more(nnx.gelu(self.up(x)))).mean(1)


def group(channels: int, rngs: Any) -> Any:
    return nnx.GroupNorm(channels, 2, rngs=rngs)


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def texts() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 20, (5, 6)).astype(np.int32)


CASES: dict[str, tuple[Callable[[Any], Any], Callable[[], np.ndarray]]] = {
    "cnn": (CNN, lambda: images(4, 16, 16, 1)),
    "resnet-group": (lambda rngs: Residual(group, rngs), lambda: images(4, 6, 6, 3)),
    "resnet-batch": (lambda rngs: Residual(nnx.BatchNorm, rngs), lambda: images(4, 6, 6, 3)),
    "lstm": (LSTM, texts),
    "transformer": (Transformer, texts),
}


def close(a: Any, b: Any) -> None:
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(b).max())))


def by_name(params: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves(params)
    return dict(zip(map(path_name, leaf_paths(params)), leaves, strict=True))


def written(model: Any, params: Any) -> Any:
    """The user's module with these weights."""
    return model.write_back(params)


def variables(module: Any, kind: Any) -> dict[str, Any]:
    flat = nnx.to_flat_state(nnx.state(module, kind))
    return {".".join(map(str, path)): v.get_value() for path, v in flat}


# PyTorch's networks of the same kinds are among the quick tests.
LARGE = ("transformer", "resnet-group", "lstm")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) if c in LARGE else c for c in CASES]
)
def test_it_computes_what_nnx_computes(case: str) -> None:
    """Outputs, gradients, the statistics that NNX keeps; and second derivatives under vmap."""
    build, inputs = CASES[case]
    module, x = build(nnx.Rngs(0)), inputs()
    model = from_nnx(module)
    params = model.init(Key(0))
    statistics = variables(module, nnx.BatchStat)
    assert set(by_name(params)) == set(statistics) | set(variables(module, nnx.Param))

    def loss(params: Any) -> Any:
        outputs = model.apply(params, x, Key(0))
        outputs, renewed = outputs if model.is_state else (outputs, params)
        return (outputs**2).mean(), renewed

    def product(params: Any) -> Any:
        return jax.jvp(lambda p: jax.grad(loss, has_aux=True)(p)[0], (params,), (params,))[1]

    grads, renewed = jax.jit(jax.grad(loss, has_aux=True))(params)
    module.eval()
    close(jax.jit(model.apply)(params, x), module(x))
    module.train()
    expected = nnx.grad(lambda module: (module(x) ** 2).mean())(module)
    for path, leaf in nnx.to_flat_state(expected):
        close(by_name(grads)[".".join(map(str, path))], leaf.get_value())
    for name, leaf in variables(module, nnx.BatchStat).items():
        assert model.is_state is not None
        assert model.is_state(tuple(name.split(".")))
        assert not np.allclose(leaf, statistics[name])
        close(by_name(renewed)[name], leaf)
    if case in ("resnet-group", "lstm"):
        clients = jax.tree.map(lambda p: jnp.stack([p, p]), params)
        found = jax.tree.leaves(jax.jit(jax.vmap(product))(clients))
        assert all(np.isfinite(leaf).all() for leaf in found)
        for a, b in zip(found, jax.tree.leaves(jax.jit(product)(params)), strict=True):
            np.testing.assert_allclose(a[1], b, rtol=1e-3, atol=1e-4 * float(jnp.abs(b).max()))


def test_weights_go_in_and_out() -> None:
    module, x = CNN(nnx.Rngs(0)), images(2, 16, 16, 1)
    before = variables(module, nnx.Param)
    model = from_nnx(module)
    params = jax.tree.map(lambda leaf: leaf + 0.1, model.init(Key(0)))
    back = written(model, params)
    assert type(back) is CNN
    close(back(x), model.apply(params, x))
    for name, leaf in variables(module, nnx.Param).items():
        np.testing.assert_array_equal(leaf, before[name])
        close(variables(back, nnx.Param)[name], leaf + 0.1)


def test_a_key_drives_dropout() -> None:
    model = from_nnx(Transformer(nnx.Rngs(0), 0.5))
    params, x = model.init(Key(0)), texts()
    out = jax.jit(lambda key: model.apply(params, x, key))
    a, again, b = out(Key(1)), out(Key(1)), out(Key(2))
    np.testing.assert_array_equal(a, again)
    assert not np.allclose(a, b)
    assert not np.allclose(a, jax.jit(model.apply)(params, x))
    keys = jax.random.split(Key(3), 2)
    for i, own in enumerate(jax.jit(jax.vmap(lambda k: model.apply(params, x, k)))(keys)):
        close(own, out(keys[i]))


def test_what_is_not_trained_is_frozen() -> None:
    class Adapted(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.fc = nnx.LoRALinear(4, 3, lora_rank=2, rngs=rngs)
            self.scale, self.calls = nnx.Variable(jnp.full(3, 2.0)), nnx.Variable(jnp.int32(0))

        def __call__(self, x: Any) -> Any:
            return self.scale.get_value() * self.fc(x)

    module = Adapted(nnx.Rngs(0))
    model, x = from_nnx(module, wrt=nnx.LoRAParam), images(5, 4)
    params = model.init(Key(0))
    assert set(by_name(params)) == {"fc.lora.lora_a", "fc.lora.lora_b"}
    assert set(by_name(model.frozen)) == {"fc.kernel", "fc.bias", "scale"}
    params = jax.tree.map(lambda leaf: leaf + 0.5, params)
    close(model.apply(params, x), written(model, params)(x))
    zero = jax.tree.map(jnp.zeros_like, model.frozen)
    close(model.apply(params, x, frozen=zero), np.zeros((5, 3)))
    assert "scale" in by_name(from_nnx(module).frozen)
    assert "fc.kernel" in by_name(from_nnx(module).init(Key(0)))


def test_what_is_refused() -> None:
    class Counts(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.norm, self.seen = nnx.BatchNorm(3, rngs=rngs), nnx.Variable(jnp.zeros(()))

        def __call__(self, x: Any) -> Any:
            self.seen[...] += 1
            return self.norm(x)

    model = from_nnx(Counts(nnx.Rngs(0)))
    with pytest.raises(FieldError, match=r"seen of Counts.*changes in training"):
        model.apply(model.init(Key(0)), jnp.ones((2, 3)), Key(0))
    with pytest.raises(FieldError, match=r"flax\.nnx\.Module"):
        from_nnx(3)


@pytest.mark.slow
def test_fedavg_learns_an_nnx_module() -> None:
    class Net(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.hidden, self.out = nnx.Linear(64, 32, rngs=rngs), nnx.Linear(32, 10, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.out(nnx.elu(self.hidden(x.reshape(x.shape[0], -1))))

    data, method = load("digits", clients=4), FedAvg(lr=0.2, tau=20, batch=32)
    result = simulate(data, from_nnx(Net(nnx.Rngs(0))), method, rounds=15, cohort=4)
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
    class Net(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.conv = nnx.Conv(1, 2, (3, 3), 2, rngs=rngs)
            self.drop, self.out = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(32, 10, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.out(self.drop(nnx.elu(self.conv(x)).reshape(x.shape[0], -1)))

    model = from_nnx(Net(nnx.Rngs(0)))
    result = simulate(load("digits", clients=4), model, METHODS[method], rounds=1, cohort=2)
    before, after = model.init(Key(0)), result.global_model
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    assert not np.allclose(before["out"]["kernel"], after["out"]["kernel"])
