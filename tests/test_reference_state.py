"""Methods with a state against NumPy in float64, and their known mistakes, which differ."""

from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import reference_state
from perfed import (
    APFL,
    Ditto,
    Experiment,
    FedAdam,
    FedAvgM,
    FedProx,
    FedYogi,
    Method,
    Scaffold,
    Sequential,
    Task,
    Vectorized,
)
from perfed.core.random import Purpose, fold
from perfed.evaluation.evaluator import SimulationEvaluator
from perfed.methods import Received
from test_reference import COHORT, SEED, Batches, Network, references, uneven

ROUNDS, L2 = 8, 0.03
WORK: dict[str, Any] = {"lr": 0.15, "tau": 3, "batch": 5}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "fedprox": (FedProx(mu=0.8, **WORK), {"weighting": "size"}),
    "scaffold": (Scaffold(server_lr=0.8, **WORK), {}),
    "scaffold-gradient": (Scaffold(server_lr=0.8, variate="gradient", **WORK), {}),
    "fedavgm": (FedAvgM(momentum=0.6, server_lr=0.7, **WORK), {"sampling": "epochs"}),
    "fedadam": (FedAdam(server_lr=0.1, beta_1=0.7, beta_2=0.8, adaptivity=0.05, **WORK), {}),
    "fedyogi": (FedYogi(server_lr=0.1, beta_1=0.7, beta_2=0.8, adaptivity=0.05, **WORK), {}),
    "ditto": (Ditto(personal_lr=0.2, lam=0.7, personal_steps=4, **WORK), {}),
    "apfl": (APFL(alpha=0.3, **WORK), {}),
    "apfl-fixed": (APFL(alpha=0.3, adaptive=False, **WORK), {"weighting": "size"}),
}
# By case: what public versions of these methods compute instead, or what is easily mistaken.
MISTAKES: dict[str, list[str]] = {
    "fedprox": ["held to the moving model", "mu halved", "pushed away"],
    "scaffold": [
        "correction reversed",
        "divided by lr alone",
        "c_i less nothing",
        "difference after c_i is replaced",
        "c_i not kept",
        "c by the whole mean",
        "no server step size",
    ],
    "scaffold-gradient": ["gradient at y", "c by the whole mean"],
    "fedavgm": ["damped", "Nesterov"],
    "fedadam": [
        "bias corrected",
        "v from zero",
        "v of the momentum",
        "tau in the root",
        "against the delta",
        "Yogi's v",
    ],
    "fedyogi": ["bias corrected", "v from zero", "sign reversed", "the other's v"],
    "ditto": [
        "pulled to the local w",
        "personal steps from w",
        "v is sent",
        "newcomers have the first model",
    ],
    "apfl": [
        "gradient of v at v",
        "v without the factor alpha",
        "mixed with the moved w",
        "v replaced by the mixture",
        "alpha by the gradient at w",
        "alpha by v alone",
        "alpha decayed",
        "alpha at every step",
        "v alone is scored",
        "newcomers mix the first model",
    ],
    "apfl-fixed": ["v without the factor alpha"],
}


class Outcome(NamedTuple):
    """After some rounds: the global model, what the server and each client keep, own models."""

    w: Any
    server: Any
    clients: Any
    personal: Any


@cache
def experiment(case: str) -> Experiment:
    method, options = CASES[case]
    return Experiment(uneven(), Task(Network(), l2=L2), method, COHORT, SEED, **options)


@cache
def computed(case: str, engine_type: Any) -> list[Outcome]:
    """After one round, when there are clients that never took part, and after the last."""
    made = experiment(case)
    engine = engine_type(made)
    # Where a method has no models of clients' own, everyone's is the global one.
    is_personal = type(made.method).personalize is not Method.personalize
    personal_models = SimulationEvaluator(engine).personal_models if is_personal else None
    state, found = engine.init(), []
    for rounds in (1, ROUNDS - 1):
        state = engine.advance(state, rounds)
        models = personal_models(state) if personal_models else None
        found.append(
            Outcome(
                flat(state.params),
                flat(state.server_state),
                [flat(state.clients.state, i) for i in range(made.federation.clients)],
                [
                    flat(state.params) if models is None else flat(models, i)
                    for i in range(made.federation.clients)
                ],
            )
        )
    return found


