"""Which conditions of the theorems a run meets, by what factor, and what breaking one risks."""

from collections.abc import Callable
from math import ceil, inf, log, sqrt
from typing import Literal, NamedTuple

import numpy as np

from perfed.core.objective import BatchSize
from perfed.methods import FedAvg, Method, PerFedAvg, PFedMe
from perfed.methods.optimizers import SGD
from perfed.methods.schedules import Constant, Harmonic
from perfed.pipeline.codecs import Float32
from perfed.simulation import Experiment
from perfed.theory import bounds
from perfed.theory.constants import Constants

# An inner problem counts as solved when what is left of its first error is this part of it.
_INNER_LEFT = 0.1

# Limits are known to about so many parts: eigenvalues are found in float32, from inside.
_ROUNDING = 1e-4

Sense = Literal["at most", "at least"]


class Condition(NamedTuple):
    """A condition, and how a run stands to it.

    Attributes:
        text: as the paper writes it.
        source: whose it is; "practice": no theorem's, but what such steps need in any case.
        value: the run's.
        sense: whether the value must be at most or at least the limit.
        limit: what the measured constants allow.
        risk: what breaking it risks, in plain words.
    """

    text: str
    source: str
    value: float
    sense: Sense
    limit: float
    risk: str

    @property
    def factor(self) -> float:
        """By what the limit is passed: 1 is just at it, above 1 is broken."""
        larger, smaller = self.value, self.limit
        if self.sense == "at least":
            larger, smaller = smaller, larger
        if smaller > 0:
            return larger / smaller
        return inf if larger > 0 else 1.0

    @property
    def holds(self) -> bool:
        """Whether it does, as far as constants measured in float32 can tell."""
        return self.factor <= 1 + _ROUNDING


class Bound(NamedTuple):
    """The right-hand side of a theorem's bound, for one run.

    Attributes:
        source: which theorem.
        bounded: what it bounds, in words.
        terms: of its right-hand side, by name.
        hidden: whether each term lacks a factor O(1).
        note: what stands for something that is not known; "" if nothing does.
    """

    source: str
    bounded: str
    terms: dict[str, float]
    hidden: bool
    note: str = ""


class Diagnosis(NamedTuple):
    """What the theory says of a run.

    Attributes:
        method: the run's method.
        derived: what follows from the constants, by the papers' names.
        conditions: what the theorems ask for.
        bounds: what they promise; they hold where their conditions do.
    """

    method: str
    derived: dict[str, float]
    conditions: list[Condition]
    bounds: list[Bound]

    @property
    def broken(self) -> list[Condition]:
        """The conditions that do not hold."""
        return [condition for condition in self.conditions if not condition.holds]


def diagnose(experiment: Experiment, constants: Constants, rounds: int) -> Diagnosis:
    """How a run of so many rounds stands to the theorems on its method."""
    by_method: dict[type[Method], Callable[..., Diagnosis]] = {
        FedAvg: _fedavg,
        PerFedAvg: _per_fedavg,
        PFedMe: _pfedme,
    }
    check = by_method.get(type(experiment.method), _any_method)
    return check(experiment.method, experiment, constants, rounds)


