"""Convolutions as products of patches, in the order in memory that a CPU likes best.

What is seen lies as (channels, space, examples): the examples of a batch are side by side. To copy
patches is then to copy long pieces, whatever the stride and the number of channels, and one product
of the kernel and all patches gives the outputs in the same order.

Barriers keep the compiler from computing the same patches again for each who reads them; they do so
only where programs are compiled with `simulation.devices.compiler_options`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from perfed.core.rewriting.windows import Window, slices

# The patches of so few positions are best put back at once, and those of more axis by axis.
_FEW = 9


@final
@dataclass(frozen=True)
class Convolution:
    """What a convolution is, beside what it is of.

    Attributes:
        windows: how the kernel moves, along each axis of space.
        precision: of the products.
    """

    windows: tuple[Window, ...]
    precision: Any = None

    @property
    def positions(self) -> int:
        """How many there are in a window."""
        return prod(window.size for window in self.windows)

    def patches(self, x: Float[Array, "depth *space b"]) -> Float[Array, "rows *places b"]:
        """What each place sees: of each position in the window all channels."""
        space = zip(self.windows, x.shape[1:-1], strict=True)
        counts = [window.count(side) for window, side in space]
        if 0 in counts or any(w.stride > 1 for w in self.windows) or self.positions == 1:
            found = jnp.stack(self.parts(x))
        else:
            # As one operation that copies pieces: four times as fast as slices put together.
            edges = [(w.low, w.high, w.spread - 1) for w in self.windows]
            padded = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
            sizes = (len(x), *counts, x.shape[-1])
            zero = jnp.int32(0)
            starts = [range(0, w.size * w.apart, w.apart) for w in self.windows]

            def piece(start: Int[Array, " axes"]) -> Array:
                return lax.dynamic_slice(padded, (zero, *start, zero), sizes)

            found = jax.vmap(piece)(jnp.asarray(list(product(*starts)), jnp.int32))
        return found.reshape(-1, *found.shape[2:])

    def parts(self, x: Float[Array, "depth *space b"]) -> list[Float[Array, "depth *places b"]]:
        """What each position in the window sees in all places."""
        return slices(x, (Window(1), *self.windows, Window(1)), 0)

    def put_back(self, patches: Float[Array, "rows *places b"], x: Array) -> Array:
        """The transpose of `patches`, for inputs of the shape of `x`."""
        sizes = [window.size for window in self.windows]
        apart = patches.reshape(*sizes, len(x), *patches.shape[1:])
        if self.positions <= _FEW:

            def at_once(x: Array) -> Array:
                return jnp.stack(self.parts(x)).reshape(apart.shape)

            (found,) = jax.linear_transpose(at_once, x)(apart)
            return jnp.asarray(found)
        steps = [partial(self._along, axis=axis) for axis in reversed(range(len(sizes)))]
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
        for step in steps:
            shapes.append(jax.eval_shape(step, shapes[-1]))
        for step, shape in zip(reversed(steps), reversed(shapes[:-1]), strict=True):
            (apart,) = jax.linear_transpose(step, shape)(_apart(apart))
        return apart

    def _along(self, x: Array, axis: int) -> Array:
        """What each place sees along one axis, after those behind it."""
        done = len(self.windows) - 1 - axis
        windows = [Window(1)] * x.ndim
        windows[done + 1 + axis] = self.windows[axis]
        return jnp.stack(slices(x, windows, 0))

    def product(self, a: Array, b: Array, over: tuple[int, int], dtype: Any) -> Array:
        """A product of matrices over one axis of each."""
        numbers = ((over[:1], over[1:]), ((), ()))
        found = lax.dot_general(a, b, numbers, self.precision, preferred_element_type=dtype)
        return found.astype(dtype)


def convolve(
    x: Float[Array, "depth *space b"],
    kernel: Float[Array, "rows outputs"],
    how: Convolution,
    groups: int = 1,
) -> Float[Array, "outputs *places b"]:
    """A convolution of any number of dimensions.

    Args:
        x: the inputs.
        kernel: its rows are the positions and the channels of one group, its columns are by group.
        how: the rest.
        groups: how many groups of channels are convolved each on its own.
    """
    if groups == 1:
        return _convolve(x, kernel, how)
    rows, outputs = kernel.shape
    by_group = kernel.reshape(rows, groups, outputs // groups)
    if len(x) == groups:
        # By channel nothing is added up but over the window: products of numbers.
        parts = how.parts(x)
        ones = (1,) * (x.ndim - 1)
        total = sum(
            part[:, None] * own.reshape(groups, -1, *ones)
            for part, own in zip(parts, by_group, strict=True)
        )
        return jnp.asarray(total).reshape(outputs, *parts[0].shape[1:])
    split = x.reshape(groups, -1, *x.shape[1:])
    found = jax.vmap(partial(_convolve, how=how), (0, 1))(split, by_group)
    return found.reshape(outputs, *found.shape[2:])


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _convolve(x: Array, kernel: Array, how: Convolution) -> Array:
    return _forward(x, kernel, how)[0]


def _forward(x: Array, kernel: Array, how: Convolution) -> tuple[Array, tuple[Array, Array, Any]]:
    patches = _apart(how.patches(_apart(x)))
    places = patches.shape[1:]
    found = how.product(kernel, patches.reshape(len(kernel), prod(places)), (0, 0), x.dtype)
    return found.reshape(-1, *places), (patches, kernel, x)


def _backward(
    how: Convolution, kept: tuple[Array, Array, Array], slopes: Array
) -> tuple[Array, Array]:
    patches, kernel, x = kept
    # A kernel's slope is faster with its rows first, whatever becomes of it.
    columns = _apart(slopes).reshape(len(slopes), -1)
    to_kernel = how.product(patches.reshape(len(kernel), -1), columns, (1, 1), kernel.dtype)
    to_patches = how.product(kernel, columns, (1, 0), x.dtype).reshape(patches.shape)
    return how.put_back(_apart(to_patches), x), _apart(to_kernel)


_convolve.defvjp(_forward, _backward)


def _apart(x: Array) -> Array:
    """The same, computed once and kept."""
    kept: Array = lax.optimization_barrier(x)
    return kept


def rows_of(kernel: Array, spec: Sequence[int]) -> Float[Array, "rows outputs"]:
    """A kernel as a matrix.

    Args:
        kernel: in any order.
        spec: where its outputs, its channels and its positions are.
    """
    outputs, inputs, *sizes = spec
    found = jnp.transpose(kernel, (*sizes, inputs, outputs))
    return found.reshape(-1, kernel.shape[outputs])
