"""A traced model, operation by operation, each as it is or as something faster."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jaxtyping import Array

from perfed.core.jaxprs import bind, contains, evaluate, is_relu
from perfed.core.rewriting import layouts, low_rank
from perfed.core.rewriting.convolution import Convolution, convolve, rows_of
from perfed.core.rewriting.layouts import Laid, Value, in_order, laid
from perfed.core.rewriting.low_rank import LowRank
from perfed.core.rewriting.narrowing import narrow
from perfed.core.rewriting.softmax import with_softmax
from perfed.core.rewriting.windows import Pool, Window, pool_max, pool_min, pool_sum


def rewrite(apply: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, computed by operations that are fast for many clients at once.

    It is always to be called with the same default precision of products.
    """
    # Models of other libraries take long to trace, and one program traces them several times.
    traced: dict[Any, tuple[ClosedJaxpr, Any]] = {}

    @wraps(apply)
    def rewritten(*args: Any, **options: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, options))
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        types = tuple(jax.typeof(leaf) for leaf in leaves)
        if (key := (structure, types)) not in traced:

            def flat(*leaves: Array) -> Any:
                args, options = jax.tree.unflatten(structure, leaves)
                return apply(*args, **options)

            jaxpr, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
            found = jaxpr, jax.tree.structure(shapes)
            if any(isinstance(const, jax.core.Tracer) for const in jaxpr.consts):
                return jax.tree.unflatten(found[1], _evaluated(found[0], *leaves))
            traced[key] = narrow(jaxpr), found[1]
        closed, results = traced[key]
        return jax.tree.unflatten(results, _evaluated(closed, *leaves))

    return rewritten


def _evaluated(closed: ClosedJaxpr, *values: Value) -> list[Array]:
    """What a traced function gives."""
    return [plain(value) for value in _values(closed, values)]


def _values(closed: ClosedJaxpr, values: Sequence[Value]) -> list[Value]:
    """The same, in any order."""
    return evaluate(with_softmax(closed.jaxpr), closed.consts, values, _apply)


def plain(value: Value) -> Array:
    """A value as the model has it."""
    if isinstance(value, Laid):
        return in_order(value, range(len(value.order)))
    return value.formed() if isinstance(value, LowRank) else value


def _apply(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """One operation."""
    name = eqn.primitive.name
    found = None
    if name in INLINED:
        return _inlined(eqn, values)
    if any(isinstance(v, LowRank) for v in values):
        rule = low_rank.RULES.get(name)
        if rule is not None:
            found = rule(eqn, [v if isinstance(v, LowRank) else plain(v) for v in values])
        if found is None:
            values = [plain(v) if isinstance(v, LowRank) else v for v in values]
    if found is None and name in REWRITTEN:
        found = REWRITTEN[name](eqn, values)
    if found is None and name in layouts.RULES and any(isinstance(v, Laid) for v in values):
        found = layouts.RULES[name](eqn, values)
    return list(bind(eqn, [plain(v) for v in values])) if found is None else found


def _convolution(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value] | None:
    """A convolution, in one order whatever the model's is."""
    if not is_plain_convolution(eqn):
        return None
    params, (x, kernel) = eqn.params, values
    numbers = params["dimension_numbers"]
    batch, depth, *space = numbers.lhs_spec
    sizes = numbers.rhs_spec[2:]
    windows = [
        Window(kernel.shape[size], stride, low, high, apart, spread)
        for size, stride, (low, high), apart, spread in zip(
            sizes,
            params["window_strides"],
            params["padding"],
            params["rhs_dilation"],
            params["lhs_dilation"],
            strict=True,
        )
    ]
    matrix = rows_of(plain(kernel), numbers.rhs_spec)
    how = Convolution(tuple(windows), params["precision"])
    found = convolve(
        in_order(x, (depth, *space, batch)), matrix, how, params["feature_group_count"]
    )
    batch, depth, *space = numbers.out_spec
    wanted: Any = eqn.outvars[0].aval
    return [laid(found.astype(wanted.dtype), (depth, *space, batch))]


def is_plain_convolution(eqn: JaxprEqn) -> bool:
    """Whether a convolution is of real numbers, and not over groups of examples."""
    types: list[Any] = [atom.aval for atom in eqn.invars]
    real = all(jnp.issubdtype(one.dtype, jnp.floating) for one in types)
    return bool(real and eqn.params["batch_group_count"] == 1)


def _pooling(eqn: JaxprEqn, values: Sequence[Value], *, pool: Pool) -> list[Value] | None:
    """The largest, smallest or sum in each place of a window."""
    (value,), params = values, eqn.params
    order = value.order if isinstance(value, Laid) else tuple(range(jnp.ndim(value)))
    names = ("window_dimensions", "window_strides", "window_dilation", "base_dilation")
    sizes, strides, apart, spread = (params[name] for name in names)
    windows = [
        Window(sizes[a], strides[a], low, high, apart[a], spread[a])
        for a, (low, high) in ((a, params["padding"][a]) for a in order)
    ]
    return [laid(pool(in_order(value, order), windows), order)]


def _inlined(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value]:
    """A function within: its operations."""
    if eqn.params.get("name") == low_rank.NAME:
        return [LowRank(*map(plain, values))]
    return _values(eqn.params["jaxpr"], values)


def _checkpoint(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value] | None:
    """A part of which only what goes in is kept for the gradient."""
    closed = ClosedJaxpr(eqn.params["jaxpr"], ())
    options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    return list(jax.checkpoint(partial(_evaluated, closed), **options)(*map(plain, values)))


def _scan(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value] | None:
    """A loop with a known end."""
    params = eqn.params
    if not contains(params["jaxpr"].jaxpr, REWRITTEN.keys() - {"custom_jvp_call", "scan"}):
        return None
    consts, carries = _fixed_and_carried(params)
    arrays = [plain(value) for value in values]
    fixed, first, each = arrays[:consts], arrays[consts : consts + carries], arrays[consts:]

    def step(carry: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
        found = _evaluated(params["jaxpr"], *fixed, *carry, *x)
        return found[:carries], found[carries:]

    last, found = lax.scan(
        step,
        first,
        each[carries:],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*last, *found]


def _fixed_and_carried(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many operands of a loop stay the same, and how many go from step to step."""
    # JAX 0.11 has a tree of the operands in place of the two numbers.
    if "ft_in" in params:
        fixed, carried, _ = params["ft_in"].unpack()
        return len(fixed), len(carried)
    return params["num_consts"], params["num_carry"]


def _relu(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value] | None:
    """JAX's own ReLU; other functions with a derivative of their own stay as they are."""
    if not is_relu(eqn) or not isinstance(values[0], Laid):
        return None
    return [Laid(jax.nn.relu(values[0].array), values[0].order)]


# Functions that are called as they stand.
INLINED = frozenset({"closed_call", "jit", "pjit"})
REWRITTEN: dict[str, layouts.Rule] = {
    "checkpoint": _checkpoint,
    "conv_general_dilated": _convolution,
    "custom_jvp_call": _relu,
    "reduce_window_max": partial(_pooling, pool=pool_max),
    "reduce_window_min": partial(_pooling, pool=pool_min),
    "reduce_window_sum": partial(_pooling, pool=pool_sum),
    "remat2": _checkpoint,
    "scan": _scan,
}
