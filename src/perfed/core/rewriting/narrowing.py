"""Of each value only what is read of it.

A text's model often reads nothing of its last layer but the last place. What is cut off there need
not be computed: the cut moves up, from a sum to its terms and from a product to a factor, as far as
each operation keeps the places apart.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import Array

from perfed.core.jaxprs import bind, contains, evaluate, is_relu
from perfed.core.rewriting import low_rank


class AxisSlice(NamedTuple):
    """What is read of a value: entries start..start+size-1 along one axis."""

    axis: int
    start: int
    size: int

    def of(self, value: Array) -> Array:
        """This part of a value."""
        part: Array = lax.slice_in_dim(value, self.start, self.start + self.size, axis=self.axis)
        return part


# A part of each operand, or None for all of it.
AxisSlices = list[AxisSlice | None]


def narrow(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same function, with no product of what nobody reads."""
    if not contains(closed.jaxpr, {"slice"}):
        return closed
    shapes = [variable.aval for variable in closed.jaxpr.invars]
    flat = jax.make_jaxpr(lambda *values: _inlined(closed, values))(*shapes)
    read = _parts_read(flat.jaxpr)
    products = (eqn for eqn in flat.jaxpr.eqns if eqn.primitive.name == "dot_general")
    if not any(read.get(eqn.outvars[0]) for eqn in products):
        return closed
    return jax.make_jaxpr(lambda *values: _evaluated(flat, read, values))(*shapes)


