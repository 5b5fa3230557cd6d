"""Low-rank adapters: the arithmetic, what is sent, and every method on adapters alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from networks import Dropped, Normalized
from perfed import (
    GRU,
    MLP,
    AdamW,
    Ditto,
    Experiment,
    FedAvg,
    FedRep,
    PerFedAvg,
    PFedMe,
    Scaffold,
    Sequential,
    Task,
    Vectorized,
    load,
    lora,
    simulate,
)
from perfed.core.errors import FieldError
from perfed.core.trees import tree_add
from perfed.evaluation.evaluator import SimulationEvaluator
from perfed.models import from_flax
from perfed.models.function_model import FunctionModel
from perfed.theory.constants import measure
from test_engines import assert_close

NETWORK = MLP(64, 10, hidden=(16,))
RANK = 2
A, B = RANK * 64, 16 * RANK
HEAD = 10 * 16 + 10


@pytest.fixture(scope="module")
def data() -> Any:
    return load("digits", clients=6, split="dirichlet", seed=1)


def adapted(**options: Any) -> Any:
    return lora(NETWORK, ["0"], rank=RANK, alpha=6.0, train=["1"], **options)


def make(data: Any, method: Any, model: Any, **options: Any) -> Experiment:
    return Experiment(data, Task(model), method, **({"cohort": 3, "seed": 4} | options))


def moved(params: Any, seed: int = 1) -> Any:
    """The parameters with some noise, so that B is not zero."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noise = [0.1 * jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, leaves, strict=True)]
    return tree_add(params, jax.tree.unflatten(structure, noise))


def test_weights_as_outputs_by_inputs() -> None:
    base = NETWORK.init(jax.random.key(7))
    model = adapted(params=base)
    x = jax.random.normal(jax.random.key(3), (5, 64))
    first = model.init(jax.random.key(0))
    np.testing.assert_allclose(model.apply(first, x), NETWORK.apply(base, x), atol=1e-6)
    params = moved(first)
    own = params[0]["w"]
    w = np.asarray(base[0]["w"]) + 3.0 * np.asarray(own["lora_B"]) @ np.asarray(own["lora_A"])
    h = x @ w.T + np.asarray(base[0]["b"])
    h = np.where(h > 0, h, np.expm1(np.minimum(h, 0)))
    expected = h @ np.asarray(params[1]["w"]).T + np.asarray(params[1]["b"])
    np.testing.assert_allclose(model.apply(params, x), expected, atol=1e-5)
    assert params[0]["b"] is None, "what has no adapter is frozen"


def test_kernels_as_inputs_by_outputs() -> None:
    linen = pytest.importorskip("flax.linen")
    x = jax.random.normal(jax.random.key(3), (5, 7))
    base = from_flax(linen.Dense(4), x)
    params = base.init(jax.random.key(7))
    model = lora(base, ["kernel"], rank=RANK, alpha=6.0, params=params)
    own = moved(model.init(jax.random.key(0)))
    assert own["kernel"]["lora_A"].shape == (RANK, 7)
    product = np.asarray(own["kernel"]["lora_B"]) @ np.asarray(own["kernel"]["lora_A"])
    expected = x @ (np.asarray(params["kernel"]) + 3.0 * product.T) + np.asarray(params["bias"])
    np.testing.assert_allclose(model.apply(own, x), expected, atol=1e-5)


def test_adapters_alone_are_sent_and_engines_agree(data: Any) -> None:
    setup = make(data, FedAvg(lr=0.1, tau=3, batch=8), adapted())
    plain, fast = Sequential(setup), Vectorized(setup, 2, 2)
    expected, traffic = plain.run(plain.init(), 2)
    state, _ = fast.run(fast.init(), 2)
    assert_close(state, expected, 2e-5)
    np.testing.assert_array_equal(traffic.uplink, 7 + 4 * (A + B + HEAD))
    np.testing.assert_array_equal(traffic.downlink, 7 + 4 * (A + B + HEAD))


def test_b_can_be_each_clients_own(data: Any) -> None:
    setup = make(data, FedAvg(lr=0.1, tau=3, batch=8), adapted(), personal=("*.lora_B",))
    engine = Sequential(setup)
    state, traffic = engine.run(engine.init(), 1)
    np.testing.assert_array_equal(traffic.uplink, 7 + 4 * (A + HEAD))
    personal: Any = state.clients.personal
    own = np.abs(np.asarray(personal[0]["w"]["lora_B"])).max(axis=(1, 2))
    cohort = set(np.asarray(setup.sample_cohort(0)).tolist())
    assert {i for i in range(6) if own[i] > 1e-5} == cohort


def test_ffa_averages_the_products_exactly(data: Any) -> None:
    """With one A for all, mean(B_i) A = mean(B_i A), which is not so where both are trained."""
    x = data.test.x[:5].reshape(5, -1)

    def difference(model: Any, seed: int) -> float:
        pair = [moved(model.init(jax.random.key(0)), s) for s in (seed, seed + 1)]
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *pair)
        whole, *parts = (np.asarray(model.merged(p)[0]["w"]) for p in (mean, *pair))
        return float(np.abs(x @ (whole - (parts[0] + parts[1]) / 2).T).max())

    both, one = adapted(), adapted(freeze_a=True)
    assert difference(one, 3) < 1e-5 < 1e-2 < difference(both, 3)
    setup = make(data, FedAvg(lr=0.1, tau=3, batch=8), one)
    _, traffic = Sequential(setup).run(setup.init_state(), 1)
    np.testing.assert_array_equal(traffic.uplink, 7 + 4 * (B + HEAD))
    # A is the same in every run, since it is no part of what is drawn by the run's seed.
    first, second = one.init(jax.random.key(0)), one.init(jax.random.key(1))
    assert_close(one.merged(first), one.merged(second))


