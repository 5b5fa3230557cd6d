"""Runs that are alike, computed together: each comes to what it comes to alone."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from perfed import (
    MLR,
    DivergedError,
    Experiment,
    FedAvg,
    Federation,
    FieldError,
    Local,
    LowPrecision,
    Method,
    PerFedAvg,
    PFedMe,
    Pipeline,
    Sequential,
    Task,
    TopK,
    Vectorized,
    load,
)
from perfed.evaluation import SimulationEvaluator
from perfed.methods.schedules import Polynomial
from perfed.simulation import vectorized
from perfed.training import Callback, Result, Run, Trainer, TrainOptions, TrainState
from perfed.training.callbacks import OnTrainState

MODEL = MLR(inputs=64, classes=10)


@pytest.fixture(scope="module")
def digits() -> Federation:
    return load("digits", split="shards", clients=12)


PAIRS: list[tuple[Method, Method]] = [
    (FedAvg(lr=0.1, tau=3, alpha=0.5), FedAvg(lr=0.3, tau=3, alpha=0.2)),
    (Local(lr=0.1, tau=3), Local(lr=0.3, tau=3)),
    (
        PerFedAvg("hf", alpha=0.1, beta=0.2, schedule=Polynomial(0.0), tau=2, batch=8,
                  send_iterate=True),
        PerFedAvg("hf", alpha=0.3, beta=0.1, schedule=Polynomial(0.5), delta=0.01, tau=2, batch=8,
                  send_iterate=True),
    ),
    (
        PFedMe(lam=5.0, eta=0.1, inner_lr=0.05, inner_solver="nesterov", local_rounds=3),
        PFedMe(lam=9.0, eta=0.05, inner_lr=0.03, inner_solver="nesterov", local_rounds=3, beta=2.0),
    ),
    (
        PFedMe(lam=5.0, eta=0.1, inner_lr=0.05, nu=0.01, inner_steps=20, local_rounds=3),
        PFedMe(lam=5.0, eta=0.1, inner_lr=0.05, nu=1.0, inner_steps=20, local_rounds=3),
    ),
]  # fmt: skip
# Of all settings that vary, and of none that decide how long a loop is.
QUICK = (0, 4)


def train(experiment: Experiment, *options: Any, **more: Any) -> Result:
    return Trainer(TrainOptions(*options, **more)).train(Run(Vectorized(experiment)))


def train_all(
    experiments: Sequence[Experiment], *options: Any, engine: Any = Vectorized
) -> list[Result | DivergedError]:
    return Trainer(TrainOptions(*options)).train_all([Run(engine(e)) for e in experiments])


def close(one: object, other: object) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= 1e-5 * max(np.abs(b).max(), 1e-3)


@pytest.mark.parametrize(
    "pair",
    [pytest.param(p, marks=() if i in QUICK else pytest.mark.slow) for i, p in enumerate(PAIRS)],
    ids=lambda pair: f"{pair[0].name}-{pair[0] == PAIRS[4][0]}",
)
def test_as_each_alone(digits: Federation, pair: tuple[Method, Method]) -> None:
    """Seeds and rates differ; models, what clients keep, messages and scores are each run's own."""
    setups = [
        Experiment(digits, Task(MODEL), pair[0], 5, seed=0),
        Experiment(digits, Task(MODEL), pair[1], 5, seed=1),
        Experiment(digits, Task(MODEL), pair[0], 5, seed=7),
    ]
    assert all(setups[0].same_program(setup) for setup in setups)
    together = train_all(setups, 4, 2)
    for setup, mine in zip(setups, together, strict=True):
        assert isinstance(mine, Result)
        alone = train(setup, 4, 2)
        close(mine.state, alone.state)
        np.testing.assert_array_equal(mine.traffic.cohort, alone.traffic.cohort)
        assert [e.round for e in mine.history] == [0, 2, 4]
        for kind in mine.scores:
            close(mine.scores[kind].loss, alone.scores[kind].loss)
        assert (mine.method, mine.seed) == (setup.method, setup.seed)
    losses = [r.scores["personalized"].loss.mean() for r in together if isinstance(r, Result)]
    assert len(set(losses)) == 3  # each seed and each rate its own


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(Pipeline.of(LowPrecision(3)), marks=pytest.mark.slow),
        Pipeline.of(TopK(0.1), error_feedback=True),
    ],
)
def test_messages_are_each_runs_own(digits: Federation, pipeline: Pipeline) -> None:
    setups = [
        Experiment(digits, Task(MODEL), FedAvg(lr=0.1, tau=2), 5, seed, "size", pipeline=pipeline)
        for seed in (3, 4)
    ]
    engine = Vectorized(setups[0])
    states = [Vectorized(setup).init() for setup in setups]
    for setup, outcome in zip(setups, engine.run_rounds(setups, states, 3), strict=True):
        assert not isinstance(outcome, DivergedError)
        state, traffic = Vectorized(setup).run(Vectorized(setup).init(), 3)
        close(outcome[0], state)
        np.testing.assert_array_equal(outcome[1].uplink, traffic.uplink)


