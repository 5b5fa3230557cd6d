"""Per-FedAvg (Fallah, Mokhtari, Ozdaglar, NeurIPS 2020): a start that suits all after one step.

It minimizes F(w) = (1/n) sum_i f_i(w - alpha grad f_i(w)), problem (3), by local SGD on
F_i(w) = f_i(w - alpha grad f_i(w)) and averaging (Algorithm 1).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, final, get_args

import jax
from jaxtyping import PRNGKeyArray

from perfed.core.errors import require, require_choice
from perfed.core.objective import Batch, BatchSize, Objective, Params
from perfed.core.random import uniform_below
from perfed.methods.base import (
    Memory,
    Method,
    Reply,
    Turn,
    changed,
    descend,
    examples,
    sgd,
    take_steps,
)

Variant = Literal["exact", "fo", "hf"]


@final
@dataclass(frozen=True)
class PerFedAvg(Method):
    """Per-FedAvg, Algorithm 1.

    Attributes:
        variant: how the Hessian of (8) is treated. `exact`: Hessian-vector products by automatic
            differentiation; `hf`: differences of gradients (Hessian-free); `fo`: dropped.
        alpha: the step size of the adaptation.
        beta: the step size of the meta-step.
        beta_decay: the meta-step of round k is beta / (k+1)^beta_decay: 0 is a constant step, above
            0 a diminishing one (Remark 4.8, which leaves the law open; 0.5 is the usual choice).
        tau: meta-steps a round.
        batch: the size D of the batch the adaptation uses.
        batch_outer: the size D' of the batch the gradient after it uses; None: `batch`.
        batch_hessian: the size D'' of the batch the Hessian uses; None: `batch`.
        delta: the width of the differences of `hf`, in units of the vector the Hessian multiplies
            (fixed, as published: near a stationary point float32 rounding takes over).
        adapt_steps: adaptation steps, in training and in the personalized model.
        adapt_batch: examples a step of the personalized model; "full" is problem (3) itself.
        send_iterate: also average the cohort's iterates at a random t_k (Remark 4.7).
    """

    name: ClassVar[str] = "per-fedavg"
    rates: ClassVar[tuple[str, ...]] = ("alpha", "beta", "beta_decay", "delta")

    variant: Variant = "hf"
    alpha: float = 0.01
    beta: float = 0.001
    beta_decay: float = 0.0
    tau: int = 10
    batch: BatchSize = 40
    batch_outer: BatchSize | None = None
    batch_hessian: BatchSize | None = None
    delta: float = 0.001
    adapt_steps: int = 1
    adapt_batch: BatchSize = "full"
    send_iterate: bool = False

    def check(self) -> None:
        """Positive rates and counts, a known variant."""
        require_choice("variant", self.variant, get_args(Variant))
        self._positive("alpha", "beta", "delta")
        decay = self.beta_decay
        require(0 <= decay < float("inf"), "beta_decay", decay, "must be a number, at least 0")
        self._count("tau", "adapt_steps")
        self._batch_size("batch", "batch_outer", "batch_hessian", "adapt_batch")

    def first_memory(self, w: Params) -> Memory:
        """Nothing is remembered."""
        return None

    def local(
        self, objective: Objective, w: Params, memory: Memory, turn: Turn, key: PRNGKeyArray
    ) -> Reply:
        """Tau meta-steps (7): w <- w - beta (estimate of grad F_i(w)), each from w itself."""
        beta = self.beta / (turn.round + 1.0) ** self.beta_decay
        key_d, key_d1, key_d2 = jax.random.split(key, 3)
        batches = (
            objective.batches(key_d, (self.tau, self.adapt_steps), self.batch),
            objective.batches(key_d1, self.tau, self.batch_outer or self.batch),
            objective.batches(
                key_d2, (self.tau, self.adapt_steps), self.batch_hessian or self.batch
            ),
        )

        def step(w: Params, ddd: tuple[Batch, Batch, Batch]) -> Params:
            return descend(w, beta, self.meta_gradient(objective, w, *ddd))

        pick = uniform_below(turn.key, (), self.tau) if self.send_iterate else None
        w, iterate = take_steps(step, w, batches, self.tau, pick)
        return Reply(w, memory, iterate)

    def meta_gradient(
        self, objective: Objective, w: Params, d: Batch, d1: Batch, d2: Batch
    ) -> Params:
        """The estimate (8) of grad F_i(w).

        It is (I - alpha H(w; D'')) grad f_i(w~; D') with w~ = w - alpha grad f_i(w; D). With more
        adaptation steps w = w_0 -> w_1 -> ... -> w~ it is the chain rule through all of them: the
        product of the I - alpha H(w_j; D''_j), times grad f_i(w~; D').
        """
        path = [w]
        for j in range(self.adapt_steps):
            path.append(descend(path[-1], self.alpha, objective.grad(path[-1], _at(d, j))))
        v = objective.grad(path[-1], d1)
        if self.variant != "fo":
            for j in reversed(range(self.adapt_steps)):
                v = descend(v, self.alpha, self._hessian(objective, path[j], v, _at(d2, j)))
        return v

    def gradients(self, size: int) -> int:
        """Tau (D + D' + 2 D''): a Hessian-vector product counts as two gradients, as in `hf`."""
        outer, hessian = self.batch_outer or self.batch, self.batch_hessian or self.batch
        inner = examples(self.batch, size)
        if self.variant != "fo":
            inner += 2 * examples(hessian, size)
        return self.tau * (self.adapt_steps * inner + examples(outer, size))

    def merge(self, w: Params, mean_change: Params) -> Params:
        """The average of the local models."""
        return changed(w, mean_change)

    def personalize(
        self, objective: Objective, w: Params, memory: Memory, turn: Turn, key: PRNGKeyArray
    ) -> Params:
        """The adapted model w - alpha grad f_i(w), one step or a few."""
        return sgd(objective, w, self.alpha, self.adapt_steps, self.adapt_batch, key)

    def _hessian(self, objective: Objective, w: Params, v: Params, batch: Batch) -> Params:
        """H(w) v, exactly or as (grad f(w + delta v) - grad f(w - delta v)) / (2 delta)."""
        if self.variant == "exact":
            return objective.hvp(w, v, batch)
        by = jax.tree.map(lambda leaf: self.delta * leaf, v)
        apart = objective.grad_difference(w, by, batch)
        return jax.tree.map(lambda leaf: leaf / (2 * self.delta), apart)


def _at(batches: Batch, j: int) -> Batch:
    return Batch(None if batches.position is None else batches.position[j])
