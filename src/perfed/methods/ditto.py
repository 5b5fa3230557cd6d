"""Ditto (Li, Hu, Beirami, Smith, ICML 2021): a personal model beside the global one, held to it.

Every client minimizes h_k(v_k; w*) = F_k(v_k) + (lam/2) |v_k - w*|^2, where w* is what federated
training, here FedAvg, arrives at: objective (Ditto). Training goes on as if v_k were not there.
"""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from perfed.core.objective import BatchSize, Objective
from perfed.core.trees import Params
from perfed.methods.base import (
    ClientState,
    LocalUpdate,
    Method,
    Received,
    RoundContext,
    batch_examples,
    method,
)
from perfed.methods.settings import Rate, Weight
from perfed.methods.steps import local_sgd, proximal_gradient


class DittoState(NamedTuple):
    """What a client keeps.

    Attributes:
        v: its personal model v_k.
        rounds: in how many rounds it has taken part.
    """

    v: Params
    rounds: Int[Array, ""]


@final
@method("ditto")
class Ditto(Method):
    """Ditto, Algorithm 1, with tau steps of SGD for the global model.

    Attributes:
        lr: the step size of the global model's local steps.
        personal_lr: eta, the step size of the personal model.
        lam: lambda, how strongly v_k is held to the global model; 0 is training alone.
        tau: local steps per round, of the global model.
        personal_steps: s, steps per round of the personal model.
        batch: examples per step of either.
    """

    step_sizes: ClassVar[tuple[str, ...]] = ("lr", "personal_lr")
    penalties: ClassVar[Mapping[str, str]] = {"personal_lr": "lam"}
    local_steps: ClassVar[str] = "tau"
    adapt_step_size: ClassVar[str] = "personal_lr"
    adapt_work: ClassVar[str] = "personal_steps"

    lr: Rate = 0.02
    personal_lr: Rate = 0.02
    lam: Weight = 1.0
    tau: int = 10
    personal_steps: int = 10
    batch: BatchSize = 20

    def init_client_state(self, params: Params) -> ClientState:
        """v_k^0 = w^0."""
        return DittoState(params, jnp.int32(0))

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """UPDATE_GLOBAL, whose w_k is sent; then v_k from where it was, which is kept."""
        w, (v, rounds) = received.params, client_state
        global_key, personal_key = jax.random.split(context.key)
        w_k = local_sgd(objective, w, self.lr, self.tau, self.batch, global_key)
        v = self._personal_steps(objective, v, w, personal_key)
        return LocalUpdate(w_k, client_state=DittoState(v, rounds + 1))

    def personalize(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> Params:
        """v_k as the client's last round left it; of one that never took part, steps from w."""
        w = received.params
        return jax.lax.cond(
            client_state.rounds > 0,
            lambda: client_state.v,
            lambda: self._personal_steps(objective, w, w, context.key),
        )

    def gradient_count(self, size: int) -> int:
        """(tau + s) times the batch."""
        return (self.tau + self.personal_steps) * batch_examples(self.batch, size)

    def _personal_steps(
        self, objective: Objective, v: Params, w: Params, key: PRNGKeyArray
    ) -> Params:
        """S steps v <- v - eta (grad F_k(v; D) + lam (v - w^t)) on h_k(v; w^t), w^t as received."""
        return local_sgd(
            objective,
            v,
            self.personal_lr,
            self.personal_steps,
            self.batch,
            key,
            gradient=proximal_gradient(objective, self.lam, w),
        )