@pytest.mark.parametrize(
    "method",
    [
        FedAvg(lr=0.01, tau=10, batch=16, optimizer=AdamW()),
        pytest.param(PerFedAvg(alpha=0.01, beta=0.03, tau=10, batch=16), marks=pytest.mark.slow),
        pytest.param(
            PerFedAvg(alpha=0.01, beta=0.03, tau=10, batch=16, variant="exact"),
            marks=pytest.mark.slow,
        ),
        PFedMe(eta=0.05, lam=15.0, inner_lr=0.05, local_rounds=10, batch=16),
    ],
    ids=["fedavg-adamw", "per-fedavg", "per-fedavg-exact", "pfedme"],
)
def test_methods_learn_adapters_alone(data: Any, method: Any) -> None:
    """No leaf of the network itself is trained, neither its head."""
    model = lora(NETWORK, lambda path: path[-1] == "w", rank=4)
    start = simulate(data, model, method, rounds=1, cohort=1).history[0]
    run = simulate(data, model, method, rounds=30, cohort=6)
    before = start.scores["personalized"].accuracy.mean()
    assert run.scores["personalized"].accuracy.mean() > max(0.6, before + 0.1)


STEPS: dict[str, Any] = {"lr": 0.03, "batch": 16}
BODY_ADAPTERS, HEAD_ADAPTERS = A + B, RANK * (16 + 10)


@pytest.mark.parametrize(
    ("method", "sent", "messages", "kept"),
    [
        # A personal model and a count; a head; a control variate. Nothing of the base.
        (Ditto(personal_lr=0.03, **STEPS), BODY_ADAPTERS + HEAD_ADAPTERS, 1,
         BODY_ADAPTERS + HEAD_ADAPTERS + 1),
        (FedRep(body_steps=5, **STEPS), BODY_ADAPTERS, 1, HEAD_ADAPTERS),
        (Scaffold(**STEPS), BODY_ADAPTERS + HEAD_ADAPTERS, 2, BODY_ADAPTERS + HEAD_ADAPTERS),
    ],
    ids=["ditto", "fedrep", "scaffold"],
)  # fmt: skip
def test_methods_with_states_have_those_of_adapters_alone(
    data: Any, method: Any, sent: int, messages: int, kept: int
) -> None:
    """The base is in no message, state or client's record, and stays as it was."""
    model = lora(NETWORK, lambda path: path[-1] == "w", rank=RANK, alpha=6.0)
    setup = make(data, method, model)
    before = jax.tree.map(np.array, setup.task.frozen)
    plain, fast = Sequential(setup), Vectorized(setup, 2, 2)
    expected, traffic = plain.run(plain.init(), 2)
    state, same = fast.run(fast.init(), 2)
    assert_close(state, expected, 2e-5)
    for found in (traffic, same):
        np.testing.assert_array_equal(found.uplink, messages * (7 + 4 * sent))
        np.testing.assert_array_equal(found.downlink, messages * (7 + 4 * sent))
    at_server = jax.tree.leaves((state.params, state.server_state))
    assert sum(leaf.size for leaf in at_server) == messages * sent
    assert sum(leaf.size for leaf in jax.tree.leaves(state.clients)) == kept * data.clients
    score = SimulationEvaluator(fast)
    last = fast.advance(state, 30)
    first_loss, last_loss = (
        score(s).scores["personalized"].loss.mean() for s in (fast.init(), last)
    )
    assert last_loss < 0.7 * first_loss
    jax.tree.map(np.testing.assert_array_equal, setup.task.frozen, before)


def test_dropout_of_the_model_under_the_adapters() -> None:
    model = lora(Dropped(), ["fc"])
    params = moved(model.init(jax.random.key(0)))
    x = jnp.ones((3, 64))
    task = Task(model)
    assert task.is_random
    assert not Task(lora(NETWORK, ["0"])).is_random
    one, two = (task.outputs(params, x, jax.random.key(i)) for i in range(2))
    assert float(jnp.abs(one - two).max()) > 1e-3


def test_adapters_of_a_recurrent_network() -> None:
    """Every matrix by a pattern; biases beside them are frozen."""
    model = lora(GRU(symbols=9, classes=9), ["read", "recall"], rank=3)
    params = model.init(jax.random.key(0))
    assert params["read"]["b"] is None
    assert params["embedding"] is None
    assert params["recall"]["w"]["lora_B"].shape == (3 * 64, 3)
    assert model.apply(params, jnp.zeros((2, 5), jnp.int32)).shape == (2, 9)


def test_what_cannot_be_adapted_is_refused() -> None:
    with pytest.raises(FieldError, match=r"target = \['query'\]: chooses no matrix; there are 0.w"):
        lora(NETWORK, ["query"])
    with pytest.raises(FieldError, match=r"0\.b.*adapters are for matrices"):
        lora(NETWORK, ["0.b"])
    with pytest.raises(FieldError, match="keeps running statistics"):
        lora(Normalized(), ["fc"])
    with pytest.raises(FieldError, match="rank"):
        lora(NETWORK, ["0"], rank=0)
    with pytest.raises(FieldError, match="no module to write to"):
        adapted().write_back(adapted().init(jax.random.key(0)))


def test_a_model_without_theory_is_named_by_its_type(data: Any) -> None:
    """Not by the addresses of the functions that it is made of."""
    net = Normalized()
    model = FunctionModel(net.init, net.apply, net.is_state)
    engine = Sequential(make(data, FedAvg(lr=0.1, tau=1, batch=8, adapt_batch=8), model))
    with pytest.raises(FieldError, match="model = 'FunctionModel': keeps running statistics"):
        measure(engine)