def _fedavg(method: FedAvg, experiment: Experiment, c: Constants, rounds: int) -> Diagnosis:
    """FedPAQ's theorems; without a quantizer q is 0."""
    L, mu, r, n = _curved(c), _convexity(experiment, c), experiment.cohort, c.clients
    T, m = rounds * method.tau, _size(method.batch)
    # A diminishing rate is 4/mu at first, which no step at a time allows, and soon far below.
    found = [] if isinstance(method.schedule, Harmonic) else [_descent("lr", method.lr, L)]
    found += [_clients_alike(experiment, c), *_assumed(experiment)]
    derived = {"T": float(T)}
    q = c.q
    if q is None:
        risk = "the quantizer's errors add up instead of canceling; no bound applies"
        found.append(_no("the codec is unbiased", "FedPAQ, Assumption 1", risk))
        return Diagnosis(method.name, derived, found, [])
    derived |= {
        "q": q,
        "B_1": bounds.fedpaq_b1(L, q, r, n),
        "B_2": bounds.fedpaq_b2(q, r, n),
    }
    if isinstance(method.schedule, Harmonic):
        source = "FedPAQ, Theorem 1"
        risk = "lr is for a curvature that some client does not have: progress stalls early"
        found.append(_rule("4/lr <= mu", source, 4 / method.lr, "at most", mu, risk))
        if mu <= 0:
            return Diagnosis(method.name, derived, found, [])
        # What is mu-strongly convex is so with anything less, such as what the rate is for.
        mu = min(mu, 4 / method.lr)
        k0 = bounds.fedpaq_k0(L, mu, q, method.tau, r, n)
        derived["k_0"] = k0
        C = bounds.fedpaq_c(L, mu, c.sigma_G.value, q, r, n, m)
        derived |= C._asdict()
        risk = "the bound says nothing yet of a run that short"
        found.append(_rule("K >= k_0", source, rounds, "at least", k0, risk))
        # Of strongly convex f, |x - x*| <= |grad f(x)| / mu.
        distance2 = (c.gradient / mu) ** 2
        terms = bounds.fedpaq_theorem_1(distance2, C, max(rounds, k0), k0, method.tau)
        note = (
            f"|x_k0 - x*|^2 is not known before the run: (|grad f| / mu)^2 = {distance2:.3g} of "
            f"the measured model stands for it; --after {k0} measures at x_k0 itself"
        )
        bounded = f"E|x_k - x*|^2 after k = {max(rounds, k0)} rounds"
        bound = Bound(source, bounded, terms._asdict(), False, note)
        return Diagnosis(method.name, derived, found, [bound])
    source = "FedPAQ, Theorem 2"
    rate = 1 / (L * sqrt(T))
    short = "the theorem is of two steps at least"
    found.append(_rule("T >= 2", source, T, "at least", 2, short))
    risk = "the noise of batches, cohorts and messages levels off higher than it could"
    found.append(_rule("lr <= 1/(L sqrt(T))", source, method.lr, "at most", rate, risk))
    longest = bounds.longest_period(q, rounds, method.tau, r, n)
    risk = "clients drift apart between messages, and their mean is no longer a descent"
    text = "tau <= (sqrt(B_2^2 + 0.8) - B_2)/8 sqrt(T)"
    found.append(_rule(text, source, method.tau, "at most", longest, risk))
    derived["N_1"], derived["N_2"] = bounds.fedpaq_n(c.sigma_G.value, q, r, n, m)
    given = bounds.fedpaq_theorem_2(c.loss, L, c.sigma_G.value, q, method.tau, rounds, r, n, m)
    bound = Bound(
        f"{source} with lr = 1/(L sqrt(T))", "the mean of |grad f|^2", given._asdict(), False,
        _GAP,
    )  # fmt: skip
    return Diagnosis(method.name, derived, found, [bound])


def _clients_alike(experiment: Experiment, c: Constants) -> Condition:
    """Section 2 of FedPAQ: all clients' data are drawn from one distribution."""
    sizes = np.asarray(experiment.federation.train.size, np.float64)
    # What remains of gradients that are the same, in float32, is no difference.
    gamma = c.gamma_G.value if c.gamma_G.value > _ROUNDING * c.B.value else 0.0
    usual = c.sigma_G.value * sqrt(float(np.mean(1 / sizes)))
    risk = (
        "the bounds leave out how clients differ, and a run may exceed them (samples of one "
        f"distribution as large as these clients' would give about {usual:.2g})"
    )
    return _rule("gamma_G = 0 (clients are alike)", "FedPAQ, section 2", gamma, "at most", 0, risk)


