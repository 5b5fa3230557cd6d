"""Traced functions, operation by operation."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jaxtyping import Array

# What one operation makes of its operands, which may be more than arrays.
Apply = Callable[[JaxprEqn, list[Any]], Sequence[Any]]


def evaluate(
    jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any], apply: Apply
) -> list[Any]:
    """The results of a traced function, whose operations are done by `apply`."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    known.update(zip(jaxpr.invars, arguments, strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else known[variable]

    for equation in jaxpr.eqns:
        results = apply(equation, [read(variable) for variable in equation.invars])
        known.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def bind(equation: JaxprEqn, operands: Sequence[Any]) -> Sequence[Array]:
    """What an operation makes of arrays."""
    operation = equation.primitive
    results = operation.bind(*operands, **operation.get_bind_params(equation.params))
    return results if operation.multiple_results else [results]


def inner_jaxprs(equation: JaxprEqn) -> list[Jaxpr]:
    """The functions that an operation calls."""
    found = []
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else [value]:
            if isinstance(part, ClosedJaxpr):
                found.append(part.jaxpr)
            elif isinstance(part, Jaxpr):
                found.append(part)
    return found


def contains(jaxpr: Jaxpr, names: Any) -> bool:
    """Whether an operation of one of these names is in it, or in what it calls."""
    return any(
        equation.primitive.name in names
        or any(contains(inner, names) for inner in inner_jaxprs(equation))
        for equation in jaxpr.eqns
    )


def is_relu(eqn: JaxprEqn) -> bool:
    """Whether a function with a derivative of its own is JAX's ReLU."""
    inner = eqn.params["call_jaxpr"].jaxpr
    name = getattr(inner.debug_info, "func_name", "")
    while len(inner.eqns) == 1 and inner.eqns[0].primitive.name in ("jit", "pjit"):
        inner = inner.eqns[0].params["jaxpr"].jaxpr
    match inner.eqns:
        case [only] if only.primitive.name == "max" and len(eqn.invars) == 1:
            zero = only.invars[1]
            return isinstance(zero, Literal) and zero.val == 0 and name == "relu"
    return False
