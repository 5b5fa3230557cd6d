"""Dropout, running statistics and frozen leaves: the same numbers from every engine."""

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from networks import Adapted, Dropped, Normalized, base, flat
from perfed import (
    BFloat16,
    Experiment,
    FedAvg,
    Float32,
    Local,
    Method,
    PerFedAvg,
    PFedMe,
    Pipeline,
    Sequential,
    Streamed,
    Task,
    Vectorized,
    load,
    method,
    simulate,
)
from perfed.core.errors import FieldError
from perfed.core.objective import Batch, Examples, Objective
from perfed.core.random import Purpose
from perfed.core.trees import row
from perfed.evaluation.evaluator import SimulationEvaluator
from perfed.simulation.engine import Simulator
from perfed.simulation.round import train_client
from test_engines import assert_close

NET = Normalized(dropout=0.3)
METHODS = [
    FedAvg(lr=0.05, tau=3, batch=8, adapt_batch=8),
    PerFedAvg(alpha=0.02, beta=0.02, tau=2, batch=6, adapt_batch=6),
    PerFedAvg(alpha=0.02, beta=0.02, tau=2, batch=6, adapt_batch=6, variant="exact"),
    PerFedAvg(alpha=0.02, beta=0.02, tau=2, batch=6, adapt_batch=6, variant="fo", adapt_steps=2),
    PFedMe(eta=0.05, local_rounds=2, inner_steps=2, batch=6),
]
NORM = 2 * 8  # entries of the normalization that are trained, and of its statistics
REST = 64 * 8 + 8 * 10
HEADER = 7


@pytest.fixture(scope="module")
def data() -> Any:
    return load("digits", clients=6, split="dirichlet", seed=1)


def make(data: Any, method: Any, model: Any = NET, **options: Any) -> Experiment:
    return Experiment(data, Task(model), method, **({"cohort": 3, "seed": 4} | options))


def scores(engine: Simulator, state: Any) -> Any:
    found = SimulationEvaluator(engine)(state).scores
    return {kind: own.values for kind, own in found.items()}


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=pytest.mark.slow if hasattr(m, "variant") else ()) for m in METHODS],
    ids=lambda m: f"{m.name}-{getattr(m, 'variant', '')}",
)
def test_engines_agree_on_a_model_with_dropout_and_statistics(data: Any, method: Any) -> None:
    setup = make(data, method)
    plain, fast, streamed = Sequential(setup), Vectorized(setup, 2, 2), Streamed(setup, 2, 1)
    expected, traffic = plain.run(plain.init(), 2)
    state, same = fast.run(fast.init(), 2)
    assert_close(state, expected, 2e-5)
    np.testing.assert_array_equal(traffic.uplink, same.uplink)
    np.testing.assert_array_equal(traffic.downlink, same.downlink)
    assert_close(scores(fast, state), scores(plain, expected), 2e-5)
    if method.name == "fedavg":
        other, _ = streamed.run(streamed.init(), 2)
        assert_close(other.params, expected.params, 2e-5)
    statistics = expected.params["norm"]
    assert np.abs(np.asarray(statistics["mean"])).max() > 0.01, "statistics have not moved"


