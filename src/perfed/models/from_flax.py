"""Flax (linen) modules as models."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, Shaped

from perfed.core.errors import FieldError
from perfed.core.trees import Params, Path
from perfed.models.extras import Output, flattened, nested, select_output
from perfed.models.function_model import FunctionModel

# What modules call the argument that tells training from evaluation; and the same reversed.
_TRAINING, _EVALUATION = ("train", "training", "is_training"), ("deterministic",)
_STATISTICS = "batch_stats"


def from_flax(
    module: Any, example: Shaped[Array, "b ..."], *, output: Output = None
) -> FunctionModel:
    """A Flax (linen) module as a model.

    Where its `__call__` has an argument `train`, `training`, `is_training` or `deterministic`, it
    is set by what the model does; dropout is drawn from the key of the batch. `batch_stats` are
    running statistics, see `perfed.Task`, beside the parameters of their layers.

    Args:
        module: the module.
        example: an input batch, for its shapes only.
        output: what the model gives of all that the module returns: a key, an attribute, or a
            function; None: all its arrays.

    Returns:
        The model. Its `write_back(params)` is the module bound to these weights.
    """
    name = type(module).__name__
    options = _modes(module)

    def init(key: PRNGKeyArray) -> Params:
        streams = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        return _merged(module.init(streams, example, **options(False)), name)

    state = _statistics(module, example, options(False), name)

    def apply(params: Params, x: Shaped[Array, "b ..."], key: PRNGKeyArray | None = None) -> Any:
        variables = _divided(params, state)
        if key is None:
            return select_output(_evaluated(module, variables, x, options(False)), output, name)
        streams = {"dropout": key}
        if not state:
            outputs = module.apply(variables, x, rngs=streams, **options(True))
            return select_output(outputs, output, name)
        outputs, after = module.apply(
            variables, x, rngs=streams, mutable=[_STATISTICS], **options(True)
        )
        return select_output(outputs, output, name), _merged(variables | after, name)

    def write_back(params: Params) -> Any:
        return module.bind(_divided(params, state))

    is_state = state.__contains__ if state else None
    return FunctionModel(init, apply, is_state, None, write_back)


def _modes(module: Any) -> Callable[[bool], dict[str, bool]]:
    """The argument that tells a module whether it is trained, if it has one."""
    named = inspect.signature(type(module).__call__).parameters
    for names, when_training in ((_TRAINING, True), (_EVALUATION, False)):
        for found in (n for n in names if n in named):
            return lambda training: {found: training == when_training}
    return lambda training: {}


def _statistics(module: Any, example: Any, options: dict[str, bool], name: str) -> frozenset[Path]:
    """The places of the running statistics."""
    key = jax.random.key(0)
    shapes = jax.eval_shape(
        lambda: module.init({"params": key, "dropout": key}, example, **options)
    )
    _merged(shapes, name)  # checked at once
    return frozenset(flattened(_plain(shapes.get(_STATISTICS, {}))))


def _merged(variables: Any, name: str) -> Params:
    """Parameters and running statistics as one tree."""
    extra = sorted(set(variables) - {"params", _STATISTICS})
    if extra:
        allowed = (
            f"keeps {', '.join(extra)} beside parameters and batch_stats, which nothing here would "
            "carry from batch to batch; use a module without it"
        )
        raise FieldError("module", name, allowed)
    params, statistics = (
        flattened(_plain(variables.get(part, {}))) for part in ("params", _STATISTICS)
    )
    both = sorted(set(params) & set(statistics))
    if both:
        allowed = "is the name of a parameter and of a running statistic; rename one"
        raise FieldError("module", f"{'.'.join(both[0])} of {name}", allowed)
    return nested(params | statistics)


def _divided(params: Params, state: frozenset[Path]) -> dict[str, Params]:
    """The collections that Flax wants."""
    leaves = flattened(params)
    found = {"params": nested({p: v for p, v in leaves.items() if p not in state})}
    if state:
        found[_STATISTICS] = nested({p: leaves[p] for p in state})
    return found


def _plain(tree: Any) -> Any:
    """Dictionaries of arrays, without the boxes that some modules put them in."""
    import flax.linen

    return flax.linen.meta.unbox(flax.core.unfreeze(tree))


def _evaluated(module: Any, variables: Any, x: Any, options: dict[str, bool]) -> Any:
    from flax.errors import InvalidRngError, ModifyScopeVariableError

    try:
        return module.apply(variables, jnp.asarray(x), **options)
    except (InvalidRngError, ModifyScopeVariableError) as error:
        allowed = (
            "is in training mode in evaluation, too; give its __call__ an argument train or "
            "deterministic, and pass it on to dropout and batch normalization"
        )
        raise FieldError("module", type(module).__name__, allowed) from error
