"""Layers that the built-in models share."""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
from jaxtyping import Array, Float, PRNGKeyArray, Shaped


def init_linear(key: PRNGKeyArray, inputs: int, outputs: int) -> dict[str, Array]:
    """Uniform in +-1/sqrt(fan-in), which the papers' published code inherits from its library."""
    bound = inputs**-0.5
    weight_key, bias_key = jax.random.split(key)
    return {
        "w": jax.random.uniform(weight_key, (outputs, inputs), minval=-bound, maxval=bound),
        "b": jax.random.uniform(bias_key, (outputs,), minval=-bound, maxval=bound),
    }


def linear(layer: Any, x: Float[Array, "... inputs"]) -> Float[Array, "... outputs"]:
    """X W^T + b."""
    # Weights are kept as (outputs, inputs): vectorized over clients, the gradient of a narrow layer
    # is then a product whose inner axis is long, which the CPU does nearly twice as fast.
    outputs: Array = x @ layer["w"].T + layer["b"]
    return outputs


def output_layer(layer: Any, x: Float[Array, "b inputs"]) -> Float[Array, "b outputs"]:
    """The layer that gives the logits."""
    # The same, computed as the loss reads it, classes first: nothing is transposed in between, and
    # a round of logistic regressions takes a third less.
    outputs: Array = (layer["w"] @ x.T + layer["b"][:, None]).T
    return outputs


def flatten(x: Shaped[Array, "b ..."]) -> Shaped[Array, "b features"]:
    """Each example as one vector."""
    return x.reshape(x.shape[0], prod(x.shape[1:]))


def checkpoint_if(remat: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of a model of which only what goes in is kept for its gradient, if that is wanted."""
    return jax.checkpoint(function) if remat else function
