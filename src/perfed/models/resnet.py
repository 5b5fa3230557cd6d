"""ResNet-18 for small images, with group normalization."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import jax
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from perfed.core.errors import require, require_count
from perfed.core.trees import Params
from perfed.models.layers import (
    checkpoint_if,
    convolve,
    group_norm,
    init_linear,
    init_norm,
    output_layer,
)

# Of the eight blocks: how many times the first width they have, and the stride they begin with.
_BLOCKS = ((1, 1), (1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (8, 2), (8, 1))


@final
@dataclass(frozen=True)
class ResNet18:
    """ResNet-18 for small images: its stem is a 3x3 convolution, and only its end is pooled.

    Groups are normalized instead of batches, whose statistics differ between clients (Hsieh et al.,
    ICML 2020); two groups a layer, as in Reddi et al. (ICLR 2021) and most code since.

    Args:
        image: height, width and depth of an input.
        classes: how many outputs.
        width: the channels of the first blocks; later ones have up to eight times as many.
        groups: how many groups the channels of a layer are normalized in.
        remat: compute a block's inside again for its gradient, instead of keeping it: less memory.
    """

    head: ClassVar[str] = "out"

    image: tuple[int, int, int]
    classes: int
    width: int = 64
    groups: int = 2
    remat: bool = False

    def __post_init__(self) -> None:
        require_count("width", self.width)
        require_count("groups", self.groups)
        fits = self.width % self.groups == 0
        require(fits, "groups", self.groups, f"must divide the width, {self.width}")

    def init(self, key: PRNGKeyArray) -> Params:
        """Fresh parameters."""
        stem, out, *keys = jax.random.split(key, 2 + len(_BLOCKS))
        blocks, before = [], self.width
        for block_key, (times, stride) in zip(keys, _BLOCKS, strict=True):
            blocks.append(_init_block(block_key, before, times * self.width, stride))
            before = times * self.width
        return {
            "stem": _init_convolution(stem, self.image[2], self.width, 3),
            "blocks": blocks,
            "out": init_linear(out, before, self.classes),
        }

    def apply(
        self, params: Params, x: Shaped[Array, "b height width depth"]
    ) -> Float[Array, "b classes"]:
        """The logits."""
        x = x.astype(params["out"]["b"].dtype)
        x = jax.nn.relu(self._convolve(params["stem"], x))
        for layers, (_, stride) in zip(params["blocks"], _BLOCKS, strict=True):
            block = checkpoint_if(self.remat, partial(self._block, stride=stride))
            x = block(layers, x)
        return output_layer(params["out"], x.mean((1, 2)))

    def _block(self, layers: Any, x: Array, stride: int) -> Array:
        inside = jax.nn.relu(self._convolve(layers["conv1"], x, stride))
        inside = self._convolve(layers["conv2"], inside)
        if "shortcut" in layers:
            x = self._convolve(layers["shortcut"], x, stride)
        return jax.nn.relu(inside + x)

    def _convolve(self, layer: Any, x: Array, stride: int = 1) -> Array:
        """A convolution, which keeps the size but for its stride, and its normalization."""
        size = 1 if layer["w"].shape[1] == x.shape[-1] else 3
        convolved = convolve(layer["w"], x, size, stride, size // 2)
        return group_norm(layer["norm"], convolved, self.groups)


def _init_block(key: PRNGKeyArray, inputs: int, outputs: int, stride: int) -> dict[str, Any]:
    first, second, shortcut = jax.random.split(key, 3)
    block = {
        "conv1": _init_convolution(first, inputs, outputs, 3),
        "conv2": _init_convolution(second, outputs, outputs, 3),
    }
    if stride > 1:
        block["shortcut"] = _init_convolution(shortcut, inputs, outputs, 1)
    return block


def _init_convolution(key: PRNGKeyArray, inputs: int, outputs: int, size: int) -> dict[str, Any]:
    # Without a bias, which the normalization has.
    weight = init_linear(key, size * size * inputs, outputs)["w"]
    return {"w": weight, "norm": init_norm(outputs)}
