"""Models: linear, MLP, a small CNN and a GRU for texts; adapters for Flax and Equinox.

A model is anything with `init(key) -> params` and `apply(params, x) -> outputs`. Weights start
uniform in +-1/sqrt(fan-in), which the papers' published code inherits from its library.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, final, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from perfed.core.errors import require, require_choice
from perfed.core.objective import Model
from perfed.core.trees import Params

Activation = Literal["elu", "relu", "tanh", "gelu"]


@final
@dataclass(frozen=True)
class MLR:
    """One linear layer: multinomial logistic regression, or linear regression with one output."""

    inputs: int
    classes: int

    def init(self, key: PRNGKeyArray) -> Params:
        """Fresh parameters."""
        return _layer(key, self.inputs, self.classes)

    def apply(self, params: Params, x: Shaped[Array, "b ..."]) -> Float[Array, "b classes"]:
        """The logits."""
        return _last(params, _flat(x))


@final
@dataclass(frozen=True)
class MLP:
    """Hidden layers of chosen sizes with one activation, then logits.

    Args:
        inputs: how many inputs.
        classes: how many outputs.
        hidden: the sizes of the hidden layers.
        activation: what they end with.
        remat: compute a layer's inside again for its gradient, instead of keeping it: less memory.
    """

    inputs: int
    classes: int
    hidden: tuple[int, ...] = (80, 60)
    activation: Activation = "elu"
    remat: bool = False

    def __post_init__(self) -> None:
        require(all(h >= 1 for h in self.hidden), "hidden", self.hidden, "sizes must be at least 1")
        require_choice("activation", self.activation, get_args(Activation))

    def init(self, key: PRNGKeyArray) -> Params:
        """Fresh parameters."""
        sizes = (self.inputs, *self.hidden, self.classes)
        keys = jax.random.split(key, len(sizes) - 1)
        return [_layer(k, a, b) for k, a, b in zip(keys, sizes[:-1], sizes[1:], strict=True)]

    def apply(self, params: Params, x: Shaped[Array, "b ..."]) -> Float[Array, "b classes"]:
        """The logits."""
        activation = getattr(jax.nn, self.activation)
        hidden = _again(self.remat, lambda layer, x: activation(_linear(layer, x)))
        x = _flat(x)
        for layer in params[:-1]:
            x = hidden(layer, x)
        return _last(params[-1], x)


@final
@dataclass(frozen=True)
class CNN:
    """For images: 3x3 convolution, ReLU and 2x2 max pooling per entry of `channels`; then dense.

    Args:
        image: height, width and depth of an input.
        classes: how many outputs.
        channels: the convolutions' outputs.
        hidden: the size of the dense layer.
    """

    image: tuple[int, int, int]
    classes: int
    channels: tuple[int, ...] = (16, 32)
    hidden: int = 64

    def __post_init__(self) -> None:
        height, width, _ = self.image
        fits = min(height, width) >> len(self.channels) >= 1
        allowed = f"every entry halves the image, and {height}x{width} allows fewer"
        require(fits, "channels", self.channels, allowed)
        sizes = (*self.channels, self.hidden)
        require(min(sizes) >= 1, "channels, hidden", sizes, "must be at least 1")

    def init(self, key: PRNGKeyArray) -> Params:
        """Fresh parameters."""
        height, width, depth = self.image
        *conv_keys, dense_key, out_key = jax.random.split(key, len(self.channels) + 2)
        depths = (depth, *self.channels)
        convolutions = [
            _layer(k, 9 * a, b) for k, a, b in zip(conv_keys, depths[:-1], depths[1:], strict=True)
        ]
        shrink = len(self.channels)
        features = (height >> shrink) * (width >> shrink) * depths[-1]
        return {
            "convolutions": convolutions,
            "dense": _layer(dense_key, features, self.hidden),
            "out": _layer(out_key, self.hidden, self.classes),
        }

    def apply(
        self, params: Params, x: Shaped[Array, "b height width depth"]
    ) -> Float[Array, "b classes"]:
        """The logits."""
        x = x.astype(params["out"]["b"].dtype)
        for layer in params["convolutions"]:
            x = _max_pool(jax.nn.relu(_linear(layer, _patches(x))))
        return _last(params["out"], jax.nn.relu(_linear(params["dense"], _flat(x))))


@final
@dataclass(frozen=True)
class GRU:
    """For texts: symbols are embedded and read by a gated recurrent unit; its end gives the logits.

    Args:
        symbols: how many symbols there are.
        classes: how many outputs.
        embedding: the dimension symbols are embedded in.
        hidden: the size of the unit's state.
        remat: compute a step's inside again for its gradient, instead of keeping it: less memory.
    """

    symbols: int
    classes: int
    embedding: int = 8
    hidden: int = 64
    remat: bool = False

    def __post_init__(self) -> None:
        sizes = (self.embedding, self.hidden)
        require(min(sizes) >= 1, "embedding, hidden", sizes, "must be at least 1")

    def init(self, key: PRNGKeyArray) -> Params:
        """Fresh parameters."""
        embed, read, recall, out = jax.random.split(key, 4)
        return {
            "embedding": jax.random.normal(embed, (self.embedding, self.symbols)),
            "read": _layer(read, self.embedding, 3 * self.hidden),
            "recall": _layer(recall, self.hidden, 3 * self.hidden),
            "out": _layer(out, self.hidden, self.classes),
        }

    def apply(self, params: Params, x: Int[Array, "b length"]) -> Float[Array, "b classes"]:
        """The logits of what comes after the text."""
        # Symbols as one-hot rows: a product, whose derivative is no scatter (slow in a vmap).
        symbols = jax.nn.one_hot(x.T, self.symbols, dtype=params["embedding"].dtype)
        read = _linear(params["read"], symbols @ params["embedding"].T)

        def step(state: Array, read: Array) -> tuple[Array, None]:
            recalled = _linear(params["recall"], state)
            reset, update, new = jnp.split(read, 3, axis=-1)
            reset_s, update_s, new_s = jnp.split(recalled, 3, axis=-1)
            gate = jax.nn.sigmoid(update + update_s)
            candidate = jnp.tanh(new + jax.nn.sigmoid(reset + reset_s) * new_s)
            return gate * state + (1 - gate) * candidate, None

        first = jnp.zeros((x.shape[0], self.hidden), read.dtype)
        state, _ = jax.lax.scan(_again(self.remat, step), first, read)
        return _last(params["out"], state)


@final
@dataclass(frozen=True)
class FunctionModel:
    """A model made of two functions; what the adapters below return."""

    init: Callable[[PRNGKeyArray], Params]
    apply: Callable[[Params, Any], Any]


MODELS: dict[str, type[MLR] | type[MLP] | type[CNN] | type[GRU]] = {
    "mlr": MLR,
    "linear": MLR,
    "mlp": MLP,
    "cnn": CNN,
    "gru": GRU,
}


def from_flax(module: Any, example: Shaped[Array, "b ..."]) -> Model:
    """A Flax (linen) module as a model; `example` is an input batch, for its shapes only."""

    def init(key: PRNGKeyArray) -> Params:
        variables = module.init(key, example)
        extra = sorted(set(variables) - {"params"})
        if extra:
            raise ValueError(
                f"{type(module).__name__} keeps state outside its parameters ({', '.join(extra)}), "
                "as batch normalization does; clients exchange parameters only. Use layer or group "
                "normalization instead"
            )
        return variables["params"]

    return FunctionModel(init, lambda params, x: module.apply({"params": params}, x))


def from_equinox(build: Callable[[PRNGKeyArray], Any]) -> Model:
    """An Equinox module as a model; `build(key)` makes one that takes a single example."""
    import equinox

    def split(key: PRNGKeyArray) -> tuple[Any, Any]:
        parts: tuple[Any, Any] = equinox.partition(build(key), equinox.is_inexact_array)
        return parts

    _, structure = split(jax.random.key(0))

    def apply(params: Params, x: Shaped[Array, "b ..."]) -> Float[Array, "b ..."]:
        outputs: Array = jax.vmap(equinox.combine(params, structure))(x)
        return outputs

    return FunctionModel(lambda key: split(key)[0], apply)


def _again(remat: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of a model of which only what goes in is kept for its gradient, if that is wanted."""
    return jax.checkpoint(function) if remat else function


