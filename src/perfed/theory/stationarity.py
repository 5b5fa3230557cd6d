"""The left-hand sides of the theorems: how far a run is from a stationary point of its problem."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from perfed.core.errors import require_count
from perfed.core.objective import ALL, Objective
from perfed.core.trees import Params
from perfed.methods import Method, PerFedAvg, PFedMe
from perfed.simulation import EngineState, Simulator
from perfed.simulation.engine import MappedFunction
from perfed.simulation.experiment import NO_RECORD
from perfed.theory.client_functions import client_function, flat

# The inner problems of pFedMe are solved to this |grad h|^2, within so many steps.
_NU, _MOST_STEPS = 1e-10, 2000


Gradient = Callable[[Objective, Params], Params]


class Stationarity(NamedTuple):
    """How far a model is from a stationary point.

    Attributes:
        squared: |grad F(w)|^2.
        diversity: the mean over clients of |grad F_i(w) - grad F(w)|^2.
    """

    squared: float
    diversity: float


class Decay(NamedTuple):
    """|grad F|^2 along a run: at w, or at Remark 4.7's iterate where the method sends one.

    Attributes:
        round: how many rounds were done.
        squared: |grad F|^2 there.
    """

    round: Int[np.ndarray, " points"]
    squared: Float[np.ndarray, " points"]


def problem_gradient(method: Method, smoothness: float | None = None) -> Gradient:
    """The gradient of what a method minimizes, on all of a client's data.

    Per-FedAvg: that of F_i(w) = f_i(w - alpha grad f_i(w)); pFedMe: lambda (w - theta_i(w)), with L
    as `smoothness` to solve for theta_i; of others that of f_i itself.
    """
    if isinstance(method, PerFedAvg):
        exact = replace(method, variant="exact")
        return lambda objective, w: exact.meta_gradient(objective, w, ALL, ALL, ALL)
    if isinstance(method, PFedMe):
        rate = method.inner_lr if smoothness is None else 1 / (method.lam + smoothness)
        solver = replace(method, batch="full", nu=_NU, inner_steps=_MOST_STEPS, inner_lr=rate)

        def envelope(objective: Objective, w: Params) -> Params:
            theta = solver.prox(objective, w, w, ALL)
            return jax.tree.map(lambda a, b: method.lam * (a - b), w, theta)

        return envelope
    return lambda objective, w: objective.grad(w)


def stationarity(engine: Simulator, w: Params, smoothness: float | None = None) -> Stationarity:
    """How far a model is from a stationary point of the run's problem."""
    state = engine.init()._replace(params=w, server_state=None, clients=NO_RECORD)
    return _stationarity(_gradients(engine, smoothness), state)


def decay(engine: Simulator, rounds: int, every: int = 1, smoothness: float | None = None) -> Decay:
    """|grad F|^2 every so many rounds of a run.

    Of models with personal leaves it is at the shared leaves and the initial personal ones.
    """
    require_count("rounds", rounds)
    require_count("every", every)
    gradients = _gradients(engine, smoothness)
    state, rounds_done, squared = engine.init(), [], []
    for done in range(0, rounds, every):
        state = engine.advance(state, min(every, rounds - done))
        sends_iterate = getattr(engine.experiment.method, "send_iterate", False)
        w = state.server_state if sends_iterate else engine.experiment.common_model(state)
        rounds_done.append(int(state.round))
        at_w = state._replace(params=w, server_state=None, clients=NO_RECORD)
        squared.append(_stationarity(gradients, at_w).squared)
    return Decay(np.array(rounds_done), np.array(squared))


def _gradients(engine: Simulator, smoothness: float | None) -> MappedFunction:
    gradient = problem_gradient(engine.experiment.method, smoothness)
    return engine.map_clients(
        client_function(lambda objective, w, key: flat(gradient(objective, w)))
    )


def _stationarity(gradients: MappedFunction, state: EngineState) -> Stationarity:
    of_clients = np.asarray(jnp.asarray(gradients(state, None)), np.float64)
    mean = of_clients.mean(axis=0)
    spread = float(np.mean(np.sum((of_clients - mean) ** 2, axis=1)))
    return Stationarity(float(mean @ mean), spread)
