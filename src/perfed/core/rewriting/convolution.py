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
from math import prod
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from perfed.core.rewriting.windows import Window, slices


@final
@dataclass(frozen=True)
class Convolution:
    """What a convolution is, beside what it is of.

    Attributes:
        windows: how the kernel moves, along each axis of space.
        channels_first: whether the rows of the kernel are by channel, then by position.
        precision: of the products.
    """

    windows: tuple[Window, ...]
    channels_first: bool
    precision: Any = None

    def patches(self, x: Float[Array, "depth *space b"]) -> Float[Array, "rows *places b"]:
        """What each place sees."""
        parts = slices(x, (Window(1), *self.windows, Window(1)), 0)
        if len(parts) == 1:
            return parts[0]
        found = jnp.stack(parts, 1 if self.channels_first else 0)
        return found.reshape(-1, *found.shape[2:])

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
        parts = slices(x, (Window(1), *how.windows, Window(1)), 0)
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
    (to_x,) = jax.linear_transpose(how.patches, x)(_apart(to_patches))
    return to_x, _apart(to_kernel)


_convolve.defvjp(_forward, _backward)


def _apart(x: Array) -> Array:
    """The same, computed once and kept."""
    kept: Array = lax.optimization_barrier(x)
    return kept


def rows_of(kernel: Array, spec: Sequence[int]) -> tuple[Float[Array, "rows outputs"], bool]:
    """A kernel as a matrix with the outputs last, and whether its rows are by channel first.

    Args:
        kernel: in any order.
        spec: where its outputs, its channels and its positions are.
    """
    outputs, inputs, *sizes = spec
    first = inputs < min(sizes, default=inputs)
    axes = (inputs, *sizes, outputs) if first else (*sizes, inputs, outputs)
    return jnp.transpose(kernel, axes).reshape(-1, kernel.shape[outputs]), first
