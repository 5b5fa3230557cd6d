"""Constants against closed forms, the papers' lemmas against Monte Carlo, bounds against runs."""

from dataclasses import replace
from math import ceil, e
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfed import (
    MLP,
    Experiment,
    FedAvg,
    LowPrecision,
    PerFedAvg,
    PFedMe,
    Sequential,
    Task,
    Vectorized,
)
from perfed.core.errors import FieldError
from perfed.core.objective import ALL
from perfed.data import Federation
from perfed.methods.schedules import Harmonic
from perfed.theory import bounds
from perfed.theory.constants import Constants, Effort, measure
from perfed.theory.estimates import Estimate
from perfed.theory.lanczos import extremes, lanczos
from perfed.theory.stationarity import decay, stationarity
from problems import (
    DIMENSION,
    LOGISTIC,
    QUADRATIC,
    experiment,
    f32,
    federation,
    objective,
    quadratics,
    start,
)

# Everything is looked at: there is nothing to guess.
FULL = Effort(steps=DIMENSION, examples=64, hessian_examples=64, hessian_clients=64,
              hessian_steps=DIMENSION, tensor_starts=6, tensor_steps=30)  # fmt: skip


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def spectral(matrix: np.ndarray) -> float:
    return float(np.abs(np.linalg.eigvalsh(matrix)).max())


def per_example(data: Federation, client: int, w: np.ndarray, kind: str) -> tuple[Any, Any]:
    """Gradients and Hessians of a client's examples, in NumPy."""
    x, y = (part.astype(np.float64) for part in data.train.client(client))
    out = x @ w
    if kind == "quadratic":
        slope, curve = out - y, np.ones_like(y)
    else:
        p = 1 / (1 + np.exp(-out))
        slope, curve = p - y, p * (1 - p)
    return slope[:, None] * x, curve[:, None, None] * (x[:, :, None] * x[:, None, :])


@pytest.mark.parametrize(
    ("kind", "engine", "l2"),
    [
        ("quadratic", Vectorized, 0.0),
        ("logistic", Vectorized, 0.3),
        slow("logistic", Sequential, 0.0),
    ],
)
def test_constants_are_those_in_closed_form(kind: str, engine: Any, l2: float) -> None:
    """Quadratics and logistic regressions of uneven clients: every constant within 0.1 %."""
    data = federation(2, sizes=(5, 9, 3, 12, 40), binary=kind == "logistic")
    task = replace(QUADRATIC if kind == "quadratic" else LOGISTIC, l2=l2)
    w = start()
    found = measure(engine(experiment(FedAvg(), data, task=task)), f32(w), FULL)

    pairs = [per_example(data, i, w, kind) for i in range(data.clients)]
    ridge = l2 * np.eye(DIMENSION)
    gradients = [g.mean(axis=0) + l2 * w for g, _ in pairs]
    hessians = [h.mean(axis=0) + ridge for _, h in pairs]
    mean_g, mean_h = np.mean(gradients, axis=0), np.mean(hessians, axis=0)
    expected = {
        "B": max(np.linalg.norm(g) for g in gradients),
        "L": max(map(spectral, hessians)),
        "mu": min(np.linalg.eigvalsh(h).min() for h in hessians),
        "sigma_G": max(
            np.mean(np.sum((g - g.mean(axis=0)) ** 2, axis=1)) for g, _ in pairs
        ) ** 0.5,
        "sigma_H": max(
            np.mean([spectral(one - h.mean(axis=0)) ** 2 for one in h]) for _, h in pairs
        ) ** 0.5,
        "gamma_G": np.mean([np.sum((g - mean_g) ** 2) for g in gradients]) ** 0.5,
        "gamma_H": np.mean([spectral(h - mean_h) ** 2 for h in hessians]) ** 0.5,
    }  # fmt: skip
    for name, value in expected.items():
        estimate = getattr(found, name)
        assert estimate.value == pytest.approx(value, rel=1e-3, abs=1e-5), name
        assert estimate.low - 1e-4 <= value <= estimate.high + 1e-4, name
    assert found.example_B == pytest.approx(
        max(np.linalg.norm(g + l2 * w, axis=1).max() for g, _ in pairs), rel=1e-4
    )
    np.testing.assert_allclose(found.client_L, [spectral(h) for h in hessians], rtol=1e-4)
    assert found.q == 0


