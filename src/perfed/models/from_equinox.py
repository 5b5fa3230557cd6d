"""Equinox modules as models."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from perfed.core.task import Model
from perfed.core.trees import Params
from perfed.models.function_model import FunctionModel


def from_equinox(build: Callable[[PRNGKeyArray], Any]) -> Model:
    """An Equinox module as a model; `build(key)` makes one that takes a single example."""
    import equinox

    def split(key: PRNGKeyArray) -> tuple[Any, Any]:
        parts: tuple[Any, Any] = equinox.partition(build(key), equinox.is_inexact_array)
        return parts

    _, structure = split(jax.random.key(0))

    def apply(params: Params, x: Shaped[Array, "b ..."]) -> Float[Array, "b ..."]:
        outputs: Array = jax.vmap(equinox.combine(params, structure))(x)
        return outputs

    return FunctionModel(lambda key: split(key)[0], apply)
