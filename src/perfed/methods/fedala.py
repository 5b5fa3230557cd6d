"""FedALA (Zhang, Hua, Wang, Song, Xue, Ma, Guan, AAAI 2023): adaptive local aggregation.

A client does not begin a round at the global model, but between its own last model and the global
one, element by element: where along the way is learned from its data (the ALA module).
"""

from typing import ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from perfed.core.errors import require
from perfed.core.objective import BatchSize, Objective
from perfed.core.trees import Params, Patterns, combine, is_any_named, split, squared_norm, tree_sub
from perfed.methods.base import (
    ClientState,
    LocalUpdate,
    Method,
    Received,
    RoundContext,
    batch_examples,
    method,
)
from perfed.methods.heads import HEAD
from perfed.methods.settings import Rate, Weight
from perfed.methods.steps import local_sgd

# How many losses the authors' code measures convergence by.
WINDOW = 10


class ALAState(NamedTuple):
    """What a client keeps.

    Attributes:
        theta: Theta_i, its model after its last local update.
        weights: W_i of the higher layers.
        learned: whether the weights have been trained until convergence.
    """

    theta: Params
    weights: Params
    learned: Bool[Array, ""]


_Carry = tuple[Int[Array, ""], Params, Float[Array, " window"]]


@final
@method("fedala")
class FedALA(Method):
    """FedALA, Algorithm 1.

    Theta: the global model; Theta_i: the client's own; W_i: its weights, in [0, 1].

    Attributes:
        lr: alpha, the step size of the local model.
        tau: steps per round.
        batch: examples per step.
        head: the higher p layers, whose weights are learned; the layers below are the global ones.
        weight_lr: eta, the step size of the weights.
        fraction: s %, the part of the client's data that weights are learned on, drawn anew in
            every round.
        weight_batch: examples per step on the weights; `full` for all of that part, so that one
            step is one epoch.
        weight_steps: steps on the weights per round, after the first time.
        first_weight_steps: at most so many the first time, where the weights are trained until the
            last 10 losses have a small standard deviation. The paper sets no limit.
        threshold: how small.
        adapt_steps: further steps on the local model when a client personalizes; None: none.
    """

    step_sizes: ClassVar[tuple[str, ...]] = ("lr",)
    local_steps: ClassVar[str] = "tau"
    adapt_work: ClassVar[str] = "adapt_steps"

    lr: Rate = 0.02
    tau: int = 10
    batch: BatchSize = 20
    head: Patterns = HEAD
    weight_lr: Rate = 1.0
    fraction: Rate = 0.8
    weight_batch: BatchSize = "full"
    weight_steps: int = 1
    first_weight_steps: int = 50
    threshold: Weight = 0.1
    adapt_steps: int | None = None

    def check(self) -> None:
        """The part of the data is one."""
        allowed = "must be a number greater than 0, and at most 1"
        require(bool(self.fraction <= 1), "fraction", self.fraction, allowed)

    def init_client_state(self, params: Params) -> ClientState:
        """Theta_i is the first model, and all weights are 1: the global model is taken."""
        ones = jax.tree.map(jnp.ones_like, self._split(params)[0])
        return ALAState(params, ones, jnp.array(False))

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """Aggregate locally, train from there, and send the result."""
        ala_key, train_key = jax.random.split(context.key)
        theta_hat, weights, learned = self._aggregate(
            objective, received.params, client_state, ala_key
        )
        theta = local_sgd(objective, theta_hat, self.lr, self.tau, self.batch, train_key)
        return LocalUpdate(theta, client_state=ALAState(theta, weights, learned))

    def personalize(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> Params:
        """The Theta_hat_i that the client's next round would begin with."""
        ala_key, train_key = jax.random.split(context.key)
        theta_hat = self._aggregate(objective, received.params, client_state, ala_key).theta
        if self.adapt_steps is None:
            return theta_hat
        return local_sgd(objective, theta_hat, self.lr, self.adapt_steps, self.batch, train_key)

    def gradient_count(self, size: int) -> int:
        """Those of training, and those of the weights as they are after the first time."""
        part = max(1, int(-(-float(self.fraction) * size // 1)))
        weights = self.weight_steps * batch_examples(self.weight_batch, part)
        return self.tau * batch_examples(self.batch, size) + weights

    def _aggregate(
        self, objective: Objective, theta: Params, state: ALAState, key: Array
    ) -> ALAState:
        """Theta_hat_i, and the weights W_i that it is made with."""
        own, _ = self._split(state.theta)
        higher, lower = self._split(theta)
        way = tree_sub(higher, own)
        # In round 1 all models are the first one: there is no way, and nothing to learn.
        differs = squared_norm(way) > 0
        part_key, batch_key = jax.random.split(key)
        part = objective.sample(part_key, self.fraction)  # D_i^{s,t}
        most = max(self.weight_steps, self.first_weight_steps)
        batches = part.batches(batch_key, most, self.weight_batch)
        steps = jnp.where(state.learned, self.weight_steps, self.first_weight_steps)

        def theta_hat(weights: Params) -> Params:  # (4)
            blend = jax.tree.map(lambda a, b, w: a + b * w, own, way, weights)
            return combine(blend, lower)

        def proceed(carry: _Carry) -> Bool[Array, ""]:
            k, _, losses = carry
            converged = ~state.learned & (k > WINDOW) & (losses.std() < self.threshold)
            return differs & (k < steps) & ~converged

        def step(carry: _Carry) -> _Carry:  # (5), and clipping
            k, weights, losses = carry
            at, d = theta_hat(weights), batches.at(k)
            slope = jax.tree.map(jnp.multiply, self._split(part.grad(at, d))[0], way)
            weights = jax.tree.map(
                lambda w, g: jnp.clip(w - self.weight_lr * g, 0.0, 1.0).astype(w.dtype),
                weights,
                slope,
            )
            losses = jnp.roll(losses, -1).at[-1].set(part.loss(at, d))
            return k + 1, weights, losses

        losses = jnp.zeros(WINDOW, jax.eval_shape(part.loss, theta).dtype)
        start = (jnp.int32(0), state.weights, losses)
        _, weights, _ = jax.lax.while_loop(proceed, step, start)
        return ALAState(theta_hat(weights), weights, state.learned | differs)

    def _split(self, params: Params) -> tuple[Params, Params]:
        """The higher layers, and the lower ones."""
        return split(params, lambda path: is_any_named(path, self.head))