def test_rho_is_the_third_derivatives_norm() -> None:
    """Quadratics have none; a logistic loss the largest |D^3 f[u, u, u]| that a search finds."""
    data = federation(2, binary=True)
    none = measure(Vectorized(experiment(FedAvg(), federation(2))), f32(start()), FULL)
    assert none.rho.value == pytest.approx(0, abs=1e-4)
    w = start()
    found = measure(Vectorized(experiment(FedAvg(), data, task=LOGISTIC)), f32(w), FULL)
    rng, best = np.random.default_rng(0), 0.0
    for i in range(data.clients):
        x = data.train.client(i)[0].astype(np.float64)
        p = 1 / (1 + np.exp(-x @ w))
        weight = p * (1 - p) * (1 - 2 * p) / len(p)
        for u in rng.normal(size=(300, DIMENSION)):
            for _ in range(60):
                u = u / np.linalg.norm(u)
                value = weight @ (x @ u) ** 3
                u = np.sign(value) * x.T @ (weight * (x @ u) ** 2) + abs(value) * u
            best = max(best, abs(value))
    assert found.rho.value == pytest.approx(best, rel=0.01)


@pytest.mark.slow
def test_samples_say_how_sure_they_are() -> None:
    """With a part of examples and clients, the intervals are wide and hold the truth mostly."""
    data = federation(5, sizes=(60, 80, 50, 90, 70, 65, 75, 85), binary=True)
    w = start()
    every = Effort(steps=4, examples=128, hessian_examples=128, hessian_clients=8, hessian_steps=4)
    whole = measure(Vectorized(experiment(FedAvg(), data, task=LOGISTIC)), f32(w), every)
    some = Effort(steps=4, examples=20, hessian_examples=12, hessian_clients=4, hessian_steps=4)
    inside = []
    for seed in range(2):
        engine = Vectorized(experiment(FedAvg(), data, task=LOGISTIC, seed=seed))
        found = measure(engine, f32(w), some)
        for name in ("sigma_G", "sigma_H", "gamma_H"):
            one, truth = getattr(found, name), getattr(whole, name).value
            assert one.low < one.value < one.high
            inside.append(one.low <= truth <= one.high)
    assert np.mean(inside) >= 0.8


def test_lanczos_finds_the_ends_of_a_spectrum() -> None:
    """In 25 steps of 300 dimensions; after all dimensions of a small one nothing is made up."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(300, 300)))[0]
    values = np.concatenate([[-3.0, 10.0], rng.uniform(-1, 4, 298)])
    matrix = jnp.asarray(basis @ np.diag(values) @ basis.T, jnp.float32)
    found = extremes(*map(np.asarray, lanczos(lambda v: matrix @ v, jnp.ones(300), 25)))
    assert found.highest == pytest.approx(10, rel=1e-3)
    assert found.lowest == pytest.approx(-3, rel=1e-2)
    small = jnp.diag(jnp.array([2.0, 3.0]))
    found = extremes(*map(np.asarray, lanczos(lambda v: small @ v, jnp.ones(2), 9)))
    assert (found.lowest, found.highest) == pytest.approx((2, 3), rel=1e-5)


@pytest.mark.slow
def test_a_network_has_negative_curvature_and_constants_of_two_models_join() -> None:
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(n, 5)).astype(np.float32), rng.integers(0, 3, n)) for n in (9, 30)]
    data = Federation.from_arrays(parts, parts)
    engine = Vectorized(Experiment(data, Task(MLP(5, 3, (6,))), PerFedAvg(), 2, 0))
    first = measure(engine, effort=FULL)
    later = measure(engine, jax.tree.map(lambda leaf: 3 * leaf, engine.init().params), FULL)
    assert first.mu.value < 0 < first.rho.value < float("inf")
    assert first.parameters == 57
    both = first.joined(later)
    assert both.L.value == max(first.L.value, later.L.value)
    assert both.mu.value == min(first.mu.value, later.mu.value)


def test_effort_is_checked() -> None:
    with pytest.raises(FieldError, match="hessian_clients"):
        Effort(hessian_clients=0)


def discrete(seed: int = 0) -> Federation:
    """Clients that draw from the same few examples, with other probabilities."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(6, DIMENSION)).astype(np.float32)
    y = np.array([0, 1, 1, 0, 1, 0], np.float32)
    parts = []
    for n in (10, 20, 8, 30):
        rows = rng.choice(6, n, p=rng.dirichlet(np.ones(6)))
        parts.append((x[rows], y[rows]))
    return Federation.from_arrays(parts, parts)


