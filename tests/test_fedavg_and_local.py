"""FedAvg, FedAvg + update, and Local, against references of a few lines."""

import numpy as np
import pytest

import problems
from perfed import FedAvg, Local, Vectorized
from perfed.evaluation.evaluator import SimulationEvaluator
from perfed.methods import Received

LR = 0.1


@pytest.mark.parametrize("tau", [1, 5])
def test_a_fedavg_round_on_quadratics(tau: int) -> None:
    engine = Vectorized(problems.experiment(FedAvg(lr=LR, tau=tau, batch="full")))
    state = engine.init()
    models = []
    for f in problems.quadratics(problems.federation()):
        w = np.asarray(state.params, np.float64)
        for _ in range(tau):
            w = w - LR * f.grad(w)
        models.append(w)
    np.testing.assert_allclose(engine.advance(state, 1).params, np.mean(models, axis=0), rtol=1e-5)


@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_the_mean_is_uniform_unless_asked_otherwise(weighting: str) -> None:
    data = problems.federation()
    engine = Vectorized(
        problems.experiment(FedAvg(lr=LR, tau=1, batch="full"), data, weighting=weighting)
    )
    state = engine.init()
    w = np.asarray(state.params, np.float64)
    models = [w - LR * f.grad(w) for f in problems.quadratics(data)]
    weights = None if weighting == "uniform" else data.train.size
    expected = np.average(models, axis=0, weights=weights)
    np.testing.assert_allclose(engine.advance(state, 1).params, expected, rtol=1e-5)


@pytest.mark.parametrize(("alpha", "steps"), [(None, 1), (0.3, 1), (0.3, 4)])
def test_fedavg_plus_update(alpha: float | None, steps: int) -> None:
    data = problems.federation()
    method = FedAvg(lr=LR, alpha=alpha, adapt_steps=steps)
    w = problems.start()
    expected = w
    for _ in range(steps):
        f = problems.quadratics(data)[0]
        expected = expected - (alpha or LR) * f.grad(expected)
    own = method.personalize(
        problems.objective(data, 0), Received(problems.f32(w)), None, problems.context()
    )
    np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


def test_local_never_federates() -> None:
    data, tau = problems.federation(), 3
    engine = Vectorized(problems.experiment(Local(lr=LR, tau=tau, batch="full"), data))
    first = engine.init()
    state = engine.advance(first, 4)
    assert state.params is None  # the server has no leaf
    _, traffic = engine.run(first, 2)
    assert (traffic.uplink.sum(), traffic.downlink.sum()) == (0, 0)
    personal = SimulationEvaluator(engine).personal_models(state)
    for i, f in enumerate(problems.quadratics(data)):
        w = np.asarray(first.clients.personal, np.float64)[i]
        for _ in range(4 * tau):
            w = w - LR * f.grad(w)
        np.testing.assert_allclose(personal[i], w, rtol=1e-4, atol=1e-5)
