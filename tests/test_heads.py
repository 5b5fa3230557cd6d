"""Heads by name, what methods need of a model and its labels, and that each learns the digits."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import problems
from federations import NAMES, distance, federation, simulated
from perfed import (
    MLP,
    MLR,
    Config,
    Experiment,
    FedALA,
    FedAvg,
    FedBABU,
    Federation,
    FedPer,
    FedRep,
    FedRoD,
    FieldError,
    LGFedAvg,
    Sequential,
    Streamed,
    Task,
    load,
    lora,
)
from perfed.core.objective import Batch
from perfed.core.task import Model
from perfed.core.trees import is_any_named, leaf_paths, path_name
from perfed.data import FlatExamples
from perfed.evaluation.evaluator import SimulationEvaluator
from perfed.models import CNN, GRU, LSTM, LeNet, PFLlibCNN, ResNet18, Transformer
from test_engines import assert_close

HIDDEN = 16
BODY, HEAD = 64 * HIDDEN + HIDDEN, HIDDEN * 10 + 10
NETWORK = MLP(64, 10, (HIDDEN,))
STEPS: dict[str, Any] = {"lr": 0.2, "tau": 10, "batch": 20}


@pytest.fixture(scope="module")
def data() -> Any:
    return load("digits", clients=8, split="dirichlet", alpha=0.3, seed=1)


def make(data: Any, method: Any, model: Any = NETWORK, **options: Any) -> Experiment:
    return Experiment(data, Task(model), method, **({"cohort": 4, "seed": 4} | options))


def head_of(model: Model) -> list[str]:
    """The names of the leaves that a model says are its head."""
    task = Task(model)
    assert task.head is not None
    paths = leaf_paths(jax.eval_shape(model.init, jax.random.key(0)))
    return [path_name(path) for path in paths if is_any_named(path, task.head)]


IMAGE = (16, 16, 1)
MODELS: list[tuple[Model, list[str]]] = [
    (MLR(4, 3), ["b", "w"]),
    (MLP(4, 3, ()), ["0.b", "0.w"]),
    (MLP(4, 3, (5,) * 11), ["11.b", "11.w"]),
    *(
        (model, ["out.b", "out.w"])
        for model in (
            CNN(IMAGE, 3),
            LeNet(IMAGE, 3),
            PFLlibCNN(IMAGE, 3),
            ResNet18(IMAGE, 3, width=2),
            GRU(9, 3),
            LSTM(9, 3),
            Transformer(5, 9, 3, width=4, heads=2),
        )
    ),
    (lora(MLP(4, 3, (5,)), ["0", "1"], rank=1, train=["1.b"]), ["1.b", "1.w.lora_A", "1.w.lora_B"]),
]


@pytest.mark.parametrize(("model", "names"), MODELS, ids=lambda value: type(value).__name__)
def test_models_say_what_their_head_is(model: Model, names: list[str]) -> None:
    assert head_of(model) == names


@dataclass(frozen=True)
class Foreign:
    """A model that names its layers, but not its head."""

    head: ClassVar[Any] = None

    def init(self, key: Any) -> Any:
        return {"body": jnp.ones((64, 4)), "head": jnp.ones((4, 10))}

    def apply(self, params: Any, x: Any) -> Any:
        return x.reshape(len(x), -1) @ params["body"] @ params["head"]


def test_the_word_head_is_resolved_once(data: Any) -> None:
    """By what the model says; else it is a name like any other."""
    shared = [True, True, False, False]
    for method, personal in ((FedPer(), ()), (FedAvg(), ("head",))):
        made = make(data, method, personal=personal)
        assert list(made.is_shared) == shared
        assert make(data, made.method, personal=made.personal).is_shared == made.is_shared
    resolved: Any = make(data, FedPer()).method
    assert resolved.head == ("1",)
    assert list(make(data, LGFedAvg()).is_shared) == [not own for own in shared]
    assert list(make(data, FedPer(head=("0.b", "1.b"))).is_shared) == [False, True, False, True]
    assert list(make(data, FedPer(), Foreign()).is_shared) == [True, False]
    assert list(make(data, FedAvg(), Foreign(), personal=("head",)).is_shared) == [True, False]


@pytest.mark.parametrize("method", [FedPer, FedRep, FedBABU, LGFedAvg, FedRoD, FedALA])
def test_a_head_that_is_not_there_is_refused(data: Any, method: Any) -> None:
    with pytest.raises(FieldError, match=r"head = 'fc': names no leaf.* are 0\.b, 0\.w, 1\.b, 1"):
        make(data, method(head="fc"))
    for wrong in ("", (), 3, ("0", 1)):
        with pytest.raises(FieldError, match="head"):
            method(head=wrong)


@pytest.mark.parametrize("method", [FedPer, FedRep, FedBABU, LGFedAvg])
def test_a_model_without_a_body_is_refused(data: Any, method: Any) -> None:
    with pytest.raises(FieldError, match="this method needs a body below the head"):
        make(data, method(), MLR(64, 10))


def test_fedrod_is_for_classes_and_a_linear_head(data: Any) -> None:
    assert all(make(data, FedRoD(), MLR(64, 10)).is_shared)
    with pytest.raises(FieldError, match="the data are a regression"):
        problems.experiment(FedRoD(head="*"))
    with pytest.raises(FieldError, match="balances the classes of the default loss"):
        Experiment(data, Task(NETWORK, loss=lambda outputs, y: outputs[:, 0]), FedRoD(), 2)
    for head in ("*", "1.b", ("0.w", "1.w")):
        with pytest.raises(FieldError, match="must be one linear layer"):
            make(data, FedRoD(head=head))


def test_settings_that_cannot_be() -> None:
    for fraction in (0.0, 1.2):
        with pytest.raises(FieldError, match="fraction"):
            FedALA(fraction=fraction)
    with pytest.raises(FieldError, match="adapt_part"):
        FedBABU(adapt_part="tail")  # type: ignore[arg-type]


def test_heads_in_a_configuration() -> None:
    """A name or several."""
    for given in ("1", ["1.w", "1.b"], "head"):
        method = {"name": "fedrep", "head": given}
        model = {"name": "mlp", "hidden": [4]}
        data = {"source": "digits", "clients": 4}
        values = {"rounds": 1, "cohort": 2, "data": data, "model": model, "method": method}
        experiment = Config.checked(values).build().experiment
        assert list(experiment.is_shared) == [True, True, False, False]


def test_class_frequencies_and_samples() -> None:
    """Of the client's own rows, whatever lies beside them."""
    x = np.arange(20, dtype=np.float32)[:, None]
    y = np.array([0, 1, 2, 2] * 5, np.int32)
    flat = FlatExamples.from_arrays([(x[:8], y[:8]), (x[8:], y[8:] * 0)])
    own = problems.objective(Federation(flat, flat, ("a", "b"), None), 0, Task(MLR(1, 4)))
    w = MLR(1, 4).init(jax.random.key(0))
    np.testing.assert_allclose(own.class_frequencies(w), [0.25, 0.25, 0.5, 0.0])
    parts = []
    for i in range(10):
        part = own.sample(jax.random.key(i), 0.3)
        assert int(part.examples.size) == 3  # of 8, rounded up
        rows = np.asarray(part.examples.rows(jnp.arange(8))[0])[:3, 0]
        assert len(set(rows.tolist())) == 3
        parts.append(rows)
    loss = own.loss(w, Batch(jnp.asarray(rows, int)))
    assert float(part.loss(w)) == pytest.approx(float(loss), rel=1e-5)
    assert set(np.concatenate(parts).tolist()) == set(range(8))
    assert int(own.sample(jax.random.key(0), 1e-6).examples.size) == 1
    balanced = own.balanced(w)
    logits = np.asarray(w["b"]) + np.log([0.25, 0.25, 0.5, 1e-300])
    expected = -logits[0] + np.log(np.exp(logits).sum())
    assert float(balanced.loss(w, Batch(jnp.array([0])))) == pytest.approx(expected)