def _any_method(method: Method, experiment: Experiment, c: Constants, rounds: int) -> Diagnosis:
    """No theorem of these papers speaks of it: only what local steps need in any case."""
    sizes = [(name, getattr(method, name)) for name in method.step_sizes]
    found = [_descent(name, rate, _curved(c)) for name, rate in sizes]
    return Diagnosis(method.name, {}, found, [])


def _per_fedavg(method: PerFedAvg, experiment: Experiment, c: Constants, rounds: int) -> Diagnosis:
    """Lemmas 4.2 to 4.4 and Theorem 4.5; Lemmas G.1 and G.2 for `fo` and `hf`."""
    L, alpha, beta = _curved(c), method.alpha, method.beta
    D = _size(method.batch)
    D1, D2 = (_size(size or method.batch) for size in (method.batch_outer, method.batch_hessian))
    B, rho, sigma_G = c.B.value, c.rho.value, c.sigma_G.value
    L_F = bounds.per_fedavg_smoothness(L, rho, B, alpha)
    sigma_F2 = {
        "exact": bounds.per_fedavg_variance(B, L, sigma_G, c.sigma_H.value, alpha, D, D1, D2),
        "hf": bounds.hessian_free_variance(L, rho, B, sigma_G, alpha, method.delta, D, D1, D2),
        "fo": bounds.first_order_variance(L, B, sigma_G, alpha, D, D1),
    }[method.variant]
    gamma_F2 = bounds.per_fedavg_diversity(B, c.gamma_G.value, c.gamma_H.value, alpha)
    source = "Per-FedAvg, Theorem 4.5"
    overshoots = (
        "one step of adaptation overshoots, and the personal models are worse than w itself"
    )
    found = [
        _rule("alpha <= 1/L", source, alpha, "at most", 1 / L, overshoots),
        _rule(
            "beta <= 1/(10 tau L_F)", source, beta, "at most", 1 / (10 * method.tau * L_F),
            "clients drift apart within a round; far above it, losses grow instead of falling",
        ),
        _descent("beta", beta, L),
        *_assumed(experiment),
    ]  # fmt: skip
    if method.variant == "fo":
        risk = "what is left out, alpha H grad f, adds an error that does not vanish"
        found.append(_no("the Hessian term is kept", "Per-FedAvg, Lemma G.1", risk))
    if method.adapt_steps > 1:
        found.append(_no("one adaptation step", source, "the theorem is of one"))
    constant = isinstance(method.schedule, Constant)
    if not constant:
        risk = "the theorem is of constant steps; of diminishing ones Remark 4.8 gives no bound"
        found.append(_no("a constant beta", source, risk))
    derived = {"L_F": L_F, "sigma_F": sqrt(sigma_F2), "gamma_F": sqrt(gamma_F2)}
    if method.variant == "exact":
        derived["bias"] = bounds.per_fedavg_bias(L, sigma_G, alpha, D)
    given: list[Bound] = []
    if constant:
        terms = bounds.theorem_4_5(
            c.loss, L, L_F, sigma_F2, gamma_F2, sigma_G, alpha, beta, method.tau, rounds,
            experiment.cohort, c.clients, D,
        )  # fmt: skip
        lemma = {"exact": "4.3", "hf": "G.2", "fo": "G.1"}[method.variant]
        note = f"sigma_F of Lemma {lemma}; {_GAP}"
        given = [Bound(source, "the mean of |grad F|^2", terms._asdict(), True, note)]
    return Diagnosis(method.name, derived, found, given)


