"""Scaling of inputs, and regressions: against plain NumPy."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfed import (
    MLR,
    Experiment,
    FedAvg,
    Federation,
    FieldError,
    PFedMe,
    Sequential,
    Task,
    simulate,
)
from perfed.data import Dataset
from perfed.data.splits import IIDSplit, NaturalSplit

RNG = np.random.default_rng(0)


def clients_pool(y: Any, labels: tuple[str, ...] | None) -> Dataset:
    """Three clients whose features have very different means and spreads."""
    client = np.repeat([0, 1, 2], [30, 50, 20])
    x = RNG.normal(size=(100, 4)) * [1, 10, 100, 0] + [0, 5, -50, 3] + client[:, None]
    return Dataset(x.astype(np.float32), y, labels, client=client, names=("A", "B", "C"))


CLASSES = clients_pool((np.arange(100) % 3).astype(np.int32), ("a", "b", "c"))


@pytest.mark.parametrize("kind", ["none", "unit", "feature", "client"])
def test_models_see_scaled_inputs(kind: Any) -> None:
    """The engine's inputs, taken one by one, against the formula; held-out data use train's."""
    data = CLASSES.federation(NaturalSplit(), standardize=kind)
    world_setup = Experiment(data, Task(MLR(4, 3)), FedAvg(), cohort=1)
    world = world_setup.device_data()
    for i in range(3):
        train = data.train.client(i)[0].astype(np.float64)
        reference = {
            "none": (np.zeros(4), np.ones(4)),
            "unit": (data.train.x.min(axis=0), np.ptp(data.train.x, axis=0)),
            "feature": (data.train.x.mean(axis=0), data.train.x.std(axis=0)),
            "client": (train.mean(axis=0), train.std(axis=0)),
        }[kind]
        shift, spread = (np.asarray(part, np.float64) for part in reference)
        spread = np.where(spread > 1e-4, spread, 1.0)  # a feature that never varies
        for part, flat in ((world.train, data.train), (world.test, data.test)):
            rows = world_setup.objective(part, i).examples
            seen, _ = rows.rows(jnp.arange(int(flat.size[i])))
            raw = flat.client(i)[0]
            np.testing.assert_allclose(seen, (raw - shift) / spread, rtol=1e-4, atol=1e-4)
            if data.scaling is not None:
                np.testing.assert_allclose(data.scaling(raw, i), seen, rtol=1e-6)


def test_standardized_inputs_are_held_at_ten_deviations() -> None:
    """A feature that hardly varies in training, and does in the held-out rows."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 2)).astype(np.float32)
    x[:, 1] = 0
    x[3, 1] = 0.01
    test = np.arange(400) >= 300
    x[300:, 1] = np.tile([9.0, -9.0], 50)
    pool = Dataset(x, (np.arange(400) % 2).astype(np.int32), ("a", "b"), test=test)
    wild = pool.federation(IIDSplit(3), test_from="test-set", standardize="feature", clip="none")
    held = pool.federation(IIDSplit(3), test_from="test-set", standardize="feature")
    tight = pool.federation(IIDSplit(3), test_from="test-set", standardize="feature", clip=2.0)
    for data, most in ((wild, np.inf), (held, 10.0), (tight, 2.0)):
        setup = Experiment(data, Task(MLR(2, 2)), FedAvg(), cohort=1)
        world = setup.device_data()
        for i in range(3):
            raw = data.test.client(i)[0]
            seen, _ = setup.objective(world.test, i).examples.rows(jnp.arange(len(raw)))
            assert data.scaling is not None
            plain = (raw - data.scaling.shift[0]) * data.scaling.scale[0]
            np.testing.assert_allclose(seen, np.clip(plain, -most, most), rtol=1e-5)
            np.testing.assert_allclose(data.scaling(raw, i), seen, rtol=1e-6)
            assert np.abs(plain).max() > 1000
    own = pool.federation(IIDSplit(3), standardize="client").scaling
    assert own is not None
    assert own.clip.tolist() == [10.0] * 3
    unit = pool.federation(IIDSplit(3), standardize="unit").scaling
    assert unit is not None
    assert np.isinf(unit.clip).all()
    for wrong in (0, -1.0):
        with pytest.raises(FieldError, match="clip"):
            pool.federation(IIDSplit(3), standardize="feature", clip=wrong)


