"""A small transformer for texts."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from perfed.core.errors import require, require_count
from perfed.core.trees import Params
from perfed.models.layers import (
    checkpoint_if,
    embed,
    init_linear,
    init_norm,
    layer_norm,
    linear,
    output_layer,
)


@final
@dataclass(frozen=True)
class Transformer:
    """For texts: a decoder that sees no symbol after its own; its last place gives the logits.

    Symbols and places are embedded; in each layer attention and then a perceptron of four times the
    width, with GELU, add to what comes in, which is normalized before each and at the end.

    Args:
        inputs: how many symbols a text has.
        symbols: how many symbols there are.
        classes: how many outputs.
        width: the dimension of the embeddings.
        layers: how many layers there are.
        heads: how many heads attention has, which share the width.
        remat: compute a layer's inside again for its gradient, instead of keeping it: less memory.
    """

    head: ClassVar[str] = "out"

    inputs: int
    symbols: int
    classes: int
    width: int = 64
    layers: int = 2
    heads: int = 4
    remat: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads"):
            require_count(name, getattr(self, name))
        fits = self.width % self.heads == 0
        require(fits, "heads", self.heads, f"must divide the width, {self.width}")

    def init(self, key: PRNGKeyArray) -> Params:
        """Fresh parameters."""
        symbols, places, out, *keys = jax.random.split(key, 3 + self.layers)
        return {
            # As large as what the layers add.
            "symbols": 0.1 * jax.random.normal(symbols, (self.width, self.symbols)),
            "places": 0.1 * jax.random.normal(places, (self.inputs, self.width)),
            "layers": [_init_layer(own, self.width) for own in keys],
            "norm": init_norm(self.width),
            "out": init_linear(out, self.width, self.classes),
        }

    def apply(self, params: Params, x: Int[Array, "b length"]) -> Float[Array, "b classes"]:
        """The logits of what comes after the text."""
        states = embed(params["symbols"], x) + params["places"]
        layer = checkpoint_if(self.remat, self._layer)
        for own in params["layers"][:-1]:
            states = layer(own, states, states)
        # Nothing of the last layer is read but its last place.
        last = layer(params["layers"][-1], states[:, -1:], states)
        return output_layer(params["out"], layer_norm(params["norm"], last[:, 0]))

    def _layer(
        self, layer: Any, x: Float[Array, "b last width"], seen: Float[Array, "b length width"]
    ) -> Float[Array, "b last width"]:
        """One layer, for the last places of a text."""
        x = x + self._attend(layer, layer_norm(layer["norm1"], x), layer_norm(layer["norm1"], seen))
        inside = jax.nn.gelu(linear(layer["widen"], layer_norm(layer["norm2"], x)))
        return x + linear(layer["narrow"], inside)

    def _attend(self, layer: Any, x: Array, seen: Array) -> Array:
        def of_heads(name: str, x: Array) -> Array:
            return linear(layer[name], x).reshape(*x.shape[:2], self.heads, -1)

        queries, keys = of_heads("query", x), of_heads("key", seen)
        scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) * queries.shape[-1] ** -0.5
        rows, columns = scores.shape[-2:]
        past = jnp.tri(rows, columns, columns - rows, dtype=bool)
        weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, of_heads("value", seen))
        return linear(layer["mix"], mixed.reshape(x.shape))


def _init_layer(key: PRNGKeyArray, width: int) -> dict[str, Any]:
    sizes = dict.fromkeys(("query", "key", "value", "mix"), (width, width))
    sizes |= {"widen": (width, 4 * width), "narrow": (4 * width, width)}
    keys = jax.random.split(key, len(sizes))
    layers: dict[str, Any] = {
        name: init_linear(own, *size) for own, (name, size) in zip(keys, sizes.items(), strict=True)
    }
    return layers | {"norm1": init_norm(width), "norm2": init_norm(width)}