def _pfedme(method: PFedMe, experiment: Experiment, c: Constants, rounds: int) -> Diagnosis:
    """Proposition 1, Lemmas 1 and 2, and Theorem 1 or 2."""
    L, mu, lam, beta, R = _curved(c), c.mu.value, method.lam, method.beta, method.local_rounds
    convex = _convexity(experiment, c) > 0
    mu = _convexity(experiment, c) if convex else mu
    kappa = bounds.inner_condition(lam, L, mu)
    nu = method.nu or 0.0
    delta2 = bounds.inner_error(
        lam, L, mu if convex else 0.0, c.sigma_G.value, _size(method.batch), nu
    )
    derived = {"L_F": lam, "kappa": kappa, "delta": sqrt(delta2)}
    practice = [
        _rule(
            "inner_lr < 2/(lambda + L)", "practice", method.inner_lr, "at most", 2 / (lam + L),
            "the inner solver diverges, and the personal models with it",
        ),
        _rule(
            "eta lambda <= 1", "practice", method.eta * lam, "at most", 1.0,
            "a local step goes past the personal model it aims at; above 2 it diverges",
        ),
        *_assumed(experiment),
    ]  # fmt: skip
    if method.nu is None and method.inner_solver == "gd":
        risk = (
            "inner problems are left half solved: the personal models stay near w, and delta is "
            "larger than Lemma 1 says"
        )
        steps = inner_steps(lam, L, mu, method.inner_lr)
        text = "K leaves a tenth of the inner error"
        practice.append(_rule(text, "practice", method.inner_steps, "at least", steps, risk))
    beta_risk = "the theorems do not cover it: the server moves less than the clients say"
    if convex:
        source = "pFedMe, Theorem 1"  # if f_i is as convex everywhere
        mu_F = bounds.moreau_convexity(lam, mu)
        eta_hat = bounds.eta_hat_1(lam, mu, beta)
        derived |= {"mu_F": mu_F, "kappa_F": lam / mu_F, "eta_hat_1": eta_hat}
        found = [
            _rule("T >= 2/(eta_hat_1 mu_F)", source, rounds, "at least", 2 / (eta_hat * mu_F),
                  "the bound says nothing yet of a run that short"),
        ]  # fmt: skip
        # Measured here, not at w*, which is not known; |grad F_i| is at most |grad f_i|.
        sigma_F1_2 = float((c.client_B**2).mean())
        derived["sigma_F1"] = sqrt(sigma_F1_2)
        part_a = bounds.pfedme_theorem_1(
            (c.B.value / mu_F) ** 2, sigma_F1_2, delta2, lam, mu, beta, R, rounds,
            experiment.cohort, c.clients,
        )  # fmt: skip
        personal = bounds.pfedme_theorem_1b(part_a, sigma_F1_2, delta2, lam, mu)
        bounded = ("F - F* of the averaged model", "the personal models' |theta_i - w*|^2")
        note = (
            "w* is not known: sigma_F1 and |w_0 - w*| <= |grad F|/mu_F are of the measured model, "
            "with |grad f_i| for |grad F_i|"
        )
    else:
        source = "pFedMe, Theorem 2"
        eta_hat = bounds.eta_hat_2(lam)
        diversity = bounds.moreau_diversity(lam, L, c.gamma_G.value)
        derived |= {"sigma_F2": sqrt(diversity), "eta_hat_2": eta_hat}
        risk = "inner problems may have several solutions, and the envelope is not smooth"
        found = [
            _rule("lambda > 2 sqrt(2) L", "pFedMe, Lemma 2", lam, "at least", sqrt(8) * L, risk),
            _rule("lambda >= sqrt(8 L^2 + 1)", source, lam, "at least", sqrt(8 * L**2 + 1), risk),
        ]
        part_a = bounds.pfedme_theorem_2(
            c.loss, diversity, delta2, lam, beta, R, rounds, experiment.cohort, c.clients
        )
        personal = bounds.pfedme_theorem_2b(part_a, diversity, delta2, lam)
        bounded = ("|grad F|^2 of a random round", "the personal models' |theta_i - w_t*|^2")
        note = _GAP
    text = f"eta <= {'eta_hat_1' if convex else 'eta_hat_2'}/(beta R)"
    risk = "local models drift apart; far above it, the global model swings or diverges"
    found.append(_rule(text, source, method.eta, "at most", eta_hat / (beta * R), risk))
    found.append(_rule("beta >= 1", source, beta, "at least", 1.0, beta_risk))
    given = [
        Bound(f"{source} (a)", bounded[0], part_a._asdict(), True, note),
        Bound(f"{source} (b)", bounded[1], personal._asdict(), True, note),
    ]
    return Diagnosis(method.name, derived, found + practice, given)


