"""What becomes of a model: what stays as it is, and how much memory its values take."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, final

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from perfed.core.jaxprs import inner_jaxprs, is_relu
from perfed.core.rewriting.interpreter import is_plain_convolution

# What is looked into; operations within any others stay.
_ENTERED = frozenset({"jit", "pjit", "closed_call", "checkpoint", "remat2", "scan"})
_SLOW = frozenset({"conv_general_dilated", "reduce_window", "select_and_gather_add"})
# Operations a second of what XLA does as naive loops.
_NAIVE = 2e9
_POOLING = frozenset({"reduce_window_max", "reduce_window_min", "reduce_window_sum"})


@final
@dataclass(frozen=True)
class Review:
    """What a model does with a batch.

    Attributes:
        kept: what stays as it is although it is slow for many clients, each with the operations
            (multiplications and additions) of a batch.
        bytes: of all values on the way to the outputs.
    """

    kept: tuple[tuple[str, int], ...]
    bytes: int

    def __str__(self) -> str:
        return "; ".join(f"{name} ({count / 1e6:.1f} MFLOP a batch)" for name, count in self.kept)

    @property
    def caution(self) -> str:
        """What a log says of it; "": nothing."""
        if not self.kept:
            return ""
        # There and back, as many again for the inputs and for the kernel.
        seconds = 3 * sum(count for _, count in self.kept) / _NAIVE
        return (
            f"slow operations of the model stay as they are: {self}; on a CPU they take about "
            f"{1e3 * seconds:.3g} ms a batch (docs/models.md)"
        )


def review(rewritten: Callable[..., Any], *args: Any, **options: Any) -> Review:
    """What `rewrite` has made of a model, for a batch of these shapes."""
    apply = rewritten.__wrapped__  # type: ignore[attr-defined]
    kept = tuple(_kept(jax.make_jaxpr(apply)(*args, **options).jaxpr))
    return Review(kept, _bytes(jax.make_jaxpr(rewritten)(*args, **options).jaxpr))


def _kept(jaxpr: Jaxpr, within: str = "") -> Iterator[tuple[str, int]]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        pooling = name in _POOLING and within
        if pooling or (name in _SLOW and (within or name != "conv_general_dilated")):
            yield name + within, _operations(eqn)
        elif name == "conv_general_dilated" and not is_plain_convolution(eqn):
            yield f"{name} over groups of examples or complex numbers", _operations(eqn)
        if name == "custom_jvp_call" and is_relu(eqn):
            continue
        inside = within if name in _ENTERED else f" within {name}"
        for inner in inner_jaxprs(eqn):
            yield from _kept(inner, inside)


def _operations(eqn: JaxprEqn) -> int:
    """Multiplications and additions."""
    places = prod(_shape(eqn.outvars[0]))
    if eqn.primitive.name == "conv_general_dilated":
        kernel = _shape(eqn.invars[1])
        outputs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return int(2 * places * prod(kernel) // outputs)
    return int(places * prod(eqn.params.get("window_dimensions", ())))


def _bytes(jaxpr: Jaxpr) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        inner = inner_jaxprs(eqn)
        if inner:
            total += int(eqn.params.get("length", 1)) * sum(map(_bytes, inner))
        else:
            total += sum(map(_size, eqn.outvars))
    return total


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(variable.aval.shape)


def _size(variable: Any) -> int:
    size = getattr(variable.aval.dtype, "itemsize", 0)  # keys have none
    return prod(_shape(variable)) * int(size)