@pytest.mark.parametrize("seed", [0, slow(1)])
def test_distances_bound_diversity(seed: int) -> None:
    """(14a) and (16): gamma^2 <= 4 B^2 mean TV^2, and <= L_Z^2 mean W_1^2, and of Hessians too."""
    from perfed.theory.distances import example_distances, feature_distances

    data, w = discrete(seed), start(seed)
    found = measure(Vectorized(experiment(FedAvg(), data, task=LOGISTIC)), f32(w), FULL)
    variation = example_distances(data)
    pairs = [per_example(data, i, w, "logistic") for i in range(data.clients)]
    g, h = (np.concatenate(part) for part in zip(*pairs, strict=True))
    B, L = np.linalg.norm(g, axis=1).max(), max(map(spectral, h))
    tv2 = np.mean(variation**2)
    assert found.gamma_G.value**2 <= 4 * B**2 * tv2
    assert found.gamma_H.value**2 <= 4 * L**2 * tv2
    assert found.gamma_G.value**2 > 0.001 * 4 * B**2 * tv2  # a bound that says something

    cost = 1.0
    w1 = feature_distances(data, label_cost=cost, method="exact").value
    z = np.concatenate(
        [np.column_stack([x, cost * y]) for x, y in map(data.train.client, range(4))]
    )
    apart = np.linalg.norm(z[:, None] - z[None], axis=2)
    far = apart > 1e-6
    L_Z = (np.linalg.norm(g[:, None] - g[None], axis=2)[far] / apart[far]).max()
    differences = np.linalg.norm(h[:, None] - h[None], ord=2, axis=(2, 3))
    rho_Z = (differences[far] / apart[far]).max()
    assert found.gamma_G.value**2 <= L_Z**2 * np.mean(w1**2)
    assert found.gamma_H.value**2 <= rho_Z**2 * np.mean(w1**2)


def region(data: Federation, w: np.ndarray, alpha: float) -> tuple[float, float, float, float]:
    """B, L, sigma_G, sigma_H of a logistic federation wherever an adaptation from w may lead."""
    found = []
    rng = np.random.default_rng(0)
    for at in [w, *(w + alpha * rng.normal(size=(20, DIMENSION)))]:
        pairs = [per_example(data, i, at, "logistic") for i in range(data.clients)]
        found.append([
            max(np.linalg.norm(g.mean(0)) for g, _ in pairs),
            0.25 * max(spectral(np.einsum("ni,nj->ij", x, x) / len(x))
                       for x in (data.train.client(i)[0] for i in range(data.clients))),
            max(np.mean(np.sum((g - g.mean(0)) ** 2, axis=1)) for g, _ in pairs) ** 0.5,
            max(np.mean([spectral(a - h.mean(0)) ** 2 for a in h]) for _, h in pairs) ** 0.5,
        ])  # fmt: skip
    B, L, sigma_G, sigma_H = np.max(found, axis=0)
    return float(B), float(L), float(sigma_G), float(sigma_H)


@pytest.mark.parametrize(("D", "D1", "D2"), [(2, 3, 4), slow(1, 20, 1)])
def test_lemma_4_3_holds_for_our_stochastic_gradient(D: int, D1: int, D2: int) -> None:
    """Bias and variance of the estimate (8), over 20,000 draws, stay below Lemma 4.3's bounds."""
    data, w = federation(1, sizes=(12, 30, 7), binary=True), start()
    B, L, sigma_G, sigma_H = region(data, w, 0.5)
    alpha = 0.9 / L
    method = PerFedAvg(variant="exact", alpha=alpha, batch=D, batch_outer=D1, batch_hessian=D2)
    for client in range(data.clients):
        own = objective(data, client, LOGISTIC)

        def draw(key: Any, own: Any = own) -> Any:
            keys = jax.random.split(key, 3)
            batches = [own.batches(k, (), n) for k, n in zip(keys, (D, D1, D2), strict=True)]
            batches = [b._replace(position=b.position[None]) if i != 1 else b
                       for i, b in enumerate(batches)]  # fmt: skip
            return method.meta_gradient(own, f32(w), *batches)

        keys = jax.random.split(jax.random.key(client), 20_000)
        draws = np.asarray(jax.jit(jax.vmap(draw))(keys), np.float64)
        truth = np.asarray(method.meta_gradient(own, f32(w), ALL, ALL, ALL), np.float64)
        squares = np.sum((draws - truth) ** 2, axis=1)
        variance = bounds.per_fedavg_variance(
            B, L, sigma_G, sigma_H, alpha, bounds.BatchSizes(D, D1, D2)
        )
        assert squares.mean() <= variance
        error = draws.std(axis=0).sum() / np.sqrt(len(draws))
        bias = bounds.per_fedavg_bias(L, sigma_G, alpha, D)
        assert np.linalg.norm(draws.mean(axis=0) - truth) <= bias + 4 * error


