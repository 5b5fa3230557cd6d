"""pFedMe against references written from the paper: Algorithm 1, eqs. (3), (6), (7), (8)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import problems
from perfed import FieldError, PFedMe, Sequential, Vectorized
from perfed.core.objective import ALL, Objective
from perfed.evaluation.evaluator import SimulationEvaluator
from perfed.methods import Received

LAM, ETA, LR = 3.0, 0.05, 0.08


def pfedme(**settings: object) -> PFedMe:
    settings = {"lam": LAM, "eta": ETA, "inner_lr": LR, "batch": "full"} | settings
    return PFedMe(**settings)  # type: ignore[arg-type]


def reference_prox(
    f: problems.Quadratic, anchor: np.ndarray, theta: np.ndarray, K: int, solver: str
) -> np.ndarray:
    """K steps on f(theta) + lam/2 |theta - anchor|^2."""
    q = (LR * LAM) ** 0.5
    momentum = (1 - q) / (1 + q) if solver == "nesterov" else 0.0
    ahead = theta
    for _ in range(K):
        new = ahead - LR * (f.grad(ahead) + LAM * (ahead - anchor))
        ahead = new + momentum * (new - theta)
        theta = new
    return theta


def reference_client(
    f: problems.Quadratic,
    w: np.ndarray,
    R: int,
    K: int,
    solver: str = "gd",
    start: str = "received",
) -> tuple[np.ndarray, np.ndarray]:
    """Lines 5-8: the local model and the personal one."""
    w_i, theta = w, w
    for _ in range(R):
        theta = reference_prox(f, w_i, w_i if start == "local" else theta, K, solver)
        w_i = w_i - ETA * LAM * (w_i - theta)
    return w_i, theta


@pytest.mark.parametrize(
    ("R", "K", "solver", "beta", "start"),
    [
        *itertools.product([1, 4], [1, 3], ["gd", "nesterov"], [1.0, 2.0], ["received"]),
        (4, 3, "gd", 0.5, "local"),
    ],
)
def test_a_round_on_quadratics(R: int, K: int, solver: str, beta: float, start: str) -> None:
    method = pfedme(
        local_rounds=R, inner_steps=K, inner_solver=solver, beta=beta, inner_start=start
    )
    engine = Vectorized(problems.experiment(method))
    state = engine.init()
    w = np.asarray(state.params, np.float64)
    clients = [
        reference_client(f, w, R, K, solver, start)
        for f in problems.quadratics(problems.federation())
    ]
    mean = np.mean([w_i for w_i, _ in clients], axis=0)
    after = engine.advance(state, 1)
    np.testing.assert_allclose(after.params, (1 - beta) * w + beta * mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after.clients.state, [t for _, t in clients], rtol=1e-5, atol=1e-6)


def test_beta_1_is_plain_averaging() -> None:
    data = problems.federation()
    engine = Vectorized(problems.experiment(pfedme(beta=1.0), data))
    state = engine.init()
    local = [
        pfedme()
        .local_update(
            problems.objective(data, i), Received(state.params), state.params, problems.context()
        )
        .params
        for i in range(data.clients)
    ]
    np.testing.assert_allclose(engine.advance(state, 1).params, np.mean(local, axis=0), rtol=1e-5)


def exact_prox(f: problems.Quadratic, w: np.ndarray) -> np.ndarray:
    return np.linalg.solve(f.A + LAM * np.eye(len(w)), f.b + LAM * w)


@pytest.mark.parametrize("solver", ["gd", "nesterov"])
def test_the_gradient_of_the_envelope(solver: str) -> None:
    """Proposition 1: with the inner problem solved, the local step is along lam (w - prox(w))."""
    data, w = problems.federation(), problems.start()
    for i, f in enumerate(problems.quadratics(data)):
        method = pfedme(local_rounds=1, inner_steps=400, inner_solver=solver)
        own = problems.objective(data, i)
        reply = method.local_update(own, Received(problems.f32(w)), None, problems.context())
        gradient = (w - np.asarray(reply.params)) / ETA
        np.testing.assert_allclose(gradient, LAM * (w - exact_prox(f, w)), rtol=1e-4, atol=1e-5)


def test_training_minimizes_the_mean_envelope() -> None:
    """grad F(w*) = 0 gives sum_i (A_i + lam)^-1 (A_i w* - b_i) = 0, a linear system."""
    data = problems.federation()
    clients = problems.quadratics(data)
    inverses = [np.linalg.inv(f.A + LAM * np.eye(problems.DIMENSION)) for f in clients]
    matrix = sum(inv @ f.A for inv, f in zip(inverses, clients, strict=True))
    vector = sum(inv @ f.b for inv, f in zip(inverses, clients, strict=True))
    w_star = np.linalg.solve(matrix, vector)
    # One local round and an exact solve: the server then follows the gradient of F itself.
    method = pfedme(local_rounds=1, inner_steps=80, eta=0.2)
    engine = Vectorized(problems.experiment(method, data))
    w = engine.advance(engine.init(), 600).params
    np.testing.assert_allclose(w, w_star, rtol=1e-3, atol=1e-4)
    # FedAvg's own minimizer is elsewhere, so this is not just any average.
    assert (
        np.abs(w_star - np.linalg.solve(sum(f.A for f in clients), sum(f.b for f in clients)))[0]
        > 1e-2
    )


def test_the_personal_model_is_theta_and_nothing_else() -> None:
    """PM is theta: not the local model (aliased in public code), nor the global one."""
    data = problems.federation()
    R, K = 4, 3
    engine = Vectorized(problems.experiment(pfedme(local_rounds=R, inner_steps=K), data, cohort=2))
    state = engine.advance(engine.init(), 3)
    w = np.asarray(state.params, np.float64)
    personal = np.asarray(SimulationEvaluator(engine).personal_models(state))
    for i, f in enumerate(problems.quadratics(data)):
        w_i, theta = reference_client(f, w, R, K)
        np.testing.assert_allclose(personal[i], theta, rtol=1e-4, atol=1e-5)
        assert np.abs(personal[i] - w_i).max() > 1e-2
        assert np.abs(personal[i] - w).max() > 1e-2


def test_scoring_covers_clients_that_never_took_part() -> None:
    """Every client's theta starts from the current w, not from the first one."""
    data = problems.federation()
    engine = Vectorized(problems.experiment(pfedme(), data, cohort=1))
    first = engine.init()
    later = engine.advance(first, 1)
    never = [i for i in range(data.clients) if i != int(engine.experiment.sample_cohort(0)[0])]
    evaluator = SimulationEvaluator(engine)
    before, after = (np.asarray(evaluator.personal_models(s, never)) for s in (first, later))
    assert np.abs(before - after).max(axis=1).min() > 1e-4


