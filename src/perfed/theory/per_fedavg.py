"""Per-FedAvg's Lemmas 4.2 to 4.4, G.1 and G.2, and Theorem 4.5 for a run."""

from math import sqrt

from perfed.methods import PerFedAvg
from perfed.methods.schedules import Constant
from perfed.simulation import Experiment
from perfed.theory import bounds
from perfed.theory.conditions import (
    GAP_NOTE,
    Bound,
    Condition,
    Diagnosis,
    at_most,
    batch_size,
    common_conditions,
    descent,
    smoothness,
    unmet,
)
from perfed.theory.constants import Constants

_SOURCE = "Per-FedAvg, Theorem 4.5"

# The lemma that bounds sigma_F, for each variant.
_LEMMAS = {"exact": "4.3", "hf": "G.2", "fo": "G.1"}


def diagnose_per_fedavg(
    method: PerFedAvg, experiment: Experiment, c: Constants, rounds: int
) -> Diagnosis:
    """Conditions and terms of Theorem 4.5, with the variant's own sigma_F."""
    L, alpha, beta = smoothness(c), method.alpha, method.beta
    L_F = bounds.per_fedavg_smoothness(L, c.rho.value, c.B.value, alpha)
    sigma_F2 = _variance(method, c)
    gamma_F2 = bounds.per_fedavg_diversity(c.B.value, c.gamma_G.value, c.gamma_H.value, alpha)
    bias = bounds.per_fedavg_bias(L, c.sigma_G.value, alpha, batch_size(method.batch))
    derived = {"L_F": L_F, "sigma_F": sqrt(sigma_F2), "gamma_F": sqrt(gamma_F2)}
    if method.variant == "exact":
        derived["bias"] = bias
    conditions = _conditions(method, experiment, L, L_F)
    if not isinstance(method.schedule, Constant):
        return Diagnosis(method.name, derived, conditions, [])
    run = bounds.RunSize(rounds, method.tau, experiment.cohort, c.clients)
    terms = bounds.theorem_4_5(c.loss, L_F, sigma_F2, gamma_F2, bias, beta, run)
    note = f"sigma_F of Lemma {_LEMMAS[method.variant]}; {GAP_NOTE}"
    bound = Bound(_SOURCE, "the mean of |grad F|^2", terms._asdict(), True, note)
    return Diagnosis(method.name, derived, conditions, [bound])


def _variance(method: PerFedAvg, c: Constants) -> float:
    """sigma_F^2 of the method's variant."""
    L, B, sigma_G, alpha = smoothness(c), c.B.value, c.sigma_G.value, method.alpha
    sizes = (method.batch, method.batch_outer, method.batch_hessian)
    batches = bounds.BatchSizes(*(batch_size(size or method.batch) for size in sizes))
    if method.variant == "exact":
        return bounds.per_fedavg_variance(B, L, sigma_G, c.sigma_H.value, alpha, batches)
    if method.variant == "fo":
        return bounds.first_order_variance(L, B, sigma_G, alpha, batches)
    rho, delta = c.rho.value, method.delta
    return bounds.hessian_free_variance(L, rho, B, sigma_G, alpha, delta, batches)


def _conditions(method: PerFedAvg, experiment: Experiment, L: float, L_F: float) -> list[Condition]:
    conditions = [
        at_most(
            "alpha <= 1/L", _SOURCE, method.alpha, 1 / L,
            "one step of adaptation overshoots, and the personal models are worse than w itself",
        ),
        at_most(
            "beta <= 1/(10 tau L_F)", _SOURCE, method.beta, 1 / (10 * method.tau * L_F),
            "clients drift apart within a round; far above it, losses grow instead of falling",
        ),
        descent("beta", method.beta, L),
        *common_conditions(experiment),
    ]  # fmt: skip
    if method.variant == "fo":
        risk = "omitting alpha H grad f adds an error that does not vanish"
        conditions.append(unmet("the Hessian term is kept", "Per-FedAvg, Lemma G.1", risk))
    if method.adapt_steps > 1:
        risk = "the theorem is for one adaptation step"
        conditions.append(unmet("one adaptation step", _SOURCE, risk))
    if not isinstance(method.schedule, Constant):
        risk = "the theorem is for constant steps; for diminishing ones Remark 4.8 gives no bound"
        conditions.append(unmet("a constant beta", _SOURCE, risk))
    return conditions
