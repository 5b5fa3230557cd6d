"""FedAvg (McMahan et al., AISTATS 2017); "FedAvg + update" when a client adapts the result."""

from typing import ClassVar, final

from perfed.core.objective import BatchSize, Objective
from perfed.core.trees import Params
from perfed.methods.base import ClientState, LocalUpdate, Method, Received, RoundContext, method
from perfed.methods.optimizers import SGD, Optimizer
from perfed.methods.schedules import Constant, Schedule
from perfed.methods.settings import Rate
from perfed.methods.steps import local_sgd


@final
@method("fedavg")
class FedAvg(Method):
    """Local SGD and averaging: the papers' baseline.

    Attributes:
        lr: the local step size.
        tau: local steps per round.
        batch: examples per step.
        optimizer: the rule of local steps; its state begins anew in every round.
        schedule: how the step size changes from round to round; `Harmonic` with lr = 4 / mu is
            that of FedPAQ's Theorem 1.
        alpha: the step size of the update that makes the personalized model; None: that of local
            steps in the round that comes next.
        adapt_steps: how many such steps.
        adapt_batch: examples per adaptation step.
    """

    step_sizes: ClassVar[tuple[str, ...]] = ("lr",)
    local_steps: ClassVar[str] = "tau"
    adapt_step_size: ClassVar[str] = "alpha"
    adapt_work: ClassVar[str] = "adapt_steps"

    lr: Rate = 0.02
    tau: int = 10
    batch: BatchSize = 20
    optimizer: Optimizer = SGD()
    schedule: Schedule = Constant()
    alpha: Rate | None = None
    adapt_steps: int = 1
    adapt_batch: BatchSize = "full"

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """Tau steps w <- w - lr grad f_i(w; D_t)."""
        lr = self.schedule(self.lr, context.round, self.tau)
        return LocalUpdate(
            local_sgd(
                objective, received.params, lr, self.tau, self.batch, context.key, self.optimizer
            )
        )

    def personalize(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> Params:
        """FedAvg + update: gradient steps on own data, started from the global model."""
        lr = self.schedule(self.lr, context.round, self.tau)
        alpha = lr if self.alpha is None else self.alpha
        return local_sgd(
            objective, received.params, alpha, self.adapt_steps, self.adapt_batch, context.key
        )
