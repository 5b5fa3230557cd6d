"""FedAvg: local SGD and averaging; "FedAvg + update" when a client adapts the result to itself."""

from dataclasses import dataclass
from typing import ClassVar, final

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from perfed.methods.base import Memory, Method, Reply, Turn, adapt, descend, take_steps
from perfed.objective import Batch, BatchSize, Objective, Params


@final
@dataclass(frozen=True)
class FedAvg(Method):
    """FedAvg, as the papers' baseline.

    Attributes:
        lr: the local learning rate.
        tau: local SGD steps a round.
        batch: examples a step.
        alpha: the step size of the update that makes the personalised model; None: `lr`.
        adapt_steps: how many such steps.
        adapt_batch: examples an adaptation step.
    """

    name: ClassVar[str] = "fedavg"

    lr: float = 0.02
    tau: int = 10
    batch: BatchSize = 20
    alpha: float | None = None
    adapt_steps: int = 1
    adapt_batch: BatchSize = "full"

    def check(self) -> None:
        """Positive rates and counts."""
        self._positive("lr", *(["alpha"] if self.alpha is not None else []))
        self._count("tau", "adapt_steps")
        self._batch_size("batch", "adapt_batch")

    def first_memory(self, w: Params) -> Memory:
        """Nothing is remembered."""
        return None

    def local(
        self, objective: Objective, w: Params, memory: Memory, turn: Turn, key: PRNGKeyArray
    ) -> Reply:
        """Tau steps w <- w - lr grad f_i(w; D_t)."""

        def step(w: Params, d: Batch) -> Params:
            return descend(w, self.lr, objective.grad(w, d))

        w, _ = take_steps(step, w, objective.batches(key, self.tau, self.batch), self.tau)
        return Reply(w, memory)

    def merge(self, w: Params, mean_change: Params) -> Params:
        """The average of the local models."""
        return jax.tree.map(jnp.add, w, mean_change)

    def personalise(
        self, objective: Objective, w: Params, memory: Memory, turn: Turn, key: PRNGKeyArray
    ) -> Params:
        """FedAvg + update: gradient steps on own data, started from w."""
        alpha = self.lr if self.alpha is None else self.alpha
        return adapt(objective, w, alpha, self.adapt_steps, self.adapt_batch, key)