def test_stored_small_and_scaled_as_taken() -> None:
    """Bytes stay bytes in the federation; training on them equals training on scaled floats."""
    x = RNG.integers(0, 256, (200, 2, 3, 1)).astype(np.uint8)
    y = (x[:, 0, 0, 0] > 128).astype(np.int32)
    pool = Dataset(x, y, ("low", "high"), limits=(0, 255), standardize="unit")
    data = pool.federation(IIDSplit(4))
    assert data.train.x.dtype == np.uint8
    floats = replace(
        data,
        train=replace(data.train, x=data.train.x.astype(np.float32) / 255),
        test=replace(data.test, x=data.test.x.astype(np.float32) / 255),
        scaling=None,
    )
    method = FedAvg(lr=0.5, tau=5, batch=8)
    found, expected = (simulate(d, MLR(6, 2), method, rounds=3, cohort=2) for d in (data, floats))
    for a, b in zip(
        *map(jax.tree.leaves, (found.state.params, expected.state.params)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_predictions_are_class_names() -> None:
    """`predict` takes inputs as they are in the user's files."""
    x = np.concatenate([RNG.normal(1000, 30, (60, 2)), RNG.normal(1200, 30, (60, 2))])
    y = np.repeat([0, 1], 60).astype(np.int32)
    pool = Dataset(
        x.astype(np.float32), y, ("no", "yes"), client=np.arange(120) % 2, names=("A", "B")
    )
    data = pool.federation(NaturalSplit(), standardize="client")
    method = PFedMe(lam=1.0, eta=0.1, inner_lr=0.2, batch=20)
    result = simulate(data, MLR(2, 2), method, rounds=20, cohort=2)
    for kind in ("personalized", "global"):
        said = result.predict(1, np.array([[1000, 990], [1210, 1190]]), kind=kind)
        assert said.tolist() == ["no", "yes"]
    with pytest.raises(FieldError, match=r"x = 'an array of shape \(3,\)': .* shape \(2,\)"):
        result.predict(0, np.zeros(3))


def linear_pool() -> tuple[Dataset, np.ndarray]:
    """Each client's target is linear in its inputs, with an offset of its own, and large."""
    client = np.repeat(np.arange(4), 100)
    x = RNG.normal(size=(400, 3)).astype(np.float32)
    weights = np.array([3.0, -2.0, 0.5])
    y = 1000 + 50 * (x @ weights) + 200 * client
    return Dataset(x, y.astype(np.float32), None, client=client, names=tuple("ABCD")), weights


def test_a_regression_learns_and_is_scored_in_its_own_unit() -> None:
    pool, _ = linear_pool()
    data = pool.federation(NaturalSplit(), standardize_target=True)
    assert data.labels is None
    assert data.outputs == 1
    marks = data.train.y.astype(np.float64)
    np.testing.assert_allclose([marks.mean(), marks.std()], [0, 1], atol=1e-5)  # train only
    result = simulate(
        data, MLR(3, 1), PFedMe(lam=1.0, eta=0.2, inner_lr=0.1, batch=20), rounds=40, cohort=4
    )
    own, shared = result.scores["personalized"], result.scores["global"]
    assert list(own.values) == ["r2", "rmse", "loss"]
    # The offsets differ, so one model for all cannot fit; the clients' own models can.
    assert shared.values["r2"].mean() < 0.5 < 0.9 < own.values["r2"].mean()
    for i in range(4):
        x, y = data.test.client(i)
        target = y.astype(np.float64) * data.target[1] + data.target[0]
        error = result.predict(i, x) - target
        rmse = np.sqrt(np.mean(error**2))
        np.testing.assert_allclose(own.values["rmse"][i], rmse, rtol=1e-3)
        np.testing.assert_allclose(own.values["r2"][i], 1 - rmse**2 / target.var(), rtol=1e-3)
    summary = own.summary()
    assert summary["rmse"].worst == own.values["rmse"].max()
    assert summary["r2"].worst == own.values["r2"].min()


def test_squared_loss_of_one_full_batch_step() -> None:
    """FedAvg with tau = 1 on all data is one step of least squares."""
    pool, _ = linear_pool()
    data = pool.federation(NaturalSplit(clients=1))
    setup = Experiment(data, Task(MLR(3, 1)), FedAvg(lr=0.1, tau=1, batch="full"), cohort=1)
    engine = Sequential(setup)
    first = engine.init()
    last = engine.advance(first, 1)
    x, y = data.train.client(0)
    w, b = np.asarray(first.params["w"], np.float64), np.asarray(first.params["b"], np.float64)
    error = x @ w.T + b - y[:, None]
    np.testing.assert_allclose(last.params["w"], w - 0.1 * 2 * error.T @ x / len(x), rtol=1e-5)
    np.testing.assert_allclose(last.params["b"], b - 0.1 * 2 * error.mean(axis=0), rtol=1e-5)


def test_targets_that_are_all_alike_have_no_r2() -> None:
    x = RNG.normal(size=(8, 2)).astype(np.float32)
    flat, varied = np.full(8, 2.5, np.float32), x[:, 0]
    data = Federation.from_arrays([(x, flat), (x, varied)], [(x, flat), (x, varied)])
    result = simulate(data, MLR(2, 1), FedAvg(lr=0.1), rounds=1, cohort=2)
    scores = result.scores["global"]
    assert np.isnan(scores.values["r2"]).tolist() == [True, False]
    assert scores.summary()["r2"].mean == scores.values["r2"][1]


def test_a_model_for_classes_is_refused_for_a_regression() -> None:
    x = np.ones((4, 2), np.float32)
    data = Federation.from_arrays([(x, x[:, 0])], [(x, x[:, 0])])
    with pytest.raises(FieldError, match=r"outputs of shape \(3,\), but the data are a regression"):
        simulate(data, MLR(2, 3), FedAvg(), rounds=1, cohort=1)


def test_targets_are_standardized_in_double_precision() -> None:
    x = np.zeros((97, 1), np.float32)
    same = Dataset(x, np.full(97, 0.1, np.float32), None)
    data = same.federation(IIDSplit(2), standardize_target=True)
    assert data.target[1] == 1.0
    np.testing.assert_allclose(data.train.y, 0, atol=1e-7)
    large = np.random.default_rng(0).normal(1.7e9, 1e5, 97).astype(np.float32)
    data = Dataset(x, large, None).federation(IIDSplit(2), standardize_target=True)
    assert abs(data.train.y.mean()) < 1e-3
    assert data.train.y.std() == pytest.approx(1, abs=1e-3)
