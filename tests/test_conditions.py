"""Diagnoses against terms worked out by hand, and conditions on both sides of their edges."""

from dataclasses import replace
from math import ceil, e, exp, inf, sqrt
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from perfed import (
    Experiment,
    FedAvg,
    Local,
    LowPrecision,
    PerFedAvg,
    PFedMe,
    Task,
    TopK,
    Vectorized,
)
from perfed.data import Federation
from perfed.methods import Received
from perfed.methods.schedules import Harmonic
from perfed.runs.presets import fedpaq
from perfed.theory import bounds
from perfed.theory.conditions import Condition, Diagnosis
from perfed.theory.constants import Constants, Effort, measure
from perfed.theory.diagnosis import diagnose
from perfed.theory.distances import example_distances, label_distances
from perfed.theory.estimates import Estimate
from perfed.theory.study import study
from problems import LOGISTIC, QUADRATIC, Linear, context, experiment, f32, federation, start
from test_theory import some_constants

# Every constant another number, and none of them 1 or another's square.
GIVEN: dict[str, Any] = {
    "B": 1.3, "L": 2.1, "mu": 0.4, "rho": 0.7, "sigma_G": 1.9, "sigma_H": 0.8, "gamma_G": 0.6,
    "gamma_H": 0.5, "loss": 3.1, "gradient": 1.7, "clients": 5,
    "client_B": np.array([0.2, 0.5, 1.3, 0.9, 0.3]),
}  # fmt: skip
B, L, MU, RHO, SG, SH, GG, GH = (GIVEN[k] for k in list(GIVEN)[:8])
LOSS, GRADIENT, N, R, K = 3.1, 1.7, 5, 2, 30
LOST = (N - R) / (R * (N - 1))


def of(method: Any, rounds: int = K, options: Any = None, **other: Any) -> Diagnosis:
    made = experiment(method, **({"cohort": R} | (options or {})))
    q = made.pipeline.variance((4,))
    return diagnose(made, replace(some_constants(**(GIVEN | other)), q=q), rounds)


def named(diagnosis: Diagnosis, text: str) -> Condition:
    (found,) = [c for c in diagnosis.conditions if c.text.startswith(text)]
    return found


def close(found: dict[str, float], **expected: float) -> None:
    assert found == pytest.approx(expected, rel=1e-9)


def test_per_fedavg_by_hand() -> None:
    """Theorem 4.5 with D, D' and D'' of other sizes, and each variant's own sigma_F."""
    alpha, beta, tau, delta, D, D1, D2 = 0.3, 0.02, 5, 0.07, 4, 6, 9
    L_F = 4 * L + alpha * RHO * B
    inner = B**2 + SG**2 * (1 / D1 + alpha**2 * L**2 / D)
    squares: dict[Any, float] = {
        "exact": 12 * inner * (1 + SH**2 * alpha**2 / (4 * D2)) - 12 * B**2,
        "hf": 6 * SG**2 * (2 / D1 + 2 * alpha**2 * L**2 / D + alpha**2 / (2 * delta**2 * D2))
        + 2 * (alpha * RHO * delta) ** 2 * B**4,
        "fo": 2 * SG**2 * (1 / D1 + alpha**2 * L**2 / D) + 2 * (alpha * L * B) ** 2,
    }
    gamma2 = 3 * B**2 * alpha**2 * GH**2 + 192 * GG**2
    drift = beta * L_F * tau * (tau - 1)
    for variant, sigma2 in squares.items():
        method = PerFedAvg(
            variant, alpha, beta, tau=tau, delta=delta, batch=D, batch_outer=D1, batch_hessian=D2
        )
        found = of(method)
        derived = {"L_F": L_F, "sigma_F": sqrt(sigma2), "gamma_F": sqrt(gamma2)}
        if variant == "exact":
            derived["bias"] = 2 * alpha * L * SG / sqrt(D)
        close(found.derived, **derived)
        (bound,) = found.bounds
        assert (bound.source, bound.hidden) == ("Per-FedAvg, Theorem 4.5", True)
        close(
            bound.terms,
            start=4 * LOSS / (beta * tau * K),
            noise=beta * L_F * (1 + drift) * sigma2,
            diversity=beta * L_F * gamma2 * (LOST + drift),
            bias=alpha**2 * L**2 * SG**2 / D,
        )
        assert {"exact": "4.3", "hf": "G.2", "fo": "G.1"}[variant] in bound.note
        kept = [c.text for c in found.conditions if c.text.startswith("the Hessian")]
        assert bool(kept) == (variant == "fo")
    default = of(PerFedAvg("exact", alpha, beta, tau=tau, batch=D))
    inner = B**2 + SG**2 * (1 / D + alpha**2 * L**2 / D)
    expected = 12 * inner * (1 + SH**2 * alpha**2 / (4 * D)) - 12 * B**2
    assert default.derived["sigma_F"] == pytest.approx(sqrt(expected))  # D' and D'' are D
    full = of(PerFedAvg("exact", alpha, beta, tau=tau, batch="full"))
    assert full.derived["sigma_F"] == pytest.approx(0, abs=1e-6)
    assert full.bounds[0].terms["bias"] == full.bounds[0].terms["noise"] == 0
    every = of(PerFedAvg("exact", alpha, beta, tau=tau, batch=D), options={"cohort": N})
    assert every.bounds[0].terms["diversity"] == pytest.approx(beta * L_F * gamma2 * drift)


