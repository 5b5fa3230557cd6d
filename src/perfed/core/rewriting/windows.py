"""Windows that move along axes: what they see as slices of the inputs, and pooling of that."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

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
    def is_tile(self) -> bool:
        """Whether what it sees in one place begins where the last ended."""
        return self == Window(self.size, self.size)

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


Pool = Callable[[Array, Sequence[Window]], Array]


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
            x = _combined(slices(x, own, empty), combine)
    return x


def pool_max(x: Shaped[Array, "..."], windows: Sequence[Window]) -> Shaped[Array, "..."]:
    """The largest in each place of a window; of equal entries the first one gets the gradient."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    if floating and all(window.is_tile for window in windows) and x.size:
        return _largest(x, tuple(windows))
    return pool(x, windows, _least(x.dtype), _larger)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _largest(x: Array, windows: tuple[Window, ...]) -> Array:
    return _found(x, windows)[0]


@_largest.defjvp
def _largest_slope(
    windows: tuple[Window, ...], at: tuple[Array], along: tuple[Array]
) -> tuple[Array, Array]:
    """The slope of an entry that was the largest, which is known by its number in the window."""
    (x,), (tangent,) = at, along
    largest, number = lax.optimization_barrier(_found(x, windows))
    counts = [w.count(side) for w, side in zip(windows, x.shape, strict=True)]
    seen = [count * w.size for count, w in zip(counts, windows, strict=True)]
    tiles = [side for pair in zip(counts, (w.size for w in windows), strict=True) for side in pair]
    within = tuple(range(1, 2 * x.ndim, 2))
    every = jnp.arange(prod(w.size for w in windows), dtype=number.dtype)
    numbers = every.reshape([1 if axis % 2 == 0 else side for axis, side in enumerate(tiles)])
    own = lax.slice(tangent, [0] * x.ndim, seen).reshape(tiles)
    chosen = jnp.expand_dims(number, within) == numbers
    return largest, jnp.where(chosen, own, 0).sum(within)


def _found(x: Array, windows: Sequence[Window]) -> tuple[Array, Int[Array, "..."]]:
    """The largest in each place of a window, and its number there."""
    parts = slices(x, windows, 0)
    dtype = jnp.int8 if len(parts) < 128 else jnp.int32
    largest, number = parts[0], jnp.zeros(parts[0].shape, dtype)
    for i, part in enumerate(parts[1:], 1):
        stays = (largest >= part) | (largest != largest)
        largest, number = jnp.where(stays, largest, part), jnp.where(stays, number, i)
    return largest, number


def pool_min(x: Shaped[Array, "..."], windows: Sequence[Window]) -> Shaped[Array, "..."]:
    """The smallest in each place, likewise."""
    return pool(x, windows, _greatest(x.dtype), _smaller)


def pool_sum(x: Shaped[Array, "..."], windows: Sequence[Window]) -> Shaped[Array, "..."]:
    """The sum of each place."""
    return pool(x, windows, 0, jnp.add)


def _larger(a: Array, b: Array) -> Array:
    """The larger of two; the first, where they are equal; what is no number stays."""
    first = a >= b
    if jnp.issubdtype(a.dtype, jnp.floating):
        first |= a != a
    return jnp.where(first, a, b)


def _smaller(a: Array, b: Array) -> Array:
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


def slices(x: Array, windows: Sequence[Window], empty: Any) -> list[Array]:
    """What each place sees, for all positions in a window at once.

    `windows` are of all axes.
    """
    counts = [window.count(side) for window, side in zip(windows, x.shape, strict=True)]
    edges = [(window.low, window.high, window.spread - 1) for window in windows]
    if any(edge != (0, 0, 0) for edge in edges):
        x = lax.pad(x, jnp.asarray(empty, x.dtype), edges)
    if 0 in counts:
        shape = tuple(counts)
        return [jnp.zeros(shape, x.dtype)] * prod(window.size for window in windows)
    found = []
    for offsets in product(*(range(window.size) for window in windows)):
        starts = [offset * window.apart for offset, window in zip(offsets, windows, strict=True)]
        strides = [window.stride for window in windows]
        limits = [
            start + (count - 1) * stride + 1
            for start, count, stride in zip(starts, counts, strides, strict=True)
        ]
        found.append(lax.slice(x, starts, limits, strides))
    return found


def _least(dtype: Any) -> Any:
    """What is smaller than all else."""
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _greatest(dtype: Any) -> Any:
    """What is larger than all else."""
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max
