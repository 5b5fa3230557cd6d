"""FedRep (Collins, Hassani, Mokhtari, Shakkottai, ICML 2021): a shared representation, own heads.

Many cheap steps fit the head to the representation as it arrives; then the representation takes its
step with that head. So a client sends what would help the best head it can find.
"""

from functools import partial
from typing import ClassVar, final

import jax

from perfed.core.objective import BatchSize, Objective
from perfed.core.task import Task
from perfed.core.trees import Params, Path, Patterns, is_any_named
from perfed.methods.base import ClientState, LocalUpdate, Method, Received, RoundContext, method
from perfed.methods.heads import HEAD, body_grad, head_grad, require_body
from perfed.methods.settings import Rate
from perfed.methods.steps import local_sgd


@final
@method("fedrep")
class FedRep(Method):
    """FedRep, Algorithm 1.

    phi: the representation, which is shared; h_i: the head of client i.

    Attributes:
        lr: alpha, the step size of both.
        head_steps: tau in the paper, steps on the head.
        body_steps: steps on the representation; Algorithm 1 takes one, the paper's experiments one
            or more passes over the client's data.
        batch: examples per step.
        head: the model's head, or names of parts of the model.
    """

    has_global_model: ClassVar[bool] = False
    step_sizes: ClassVar[tuple[str, ...]] = ("lr",)
    # What a client that was not there needs is a head.
    local_steps: ClassVar[str] = "head_steps"

    lr: Rate = 0.02
    head_steps: int = 10
    body_steps: int = 1
    batch: BatchSize = 20
    head: Patterns = HEAD

    def check_task(self, task: Task, params: Params, classes: int | None) -> None:
        """There must be a representation."""
        require_body(self.head, params)

    def is_shared(self, path: Path) -> bool:
        """Phi is, h_i is not."""
        return not is_any_named(path, self.head)

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """First h_i with phi held fixed, from the last h_i; then phi with the new h_i held fixed.

        Each step has a batch of its own, those on phi too.
        """
        w, (head_key, body_key) = received.params, jax.random.split(context.key)
        for grad, steps, key in (
            (head_grad, self.head_steps, head_key),  # h_i <- GRD(f_i(h, phi), h, alpha)
            (body_grad, self.body_steps, body_key),  # phi_i <- GRD(f_i(h_i, phi), phi, alpha)
        ):
            gradient = partial(grad, objective, self.head)
            w = local_sgd(objective, w, self.lr, steps, self.batch, key, gradient=gradient)
        return LocalUpdate(w)

    @property
    def step_count(self) -> int:
        """Those on the head and those on the representation."""
        return self.head_steps + self.body_steps
