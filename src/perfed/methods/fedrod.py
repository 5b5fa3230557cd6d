"""FedRoD (Chen, Chao, ICLR 2022): a generic and a personal head on one body.

The body theta and the generic head psi minimize a loss that does not depend on how often classes
occur at a client, here the balanced softmax; FedAvg learns them. The personal head phi_m minimizes
the client's empirical risk on top of the generic logits. So there is a good model for everybody and
one for each client.

For a linear last layer G the sum of logits G z + P z is the layer G + P: the personalized model has
the network's own form, and the gradient with respect to P is that with respect to the head at
G + P.
"""

from functools import partial
from typing import ClassVar, NamedTuple, final

import jax
from jaxtyping import Array

from perfed.core.errors import FieldError, require
from perfed.core.objective import Batch, BatchSize, Objective
from perfed.core.task import Task
from perfed.core.trees import (
    Params,
    Patterns,
    combine,
    is_any_named,
    sgd_step,
    split,
    tree_add,
    tree_zeros_like,
)
from perfed.methods.base import (
    ClientState,
    LocalUpdate,
    Method,
    Received,
    RoundContext,
    batch_examples,
    method,
)
from perfed.methods.heads import HEAD, head_grad
from perfed.methods.settings import Rate
from perfed.methods.steps import local_sgd, take_steps


class _Heads(NamedTuple):
    """What a local update trains: the body with the generic head, and the personal head."""

    w: Params
    p: Params


@final
@method("fedrod")
class FedRoD(Method):
    """FedRoD with the balanced softmax and a linear personal head.

    Attributes:
        lr: the step size of the body and the generic head.
        head_lr: the step size of the personal head; None: the same.
        tau: steps per round, each on all three.
        batch: examples per step.
        head: the model's head, or names of parts of the model; a linear layer.
        adapt_steps: further steps on the personal head alone, when a client personalizes; None:
            none.
    """

    step_sizes: ClassVar[tuple[str, ...]] = ("lr",)
    local_steps: ClassVar[str] = "tau"
    adapt_step_size: ClassVar[str] = "head_lr"
    adapt_work: ClassVar[str] = "adapt_steps"

    lr: Rate = 0.02
    head_lr: Rate | None = None
    tau: int = 10
    batch: BatchSize = 20
    head: Patterns = HEAD
    adapt_steps: int | None = None

    def check_task(self, task: Task, params: Params, classes: int | None) -> None:
        """Only classes can be balanced, and only in the cross-entropy."""
        if classes is None:
            raise FieldError("method", self.name, "balances classes, but the data are a regression")
        allowed = "is not for fedrod, which balances the classes of the default loss"
        require(task.loss is None, "loss", task.loss, allowed)
        # A matrix and perhaps a bias: only there the sum of two layers gives the sum of logits.
        head = jax.tree.leaves(self._split(params)[0])
        allowed = "must be one linear layer, so that the sum of two heads gives the sum of logits"
        linear = sorted(leaf.ndim for leaf in head) in ([2], [1, 2])
        require(linear, "head", self.head, allowed)

    def init_client_state(self, params: Params) -> ClientState:
        """P, zero: until a client has trained, its model is the generic one."""
        return tree_zeros_like(self._split(params)[0])

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """Steps on both losses, on the same batches; only the balanced one reaches body and G."""
        balanced = objective.balanced(received.params)

        def step(at: _Heads, d: Batch) -> _Heads:
            # Both gradients are taken before either moves.
            generic = balanced.grad(at.w, d)
            personal = objective.grad(self._personal_model(*at), d)
            p = sgd_step(at.p, self._head_lr, self._split(personal)[0])
            return _Heads(sgd_step(at.w, self.lr, generic), p)

        start = _Heads(received.params, client_state)
        batches = objective.batches(context.key, self.tau, self.batch)
        w, p = take_steps(step, start, batches, self.tau)[0]
        return LocalUpdate(w, client_state=p)

    def personalize(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> Params:
        """The received body with the head G + P."""
        model = self._personal_model(received.params, client_state)
        if self.adapt_steps is None:
            return model
        gradient = partial(head_grad, objective, self.head)  # a step on P is one on G + P
        return local_sgd(
            objective,
            model,
            self._head_lr,
            self.adapt_steps,
            self.batch,
            context.key,
            gradient=gradient,
        )

    def gradient_count(self, size: int) -> int:
        """Two per step and example."""
        return 2 * self.tau * batch_examples(self.batch, size)

    @property
    def _head_lr(self) -> float | Array:
        return self.lr if self.head_lr is None else self.head_lr

    def _split(self, params: Params) -> tuple[Params, Params]:
        """The head, and the body."""
        return split(params, lambda path: is_any_named(path, self.head))

    def _personal_model(self, w: Params, p: Params) -> Params:
        """The same body with the head G + P."""
        generic, body = self._split(w)
        return combine(tree_add(generic, p), body)