# A bound that each method's personal models beat after 30 rounds, and the entries that it sends.
LEARN: list[tuple[Any, float, int]] = [
    (FedPer(**STEPS), 0.94, BODY),
    (FedRep(lr=0.2, head_steps=10, body_steps=5), 0.93, BODY),
    (FedBABU(**STEPS), 0.9, BODY),
    (LGFedAvg(**STEPS), 0.94, HEAD),
    (FedRoD(**STEPS), 0.95, BODY + HEAD),
    (FedALA(**STEPS), 0.94, BODY + HEAD),
]


@pytest.mark.parametrize(("method", "bound", "sent"), LEARN, ids=lambda m: getattr(m, "name", ""))
def test_each_learns_and_sends_shared_leaves_alone(
    data: Any, method: Any, bound: float, sent: int
) -> None:
    """In float32: a header of 7 bytes and 4 for each entry, both ways."""
    engine = Sequential(make(data, method))
    state, traffic = engine.run(engine.init(), 30)
    np.testing.assert_array_equal(traffic.uplink, 7 + 4 * sent)
    np.testing.assert_array_equal(traffic.downlink, 7 + 4 * sent)
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == sent
    accuracy = SimulationEvaluator(engine)(state).scores["personalized"].accuracy
    assert accuracy.mean() > bound


def test_fedbabu_never_moves_its_head(data: Any) -> None:
    setup = make(data, FedBABU(**STEPS))
    engine = Sequential(setup)
    state = engine.advance(engine.init(), 1)
    personal: Any = state.clients.personal
    for name, leaf in setup.init_params()[1].items():
        np.testing.assert_array_equal(personal[1][name], np.stack([leaf] * data.clients))


@pytest.mark.slow
@pytest.mark.parametrize("method", [FedALA(**STEPS), FedRoD(**STEPS), FedRep(lr=0.2)])
def test_clients_whose_states_are_in_a_file(data: Any, method: Any) -> None:
    """Of every kind: personal leaves, a part of the model, and the model with a flag."""
    setup = make(data, method)
    plain, streamed = Sequential(setup), Streamed(setup)
    expected, state = (engine.advance(engine.init(), 3) for engine in (plain, streamed))
    assert_close(state.without_clients(), expected.without_clients())
    scores = [SimulationEvaluator(e)(s).scores for e, s in ((plain, expected), (streamed, state))]
    losses = [score["personalized"].loss for score in scores]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedrep", "fedbabu", "fedrod", "fedala"])
def test_a_real_federation_ends_where_a_simulation_ends(tmp_path: Any, name: str) -> None:
    """Personal leaves, and client states of every kind, stay in the clients' folders."""
    steps = {"head_steps": 2} if name == "fedrep" else {"tau": 2}
    method = {"name": name, "lr": 0.05, "batch": 5} | steps
    with federation(tmp_path, method, model={"name": "mlp", "hidden": [5]}) as run:
        run.serve()
        for client in NAMES:
            run.join(client)
        run.finish()
    expected = simulated(run.values)
    for i, client in enumerate(NAMES):
        assert distance(run.own_model(client), expected.personal_model(i)) < 1e-5
