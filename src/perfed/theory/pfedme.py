"""pFedMe's Proposition 1, Lemmas 1 and 2, and Theorems 1 and 2, parts (a) and (b), for a run."""

from math import ceil, inf, log, sqrt

from perfed.methods import PFedMe
from perfed.simulation import Experiment
from perfed.theory import bounds
from perfed.theory.conditions import (
    GAP_NOTE,
    Bound,
    Condition,
    Diagnosis,
    at_least,
    at_most,
    batch_size,
    common_conditions,
    convexity,
    smoothness,
)
from perfed.theory.constants import Constants

# An inner problem counts as solved when this part of its initial error remains.
_INNER_ERROR = 0.1


def diagnose_pfedme(method: PFedMe, experiment: Experiment, c: Constants, rounds: int) -> Diagnosis:
    """Theorem 1 where clients are strongly convex, Theorem 2 where they are not."""
    lower = convexity(experiment, c)
    convex = lower > 0
    mu = lower if convex else c.mu.value
    run = bounds.RunSize(rounds, method.local_rounds, experiment.cohort, c.clients)
    theorem = _theorem_1(method, c, mu, run) if convex else _theorem_2(method, c, run)
    kappa = bounds.inner_condition(method.lam, smoothness(c), mu)
    derived = {"L_F": method.lam, "kappa": kappa} | theorem.derived
    practice = _inner_conditions(method, smoothness(c), mu)
    conditions = theorem.conditions + practice[:2] + common_conditions(experiment) + practice[2:]
    return Diagnosis(method.name, derived, conditions, theorem.bounds)


def _theorem_1(method: PFedMe, c: Constants, mu: float, run: bounds.RunSize) -> Diagnosis:
    """As if f_i were as convex everywhere as at the measured model."""
    source, lam, beta = "pFedMe, Theorem 1", method.lam, method.beta
    mu_F = bounds.moreau_convexity(lam, mu)
    eta_hat = bounds.eta_hat_1(lam, mu, beta)
    delta2 = _inner_error(method, c, mu)
    # Measured here instead of at w*, which is not known; |grad F_i| is at most |grad f_i|.
    sigma_F1_2 = float((c.client_B**2).mean())
    part_a = bounds.pfedme_theorem_1(
        (c.B.value / mu_F) ** 2, sigma_F1_2, delta2, lam, mu, beta, run
    )
    part_b = bounds.pfedme_theorem_1b(part_a, sigma_F1_2, delta2, lam, mu)
    note = (
        "w* is not known: sigma_F1 and |w_0 - w*| <= |grad F|/mu_F are of the measured model, "
        "with |grad f_i| for |grad F_i|"
    )
    derived = {
        "delta": sqrt(delta2), "mu_F": mu_F, "kappa_F": lam / mu_F, "eta_hat_1": eta_hat,
        "sigma_F1": sqrt(sigma_F1_2),
    }  # fmt: skip
    risk = "the bound says nothing yet about a run that short"
    limit = 2 / (eta_hat * mu_F)
    conditions = [
        at_least("T >= 2/(eta_hat_1 mu_F)", source, run.rounds, limit, risk),
        *_step_conditions(method, source, "eta_hat_1", eta_hat),
    ]
    return Diagnosis(
        method.name,
        derived,
        conditions,
        [
            Bound(f"{source} (a)", "F - F* of the averaged model", part_a._asdict(), True, note),
            Bound(f"{source} (b)", "the personal models' |theta_i - w*|^2", part_b._asdict(), True,
                  note),
        ],
    )  # fmt: skip


def _theorem_2(method: PFedMe, c: Constants, run: bounds.RunSize) -> Diagnosis:
    """Losses that are smooth but not convex."""
    source, L, lam = "pFedMe, Theorem 2", smoothness(c), method.lam
    eta_hat = bounds.eta_hat_2(lam)
    delta2 = _inner_error(method, c, 0.0)
    diversity = bounds.moreau_diversity(lam, L, c.gamma_G.value)
    part_a = bounds.pfedme_theorem_2(c.loss, diversity, delta2, lam, method.beta, run)
    part_b = bounds.pfedme_theorem_2b(part_a, diversity, delta2, lam)
    derived = {"delta": sqrt(delta2), "sigma_F2": sqrt(diversity), "eta_hat_2": eta_hat}
    risk = "inner problems may have several solutions, and the envelope is not smooth"
    limit = sqrt(8 * L**2 + 1)
    conditions = [
        at_least("lambda > 2 sqrt(2) L", "pFedMe, Lemma 2", lam, sqrt(8) * L, risk),
        at_least("lambda >= sqrt(8 L^2 + 1)", source, lam, limit, risk),
        *_step_conditions(method, source, "eta_hat_2", eta_hat),
    ]
    return Diagnosis(
        method.name,
        derived,
        conditions,
        [
            Bound(f"{source} (a)", "|grad F|^2 of a random round", part_a._asdict(), True,
                  GAP_NOTE),
            Bound(f"{source} (b)", "the personal models' |theta_i - w_t*|^2", part_b._asdict(),
                  True, GAP_NOTE),
        ],
    )  # fmt: skip


def _inner_error(method: PFedMe, c: Constants, mu: float) -> float:
    """delta^2 of Lemma 1."""
    batch, nu = batch_size(method.batch), method.nu or 0.0
    return bounds.inner_error(method.lam, smoothness(c), mu, c.sigma_G.value, batch, nu)


def _step_conditions(
    method: PFedMe, source: str, limit_name: str, eta_hat: float
) -> list[Condition]:
    """What both theorems ask of eta and beta."""
    limit = eta_hat / (method.beta * method.local_rounds)
    return [
        at_most(
            f"eta <= {limit_name}/(beta R)", source, method.eta, limit,
            "local models drift apart; far above it, the global model swings or diverges",
        ),
        at_least(
            "beta >= 1", source, method.beta, 1.0,
            "the theorems do not cover it: the server takes smaller steps than the clients' mean",
        ),
    ]  # fmt: skip


def _inner_conditions(method: PFedMe, L: float, mu: float) -> list[Condition]:
    """What inner and local steps need in any case."""
    lam = method.lam
    conditions = [
        at_most(
            "inner_lr < 2/(lambda + L)", "practice", method.inner_lr, 2 / (lam + L),
            "the inner solver diverges, and the personal models with it",
        ),
        at_most(
            "eta lambda <= 1", "practice", method.eta * lam, 1.0,
            "a local step goes past the personal model it aims at; above 2 it diverges",
        ),
    ]  # fmt: skip
    if method.nu is None and method.inner_solver == "gd":
        risk = (
            "inner problems are not solved: the personal models stay near w, and delta is larger "
            "than Lemma 1 says"
        )
        steps = inner_steps(lam, L, mu, method.inner_lr)
        text = "K leaves a tenth of the inner error"
        conditions.append(at_least(text, "practice", method.inner_steps, steps, risk))
    return conditions


def inner_steps(lam: float, L: float, mu: float, inner_lr: float | None = None) -> float:
    """K for gradient descent on the inner problem, to leave a tenth of its first error.

    A step leaves |1 - lr (lambda + h)| of the error in a direction of curvature h, and h is between
    mu and L. With lr = 1/(lambda + L) that is 1 - 1/kappa at most, and K = kappa log(10).
    """
    rate = inner_lr or 1 / (lam + L)
    remaining = max(abs(1 - rate * (lam + mu)), abs(1 - rate * (lam + L)))
    if remaining >= 1:
        return inf
    return 1 if remaining <= _INNER_ERROR else ceil(log(_INNER_ERROR) / log(remaining))
