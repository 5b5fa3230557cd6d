"""The convolutional network of PFLlib, which many papers on personalized learning use."""

from dataclasses import dataclass
from typing import ClassVar, final

import jax
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from perfed.core.errors import require_count
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
class PFLlibCNN:
    """PFLlib's FedAvgCNN, the network of the FedAvg paper without padding.

    5x5 convolutions to 32 and to 64 channels, each with ReLU and 2x2 max pooling; then a dense
    layer with ReLU.

    Args:
        image: height, width and depth of an input.
        classes: how many outputs.
        hidden: the size of the dense layer.
    """

    head: ClassVar[str] = "out"

    image: tuple[int, int, int]
    classes: int
    hidden: int = 512

    def __post_init__(self) -> None:
        require_pixels(self.image, 16)
        require_count("hidden", self.hidden)

    def init(self, key: PRNGKeyArray) -> Params:
        """Fresh parameters."""
        height, width, depth = self.image
        first, second, dense, out = jax.random.split(key, 4)
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        return {
            "conv1": init_linear(first, 25 * depth, 32),
            "conv2": init_linear(second, 25 * 32, 64),
            "dense": init_linear(dense, rows * columns * 64, self.hidden),
            "out": init_linear(out, self.hidden, self.classes),
        }

    def apply(
        self, params: Params, x: Shaped[Array, "b height width depth"]
    ) -> Float[Array, "b classes"]:
        """The logits."""
        x = x.astype(params["out"]["b"].dtype)
        for name in ("conv1", "conv2"):
            x = convolution_block(params[name], x, 5)
        return output_layer(params["out"], jax.nn.relu(linear(params["dense"], flatten(x))))
