"""A function at two points at once: f(a + b) - f(a - b), with what is linear in it done once.

A value that depends on the point is known by its two values, or by their mean and half their
difference; what is linear may be applied to either. So the first layer of a network, a product of
weights and data, takes two products ahead (W x and V x) but only one on the way back, where nothing
but the difference is wanted: one of the eight large products of a Hessian-free step is saved, and
so are the two shifted copies of all weights.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jaxtyping import Array

from perfed.core.jaxprs import bind, evaluate

Tree = TypeVar("Tree")

# Linear in all operands together: these work on means and differences as they do on values.
_SHAPES = frozenset({
    "broadcast_in_dim", "concatenate", "optimization_barrier", "pad", "reshape", "slice", "squeeze",
})  # fmt: skip
_LINEAR = _SHAPES | {"add", "add_any", "neg", "reduce_sum", "sub", "transpose"}
# Linear in either operand. A product is worth going over to means and differences for.
_PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})
_BILINEAR = _PRODUCTS | {"mul"}


class _Ends(NamedTuple):
    """A value at a + b, and at a - b."""

    ahead: Array
    behind: Array


class _Spread(NamedTuple):
    """The same as the mean of the two and half their difference."""

    mean: Array
    half: Array


# What does not depend on the point is an array.
_Value = _Ends | _Spread | Array


def difference(function: Callable[[Tree], Tree], at: Tree, by: Tree) -> Tree:
    """function(at + by) - function(at - by), for a function whose results are like its argument.

    All that it computes on the way has to be finite.
    """
    traced = jax.make_jaxpr(function)(at)
    points = [
        _Spread(a, b.astype(a.dtype))
        for a, b in zip(jax.tree.leaves(at), jax.tree.leaves(by), strict=True)
    ]
    results = evaluate(traced.jaxpr, traced.consts, points, _apply)
    apart: Tree = jax.tree.unflatten(jax.tree.structure(at), [2 * _spread(r).half for r in results])
    return apart


def _apply(equation: JaxprEqn, operands: list[_Value]) -> Sequence[_Value]:
    """What one operation makes of its operands."""
    name = equation.primitive.name
    varying = [operand for operand in operands if isinstance(operand, _Ends | _Spread)]
    if not varying:
        return bind(equation, operands)
    if name == "jit":
        inner = equation.params["jaxpr"]
        return evaluate(inner.jaxpr, inner.consts, operands, _apply)
    scaled = len(varying) == 1 and (
        name in _BILINEAR or (name == "div" and varying[0] is operands[0])
    )
    spread = all(isinstance(operand, _Spread) for operand in varying)
    # Whole numbers have no halves.
    values: list[Any] = [result.aval for result in equation.outvars] + [one[0] for one in varying]
    real = all(jnp.issubdtype(value.dtype, jnp.inexact) for value in values)
    if real and ((scaled and name in _PRODUCTS) or (spread and (scaled or name in _LINEAR))):
        pairs = [
            (operand, operand) if scaled and operand is not varying[0] else _spread(operand)
            for operand in operands
        ]
        mean, half = zip(*pairs, strict=True)
        return list(map(_Spread, bind(equation, mean), bind(equation, half)))
    ahead, behind = zip(*map(_ends, operands), strict=True)
    return list(map(_Ends, bind(equation, ahead), bind(equation, behind)))


def _spread(value: _Value) -> _Spread:
    match value:
        case _Spread():
            return value
        case _Ends(ahead, behind):
            return _Spread(0.5 * ahead + 0.5 * behind, 0.5 * ahead - 0.5 * behind)
        case constant:
            return _Spread(constant, jnp.zeros_like(constant))


def _ends(value: _Value) -> _Ends:
    match value:
        case _Ends():
            return value
        case _Spread(mean, half):
            return _Ends(mean + half, mean - half)
        case constant:
            return _Ends(constant, constant)
