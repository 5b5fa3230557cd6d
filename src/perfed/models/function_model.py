"""A model made of two functions; what the adapters of libraries return."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from jaxtyping import PRNGKeyArray

from perfed.core.trees import Params


@final
@dataclass(frozen=True)
class FunctionModel:
    """A model made of two functions."""

    init: Callable[[PRNGKeyArray], Params]
    apply: Callable[[Params, Any], Any]
