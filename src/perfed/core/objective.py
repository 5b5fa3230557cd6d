"""One client's problem: all that client-side code ever sees.

A method asks an `Objective` for batches, losses, gradients and Hessian-vector products of *this*
client, f_i(w) = (1/n_i) sum_j l(w; x_j, y_j) + (l2/2) |w|^2, and has no way to reach another
client's examples: that is the privacy boundary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, final, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from perfed.core.differences import difference
from perfed.core.errors import require, require_choice
from perfed.core.random import IntLike, permuted, uniform_below
from perfed.core.trees import Params, Scalar, squared_norm

BatchSize = int | Literal["full"]
Sampling = Literal["replacement", "epochs"]
Precision = Literal["float32", "tf32", "bf16"]

# What JAX calls them.
_PRECISIONS: dict[str, str] = {
    "float32": "highest",
    "tf32": "TF32_TF32_F32",
    "bf16": "BF16_BF16_F32",
}

# Examples taken at once when a loss runs over all of a client's data.
BLOCK = 256


class Model(Protocol):
    """Anything with `init` and `apply` is a model."""

    def init(self, key: PRNGKeyArray) -> Params:
        """Fresh parameters."""

    def apply(
        self, params: Params, x: Shaped[Array, "examples ..."]
    ) -> Float[Array, "examples ..."]:
        """The outputs for a batch of inputs."""


class Measure(NamedTuple):
    """How good a model is on a client's examples: means over them.

    Attributes:
        loss: of the task's loss, without the l2 penalty.
        score: of whether the most likely class is right (accuracy), or, where the labels are not
            classes, of the squared error.
    """

    loss: Scalar
    score: Scalar


@final
@dataclass(frozen=True)
class Task:
    """What is learned: a model, the loss of one example, and the weight of the l2 penalty.

    `precision` is that of matrix products: float32, or on accelerators that have them the shorter
    TF32 or bfloat16, which are faster; sums are float32 all the same.
    """

    model: Model
    l2: float = 0.0
    loss: Callable[[Float[Array, "b ..."], Shaped[Array, " b"]], Float[Array, " b"]] | None = None
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        check_precision(self.precision)
        require(0 <= self.l2 < float("inf"), "l2", self.l2, "must be a number, at least 0")

    def example_losses(
        self, params: Params, x: Shaped[Array, "b ..."], y: Shaped[Array, " b"]
    ) -> tuple[Float[Array, " b"], Float[Array, "b ..."]]:
        """l(w; x_j, y_j) of each example, and the model's outputs.

        By default cross-entropy where labels are classes, and the squared error where they are not.
        """
        # Unless one asks for them: short products would drown the differences that Per-FedAvg's
        # Hessian-free variant takes, and results would depend on the device.
        with jax.default_matmul_precision(_PRECISIONS[self.precision]):
            outputs = self.model.apply(params, x)
        usual = cross_entropy if jnp.issubdtype(y.dtype, jnp.integer) else squared_error
        return (self.loss or usual)(outputs, y), outputs


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


class Batch(NamedTuple):
    """Some of a client's examples, by position among its own; `None` stands for all of them."""

    position: Int[Array, "*steps size"] | None


ALL = Batch(None)


@final
@dataclass(frozen=True)
class Examples:
    """One client's examples: a slice of flat arrays that may hold other clients' too.

    The flat arrays let a simulation keep uneven clients side by side without padding and without
    copies; `rows` never leaves the client's own slice, whatever positions it is asked for. Inputs
    are scaled, (x - shift) * scale, and held within -clip..clip, as they are taken.
    """

    _x: Shaped[Array, "total ..."]
    _y: Shaped[Array, " total"]
    _start: IntLike
    size: IntLike
    _scaling: tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, ""]] | None = None

    def rows(
        self, position: Int[Array, " b"]
    ) -> tuple[Shaped[Array, "b ..."], Shaped[Array, " b"]]:
        """The examples at these positions, 0..size-1."""
        row = self._start + jnp.clip(position, 0, self.size - 1)
        x = self._x[row]
        if self._scaling is not None:
            # Only what is taken is scaled: all the rest stays as small as it is stored.
            shift, scale, clip = self._scaling
            x = jnp.clip((x.astype(scale.dtype) - shift) * scale, -clip, clip)
        return x, self._y[row]

    @property
    def block(self) -> int:
        """How many rows to take at once when going through all of them."""
        return min(BLOCK, self._x.shape[0])


