"""A long short-term memory for texts."""

from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from perfed.core.errors import require_count
from perfed.core.trees import Params
from perfed.models.layers import checkpoint_if, embed, init_linear, linear, output_layer


@final
@dataclass(frozen=True)
class LSTM:
    """For texts: symbols are embedded and read by LSTM layers; the last state gives the logits.

    LEAF's network for Shakespeare has `hidden = 256` and `layers = 2`.

    Args:
        symbols: how many symbols there are.
        classes: how many outputs.
        embedding: the dimension symbols are embedded in.
        hidden: the size of a layer's state.
        layers: how many layers there are.
        remat: compute a step's inside again for its gradient, instead of keeping it: less memory.
    """

    symbols: int
    classes: int
    embedding: int = 8
    hidden: int = 64
    layers: int = 1
    remat: bool = False

    def __post_init__(self) -> None:
        for name in ("embedding", "hidden", "layers"):
            require_count(name, getattr(self, name))

    def init(self, key: PRNGKeyArray) -> Params:
        """Fresh parameters."""
        embedding, out, *keys = jax.random.split(key, 2 + self.layers)
        sizes = (self.embedding, *[self.hidden] * (self.layers - 1))
        return {
            "embedding": jax.random.normal(embedding, (self.embedding, self.symbols)),
            "layers": [
                _init_layer(own, size, self.hidden) for own, size in zip(keys, sizes, strict=True)
            ],
            "out": init_linear(out, self.hidden, self.classes),
        }

    def apply(self, params: Params, x: Int[Array, "b length"]) -> Float[Array, "b classes"]:
        """The logits of what comes after the text."""
        states = embed(params["embedding"], x.T)
        for layer in params["layers"]:
            states = self._read(layer, states)
        return output_layer(params["out"], states[-1])

    def _read(
        self, layer: Any, x: Float[Array, "length b inputs"]
    ) -> Float[Array, "length b hidden"]:
        """The states of one layer after each symbol."""

        def step(state: tuple[Array, Array], read: Array) -> tuple[tuple[Array, Array], Array]:
            hidden, cell = state
            gates = read + hidden @ layer["recall"].T
            enter, keep, new, leave = jnp.split(gates, 4, axis=-1)
            cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(enter) * jnp.tanh(new)
            hidden = jax.nn.sigmoid(leave) * jnp.tanh(cell)
            return (hidden, cell), hidden

        nothing = jnp.zeros((x.shape[1], self.hidden), x.dtype)
        read = linear(layer["read"], x)
        first = (nothing, nothing)
        states: Array = jax.lax.scan(checkpoint_if(self.remat, step), first, read)[1]
        return states


def _init_layer(key: PRNGKeyArray, inputs: int, hidden: int) -> dict[str, Any]:
    read, recall = jax.random.split(key)
    # Its bounds are those of the state's size, for both, which the published code inherits.
    bound = hidden**-0.5
    return {
        "read": {
            "w": jax.random.uniform(read, (4 * hidden, inputs), minval=-bound, maxval=bound),
            "b": jnp.zeros(4 * hidden),
        },
        "recall": jax.random.uniform(recall, (4 * hidden, hidden), minval=-bound, maxval=bound),
    }
