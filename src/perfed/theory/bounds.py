"""The right-hand sides of the papers' bounds, term by term.

Where a theorem hides a factor in O(1), the terms it multiplies are given without it: they show what
matters and how it decays, but not the level. Batches of all data have no noise: infinite sizes.
"""

from math import ceil, e, exp, inf, sqrt
from typing import NamedTuple


class RunSize(NamedTuple):
    """How long a run is and who takes part, by the papers' letters.

    Attributes:
        rounds: K, or T in pFedMe.
        local_steps: tau, or R in pFedMe.
        cohort: r, or S in pFedMe.
        clients: n, or N in pFedMe.
    """

    rounds: int
    local_steps: int
    cohort: int
    clients: int

    @property
    def unsampled(self) -> float:
        """(n - r) / (r (n - 1)): what a cohort of r loses; 0 if all take part."""
        return _unsampled(self.cohort, self.clients)


class BatchSizes(NamedTuple):
    """D, D' and D'' of Per-FedAvg: of the adaptation, the gradient after it, the Hessian."""

    D: float
    D1: float
    D2: float


class PerFedAvgTerms(NamedTuple):
    """Per-FedAvg, Theorem 4.5: what bounds the mean of |grad F|^2 over the run.

    Attributes:
        start: 4 (F(w_0) - F*) / (beta tau K); the others are inside an O(1).
        noise: beta L_F (1 + beta L_F tau (tau - 1)) sigma_F^2.
        diversity: beta L_F gamma_F^2 ((1 - r) / (r (n - 1)) + beta L_F tau (tau - 1)).
        bias: alpha^2 L^2 sigma_G^2 / D.
    """

    start: float
    noise: float
    diversity: float
    bias: float


def per_fedavg_smoothness(L: float, rho: float, B: float, alpha: float) -> float:
    """L_F = 4 L + alpha rho B (Lemma 4.2)."""
    return 4 * L + alpha * rho * B


def per_fedavg_bias(L: float, sigma_G: float, alpha: float, D: float) -> float:
    """2 alpha L sigma_G / sqrt(D) bounds |E estimate - grad F_i| (Lemma 4.3)."""
    return 2 * alpha * L * sigma_G / sqrt(D)


def per_fedavg_variance(
    B: float, L: float, sigma_G: float, sigma_H: float, alpha: float, batches: BatchSizes
) -> float:
    """sigma_F^2 bounds E|estimate - grad F_i|^2 (Lemma 4.3)."""
    D, D1, D2 = batches
    gradient = B**2 + sigma_G**2 * (1 / D1 + (alpha * L) ** 2 / D)
    return 12 * gradient * (1 + sigma_H**2 * alpha**2 / (4 * D2)) - 12 * B**2


def first_order_variance(
    L: float, B: float, sigma_G: float, alpha: float, batches: BatchSizes
) -> float:
    """sigma_F^2 of the first-order estimate (first version, Lemma G.1); it does not vanish.

    2 sigma_G^2 (1/D' + (alpha L)^2 / D) + 2 (alpha L B)^2.
    """
    D, D1, _ = batches
    return 2 * sigma_G**2 * (1 / D1 + (alpha * L) ** 2 / D) + 2 * (alpha * L * B) ** 2


def hessian_free_variance(
    L: float,
    rho: float,
    B: float,
    sigma_G: float,
    alpha: float,
    delta: float,
    batches: BatchSizes,
) -> float:
    """sigma_F^2 of the Hessian-free estimate (first version, Lemma G.2).

    6 sigma_G^2 (2/D' + 2 (alpha L)^2 / D + alpha^2 / (2 delta^2 D'')) + 2 (alpha rho delta)^2 B^4.
    The lemma treats the two gradients of a difference as independent; those here share a batch, so
    for small delta the third term far exceeds the measured variance.
    """
    D, D1, D2 = batches
    noise = 2 / D1 + 2 * (alpha * L) ** 2 / D + alpha**2 / (2 * delta**2 * D2)
    return 6 * sigma_G**2 * noise + 2 * (alpha * rho * delta) ** 2 * B**4


