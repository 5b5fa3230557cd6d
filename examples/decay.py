"""Predicted and measured decay on a controlled problem: the figure of docs/theory.md.

    python examples/decay.py [FILE]

Ten clients have quadratics of one known curvature and centers of their own, so that all constants
are known. FedPAQ runs with the step sizes of its Theorem 1, Per-FedAvg with the largest step that
Theorem 4.5 allows; what is drawn are means over 20 and 5 seeds, and the theorems' bounds.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from perfed import Experiment, FedAvg, Federation, LowPrecision, PerFedAvg, Task, Vectorized
from perfed.theory import bounds
from perfed.theory.constants import Effort, measure
from perfed.theory.stationarity import decay

DIMENSION, CLIENTS, BATCH = 8, 10, 4


@dataclass(frozen=True)
class Linear:
    """One number out, no bias."""

    def init(self, key):
        """Far from the optimum."""
        return 3.0 * jax.random.normal(key, (DIMENSION,))

    def apply(self, params, x):
        """X'w."""
        return x @ params


def half_squared(outputs, y):
    """(output - y)^2 / 2."""
    return 0.5 * (outputs - y) ** 2


def controlled() -> tuple[Federation, np.ndarray]:
    """Regressions on unit vectors: f_i = |w - center_i|^2 / 16 and a constant, so L = mu = 1/8."""
    rng = np.random.default_rng(0)
    x = np.tile(np.eye(DIMENSION, dtype=np.float32), (8, 1))
    parts = []
    for _ in range(CLIENTS):
        noise = rng.normal(size=len(x))
        parts.append((x, (x @ rng.normal(size=DIMENSION) + noise).astype(np.float32)))
    centers = np.array([y.reshape(8, DIMENSION).mean(axis=0) for _, y in parts])
    return Federation.from_arrays(parts, parts), centers.mean(axis=0)


def fedpaq(data: Federation, optimum: np.ndarray, task: Task):
    """|x_k - x*|^2 and the bound (12), from k_0 on."""
    L = mu = 1 / DIMENSION
    tau, s = 2, 4
    method = FedAvg(lr=4 / mu, tau=tau, batch=BATCH, diminishing=True)
    codec = LowPrecision(s)
    setups = [Experiment(data, task, method, CLIENTS, seed, codec=codec) for seed in range(20)]
    engine = Vectorized(setups[0])
    q = codec.variance((DIMENSION,))
    sigma = measure(engine, jnp.asarray(optimum, jnp.float32), Effort(examples=64)).sigma_G.value
    k0 = bounds.fedpaq_k0(L, mu, q, tau, CLIENTS, CLIENTS)
    C = bounds.fedpaq_c(L, mu, sigma, q, CLIENTS, CLIENTS, BATCH)
    states = [setup.init_state() for setup in setups]
    points, done = [], 0
    for k in np.unique(np.geomspace(k0, 16 * k0, 12).astype(int)):
        states = [state for state, _ in engine.run_rounds(setups, states, int(k) - done)]
        done = int(k)
        found = np.mean([np.sum((np.asarray(state.params) - optimum) ** 2) for state in states])
        points.append((done, float(found)))
    first = points[0][1]
    predicted = [sum(bounds.fedpaq_theorem_1(first, C, k, k0, tau)) for k, _ in points]
    return np.array(points), np.array(predicted)


def per_fedavg(data: Federation, task: Task):
    """The mean of |grad F|^2 up to each round, and the terms of Theorem 4.5 with O(1) = 1."""
    alpha, tau, rounds = 1.0, 4, 2000
    L = 1 / DIMENSION
    beta = 1 / (10 * tau * bounds.per_fedavg_smoothness(L, 0.0, 1.0, alpha))
    method = PerFedAvg("exact", alpha, beta, tau=tau, batch=BATCH, send_iterate=True)
    runs = [
        decay(Vectorized(Experiment(data, task, method, CLIENTS // 2, seed)), rounds, 20)
        for seed in range(5)
    ]
    squared = np.mean([run.squared for run in runs], axis=0)
    mean = np.cumsum(squared) / np.arange(1, len(squared) + 1)
    found = measure(
        Vectorized(Experiment(data, task, method, CLIENTS, 0)), effort=Effort(examples=64)
    )
    L_F = bounds.per_fedavg_smoothness(L, 0.0, found.B.value, alpha)
    noise = bounds.per_fedavg_variance(
        found.B.value, L, found.sigma_G.value, found.sigma_H.value, alpha, BATCH, BATCH, BATCH
    )
    diversity = bounds.per_fedavg_diversity(found.B.value, found.gamma_G.value, 0.0, alpha)
    # F* is at least 0: losses are squares.
    terms = [
        bounds.theorem_4_5(
            found.loss, L, L_F, noise, diversity, found.sigma_G.value, alpha, beta, tau, int(k),
            CLIENTS // 2, CLIENTS, BATCH,
        )
        for k in runs[0].round
    ]  # fmt: skip
    return runs[0].round, mean, np.array(terms)


def main() -> None:
    """Run both, and draw."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("decay.png")
    data, optimum = controlled()
    task = Task(Linear(), loss=half_squared)
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    points, predicted = fedpaq(data, optimum, task)
    left.loglog(points[:, 0], predicted, "k--", label="Theorem 1 (12)")
    left.loglog(points[:, 0], points[:, 1], "o-", color="#0072B2", markersize=3, label="measured")
    left.set(title="FedPAQ", xlabel="Round k", ylabel="E |x_k - x*|²")
    rounds, mean, terms = per_fedavg(data, task)
    right.loglog(rounds, terms.sum(axis=1), "k--", label="Theorem 4.5, O(1) taken as 1")
    right.loglog(rounds, terms[:, 0], "k:", label="its first term alone")
    right.loglog(rounds, mean, "-", color="#D55E00", label="measured")
    right.set(title="Per-FedAvg", xlabel="Round K", ylabel="mean of |grad F|² so far")
    for axes in (left, right):
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(file, dpi=160)
    print(f"written to {file}")
    print("FedPAQ, measured / predicted:", np.round(points[:, 1] / predicted, 5))
    print("Per-FedAvg, measured / predicted:", np.round(mean[::20] / terms.sum(axis=1)[::20], 5))


if __name__ == "__main__":
    main()
