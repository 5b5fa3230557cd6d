"""Matrices with a low-rank adapter: W + s P Q, which is never formed where it is only multiplied.

Clients share W and have their own P and Q: X W is then one product for all of them, where the sum
would be a matrix for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
from jax import lax
from jax.extend.core import JaxprEqn
from jaxtyping import Array, Float

NAME = "perfed_low_rank_sum"


def low_rank_sum(
    w: Float[Array, "rows columns"],
    p: Float[Array, "rows rank"],
    q: Float[Array, "rank columns"],
    scale: float,
) -> Float[Array, "rows columns"]:
    """W + scale P Q, which `rewrite` recognizes."""
    found: Array = _marked(w, p, q, scale)
    return found


def _sum(w: Array, p: Array, q: Array, scale: Array) -> Array:
    return w + scale * (p @ q)


_sum.__name__ = NAME
_marked = jax.jit(_sum)


@final
@dataclass(frozen=True)
class LowRank:
    """W + s P Q.

    Attributes:
        w: the matrix.
        p: one factor,
        q: and the other.
        scale: s.
    """

    w: Array
    p: Array
    q: Array
    scale: Array

    def formed(self) -> Array:
        """The matrix itself."""
        return _sum(self.w, self.p, self.q, self.scale)


def transpose(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any] | None:
    """(W + s P Q)^T = W^T + s Q^T P^T."""
    (value,) = values
    if tuple(eqn.params["permutation"]) != (1, 0):
        return None
    return [LowRank(value.w.T, value.q.T, value.p.T, value.scale)]


def multiply(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any] | None:
    """X (W + s P Q) = X W + s (X P) Q, over either axis and on either side."""
    contracted, (repeated, _) = eqn.params["dimension_numbers"]
    left, right = values
    if repeated or (isinstance(left, LowRank) and isinstance(right, LowRank)):
        return None
    at = 0 if isinstance(left, LowRank) else 1
    if len(contracted[at]) != 1:
        return None
    value, x, axis = values[at], values[1 - at], contracted[1 - at][0]
    near, far = (value.p, value.q) if contracted[at][0] == 0 else (value.q.T, value.p.T)
    options = {k: v for k, v in eqn.params.items() if k != "dimension_numbers"}

    def by(matrix: Array, over: int, other: Array, along: int) -> Array:
        """A product in the order that the original has."""
        if at == 0:
            return lax.dot_general(matrix, other, (((over,), (along,)), ((), ())), **options)
        return lax.dot_general(other, matrix, (((along,), (over,)), ((), ())), **options)

    inner = by(near, 0, x, axis)
    added = by(far, 0, inner, 0 if at == 0 else inner.ndim - 1)
    return [by(value.w, contracted[at][0], x, axis) + value.scale * added]


# Asked where an operand is one; all else forms it.
RULES = {"transpose": transpose, "dot_general": multiply}
