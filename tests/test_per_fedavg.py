"""Per-FedAvg against references written from the paper: eqs. (3), (5), (7), (8) and Algorithm 1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import problems
from perfed import PerFedAvg, Vectorized
from perfed.core.objective import ALL, Batch, Objective
from perfed.methods import Received
from perfed.methods.schedules import Polynomial
from perfed.methods.steps import take_steps

ALPHA, BETA = 0.1, 0.05


def full(variant: str, **settings: object) -> PerFedAvg:
    settings = {"alpha": ALPHA, "beta": BETA, "batch": "full", "delta": 0.1} | settings
    return PerFedAvg(variant, **settings)  # type: ignore[arg-type]


def reference_step(variant: str, f: problems.Quadratic, w: np.ndarray) -> np.ndarray:
    w_tilde = w - ALPHA * f.grad(w)
    v = f.grad(w_tilde)
    if variant != "fo":
        v = v - ALPHA * f.A @ v
    return w - BETA * v


@pytest.mark.parametrize("tau", [1, 4])
@pytest.mark.parametrize("variant", ["exact", "fo", "hf"])
def test_a_round_on_quadratics(variant: str, tau: int) -> None:
    method = full(variant, tau=tau)
    engine = Vectorized(problems.experiment(method))
    state = engine.init()
    w = np.asarray(state.params, np.float64)
    expected = []
    for f in problems.quadratics(problems.federation()):
        w_i = w
        for _ in range(tau):
            w_i = reference_step(variant, f, w_i)
        expected.append(w_i)
    after = engine.advance(state, 1).params
    np.testing.assert_allclose(after, np.mean(expected, axis=0), rtol=1e-5, atol=1e-6)


def test_variants_differ() -> None:
    """A `hf` or `exact` that drops the Hessian somewhere is `fo` under another name."""
    w, own = problems.start(), problems.objective(problems.federation(), 0)

    def step(variant: str) -> np.ndarray:
        method = full(variant, tau=1)
        return np.asarray(
            method.local_update(own, Received(problems.f32(w)), None, problems.context()).params
        )

    np.testing.assert_allclose(step("exact"), step("hf"), rtol=1e-5)
    assert np.abs(step("exact") - step("fo")).max() > 1e-3


def numpy_logistic(
    data: tuple[np.ndarray, np.ndarray], w: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Gradient and Hessian of the mean logistic loss."""
    x, y = (part.astype(np.float64) for part in data)
    p = 1 / (1 + np.exp(-x @ w))
    return x.T @ (p - y) / len(y), (x * (p * (1 - p))[:, None]).T @ x / len(y)


