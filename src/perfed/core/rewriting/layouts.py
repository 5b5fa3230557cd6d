"""Arrays whose axes lie in memory in another order than the model's, and operations on them.

A convolution wants channels last and gives them so. In a model that has them first, transposing
around each one would cost more than the products. So what a convolution gives is kept as it is,
with a note of which axis is which (`Laid`), and operations that can work on any order do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jaxtyping import Array


@final
@dataclass(frozen=True)
class Laid:
    """An array in another order.

    Attributes:
        array: as it lies in memory.
        order: which of the model's axes each of its axes is.
    """

    array: Array
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """As the model sees it."""
        sides = dict(zip(self.order, self.array.shape, strict=True))
        return tuple(sides[axis] for axis in range(len(self.order)))

    def place(self, axis: int) -> int:
        """Where one of the model's axes is in memory."""
        return self.order.index(axis)


Value = Any  # an Array, a Laid, or another value that an operation may take in place of an array
Rule = Callable[[JaxprEqn, Sequence[Value]], list[Value] | None]


def laid(array: Array, order: Sequence[int]) -> Array | Laid:
    """An array whose axes are in this order."""
    order = tuple(order)
    return array if order == tuple(range(len(order))) else Laid(array, order)


def in_order(value: Array | Laid, order: Sequence[int]) -> Array:
    """The array with its axes in this order of the model's."""
    order = tuple(order)
    if not isinstance(value, Laid):
        return laid_out(value, order)
    return laid_out(value.array, [value.place(axis) for axis in order])


def laid_out(array: Array, axes: Sequence[int]) -> Array:
    """The array transposed, where that is needed."""
    axes = tuple(axes)
    return array if axes == tuple(range(len(axes))) else jnp.transpose(array, axes)


# What is done to each entry alone, whatever the order.
_BY_ENTRY = (
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "cosh", "div",
    "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow",
    "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "nextafter", "not", "or", "pow", "real", "reduce_precision", "rem", "round", "rsqrt",
    "select_n", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh",
    "xor",
)  # fmt: skip


def by_entry(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value] | None:
    """An operation on each entry: in the order of the largest operand that has one."""
    order = max((v for v in values if isinstance(v, Laid)), key=lambda v: v.array.size).order
    own = [
        v if not isinstance(v, Laid) and jnp.ndim(v) == 0 else in_order(v, order) for v in values
    ]
    return [Laid(eqn.primitive.bind(*own, **eqn.params), order)]


def transpose(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value] | None:
    """No operation at all: another note of the order."""
    (value,), new = values, list(eqn.params["permutation"])
    if not isinstance(value, Laid):
        return None
    return [laid(value.array, [new.index(axis) for axis in value.order])]


def reduce(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value] | None:
    """Sums and the like over some axes."""
    (value,), axes = values, eqn.params["axes"]
    own = tuple(sorted(value.place(axis) for axis in axes))
    found = eqn.primitive.bind(value.array, **eqn.params | {"axes": own})
    return [laid(found, _without(value.order, axes))]


def squeeze(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value] | None:
    """Axes of one entry left out."""
    (value,), axes = values, eqn.params["dimensions"]
    own = tuple(sorted(value.place(axis) for axis in axes))
    found = eqn.primitive.bind(value.array, **eqn.params | {"dimensions": own})
    return [laid(found, _without(value.order, axes))]


def _without(order: Sequence[int], axes: Sequence[int]) -> list[int]:
    """The order of the axes that remain."""
    kept = sorted(set(order) - set(axes))
    return [kept.index(axis) for axis in order if axis in kept]


def cut(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value] | None:
    """Slices."""
    (value,) = values
    names = ("start_indices", "limit_indices", "strides")
    return [_by_axis(eqn, value, [value.array], names)]


def pad(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value] | None:
    """Something around it."""
    value, filling = values
    if not isinstance(value, Laid):
        return None
    return [_by_axis(eqn, value, [value.array, filling], ("padding_config",))]


def _by_axis(
    eqn: JaxprEqn, value: Laid, operands: Sequence[Array], names: Sequence[str]
) -> Array | Laid:
    """An operation with settings that are one for each axis."""
    own = {
        name: tuple(eqn.params[name][axis] for axis in value.order)
        for name in names
        if eqn.params[name] is not None
    }
    return Laid(eqn.primitive.bind(*operands, **eqn.params | own), value.order)