@pytest.mark.parametrize(
    "small",
    [
        pytest.param(0, id="in turns"),
        pytest.param(10**9, id="side by side", marks=pytest.mark.slow),
    ],
)
def test_one_that_diverges_stops_nobody(
    digits: Federation, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectorized, "_SMALL", small)
    setups = [
        Experiment(digits, Task(MODEL), FedAvg(lr=lr, tau=3), 5, seed=1) for lr in (0.1, 1e38, 0.2)
    ]
    heard: list[int] = []

    class Listener(Callback):
        def __init__(self, number: int) -> None:
            self.number = number

        def on_rounds_end(self, state: TrainState) -> None:
            heard.append(self.number)

    runs = [Run(Vectorized(e), callbacks=[Listener(i)]) for i, e in enumerate(setups)]
    outcomes = Trainer(TrainOptions(6)).train_all(runs)
    assert isinstance(outcomes[1], DivergedError)
    with pytest.raises(DivergedError) as alone:
        train(setups[1], 6)
    assert str(outcomes[1]) == str(alone.value)
    for i in (0, 2):
        mine = outcomes[i]
        assert isinstance(mine, Result)
        close(mine.state, Vectorized(setups[i]).advance(Vectorized(setups[i]).init(), 6))
        assert mine.traffic.uplink.shape == (6, 5)
        assert heard.count(i) > heard.count(1)
    all_lost = train_all([setups[1], replace(setups[1], seed=2)], 6)
    assert all(isinstance(outcome, DivergedError) for outcome in all_lost)


def test_the_plain_engine_does_the_same(digits: Federation) -> None:
    method = PFedMe(lam=5.0, eta=0.1, inner_lr=0.05, local_rounds=2)
    setups = [Experiment(digits, Task(MODEL), method, 3, seed) for seed in (0, 1)]
    results: list[Sequence[Result | DivergedError]] = [
        train_all(setups, 2, engine=engine) for engine in (Sequential, Vectorized)
    ]
    for plain, fast in zip(*results, strict=True):
        assert isinstance(plain, Result)
        assert isinstance(fast, Result)
        close(plain.state, fast.state)
        close(plain.scores["personalized"].loss, fast.scores["personalized"].loss)


@pytest.mark.parametrize(
    "other",
    [
        {"method": FedAvg(tau=4)},
        {"method": FedAvg(alpha=0.1)},
        {"method": Local()},
        {"cohort": 4},
        {"weighting": "size"},
        {"pipeline": Pipeline.of(LowPrecision())},
        {"task": Task(MODEL, 0.1)},
        {"federation": "another"},
    ],
)
def test_what_is_not_alike(digits: Federation, other: dict[str, object]) -> None:
    if "federation" in other:
        other = {"federation": digits.validation(0.25)}
    setup = Experiment(digits, Task(MODEL), FedAvg(), 5)
    assert setup.same_program(replace(setup, seed=3, method=FedAvg(lr=0.5)))
    assert not setup.same_program(replace(setup, **other))  # type: ignore[arg-type]


def test_one_program_for_all_seeds(digits: Federation) -> None:
    """In turns or alone, another seed or rate is not compiled again."""
    setup = Experiment(digits, Task(MODEL), FedAvg(lr=0.1, tau=2), 5)
    engine = Vectorized(setup)
    engine.advance(engine.init(), 1)
    compiled = engine._block._cache_size()
    other = replace(setup, seed=5, method=FedAvg(lr=0.7, tau=2))
    engine.run_rounds([other], [Vectorized(other).init()], 2)
    assert engine._block._cache_size() == compiled == 1