def test_pfedme_by_hand() -> None:
    """Theorems 1 and 2, parts (a) and (b), with every letter another number."""
    lam, eta, rounds_, beta, batch, nu = 7.0, 1e-4, 4, 1.6, 3, 0.11
    method = PFedMe(
        lam=lam, eta=eta, local_rounds=rounds_, beta=beta, batch=batch, nu=nu, inner_steps=50
    )
    mu_F = lam * MU / (lam + MU)
    kappa_F = lam / mu_F
    eta_hat = 1 / (6 * lam * (3 + 128 * kappa_F / beta))
    delta2 = 2 / (lam + MU) ** 2 * (SG**2 / batch + nu)
    sigma2 = float(np.mean(GIVEN["client_B"] ** 2))
    convex = of(method)
    close(
        convex.derived, L_F=lam, kappa=(lam + L) / (lam + MU), delta=sqrt(delta2), mu_F=mu_F,
        kappa_F=kappa_F, eta_hat_1=eta_hat, sigma_F1=sqrt(sigma2),
    )  # fmt: skip
    part_a = {
        "start": (B / mu_F) ** 2 * mu_F * exp(-eta_hat * mu_F * K / 2),
        "sampling": (N / R - 1) * sigma2 / (mu_F * K * N),
        "drift": (rounds_ * sigma2 + delta2 * lam**2)
        * kappa_F
        / (rounds_ * (K * beta * mu_F) ** 2),
        "inner": lam**2 * delta2 / mu_F,
    }
    first, second = convex.bounds
    assert (first.source, second.source) == ("pFedMe, Theorem 1 (a)", "pFedMe, Theorem 1 (b)")
    close(first.terms, **part_a)
    close(second.terms, common=sum(part_a.values()) / mu_F, diversity=sigma2 / lam**2, inner=delta2)
    limit = eta_hat / (beta * rounds_)
    assert named(convex, "eta <= eta_hat_1").limit == pytest.approx(limit)
    assert named(convex, "T >= 2/").limit == pytest.approx(2 / (eta_hat * mu_F))

    general = of(method, mu=-0.2)
    delta2 = 2 / (lam - L) ** 2 * (SG**2 / batch + nu)
    sigma2 = lam**2 / (lam**2 - 8 * L**2) * GG**2
    eta_hat = 1 / (75 * lam**3)
    close(
        general.derived, L_F=lam, kappa=(lam + L) / (lam - 0.2), delta=sqrt(delta2),
        sigma_F2=sqrt(sigma2), eta_hat_2=eta_hat,
    )  # fmt: skip
    part_a = {
        "start": LOSS / (eta_hat * K),
        "sampling": sqrt(LOSS * lam * sigma2 * (N / R - 1)) / sqrt(K * N),
        "drift": LOSS ** (2 / 3)
        * (rounds_ * sigma2 + lam**2 * delta2) ** (1 / 3)
        / (beta ** (4 / 3) * rounds_ ** (1 / 3) * K ** (2 / 3)),
        "inner": lam**2 * delta2,
    }
    first, second = general.bounds
    close(first.terms, **part_a)
    close(second.terms, common=sum(part_a.values()), diversity=sigma2 / lam**2, inner=delta2)
    assert named(general, "eta <= eta_hat_2").limit == pytest.approx(eta_hat / (beta * rounds_))
    exact = of(replace(method, nu=None, batch="full"))
    assert exact.derived["delta"] == 0


