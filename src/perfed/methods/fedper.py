"""FedPer (Arivazhagan, Aggarwal, Singh, Choudhary, 2019): personalization layers stay at clients.

A model is base layers, which FedAvg learns for all clients, and personalization layers on top,
which never leave their client. The paper is arXiv:1912.00818.
"""

from typing import ClassVar, final

from perfed.core.objective import BatchSize, Objective
from perfed.core.task import Task
from perfed.core.trees import Params, Path, Patterns, is_any_named
from perfed.methods.base import ClientState, LocalUpdate, Method, Received, RoundContext, method
from perfed.methods.heads import HEAD, require_body
from perfed.methods.optimizers import SGD, Optimizer
from perfed.methods.schedules import Constant, Schedule
from perfed.methods.settings import Rate
from perfed.methods.steps import local_sgd


@final
@method("fedper")
class FedPer(Method):
    """FedPer, the algorithms FedPer-Client(j) and FedPer-Server.

    W_B: the base, the same for all clients; W_P_j: the personalization layers of client j. All
    clients start from one W_P, the model's first; in the paper each draws its own.

    Attributes:
        lr: the step size.
        tau: steps per round.
        batch: examples per step.
        head: the personalization layers: the model's head, or names of parts of the model.
        optimizer: the rule of steps; its state begins anew in every round.
        schedule: how the step size changes from round to round.
    """

    has_global_model: ClassVar[bool] = False
    step_sizes: ClassVar[tuple[str, ...]] = ("lr",)
    local_steps: ClassVar[str] = "tau"

    lr: Rate = 0.02
    tau: int = 10
    batch: BatchSize = 20
    head: Patterns = HEAD
    optimizer: Optimizer = SGD()
    schedule: Schedule = Constant()

    def check_task(self, task: Task, params: Params, classes: int | None) -> None:
        """There must be a base."""
        require_body(self.head, params)

    def is_shared(self, path: Path) -> bool:
        """W_B is, W_P_j is not."""
        return not is_any_named(path, self.head)

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """(W_B, W_P_j) <- SGD_j(W_B, W_P_j): both are trained together."""
        lr = self.schedule(self.lr, context.round, self.tau)
        return LocalUpdate(
            local_sgd(
                objective, received.params, lr, self.tau, self.batch, context.key, self.optimizer
            )
        )
