"""One client's problem: all that client-side code ever sees.

A method asks an `Objective` for batches, losses, gradients and Hessian-vector products of *this*
client, f_i(w) = (1/n_i) sum_j l(w; x_j, y_j) + (l2/2) |w|^2, and has no way to reach another
client's examples: that is the privacy boundary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, final, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from perfed.core.differences import difference
from perfed.core.errors import FieldError, require_choice
from perfed.core.random import IntLike, permuted, uniform_below
from perfed.core.task import Task, squared_error
from perfed.core.trees import Params, Scalar, combine, matching, squared_norm

BatchSize = int | Literal["full"]
Sampling = Literal["replacement", "epochs"]

# Examples taken at once when a loss runs over all of a client's data.
BLOCK = 256

# What the keys of a model in training are folded from those of its batches by.
_IN_TRAINING = 1


class Measure(NamedTuple):
    """How good a model is on a client's examples: means over them.

    Attributes:
        loss: of the task's loss, without the l2 penalty.
        score: of whether the most likely class is right (accuracy), or, where the labels are not
            classes, of the squared error.
    """

    loss: Scalar
    score: Scalar


class Batch(NamedTuple):
    """Some of a client's examples, by position among its own; `None` stands for all of them.

    A model that is random, or otherwise different in training, is so by `key`; without one it is
    evaluated.
    """

    position: Int[Array, "*steps size"] | None
    key: PRNGKeyArray | None = None

    def at(self, j: IntLike) -> "Batch":
        """One of several."""
        batch: Batch = jax.tree.map(lambda leaf: leaf[j], self)
        return batch


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
    _sampled: tuple[PRNGKeyArray, IntLike] | None = None

    def rows(
        self, position: Int[Array, " b"]
    ) -> tuple[Shaped[Array, "b ..."], Shaped[Array, " b"]]:
        """The examples at these positions, 0..size-1."""
        own = jnp.clip(position, 0, self.size - 1)
        if self._sampled is not None:
            own = permuted(self._sampled[0], own, self._sampled[1])
        row = self._start + own
        x = self._x[row]
        if self._scaling is not None:
            # Only what is taken is scaled: all the rest stays as small as it is stored.
            shift, scale, clip = self._scaling
            x = jnp.clip((x.astype(scale.dtype) - shift) * scale, -clip, clip)
        return x, self._y[row]

    def sample(self, key: PRNGKeyArray, fraction: float | Array) -> "Examples":
        """A random part of these examples: the first of them in a random order."""
        size = jnp.clip(jnp.ceil(fraction * self.size).astype(int), 1, self.size)
        return replace(self, size=size, _sampled=(key, self.size))

    @property
    def block(self) -> int:
        """How many rows to take at once when going through all of them."""
        return min(BLOCK, self._x.shape[0])


@final
@dataclass(frozen=True)
class Objective:
    """f_i of client i, on its own examples.

    Attributes:
        task: model and loss.
        examples: the client's.
        sampling: how batches are drawn.
        model_state: the model's running statistics, if it has any; None at its other leaves. The
            parameters w have them only where they are scored.
        frozen: leaves of the model that are not trained; None: the model's own, if it has any.
        logit_offset: what is added to each class's logit before the loss; None: nothing.
    """

    task: Task
    examples: Examples
    sampling: Sampling = "replacement"
    model_state: Params | None = None
    frozen: Params | None = None
    logit_offset: Float[Array, " classes"] | None = None

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
        keys = None
        if self.task.is_random:
            keys = jax.random.split(jax.random.fold_in(key, _IN_TRAINING), steps)
        if size == "full":
            if self.task.is_state is not None:
                allowed = (
                    "the model normalizes by the statistics of a batch, which all of a client's "
                    'data are too many for; give a number, such as adapt_batch = 32 for "full"'
                )
                raise FieldError("batch", size, allowed)
            return Batch(None, keys)
        shape = (*steps, size)
        n = self.examples.size
        if self.sampling == "replacement":
            return Batch(uniform_below(key, shape, n), keys)
        draw = jnp.arange(math.prod(shape)).reshape(shape)
        return Batch(permuted(key, draw % n, n, epoch=draw // n), keys)

    def loss(self, w: Params, batch: Batch = ALL) -> Scalar:
        """f_i(w; batch)."""
        data: Scalar = self._mean(lambda *rows: self._sum(w, *rows), batch)
        return data + 0.5 * self.task.l2 * squared_norm(w)

    def grad(self, w: Params, batch: Batch = ALL) -> Params:
        """The gradient of f_i at w on the batch (Per-FedAvg eq. 6)."""
        data = self._mean(lambda *rows: jax.grad(self._sum)(w, *rows), batch)
        return self._with_l2(data, w)

    def hvp(self, w: Params, v: Params, batch: Batch = ALL) -> Params:
        """The Hessian of f_i at w on the batch, times v: no Hessian is formed."""

        def part(*rows: Any) -> Params:
            return jax.jvp(lambda p: jax.grad(self._sum)(p, *rows), (w,), (v,))[1]

        return self._with_l2(self._mean(part, batch), v)

    def grad_difference(self, w: Params, by: Params, batch: Batch = ALL) -> Params:
        """The gradient at w + by less that at w - by, both on the batch."""

        def part(*rows: Any) -> Params:
            return difference(lambda p: jax.grad(self._sum)(p, *rows), w, by)

        twice = jax.tree.map(lambda leaf: 2 * leaf, by)
        return self._with_l2(self._mean(part, batch), twice)

    def measure(self, w: Params) -> Measure:
        """How good w is over all the client's examples."""

        def part(x: Array, y: Array, use: Array, key: PRNGKeyArray | None) -> Measure:
            losses, outputs = self._losses(w, x, y, key)
            if outputs.ndim == 2 and jnp.issubdtype(y.dtype, jnp.integer):
                scores = (jnp.argmax(outputs, axis=-1) == y).astype(losses.dtype)
            elif outputs.size == y.size:
                scores = squared_error(outputs, y)
            else:
                scores = jnp.full(y.shape, jnp.nan)  # only the task's own loss can read these
            return Measure(jnp.sum(use * losses), jnp.sum(use * scores))

        measure: Measure = self._mean(part, ALL)
        return measure

    def class_frequencies(self, w: Params) -> Float[Array, " classes"]:
        """How often each class is among the client's labels; w gives the number of classes."""

        def part(x: Array, y: Array, use: Array, key: PRNGKeyArray | None) -> Array:
            classes = jax.eval_shape(lambda: self._losses(w, x, y, key)[1]).shape[-1]
            return (use[:, None] * jax.nn.one_hot(y, classes)).sum(0)

        frequencies: Array = self._mean(part, ALL)
        return frequencies

    def balanced(self, w: Params) -> "Objective":
        """The same with the balanced softmax loss (Ren et al., NeurIPS 2020).

        The log of the client's own class frequencies is added to the logits in training, so that
        the logits themselves are those of balanced classes. A class that the client does not have
        gets no gradient.
        """
        return replace(self, logit_offset=jnp.log(self.class_frequencies(w)))

    def sample(self, key: PRNGKeyArray, fraction: float | Array) -> "Objective":
        """The same on a random part of the client's examples, at least one."""
        return replace(self, examples=self.examples.sample(key, fraction))

    def renewed_state(
        self, w: Params, key: PRNGKeyArray, steps: int, size: BatchSize
    ) -> Params | None:
        """The model's running statistics after so many batches more, with the parameters w."""
        if self.model_state is None or steps == 0:
            return self.model_state

        def step(model_state: Params, batch: Batch) -> tuple[Params, None]:
            assert batch.position is not None
            x, _ = self.examples.rows(batch.position)
            after = self.task.renewed(combine(w, model_state), x, batch.key, self.frozen)
            return matching(model_state, after), None

        return jax.lax.scan(step, self.model_state, self.batches(key, steps, size))[0]

    def _losses(
        self, w: Params, x: Array, y: Array, key: PRNGKeyArray | None
    ) -> tuple[Array, Array]:
        whole = combine(w, self.model_state)
        return self.task.example_losses(whole, x, y, key, self.frozen, self.logit_offset)

    def _sum(
        self,
        w: Params,
        x: Shaped[Array, "b ..."],
        y: Shaped[Array, " b"],
        use: Bool[Array, " b"],
        key: PRNGKeyArray | None,
    ) -> Scalar:
        losses, _ = self._losses(w, x, y, key)
        return jnp.sum(use * losses)

    def _with_l2(self, tree: Params, direction: Params) -> Params:
        if self.task.l2 == 0.0:
            return tree
        return jax.tree.map(lambda t, d: t + self.task.l2 * d, tree, direction)

    def _mean(self, part: Callable[..., Any], batch: Batch) -> Any:
        """Sums of `part(x, y, use, key)` over the batch's examples, divided by their number.

        Over all of a client's data the sum runs block by block, so that clients of any size share
        one compiled program and none is padded to the largest.
        """
        if batch.position is not None:
            x, y = self.examples.rows(batch.position)
            return _divide(part(x, y, jnp.ones(x.shape[0], bool), batch.key), x.shape[0])
        block, n = self.examples.block, self.examples.size

        def block_sum(b: Int[Array, ""]) -> Any:
            position = b * block + jnp.arange(block)
            x, y = self.examples.rows(position)
            key = None if batch.key is None else jax.random.fold_in(batch.key, b)
            return part(x, y, position < n, key)

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
