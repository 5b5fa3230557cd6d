"""Flax modules as models."""

from typing import Any

from jaxtyping import Array, PRNGKeyArray, Shaped

from perfed.core.task import Model
from perfed.core.trees import Params
from perfed.models.function_model import FunctionModel


def from_flax(module: Any, example: Shaped[Array, "b ..."]) -> Model:
    """A Flax (linen) module as a model; `example` is an input batch, for its shapes only."""

    def init(key: PRNGKeyArray) -> Params:
        variables = module.init(key, example)
        extra = sorted(set(variables) - {"params"})
        if extra:
            raise ValueError(
                f"{type(module).__name__} keeps state outside its parameters ({', '.join(extra)}), "
                "as batch normalization does; clients exchange parameters only. Use layer or group "
                "normalization instead"
            )
        return variables["params"]

    return FunctionModel(init, lambda params, x: module.apply({"params": params}, x))
