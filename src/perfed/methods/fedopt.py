"""Optimizers at the server: FedAvgM, FedAdam and FedYogi.

FedAvgM: Hsu, Qi, Brown, 2019. FedAdam and FedYogi: Reddi, Charles, Zaheer, Garrett, Rush, Konecny,
Kumar, McMahan, ICLR 2021, Algorithm 2. In all three clients take plain SGD steps, and the mean
delta stands for minus a gradient, which the server's optimizer follows.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from perfed.core.objective import BatchSize, Objective
from perfed.core.trees import Params, tree_add, tree_scale, tree_zeros_like
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
from perfed.methods.settings import Decay, Rate, settings_tree
from perfed.methods.steps import local_sgd


@settings_tree
class FedOpt(Method, ABC):
    """FedOpt, Reddi et al.'s Algorithm 1, with SGD as the clients' optimizer.

    Attributes:
        lr: eta_l, the local step size.
        server_lr: eta, the server's step size.
        tau: K, local steps per round.
        batch: examples per step.
    """

    step_sizes: ClassVar[tuple[str, ...]] = ("lr",)
    local_steps: ClassVar[str] = "tau"

    lr: Rate = 0.02
    server_lr: Rate = 1.0
    tau: int = 10
    batch: BatchSize = 20

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """Tau steps x_i <- x_i - eta_l grad F_i(x_i; D), from x_t."""
        return LocalUpdate(
            local_sgd(objective, received.params, self.lr, self.tau, self.batch, context.key)
        )


@final
@method("fedavgm")
class FedAvgM(FedOpt):
    """FedAvgM: v <- momentum v + Delta, w <- w + server_lr v (the paper has server_lr = 1).

    Attributes:
        lr: the local step size.
        server_lr: the server's step size. Momentum multiplies steps by up to 1 / (1 - momentum).
        tau: local steps per round.
        batch: examples per step.
        momentum: beta; 0 is FedAvg.
    """

    momentum: Decay = 0.9

    def init_server_state(self, params: Params) -> ServerState:
        """v, which starts at 0."""
        return tree_zeros_like(params)

    def server_update(
        self,
        params: Params,
        server_state: ServerState,
        mean_delta: Params,
        mean_extra: Extra,
        context: RoundContext,
    ) -> tuple[Params, ServerState]:
        """The mean delta joins the velocity, undamped; w moves along that."""
        v = tree_add(tree_scale(self.momentum, server_state), mean_delta)
        return tree_add(params, tree_scale(self.server_lr, v)), v


class Moments(NamedTuple):
    """m_t and v_t of Algorithm 2, entry by entry."""

    m: Params
    v: Params


@settings_tree
class AdaptiveFedOpt(FedOpt, ABC):
    """Algorithm 2: as it stands, with no bias correction and v_{-1} = adaptivity^2."""

    server_lr: Rate = 0.01
    beta_1: Decay = 0.9
    beta_2: Decay = 0.99
    adaptivity: Rate = 1e-3

    def init_server_state(self, params: Params) -> ServerState:
        """m_{-1} = 0; v_{-1} = adaptivity^2, the least that Algorithm 2 allows."""
        return Moments(
            tree_zeros_like(params),
            jax.tree.map(lambda leaf: jnp.full_like(leaf, self.adaptivity**2), params),
        )

    def server_update(
        self,
        params: Params,
        server_state: ServerState,
        mean_delta: Params,
        mean_extra: Extra,
        context: RoundContext,
    ) -> tuple[Params, ServerState]:
        """X + eta m / (sqrt(v) + adaptivity), with the new m and v."""
        b = self.beta_1
        m = tree_add(tree_scale(b, server_state.m), tree_scale(1 - b, mean_delta))
        v = jax.tree.map(
            lambda v, delta: self.second_moment(v, delta**2).astype(v.dtype),
            server_state.v,
            mean_delta,
        )
        direction = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + self.adaptivity), m, v)
        return tree_add(params, tree_scale(self.server_lr, direction)), Moments(m, v)

    @abstractmethod
    def second_moment(
        self, v: Float[Array, "..."], square: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        """v_t from v_{t-1} and Delta_t^2."""


@final
@method("fedadam")
class FedAdam(AdaptiveFedOpt):
    """FedAdam, Algorithm 2.

    Attributes:
        lr: eta_l, the local step size.
        server_lr: eta, the server's step size.
        tau: K, local steps per round (the paper's tau is `adaptivity`).
        batch: examples per step.
        beta_1: decay of the mean of deltas.
        beta_2: decay of the mean of their squares.
        adaptivity: tau in the paper: added to the root of v; the larger, the less adaptive.
    """

    def second_moment(
        self, v: Float[Array, "..."], square: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        """v_t = beta_2 v_{t-1} + (1 - beta_2) Delta_t^2."""
        return self.beta_2 * v + (1 - self.beta_2) * square


@final
@method("fedyogi")
class FedYogi(AdaptiveFedOpt):
    """FedYogi, Algorithm 2: v changes no faster than Delta_t^2 asks for, whatever its size.

    Attributes:
        lr: eta_l, the local step size.
        server_lr: eta, the server's step size.
        tau: K, local steps per round (the paper's tau is `adaptivity`).
        batch: examples per step.
        beta_1: decay of the mean of deltas.
        beta_2: 1 - beta_2 is how fast the second moments follow.
        adaptivity: tau in the paper: added to the root of v; the larger, the less adaptive.
    """

    def second_moment(
        self, v: Float[Array, "..."], square: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        """v_t = v_{t-1} - (1 - beta_2) Delta_t^2 sign(v_{t-1} - Delta_t^2)."""
        return v - (1 - self.beta_2) * square * jnp.sign(v - square)