@final
@dataclass(frozen=True)
class Objective:
    """f_i of client i, on its own examples."""

    task: Task
    examples: Examples
    sampling: Sampling = "replacement"

    def __post_init__(self) -> None:
        require_choice("sampling", self.sampling, get_args(Sampling))

    def batches(self, key: PRNGKeyArray, steps: tuple[int, ...] | int, size: BatchSize) -> Batch:
        """Batches for `steps` steps, stacked along leading axes.

        `replacement`: every example drawn uniformly and independently, as the theory assumes.
        `epochs`: one random permutation of the client's data after another, cut into batches, so
        that in one call no example comes twice before all have come once; a batch may span two
        permutations, and a client smaller than the batch goes through several in one batch.
        """
        steps = (steps,) if isinstance(steps, int) else steps
        if size == "full":
            return ALL
        shape = (*steps, size)
        n = self.examples.size
        if self.sampling == "replacement":
            return Batch(uniform_below(key, shape, n))
        draw = jnp.arange(math.prod(shape)).reshape(shape)
        return Batch(permuted(key, draw % n, n, epoch=draw // n))

    def loss(self, w: Params, batch: Batch = ALL) -> Scalar:
        """f_i(w; batch)."""
        data: Scalar = self._mean(lambda x, y, use: self._sum(w, x, y, use), batch)
        return data + 0.5 * self.task.l2 * squared_norm(w)

    def grad(self, w: Params, batch: Batch = ALL) -> Params:
        """The gradient of f_i at w on the batch (Per-FedAvg eq. 6)."""
        data = self._mean(lambda x, y, use: jax.grad(self._sum)(w, x, y, use), batch)
        return self._with_l2(data, w)

    def hvp(self, w: Params, v: Params, batch: Batch = ALL) -> Params:
        """The Hessian of f_i at w on the batch, times v: no Hessian is formed."""

        def part(x: Array, y: Array, use: Array) -> Params:
            return jax.jvp(lambda p: jax.grad(self._sum)(p, x, y, use), (w,), (v,))[1]

        return self._with_l2(self._mean(part, batch), v)

    def grad_difference(self, w: Params, by: Params, batch: Batch = ALL) -> Params:
        """The gradient at w + by less that at w - by, both on the batch."""

        def part(x: Array, y: Array, use: Array) -> Params:
            return difference(lambda p: jax.grad(self._sum)(p, x, y, use), w, by)

        twice = jax.tree.map(lambda leaf: 2 * leaf, by)
        return self._with_l2(self._mean(part, batch), twice)

    def measure(self, w: Params) -> Measure:
        """How good w is over all the client's examples."""

        def part(x: Array, y: Array, use: Array) -> Measure:
            losses, outputs = self.task.example_losses(w, x, y)
            if outputs.ndim == 2 and jnp.issubdtype(y.dtype, jnp.integer):
                scores = (jnp.argmax(outputs, axis=-1) == y).astype(losses.dtype)
            elif outputs.size == y.size:
                scores = squared_error(outputs, y)
            else:
                scores = jnp.full(y.shape, jnp.nan)  # only the task's own loss can read these
            return Measure(jnp.sum(use * losses), jnp.sum(use * scores))

        measure: Measure = self._mean(part, ALL)
        return measure

    def _sum(
        self, w: Params, x: Shaped[Array, "b ..."], y: Shaped[Array, " b"], use: Bool[Array, " b"]
    ) -> Scalar:
        losses, _ = self.task.example_losses(w, x, y)
        return jnp.sum(use * losses)

    def _with_l2(self, tree: Params, direction: Params) -> Params:
        if self.task.l2 == 0.0:
            return tree
        return jax.tree.map(lambda t, d: t + self.task.l2 * d, tree, direction)

    def _mean(self, part: Callable[[Array, Array, Array], Any], batch: Batch) -> Any:
        """Sums of `part(x, y, use)` over the batch's examples, divided by their number.

        Over all of a client's data the sum runs block by block, so that clients of any size share
        one compiled program and none is padded to the largest.
        """
        if batch.position is not None:
            x, y = self.examples.rows(batch.position)
            return _divide(part(x, y, jnp.ones(x.shape[0], bool)), x.shape[0])
        block, n = self.examples.block, self.examples.size

        def block_sum(b: Int[Array, ""]) -> Any:
            position = b * block + jnp.arange(block)
            x, y = self.examples.rows(position)
            return part(x, y, position < n)

        total = jax.lax.fori_loop(
            0,
            -(-n // block),
            lambda b, total: jax.tree.map(jnp.add, total, block_sum(b)),
            jax.tree.map(_zeros, jax.eval_shape(block_sum, jnp.int32(0))),
        )
        return _divide(total, n)


def _zeros(like: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(like.shape, like.dtype)


def _divide(tree: Any, n: IntLike) -> Any:
    return jax.tree.map(lambda leaf: leaf / n, tree)