def inner_steps(lam: float, L: float, mu: float, inner_lr: float | None = None) -> float:
    """K for gradient descent on the inner problem, to leave a tenth of its first error.

    A step leaves |1 - lr (lambda + h)| of the error in a direction of curvature h, and h is between
    mu and L. With lr = 1/(lambda + L) that is 1 - 1/kappa at most, and K = kappa log(10).
    """
    rate = inner_lr or 1 / (lam + L)
    left = max(abs(1 - rate * (lam + mu)), abs(1 - rate * (lam + L)))
    if left >= 1:
        return inf
    return 1 if left <= _INNER_LEFT else ceil(log(_INNER_LEFT) / log(left))


def _convexity(experiment: Experiment, c: Constants) -> float:
    """A lower estimate of mu, as if f_i were as convex everywhere; not above 0: it is not convex.

    Eigenvalues at the low end are found last, and from above; a penalty is a floor for them.
    """
    l2 = experiment.task.l2
    return max(c.mu.low, l2) if 0 < 0.99 * l2 <= c.mu.value else c.mu.low


def _assumed(experiment: Experiment) -> list[Condition]:
    """What all the theorems take for granted, where the run has something else."""
    found = []
    if experiment.weighting == "size":
        risk = "the problem is then the mean weighted by size, not the papers'"
        found.append(_no("uniform averages", "all theorems", risk))
    if experiment.sampling == "epochs":
        risk = "batches are not independent; usually they are better, but no bound says so"
        found.append(_no("independent batches", "all theorems", risk))
    optimizer = getattr(experiment.method, "optimizer", SGD())
    if optimizer != SGD():
        risk = "the theorems are of plain steps along the gradient"
        found.append(_no("plain SGD", "all theorems", risk))
    if experiment.pipeline.clip is not None:
        risk = "clipped deltas are biased, and no bound says by how much"
        found.append(_no("deltas as they are", "all theorems", risk))
    if not all(experiment.is_shared):
        risk = "the theorems are of models that all clients share"
        found.append(_no("no personal leaves", "all theorems", risk))
    if not isinstance(experiment.downlink, Float32):
        found.append(_no("the server's model arrives as it is", "all theorems", _UNCOUNTED))
    counted = isinstance(experiment.method, FedAvg)
    if not isinstance(experiment.pipeline.codec, Float32) and not counted:
        found.append(_no("messages without loss", "this method's theorems", _UNCOUNTED))
    return found


_UNCOUNTED = "the quantizer's noise is not in the bound"

_GAP = "the loss of the measured model stands for its gap to the smallest"


def _no(text: str, source: str, risk: str) -> Condition:
    """A condition that is not met, and has no size."""
    return _rule(text, source, 1, "at most", 0, risk)


def _curved(c: Constants) -> float:
    """L; a loss that is flat here allows any step."""
    return max(c.L.value, 1e-30)


def _descent(name: str, rate: float, L: float) -> Condition:
    risk = "steps along the sharpest client's sharpest direction overshoot, and losses may grow"
    return _rule(f"{name} < 2/L", "practice", rate, "at most", 2 / L, risk)


def _rule(text: str, source: str, value: float, sense: Sense, limit: float, risk: str) -> Condition:
    return Condition(text, source, float(value), sense, float(limit), risk)


def _size(batch: BatchSize) -> float:
    """A batch of all data has no noise."""
    return inf if isinstance(batch, str) else float(batch)