def test_without_adaptation_the_variance_is_that_of_a_batch() -> None:
    """alpha near 0: E|estimate - grad F_i|^2 is (spread of the client's gradients) / D'."""
    data, w = federation(1, sizes=(12, 30, 7), binary=True), start()
    method = PerFedAvg(variant="exact", alpha=1e-6, batch=2, batch_outer=3)
    own = objective(data, 1, LOGISTIC)
    d = own.batches(jax.random.key(0), (1,), 2)
    keys = jax.random.split(jax.random.key(1), 20_000)
    draws = jax.vmap(lambda k: method.meta_gradient(own, f32(w), d, own.batches(k, (), 3), d))(keys)
    g, _ = per_example(data, 1, w, "logistic")
    spread = np.mean(np.sum((g - g.mean(axis=0)) ** 2, axis=1))
    squares = np.sum((np.asarray(draws, np.float64) - g.mean(axis=0)) ** 2, axis=1)
    assert squares.mean() == pytest.approx(spread / 3, rel=0.05)


def test_the_hessian_free_error_falls_with_delta_squared_until_rounding() -> None:
    data, w = federation(1, binary=True), start()
    own = objective(data, 3, LOGISTIC)

    def estimate(variant: Any, delta: float = 0.1) -> np.ndarray:
        method = PerFedAvg(variant=variant, alpha=1.0, delta=delta)
        return np.asarray(method.meta_gradient(own, f32(w), ALL, ALL, ALL), np.float64)

    exact = estimate("exact")
    deltas = [4.0, 2.0, 1.0, 0.5]
    errors = [np.linalg.norm(estimate("hf", d) - exact) for d in deltas]
    order = np.log2(np.array(errors[:-1]) / errors[1:])
    assert np.all(abs(order[1:] - 2) < 0.3), order
    assert np.linalg.norm(estimate("hf", 1e-6) - exact) > 10 * errors[-1]


