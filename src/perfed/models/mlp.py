"""Linear models and multilayer perceptrons."""

from dataclasses import dataclass
from typing import ClassVar, Literal, final, get_args

import jax
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from perfed.core.errors import require, require_choice
from perfed.core.trees import Params
from perfed.models.layers import checkpoint_if, flatten, init_linear, linear, output_layer

Activation = Literal["elu", "relu", "tanh", "gelu"]


@final
@dataclass(frozen=True)
class MLR:
    """One linear layer: multinomial logistic regression, or linear regression with one output."""

    head: ClassVar[str] = "*"  # all of it

    inputs: int
    classes: int

    def init(self, key: PRNGKeyArray) -> Params:
        """Fresh parameters."""
        return init_linear(key, self.inputs, self.classes)

    def apply(self, params: Params, x: Shaped[Array, "b ..."]) -> Float[Array, "b classes"]:
        """The logits."""
        return output_layer(params, flatten(x))


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

    @property
    def head(self) -> str:
        """The last layer's name."""
        return str(len(self.hidden))

    def init(self, key: PRNGKeyArray) -> Params:
        """Fresh parameters."""
        sizes = (self.inputs, *self.hidden, self.classes)
        keys = jax.random.split(key, len(sizes) - 1)
        return [init_linear(k, a, b) for k, a, b in zip(keys, sizes[:-1], sizes[1:], strict=True)]

    def apply(self, params: Params, x: Shaped[Array, "b ..."]) -> Float[Array, "b classes"]:
        """The logits."""
        activation = getattr(jax.nn, self.activation)
        hidden = checkpoint_if(self.remat, lambda layer, x: activation(linear(layer, x)))
        x = flatten(x)
        for layer in params[:-1]:
            x = hidden(layer, x)
        return output_layer(params[-1], x)
