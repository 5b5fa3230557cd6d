"""A long short-term memory for texts."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from perfed.core.errors import require_count
from perfed.core.trees import Params
from perfed.models.layers import embed, init_linear, linear, output_layer

State = tuple[Float[Array, "b hidden"], Float[Array, "b hidden"]]
States = Float[Array, "length b hidden"]


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

    head: ClassVar[str] = "out"

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

    def _read(self, layer: Any, x: Float[Array, "length b inputs"]) -> States:
        """The states of one layer after each symbol."""
        read = linear(layer["read"], x)
        if not self.remat:
            return _states(read, layer["recall"])

        def step(state: State, read: Array) -> tuple[State, Array]:
            state, _ = _step(state, read, layer["recall"].T)
            return state, state[0]

        states: Array = jax.lax.scan(jax.checkpoint(step), _nothing(read), read)[1]
        return states


class _Slopes(NamedTuple):
    """What a step's derivative is made of: how the state depends on the gates and the cell."""

    gates: Float[Array, "b 4*hidden"]
    keep: Float[Array, "b hidden"]
    cell: Float[Array, "b hidden"]


def _step(
    state: State, read: Float[Array, "b 4*hidden"], recall: Float[Array, "hidden 4*hidden"]
) -> tuple[State, _Slopes]:
    """The state after one more symbol."""
    hidden, cell = state
    enter, keep, new, leave = jnp.split(read + hidden @ recall, 4, axis=-1)
    enter, keep, leave = (jax.nn.sigmoid(gate) for gate in (enter, keep, leave))
    new = jnp.tanh(new)
    after = keep * cell + enter * new
    shown = jnp.tanh(after)
    slopes = [
        new * enter * (1 - enter),
        cell * keep * (1 - keep),
        enter * (1 - new**2),
        shown * leave * (1 - leave),
    ]
    of_gates = jnp.concatenate(slopes, axis=-1)
    return (leave * shown, after), _Slopes(of_gates, keep, leave * (1 - shown**2))


def _nothing(read: Float[Array, "length b 4*hidden"]) -> State:
    zeros = jnp.zeros((read.shape[1], read.shape[2] // 4), read.dtype)
    return zeros, zeros


@jax.custom_jvp
def _states(
    read: Float[Array, "length b 4*hidden"], recall: Float[Array, "4*hidden hidden"]
) -> States:
    """The states after each symbol, for what the gates read of it.

    Its derivative is the usual one in another order. JAX would add up the gradient of `recall` step
    by step, in small products; here it is one large product of all steps, and a step back is one
    small product and six multiplications. A round takes two thirds of the time.
    """
    transposed = recall.T

    def step(state: State, read: Array) -> tuple[State, Array]:
        state, _ = _step(state, read, transposed)
        return state, state[0]

    states: Array = jax.lax.scan(step, _nothing(read), read)[1]
    return states


@_states.defjvp
def _derivative(
    at: tuple[Array, Array], along: tuple[Array, Array]
) -> tuple[States, Float[Array, "length b hidden"]]:
    (read, recall), (along_read, along_recall) = at, along
    nothing, transposed = _nothing(read), recall.T

    def step(state: State, read: Array) -> tuple[State, tuple[Array, _Slopes]]:
        state, slopes = _step(state, read, transposed)
        return state, (state[0], slopes)

    states, slopes = jax.lax.scan(step, nothing, read)[1]
    before = jnp.concatenate([jnp.zeros_like(states[:1]), states[:-1]])
    driven = along_read + jnp.einsum("tbh,gh->tbg", before, along_recall)

    def follow(along: State, now: tuple[Array, _Slopes]) -> tuple[State, Array]:
        (hidden, cell), (driven, slopes) = along, now
        gates = slopes.gates * (driven + hidden @ recall.T)
        enter, keep, new, leave = jnp.split(gates, 4, axis=-1)
        cell = slopes.keep * cell + enter + keep + new
        hidden = slopes.cell * cell + leave
        return (hidden, cell), hidden

    return states, jax.lax.scan(follow, nothing, (driven, slopes))[1]


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
