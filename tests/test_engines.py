"""All engines, devices and chunks give one result; cohorts are fair; divergence is named."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import problems
from perfed import (
    APFL,
    MLP,
    Ditto,
    DivergedError,
    Experiment,
    FedAvg,
    FedAvgM,
    Federation,
    FedProx,
    FedYogi,
    FieldError,
    Local,
    PerFedAvg,
    PFedMe,
    Scaffold,
    Sequential,
    Task,
    Vectorized,
    load,
    simulate,
)
from perfed.data import FlatExamples
from perfed.evaluation.evaluator import SimulationEvaluator
from perfed.models.function_model import FunctionModel
from perfed.simulation.experiment import NO_RECORD
from perfed.simulation.round import Broadcast, client_update

METHODS = [
    FedAvg(lr=0.05, tau=3, batch=8),
    PerFedAvg("hf", alpha=0.05, beta=0.05, tau=3, batch=8, send_iterate=True),
    PerFedAvg("exact", alpha=0.05, beta=0.05, tau=2, batch=8, adapt_steps=2),
    PFedMe(lam=5, eta=0.05, local_rounds=3, inner_steps=3, inner_lr=0.05, batch=8, beta=1.5),
    PFedMe(local_rounds=2, inner_start="kept", nu=0.5, inner_steps=9, inner_lr=0.05, batch=8),
    Local(lr=0.05, tau=3, batch=8),
]
SLOW = [
    FedProx(lr=0.05, tau=3, batch=8),
    Scaffold(lr=0.05, server_lr=0.9, tau=3, batch=8),
    FedAvgM(lr=0.05, tau=3, batch=8),
    FedYogi(lr=0.05, tau=3, batch=8),
    Ditto(lr=0.05, tau=3, batch=8, personal_steps=2),
    APFL(lr=0.05, tau=3, batch=8),
]


@pytest.fixture(scope="module")
def data() -> Any:
    return load("digits", clients=12, split="dirichlet", seed=1)


def make(data: Any, method: Any, **options: Any) -> Experiment:
    options = {"cohort": 5, "seed": 4} | options
    return Experiment(data, Task(MLP(64, 10, (16,))), method, **options)


def assert_close(a: Any, b: Any, relative: float = 1e-5) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        scale = np.abs(np.asarray(y)).max()
        assert np.abs(np.asarray(x) - np.asarray(y)).max() <= relative * max(scale, 1e-30)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((method, {}) for method in METHODS),
        *(pytest.param(method, {}, marks=pytest.mark.slow) for method in SLOW),
        (METHODS[1], {"weighting": "size", "sampling": "epochs"}),
        (METHODS[3], {"weighting": "size", "sampling": "epochs"}),
    ],
)
def test_engines_agree(data: Any, method: Any, options: dict[str, Any]) -> None:
    setup = make(data, method, **options)
    plain, engine, other = Sequential(setup), Vectorized(setup), Vectorized(setup, 1, 2)
    expected = plain.advance(plain.init(), 4)
    state = engine.advance(engine.init(), 4)
    assert_close(state, expected)
    assert_close(other.advance(other.init(), 4), expected)
    scores = SimulationEvaluator(plain)(expected).scores
    for kind, score in SimulationEvaluator(engine)(state).scores.items():
        np.testing.assert_allclose(score.loss, scores[kind].loss, rtol=1e-4)


@pytest.fixture(scope="module")
def whole(data: Any) -> Any:
    engine = Vectorized(make(data, METHODS[3], cohort=7))
    return engine.advance(engine.init(), 2)


@pytest.mark.parametrize(("devices", "chunk"), [(1, 1), (1, 3), (1, 100), (2, 1), (2, 2), (2, 3)])
def test_any_chunk(data: Any, whole: Any, devices: int, chunk: int) -> None:
    engine = Vectorized(make(data, METHODS[3], cohort=7), devices, chunk)
    assert_close(engine.advance(engine.init(), 2), whole)


def test_same_seed_same_bits_and_blocks_do_not_matter(data: Any) -> None:
    setup = make(data, METHODS[1])
    a, b = Vectorized(setup), Vectorized(setup)
    once = a.advance(a.init(), 6)
    state = b.init()
    for step in (1, 3, 2):
        state = b.advance(state, step)
    for x, y in zip(jax.tree.leaves(once), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(x, y)
    other = Vectorized(make(data, METHODS[1], seed=5))
    after = other.advance(other.init(), 1)
    assert np.abs(np.asarray(after.params[0]["w"] - once.params[0]["w"])).max() > 0


def test_clients_and_rounds_draw_batches_of_their_own() -> None:
    """Two clients with the same data, in two rounds: four different batches, each repeatable."""
    x = np.random.default_rng(0).normal(size=(500, problems.DIMENSION)).astype(np.float32)
    flat = FlatExamples.from_arrays([(x, x[:, 0])] * 2)
    made = problems.experiment(FedAvg(tau=1, batch=3), Federation(flat, flat, ("a", "b"), None))
    data = made.device_data()
    sent = Broadcast(jnp.ones(problems.DIMENSION), None, jnp.int32(0))

    def moved(round: int, client: int, seed: int = 0) -> tuple[float, ...]:
        other = dataclasses.replace(made, seed=seed)
        update = client_update(other, data, sent, NO_RECORD, round, client)
        return tuple(np.asarray(update.delta).tolist())

    draws = [moved(0, 0), moved(0, 1), moved(1, 0), moved(1, 1), moved(0, 0, seed=1)]
    assert len(set(draws)) == 5
    assert moved(1, 1) == draws[3]


@pytest.mark.slow
def test_methods_run_as_they_stand_without_jit(data: Any) -> None:
    setup = make(data, METHODS[0], cohort=2)
    engine = Sequential(setup)
    expected = engine.advance(engine.init(), 1)
    with jax.disable_jit():
        plain = Sequential(setup)
        assert_close(plain.advance(plain.init(), 1), expected)


def test_cohorts_are_uniform_without_replacement() -> None:
    setup = problems.experiment(FedAvg(), problems.federation(sizes=(3,) * 10), cohort=4)
    rounds = np.asarray(jax.vmap(setup.sample_cohort)(jnp.arange(4000)))
    assert all(len(set(row)) == 4 for row in rounds.tolist())
    taken = np.zeros((4000, 10))
    np.put_along_axis(taken, rounds, 1, axis=1)
    together = taken.T @ taken
    alone, pairs = np.diag(together), together[np.triu_indices(10, 1)]
    # 4000 rounds: a client is in 2/5 of them, a pair in 4*3/(10*9).
    assert np.abs(alone - 1600).max() < 5 * (4000 * 0.4 * 0.6) ** 0.5
    expected = 4000 * 12 / 90
    assert np.abs(pairs - expected).max() < 5 * expected**0.5


def test_a_client_smaller_than_its_batch_learns() -> None:
    data = problems.federation(sizes=(2, 3))
    setup = problems.experiment(FedAvg(lr=0.1, tau=5, batch=50), data)
    engine = Vectorized(setup)
    first = engine.init()
    after = engine.advance(first, 20)
    losses = [
        [float(problems.objective(data, i).loss(state.params)) for i in range(2)]
        for state in (first, after)
    ]
    assert np.mean(losses[1]) < 0.5 * np.mean(losses[0])


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
def test_an_update_that_is_not_finite_names_client_and_round(engine: Any) -> None:
    data = problems.federation()
    data.train.x[data.train.start[3]] = 1e30  # client-3's loss overflows float32
    setup = problems.experiment(FedAvg(lr=0.1, tau=1, batch="full"), data, cohort=2)
    first = next(k for k in range(50) if 3 in np.asarray(setup.sample_cohort(k)))
    runner = engine(setup)
    with pytest.raises(DivergedError, match=f"client-3 in round {first} "):
        runner.advance(runner.init(), 50)


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
def test_what_a_client_keeps_is_checked_too(engine: Any) -> None:
    """Local sends nothing, so its divergence shows in memory only."""
    runner = engine(problems.experiment(Local(lr=1e30, tau=3, batch="full")))
    with pytest.raises(DivergedError, match="client-0 in round 0 "):
        runner.advance(runner.init(), 2)


def test_a_personal_model_that_is_not_finite_is_refused() -> None:
    """An accuracy of NaN outputs would look like one of a model that always says 0."""
    engine = Vectorized(problems.experiment(FedAvg(lr=0.01, alpha=1e38)))
    state = engine.init()
    with pytest.raises(DivergedError, match="0 rounds the personalized model's loss on client "):
        SimulationEvaluator(engine)(state)


def test_float64_throughout() -> None:
    with jax.enable_x64(True):
        engine = Vectorized(problems.experiment(METHODS[3], problems.federation()))
        plain = Sequential(problems.experiment(METHODS[3], problems.federation()))
        state = engine.advance(engine.init(), 3)
        assert state.params.dtype == np.float64
        assert_close(state, plain.advance(plain.init(), 3), 1e-12)


@pytest.mark.slow
def test_half_precision_parameters_stay_so(data: Any) -> None:
    class Half:
        def init(self, key: Any) -> Any:
            params = MLP(64, 10, (16,)).init(key)
            return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)

        def apply(self, params: Any, x: Any) -> Any:
            return MLP(64, 10, (16,)).apply(params, x.astype(jnp.bfloat16))

    for engine in (Vectorized, Sequential):
        for method in (METHODS[1], METHODS[3]):
            runner = engine(Experiment(data, Task(Half()), method, 3))
            state = runner.advance(runner.init(), 1)
            assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(state.params))


def test_an_empty_seat_does_not_poison_the_sum() -> None:
    """Seven seats' worth of work for a cohort of five: the two extra results are thrown away."""
    data = problems.federation(sizes=(4, 4, 4, 4, 4, 4))
    data.train.x[data.train.start[5]] = 1e30  # the client that empty seats repeat
    setup = problems.experiment(FedAvg(lr=0.1, tau=1, batch="full"), data, cohort=5)
    seed = next(
        s
        for s in range(99)
        if 5
        not in np.asarray(problems.experiment(FedAvg(), data, cohort=5, seed=s).sample_cohort(0))
    )
    setup = problems.experiment(FedAvg(lr=0.1, tau=1, batch="full"), data, cohort=5, seed=seed)
    engine, plain = Vectorized(setup), Sequential(setup)
    assert_close(engine.advance(engine.init(), 1), plain.advance(plain.init(), 1))


