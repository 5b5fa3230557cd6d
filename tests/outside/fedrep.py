"""FedRep (Collins et al., ICML 2021): a shared representation, and a head of each client's own."""

from typing import ClassVar, final

import jax

from perfed.core.objective import Batch, BatchSize, Objective
from perfed.core.trees import Params, Path, leaves_where, path_name
from perfed.methods.base import ClientState, LocalUpdate, Method, Received, RoundContext, method
from perfed.methods.settings import Rate
from perfed.methods.steps import local_sgd


@final
@method("outside-fedrep")
class FedRep(Method):
    """FedRep, Algorithm 1: tau steps on the head, then on the representation, which is shared.

    Attributes:
        lr: the step size of both.
        head_steps: steps on the head.
        tau: steps on the representation.
        batch: examples per step.
        head: the head's leaves, by the start of their names.
    """

    step_sizes: ClassVar[tuple[str, ...]] = ("lr",)
    local_steps: ClassVar[str] = "tau"
    has_global_model: ClassVar[bool] = False

    lr: Rate = 0.05
    head_steps: int = 10
    tau: int = 10
    batch: BatchSize = 20
    head: str = "head"

    def is_shared(self, path: Path) -> bool:
        """The head stays with its client."""
        return not path_name(path).startswith(self.head)

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """First the head, with the representation held; then the representation, once."""
        head_key, body_key = jax.random.split(context.key)

        def head_gradient(params: Params, d: Batch) -> Params:
            return leaves_where(lambda path: not self.is_shared(path), objective.grad(params, d))

        def body_gradient(params: Params, d: Batch) -> Params:
            return leaves_where(self.is_shared, objective.grad(params, d))

        params = local_sgd(
            objective, received.params, self.lr, self.head_steps, self.batch, head_key,
            gradient=head_gradient,
        )  # fmt: skip
        return LocalUpdate(
            local_sgd(
                objective, params, self.lr, self.tau, self.batch, body_key, gradient=body_gradient
            )
        )
