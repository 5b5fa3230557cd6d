"""FedAdam (Reddi et al., ICLR 2021): the server follows the mean delta by Adam."""

from typing import ClassVar, final

from perfed.core.objective import BatchSize, Objective
from perfed.core.trees import Params, tree_scale
from perfed.methods.base import (
    ClientState,
    Extra,
    LocalUpdate,
    Method,
    Received,
    RoundContext,
    ServerState,
    method,
)
from perfed.methods.optimizers import Adam, Optimizer
from perfed.methods.settings import Rate
from perfed.methods.steps import local_sgd


@final
@method("outside-fedadam")
class FedAdam(Method):
    """FedAdam, Algorithm 2; with bias correction, as optax has it.

    Attributes:
        lr: the local step size.
        server_lr: the server's step size.
        tau: local steps per round.
        batch: examples per step.
        server_optimizer: the server's rule.
    """

    step_sizes: ClassVar[tuple[str, ...]] = ("lr",)
    local_steps: ClassVar[str] = "tau"

    lr: Rate = 0.02
    server_lr: Rate = 0.01
    tau: int = 10
    batch: BatchSize = 20
    server_optimizer: Optimizer = Adam(b1=0.9, b2=0.99, eps=1e-3)

    def init_server_state(self, params: Params) -> ServerState:
        """The moments."""
        return self.server_optimizer.init(params)

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """Local SGD."""
        return LocalUpdate(
            local_sgd(objective, received.params, self.lr, self.tau, self.batch, context.key)
        )

    def server_update(
        self,
        params: Params,
        server_state: ServerState,
        mean_delta: Params,
        mean_extra: Extra,
        context: RoundContext,
    ) -> tuple[Params, ServerState]:
        """A step along minus the mean delta, taken for a gradient."""
        gradient = tree_scale(-1.0, mean_delta)
        return self.server_optimizer.step(params, gradient, server_state, self.server_lr)