def test_lemmas_in_numbers() -> None:
    """The formulas with hand-reckoned values, each letter another number."""
    assert bounds.per_fedavg_smoothness(2, 3, 5, 0.1) == pytest.approx(8 + 1.5)
    assert bounds.per_fedavg_bias(2, 3, 0.5, 9) == pytest.approx(2)
    sizes = bounds.BatchSizes(D=9, D1=3, D2=2)
    value = bounds.per_fedavg_variance(1, 2, 3, 4, 0.5, sizes)
    assert value == pytest.approx(12 * (1 + 9 * (1 / 3 + 1 / 9)) * (1 + 16 * 0.25 / 8) - 12)
    assert bounds.per_fedavg_diversity(2, 3, 5, 0.1) == pytest.approx(3 + 1728)
    none = bounds.per_fedavg_variance(1, 2, 3, 4, 0.5, bounds.BatchSizes(*[float("inf")] * 3))
    assert none == pytest.approx(0)
    bias = bounds.per_fedavg_bias(L=3, sigma_G=13, alpha=0.1, D=10)
    run = bounds.RunSize(rounds=50, local_steps=4, cohort=2, clients=5)
    terms = bounds.theorem_4_5(2, 5, 7, 11, bias, 0.01, run)
    r = 2 / 5
    assert terms.start == pytest.approx(4 * 2 / (0.01 * 4 * 50))
    assert terms.noise == pytest.approx(0.05 * (1 + 0.05 * 12) * 7)
    assert terms.diversity == pytest.approx(0.05 * 11 * ((1 - r) / (r * 4) + 0.05 * 12))
    assert terms.bias == pytest.approx(0.01 * 9 * 169 / 10)
    assert bounds.corollary_4_6(0.01) == (10, 1000, 0.01)
    assert bounds.moreau_convexity(6, 3) == pytest.approx(2)
    assert bounds.inner_condition(6, 10, 2) == pytest.approx(2)
    assert bounds.inner_error(6, 1, 2, 3, 9, 0.5) == pytest.approx(2 / 64 * 1.5)
    assert bounds.inner_error(6, 1, 0, 3, 9, 0.5) == pytest.approx(2 / 25 * 1.5)
    assert bounds.inner_error(1, 2, 0, 3, 9, 0.5) == float("inf")
    assert bounds.moreau_diversity(6, 1, 2) == pytest.approx(36 / 28 * 4)
    assert bounds.moreau_diversity(2, 1, 2) == float("inf")
    assert bounds.eta_hat_1(6, 3, 2) == pytest.approx(1 / (36 * (3 + 128 * 3 / 2)))
    assert bounds.eta_hat_2(2) == pytest.approx(1 / 600)
    one = bounds.pfedme_theorem_1(3, 5, 0.1, 6, 3, 2, bounds.RunSize(10, 4, 2, 8))
    assert one.sampling == pytest.approx(3 * 5 / (2 * 10 * 8))
    assert one.drift == pytest.approx((4 * 5 + 3.6) * 3 / (4 * (10 * 2 * 2) ** 2))
    assert one.inner == pytest.approx(36 * 0.1 / 2)
    assert one.start == pytest.approx(6 * np.exp(-bounds.eta_hat_1(6, 3, 2) * 10))
    two = bounds.pfedme_theorem_2(3, 5, 0.1, 2, 2, bounds.RunSize(10, 4, 2, 8))
    assert two.start == pytest.approx(3 * 600 / 10)
    assert two.sampling == pytest.approx((3 * 2 * 5 * 3) ** 0.5 / 80**0.5)
    assert two.drift == pytest.approx(
        3 ** (2 / 3) * 20.4 ** (1 / 3) / (2 ** (4 / 3) * 4 ** (1 / 3) * 10 ** (2 / 3))
    )
    assert two.inner == pytest.approx(0.4)
    lost = 3 / (2 * 4)  # n = 5, r = 2
    assert bounds.fedpaq_b2(0.5, 2, 5) == pytest.approx(0.1 + 4 * lost * 1.5)
    assert bounds.fedpaq_b1(3, 0.5, 2, 5) == pytest.approx(18 * (0.1 + 4 * lost * 1.5))
    B1 = bounds.fedpaq_b1(3, 0.5, 2, 5)
    assert bounds.fedpaq_k0(3, 2, 0.5, 4, 2, 5) == ceil(4 * max(1.5, 4 * (B1 / 4 + 1), 20 / 16))
    C = bounds.fedpaq_c(3, 2, 7, 0.5, 2, 5)
    extra = 8 * 1.5 * 5 * lost
    assert pytest.approx(16 * 49 / 20 * (2 + extra)) == C.C1
    assert pytest.approx(16 * e * 9 * 49 / 20) == C.C2
    assert pytest.approx(256 * e * 9 * 49 / 80 * (6 + extra)) == C.C3
    bound = bounds.fedpaq_theorem_1(3, C, k=9, k0=4, tau=2)
    assert bound.start == pytest.approx(3 * (9 / 19) ** 2)
    assert (bound.noise, bound.drift) == pytest.approx((C.C1 * 2 / 19, C.C2 / 19))
    assert bound.mixed == pytest.approx(C.C3 / 361)
    N1, N2 = bounds.fedpaq_n(7, 0.5, 2, 5)
    assert pytest.approx(1.5 * 49 / 5 * (1 + 5 * lost)) == N1
    assert pytest.approx(49 / 5 * 6) == N2
    run = bounds.RunSize(rounds=25, local_steps=4, cohort=2, clients=5)
    last = bounds.fedpaq_theorem_2(2, 3, 7, 0.5, run)
    assert last == pytest.approx((12 / 10, N1 / 10, N2 * 3 / 100))
    B2 = bounds.fedpaq_b2(0.5, 2, 5)
    longest = bounds.longest_period(0.5, run)
    assert longest == pytest.approx(((B2**2 + 0.8) ** 0.5 - B2) / 8 * 10)


def controlled(noise: float = 1.0) -> tuple[Federation, np.ndarray, np.ndarray]:
    """Ten quadratics 1/2 |w - y|^2 in 8 dimensions as regressions on unit vectors: L = mu = 1/8."""
    rng = np.random.default_rng(0)
    parts, centers = [], []
    for _ in range(10):
        center = rng.normal(size=8)
        x = np.tile(np.eye(8), (8, 1)).astype(np.float32)
        y = (x @ center + noise * rng.normal(size=len(x))).astype(np.float32)
        centers.append(y.reshape(8, 8).mean(axis=0))
        parts.append((x, y))
    return Federation.from_arrays(parts, parts), np.array(centers), np.mean(centers, axis=0)


