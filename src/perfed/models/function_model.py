"""A model made of functions; what the adapters of libraries return."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from jaxtyping import PRNGKeyArray

from perfed.core.trees import Params, Path


@final
@dataclass(frozen=True, eq=False)
class FunctionModel:
    """A model made of functions.

    Attributes:
        init: fresh parameters, by a key.
        apply: the outputs for parameters and a batch. If it takes a `key`, then one is given in
            training and none in evaluation; if it takes `frozen`, it gets those leaves.
        is_state: which leaves are running statistics, as of batch normalization. In training
            `apply` then returns the outputs and the parameters with these renewed.
        frozen: leaves that are neither trained nor sent.
        write_back: a module of the user's own library with these parameters.
    """

    init: Callable[[PRNGKeyArray], Params]
    apply: Callable[..., Any]
    is_state: Callable[[Path], bool] | None = None
    frozen: Params | None = None
    write_back: Callable[[Params], Any] | None = None