@pytest.mark.parametrize("levels", [None, 3])
def test_fedpaq_by_hand(levels: int | None) -> None:
    """Both theorems with a batch of m, tau = 5, and a quantizer or none."""
    tau, m, lr = 5, 4, 0.003
    options = {} if levels is None else {"codec": LowPrecision(levels)}
    q = 0.0 if levels is None else min(4 / levels**2, 2 / levels)
    B2 = q / N + 4 * (1 + q) * LOST
    B1 = 2 * L**2 * B2
    T = K * tau
    found = of(FedAvg(lr=lr, tau=tau, batch=m), options=options)
    noise = SG**2 / (m * N)
    N1, N2 = (1 + q) * noise * (1 + N * LOST), noise * (N + 1)
    close(found.derived, T=T, q=q, B_1=B1, B_2=B2, N_1=N1, N_2=N2)
    (bound,) = found.bounds
    assert not bound.hidden
    close(bound.terms, start=2 * L * LOSS / sqrt(T), noise=N1 / sqrt(T), drift=N2 * (tau - 1) / T)
    longest = (sqrt(B2**2 + 0.8) - B2) / 8 * sqrt(T)
    assert named(found, "tau <=").limit == pytest.approx(longest)
    assert named(found, "lr <= 1/").limit == pytest.approx(1 / (L * sqrt(T)))

    rounds = 4000
    found = of(FedAvg(lr=4 / MU, tau=tau, batch=m, schedule=Harmonic()), rounds, options)
    k0 = ceil(4 * max(L / MU, 4 * (B1 / MU**2 + 1), 1 / tau, 4 * N / (MU**2 * tau)))
    unsampled = 8 * (1 + q) * N * LOST
    C1 = 16 * noise / MU**2 * (1 + 2 * q + unsampled)
    C2 = 16 * e * L**2 * noise / MU**2
    C3 = 256 * e * L**2 * noise / MU**4 * (N + 2 * q + unsampled)
    close(found.derived, T=rounds * tau, q=q, B_1=B1, B_2=B2, k_0=k0, C1=C1, C2=C2, C3=C3)
    now = rounds * tau + 1
    (bound,) = found.bounds
    close(
        bound.terms,
        start=((k0 * tau + 1) / now) ** 2 * (GRADIENT / MU) ** 2,
        noise=C1 * tau / now,
        drift=C2 * (tau - 1) ** 2 / now,
        mixed=C3 * (tau - 1) / now**2,
    )
    assert f"--after {k0}" in bound.note
    # A shorter run is bounded from k_0 on only, and says so.
    early = of(FedAvg(lr=4 / MU, tau=tau, batch=m, schedule=Harmonic()), k0 - 1, options)
    assert not named(early, "K >= k_0").holds
    assert early.bounds[0].terms["start"] == pytest.approx((GRADIENT / MU) ** 2)
    full = of(FedAvg(lr=lr, tau=tau, batch="full"), options=options)
    assert full.derived["N_1"] == full.derived["N_2"] == 0
    every = of(FedAvg(lr=lr, tau=tau, batch=m), options=options | {"cohort": N})
    assert every.derived["B_2"] == pytest.approx(q / N)


def test_k0_is_the_largest_of_four() -> None:
    """Each of the parts of (11) where it decides: 4n in the last, 4(B_1/mu^2 + 1) in the second."""
    assert bounds.fedpaq_k0(900, 1, 0, 1, 5, 5) == 3600
    B1 = bounds.fedpaq_b1(1, 2, 1, 9)
    assert bounds.fedpaq_k0(1, 1, 2, 100, 1, 9) == ceil(16 * (B1 + 1))
    assert bounds.fedpaq_k0(1, 1, 0, 1, 50, 50) == 4 * 4 * 50
    assert bounds.fedpaq_k0(1, 2, 0, 2, 50, 50) == ceil(16 * 50 / 8)


OVER, UNDER = 1 + 1e-3, 1 - 1e-3


