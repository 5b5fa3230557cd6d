"""FedProx (Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020): local steps held to w."""

from collections.abc import Mapping
from typing import ClassVar, final

from perfed.core.objective import BatchSize, Objective
from perfed.methods.base import ClientState, LocalUpdate, Method, Received, RoundContext, method
from perfed.methods.settings import Rate, Weight
from perfed.methods.steps import local_sgd, proximal_gradient


@final
@method("fedprox")
class FedProx(Method):
    """FedProx, Algorithm 2: clients inexactly minimize h_k(w; w^t) = F_k(w) + (mu/2) |w - w^t|^2.

    Here by tau SGD steps for every client: the paper lets slow clients take fewer (the inexactness
    gamma_k of Definition 2), and draws clients by their sizes where perfed weights the mean.

    Attributes:
        lr: the local step size.
        mu: how strongly a local model is held to the received one; 0 is FedAvg.
        tau: local steps per round.
        batch: examples per step.
    """

    step_sizes: ClassVar[tuple[str, ...]] = ("lr",)
    penalties: ClassVar[Mapping[str, str]] = {"lr": "mu"}
    local_steps: ClassVar[str] = "tau"

    lr: Rate = 0.02
    mu: Weight = 0.1
    tau: int = 10
    batch: BatchSize = 20

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """Tau steps w <- w - lr (grad F_k(w; D) + mu (w - w^t)), from w^t."""
        gradient = proximal_gradient(objective, self.mu, received.params)
        w = local_sgd(
            objective,
            received.params,
            self.lr,
            self.tau,
            self.batch,
            context.key,
            gradient=gradient,
        )
        return LocalUpdate(w)
