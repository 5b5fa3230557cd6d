"""Local: no federation. Each client trains alone; the baseline every federation has to beat."""

from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import PRNGKeyArray

from perfed.core.objective import BatchSize, Objective, Params
from perfed.methods.base import Memory, Method, Reply, Turn, examples, sgd


@final
@dataclass(frozen=True)
class Local(Method):
    """SGD on own data, from the common first model; the global model never moves.

    As with any method, the clients of a round's cohort train: for clients that never wait for
    anybody, take all of them as the cohort.

    Attributes:
        lr: the learning rate.
        tau: SGD steps a round.
        batch: examples a step.
    """

    name: ClassVar[str] = "local"
    rates: ClassVar[tuple[str, ...]] = ("lr",)
    sends: ClassVar[bool] = False

    lr: float = 0.02
    tau: int = 10
    batch: BatchSize = 20

    def check(self) -> None:
        """Positive rates and counts."""
        self._positive("lr")
        self._count("tau")
        self._batch_size("batch")

    def first_memory(self, w: Params) -> Memory:
        """A client keeps its own model."""
        return w

    def local(
        self, objective: Objective, w: Params, memory: Memory, turn: Turn, key: PRNGKeyArray
    ) -> Reply:
        """Tau more SGD steps on the client's own model; the server gets its w back unchanged."""
        own = sgd(objective, memory, self.lr, self.tau, self.batch, key)
        return Reply(w, memory=own)

    def gradients(self, size: int) -> int:
        """Tau * batch."""
        return self.tau * examples(self.batch, size)

    def merge(self, w: Params, mean_change: Params) -> Params:
        """Nothing is learned together."""
        return w

    def personalize(
        self, objective: Objective, w: Params, memory: Memory, turn: Turn, key: PRNGKeyArray
    ) -> Params:
        """The client's own model."""
        return memory
