"""The constants of the papers' assumptions, measured at a model, without ever forming a Hessian.

Assumptions 2 to 5 of Per-FedAvg, 1 to 3 of pFedMe, 1 to 4 of FedPAQ bound gradients, curvatures and
their spread for *all* models; what is measured here holds at one. Where examples or clients are
sampled, intervals have 95 % confidence (for all clients together; the largest of noisy numbers is
biased upward). An eigenvalue is approached from inside the spectrum: its interval includes the
Lanczos residual.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from perfed.core.errors import DivergedError, require, require_count
from perfed.core.trees import Params
from perfed.simulation import EngineState, Simulator
from perfed.simulation.experiment import HINT, NO_RECORD, Experiment
from perfed.theory.client_functions import (
    gradients,
    groups_by_size,
    hessian_noise,
    hessian_products,
    on_clients,
    spectrum,
    third_derivative,
)
from perfed.theory.estimates import Estimate, largest, mean_estimate, smallest
from perfed.theory.lanczos import curvature, lanczos_of_many, spectral_norms


@final
@dataclass(frozen=True)
class Effort:
    """How many examples, clients and steps the measurements take.

    Attributes:
        steps: Lanczos steps for a client's curvature.
        examples: examples of a client whose gradients are compared.
        hessian_examples: examples of a client whose Hessians are compared.
        hessian_clients: clients whose Hessians are compared with the average one.
        hessian_steps: Lanczos steps for a difference of Hessians.
        tensor_starts: starts of the power iterations for the third derivative.
        tensor_steps: steps of each power iteration.
    """

    steps: int = 30
    examples: int = 256
    hessian_examples: int = 6
    hessian_clients: int = 16
    hessian_steps: int = 12
    tensor_starts: int = 3
    tensor_steps: int = 8

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            require_count(field, value)


USUAL = Effort()


@final
@dataclass(frozen=True)
class Constants:
    """The constants of the theorems, at one model.

    Attributes:
        B: largest |grad f_i|.
        L: largest |Hessian of f_i| (spectral norm): smoothness.
        mu: smallest eigenvalue of any client's Hessian; below 0, f_i is not convex there.
        rho: largest third derivative of f_i, the Hessian's Lipschitz constant nearby; from
            power iterations, so a lower bound.
        sigma_G: root of the largest client's mean |grad l(z) - grad f_i|^2; pFedMe's gamma_f and
            FedPAQ's sigma.
        sigma_H: the same for Hessians of single examples.
        gamma_G: root of the mean over clients of |grad f_i - grad f|^2; pFedMe's sigma_f.
        gamma_H: the same for Hessians.
        q: the codec's (FedPAQ, Assumption 1); None: it is not unbiased.
        example_B: largest gradient of the sampled examples, for (14a).
        loss: f(w), the mean over clients of f_i.
        gradient: |grad f|, of the mean over clients.
        client_L: each client's L_i.
        client_B: each client's B_i.
        clients: n.
        parameters: how many parameters the model has.
    """

    B: Estimate
    L: Estimate
    mu: Estimate
    rho: Estimate
    sigma_G: Estimate
    sigma_H: Estimate
    gamma_G: Estimate
    gamma_H: Estimate
    q: float | None
    example_B: float
    loss: float
    gradient: float
    client_L: Float[np.ndarray, " clients"]
    client_B: Float[np.ndarray, " clients"]
    clients: int
    parameters: int

    def joined(self, other: "Constants") -> "Constants":
        """The larger constants of two models of one federation, this one first.

        `loss` is that of the first, where a run begins; `gradient` is that of the other.
        """

        def larger(one: Estimate, two: Estimate) -> Estimate:
            return Estimate(*(max(pair) for pair in zip(one, two, strict=True)))

        both = {
            name: larger(getattr(self, name), getattr(other, name))
            for name in ("B", "L", "rho", "sigma_G", "sigma_H", "gamma_G", "gamma_H")
        }
        return Constants(
            **both,
            mu=Estimate(*(min(pair) for pair in zip(self.mu, other.mu, strict=True))),
            q=self.q,
            example_B=max(self.example_B, other.example_B),
            loss=self.loss,
            gradient=other.gradient,
            client_L=np.maximum(self.client_L, other.client_L),
            client_B=np.maximum(self.client_B, other.client_B),
            clients=self.clients,
            parameters=self.parameters,
        )


def measure(
    engine: Simulator,
    w: Params | None = None,
    effort: Effort = USUAL,
    log: Callable[[str], None] = lambda line: None,
) -> Constants:
    """The constants at a model; None: at the run's first one. `log` gets a line for each stage."""
    experiment = engine.experiment
    allowed = (
        "keeps running statistics, so that its loss depends on the rest of the batch, and the "
        "theorems do not apply; use group or layer normalization"
    )
    require(
        experiment.task.is_state is None, "model", type(experiment.task.model).__name__, allowed
    )
    w = experiment.init_params() if w is None else w
    state = engine.init()._replace(params=w, server_state=None, clients=NO_RECORD)
    sizes = tuple(leaf.size for leaf in jax.tree.leaves(w))
    n, p = experiment.federation.clients, sum(sizes)

    log(f"gradients of {n} clients")
    first = on_clients(engine, gradients(effort.examples), state)
    gradient = np.asarray(first.gradient, np.float64)
    _require_finite(gradient, experiment)
    spread = gradient - gradient.mean(axis=0)
    B_i = np.linalg.norm(gradient, axis=1)
    used = np.arange(effort.examples) < np.asarray(experiment.federation.train.size)[:, None]

    log(f"curvature of {n} clients")
    L_i, mu_i = curvature(*on_clients(engine, spectrum(min(effort.steps, p)), state))
    log("Hessians of single examples")
    noise = hessian_noise(effort.hessian_examples, min(effort.hessian_steps, p))
    norms, upper = spectral_norms(*on_clients(engine, noise, state))
    log("third derivatives")
    third = third_derivative(effort.tensor_starts, effort.tensor_steps)
    rho = float(np.asarray(on_clients(engine, third, state)).max())
    log("Hessians of clients against their average")
    gamma_H = _hessian_diversity(engine, state, effort)
    return Constants(
        B=Estimate.exact(B_i.max()),
        L=largest(L_i),
        mu=smallest(mu_i),
        rho=Estimate(rho, rho, float("inf")),
        sigma_G=_largest_mean(np.asarray(first.squares), experiment).root(),
        sigma_H=_largest_mean(norms**2, experiment, upper**2).root(),
        gamma_G=Estimate.exact(float(np.mean(np.sum(spread**2, axis=1)))).root(),
        gamma_H=gamma_H,
        q=experiment.pipeline.variance(sizes),
        example_B=float(np.asarray(first.norms)[used].max()),
        loss=float(np.mean(first.loss)),
        gradient=float(np.linalg.norm(gradient.mean(axis=0))),
        client_L=np.array([L.value for L in L_i]),
        client_B=B_i,
        clients=n,
        parameters=p,
    )