def edges() -> list[Any]:
    """(a condition, a method just at its limit times a factor, further arguments)."""
    L_F = 4 * L + 0.3 * RHO * B
    T = K * 3
    B2 = 4 * LOST
    mu_F = 9 * MU / (9 + MU)
    eta_1 = 1 / (6 * 9 * (3 + 128 * (9 / mu_F) / 1.5))
    inner = PFedMe(lam=9.0, eta=1e-5, beta=1.5, local_rounds=2)
    return [
        ("alpha <= 1/L", lambda f: PerFedAvg(alpha=f / L), {}),
        ("beta <= 1/(10", lambda f: PerFedAvg(alpha=0.3, beta=f / (10 * 4 * L_F), tau=4), {}),
        ("beta < 2/L", lambda f: PerFedAvg(beta=f * 2 / L), {}),
        ("lr < 2/L", lambda f: FedAvg(lr=f * 2 / L), {}),
        ("lr < 2/L", lambda f: Local(lr=f * 2 / L), {}),
        ("lr <= 1/(L sqrt(T))", lambda f: FedAvg(lr=f / (L * sqrt(T)), tau=3), {}),
        ("4/lr <= mu", lambda f: FedAvg(lr=4 / (f * MU), schedule=Harmonic()), {}),
        ("inner_lr", lambda f: replace(inner, inner_lr=f * 2 / (9 + L)), {}),
        ("eta lambda", lambda f: replace(inner, eta=f / 9), {}),
        ("eta <= eta_hat_1", lambda f: replace(inner, eta=f * eta_1 / (1.5 * 2)), {}),
        ("eta <= eta_hat_2", lambda f: replace(inner, eta=f / (75 * 9**3) / 3), {"mu": -1.0}),
        ("beta >= 1", lambda f: replace(inner, beta=1 / f), {}),
        ("lambda > 2", lambda f: replace(inner, lam=sqrt(8) * L / f), {"mu": -1.0}),
        ("lambda >=", lambda f: replace(inner, lam=sqrt(8 * L**2 + 1) / f), {"mu": -1.0}),
        ("tau <=", lambda f: FedAvg(tau=7),
         # The limit is a multiple of sqrt(T); the cohort's share decides the factor.
         {"rounds": lambda f: round((7 * 8 / (sqrt(B2**2 + 0.8) - B2)) ** 2 / 7 / f**2)}),
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "make", "other"), edges(), ids=[edge[0] for edge in edges()])
def test_both_sides_of_an_edge(text: str, make: Any, other: dict[str, Any]) -> None:
    """Just inside a condition holds, just outside it is broken, by that factor."""
    for factor, holds in ((UNDER, True), (OVER, False)):
        rounds = K if "rounds" not in other else other["rounds"](factor)
        more = {k: v for k, v in other.items() if k != "rounds"}
        found = named(of(make(factor), rounds, **more), text)
        assert found.holds == holds
        assert found.factor == pytest.approx(factor, rel=2e-3)


def test_whole_numbers_at_their_edges() -> None:
    """T, k_0, K and rounds: one more or one less."""
    assert not named(of(FedAvg(tau=1), rounds=1), "T >= 2").holds
    assert named(of(FedAvg(tau=1), rounds=2), "T >= 2").holds
    method = FedAvg(lr=4 / MU, schedule=Harmonic())
    k0 = int(of(method).derived["k_0"])
    assert named(of(method, rounds=k0), "K >= k_0").holds
    assert not named(of(method, rounds=k0 - 1), "K >= k_0").holds
    lam, rate = 9.0, 1 / (9 + L)
    left = max(1 - rate * (lam + MU), abs(1 - rate * (lam + L)))
    steps = next(k for k in range(1, 99) if left**k <= 0.1)
    inner = PFedMe(lam=lam, inner_lr=rate)
    assert named(of(replace(inner, inner_steps=steps)), "K leaves").holds
    assert not named(of(replace(inner, inner_steps=steps - 1 or 1)), "K leaves").holds or steps == 1
    free = [replace(inner, nu=0.1), replace(inner, inner_solver="nesterov")]
    assert not any(c.text.startswith("K leaves") for m in free for c in of(m).conditions)


def test_at_its_exact_limit_a_condition_holds() -> None:
    """4/lr = mu, with mu measured: rounding is no reason to call it broken."""
    made = experiment(FedAvg(lr=16.0, schedule=Harmonic()), alike(3, 1.0))
    found = measure(Vectorized(made), f32(start()))
    assert found.mu.low < 0.25
    assert named(diagnose(made, found, 10), "4/lr").holds
    assert not named(diagnose(made, replace(found, mu=Estimate.exact(0.2499)), 10), "4/lr").holds


def test_an_edge_of_nothing() -> None:
    """A limit of 0: nothing is at it, anything is beyond."""
    both = [Condition("", "", value, "at most", 0.0, "") for value in (0.0, 1e-9)]
    assert [(c.factor, c.holds) for c in both] == [(1.0, True), (inf, False)]