def per_fedavg_diversity(B: float, gamma_G: float, gamma_H: float, alpha: float) -> float:
    """gamma_F^2 = 3 B^2 alpha^2 gamma_H^2 + 192 gamma_G^2 (Lemma 4.4)."""
    return 3 * B**2 * alpha**2 * gamma_H**2 + 192 * gamma_G**2


def theorem_4_5(
    gap: float,
    L_F: float,
    sigma_F2: float,
    gamma_F2: float,
    bias: float,
    beta: float,
    run: RunSize,
) -> PerFedAvgTerms:
    """Per-FedAvg, Theorem 4.5, for beta <= 1 / (10 tau L_F).

    `gap` is F(w_0) - F*, `bias` that of Lemma 4.3 (`per_fedavg_bias`).
    """
    tau = run.local_steps
    drift = beta * L_F * tau * (tau - 1)
    return PerFedAvgTerms(
        4 * gap / (beta * tau * run.rounds),
        beta * L_F * (1 + drift) * sigma_F2,
        beta * L_F * gamma_F2 * (run.unsampled + drift),
        (bias / 2) ** 2,
    )


class Corollary46(NamedTuple):
    """Settings that find a point with |grad F|^2 of the order of epsilon, up to constants."""

    tau: int
    rounds: int
    beta: float


def corollary_4_6(epsilon: float) -> Corollary46:
    """Tau, K and beta of Corollary 4.6: epsilon^(-1/2), epsilon^(-3/2) and epsilon."""
    return Corollary46(ceil(epsilon**-0.5), ceil(epsilon**-1.5), epsilon)


def moreau_convexity(lam: float, mu: float) -> float:
    """mu_F = lam mu / (lam + mu) (pFedMe, Proposition 1); L_F is lam itself."""
    return lam * mu / (lam + mu)


def inner_condition(lam: float, L: float, mu: float) -> float:
    """kappa, the condition number of h = f_i + (lam/2)|theta - w|^2; infinite if not convex."""
    return (lam + L) / (lam + mu) if lam + mu > 0 else inf


def inner_error(lam: float, L: float, mu: float, gamma_f: float, D: float, nu: float) -> float:
    """delta^2 of pFedMe's Lemma 1; infinite where lam is too small for it."""
    curvature = lam + mu if mu > 0 else lam - L
    return 2 / curvature**2 * (gamma_f**2 / D + nu) if curvature > 0 else inf


def moreau_diversity(lam: float, L: float, sigma_f: float) -> float:
    """sigma_{F,2}^2 = lam^2 / (lam^2 - 8 L^2) sigma_f^2 (pFedMe, Lemma 2 b)."""
    return lam**2 / (lam**2 - 8 * L**2) * sigma_f**2 if lam**2 > 8 * L**2 else inf


def eta_hat_1(lam: float, mu: float, beta: float) -> float:
    """The largest eta beta R of pFedMe's Theorem 1: 1 / (6 L_F (3 + 128 kappa_F / beta))."""
    kappa_F = lam / moreau_convexity(lam, mu)
    return 1 / (6 * lam * (3 + 128 * kappa_F / beta))


def eta_hat_2(lam: float) -> float:
    """The largest eta beta R of pFedMe's Theorem 2: 1 / (75 L_F lam^2)."""
    return 1 / (75 * lam**3)


class PFedMeTerms(NamedTuple):
    """pFedMe, Theorems 1 (a) and 2 (a): four terms, each inside an O(1).

    Attributes:
        start: of the distance at the beginning.
        sampling: of clients that do not take part.
        drift: of the local rounds.
        inner: of inner problems that are not solved exactly.
    """

    start: float
    sampling: float
    drift: float
    inner: float