def test_a_misspelled_choice_is_refused() -> None:
    """Silently taking another choice could score a model on the data it was adapted on."""
    engine = Vectorized(problems.experiment(FedAvg()))
    with pytest.raises(FieldError, match=r'adapt_on = .trian.: must be one of "train", "test"'):
        SimulationEvaluator(engine, "trian")
    with pytest.raises(FieldError, match=r'weighting = .sizes.: must be one of "uniform", "size"'):
        problems.experiment(FedAvg(), weighting="sizes")
    with pytest.raises(FieldError, match=r"sampling = .epoch.: must be one of"):
        problems.experiment(FedAvg(), sampling="epoch")


def test_a_model_that_does_not_fit_the_data_is_refused(data: Any) -> None:
    """Too few outputs would train: a label the model cannot name would cost it nothing."""
    with pytest.raises(FieldError, match=r"outputs of shape \(4,\), but the data have 10 classes"):
        Experiment(data, Task(MLP(64, 4)), FedAvg(), 2)
    with pytest.raises(FieldError, match=r"cannot take inputs of shape \(8, 8, 1\)"):
        Experiment(data, Task(MLP(60, 10)), FedAvg(), 2)

    def unwritten(params: Any, x: Any) -> Any:
        raise NotImplementedError

    model = FunctionModel(lambda key: {}, unwritten)
    with pytest.raises(FieldError, match=r"'FunctionModel': cannot take .*: NotImplementedError"):
        Experiment(data, Task(model), FedAvg(), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cohort": 2.5}, "cohort = 2.5"),
        ({"seed": -1}, "seed = -1"),
        ({"seed": 2**40}, "seed = 1099511627776: must be between 0 and"),
        ({"method": FedAvg}, "not its class or name"),
    ],
)
def test_setups_that_cannot_be(options: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {
        "task": problems.QUADRATIC,
        "method": FedAvg(),
        "cohort": 2,
    } | options
    with pytest.raises(FieldError, match=message):
        Experiment(problems.federation(), **settings)


@pytest.mark.parametrize("field", ["rounds", "eval_every"])
@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_runs_that_would_not_end(data: Any, field: str, value: Any) -> None:
    settings: dict[str, Any] = {"rounds": 2, field: value}
    with pytest.raises(FieldError, match=f"{field} = {value}"):
        simulate(data, MLP(64, 10), FedAvg(), cohort=2, **settings)


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize("client", [-1, 5])
def test_a_client_that_is_not_there(engine: Any, client: int) -> None:
    runner = engine(problems.experiment(FedAvg()))
    with pytest.raises(FieldError, match=f"client = {client}: must be between 0 and 4"):
        SimulationEvaluator(runner).personal_models(runner.init(), [client])


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
def test_no_clients_are_too_few(engine: Any) -> None:
    runner = engine(problems.experiment(FedAvg()))
    with pytest.raises(FieldError, match="name at least one"):
        SimulationEvaluator(runner).personal_models(runner.init(), [])


@pytest.mark.parametrize("tau", [0, 2.5, True, -1])
def test_steps_are_whole_numbers(tau: Any) -> None:
    with pytest.raises(FieldError, match="tau = "):
        FedAvg(tau=tau)


@pytest.mark.parametrize("cohort", [0, 6])
def test_a_cohort_must_fit(cohort: int) -> None:
    with pytest.raises(FieldError, match=f"cohort = {cohort}: must be"):
        problems.experiment(FedAvg(), cohort=cohort)


def test_more_devices_than_there_are() -> None:
    with pytest.raises(FieldError, match="this process has 2 cpu device"):
        Vectorized(problems.experiment(FedAvg()), devices=3)
