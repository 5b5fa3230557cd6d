"""SCAFFOLD (Karimireddy et al., ICML 2020): control variates against the drift of clients."""

from typing import ClassVar, final

from perfed.core.objective import Batch, BatchSize, Objective
from perfed.core.trees import Params, sgd_step, tree_add, tree_scale, tree_sub, tree_zeros_like
from perfed.methods.base import (
    ClientState,
    Extra,
    LocalUpdate,
    Method,
    Received,
    RoundContext,
    ServerState,
    method,
)
from perfed.methods.settings import Rate
from perfed.methods.steps import take_steps


@final
@method("outside-scaffold")
class Scaffold(Method):
    """SCAFFOLD, Algorithm 1, option II.

    x: the server's model; y: the local one; c, c_i: control variates of the server and of the
    client.

    Attributes:
        lr: the local step size.
        server_lr: the server's step size; 1 is plain averaging.
        tau: local steps per round.
        batch: examples per step.
    """

    step_sizes: ClassVar[tuple[str, ...]] = ("lr",)
    local_steps: ClassVar[str] = "tau"

    lr: Rate = 0.02
    server_lr: Rate = 1.0
    tau: int = 10
    batch: BatchSize = 20

    def init_client_state(self, params: Params) -> ClientState:
        """c_i."""
        return tree_zeros_like(params)

    def init_server_state(self, params: Params) -> ServerState:
        """c."""
        return tree_zeros_like(params)

    def broadcast(self, server_state: ServerState) -> Extra:
        """c goes down beside x."""
        return server_state

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """Lines 7 to 14."""
        x, c, c_i = received.params, received.extra, client_state

        def step(y: Params, d: Batch) -> Params:  # line 10
            return sgd_step(y, self.lr, tree_add(tree_sub(objective.grad(y, d), c_i), c))

        y, _ = take_steps(step, x, objective.batches(context.key, self.tau, self.batch), self.tau)
        drift = tree_scale(1 / (self.tau * self.lr), tree_sub(x, y))
        new_c_i = tree_add(tree_sub(c_i, c), drift)  # line 12, option II
        return LocalUpdate(y, client_state=new_c_i, extra=tree_sub(new_c_i, c_i))

    def server_update(
        self,
        params: Params,
        server_state: ServerState,
        mean_delta: Params,
        mean_extra: Extra,
        context: RoundContext,
    ) -> tuple[Params, ServerState]:
        """Lines 16 and 17."""
        c = tree_add(server_state, tree_scale(context.cohort / context.clients, mean_extra))
        return tree_add(params, tree_scale(self.server_lr, mean_delta)), c
