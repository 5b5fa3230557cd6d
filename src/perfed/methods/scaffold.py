"""SCAFFOLD (Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, ICML 2020): control variates.

x: the server's model; y: a client's local one; c, c_i: the control variates of server and client,
estimates of the gradients of f and f_i, whose difference corrects the drift of local steps.
"""

from typing import ClassVar, Literal, final

from perfed.core.objective import Batch, BatchSize, Objective
from perfed.core.trees import (
    Params,
    combine,
    matching,
    sgd_step,
    tree_add,
    tree_scale,
    tree_sub,
    tree_zeros_like,
)
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

Variate = Literal["path", "gradient"]


@final
@method("scaffold")
class Scaffold(Method):
    """SCAFFOLD, Algorithm 1.

    Attributes:
        lr: eta_l, the local step size.
        server_lr: eta_g, the server's step size; 1 is plain averaging.
        tau: K, local steps per round.
        batch: examples per step.
        variate: how a client renews c_i (line 12). `path`, option II: from the path of its local
            steps, at no further cost; `gradient`, option I: the gradient at x, over all its data.
    """

    step_sizes: ClassVar[tuple[str, ...]] = ("lr",)
    local_steps: ClassVar[str] = "tau"

    lr: Rate = 0.02
    server_lr: Rate = 1.0
    tau: int = 10
    batch: BatchSize = 20
    variate: Variate = "path"

    def init_client_state(self, params: Params) -> ClientState:
        """c_i, which starts at 0."""
        return tree_zeros_like(params)

    def init_server_state(self, params: Params) -> ServerState:
        """c, which starts at 0: the mean of all c_i, as line 17 keeps it."""
        return tree_zeros_like(params)

    def broadcast(self, server_state: ServerState) -> Extra:
        """C goes down beside x."""
        return server_state

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """Lines 7 to 14. Sends y - x and c_i^+ - c_i, keeps c_i^+."""
        x, c_i = received.params, client_state
        # The server has no c for personal leaves, whose steps need no correction: c = c_i there.
        c = combine(received.extra, c_i)

        def step(y: Params, d: Batch) -> Params:  # line 10
            return sgd_step(y, self.lr, tree_add(tree_sub(objective.grad(y, d), c_i), c))

        y, _ = take_steps(step, x, objective.batches(context.key, self.tau, self.batch), self.tau)
        if self.variate == "gradient":  # line 12, option I
            new_c_i = objective.grad(x)
        else:  # option II
            drift = tree_scale(1 / (self.tau * self.lr), tree_sub(x, y))
            new_c_i = tree_add(tree_sub(c_i, c), drift)
        change = matching(received.extra, tree_sub(new_c_i, c_i))
        return LocalUpdate(y, client_state=new_c_i, extra=change)

    def server_update(
        self,
        params: Params,
        server_state: ServerState,
        mean_delta: Params,
        mean_extra: Extra,
        context: RoundContext,
    ) -> tuple[Params, ServerState]:
        """Lines 16 and 17: x + eta_g mean(y - x), c + (|S|/N) mean(c_i^+ - c_i)."""
        c = tree_add(server_state, tree_scale(context.cohort / context.clients, mean_extra))
        return tree_add(params, tree_scale(self.server_lr, mean_delta)), c

    def gradient_count(self, size: int) -> int:
        """K times the batch; with option I all of the client's data once more."""
        return super().gradient_count(size) + (size if self.variate == "gradient" else 0)