@cache
def draws(case: str, k: int, i: int, purpose: Purpose) -> Batches:
    return Batches(experiment(case), i, fold(SEED, purpose, k, i))


@cache
def first_model(case: str) -> Any:
    return flat(experiment(case).init_params())


@cache
def cohorts(case: str) -> list[list[int]]:
    return [np.asarray(experiment(case).sample_cohort(k)).tolist() for k in range(ROUNDS)]


def expected(case: str, wrong: str = "") -> list[Outcome]:
    """The same by the reference."""
    made, method = experiment(case), CASES[case][0]
    clients = references(made.federation, L2)
    by_size = made.weighting == "size"

    def local(k: int, i: int) -> Batches:
        return draws(case, k, i, Purpose.LOCAL)

    found = []
    for rounds in (1, ROUNDS):
        w, server, kept = reference_state.rounds(
            clients, first_model(case), method, cohorts(case)[:rounds], local, by_size, wrong
        )
        own = [
            reference_state.METHODS[method.name].personal(
                client, w, kept[i], draws(case, rounds, i, Purpose.PERSONALIZE), method, wrong
            )
            for i, client in enumerate(clients)
        ]
        records = [np.concatenate([np.zeros(0), *map(np.ravel, one.values())]) for one in kept]
        at_server = np.concatenate([np.zeros(0), *map(np.ravel, server.values())])
        found.append(Outcome(w, at_server, records, own))
    return found


def flat(tree: Any, i: Any = ...) -> Any:
    return np.concatenate([np.zeros(0), *(np.ravel(leaf[i]) for leaf in jax.tree.leaves(tree))])


@pytest.mark.parametrize(
    ("case", "engine_type"),
    [
        *((case, Vectorized) for case in CASES),
        *(pytest.param(case, Sequential, marks=pytest.mark.slow) for case in CASES),
    ],
)
def test_eight_rounds(case: str, engine_type: Any) -> None:
    """Global model, server state, every client's state and personal model, to 1e-10."""
    with jax.enable_x64(True):
        reference = expected(case)
        assert np.abs(reference[-1].w - first_model(case)).max() > 0.05  # it went somewhere
        for found, due in zip(computed(case, engine_type), reference, strict=True):
            for part, right in zip(found, due, strict=True):
                np.testing.assert_allclose(part, right, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("case", "mistake"), [(case, mistake) for case, all in MISTAKES.items() for mistake in all]
)
def test_a_known_mistake_differs(case: str, mistake: str) -> None:
    with jax.enable_x64(True), np.errstate(invalid="ignore"):
        same = [
            np.allclose(part, wrong, rtol=0, atol=1e-4)
            for found, due in zip(computed(case, Vectorized), expected(case, mistake), strict=True)
            for part, wrong in zip(found, due, strict=True)
        ]
    assert not all(same)


def test_personal_leaves_have_no_variate_at_the_server() -> None:
    """SCAFFOLD: their steps are plain, whatever c_i is, and nothing of them is sent."""
    method, key = Scaffold(lr=0.1, tau=1, batch=5), fold(SEED, Purpose.LOCAL, 0, 0)
    made = Experiment(uneven(), Task(Network()), method, COHORT, SEED, personal=("2", "3"))
    x = made.init_params()
    assert made.init_server(x).server_state[2:] == [None, None]

    @jax.jit
    def local_update(x: Any) -> tuple[Any, Any]:
        f = made.objective(made.device_data().train, 0)
        received = Received(x, [x[0], x[1], None, None])
        c_i = [leaf + 1 for leaf in x]
        sent = method.local_update(f, received, c_i, made.context(0, key))
        return sent, f.grad(x, f.batches(key, 1, 5).at(0))

    sent, gradient = local_update(x)
    for j, correction in enumerate([-1.0, -1.0, 0.0, 0.0]):  # c - c_i
        moved = x[j] - 0.1 * (gradient[j] + correction)
        np.testing.assert_allclose(sent.params[j], moved, atol=1e-6)
    assert sent.extra[2:] == [None, None]