def pfedme_theorem_1(
    distance2: float,
    sigma_F1_2: float,
    delta2: float,
    lam: float,
    mu: float,
    beta: float,
    run: RunSize,
) -> PFedMeTerms:
    """pFedMe, Theorem 1 (a), for mu-strongly convex f_i; `distance2` is |w_0 - w*|^2.

    `sigma_F1_2` is sigma_{F,1}^2, the mean of |grad F_i(w*)|^2.
    """
    mu_F = moreau_convexity(lam, mu)
    kappa_F, (T, R, S, N) = lam / mu_F, run
    return PFedMeTerms(
        distance2 * mu_F * exp(-eta_hat_1(lam, mu, beta) * mu_F * T / 2),
        (N / S - 1) * sigma_F1_2 / (mu_F * T * N),
        (R * sigma_F1_2 + delta2 * lam**2) * kappa_F / (R * (T * beta * mu_F) ** 2),
        lam**2 * delta2 / mu_F,
    )


def pfedme_theorem_2(
    gap: float,
    sigma_F2_2: float,
    delta2: float,
    lam: float,
    beta: float,
    run: RunSize,
) -> PFedMeTerms:
    """pFedMe, Theorem 2 (a), what bounds E|grad F(w_t*)|^2; `gap` is F(w_0) - F*."""
    T, R, S, N = run
    third = (R * sigma_F2_2 + lam**2 * delta2) ** (1 / 3)
    return PFedMeTerms(
        gap / (eta_hat_2(lam) * T),
        # 0 if all take part, even where sigma_F2 is infinite.
        sqrt(gap * lam * sigma_F2_2 * (N / S - 1)) / sqrt(T * N) if S < N else 0.0,
        gap ** (2 / 3) * third / (beta ** (4 / 3) * R ** (1 / 3) * T ** (2 / 3)),
        lam**2 * delta2,
    )


class PersonalTerms(NamedTuple):
    """pFedMe, Theorems 1 (b) and 2 (b): what bounds the personal models' mean squared distance.

    Of theta_i(w_T) from w* in Theorem 1, of theta_i(w_t*) from w_t* in Theorem 2; each term is
    inside an O(1).

    Attributes:
        common: of the global model: part (a), divided by mu_F in Theorem 1.
        diversity: sigma_F^2 / lambda^2.
        inner: delta^2.
    """

    common: float
    diversity: float
    inner: float


def pfedme_theorem_1b(
    part_a: PFedMeTerms, sigma_F1_2: float, delta2: float, lam: float, mu: float
) -> PersonalTerms:
    """pFedMe, Theorem 1 (b)."""
    return PersonalTerms(sum(part_a) / moreau_convexity(lam, mu), sigma_F1_2 / lam**2, delta2)


def pfedme_theorem_2b(
    part_a: PFedMeTerms, sigma_F2_2: float, delta2: float, lam: float
) -> PersonalTerms:
    """pFedMe, Theorem 2 (b)."""
    return PersonalTerms(sum(part_a), sigma_F2_2 / lam**2, delta2)


def fedpaq_b1(L: float, q: float, cohort: int, clients: int) -> float:
    """FedPAQ (10): 2 L^2 (q/n + (n - r) / (r (n - 1)) 4 (1 + q))."""
    return 2 * L**2 * fedpaq_b2(q, cohort, clients)


def fedpaq_b2(q: float, cohort: int, clients: int) -> float:
    """FedPAQ (15): q/n + 4 (n - r) / (r (n - 1)) (1 + q)."""
    return q / clients + 4 * (1 + q) * _unsampled(cohort, clients)


def fedpaq_k0(L: float, mu: float, q: float, tau: int, cohort: int, clients: int) -> int:
    """k_0, the first round that Theorem 1 covers (11)."""
    B1 = fedpaq_b1(L, q, cohort, clients)
    parts = (L / mu, 4 * (B1 / mu**2 + 1), 1 / tau, 4 * clients / (mu**2 * tau))
    return ceil(4 * max(parts))


