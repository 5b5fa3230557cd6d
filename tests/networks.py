"""Models with dropout, running statistics and frozen leaves, in a few lines each."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Normalized:
    """Batch normalization after the first layer, then dropout."""

    inputs: int = 64
    classes: int = 10
    hidden: int = 8
    dropout: float = 0.0
    momentum: float = 0.9

    def init(self, key: Any) -> Any:
        first, second = jax.random.split(key)
        ones, zeros = jnp.ones(self.hidden), jnp.zeros(self.hidden)
        return {
            "fc": {"w": 0.2 * jax.random.normal(first, (self.inputs, self.hidden))},
            "norm": {"scale": ones, "bias": zeros, "mean": zeros, "var": ones},
            "out": {"w": 0.2 * jax.random.normal(second, (self.hidden, self.classes))},
        }

    def is_state(self, path: Any) -> bool:
        return path[-1] in ("mean", "var")

    def apply(self, params: Any, x: Any, key: Any = None) -> Any:
        h, norm = flat(x) @ params["fc"]["w"], params["norm"]
        mean, var = (norm["mean"], norm["var"]) if key is None else (h.mean(0), h.var(0))
        h = norm["scale"] * (h - mean) / jnp.sqrt(var + 1e-5) + norm["bias"]
        outputs = drop(key, self.dropout, jax.nn.tanh(h)) @ params["out"]["w"]
        if key is None:
            return outputs

        def renewed(old: Any, new: Any) -> Any:
            return self.momentum * old + (1 - self.momentum) * new

        state = {"mean": renewed(norm["mean"], mean), "var": renewed(norm["var"], var)}
        return outputs, params | {"norm": norm | state}


@dataclass(frozen=True)
class Dropped:
    """One hidden layer with dropout, and nothing to keep."""

    inputs: int = 64
    classes: int = 10
    hidden: int = 16
    dropout: float = 0.5

    def init(self, key: Any) -> Any:
        first, second = jax.random.split(key)
        return {
            "fc": 0.2 * jax.random.normal(first, (self.inputs, self.hidden)),
            "out": 0.2 * jax.random.normal(second, (self.hidden, self.classes)),
        }

    def apply(self, params: Any, x: Any, key: Any = None) -> Any:
        return drop(key, self.dropout, jnp.tanh(flat(x) @ params["fc"])) @ params["out"]


@dataclass(frozen=True, eq=False)
class Adapted:
    """A frozen layer, and a head that is trained."""

    frozen: Any
    classes: int = 10

    def init(self, key: Any) -> Any:
        return {"head": jnp.zeros((self.frozen["w"].shape[1], self.classes))}

    def apply(self, params: Any, x: Any, frozen: Any = None) -> Any:
        return jnp.tanh(flat(x) @ frozen["w"]) @ params["head"]


def base(inputs: int = 64, hidden: int = 32) -> Any:
    """What `Adapted` keeps as it is."""
    rng = np.random.default_rng(0)
    return {"w": (rng.normal(size=(inputs, hidden)) / 8).astype(np.float32)}


def drop(key: Any, rate: float, h: Any) -> Any:
    """Dropout; without a key, nothing."""
    if key is None or rate == 0:
        return h
    return jnp.where(jax.random.bernoulli(key, 1 - rate, h.shape), h / (1 - rate), 0.0)


def flat(x: Any) -> Any:
    """Each example as a vector."""
    return x.reshape(len(x), -1)


@dataclass(frozen=True)
class Switched:
    """A convolution within a condition, where it stays as it is."""

    classes: int = 10

    def init(self, key: Any) -> Any:
        first, second = jax.random.split(key)
        return {
            "kernel": 0.2 * jax.random.normal(first, (3, 3, 1, 4)),
            "out": 0.2 * jax.random.normal(second, (4, self.classes)),
        }

    def apply(self, params: Any, x: Any) -> Any:
        def convolved(x: Any) -> Any:
            numbers = ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated(
                x, params["kernel"], (1, 1), "SAME", dimension_numbers=numbers
            )

        x = x.reshape(len(x), 8, 8, 1)
        h = jax.lax.cond(x.sum() > -1e9, convolved, lambda x: jnp.repeat(x, 4, -1), x)
        return jax.nn.relu(h).mean((1, 2)) @ params["out"]


def normalized(example_shape: Any, classes: int, dropout: float = 0.3) -> Normalized:
    """A factory for `[model] factory = "networks:normalized"`."""
    return Normalized(int(np.prod(example_shape)), classes, dropout=dropout)


def adapted(example_shape: Any, classes: int) -> Adapted:
    """A factory of a model with a frozen part."""
    return Adapted(base(int(np.prod(example_shape))), classes)


def switched(classes: int) -> Switched:
    """A factory of a model that perfed cannot rewrite."""
    return Switched(classes)


def torch_cnn(classes: int) -> Any:
    """A PyTorch module for 8x8 images, with batch normalization and dropout."""
    from torch import nn

    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(4 * 16, classes),
    )