def concatenate(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value] | None:
    """Arrays one after the other: in the order of the first that has one."""
    order = next(v for v in values if isinstance(v, Laid)).order
    axis = order.index(eqn.params["dimension"])
    own = [in_order(v, order) for v in values]
    return [Laid(eqn.primitive.bind(*own, **eqn.params | {"dimension": axis}), order)]


def split(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value] | None:
    """Its parts along an axis."""
    (value,) = values
    axis = value.place(eqn.params["axis"])
    return [
        Laid(part, value.order)
        for part in eqn.primitive.bind(value.array, **eqn.params | {"axis": axis})
    ]


def reverse(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value] | None:
    """The other way round along some axes."""
    (value,) = values
    own = tuple(value.place(axis) for axis in eqn.params["dimensions"])
    return [Laid(eqn.primitive.bind(value.array, **eqn.params | {"dimensions": own}), value.order)]


def reshape(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value] | None:
    """Axes split and put together, with as little moved in memory as can be."""
    value, shape = values[0], tuple(eqn.params["new_sizes"])
    groups = _groups(value.shape, shape)
    if groups is None or eqn.params["dimensions"] is not None:
        return None
    remaining = [axis for axis in value.order if value.shape[axis] > 1]
    # What is put together has to lie side by side; else it is moved, and nothing else is.
    groups.sort(key=lambda pair: remaining.index(min(pair[0], key=remaining.index)))
    whole = [axis for before, _ in groups for axis in before]
    order = [axis for _, after in groups for axis in after]
    order += [axis for axis, side in enumerate(shape) if side == 1]
    ones = [axis for axis in value.order if value.shape[axis] == 1]
    array = in_order(value, (*whole, *ones))
    return [laid(array.reshape([shape[axis] for axis in order]), order)]


def _groups(
    before: Sequence[int], after: Sequence[int]
) -> list[tuple[list[int], list[int]]] | None:
    """Which axes become which, as few together as can be; those of one entry are left out."""
    olds = [axis for axis, side in enumerate(before) if side != 1]
    news = [axis for axis, side in enumerate(after) if side != 1]
    found = []
    while olds and news:
        old, new = [olds.pop(0)], [news.pop(0)]
        sizes = before[old[0]], after[new[0]]
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                if not olds:
                    return None
                old.append(olds.pop(0))
                sizes = sizes[0] * before[old[-1]], sizes[1]
            else:
                if not news:
                    return None
                new.append(news.pop(0))
                sizes = sizes[0], sizes[1] * after[new[-1]]
        found.append((old, new))
    return None if olds or news else found


def multiply(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value] | None:
    """A product of arrays (`dot_general`) over axes wherever they lie."""
    contracted, repeated = eqn.params["dimension_numbers"]
    arrays, numbers, free = [], [], []
    for value, over, each in zip(values, contracted, repeated, strict=True):
        order = value.order if isinstance(value, Laid) else tuple(range(jnp.ndim(value)))
        arrays.append(value.array if isinstance(value, Laid) else value)
        numbers.append((tuple(map(order.index, over)), tuple(map(order.index, each))))
        rest = [axis for axis in order if axis not in (*over, *each)]
        free.append([sorted(rest).index(axis) for axis in rest])
    (left_over, left_each), (right_over, right_each) = numbers
    count, left = len(left_each), len(free[0])
    found = eqn.primitive.bind(
        *arrays,
        **eqn.params | {"dimension_numbers": ((left_over, right_over), (left_each, right_each))},
    )
    own = [*range(count), *(count + a for a in free[0]), *(count + left + a for a in free[1])]
    return [laid(found, own)]


# Only asked where an operand has an order of its own.
RULES: dict[str, Rule] = dict.fromkeys(_BY_ENTRY, by_entry) | {
    "concatenate": concatenate,
    "dot_general": multiply,
    "pad": pad,
    "reduce_and": reduce,
    "reduce_max": reduce,
    "reduce_min": reduce,
    "reduce_or": reduce,
    "reduce_prod": reduce,
    "reduce_sum": reduce,
    "reshape": reshape,
    "rev": reverse,
    "slice": cut,
    "split": split,
    "squeeze": squeeze,
    "transpose": transpose,
}