def test_a_round_by_hand(data: Any) -> None:
    """One step on batch statistics, then one batch through the result for the running ones."""
    method = FedAvg(lr=0.1, tau=1, batch=8, adapt_batch=8)
    setup = make(data, method, Normalized())
    device, state = setup.device_data(), setup.init_state()
    got = train_client(setup, device, setup.received(state, row(state.clients, 2)),
                       row(state.clients, 2), 0, 2)  # fmt: skip
    x, y = (np.asarray(part, np.float64) for part in data.train.client(2))
    objective = setup.objective(device.train, 2)
    rows = [
        np.asarray(objective.batches(setup.client_key(purpose, 0, 2), 1, 8).position)[0]
        for purpose in (Purpose.LOCAL, Purpose.MODEL_STATE)
    ]
    first: Any = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.params)
    x, labels = flat(np.asarray(data.scale(x, 2))), y.astype(int)

    def loss(fc: Any, scale: Any, bias: Any, out: Any) -> float:
        h = x[rows[0]] @ fc
        z = scale * (h - h.mean(0)) / np.sqrt(h.var(0) + 1e-5) + bias
        logits = np.tanh(z) @ out
        own = logits[np.arange(8), labels[rows[0]]]
        return float(np.mean(np.log(np.exp(logits).sum(1)) - own))

    before = [first["fc"]["w"], first["norm"]["scale"], first["norm"]["bias"], first["out"]["w"]]
    delta: Any = got.written
    after = [delta["fc"]["w"], delta["norm"]["scale"], delta["norm"]["bias"], delta["out"]["w"]]
    rng = np.random.default_rng(0)
    for i, leaf in enumerate(after):
        for _ in range(6):  # the step is -lr times the slope, by differences
            at = tuple(rng.integers(size) for size in leaf.shape)
            up, down = ([p.copy() for p in before] for _ in range(2))
            up[i][at] += 1e-5
            down[i][at] -= 1e-5
            slope = (loss(*up) - loss(*down)) / 2e-5
            np.testing.assert_allclose(np.asarray(leaf)[at], -0.1 * slope, rtol=2e-3, atol=2e-6)
    h = x[rows[1]] @ (before[0] + np.asarray(delta["fc"]["w"]))
    moved: Any = got.model_state
    np.testing.assert_allclose(moved["norm"]["mean"], 0.1 * h.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(moved["norm"]["var"], 0.1 * (h.var(0) - 1), rtol=1e-4, atol=1e-6)
    assert delta["norm"]["mean"] is None, "statistics are not part of the delta"
    assert moved["fc"]["w"] is None, "and the delta is not part of the statistics"


def test_statistics_are_neither_trained_nor_quantized(data: Any) -> None:
    """A message beside the delta has them as float32, whatever the codec."""
    plain = make(data, METHODS[0])
    short = replace(plain, pipeline=Pipeline.of(BFloat16(), clip=0.01))
    engine = Sequential(short)
    state, traffic = engine.run(engine.init(), 1)
    weights, statistics = short.split_state(state.params)
    written = short.pipeline.codec.send(jax.random.key(0), weights)
    beside = int(Float32().send(jax.random.key(0), statistics).bytes)
    assert beside >= 4 * NORM
    np.testing.assert_array_equal(traffic.uplink, int(written.bytes) + beside)
    whole = int(Float32().send(jax.random.key(0), weights).bytes)
    np.testing.assert_array_equal(traffic.downlink, whole + beside)
    other, _ = Sequential(plain).run(Sequential(plain).init(), 1)
    # Clipped to almost nothing, the weights hardly move, but statistics are as of a whole step.
    assert float(np.abs(state.params["norm"]["var"] - 1).max()) > 0.05
    assert float(np.abs(other.params["norm"]["var"] - 1).max()) > 0.05


def test_methods_never_see_statistics(data: Any) -> None:
    """What a method keeps has no place for them."""
    setup = make(data, METHODS[4])
    state = setup.init_state()
    theta: Any = state.clients.state
    assert theta["norm"]["mean"] is None
    assert theta["norm"]["scale"].shape == (6, 8)


@pytest.mark.parametrize(
    ("choice", "kept"), [("personal", {"mean", "var", "scale", "bias"}),
                         ("personal-statistics", {"mean", "var"})],
)  # fmt: skip
def test_fedbn(data: Any, choice: Any, kept: set[str]) -> None:
    """Of layers with statistics, all leaves or the statistics alone stay with their client."""
    setup = make(data, METHODS[0], batch_norm=choice)
    engine = Sequential(setup)
    state, traffic = engine.run(engine.init(), 1)
    at_server: Any = state.params
    assert {name for name, leaf in at_server["norm"].items() if leaf is None} == kept
    entries = REST if choice == "personal" else REST + NORM
    np.testing.assert_array_equal(traffic.uplink, HEADER + 4 * entries)
    np.testing.assert_array_equal(traffic.downlink, HEADER + 4 * entries)
    own: Any = state.clients.personal
    cohort = set(np.asarray(setup.sample_cohort(0)).tolist())
    for name in kept:
        first = setup.init_params()["norm"][name]
        moved = {i for i in range(6) if np.abs(own["norm"][name][i] - first).max() > 1e-5}
        assert moved == cohort
    fast = Vectorized(setup, 2, 2)
    same, _ = fast.run(fast.init(), 1)
    assert_close(same, state, 2e-5)
    assert set(scores(engine, state)) == {"personalized"}


def test_fedbn_needs_a_model_with_statistics(data: Any) -> None:
    with pytest.raises(FieldError, match=r"batch_norm.*keeps none"):
        make(data, METHODS[0], Dropped(), batch_norm="personal")


def test_a_run_that_goes_on_is_the_same_bits(data: Any) -> None:
    engine = Vectorized(make(data, METHODS[4]))
    whole, _ = engine.run(engine.init(), 4)
    half, _ = engine.run(engine.init(), 2)
    saved: Any = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), half)
    rest, _ = engine.run(saved, 2)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(rest), strict=True):
        np.testing.assert_array_equal(one, other)


def objective(model: Any, **options: Any) -> Objective:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(40, 64)), jnp.float32)
    y = jnp.asarray(rng.integers(10, size=40), jnp.int32)
    return Objective(Task(model), Examples(x, y, 0, 40), **options)


def test_masks_differ_by_step_and_are_the_same_within_one() -> None:
    own = objective(Dropped())
    w = own.task.model.init(jax.random.key(1))
    batches = own.batches(jax.random.key(2), 2, 10)
    assert batches.position is not None
    one, two = (Batch(batches.position[0], key) for key in (batches.at(0).key, batches.at(1).key))
    assert float(own.loss(w, one)) == float(own.loss(w, one))
    assert abs(float(own.loss(w, one)) - float(own.loss(w, two))) > 1e-3
    # Scored without dropout, whatever the task.
    outputs = jnp.tanh(own.examples.rows(jnp.arange(40))[0] @ w["fc"]) @ w["out"]
    right = (outputs.argmax(-1) == own.examples.rows(jnp.arange(40))[1]).mean()
    assert float(own.measure(w).score) == pytest.approx(float(right))


