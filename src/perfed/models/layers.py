"""Layers that the built-in models share."""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from perfed.core.errors import require


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
    # is then a product whose inner axis is long, which the CPU does nearly twice as fast. They are
    # not transposed first: the compiler would copy them in every step.
    product = lax.dot_general(x, layer["w"], (((x.ndim - 1,), (1,)), ((), ())))
    outputs: Array = product + layer["b"]
    return outputs


def output_layer(layer: Any, x: Float[Array, "b inputs"]) -> Float[Array, "b outputs"]:
    """The layer that gives the logits."""
    # The same, computed as the loss reads it, classes first: nothing is transposed in between, and
    # a round of logistic regressions takes a third less.
    outputs: Array = (layer["w"] @ x.T + layer["b"][:, None]).T
    return outputs


def embed(table: Float[Array, "width symbols"], x: Int[Array, "..."]) -> Float[Array, "... width"]:
    """The column of each symbol."""
    # Symbols as one-hot rows: a product, whose derivative is no scatter (slow in a vmap).
    chosen = jax.nn.one_hot(x, table.shape[1], dtype=table.dtype)
    return chosen @ table.T


def flatten(x: Shaped[Array, "b ..."]) -> Shaped[Array, "b features"]:
    """Each example as one vector."""
    return x.reshape(x.shape[0], prod(x.shape[1:]))


def convolve(
    w: Float[Array, "outputs features"],
    x: Float[Array, "b height width depth"],
    size: int,
    stride: int = 1,
    padding: int = 0,
) -> Float[Array, "b rows columns outputs"]:
    """A convolution of `size` x `size`, with zeros around."""
    kernel = w.reshape(-1, size, size, x.shape[-1])
    edges = [(padding, padding)] * 2
    numbers = ("NHWC", "OHWI", "NHWC")
    found: Array = lax.conv_general_dilated(
        x, kernel, (stride, stride), edges, dimension_numbers=numbers
    )
    return found


def max_pool(x: Float[Array, "b height width depth"]) -> Float[Array, "b rows columns depth"]:
    """The largest of every 2x2 pixels; an odd last row or column is left out."""
    window = (1, 2, 2, 1)
    found: Array = lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")
    return found


def convolution_block(
    layer: Any, x: Float[Array, "b height width depth"], size: int, padding: int = 0
) -> Float[Array, "b rows columns outputs"]:
    """A convolution, max pooling, a bias and ReLU."""
    # ReLU before pooling gives the same, of four times as many numbers.
    return jax.nn.relu(max_pool(convolve(layer["w"], x, size, padding=padding)) + layer["b"])


def require_pixels(image: tuple[int, int, int], least: int) -> None:
    """Raise unless images are at least so high and wide."""
    height, width, _ = image
    allowed = (
        f"has {height}x{width} pixels, and this network's convolutions and pooling need "
        f'{least}x{least} or more; use "cnn", whose channels fit smaller ones'
    )
    require(min(height, width) >= least, "image", image, allowed)


def init_norm(channels: int) -> dict[str, Array]:
    """A normalization that begins without a scale and a shift of its own."""
    return {"scale": jnp.ones(channels), "shift": jnp.zeros(channels)}


def layer_norm(layer: Any, x: Float[Array, "... channels"]) -> Float[Array, "... channels"]:
    """Each vector with mean 0 and variance 1, then scaled and shifted."""
    normal: Array = _normal(x, (-1,)) * layer["scale"] + layer["shift"]
    return normal


def group_norm(
    layer: Any, x: Float[Array, "b height width channels"], groups: int
) -> Float[Array, "b height width channels"]:
    """Each group of an image's channels with mean 0 and variance 1; channels scaled and shifted."""
    b, height, width, channels = x.shape
    grouped = x.reshape(b, height * width, groups, channels // groups)
    normal = _normal(grouped, (1, 3)).reshape(x.shape)
    scaled: Array = normal * layer["scale"] + layer["shift"]
    return scaled


def _normal(x: Array, axes: tuple[int, ...]) -> Array:
    centered = x - x.mean(axes, keepdims=True)
    variance = (centered**2).mean(axes, keepdims=True)
    return centered * lax.rsqrt(variance + 1e-5)


def checkpoint_if(remat: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of a model of which only what goes in is kept for its gradient, if that is wanted."""
    return jax.checkpoint(function) if remat else function