def _require_finite(gradient: Float[np.ndarray, "clients p"], experiment: Experiment) -> None:
    invalid = np.flatnonzero(~np.isfinite(gradient).all(axis=1))
    if len(invalid):
        raise DivergedError(
            f"nothing can be measured at this model: the gradient of client "
            f"{experiment.federation.names[invalid[0]]} is not finite. {HINT}"
        )


def _largest_mean(
    values: Float[np.ndarray, "clients examples"],
    experiment: Experiment,
    upper: Float[np.ndarray, "clients examples"] | None = None,
) -> Estimate:
    """The largest of the clients' means over their examples, from those that were sampled.

    `upper` bounds each value, where that is not the value itself.
    """
    means, upper = [], values if upper is None else upper
    for own, own_upper, n in zip(values, upper, experiment.federation.train.size, strict=True):
        seen, highest = (
            np.asarray(part[: min(len(own), int(n))], np.float64) for part in (own, own_upper)
        )
        # All clients' intervals hold together.
        means.append(mean_estimate(seen, int(n), highest, doubt=0.05 / len(values)))
    return largest(means)


def _hessian_diversity(engine: Simulator, state: EngineState, effort: Effort) -> Estimate:
    """The root of (1/n) sum_i |Hessian of f_i - Hessian of f|^2, over sampled clients (13)."""
    experiment = engine.experiment
    n = experiment.federation.clients
    count = min(n, effort.hessian_clients)
    rng = np.random.default_rng(experiment.seed)
    sampled = np.sort(rng.choice(n, count, replace=False))
    at, shaped = ravel_pytree(state.params)
    run, groups = engine.map_clients(hessian_products(shaped)), groups_by_size(engine)

    def difference(vectors: Float[np.ndarray, "vectors p"]) -> Float[np.ndarray, "vectors p"]:
        total, own = np.zeros_like(vectors), np.zeros_like(vectors)
        for group in groups:
            products = np.asarray(run(state._replace(params=(state.params, vectors)), group))
            clients = list(dict.fromkeys(group))  # the last group may repeat its last client
            total += products[: len(clients)].sum(axis=0)
            for i, client in enumerate(clients):
                for place in np.flatnonzero(sampled == client):
                    own[place] = products[i, place]
        return own - total / n

    start = rng.normal(size=(count, at.size)).astype(np.float32)
    steps = min(effort.hessian_steps, at.size)
    norms, upper = spectral_norms(*lanczos_of_many(difference, start, steps))
    return mean_estimate(norms**2, n, upper**2).root()