def test_theta_is_kept_by_the_client() -> None:
    """The sampled clients' theta changes, the others' stays, over several rounds."""
    data = problems.federation()
    engine = Vectorized(problems.experiment(pfedme(), data, cohort=2))
    state = engine.init()
    np.testing.assert_array_equal(state.clients.state, np.tile(state.params, (data.clients, 1)))
    for round in range(4):
        after = engine.advance(state, 1)
        took_part = set(np.asarray(engine.experiment.sample_cohort(round)).tolist())
        moved = np.abs(np.asarray(after.clients.state - state.clients.state)).max(axis=1) > 0
        assert {i for i in range(data.clients) if moved[i]} == took_part
        state = after


def test_a_kept_theta_is_where_the_next_turn_starts() -> None:
    data = problems.federation()
    f, own = problems.quadratics(data)[0], problems.objective(data, 0)
    w, kept = problems.start(), problems.start(9)
    method = pfedme(local_rounds=1, inner_steps=2, inner_start="kept")
    reply = method.local_update(
        own, Received(problems.f32(w)), problems.f32(kept), problems.context()
    )
    np.testing.assert_allclose(reply.client_state, reference_prox(f, w, kept, 2, "gd"), rtol=1e-5)


@pytest.mark.parametrize("solver", ["gd", "nesterov"])
def test_accuracy_nu(solver: str) -> None:
    """(8): stop as soon as |grad h|^2 <= nu, and not before; K limits the steps."""
    data = problems.federation()
    f, own = problems.quadratics(data)[1], problems.objective(data, 1)
    w, start = problems.start(), problems.start(9)

    def squared_gradient(theta: np.ndarray) -> float:
        g = f.grad(theta) + LAM * (theta - w)
        return float(g @ g)

    nu = 1e-3
    K = next(
        k for k in range(200) if squared_gradient(reference_prox(f, w, start, k, solver)) <= nu
    )
    assert K > 3
    for limit, expected in ((1000, K), (2, 2)):
        method = pfedme(inner_solver=solver, nu=nu, inner_steps=limit)
        theta = method.prox(own, problems.f32(w), problems.f32(start), ALL)
        reference = reference_prox(f, w, start, expected, solver)
        np.testing.assert_allclose(theta, reference, rtol=1e-4, atol=1e-5)
    already = exact_prox(f, w)
    theta = pfedme(nu=nu).prox(own, problems.f32(w), problems.f32(already), ALL)
    np.testing.assert_allclose(theta, already, rtol=1e-6)


def test_nu_per_client_under_the_vectorized_engine() -> None:
    """Clients that need different numbers of steps do not disturb each other."""
    method = pfedme(nu=1e-4, inner_steps=500)
    parallel, plain = (E(problems.experiment(method)) for E in (Vectorized, Sequential))
    np.testing.assert_allclose(
        parallel.advance(parallel.init(), 2).params,
        plain.advance(plain.init(), 2).params,
        rtol=1e-5,
    )


def test_one_fresh_batch_a_local_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Line 7: a batch is drawn for each of the R rounds and shared by its K inner steps."""
    used: list[tuple[int, ...]] = []
    original = Objective.grad

    def spy(self: Objective, w: object, batch: object = ALL) -> object:
        used.append(tuple(int(p) for p in batch.position))  # type: ignore[attr-defined]
        return original(self, w, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(Objective, "grad", spy)
    own = problems.objective(problems.federation(sizes=(1000,)), 0)
    method = pfedme(local_rounds=3, inner_steps=4, batch=6)
    with jax.disable_jit():
        method.local_update(own, Received(jnp.zeros(problems.DIMENSION)), None, problems.context())
    rounds = [used[4 * r : 4 * r + 4] for r in range(3)]
    assert len(used) == 12
    assert all(len(set(batches)) == 1 for batches in rounds)
    assert len({batches[0] for batches in rounds}) == 3


@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan"), float("inf")])
def test_a_beta_that_freezes_or_breaks_the_server_is_refused(beta: float) -> None:
    with pytest.raises(FieldError, match="beta"):
        PFedMe(beta=beta)
