"""Scores: which model, on which data, and what they come to."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import problems
from perfed import (
    MLP,
    MLR,
    Config,
    Experiment,
    FedAvg,
    Federation,
    PerFedAvg,
    PFedMe,
    Task,
    Vectorized,
    load,
    simulate,
)
from perfed.data import FlatExamples
from perfed.evaluation import Scores, SimulationEvaluator


@pytest.fixture(scope="module")
def data() -> Any:
    return load("digits", clients=8, split="dirichlet", seed=2)


def personal(data: Any, method: Any, adapt_on: Any) -> np.ndarray:
    engine = Vectorized(Experiment(data, Task(MLR(64, 10)), method, 4))
    state = engine.advance(engine.init(), 2)
    return np.asarray(SimulationEvaluator(engine, adapt_on).personal_models(state)["w"])


@pytest.mark.slow
@pytest.mark.parametrize("method", [FedAvg(alpha=0.5), PerFedAvg(alpha=0.5), PFedMe()])
def test_personal_models_see_held_out_data_only_if_asked_to(data: Any, method: Any) -> None:
    other = dataclasses.replace(data, test=dataclasses.replace(data.test, x=1 - data.test.x))
    on_train, on_test = (personal(data, method, side) for side in ("train", "test"))
    np.testing.assert_array_equal(on_train, personal(other, method, "train"))
    assert np.abs(on_test - personal(other, method, "test")).max() > 1e-3
    assert np.abs(on_test - on_train).max() > 1e-3


def test_scores_are_those_of_the_models_on_held_out_data(data: Any) -> None:
    """Recomputed with NumPy from the parameters that the result gives away."""
    result = simulate(data, MLR(64, 10), FedAvg(lr=0.5, alpha=1.0), rounds=5, cohort=8)
    for i in range(data.clients):
        x, y = data.test.client(i)
        x = x / 16  # the digits are bytes from 0 to 16, which models see as 0 to 1
        for kind, model in (
            ("global", result.global_model),
            ("personalized", result.personal_model(i)),
        ):
            logits = x.reshape(len(x), -1) @ np.asarray(model["w"]).T + np.asarray(model["b"])
            loss = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(y)), y]
            scores = result.scores[kind]  # type: ignore[index]
            np.testing.assert_allclose(scores.accuracy[i], (logits.argmax(axis=1) == y).mean())
            np.testing.assert_allclose(scores.loss[i], loss.mean(), rtol=1e-4)


def test_some_clients_in_any_order(data: Any) -> None:
    engine = Vectorized(Experiment(data, Task(MLR(64, 10)), FedAvg(alpha=0.5), 4))
    evaluator, state = SimulationEvaluator(engine), engine.init()
    every = np.asarray(evaluator.personal_models(state)["w"])
    chosen = [6, 1, 3]
    some = np.asarray(evaluator.personal_models(state, chosen)["w"])
    np.testing.assert_allclose(some, every[chosen], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", [FedAvg(tau=2), PerFedAvg(tau=2), PFedMe(local_rounds=2)])
def test_models_never_see_held_out_data(data: Any, method: Any) -> None:
    """All held-out rows replaced by noise: the same models, bit for bit, and other scores."""
    model = MLP(64, 10, (8,))
    one, other = (
        simulate(d, model, method, rounds=4, cohort=3, eval_every=2)
        for d in (data, problems.noisy(data))
    )
    for a, b in zip(*(jax.tree.leaves((r.state, r.personal_models())) for r in (one, other)),
                    strict=True):  # fmt: skip
        np.testing.assert_array_equal(a, b)
    assert np.any(one.scores["personalized"].loss != other.scores["personalized"].loss)


def test_clients_weigh_the_same_unless_asked_otherwise() -> None:
    """Of uneven clients, from Python and from a file, by default and where one asks for it."""
    uneven = problems.federation()

    def trained(**options: Any) -> np.ndarray:
        model, method = problems.QUADRATIC.model, FedAvg(lr=0.1, batch="full")
        return np.asarray(
            simulate(uneven, model, method, rounds=3, cohort=5, **options).state.params
        )

    uniform, by_size = trained(weighting="uniform"), trained(weighting="size")
    usual = trained()
    np.testing.assert_array_equal(usual, uniform)
    assert np.abs(usual - by_size).max() > 1e-3
    told = {"data": {"source": "digits"}, "model": {"name": "mlr"}, "method": {"name": "fedavg"}}
    config = Config.checked(told)
    assert (config.weighting, config.adapt_on, config.sampling) == (
        "uniform",
        "train",
        "replacement",
    )


def test_summaries() -> None:
    accuracy = np.array([0.5, 1.0, 0.0, 0.75])
    loss = np.array([0.4, 0.1, 3.0, 0.2])
    summary = Scores({"accuracy": accuracy, "loss": loss}, np.array([1, 1, 1, 5])).summary()
    assert summary["accuracy"].mean == pytest.approx(0.5625)
    assert summary["accuracy"].weighted == pytest.approx((0.5 + 1 + 0 + 3.75) / 8)
    assert summary["accuracy"].worst == 0.0
    assert summary["loss"].worst == 3.0
    assert summary["accuracy"].p10 == pytest.approx(0.15)
    assert summary["accuracy"].p50 == pytest.approx(0.625)
    assert summary["accuracy"].p90 == pytest.approx(0.925)
    assert summary["accuracy"].clients == accuracy.tolist()


def test_the_headline_is_the_last_round_not_the_best(data: Any) -> None:
    result = simulate(data, MLR(64, 10), FedAvg(lr=300.0), rounds=5, cohort=1, eval_every=1)
    means = [e.scores["global"].accuracy.mean() for e in result.history]
    assert [e.round for e in result.history] == list(range(6))
    assert max(means) > means[-1]  # a wild step size: the last round is not the best one
    assert result.scores["global"].accuracy.mean() == means[-1]


def test_eval_every_that_does_not_divide_the_rounds(data: Any) -> None:
    result = simulate(data, MLR(64, 10), FedAvg(), rounds=7, cohort=2, eval_every=3)
    assert [e.round for e in result.history] == [0, 3, 6, 7]


def test_clients_of_very_different_sizes_score_alike_in_company_and_alone() -> None:
    """Large and small clients share a chunk; the small ones' spare turns add nothing."""
    rng = np.random.default_rng(0)
    sizes = [1, 700, 3, 300, 2]
    parts = [(rng.normal(size=(n, 4)).astype(np.float32), rng.integers(0, 3, n)) for n in sizes]
    flat = FlatExamples.from_arrays(parts)
    together = Federation.from_examples(flat, flat, classes=3)
    task, method = Task(MLR(4, 3)), FedAvg(alpha=0.3)
    engine = Vectorized(Experiment(together, task, method, 5))
    state = engine.init()
    scores = SimulationEvaluator(engine)(state).scores
    for i, part in enumerate(parts):
        one = FlatExamples.from_arrays([part])
        alone = Vectorized(
            Experiment(Federation.from_examples(one, one, classes=3), task, method, 1)
        )
        own = SimulationEvaluator(alone)(alone.init()).scores
        for kind, score in scores.items():
            np.testing.assert_allclose(score.loss[i], own[kind].loss[0], rtol=1e-5)
            np.testing.assert_allclose(score.accuracy[i], own[kind].accuracy[0], rtol=1e-6)


def test_the_training_objective_has_its_penalty(data: Any) -> None:
    """f_i of the training data, for both models; without a penalty there is only the loss."""
    for l2 in (0.0, 0.2):
        engine = Vectorized(Experiment(data, Task(MLR(64, 10), l2), FedAvg(lr=0.5, alpha=1.0), 4))
        state = engine.advance(engine.init(), 2)
        scores = SimulationEvaluator(engine, training=True)(state).scores
        own = SimulationEvaluator(engine).personal_models(state)
        for kind, models in (("global", None), ("personalized", own)):
            values = scores[kind].values  # type: ignore[index]
            if l2 == 0:
                assert "train_objective" not in values
                continue
            for i in range(data.clients):
                w = state.params if models is None else {k: v[i] for k, v in models.items()}
                square = sum(
                    float(np.sum(np.asarray(leaf, np.float64) ** 2)) for leaf in w.values()
                )
                expected = values["train_loss"][i] + l2 / 2 * square
                assert values["train_objective"][i] == pytest.approx(expected, rel=1e-5)
