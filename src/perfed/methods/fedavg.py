"""FedAvg: local SGD and averaging; "FedAvg + update" when a client adapts the result to itself."""

from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Array, PRNGKeyArray

from perfed.core.objective import BatchSize, Objective, Params
from perfed.methods.base import Memory, Method, Reply, Turn, changed, examples, sgd


@final
@dataclass(frozen=True)
class FedAvg(Method):
    """FedAvg, as the papers' baseline.

    Attributes:
        lr: the local learning rate.
        tau: local SGD steps a round.
        batch: examples a step.
        diminishing: in round k (from 0) the rate is lr / (k tau + 1): FedPAQ's Theorem 1 with
            lr = 4 / mu.
        alpha: the step size of the update that makes the personalized model; None: that of the
            local steps, in the round that comes next where they diminish.
        adapt_steps: how many such steps.
        adapt_batch: examples an adaptation step.
    """

    name: ClassVar[str] = "fedavg"
    rates: ClassVar[tuple[str, ...]] = ("lr", "alpha")

    lr: float = 0.02
    tau: int = 10
    batch: BatchSize = 20
    diminishing: bool = False
    alpha: float | None = None
    adapt_steps: int = 1
    adapt_batch: BatchSize = "full"

    def check(self) -> None:
        """Positive rates and counts."""
        self._positive("lr", "alpha")
        self._count("tau", "adapt_steps")
        self._batch_size("batch", "adapt_batch")

    def first_memory(self, w: Params) -> Memory:
        """Nothing is remembered."""
        return None

    def local(
        self, objective: Objective, w: Params, memory: Memory, turn: Turn, key: PRNGKeyArray
    ) -> Reply:
        """Tau steps w <- w - lr grad f_i(w; D_t)."""
        return Reply(sgd(objective, w, self._rate(turn), self.tau, self.batch, key), memory)

    def gradients(self, size: int) -> int:
        """Tau * batch."""
        return self.tau * examples(self.batch, size)

    def merge(self, w: Params, mean_change: Params) -> Params:
        """The average of the local models."""
        return changed(w, mean_change)

    def personalize(
        self, objective: Objective, w: Params, memory: Memory, turn: Turn, key: PRNGKeyArray
    ) -> Params:
        """FedAvg + update: gradient steps on own data, started from w."""
        alpha = self._rate(turn) if self.alpha is None else self.alpha
        return sgd(objective, w, alpha, self.adapt_steps, self.adapt_batch, key)

    def _rate(self, turn: Turn) -> float | Array:
        """The local step size in a round."""
        return self.lr / (turn.round * self.tau + 1) if self.diminishing else self.lr
