"""Equinox modules as models."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, PRNGKeyArray, Shaped

from perfed.core.errors import FieldError, require
from perfed.core.trees import Params
from perfed.models.extras import Output, select_output
from perfed.models.function_model import FunctionModel


def from_equinox(build: Callable[[PRNGKeyArray], Any], *, output: Output = None) -> FunctionModel:
    """An Equinox module as a model.

    Where its `__call__` has an argument `key`, each example gets one in training, as for dropout;
    in evaluation the module is in inference mode.

    Args:
        build: makes a module by a key; the module takes a single example.
        output: what the model gives of all that the module returns: a key, an attribute, or a
            function; None: all its arrays.

    Returns:
        The model. Its `write_back(params)` is a module with these weights.
    """
    import equinox

    def split(key: PRNGKeyArray) -> tuple[Any, Any]:
        parts: tuple[Any, Any] = equinox.partition(_checked(build(key)), equinox.is_inexact_array)
        return parts

    _, structure = split(jax.random.key(0))
    name, takes_key = type(structure).__name__, _takes_key(structure)

    def apply(params: Params, x: Shaped[Array, "b ..."], key: PRNGKeyArray | None = None) -> Any:
        module = equinox.combine(params, structure)
        module = equinox.nn.inference_mode(module, value=key is None)
        if key is None or not takes_key:
            return select_output(jax.vmap(module)(x), output, name)
        keys = jax.random.split(key, x.shape[0])
        return select_output(jax.vmap(lambda one, own: module(one, key=own))(x, keys), output, name)

    return FunctionModel(
        lambda key: split(key)[0],
        apply,
        write_back=lambda params: equinox.combine(params, structure),
    )


def _checked(module: Any) -> Any:
    """The module, if it keeps no state."""
    import equinox

    parts = module if isinstance(module, tuple) else (module,)
    is_state = (equinox.nn.State, equinox.nn.StateIndex)
    leaves = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, is_state))
    if any(isinstance(node, is_state) for node in leaves):
        allowed = (
            "keeps state outside its parameters, as equinox.nn.BatchNorm does; use layer or group "
            "normalization, or the same network from Flax, Keras or PyTorch"
        )
        raise FieldError("build", type(parts[0]).__name__, allowed)
    require(callable(module), "build", type(module).__name__, "must make an equinox.Module")
    return module


def _takes_key(module: Any) -> bool:
    try:
        return "key" in inspect.signature(type(module).__call__).parameters
    except (TypeError, ValueError):
        return False