def test_differences_of_gradients_see_one_mask() -> None:
    """Hessian-free and exact agree: with a mask each, the difference would be noise / delta."""
    own = objective(Dropped())
    w = own.task.model.init(jax.random.key(1))
    batch = own.batches(jax.random.key(2), 1, 20).at(0)
    v = jax.tree.map(jnp.ones_like, w)
    exact = own.hvp(w, v, batch)
    by = jax.tree.map(lambda leaf: 1e-2 * leaf, v)
    near = jax.tree.map(lambda leaf: leaf / 2e-2, own.grad_difference(w, by, batch))
    assert_close(near, exact, 3e-2)


def test_all_of_the_data_with_dropout() -> None:
    """A full batch has masks too, and another one in every step."""
    own = objective(Dropped())
    w = own.task.model.init(jax.random.key(1))
    batches = own.batches(jax.random.key(2), 2, "full")
    first, second = float(own.loss(w, batches.at(0))), float(own.loss(w, batches.at(1)))
    assert abs(first - second) > 1e-4
    assert abs(first - float(own.loss(w))) > 1e-4


def test_all_of_the_data_has_no_batch_statistics(data: Any) -> None:
    for default in (FedAvg(), PerFedAvg()):
        with pytest.raises(FieldError, match=r"adapt_batch = 'full'.*such as adapt_batch = 32"):
            make(data, default)  # before anything is computed
    with pytest.raises(FieldError, match=r"^batch = 'full'.*such as batch = 32"):
        make(data, FedAvg(batch="full", adapt_batch=8))
    make(data, FedAvg(), Dropped())

    @method("whole-or-part")
    class Other(Method):
        part: Literal["full", "half"] = "full"  # not the size of a batch

        def local_update(self, *_: Any) -> Any: ...

    make(data, Other())
    with pytest.raises(FieldError, match="batch = 'full'"):
        objective(NET).batches(jax.random.key(0), 2, "full")


def test_frozen_leaves_are_one_copy_and_never_sent(data: Any) -> None:
    setup = make(data, FedAvg(lr=0.05, tau=3, batch=8), Adapted(base()))
    plain, fast = Sequential(setup), Vectorized(setup, 2, 2)
    expected, traffic = plain.run(plain.init(), 2)
    state, _ = fast.run(fast.init(), 2)
    assert_close(state, expected, 2e-5)
    np.testing.assert_array_equal(traffic.uplink, HEADER + 4 * 32 * 10)
    of_all: Any = fast._data.frozen
    frozen = of_all["w"]
    shards = [shard.data.unsafe_buffer_pointer() for shard in frozen.addressable_shards]
    assert len(shards) == 2, "one for each device"
    assert len(set(shards)) == 1, "which are one on a CPU"
    streamed = Streamed(setup, 2, 1)
    other, _ = streamed.run(streamed.init(), 2)
    assert_close(other.params, expected.params, 2e-5)
    # They are no constant of the compiled programs: another base is another result.
    changed = make(data, METHODS[0], Adapted({"w": -2 * base()["w"]}))
    elsewhere, _ = Sequential(changed).run(Sequential(changed).init(), 2)
    assert float(jnp.abs(elsewhere.params["head"] - expected.params["head"]).max()) > 1e-3


@pytest.mark.parametrize("output", ["logits", lambda found: found["logits"]], ids=["key", "call"])
def test_one_of_several_outputs_is_scored(data: Any, output: Any) -> None:
    """A loss of one's own gets all outputs; accuracy is of the one that is named."""

    class Several:
        def init(self, key: Any) -> Any:
            return {"w": 0.01 * jax.random.normal(key, (64, 10))}

        def apply(self, params: Any, x: Any) -> Any:
            return {"hidden": x, "logits": flat(x) @ params["w"]}

    def loss(outputs: Any, y: Any) -> Any:
        assert set(outputs) == {"hidden", "logits"}
        return -jax.nn.log_softmax(outputs["logits"])[jnp.arange(len(y)), y]

    run = simulate(data, Several(), FedAvg(lr=0.1), rounds=3, cohort=6, loss=loss, output=output)
    assert run.scores["personalized"].accuracy.mean() > 0.5
    assert run.predict(0, data.test.x[:3]).shape == (3,)
    with pytest.raises(FieldError, match="output = None: chooses no array"):
        simulate(data, Several(), FedAvg(), rounds=1, cohort=2)


def test_local_models_with_statistics_learn(data: Any) -> None:
    """Nothing is shared, and each client's statistics are its own."""
    run = simulate(data, NET, Local(lr=0.2, tau=20, batch=16), rounds=10, cohort=6)
    assert run.scores["personalized"].accuracy.mean() > 0.6
    assert set(run.scores) == {"personalized"}


def test_it_learns(data: Any) -> None:
    method = FedAvg(lr=0.2, tau=10, batch=16, adapt_batch=16)
    run = simulate(data, NET, method, rounds=20, cohort=6)
    assert run.scores["global"].accuracy.mean() > 0.7
    assert run.scores["personalized"].accuracy.mean() > 0.7