def test_convexity_is_taken_from_the_penalty_or_the_low_end() -> None:
    """mu's interval: its low end, unless a penalty says that it cannot be less."""
    made = experiment(FedAvg(lr=4.0, schedule=Harmonic()))
    c = replace(some_constants(), mu=Estimate(0.5, 0.3, 0.6))
    assert named(diagnose(made, c, 10), "4/lr").limit == pytest.approx(0.3)
    ridge = experiment(FedAvg(lr=4.0, schedule=Harmonic()), task=replace(QUADRATIC, l2=0.45))
    assert named(diagnose(ridge, c, 10), "4/lr").limit == pytest.approx(0.45)
    assert not diagnose(made, replace(c, mu=Estimate(0.1, -0.3, 0.6)), 10).bounds
    pfedme = experiment(PFedMe(), task=replace(QUADRATIC, l2=0.45))
    assert diagnose(pfedme, c, 10).derived["mu_F"] == pytest.approx(15 * 0.45 / 15.45)


def test_what_all_theorems_take_for_granted() -> None:
    """Each departure alone is listed, and no other."""
    usual = {c.text for c in of(FedAvg()).conditions}
    for options, text in (
        ({"weighting": "size"}, "uniform averages"),
        ({"sampling": "epochs"}, "independent batches"),
        ({"downlink": LowPrecision(3)}, "the server's model arrives as it is"),
        ({"codec": TopK(0.5)}, "the codec is unbiased"),
    ):
        found = of(FedAvg(), options=options)
        assert text in {c.text for c in found.broken} - usual
    quantized = {"codec": LowPrecision(3)}
    assert "messages without loss" not in {c.text for c in of(FedAvg(), options=quantized).broken}
    assert not named(of(PerFedAvg(), options=quantized), "messages without loss").holds
    assert not named(of(PFedMe(), options=quantized), "messages without loss").holds


# Clients that are alike, or not


def alike(clients: int, different: float) -> Federation:
    """Quadratics 1/2 |w - center_i|^2 / 4 with centers this far apart."""
    rng = np.random.default_rng(0)
    x = np.eye(4, dtype=np.float32)
    parts = [(x, (different * rng.normal(size=4)).astype(np.float32)) for _ in range(clients)]
    return Federation.from_arrays(parts, parts)


def fedpaq_run(different: float) -> tuple[int, Diagnosis]:
    """How often (12) is exceeded over 120 rounds from k_0 on; and the diagnosis."""
    data, r, tau, mu = alike(10, different), 2, 5, 0.25
    method = FedAvg(lr=4 / mu, tau=tau, batch="full", schedule=Harmonic())
    made = Experiment(data, Task(Linear(), loss=QUADRATIC.loss), method, r)
    engine = Vectorized(made)
    optimum = np.mean([data.train.client(i)[1] for i in range(10)], axis=0)
    constants = measure(engine, jnp.asarray(optimum, jnp.float32), Effort(steps=4))
    found = diagnose(made, constants, 2000)
    k0 = int(found.derived["k_0"])
    C = bounds.FedPAQConstants(*(found.derived[k] for k in ("C1", "C2", "C3")))
    state, over, first = engine.advance(engine.init(), k0), 0, 0.0
    for k in range(k0, k0 + 120):
        distance = float(np.sum((np.asarray(state.params, float) - optimum) ** 2))
        first = first or distance
        over += distance > (1 + 1e-3) * sum(bounds.fedpaq_theorem_1(first, C, k, k0, tau)) + 1e-12
        state = engine.advance(state, 1)
    return over, found


def test_fedpaqs_bounds_are_of_clients_that_are_alike() -> None:
    """Of different quadratics a run exceeds (12), and the diagnosis says why; of like ones not."""
    over, found = fedpaq_run(1.0)
    assert over > 10
    condition = named(found, "gamma_G = 0")
    assert not condition.holds
    assert condition.source == "FedPAQ, section 2"
    over, found = fedpaq_run(0.0)
    assert over == 0
    assert named(found, "gamma_G = 0").holds
    constant = named(of(FedAvg(), gamma_G=0.3), "gamma_G = 0")
    assert (constant.value, constant.holds) == (0.3, False)
    assert named(of(FedAvg(), gamma_G=0.0), "gamma_G = 0").holds
    assert sqrt(np.mean([1 / n for n in (5, 9, 3, 12, 7)])) * SG == pytest.approx(0.79, abs=5e-3)
    assert "about 0.79" in constant.risk


