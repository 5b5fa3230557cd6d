"""Convolutions and pooling by slices of the inputs: products and comparisons, and nothing else."""

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

Combine = Callable[[Array, Array], Array]


class Window(NamedTuple):
    """How a window moves along one axis.

    Attributes:
        size: how many entries it sees.
        stride: how far it moves.
        low: how many entries are added before the first; negative: taken away.
        high: the same after the last.
        apart: how far the entries that it sees are from each other.
        spread: how far the inputs are moved apart before.
    """

    size: int
    stride: int = 1
    low: int = 0
    high: int = 0
    apart: int = 1
    spread: int = 1

    @property
    def is_trivial(self) -> bool:
        """Whether each entry is seen once and alone."""
        return self == Window(1)

    def padded(self, side: int) -> int:
        """How long an axis is, with what is added to it."""
        return max(0, (side - 1) * self.spread + 1) + self.low + self.high

    def count(self, side: int) -> int:
        """How many places there are on an axis."""
        reach = (self.size - 1) * self.apart + 1
        return max(0, (self.padded(side) - reach) // self.stride + 1)


def convolve(
    x: Float[Array, "b *space depth"],
    kernel: Float[Array, "*sizes inputs outputs"],
    windows: Sequence[Window],
    groups: int = 1,
    options: dict[str, Any] | None = None,
) -> Float[Array, "b *places outputs"]:
    """A convolution of any number of dimensions, with channels last.

    Args:
        x: the inputs.
        kernel: its inputs are those of one group.
        windows: one for each dimension of space.
        groups: how many groups of channels are convolved each on its own.
        options: of the products.
    """
    options = options or {}
    outputs = kernel.shape[-1]
    parts = _slices(x, windows, 0)
    if groups == 1:
        # Side by side, so that one product does them all.
        patches = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
        return _product(patches, kernel.reshape(-1, outputs), options)
    each = outputs // groups
    if x.shape[-1] == groups:
        # By channel nothing is added up but over the window: products of numbers.
        flat = kernel.reshape(len(parts), groups, each)
        total = sum(part[..., None] * own for part, own in zip(parts, flat, strict=True))
        return jnp.asarray(total).reshape(*parts[0].shape[:-1], outputs)
    split = [part.reshape(*part.shape[:-1], groups, -1) for part in parts]
    patches = jnp.concatenate(split, axis=-1)
    by_group = jnp.moveaxis(kernel.reshape(-1, groups, each), 1, 0)
    # Groups first: they are what the product is repeated for.
    numbers = ((patches.ndim - 1,), (1,)), ((patches.ndim - 2,), (0,))
    found = lax.dot_general(patches, by_group, numbers, **options)
    return jnp.moveaxis(found, 0, -2).reshape(*patches.shape[:-2], outputs)


def _product(x: Array, w: Float[Array, "inputs outputs"], options: dict[str, Any]) -> Array:
    # As the built-in layers have it: the gradient of a narrow layer is faster with outputs first.
    return lax.dot_general(x, w.T, (((x.ndim - 1,), (1,)), ((), ())), **options)


def pool(
    x: Shaped[Array, "..."], windows: Sequence[Window], empty: Any, combine: Combine
) -> Shaped[Array, "..."]:
    """What is in each place of a window put together, one axis after the other.

    Args:
        x: the inputs.
        windows: one for each axis.
        empty: what is added at the edges.
        combine: of two values.
    """
    # The last first: of equal entries the first in a row, then the first row is the largest, which
    # gets the whole gradient, as in PyTorch and XLA.
    for axis in reversed(range(x.ndim)):
        own = [Window(1)] * x.ndim
        own[axis] = windows[axis]
        if not own[axis].is_trivial:
            x = _combined(_slices(x, own, empty), combine)
    return x


def larger(a: Array, b: Array) -> Array:
    """The larger of two; the first, where they are equal; what is no number stays."""
    first = a >= b
    if jnp.issubdtype(a.dtype, jnp.floating):
        first |= a != a
    return jnp.where(first, a, b)


def smaller(a: Array, b: Array) -> Array:
    """The smaller of two, likewise."""
    first = a <= b
    if jnp.issubdtype(a.dtype, jnp.floating):
        first |= a != a
    return jnp.where(first, a, b)


def _combined(parts: Sequence[Array], combine: Combine) -> Array:
    found = parts[0]
    for part in parts[1:]:
        found = combine(found, part)
    return found


def _slices(x: Array, windows: Sequence[Window], empty: Any) -> list[Array]:
    """What each place of a window sees, for all of its positions at once.

    `windows` are of the axes from the first on for pooling, of those between the first and the last
    for convolutions.
    """
    first = 0 if len(windows) == x.ndim else 1
    own = [Window(1)] * x.ndim
    own[first : first + len(windows)] = windows
    counts = [window.count(side) for window, side in zip(own, x.shape, strict=True)]
    edges = [(window.low, window.high, window.spread - 1) for window in own]
    if any(edge != (0, 0, 0) for edge in edges):
        x = lax.pad(x, jnp.asarray(empty, x.dtype), edges)
    if 0 in counts:
        shape = tuple(counts)
        return [jnp.zeros(shape, x.dtype)] * prod(window.size for window in own)
    found = []
    for offsets in product(*(range(window.size) for window in own)):
        starts = [offset * window.apart for offset, window in zip(offsets, own, strict=True)]
        strides = [window.stride for window in own]
        limits = [
            start + (count - 1) * stride + 1
            for start, count, stride in zip(starts, counts, strides, strict=True)
        ]
        found.append(lax.slice(x, starts, limits, strides))
    return found


def least(dtype: Any) -> Any:
    """What is smaller than all else."""
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def greatest(dtype: Any) -> Any:
    """What is larger than all else."""
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


__all__ = ["Window", "convolve", "greatest", "larger", "least", "pool", "smaller"]
