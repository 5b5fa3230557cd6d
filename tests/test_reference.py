"""Twelve rounds of every method against NumPy in float64: what no redesign may move."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
from perfed import (
    Experiment,
    FedAvg,
    Federation,
    Local,
    PerFedAvg,
    PFedMe,
    Sequential,
    Task,
    Vectorized,
)
from perfed.core.random import Purpose, fold, permuted
from perfed.evaluation.evaluator import SimulationEvaluator
from perfed.methods.schedules import Harmonic, Polynomial

HIDDEN, CLASSES, INPUTS, SEED, ROUNDS, COHORT = 5, 3, 4, 7, 12, 3
SIZES = (9, 4, 17, 6, 30)


@dataclass(frozen=True)
class Network:
    """Tanh and a linear layer; parameters as one vector per leaf, in the reference's order."""

    def init(self, key: Any) -> Any:
        shapes = [(INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)]
        keys = jax.random.split(key, 4)
        return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]

    def apply(self, params: Any, x: Any) -> Any:
        W, b, V, c = params
        return jnp.tanh(x @ W + b) @ V + c


def uneven() -> Federation:
    """Clients of other sizes, each with classes of its own making."""
    rng = np.random.default_rng(0)

    def side() -> list[Any]:
        parts = []
        for n in SIZES:
            x = rng.normal(size=(n, INPUTS)) + rng.normal(size=INPUTS)
            y = (x @ rng.normal(size=(INPUTS, CLASSES))).argmax(axis=1)
            parts.append((x.astype(np.float32), y))
        return parts

    return Federation.from_arrays(side(), side(), classes=CLASSES)


def references(data: Federation, l2: float) -> list[reference.Client]:
    """The clients in float64, from the very inputs that the package has in float32."""
    parts = [data.train.client(i) for i in range(data.clients)]
    return [reference.Client(x.astype(float), y, HIDDEN, CLASSES, l2) for x, y in parts]


class Batches:
    """The positions that the package draws for a client in a round, for the reference to use."""

    def __init__(self, experiment: Experiment, client: int, key: Any) -> None:
        self._experiment, self._client, self._key = experiment, client, key
        self._objective = experiment.objective(experiment.device_data().train, client)
        self._known: dict[Any, Any] = {}

    def part(self, i: int, of: int) -> "Batches":
        """One of several independent kinds of draws."""
        if (i, of) not in self._known:
            key = jax.random.split(self._key, of)[i]
            self._known[i, of] = Batches(self._experiment, self._client, key)
        found: Batches = self._known[i, of]
        return found

    def _positions(self, key: Any, shape: Any, size: Any) -> Any:
        position = self._objective.batches(key, shape, size).position
        return None if position is None else np.asarray(position)

    def __call__(self, what: str, steps: int, size: Any) -> list[Any]:
        if (what, steps, size) not in self._known:
            self._known[what, steps, size] = self._positions(self._key, steps, size)
        found = self._known[what, steps, size]
        return [None] * steps if found is None else list(found)

    def sample(self, fraction: float) -> tuple[np.ndarray, "Batches"]:
        """The positions of a random part of the client's examples, and batches of that part."""
        part_key, batch_key = jax.random.split(self._key)
        within = Batches(self._experiment, self._client, batch_key)
        within._objective = self._objective.sample(part_key, fraction)
        size = int(within._objective.examples.size)
        whole = self._objective.examples.size
        return np.asarray(permuted(part_key, jnp.arange(size), whole)), within

    def three(self, s: Any) -> list[Any]:
        """D and D'' for each step and adaptation step, D' for each step."""
        found = []
        keys = jax.random.split(self._key, 3)
        sizes = (s.batch, s.batch_outer or s.batch, s.batch_hessian or s.batch)
        for i, (key, size) in enumerate(zip(keys, sizes, strict=True)):
            shape = (s.tau,) if i == 1 else (s.tau, s.adapt_steps)
            positions = self._positions(key, shape, size)
            nothing = np.full(shape, None)
            found.append(nothing if positions is None else positions)
        return found


