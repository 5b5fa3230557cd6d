"""Local: no federation. Each client trains alone; the baseline every federation has to beat."""

from typing import ClassVar, final

from perfed.core.objective import BatchSize, Objective
from perfed.core.trees import Path
from perfed.methods.base import ClientState, LocalUpdate, Method, Received, RoundContext, method
from perfed.methods.optimizers import SGD, Optimizer
from perfed.methods.schedules import Constant, Schedule
from perfed.methods.settings import Rate
from perfed.methods.steps import local_sgd


@final
@method("local")
class Local(Method):
    """SGD on own data, from the common first model: every leaf is personal, and nothing is sent.

    As with any method, the clients of a round's cohort train: for clients that never wait for
    anybody, take all of them as the cohort.

    Attributes:
        lr: the step size.
        tau: steps per round.
        batch: examples per step.
        optimizer: the rule of steps; its state begins anew in every round.
        schedule: how the step size changes from round to round.
    """

    has_global_model: ClassVar[bool] = False
    step_sizes: ClassVar[tuple[str, ...]] = ("lr",)
    local_steps: ClassVar[str] = "tau"

    lr: Rate = 0.02
    tau: int = 10
    batch: BatchSize = 20
    optimizer: Optimizer = SGD()
    schedule: Schedule = Constant()

    def is_shared(self, path: Path) -> bool:
        """No leaf is."""
        return False

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """Tau more steps on the client's own model."""
        lr = self.schedule(self.lr, context.round, self.tau)
        return LocalUpdate(
            local_sgd(
                objective, received.params, lr, self.tau, self.batch, context.key, self.optimizer
            )
        )
