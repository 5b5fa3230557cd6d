"""What is learned: a model, and the loss of one example."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, final, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from perfed.core.errors import require, require_choice
from perfed.core.rewriting import Review, review, rewrite
from perfed.core.trees import Params, Path

Precision = Literal["float32", "tf32", "bf16"]

# What JAX calls them.
PRECISIONS: dict[str, str] = {
    "float32": "highest",
    "tf32": "TF32_TF32_F32",
    "bf16": "BF16_BF16_F32",
}


class Model(Protocol):
    """Anything with `init` and `apply` is a model.

    Four more things are found by name, where a model has them:

    - `apply` may take a `key`. It gets one in training, as for dropout, and None in evaluation.
    - `is_state(path)` tells which leaves are running statistics, as of batch normalization.
      In training `apply` then returns the outputs and the parameters with these renewed.
    - `frozen` is a tree that is neither trained nor sent; `apply` takes it by that name.
    - `head` names the leaves of its last layer, as `out`: what methods call the head.
    """

    def init(self, key: PRNGKeyArray) -> Params:
        """Fresh parameters."""

    def apply(
        self, params: Params, x: Shaped[Array, "examples ..."]
    ) -> Float[Array, "examples ..."]:
        """The outputs for a batch of inputs."""


@final
@dataclass(frozen=True)
class Task:
    """What is learned: a model, the loss of one example, and the weight of the l2 penalty.

    Attributes:
        model: the model.
        l2: the weight of the penalty.
        loss: the losses of a batch from the model's outputs and the labels. By default
            cross-entropy where labels are classes, and the squared error where they are not.
        precision: that of matrix products: float32, or on accelerators that have them the shorter
            TF32 or bfloat16, which are faster; sums are float32 all the same.
        output: which output is scored, where a model has several: a key, a position, or a function
            of all. The default loss is of this one, a loss of one's own gets all.
    """

    model: Model
    l2: float = 0.0
    loss: Callable[[Any, Shaped[Array, " b"]], Float[Array, " b"]] | None = None
    precision: Precision = "float32"
    output: str | int | Callable[[Any], Array] | None = None

    def __post_init__(self) -> None:
        check_precision(self.precision)
        require(0 <= self.l2 < float("inf"), "l2", self.l2, "must be a number, at least 0")

    @cached_property
    def is_random(self) -> bool:
        """Whether the model draws random numbers in training, or is otherwise different there."""
        return bool(getattr(self.model, "is_random", _takes(self.model, "key")))

    @cached_property
    def is_state(self) -> Callable[[Path], bool] | None:
        """Which leaves are running statistics; None: the model has none."""
        return getattr(self.model, "is_state", None)

    @property
    def frozen(self) -> Params | None:
        """What of the model is neither trained nor sent."""
        return getattr(self.model, "frozen", None)

    @property
    def head(self) -> tuple[str, ...] | None:
        """The names of the leaves that are the model's head; None: the model does not say."""
        head = getattr(self.model, "head", None)
        if isinstance(head, str):
            return (head,)
        named = isinstance(head, tuple) and all(isinstance(name, str) for name in head)
        return head if named else None

    def outputs(
        self,
        params: Params,
        x: Shaped[Array, "b ..."],
        key: PRNGKeyArray | None = None,
        frozen: Params | None = None,
    ) -> Any:
        """All that the model gives for a batch; in training, where there is a key."""
        return self._run(params, x, key, frozen)[0]

    def renewed(
        self,
        params: Params,
        x: Shaped[Array, "b ..."],
        key: PRNGKeyArray | None,
        frozen: Params | None = None,
    ) -> Params:
        """The parameters with running statistics as they are after a batch in training."""
        return self._run(params, x, key, frozen)[1]

    def example_losses(
        self,
        params: Params,
        x: Shaped[Array, "b ..."],
        y: Shaped[Array, " b"],
        key: PRNGKeyArray | None = None,
        frozen: Params | None = None,
        logit_offset: Float[Array, " classes"] | None = None,
    ) -> tuple[Float[Array, " b"], Float[Array, "b ..."]]:
        """l(w; x_j, y_j) of each example, and the output that is scored.

        An offset is added to the output first; it is for the default loss.
        """
        outputs = self.outputs(params, x, key, frozen)
        scored = self.scored(outputs)
        if logit_offset is not None:
            scored = scored + logit_offset
        if self.loss is not None:
            return self.loss(outputs, y), scored
        usual = cross_entropy if jnp.issubdtype(y.dtype, jnp.integer) else squared_error
        return usual(scored, y), scored

    def scored(self, outputs: Any) -> Float[Array, "b ..."]:
        """The output that is scored."""
        match self.output:
            case None:
                found = outputs
            case str() | int():
                found = outputs[self.output]
            case _:
                found = self.output(outputs)
        what = "chooses no array among the model's outputs; name one, or give a function of them"
        require(hasattr(found, "shape"), "output", self.output, what)
        scored: Array = found
        return scored

    def options(self, key: Any, frozen: Params | None) -> dict[str, Any]:
        """What `apply` takes beside parameters and inputs."""
        options = {"key": key} if self.is_random and key is not None else {}
        if self.frozen is not None:
            options["frozen"] = self.frozen if frozen is None else frozen
        return options

    def review(self, params: Params, x: Any) -> Review:
        """What the model does with a batch in training; only shapes are read."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        with jax.default_matmul_precision(PRECISIONS[self.precision]):
            return review(self._apply, params, x, **self.options(key, self.frozen))

    @cached_property
    def _apply(self) -> Callable[..., Any]:
        return rewrite(self.model.apply)

    def _run(
        self,
        params: Params,
        x: Shaped[Array, "b ..."],
        key: PRNGKeyArray | None,
        frozen: Params | None,
    ) -> tuple[Any, Params]:
        """The outputs, and the parameters after it."""
        # Unless one asks for them: short products would drown the differences that Per-FedAvg's
        # Hessian-free variant takes, and results would depend on the device.
        with jax.default_matmul_precision(PRECISIONS[self.precision]):
            found = self._apply(params, x, **self.options(key, frozen))
        if self.is_state is None or key is None:
            return found, params
        outputs, after = found
        return outputs, after


def _takes(model: Model, name: str) -> bool:
    """Whether the model's `apply` has an argument of this name."""
    try:
        return name in inspect.signature(model.apply).parameters
    except (TypeError, ValueError):  # written in another language
        return False


def check_precision(precision: Precision) -> None:
    """Raise unless products can be computed so here."""
    require_choice("precision", precision, get_args(Precision))
    fits = precision == "float32" or jax.default_backend() != "cpu"
    require(fits, "precision", precision, "is for accelerators; on a CPU products are float32")


def cross_entropy(logits: Float[Array, "b classes"], y: Int[Array, " b"]) -> Float[Array, " b"]:
    """-log softmax(logits)[y]."""
    # Classes first, for the sake of the products around it (see `models`); and a comparison instead
    # of an index, whose derivative would be a scatter: slow in a vmap.
    by_class = logits.T
    chosen = jnp.where(y == jnp.arange(len(by_class))[:, None], by_class, 0.0).sum(0)
    largest = jax.lax.stop_gradient(by_class).max(0)
    return jnp.log(jnp.exp(by_class - largest).sum(0)) + largest - chosen


def squared_error(
    outputs: Float[Array, "b 1"] | Float[Array, " b"], y: Float[Array, " b"]
) -> Float[Array, " b"]:
    """(output - y)^2."""
    return (outputs.reshape(y.shape) - y) ** 2