CASES = [
    (FedAvg(lr=0.11, tau=3, batch=5, alpha=0.23, adapt_steps=2), {}),
    (FedAvg(lr=0.7, tau=3, batch=5, schedule=Harmonic()), {"weighting": "size"}),
    (PerFedAvg("exact", alpha=0.3, beta=0.17, tau=3, batch=4, batch_outer=5, batch_hessian=6), {}),
    (PerFedAvg("hf", alpha=0.3, beta=0.17, tau=3, batch=4, delta=0.05, adapt_batch=7), {}),
    (
        PerFedAvg("fo", alpha=0.3, beta=0.17, tau=3, batch=4, schedule=Polynomial(0.5)),
        {"weighting": "size"},
    ),
    (PerFedAvg("exact", alpha=0.2, beta=0.1, tau=2, batch="full", adapt_steps=3), {}),
    (PerFedAvg("hf", alpha=0.2, beta=0.1, tau=2, batch=4, delta=0.1, adapt_steps=2), {}),
    (PFedMe(lam=4.0, eta=0.07, local_rounds=3, inner_steps=4, inner_lr=0.1, batch=5), {}),
    (
        PFedMe(lam=2.0, eta=0.1, local_rounds=2, inner_steps=5, inner_lr=0.2, batch=5, beta=1.7,
               inner_solver="nesterov", inner_start="local"),
        {"weighting": "size"},
    ),
    (
        PFedMe(lam=3.0, eta=0.1, local_rounds=3, inner_steps=9, inner_lr=0.15, batch=5, nu=0.03,
               inner_start="kept", beta=0.6),
        {"sampling": "epochs"},
    ),
    (Local(lr=0.2, tau=3, batch=5), {}),
]  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """A run of the package in float64, with what a reference needs to do the same."""

    experiment: Experiment
    engine: Any
    state: Any
    first: np.ndarray
    clients: list[reference.Client]
    cohorts: list[list[int]]

    def draws(self, k: int, i: int, purpose: Purpose = Purpose.LOCAL) -> Batches:
        return Batches(self.experiment, i, fold(SEED, purpose, k, i))

    def personal_model(self, i: int) -> np.ndarray:
        return vector([leaf[i] for leaf in self.models])

    @cached_property
    def models(self) -> list[np.ndarray]:
        return list(SimulationEvaluator(self.engine).personal_models(self.state))


def vector(leaves: Any) -> np.ndarray:
    """All entries, in the reference's order."""
    return np.concatenate([np.ravel(leaf) for leaf in leaves])


def trained(method: Any, options: dict[str, Any], engine_type: Any, rounds: int) -> Trained:
    """What the package makes of some rounds; to be called with x64 enabled."""
    data = uneven()
    experiment = Experiment(data, Task(Network(), l2=0.03), method, COHORT, SEED, **options)
    engine = engine_type(experiment)
    state, params = engine.init(), experiment.init_params()
    assert params[0].dtype == np.float64
    cohorts = [np.asarray(experiment.sample_cohort(k)).tolist() for k in range(rounds)]
    assert len({tuple(cohort) for cohort in cohorts}) > 3
    state, clients = engine.advance(state, rounds), references(data, 0.03)
    return Trained(experiment, engine, state, vector(params), clients, cohorts)


# That the plain loops do the same is what `test_engines` is about, too.
@pytest.mark.parametrize(
    "engine_type", [Vectorized, pytest.param(Sequential, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("method", "options"), CASES, ids=lambda value: getattr(value, "name", ""))
def test_twelve_rounds(method: Any, options: dict[str, Any], engine_type: Any) -> None:
    """Global model, what clients keep, and every personal model, to 1e-10."""
    with jax.enable_x64(True):
        run = trained(method, options, engine_type, ROUNDS)
        state, first, clients = run.state, run.first, run.clients
        by_size = options.get("weighting") == "size"
        w, kept = reference.rounds(clients, first, method, run.cohorts, run.draws, by_size)
        if method.name != "local":
            assert np.abs(w - first).max() > 0.05  # it went somewhere
            np.testing.assert_allclose(vector(state.params), w, rtol=0, atol=1e-10)
        records = state.clients.personal if method.name == "local" else state.clients.state
        if records is not None:
            for i, own in enumerate(kept):
                mine = vector([leaf[i] for leaf in records])
                np.testing.assert_allclose(mine, own, rtol=0, atol=1e-10)
        for i, client in enumerate(clients):
            own = reference.METHODS[method.name][1](
                client, w, kept[i], ROUNDS, run.draws(ROUNDS, i, Purpose.PERSONALIZE), method
            )
            np.testing.assert_allclose(run.personal_model(i), own, rtol=0, atol=1e-10)


def test_the_reference_gradient_is_a_gradient() -> None:
    """By differences of the loss; and its Hessian by differences of the gradient."""
    client = references(uneven(), 0.03)[2]
    y = client.y
    rng = np.random.default_rng(1)
    size = INPUTS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
    w, v = rng.normal(size=(2, size))

    def loss(w: Any) -> float:
        z = client.outputs(w, client.x)
        ridge = 0.5 * client.l2 * (w @ w)
        return float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]) + ridge)

    step = 1e-6
    slope = (loss(w + step * v) - loss(w - step * v)) / (2 * step)
    assert client.grad(w) @ v == pytest.approx(slope, rel=1e-8)
    bend = (client.grad(w + step * v) - client.grad(w - step * v)) / (2 * step)
    np.testing.assert_allclose(client.hessian(w, v), bend, atol=1e-8)


def test_a_reference_of_another_method_disagrees() -> None:
    """The comparison can fail: first-order rounds are not those of the exact method."""
    data = uneven()
    clients = references(data, 0.0)
    exact, first_order = (
        PerFedAvg(variant, alpha=0.2, beta=0.1, tau=2, batch="full") for variant in ("exact", "fo")
    )
    experiment = Experiment(data, Task(Network()), exact, COHORT, SEED)

    def draws(k: int, i: int) -> Batches:
        return Batches(experiment, i, fold(SEED, Purpose.LOCAL, k, i))

    first = np.ones(INPUTS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES)
    models = [
        reference.rounds(clients, first, method, [[0, 1]], draws, False)[0]
        for method in (exact, first_order)
    ]
    assert np.abs(models[0] - models[1]).max() > 1e-4
