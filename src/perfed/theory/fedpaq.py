"""FedPAQ's Theorems 1 and 2 for a run of FedAvg; without a quantizer q is 0."""

from math import sqrt

import numpy as np

from perfed.methods import FedAvg
from perfed.methods.schedules import Harmonic
from perfed.simulation import Experiment
from perfed.theory import bounds
from perfed.theory.conditions import (
    GAP_NOTE,
    ROUNDING,
    Bound,
    Condition,
    Diagnosis,
    at_least,
    at_most,
    batch_size,
    common_conditions,
    convexity,
    descent,
    smoothness,
    unmet,
)
from perfed.theory.constants import Constants


def diagnose_fedavg(method: FedAvg, experiment: Experiment, c: Constants, rounds: int) -> Diagnosis:
    """Theorem 1 for harmonic step sizes, Theorem 2 for others."""
    L, r, n = smoothness(c), experiment.cohort, c.clients
    strongly_convex = isinstance(method.schedule, Harmonic)
    # A harmonic rate starts at 4/mu, above 2/L, and is soon far below.
    conditions = [] if strongly_convex else [descent("lr", method.lr, L)]
    conditions += [_alike_clients(experiment, c), *common_conditions(experiment)]
    derived = {"T": float(rounds * method.tau)}
    q = c.q
    if q is None:
        risk = "the quantizer's errors add up instead of canceling; no bound applies"
        conditions.append(unmet("the codec is unbiased", "FedPAQ, Assumption 1", risk))
        return Diagnosis(method.name, derived, conditions, [])
    derived |= {"q": q, "B_1": bounds.fedpaq_b1(L, q, r, n), "B_2": bounds.fedpaq_b2(q, r, n)}
    run = bounds.RunSize(rounds, method.tau, r, n)
    if strongly_convex:
        mu = convexity(experiment, c)
        theorem = _theorem_1(method, c, mu, q, run)
    else:
        theorem = _theorem_2(method, c, q, run)
    return Diagnosis(
        method.name, derived | theorem.derived, conditions + theorem.conditions, theorem.bounds
    )


def _alike_clients(experiment: Experiment, c: Constants) -> Condition:
    """Section 2 of FedPAQ: all clients' data are drawn from one distribution."""
    sizes = np.asarray(experiment.federation.train.size, np.float64)
    # Equal gradients differ by float32 rounding.
    gamma = c.gamma_G.value if c.gamma_G.value > ROUNDING * c.B.value else 0.0
    usual = c.sigma_G.value * sqrt(float(np.mean(1 / sizes)))
    risk = (
        "the bounds leave out how clients differ, and a run may exceed them (samples of one "
        f"distribution as large as these clients' would give about {usual:.2g})"
    )
    return at_most("gamma_G = 0 (clients are alike)", "FedPAQ, section 2", gamma, 0, risk)


def _theorem_1(method: FedAvg, c: Constants, mu: float, q: float, run: bounds.RunSize) -> Diagnosis:
    """Strongly convex losses, lr 4 / (mu (k tau + 1))."""
    source = "FedPAQ, Theorem 1"
    risk = "lr is for a curvature that some client does not have: progress stalls early"
    conditions = [at_most("4/lr <= mu", source, 4 / method.lr, mu, risk)]
    if mu <= 0:
        return Diagnosis(method.name, {}, conditions, [])
    # What is mu-strongly convex is so with any smaller mu, such as the one that lr is for.
    mu, L, tau = min(mu, 4 / method.lr), smoothness(c), method.tau
    k0 = bounds.fedpaq_k0(L, mu, q, tau, run.cohort, run.clients)
    batch = batch_size(method.batch)
    C = bounds.fedpaq_c(L, mu, c.sigma_G.value, q, run.cohort, run.clients, batch)
    risk = "the bound says nothing yet about a run that short"
    conditions.append(at_least("K >= k_0", source, run.rounds, k0, risk))
    # For strongly convex f, |x - x*| <= |grad f(x)| / mu.
    distance2 = (c.gradient / mu) ** 2
    k = max(run.rounds, k0)
    terms = bounds.fedpaq_theorem_1(distance2, C, k, k0, tau)
    note = (
        f"|x_k0 - x*|^2 is not known before the run: (|grad f| / mu)^2 = {distance2:.3g} of "
        f"the measured model stands for it; --after {k0} measures at x_k0 itself"
    )
    bound = Bound(source, f"E|x_k - x*|^2 after k = {k} rounds", terms._asdict(), False, note)
    derived = {"k_0": float(k0), **C._asdict()}
    return Diagnosis(method.name, derived, conditions, [bound])


def _theorem_2(method: FedAvg, c: Constants, q: float, run: bounds.RunSize) -> Diagnosis:
    """Losses that need not be convex, lr 1 / (L sqrt(T))."""
    source, L, T = "FedPAQ, Theorem 2", smoothness(c), run.rounds * method.tau
    conditions = [
        at_least("T >= 2", source, T, 2, "the theorem is for two steps at least"),
        at_most(
            "lr <= 1/(L sqrt(T))", source, method.lr, 1 / (L * sqrt(T)),
            "the noise of batches, cohorts and messages levels off higher than it could",
        ),
        at_most(
            "tau <= (sqrt(B_2^2 + 0.8) - B_2)/8 sqrt(T)", source, method.tau,
            bounds.longest_period(q, run),
            "clients drift apart between messages, and their mean is no longer a descent",
        ),
    ]  # fmt: skip
    sigma, batch = c.sigma_G.value, batch_size(method.batch)
    N_1, N_2 = bounds.fedpaq_n(sigma, q, run.cohort, run.clients, batch)
    terms = bounds.fedpaq_theorem_2(c.loss, L, sigma, q, run, batch)
    with_rate = f"{source} with lr = 1/(L sqrt(T))"
    bound = Bound(with_rate, "the mean of |grad f|^2", terms._asdict(), False, GAP_NOTE)
    return Diagnosis(method.name, {"N_1": N_1, "N_2": N_2}, conditions, [bound])