class FedPAQConstants(NamedTuple):
    """C_1, C_2 and C_3 of FedPAQ's Theorem 1 (13)."""

    C1: float
    C2: float
    C3: float


def fedpaq_c(
    L: float, mu: float, sigma: float, q: float, cohort: int, clients: int, batch: float = 1
) -> FedPAQConstants:
    """FedPAQ (13); with a batch, sigma^2 / n is sigma^2 / (m n)."""
    n, noise = clients, sigma**2 / (batch * clients)
    unsampled = 8 * (1 + q) * n * _unsampled(cohort, n)
    return FedPAQConstants(
        16 * noise / mu**2 * (1 + 2 * q + unsampled),
        16 * e * L**2 * noise / mu**2,
        256 * e * L**2 * noise / mu**4 * (n + 2 * q + unsampled),
    )


class FedPAQTerms(NamedTuple):
    """FedPAQ's Theorem 1 (12): what bounds E|x_k - x*|^2, with all its constants.

    Attributes:
        start: of the distance in round k_0.
        noise: C_1 tau / (k tau + 1).
        drift: C_2 (tau - 1)^2 / (k tau + 1).
        mixed: C_3 (tau - 1) / (k tau + 1)^2.
    """

    start: float
    noise: float
    drift: float
    mixed: float


def fedpaq_theorem_1(
    distance2: float, C: FedPAQConstants, k: int, k0: int, tau: int
) -> FedPAQTerms:
    """FedPAQ (12), for k >= k_0; `distance2` is |x_k0 - x*|^2."""
    now = k * tau + 1
    return FedPAQTerms(
        ((k0 * tau + 1) / now) ** 2 * distance2,
        C.C1 * tau / now,
        C.C2 * (tau - 1) ** 2 / now,
        C.C3 * (tau - 1) / now**2,
    )


class FedPAQNonConvexTerms(NamedTuple):
    """FedPAQ's Theorem 2 (17): what bounds the mean of |grad f|^2, with all its constants.

    Attributes:
        start: 2 L (f(x_0) - f*) / sqrt(T).
        noise: N_1 / sqrt(T).
        drift: N_2 (tau - 1) / T.
    """

    start: float
    noise: float
    drift: float


def fedpaq_n(
    sigma: float, q: float, cohort: int, clients: int, batch: float = 1
) -> tuple[float, float]:
    """N_1 and N_2 of FedPAQ's Theorem 2; with a batch, sigma^2 / n is sigma^2 / (m n)."""
    noise = sigma**2 / (batch * clients)
    sampled = 1 + clients * _unsampled(cohort, clients)
    return (1 + q) * noise * sampled, noise * (clients + 1)


def fedpaq_theorem_2(
    gap: float,
    L: float,
    sigma: float,
    q: float,
    run: RunSize,
    batch: float = 1,
) -> FedPAQNonConvexTerms:
    """FedPAQ (17), with step size 1 / (L sqrt(T)), T = K tau; `gap` is f(x_0) - f*."""
    tau, T = run.local_steps, run.rounds * run.local_steps
    N1, N2 = fedpaq_n(sigma, q, run.cohort, run.clients, batch)
    return FedPAQNonConvexTerms(2 * L * gap / sqrt(T), N1 / sqrt(T), N2 * (tau - 1) / T)


def longest_period(q: float, run: RunSize) -> float:
    """The largest tau that FedPAQ's Theorem 2 allows (16): (sqrt(B_2^2 + 0.8) - B_2)/8 sqrt(T)."""
    B2 = fedpaq_b2(q, run.cohort, run.clients)
    return (sqrt(B2**2 + 0.8) - B2) / 8 * sqrt(run.rounds * run.local_steps)


def _unsampled(cohort: int, clients: int) -> float:
    """(n - r) / (r (n - 1)): what is lost by a cohort of r; nothing if all take part."""
    return (clients - cohort) / (cohort * (clients - 1)) if cohort < clients else 0.0
