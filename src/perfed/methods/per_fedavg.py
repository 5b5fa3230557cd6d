"""Per-FedAvg (Fallah, Mokhtari, Ozdaglar, NeurIPS 2020): a start that suits all after one step.

It minimizes F(w) = (1/n) sum_i f_i(w - alpha grad f_i(w)), problem (3), by local SGD on
F_i(w) = f_i(w - alpha grad f_i(w)) and averaging (Algorithm 1).
"""

from typing import ClassVar, Literal, final

import jax

from perfed.core.objective import Batch, BatchSize, Objective
from perfed.core.random import uniform_below
from perfed.core.trees import Params, sgd_step, tree_add, tree_sub
from perfed.methods.base import (
    ClientState,
    Extra,
    LocalUpdate,
    Method,
    Received,
    RoundContext,
    ServerState,
    batch_examples,
    method,
)
from perfed.methods.schedules import Constant, Schedule
from perfed.methods.settings import Rate
from perfed.methods.steps import local_sgd, take_steps

Variant = Literal["exact", "fo", "hf"]


@final
@method("per-fedavg")
class PerFedAvg(Method):
    """Per-FedAvg, Algorithm 1.

    Attributes:
        variant: how the Hessian of (8) is treated. `exact`: Hessian-vector products by automatic
            differentiation; `hf`: differences of gradients (Hessian-free); `fo`: dropped.
        alpha: the step size of the adaptation.
        beta: the step size of the meta-step.
        schedule: how beta changes from round to round; `Polynomial` for the diminishing steps of
            Remark 4.8.
        tau: meta-steps per round.
        batch: the size D of the batch the adaptation uses.
        batch_outer: the size D' of the batch the gradient after it uses; None: `batch`.
        batch_hessian: the size D'' of the batch the Hessian uses; None: `batch`.
        delta: the width of the differences of `hf`, in units of the vector the Hessian multiplies
            (fixed, as published: near a stationary point float32 rounding takes over).
        adapt_steps: adaptation steps, in training and in the personalized model.
        adapt_batch: examples per step of the personalized model; "full" is problem (3) itself.
        send_iterate: also average the cohort's iterates at a random t_k (Remark 4.7); the server
            keeps their mean.
    """

    step_sizes: ClassVar[tuple[str, ...]] = ("beta",)
    local_steps: ClassVar[str] = "tau"
    adapt_step_size: ClassVar[str] = "alpha"
    adapt_work: ClassVar[str] = "adapt_steps"

    variant: Variant = "hf"
    alpha: Rate = 0.01
    beta: Rate = 0.001
    schedule: Schedule = Constant()
    tau: int = 10
    batch: BatchSize = 40
    batch_outer: BatchSize | None = None
    batch_hessian: BatchSize | None = None
    delta: Rate = 0.001
    adapt_steps: int = 1
    adapt_batch: BatchSize = "full"
    send_iterate: bool = False

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """Tau meta-steps (7): w <- w - beta (estimate of grad F_i(w)), each from w itself."""
        beta = self.schedule(self.beta, context.round, self.tau)
        key_d, key_d1, key_d2 = jax.random.split(context.key, 3)
        batches = (
            objective.batches(key_d, (self.tau, self.adapt_steps), self.batch),
            objective.batches(key_d1, self.tau, self.batch_outer or self.batch),
            objective.batches(
                key_d2, (self.tau, self.adapt_steps), self.batch_hessian or self.batch
            ),
        )

        def step(w: Params, ddd: tuple[Batch, Batch, Batch]) -> Params:
            return sgd_step(w, beta, self.meta_gradient(objective, w, *ddd))

        pick = uniform_below(context.cohort_key, (), self.tau) if self.send_iterate else None
        w, iterate = take_steps(step, received.params, batches, self.tau, pick)
        extra = None if iterate is None else tree_sub(iterate, received.params)
        return LocalUpdate(w, extra=extra)

    def meta_gradient(
        self, objective: Objective, w: Params, d: Batch, d1: Batch, d2: Batch
    ) -> Params:
        """The estimate (8) of grad F_i(w).

        It is (I - alpha H(w; D'')) grad f_i(w~; D') with w~ = w - alpha grad f_i(w; D). With more
        adaptation steps w = w_0 -> w_1 -> ... -> w~ it is the chain rule through all of them: the
        product of the I - alpha H(w_j; D''_j), times grad f_i(w~; D').
        """
        path = [w]
        for j in range(self.adapt_steps):
            path.append(sgd_step(path[-1], self.alpha, objective.grad(path[-1], d.at(j))))
        v = objective.grad(path[-1], d1)
        if self.variant != "fo":
            for j in reversed(range(self.adapt_steps)):
                v = sgd_step(v, self.alpha, self._hessian(objective, path[j], v, d2.at(j)))
        return v

    def init_server_state(self, params: Params) -> ServerState:
        """The mean iterate, if it is asked for."""
        return params if self.send_iterate else None

    def server_update(
        self,
        params: Params,
        server_state: ServerState,
        mean_delta: Params,
        mean_extra: Extra,
        context: RoundContext,
    ) -> tuple[Params, ServerState]:
        """The average of the local models, and of their iterates."""
        iterate = tree_add(params, mean_extra) if self.send_iterate else None
        return tree_add(params, mean_delta), iterate

    def personalize(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> Params:
        """The adapted model w - alpha grad f_i(w), one step or a few."""
        return local_sgd(
            objective, received.params, self.alpha, self.adapt_steps, self.adapt_batch, context.key
        )

    def gradient_count(self, size: int) -> int:
        """Tau (D + D' + 2 D''): a Hessian-vector product counts as two gradients, as in `hf`."""
        outer, hessian = self.batch_outer or self.batch, self.batch_hessian or self.batch
        inner = batch_examples(self.batch, size)
        if self.variant != "fo":
            inner += 2 * batch_examples(hessian, size)
        return self.tau * (self.adapt_steps * inner + batch_examples(outer, size))

    def _hessian(self, objective: Objective, w: Params, v: Params, batch: Batch) -> Params:
        """H(w) v, exactly or as (grad f(w + delta v) - grad f(w - delta v)) / (2 delta)."""
        if self.variant == "exact":
            return objective.hvp(w, v, batch)
        by = jax.tree.map(lambda leaf: self.delta * leaf, v)
        difference = objective.grad_difference(w, by, batch)
        return jax.tree.map(lambda leaf: leaf / (2 * self.delta), difference)
