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
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jaxtyping import Array

Tree = TypeVar("Tree")

# Linear in all operands together: these work on means and differences as they do on values.
_SHAPES = frozenset({"broadcast_in_dim", "concatenate", "pad", "reshape", "slice", "squeeze"})
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
    results = _evaluate(traced.jaxpr, traced.consts, points)
    apart: Tree = jax.tree.unflatten(jax.tree.structure(at), [2 * _spread(r).half for r in results])
    return apart


def _evaluate(jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[_Value]) -> list[_Value]:
    """The results of a traced function."""
    known: dict[Any, _Value] = dict(zip(jaxpr.constvars, constants, strict=True))
    known.update(zip(jaxpr.invars, arguments, strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else known[variable]

    for equation in jaxpr.eqns:
        results = _apply(equation, [read(variable) for variable in equation.invars])
        known.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _apply(equation: JaxprEqn, operands: list[_Value]) -> Sequence[_Value]:
    """What one operation makes of its operands."""
    name = equation.primitive.name
    varying = [operand for operand in operands if isinstance(operand, _Ends | _Spread)]
    if not varying:
        return _bind(equation, operands)
    if name == "jit":
        inner = equation.params["jaxpr"]
        return _evaluate(inner.jaxpr, inner.consts, operands)
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
        return list(map(_Spread, _bind(equation, mean), _bind(equation, half)))
    ahead, behind = zip(*map(_ends, operands), strict=True)
    return list(map(_Ends, _bind(equation, ahead), _bind(equation, behind)))


def _bind(equation: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """What an operation makes of arrays."""
    operation = equation.primitive
    results = operation.bind(*operands, **operation.get_bind_params(equation.params))
    return results if operation.multiple_results else [results]


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