def test_clients_alike_in_labels_may_differ_in_gradients() -> None:
    """Label distance 0 bounds nothing: (14a) is of whole examples."""
    y = np.array([0.0, 1.0] * 10, np.float32)
    parts = [(np.outer(2 * y - 1, np.eye(4)[i]).astype(np.float32), y) for i in (0, 1)]
    data = Federation.from_arrays(parts, parts)
    found = measure(Vectorized(experiment(FedAvg(), data, task=LOGISTIC)), jnp.zeros(4))
    classes = Federation.from_arrays([(x, y.astype(int)) for x, y in parts],
                            [(x, y.astype(int)) for x, y in parts])  # fmt: skip
    assert label_distances(classes).max() == 0
    assert found.gamma_G.value**2 == pytest.approx(0.125)
    assert found.gamma_G.value**2 <= 4 * found.example_B**2 * np.mean(example_distances(data) ** 2)


def test_the_gradient_is_that_of_the_mean_and_of_the_last_model() -> None:
    """It stands for the distance in FedPAQ's Theorem 1: |grad f|, not the largest client's."""
    data, w = federation(2), start()
    engine = Vectorized(experiment(FedAvg(lr=9.0, schedule=Harmonic()), data))
    found = measure(engine, f32(w))
    x, y = (np.concatenate(part) for part in zip(*map(data.train.client, range(5)), strict=True))
    weights = np.repeat(1 / (5 * np.asarray(data.train.size)), data.train.size)
    slope = (weights * (x @ w - y)) @ x
    assert found.gradient == pytest.approx(np.linalg.norm(slope), rel=1e-4)
    assert found.gradient < found.B.value
    other = measure(engine, f32(0 * w))
    assert found.joined(other).gradient == other.gradient
    assert found.joined(other).loss == found.loss
    assert found.joined(other).B.value == max(found.B.value, other.B.value)


def test_intervals_of_hessian_spreads_reach_to_their_residuals() -> None:
    """After two Lanczos steps of four a norm is too small: its interval reaches beyond it."""
    data = federation(2, sizes=(5, 9, 3, 12, 40), binary=True)
    engine = Vectorized(experiment(FedAvg(), data, task=LOGISTIC))
    whole = Effort(steps=4, hessian_examples=64, hessian_clients=64, hessian_steps=4)
    few = replace(whole, hessian_steps=2)
    rough, exact = (measure(engine, f32(start()), effort) for effort in (few, whole))
    for name in ("sigma_H", "gamma_H"):
        one, truth = getattr(rough, name), getattr(exact, name)
        assert one.value < truth.value < one.high
        assert one.low == pytest.approx(one.value)
        assert truth.high == pytest.approx(truth.value, rel=1e-3)


# Settings that follow


def test_fedpaqs_personal_step_diminishes_with_the_local_ones() -> None:
    """lr is 4/mu, which no personal model survives: its step is that of the round."""
    data = federation()
    preset = fedpaq(rounds=10, mu=0.4, tau=5)
    method = preset.method
    assert isinstance(method, FedAvg)
    made = experiment(replace(method, adapt_batch="full"), data)
    w = f32(start())
    for round in (0, 7):
        objective = made.objective(made.device_data().train, 2)
        own = made.method.personalize(objective, Received(w), None, context(round))
        rate = 10.0 / (5 * round + 1)
        np.testing.assert_allclose(own, w - rate * objective.grad(w), rtol=1e-5)
    fixed = replace(method, alpha=0.3, adapt_batch="full")
    objective = made.objective(made.device_data().train, 2)
    own = fixed.personalize(objective, Received(w), None, context(7))
    np.testing.assert_allclose(own, w - 0.3 * objective.grad(w), rtol=1e-5)


def test_a_study_measures_both_models() -> None:
    """`--after`: what bounds both, in the order in which they are measured."""
    made = experiment(FedAvg(lr=4.0, schedule=Harmonic()), federation(2, sizes=(9, 30)))
    engine = Vectorized(made)
    w = f32(3 * start())
    found = study(engine, 5, (("the first model", None), ("later", w)))
    assert found.at == "the first model and later"
    later: Constants = measure(engine, w)
    assert found.constants.gradient == pytest.approx(later.gradient)
    page = found.as_json()
    assert [bound["source"] for bound in page["bounds"]] == ["FedPAQ, Theorem 1"]
