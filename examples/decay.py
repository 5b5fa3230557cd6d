"""Predicted and measured decay on quadratics: the figure of docs/theory.md.

    python examples/decay.py [FILE]

Ten clients have quadratics of curvature 1, so L = mu = 1. FedPAQ runs on clients that are alike, as
its paper assumes, with the step sizes of its Theorem 1; Per-FedAvg on clients with optima of their
own, with the largest step that Theorem 4.5 allows. Measurements are means over 20 and 5 seeds.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perfed import DivergedError, Experiment, Federation, PerFedAvg, Task, Vectorized, fedpaq
from perfed.simulation import EngineState, Traffic
from perfed.theory import Effort, bounds, decay, diagnose, measure

DIMENSION, CLIENTS, BATCH = 8, 10, 4
EVERY_EXAMPLE = Effort(examples=8 * DIMENSION)


class Curves(NamedTuple):
    """A theorem's bound and what was measured, round by round."""

    round: Float[np.ndarray, " points"]
    bound: Float[np.ndarray, " points"]
    measured: Float[np.ndarray, " points"]
    first_term: Float[np.ndarray, " points"]


class Linear:
    """One output, no bias."""

    def init(self, key: PRNGKeyArray) -> Float[Array, " dimension"]:
        """Far from the optimum."""
        return 3.0 * jax.random.normal(key, (DIMENSION,))

    def apply(
        self, params: Float[Array, " dimension"], x: Float[Array, "examples dimension"]
    ) -> Float[Array, " examples"]:
        """X'w."""
        return x @ params


def half_squared(outputs: Float[Array, " b"], y: Float[Array, " b"]) -> Float[Array, " b"]:
    """(output - y)^2 / 2."""
    return 0.5 * (outputs - y) ** 2


def quadratics(alike: bool) -> tuple[Federation, Float[np.ndarray, " dimension"]]:
    """Regressions with f_i(w) = |w - center_i|^2 / 2 + constant, and the mean of the centers."""
    rng = np.random.default_rng(0)
    x = np.tile(np.sqrt(DIMENSION) * np.eye(DIMENSION, dtype=np.float32), (8, 1))
    ys = [x @ rng.normal(size=DIMENSION) + rng.normal(size=len(x)) for _ in range(CLIENTS)]
    parts = [(x, (ys[0] if alike else y).astype(np.float32)) for y in ys]
    centers = [(x.T @ y) / len(x) for _, y in parts]
    return Federation.from_arrays(parts, parts), np.mean(centers, axis=0)


def fedpaq_curves() -> Curves:
    """E|x_k - x*|^2 and the bound (12), from round k_0 on."""
    data, optimum = quadratics(alike=True)
    tau, rounds = 2, 2560
    method, pipeline, cohort = fedpaq(rounds, tau, r=CLIENTS // 2, s=4, batch=BATCH, mu=1.0)
    first = Experiment(data, Task(Linear(), loss=half_squared), method, cohort, pipeline=pipeline)
    engine = Vectorized(first)
    constants = measure(engine, jnp.asarray(optimum, jnp.float32), EVERY_EXAMPLE)
    diagnosis = diagnose(first, constants, rounds)
    print("FedPAQ, conditions that are not met:", [c.text for c in diagnosis.broken])
    k0 = int(diagnosis.derived["k_0"])
    C = bounds.FedPAQConstants(*(diagnosis.derived[name] for name in ("C1", "C2", "C3")))

    experiments = [replace(first, seed=seed) for seed in range(20)]
    states = [experiment.init_state() for experiment in experiments]
    points, measured = range(k0, rounds + 1, k0), []
    for _ in points:
        states = [state_of(result) for result in engine.run_rounds(experiments, states, k0)]
        distances = [np.sum((np.asarray(state.params) - optimum) ** 2) for state in states]
        measured.append(float(np.mean(distances)))
    terms = np.array([bounds.fedpaq_theorem_1(measured[0], C, k, k0, tau) for k in points])
    return Curves(np.array(points), terms.sum(axis=1), np.array(measured), terms[:, 0])


def state_of(result: tuple[EngineState, Traffic] | DivergedError) -> EngineState:
    """The state after some rounds; an error if the run diverged."""
    if isinstance(result, DivergedError):
        raise result
    return result[0]


def per_fedavg_curves() -> Curves:
    """The mean of |grad F|^2 up to each round, and the terms of Theorem 4.5 with O(1) = 1."""
    data, _ = quadratics(alike=False)
    alpha, tau, rounds = 0.5, 4, 1000
    # rho is 0.
    beta = 1 / (10 * tau * bounds.per_fedavg_smoothness(L=1.0, rho=0.0, B=0.0, alpha=alpha))
    method = PerFedAvg("exact", alpha, beta, tau=tau, batch=BATCH, send_iterate=True)
    first = Experiment(data, Task(Linear(), loss=half_squared), method, CLIENTS // 2)
    runs = [decay(Vectorized(replace(first, seed=seed)), rounds, every=25) for seed in range(5)]
    squared = np.mean([run.squared for run in runs], axis=0)
    measured = np.cumsum(squared) / np.arange(1, len(squared) + 1)
    # f(w_0) stands for F(w_0) - F*: F(w_0) is smaller, and F* is at least 0.
    constants = measure(Vectorized(first), effort=EVERY_EXAMPLE)
    diagnoses = [diagnose(first, constants, int(k)) for k in runs[0].round]
    print("Per-FedAvg, conditions that are not met:", [c.text for c in diagnoses[0].broken])
    terms = np.array([list(diagnosis.bounds[0].terms.values()) for diagnosis in diagnoses])
    return Curves(runs[0].round, terms.sum(axis=1), measured, terms[:, 0])


def draw(axes: Axes, curves: Curves, bound: str, color: str) -> None:
    """One panel."""
    axes.loglog(curves.round, curves.bound, "k--", label=bound)
    axes.loglog(curves.round, curves.first_term, "k:", label="its first term alone")
    axes.loglog(curves.round, curves.measured, "-", color=color, label="measured")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def main() -> None:
    """Run both, and draw."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("decay.png")
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    one, two = fedpaq_curves(), per_fedavg_curves()
    draw(left, one, "Theorem 1 (12)", "#0072B2")
    left.set(title="FedPAQ, alike clients", xlabel="Round k", ylabel="E |x_k - x*|²")
    draw(right, two, "Theorem 4.5, O(1) taken as 1", "#D55E00")
    right.set(title="Per-FedAvg", xlabel="Round K", ylabel="mean of |grad F|² so far")
    figure.savefig(file, dpi=160)
    print(f"written to {file}")
    print("FedPAQ, measured / bound:", np.round((one.measured / one.bound)[::8], 4))
    print("Per-FedAvg, measured / bound:", np.round((two.measured / two.bound)[::13], 6))
    print("Per-FedAvg, measured / first term:", np.round((two.measured / two.first_term)[::13], 4))


if __name__ == "__main__":
    main()