def _layer(key: PRNGKeyArray, inputs: int, outputs: int) -> dict[str, Array]:
    bound = inputs**-0.5
    weight_key, bias_key = jax.random.split(key)
    return {
        "w": jax.random.uniform(weight_key, (outputs, inputs), minval=-bound, maxval=bound),
        "b": jax.random.uniform(bias_key, (outputs,), minval=-bound, maxval=bound),
    }


def _linear(layer: Any, x: Float[Array, "... inputs"]) -> Float[Array, "... outputs"]:
    # Weights are kept as (outputs, inputs): vectorized over clients, the gradient of a narrow layer
    # is then a product whose inner axis is long, which the CPU does nearly twice as fast.
    outputs: Array = x @ layer["w"].T + layer["b"]
    return outputs


def _last(layer: Any, x: Float[Array, "b inputs"]) -> Float[Array, "b outputs"]:
    # The same, computed as the loss reads it, classes first: nothing is transposed in between, and
    # a round of logistic regressions takes a third less.
    outputs: Array = (layer["w"] @ x.T + layer["b"][:, None]).T
    return outputs


def _flat(x: Shaped[Array, "b ..."]) -> Shaped[Array, "b features"]:
    return x.reshape(x.shape[0], prod(x.shape[1:]))


def _patches(x: Float[Array, "b height width depth"]) -> Float[Array, "b height width 9*depth"]:
    """Each pixel's 3x3 neighborhood, zero outside.

    A convolution is then a matrix product, which stays one when clients with their own kernels are
    vectorized; a grouped convolution, its alternative, is far slower on the CPU.
    """
    height, width = x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return jnp.concatenate(
        [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)], axis=-1
    )


def _max_pool(x: Float[Array, "b height width depth"]) -> Float[Array, "b height/2 width/2 depth"]:
    b, height, width, depth = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    return x.reshape(b, height // 2, 2, width // 2, 2, depth).max(axis=(2, 4))