def test_models_that_were_scored_are_kept_on_request(digits: Federation, tmp_path: Path) -> None:
    engine = Vectorized(
        Experiment(digits, Task(MODEL), PerFedAvg("fo", alpha=0.1, beta=0.1, tau=2), 5)
    )
    result = Trainer(TrainOptions(3, 1, keep_models=True)).train(Run(engine))
    assert [e.models is None for e in result.history] == [True, True, True, False]
    close(result.history[-1].models, SimulationEvaluator(engine).personal_models(result.state))
    assert Trainer(TrainOptions(1)).train(Run(engine)).history[-1].models is None


def test_one_that_cannot_be_scored_at_first_is_left_out(digits: Federation) -> None:
    """Whatever its later states would come to."""
    setups = [
        Experiment(digits, Task(MODEL), FedAvg(lr=0.5, tau=10, alpha=alpha), 12)
        for alpha in (1e37, 0.1)
    ]
    lost, good = train_all(setups, 6, 2)
    assert isinstance(lost, DivergedError)
    assert isinstance(good, Result)
    assert [e.round for e in good.history] == [0, 2, 4, 6]


def test_time_is_shared(digits: Federation) -> None:
    setups = [Experiment(digits, Task(MODEL), FedAvg(tau=2), 5, seed) for seed in range(4)]
    begun = time.perf_counter()
    runs = [Run(Vectorized(e)) for e in setups]
    results = Trainer(TrainOptions(4), spent={"data": 8.0}).train_all(runs)
    lasted = time.perf_counter() - begun
    assert all(isinstance(result, Result) for result in results)
    good = [result for result in results if isinstance(result, Result)]
    assert sum(result.seconds for result in good) <= lasted
    assert [result.train_state.timing["data"] for result in good] == [2.0] * 4
    assert sum(sum(r.train_state.timing.values()) for r in good) <= lasted + 8


def test_runs_that_cannot_go_together_are_refused(digits: Federation) -> None:
    setup = Experiment(digits, Task(MODEL), FedAvg(tau=2), 5)
    with pytest.raises(FieldError, match="differ in numbers only"):
        train_all([setup, replace(setup, cohort=4)], 2)
    states = [train(setup, rounds).train_state for rounds in (1, 2)]
    with pytest.raises(FieldError, match="must all stand at one round"):
        Trainer(TrainOptions(4)).train_all([Run(Vectorized(setup), state=s) for s in states])


@pytest.mark.slow
def test_no_more_clients_at_once_than_asked(digits: Federation) -> None:
    """Of all runs together; memory is bounded by it."""
    setup = Experiment(digits, Task(MODEL), FedAvg(tau=2), 12)
    engine = Vectorized(setup, devices=1, chunk=4)
    assert engine._layout.slots(12, 1) == (4, 12)
    assert engine._layout.slots(12, 2) == (2, 12)
    assert engine._runs_at_once(engine.init()) == 4
    several = [replace(setup, seed=seed) for seed in range(6)]
    starts = [Vectorized(setup, devices=1).init() for setup in several]
    outcomes = engine.run_rounds(several, starts, 2)
    for own, outcome in zip(several, outcomes, strict=True):
        assert not isinstance(outcome, DivergedError)
        close(outcome[0], Vectorized(own).advance(Vectorized(own).init(), 2))


def test_the_plain_engine_compiles_once(digits: Federation) -> None:
    engine = Sequential(Experiment(digits, Task(MODEL), FedAvg(tau=2), 2))
    setups = [replace(engine.experiment, seed=seed) for seed in (1, 2)]
    for _ in range(2):
        engine.run_rounds(setups, [engine.init()] * 2, 1)
    assert engine._client_update._cache_size() == 1


def test_a_run_that_diverges_has_no_state(digits: Federation) -> None:
    """Whoever listens hears of the rounds before, and the error is what it is."""
    setup = Experiment(digits, Task(MODEL), FedAvg(lr=1e38, tau=3, alpha=0.1), 5)
    heard: list[int] = []
    listener = OnTrainState(lambda state: heard.append(state.round))
    with pytest.raises(DivergedError):
        Trainer(TrainOptions(3)).train(Run(Vectorized(setup), callbacks=[listener]))
    assert heard == [0]
