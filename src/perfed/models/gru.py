"""A gated recurrent unit for texts."""

from dataclasses import dataclass
from typing import ClassVar, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from perfed.core.errors import require
from perfed.core.trees import Params
from perfed.models.layers import checkpoint_if, embed, init_linear, linear, output_layer


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

    head: ClassVar[str] = "out"

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
        embedding, read, recall, out = jax.random.split(key, 4)
        return {
            "embedding": jax.random.normal(embedding, (self.embedding, self.symbols)),
            "read": init_linear(read, self.embedding, 3 * self.hidden),
            "recall": init_linear(recall, self.hidden, 3 * self.hidden),
            "out": init_linear(out, self.hidden, self.classes),
        }

    def apply(self, params: Params, x: Int[Array, "b length"]) -> Float[Array, "b classes"]:
        """The logits of what comes after the text."""
        read = linear(params["read"], embed(params["embedding"], x.T))

        def step(state: Array, read: Array) -> tuple[Array, None]:
            recalled = linear(params["recall"], state)
            reset, update, new = jnp.split(read, 3, axis=-1)
            reset_s, update_s, new_s = jnp.split(recalled, 3, axis=-1)
            gate = jax.nn.sigmoid(update + update_s)
            candidate = jnp.tanh(new + jax.nn.sigmoid(reset + reset_s) * new_s)
            return gate * state + (1 - gate) * candidate, None

        first = jnp.zeros((x.shape[0], self.hidden), read.dtype)
        state, _ = jax.lax.scan(checkpoint_if(self.remat, step), first, read)
        return output_layer(params["out"], state)
