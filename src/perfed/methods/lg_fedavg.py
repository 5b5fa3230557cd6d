"""LG-FedAvg (Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, 2020).

Think Locally, Act Globally: each client learns a representation of its own data, which stays with
it, below a model that all clients share. FedPer the other way round. The paper is arXiv:2001.01523.
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
@method("lg-fedavg")
class LGFedAvg(Method):
    """LG-FedAvg, Algorithm 1.

    l_m(.; theta_m): the representation of client m; g(.; theta_g): the model of all clients above.

    Attributes:
        lr: the step size of both.
        tau: steps per round.
        batch: examples per step.
        head: what is shared: the model's head, or names of parts of the model.
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
        """There must be a representation."""
        require_body(self.head, params)

    def is_shared(self, path: Path) -> bool:
        """Theta_g is, theta_m is not."""
        return is_any_named(path, self.head)

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """ClientUpdate(m, theta_g): steps on theta_m and theta_g together."""
        lr = self.schedule(self.lr, context.round, self.tau)
        return LocalUpdate(
            local_sgd(
                objective, received.params, lr, self.tau, self.batch, context.key, self.optimizer
            )
        )
