"""FedBABU (Oh, Kim, Yun, ICLR 2022): only the body is trained and sent; clients fine-tune the rest.

Federated Averaging with Body Aggregation and Body Update. The head keeps its first random value,
the same for all clients, while the body is learned; so every client learns the body for one and the
same criterion. Each client then fine-tunes the model to its own data.
"""

from functools import partial
from typing import ClassVar, Literal, final

from perfed.core.objective import BatchSize, Objective
from perfed.core.task import Task
from perfed.core.trees import Params, Path, Patterns, is_any_named
from perfed.methods.base import ClientState, LocalUpdate, Method, Received, RoundContext, method
from perfed.methods.heads import HEAD, body_grad, head_grad, require_body
from perfed.methods.schedules import Constant, Schedule
from perfed.methods.settings import Rate
from perfed.methods.steps import local_sgd

Part = Literal["all", "body", "head"]


@final
@method("fedbabu")
class FedBABU(Method):
    """FedBABU, Algorithm 1, and the fine-tuning that follows it.

    Attributes:
        lr: the step size.
        tau: steps per round.
        batch: examples per step.
        head: the model's head, or names of parts of the model.
        schedule: how the step size changes from round to round.
        adapt_part: what fine-tuning trains: `all` by the paper; `body` or `head`, its ablations.
        alpha: the step size of fine-tuning; None: that of training in the round that comes next.
        adapt_steps: steps of fine-tuning.
        adapt_batch: examples per step of fine-tuning.
    """

    has_global_model: ClassVar[bool] = False
    step_sizes: ClassVar[tuple[str, ...]] = ("lr",)
    local_steps: ClassVar[str] = "tau"
    adapt_step_size: ClassVar[str] = "alpha"
    adapt_work: ClassVar[str] = "adapt_steps"

    lr: Rate = 0.02
    tau: int = 10
    batch: BatchSize = 20
    head: Patterns = HEAD
    schedule: Schedule = Constant()
    adapt_part: Part = "all"
    alpha: Rate | None = None
    adapt_steps: int = 10
    adapt_batch: BatchSize = 20

    def check_task(self, task: Task, params: Params, classes: int | None) -> None:
        """There must be a body."""
        require_body(self.head, params)

    def is_shared(self, path: Path) -> bool:
        """The body is. Of the head every client has the first value, which nobody needs to send."""
        return not is_any_named(path, self.head)

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """ClientBodyUpdate: steps on the body, with the head held fixed."""
        lr = self.schedule(self.lr, context.round, self.tau)
        gradient = partial(body_grad, objective, self.head)
        return LocalUpdate(
            local_sgd(
                objective, received.params, lr, self.tau, self.batch, context.key, gradient=gradient
            )
        )

    def personalize(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> Params:
        """Fine-tuning on own data, from the received body and the first head."""
        lr = self.schedule(self.lr, context.round, self.tau)
        alpha = lr if self.alpha is None else self.alpha
        parts = {"all": None, "body": body_grad, "head": head_grad}
        grad = parts[self.adapt_part]
        gradient = None if grad is None else partial(grad, objective, self.head)
        return local_sgd(
            objective,
            received.params,
            alpha,
            self.adapt_steps,
            self.adapt_batch,
            context.key,
            gradient=gradient,
        )
