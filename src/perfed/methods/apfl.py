"""APFL (Deng, Kamani, Mahdavi, 2020): a mixture of a global and a local model, learned adaptively.

Client i has a local version w_i of the global model w, a local model v_i, and its personalized
model is their mixture vbar_i = alpha_i v_i + (1 - alpha_i) w_i.
"""

from typing import ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from perfed.core.errors import require
from perfed.core.objective import Batch, BatchSize, Objective
from perfed.core.trees import Params, sgd_step, tree_sub, tree_vdot
from perfed.methods.base import ClientState, LocalUpdate, Method, Received, RoundContext, method
from perfed.methods.settings import Rate, Weight
from perfed.methods.steps import take_steps

_Carry = tuple[Params, Params, Float[Array, ""]]


class APFLState(NamedTuple):
    """What a client keeps.

    Attributes:
        v: its local model v_i.
        alpha: its mixing weight alpha_i.
        rounds: in how many rounds it has taken part.
    """

    v: Params
    alpha: Float[Array, ""]
    rounds: Int[Array, ""]


@final
@method("apfl")
class APFL(Method):
    """APFL, Algorithm 1 (Local Descent APFL).

    Attributes:
        lr: eta, the step size of w_i, v_i and alpha_i.
        alpha: the mixing weight that clients begin with, from 0 (the global model) to 1 (their
            own); the only one if it is not `adaptive`.
        adaptive: whether each client learns its alpha_i, once per round.
        tau: local steps per round.
        batch: examples per step.
    """

    step_sizes: ClassVar[tuple[str, ...]] = ("lr",)
    local_steps: ClassVar[str] = "tau"
    adapt_work: ClassVar[str] = "tau"

    lr: Rate = 0.02
    alpha: Weight = 0.5
    adaptive: bool = True
    tau: int = 10
    batch: BatchSize = 20

    def check(self) -> None:
        """A mixing weight of at most 1."""
        computed = isinstance(self.alpha, jax.Array)
        require(computed or self.alpha <= 1, "alpha", self.alpha, "must be a number from 0 to 1")

    def init_client_state(self, params: Params) -> ClientState:
        """v_i^(0) = w^(0)."""
        return APFLState(params, jnp.asarray(self.alpha, float), jnp.int32(0))

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """Tau steps of w_i, which is sent, and of v_i and alpha_i, which are kept.

        All three move at once, by gradients on one batch at the iterates before the step.
        """

        def step(carry: _Carry, first_and_d: tuple[Bool[Array, ""], Batch]) -> _Carry:
            (w, v, alpha), (first, d) = carry, first_and_d
            g = objective.grad(_mixed(alpha, v, w), d)  # at vbar_i
            new_w = sgd_step(w, self.lr, objective.grad(w, d))
            # The gradient of f_i(alpha v + (1 - alpha) w) with respect to v has the factor alpha.
            new_v = sgd_step(v, self.lr * alpha, g)
            if not self.adaptive:
                return new_w, new_v, alpha
            # eq. (10), (11), at the first step of a round: <v_i - w_i, grad f_i(vbar_i)>.
            slope = tree_vdot(tree_sub(v, w), g)
            stepped = jnp.clip(alpha - self.lr * slope, 0.0, 1.0).astype(alpha.dtype)
            return new_w, new_v, jnp.where(first, stepped, alpha)

        start = (received.params, client_state.v, client_state.alpha)
        batches = objective.batches(context.key, self.tau, self.batch)
        steps = (jnp.arange(self.tau) == 0, batches)
        (w, v, alpha), _ = take_steps(step, start, steps, self.tau)
        return LocalUpdate(w, client_state=APFLState(v, alpha, client_state.rounds + 1))

    def personalize(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> Params:
        """Alpha_i v_i + (1 - alpha_i) w.

        A client that never took part first trains, with v_i from w.
        """

        def own(state: APFLState) -> Params:
            return _mixed(state.alpha, state.v, received.params)

        def newcomer() -> Params:
            start = self.init_client_state(received.params)
            return own(self.local_update(objective, received, start, context).client_state)

        return jax.lax.cond(client_state.rounds > 0, lambda: own(client_state), newcomer)

    def gradient_count(self, size: int) -> int:
        """Two per step: at w_i and at the mixture."""
        return 2 * super().gradient_count(size)


def _mixed(alpha: Float[Array, ""], v: Params, w: Params) -> Params:
    """Alpha v + (1 - alpha) w."""
    return jax.tree.map(lambda a, b: (alpha * a + (1 - alpha) * b).astype(b.dtype), v, w)