def _inlined(closed: ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
    """A function's results, with the operations of those that it calls as its own."""

    def apply(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        called = eqn.primitive.name in ("closed_call", "jit", "pjit")
        if called and eqn.params.get("name") != low_rank.NAME:
            return _inlined(eqn.params["jaxpr"], values)
        return bind(eqn, values)

    return evaluate(closed.jaxpr, closed.consts, values, apply)


def _parts_read(jaxpr: Jaxpr) -> dict[Var, AxisSlice | None]:
    """What is read of each value, None for all of it; one of which nothing is read is not there."""
    read: dict[Var, AxisSlice | None] = dict.fromkeys(_variables(jaxpr.outvars))
    for eqn in reversed(jaxpr.eqns):
        if not any(variable in read for variable in eqn.outvars):
            continue
        parts = _operand_parts(eqn, read.get(eqn.outvars[0]))
        for variable, part in zip(eqn.invars, parts or [None] * len(eqn.invars), strict=True):
            if not isinstance(variable, Literal):
                same = read.get(variable, part) == part
                read[variable] = part if same else None
    return read


def _variables(atoms: Sequence[Any]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _evaluated(
    closed: ClosedJaxpr, read: dict[Var, AxisSlice | None], values: Sequence[Any]
) -> list[Any]:
    """A function's results, from what is read of each value."""
    jaxpr, known = closed.jaxpr, {}

    def keep(variables: Sequence[Any], values: Sequence[Any], narrowed: bool = False) -> None:
        for variable, value in zip(variables, values, strict=True):
            part = read.get(variable)
            known[variable] = value if narrowed or part is None else part.of(value)

    def value_of(atom: Any, part: AxisSlice | None) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        return known[atom] if part in (None, read[atom]) else part.of(known[atom])

    keep(jaxpr.constvars, closed.consts)
    keep(jaxpr.invars, values)
    for eqn in jaxpr.eqns:
        if not any(variable in read for variable in eqn.outvars):
            continue
        part = read.get(eqn.outvars[0])
        parts = _operand_parts(eqn, part)
        operands = [
            value_of(atom, own)
            for atom, own in zip(eqn.invars, parts or [None] * len(eqn.invars), strict=True)
        ]
        if parts is not None and part is None:  # a cut, which its operand has made
            keep(eqn.outvars, operands, narrowed=True)
        elif parts is None:
            keep(eqn.outvars, bind(eqn, operands))
        else:
            assert part is not None
            keep(eqn.outvars, _narrowed(eqn, part, operands), narrowed=True)
    return [value_of(atom, None) for atom in jaxpr.outvars]


def _cut(eqn: JaxprEqn) -> AxisSlice | None:
    """The part that an operation cuts out, if it is one along one axis."""
    if eqn.primitive.name != "slice" or set(eqn.params["strides"] or (1,)) != {1}:
        return None
    shape = _shape(eqn.invars[0])
    limits = zip(eqn.params["start_indices"], eqn.params["limit_indices"], shape, strict=True)
    cuts = [
        AxisSlice(axis, start, limit - start)
        for axis, (start, limit, size) in enumerate(limits)
        if limit - start < size
    ]
    return cuts[0] if len(cuts) == 1 else None


def _operand_parts(eqn: JaxprEqn, part: AxisSlice | None) -> AxisSlices | None:
    """What an operation needs of its operands for a part of its result; None: all of them."""
    if part is None:
        cut = _cut(eqn)
        return None if cut is None else [cut]
    name = eqn.primitive.name
    if name in _EACH_ALONE or (name == "custom_jvp_call" and is_relu(eqn)):
        return [_where(part, atom, part.axis) for atom in eqn.invars]
    rule = _RULES.get(name)
    return None if rule is None else rule(eqn, part)


def _narrowed(eqn: JaxprEqn, part: AxisSlice, operands: list[Any]) -> Sequence[Any]:
    """An operation on parts of its operands."""
    if eqn.primitive.name == "custom_jvp_call":
        return [jax.nn.relu(*operands)]
    params = dict(eqn.params)
    if (name := _SHAPES.get(eqn.primitive.name)) is not None:
        shape = list(params[name])
        shape[part.axis] = part.size
        params[name] = tuple(shape)
    return bind(eqn.replace(params=params), operands)


def _where(part: AxisSlice, atom: Any, axis: int) -> AxisSlice | None:
    """The part along an axis of an operand; all of it where it is the same along that axis."""
    shape = _shape(atom)
    if not shape or shape[axis] == 1:
        return None
    return part._replace(axis=axis)


def _product(eqn: JaxprEqn, part: AxisSlice) -> AxisSlices:
    """The rows of a product are products of rows."""
    contracted, repeated = eqn.params["dimension_numbers"]
    if part.axis < len(repeated[0]):
        axes = [own[part.axis] for own in repeated]
        return [_where(part, atom, axis) for atom, axis in zip(eqn.invars, axes, strict=True)]
    left, right = (
        [axis for axis in range(len(_shape(atom))) if axis not in (*over, *each)]
        for atom, over, each in zip(eqn.invars, contracted, repeated, strict=True)
    )
    place = part.axis - len(repeated[0])
    if place < len(left):
        return [_where(part, eqn.invars[0], left[place]), None]
    return [None, _where(part, eqn.invars[1], right[place - len(left)])]


def _reduction(eqn: JaxprEqn, part: AxisSlice) -> AxisSlices:
    (value,) = eqn.invars
    left = [axis for axis in range(len(_shape(value))) if axis not in eqn.params["axes"]]
    return [_where(part, value, left[part.axis])]


def _broadcast(eqn: JaxprEqn, part: AxisSlice) -> AxisSlices | None:
    axes = eqn.params["broadcast_dimensions"]
    if len(eqn.invars) != 1:
        return None
    if part.axis not in axes:
        return [None]
    return [_where(part, eqn.invars[0], axes.index(part.axis))]


def _transpose(eqn: JaxprEqn, part: AxisSlice) -> AxisSlices:
    return [_where(part, eqn.invars[0], eqn.params["permutation"][part.axis])]


def _squeeze(eqn: JaxprEqn, part: AxisSlice) -> AxisSlices:
    (value,) = eqn.invars
    gone = eqn.params["dimensions"]
    left = [axis for axis in range(len(_shape(value))) if axis not in gone]
    return [_where(part, value, left[part.axis])]


def _reshape(eqn: JaxprEqn, part: AxisSlice) -> AxisSlices | None:
    """Where one axis stays what it is."""
    if len(eqn.invars) != 1 or eqn.params["dimensions"] is not None:
        return None
    before, after = _shape(eqn.invars[0]), eqn.params["new_sizes"]
    ahead = prod(after[: part.axis])
    for axis, size in enumerate(before):
        if size == after[part.axis] and prod(before[:axis]) == ahead:
            return [part._replace(axis=axis)]
    return None


def _shape(atom: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = atom.aval.shape
    return shape


# Each entry of the result is made of those at its place.
_EACH_ALONE = frozenset(
    """
    abs add and convert_element_type copy cos div eq erf erfc erf_inv exp exp2 expm1 ge gt
    integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow rsqrt select_n
    sign sin sqrt square stop_gradient sub tanh xor
    """.split()  # noqa: SIM905
)
_RULES: dict[str, Callable[[JaxprEqn, AxisSlice], AxisSlices | None]] = {
    "broadcast_in_dim": _broadcast,
    "dot_general": _product,
    "reduce_and": _reduction,
    "reduce_max": _reduction,
    "reduce_min": _reduction,
    "reduce_or": _reduction,
    "reduce_sum": _reduction,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
# Where an operation says how large its result is.
_SHAPES = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}
