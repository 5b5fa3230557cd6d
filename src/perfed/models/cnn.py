"""A small convolutional network for images."""

from dataclasses import dataclass
from typing import ClassVar, final

import jax
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from perfed.core.errors import require
from perfed.core.trees import Params
from perfed.models.layers import (
    convolution_block,
    flatten,
    init_linear,
    linear,
    output_layer,
)


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

    head: ClassVar[str] = "out"

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
            init_linear(k, 9 * a, b)
            for k, a, b in zip(conv_keys, depths[:-1], depths[1:], strict=True)
        ]
        shrink = len(self.channels)
        features = (height >> shrink) * (width >> shrink) * depths[-1]
        return {
            "convolutions": convolutions,
            "dense": init_linear(dense_key, features, self.hidden),
            "out": init_linear(out_key, self.hidden, self.classes),
        }

    def apply(
        self, params: Params, x: Shaped[Array, "b height width depth"]
    ) -> Float[Array, "b classes"]:
        """The logits."""
        x = x.astype(params["out"]["b"].dtype)
        for layer in params["convolutions"]:
            x = convolution_block(layer, x, 3, padding=1)
        return output_layer(params["out"], jax.nn.relu(linear(params["dense"], flatten(x))))