@pytest.mark.slow
def test_fedpaq_stays_below_its_theorem_1() -> None:
    """E|x_k - x*|^2 over seeds, with the theorem's own step sizes and a real quantizer."""
    data, _, optimum = controlled()
    task = Task(replace(QUADRATIC.model, dimension=8), loss=QUADRATIC.loss)  # type: ignore[type-var]
    L = mu = 1 / 8
    tau, s, m = 2, 4, 4
    q = LowPrecision(s).variance((8,))
    assert q is not None
    method = FedAvg(lr=4 / mu, tau=tau, batch=m, schedule=Harmonic())
    setups = [
        experiment(method, data, task=task, seed=seed, codec=LowPrecision(s)) for seed in range(10)
    ]
    engine = Vectorized(setups[0])
    found = measure(engine, jnp.asarray(optimum, jnp.float32), Effort(steps=8, examples=64))
    assert found.L.value == pytest.approx(L, rel=1e-3)
    assert found.mu.value == pytest.approx(mu, rel=1e-3)
    k0 = bounds.fedpaq_k0(L, mu, q, tau, 10, 10)
    C = bounds.fedpaq_c(L, mu, found.sigma_G.value, q, 10, 10, m)
    states, distances = [made.init_state() for made in setups], []
    for k, more in ((k0, k0), (2 * k0, k0), (4 * k0, 2 * k0)):
        outcomes = engine.run_rounds(setups, states, more)
        states = [outcome[0] for outcome in outcomes if not isinstance(outcome, Exception)]
        distances.append(np.mean([np.sum((np.asarray(s.params) - optimum) ** 2) for s in states]))
        bound = sum(bounds.fedpaq_theorem_1(float(distances[0]), C, k, k0, tau))
        assert distances[-1] <= bound
    first, *distances = distances
    # It falls about as 1/k: the noise of a constant number of examples.
    assert 2 < first / distances[1] < 8


def test_stationarity_is_the_problems_own_gradient() -> None:
    """Per-FedAvg's, pFedMe's and FedAvg's problems, on quadratics in NumPy."""
    data, w = federation(3), start()
    clients = quadratics(data)
    alpha, lam = 0.1, 3.0
    meta = [(np.eye(DIMENSION) - alpha * c.A) @ c.grad(w - alpha * c.grad(w)) for c in clients]
    envelope = [
        lam * (w - np.linalg.solve(c.A + lam * np.eye(DIMENSION), c.b + lam * w)) for c in clients
    ]
    plain = [c.grad(w) for c in clients]
    for method, gradients in (
        (PerFedAvg(variant="fo", alpha=alpha), meta),
        (PFedMe(lam=lam, inner_lr=0.05), envelope),
        (FedAvg(), plain),
    ):
        found = stationarity(Vectorized(experiment(method, data)), f32(w))
        mean = np.mean(gradients, axis=0)
        assert found.squared == pytest.approx(mean @ mean, rel=1e-3)
        spread = np.mean([np.sum((g - mean) ** 2) for g in gradients])
        assert found.diversity == pytest.approx(spread, rel=1e-3)


def test_decay_is_measured_at_the_sent_iterate() -> None:
    """Remark 4.7: with the iterate sent, the gradient there; it falls along a run."""
    data = federation(3)
    method = PerFedAvg(variant="exact", alpha=0.1, beta=0.05, tau=5, batch="full")
    engine = Vectorized(experiment(replace(method, send_iterate=True), data))
    found = decay(engine, 40, every=10)
    np.testing.assert_array_equal(found.round, [10, 20, 30, 40])
    assert found.squared[-1] < 0.2 * found.squared[0]
    state = engine.advance(engine.init(), 10)
    assert found.squared[0] == pytest.approx(
        stationarity(engine, state.server_state).squared, rel=1e-4
    )
    assert found.squared[0] != pytest.approx(stationarity(engine, state.params).squared, rel=1e-4)


def some_constants(**other: Any) -> Constants:
    """Constants that are all 1 unless said otherwise."""
    names = ("B", "L", "mu", "rho", "sigma_G", "sigma_H", "gamma_G", "gamma_H")
    plain: dict[str, Any] = {"q": 0.0, "example_B": 1.0, "loss": 2.0, "gradient": 1.0,
                             "client_L": np.ones(5), "client_B": np.ones(5), "clients": 5,
                             "parameters": 4}  # fmt: skip
    found: dict[str, Any] = dict.fromkeys(names, 1.0) | plain | other
    return Constants(**found | {k: Estimate.exact(found[k]) for k in names})
