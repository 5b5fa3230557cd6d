"""pFedMe (Dinh, Tran, Nguyen, NeurIPS 2020): personal models tied to the global one.

It minimizes F(w) = (1/N) sum_i F_i(w), where F_i(w) = min_theta f_i(theta) + (lam/2) |theta - w|^2
is the Moreau envelope of f_i, by local gradient steps on F_i and a server that mixes (Algorithm 1).

Three vectors, never to be confused: the global w, the client's local w_i, its personal theta_i.
"""

from typing import ClassVar, Literal, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from perfed.core.objective import Batch, BatchSize, Objective
from perfed.core.trees import Params, sgd_step, squared_norm, tree_add, tree_scale, tree_sub
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
from perfed.methods.settings import Rate
from perfed.methods.steps import proximal_gradient

Solver = Literal["gd", "nesterov"]
InnerStart = Literal["received", "local", "kept"]
_Pair = tuple[Params, Params]


@final
@method("pfedme")
class PFedMe(Method):
    """pFedMe, Algorithm 1.

    Attributes:
        lam: lambda, how strongly a personal model is held to the local one.
        eta: the step size of the local rounds.
        local_rounds: R, local rounds per global one.
        inner_solver: gradient descent or Nesterov's accelerated one, for the inner problem (7). The
            two are one where inner_lr * lam >= 1, which leaves no room for momentum.
        inner_steps: K, inner steps per local round; with `nu`, their limit: give it room.
        inner_lr: the step size of the inner solver.
        nu: stop the inner solver once |grad h|^2 <= nu (8); None: always take K steps.
        inner_start: where theta starts. `received`: at the received w, then on from the last theta
            (the authors' code); `local`: at the current w_i in each local round; `kept`: at the
            theta kept from the client's last round (a variant: Algorithm 1 has every client work in
            every round, here the theta of those not sampled waits).
        beta: the server's mixing: w <- (1 - beta) w + beta mean(w_i).
        batch: examples per local round.
    """

    local_steps: ClassVar[str] = "local_rounds"
    adapt_work: ClassVar[str] = "local_rounds"

    lam: Rate = 15.0
    eta: Rate = 0.01
    local_rounds: int = 20
    inner_solver: Solver = "gd"
    inner_steps: int = 5
    inner_lr: Rate = 0.01
    nu: Rate | None = None
    inner_start: InnerStart = "received"
    beta: Rate = 1.0
    batch: BatchSize = 20

    def init_client_state(self, params: Params) -> ClientState:
        """A client keeps its theta; before its first round that is the first global model."""
        return params

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """Lines 5-8: R local rounds from w. Sends w_i and keeps theta_i."""
        w = received.params

        def local_round(carry: _Pair, d: Batch) -> tuple[_Pair, None]:
            w_i, theta = carry
            start = w_i if self.inner_start == "local" else theta
            theta = self.prox(objective, w_i, start, d)
            gradient = jax.tree.map(lambda a, b: self.lam * (a - b), w_i, theta)  # (6)
            return (sgd_step(w_i, self.eta, gradient), theta), None

        first_theta = client_state if self.inner_start == "kept" else w
        batches = objective.batches(context.key, self.local_rounds, self.batch)
        (w_i, theta), _ = jax.lax.scan(
            local_round, (w, first_theta), batches, length=self.local_rounds
        )
        return LocalUpdate(w_i, client_state=theta)

    def server_update(
        self,
        params: Params,
        server_state: ServerState,
        mean_delta: Params,
        mean_extra: Extra,
        context: RoundContext,
    ) -> tuple[Params, ServerState]:
        """Line 10: (1 - beta) w + beta mean(w_i)."""
        return tree_add(params, tree_scale(self.beta, mean_delta)), server_state

    def personalize(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> Params:
        """The theta_i at the end of the R local rounds started from w."""
        return self.local_update(objective, received, client_state, context).client_state

    def gradient_count(self, size: int) -> int:
        """R K times the batch; with `nu`, at most."""
        return self.local_rounds * self.inner_steps * batch_examples(self.batch, size)

    def prox(self, objective: Objective, w_i: Params, start: Params, d: Batch) -> Params:
        """Line 7: approximately minimize h(theta) = f_i(theta; D) + (lam/2) |theta - w_i|^2."""
        gradient = proximal_gradient(objective, self.lam, w_i)

        def grad_h(theta: Params) -> Params:
            return gradient(theta, d)

        # For a convex f, h is lam-strongly convex; with inner_lr as 1/smoothness, this is the
        # momentum of Nesterov's method for that condition number.
        root = jnp.minimum(self.inner_lr * self.lam, 1.0) ** 0.5
        momentum = (1 - root) / (1 + root)
        accelerated = self.inner_solver == "nesterov"

        def inner_step(theta: Params, ahead: Params, g: Params) -> tuple[Params, Params]:
            new = sgd_step(ahead, self.inner_lr, g)
            return new, sgd_step(new, -momentum, tree_sub(new, theta)) if accelerated else new

        def step(_: Int[Array, ""], carry: tuple[Params, Params]) -> tuple[Params, Params]:
            theta, ahead = carry
            return inner_step(theta, ahead, grad_h(ahead))

        nu = self.nu
        if nu is None:
            return jax.lax.fori_loop(0, self.inner_steps, step, (start, start))[0]

        # (8) speaks of the gradient at theta itself, so theta is where it is measured.
        Carry = tuple[Int[Array, ""], Params, Params, Params]

        def proceed(carry: Carry) -> Bool[Array, ""]:
            k, _, _, g = carry
            return (k < self.inner_steps) & (squared_norm(g) > nu)

        def step_with_gradient(carry: Carry) -> Carry:
            k, theta, ahead, g = carry
            theta, ahead = inner_step(theta, ahead, grad_h(ahead) if accelerated else g)
            return k + 1, theta, ahead, grad_h(theta)

        start_carry: Carry = (jnp.int32(0), start, start, grad_h(start))
        return jax.lax.while_loop(proceed, step_with_gradient, start_carry)[1]
