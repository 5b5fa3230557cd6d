"""LeNet-5, as papers on federated learning have it."""

from dataclasses import dataclass
from typing import ClassVar, final

import jax
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from perfed.core.trees import Params
from perfed.models.layers import (
    convolution_block,
    flatten,
    init_linear,
    linear,
    output_layer,
    require_pixels,
)


@final
@dataclass(frozen=True)
class LeNet:
    """5x5 convolutions to 6 and to 16 channels, then dense layers of 120 and 84.

    As in most code today: ReLU for the sigmoids of 1998, 2x2 max pooling for its trained averages.

    Args:
        image: height, width and depth of an input.
        classes: how many outputs.
    """

    head: ClassVar[str] = "out"

    image: tuple[int, int, int]
    classes: int

    def __post_init__(self) -> None:
        require_pixels(self.image, 16)

    def init(self, key: PRNGKeyArray) -> Params:
        """Fresh parameters."""
        height, width, depth = self.image
        keys = jax.random.split(key, 5)
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        return {
            "conv1": init_linear(keys[0], 25 * depth, 6),
            "conv2": init_linear(keys[1], 25 * 6, 16),
            "dense1": init_linear(keys[2], rows * columns * 16, 120),
            "dense2": init_linear(keys[3], 120, 84),
            "out": init_linear(keys[4], 84, self.classes),
        }

    def apply(
        self, params: Params, x: Shaped[Array, "b height width depth"]
    ) -> Float[Array, "b classes"]:
        """The logits."""
        x = x.astype(params["out"]["b"].dtype)
        for name in ("conv1", "conv2"):
            x = convolution_block(params[name], x, 5)
        x = flatten(x)
        for name in ("dense1", "dense2"):
            x = jax.nn.relu(linear(params[name], x))
        return output_layer(params["out"], x)