@pytest.mark.parametrize("variant", ["exact", "fo", "hf"])
def test_the_hessian_is_taken_at_w_and_the_gradient_at_w_tilde(variant: str) -> None:
    """Quadratics have one Hessian everywhere; here the point matters."""
    data = problems.federation(binary=True)
    own = problems.objective(data, 3, problems.LOGISTIC)
    alpha, beta, w = 1.5, 0.4, problems.start()
    gradient, hessian = numpy_logistic(data.train.client(3), w)
    v, _ = numpy_logistic(data.train.client(3), w - alpha * gradient)
    if variant != "fo":
        v = v - alpha * hessian @ v
    method = full(variant, alpha=alpha, beta=beta, tau=1, delta=1e-2)
    reply = method.local_update(own, Received(problems.f32(w)), None, problems.context())
    np.testing.assert_allclose(reply.params, w - beta * v, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("steps", [1, 3])
def test_exact_adaptation_is_the_derivative_through_the_steps(steps: int) -> None:
    own = problems.objective(problems.federation(binary=True), 1, problems.LOGISTIC)
    x, y = own.examples.rows(jnp.arange(int(own.examples.size)))

    def f(w: jax.Array) -> jax.Array:
        return jnp.mean(problems.logistic(x @ w, y))

    def after_adaptation(w: jax.Array) -> jax.Array:
        for _ in range(steps):
            w = w - 0.7 * jax.grad(f)(w)
        return f(w)

    w = problems.f32(problems.start())
    method = full("exact", alpha=0.7, adapt_steps=steps)
    meta_gradient = method.meta_gradient(own, w, ALL, ALL, ALL)
    np.testing.assert_allclose(meta_gradient, jax.grad(after_adaptation)(w), rtol=1e-5, atol=1e-6)


def test_several_steps_with_hf_agree_with_exact() -> None:
    own = problems.objective(problems.federation(), 1)
    w = problems.f32(problems.start())
    exact, hf = (
        full(v, adapt_steps=3).meta_gradient(own, w, ALL, ALL, ALL) for v in ("exact", "hf")
    )
    np.testing.assert_allclose(hf, exact, rtol=1e-4)


def test_three_independent_batches_of_their_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """D, D', D'' differ from each other and from step to step; each has its size."""
    used: list[tuple[str, tuple[int, ...]]] = []

    def spy(kind: str) -> None:
        original = getattr(Objective, kind)

        def wrapped(self: Objective, *args: object) -> object:
            batch = args[-1]
            assert isinstance(batch, Batch)
            assert batch.position is not None
            used.append((kind, tuple(int(p) for p in batch.position)))
            return original(self, *args)

        monkeypatch.setattr(Objective, kind, wrapped)

    spy("grad")
    spy("hvp")
    own = problems.objective(problems.federation(sizes=(1000,)), 0)
    method = full("exact", tau=2, batch=6, batch_outer=7, batch_hessian=8)
    with jax.disable_jit():
        method.local_update(own, Received(problems.f32(problems.start())), None, problems.context())
    assert [(kind, len(batch)) for kind, batch in used] == [
        ("grad", 6),
        ("grad", 7),
        ("hvp", 8),
    ] * 2
    seen = [set(batch) for _, batch in used]
    for i, a in enumerate(seen):
        for b in seen[:i]:
            # Of 1000 examples, two independent batches of 8 share at most one but for bad luck.
            assert len(a & b) <= 1


def test_diminishing_beta() -> None:
    own = problems.objective(problems.federation(), 0)
    w = problems.f32(problems.start())
    constant, halved = full("exact", tau=1), full("exact", tau=1, schedule=Polynomial(0.5))

    def moved(method: PerFedAvg, round: int) -> np.ndarray:
        return np.asarray(
            method.local_update(own, Received(w), None, problems.context(round)).params - w
        )

    np.testing.assert_allclose(moved(halved, 0), moved(constant, 0), atol=1e-6)
    np.testing.assert_allclose(moved(halved, 3), moved(constant, 3) / 2, atol=1e-6)
    np.testing.assert_allclose(moved(constant, 3), moved(constant, 0), atol=1e-6)


def test_the_iterate_of_remark_4_7() -> None:
    """The cohort's mean at t_k, drawn from 0..tau-1 once for all; t = 0 is the received model."""
    tau, data = 3, problems.federation()
    engine = Vectorized(problems.experiment(full("exact", tau=tau, send_iterate=True), data))
    state, seen = engine.init(), set()
    for _ in range(12):
        w = np.asarray(state.params, np.float64)
        paths = []
        for f in problems.quadratics(data):
            path = [w]
            for _ in range(tau):
                path.append(reference_step("exact", f, path[-1]))
            paths.append(path)
        means = np.mean(paths, axis=0)
        state = engine.advance(state, 1)
        assert state.server_state is not None
        distances = np.abs(means - np.asarray(state.server_state)).max(axis=1)
        assert distances.min() < 1e-5
        seen.add(int(distances.argmin()))
        np.testing.assert_allclose(state.params, means[-1], rtol=1e-5, atol=1e-6)
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("pick", [0, 1, 2])
def test_the_picked_iterate_is_the_one_before_that_step(pick: int) -> None:
    last, picked = take_steps(
        lambda w, factor: w * factor,
        jnp.float32(1.0),
        jnp.array([2.0, 3.0, 5.0]),
        3,
        jnp.int32(pick),
    )
    assert (float(last), float(picked)) == (30.0, [1.0, 2.0, 6.0][pick])


def test_no_iterate_unless_asked_for() -> None:
    engine = Vectorized(problems.experiment(full("fo")))
    assert engine.advance(engine.init(), 1).server_state is None


@pytest.mark.parametrize("steps", [1, 2])
def test_the_personalized_model_is_the_adapted_one(steps: int) -> None:
    data = problems.federation()
    f, w = problems.quadratics(data)[2], problems.start()
    own = problems.objective(data, 2)
    method = full("hf", adapt_steps=steps)
    adapted = method.personalize(own, Received(problems.f32(w)), None, problems.context())
    for _ in range(steps):
        w = w - ALPHA * f.grad(w)
    np.testing.assert_allclose(adapted, w, rtol=1e-5)
