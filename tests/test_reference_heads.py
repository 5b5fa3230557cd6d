"""Eight rounds of every method with a head against NumPy in float64, and their known mistakes."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
import reference_heads
from perfed import FedALA, FedBABU, FedPer, FedRep, FedRoD, LGFedAvg, Sequential, Vectorized
from perfed.core.random import Purpose, fold
from perfed.methods import Received
from perfed.methods.fedala import ALAState
from test_reference import SEED, Trained, trained

ROUNDS = 8
HEAD = ("2", "3")  # the network's last two leaves
ALA: dict[str, Any] = {"lr": 0.2, "tau": 3, "batch": 5, "head": HEAD, "weight_lr": 3.0}

CASES: dict[str, Any] = {
    "fedper": FedPer(lr=0.2, tau=3, batch=5, head=HEAD),
    "fedrep": FedRep(lr=0.2, head_steps=4, body_steps=2, batch=5, head=HEAD),
    "fedbabu": FedBABU(lr=0.2, tau=3, batch=5, head=HEAD, alpha=0.1, adapt_steps=2, adapt_batch=4),
    "lg-fedavg": LGFedAvg(lr=0.2, tau=3, batch=5, head=HEAD),
    "fedrod": FedRoD(lr=0.1, head_lr=0.3, tau=3, batch=5, head="[23]"),
    "fedala": FedALA(**ALA, weight_steps=2, first_weight_steps=25, threshold=0.02, fraction=0.6),
    "fedala-batches": FedALA(**ALA, weight_steps=3, first_weight_steps=2, weight_batch=4),
}
# That the plain loops do the same is what `test_engines` is about, too.
ENGINES = [
    *((name, Vectorized) for name in CASES if name != "fedala-batches"),
    ("fedala-batches", Sequential),
    *(
        pytest.param(name, Sequential, marks=pytest.mark.slow)
        for name in CASES
        if name != "fedala-batches"
    ),
]
# What public versions get wrong, or what is easily mistaken.
MISTAKES = {
    "fedper": ["the head is averaged", "the head is drawn anew"],
    "fedrep": [
        "the body with the head",
        "the head with the body",
        "the head is drawn anew",
        "the same batches for both",
        "the body first",
    ],
    "fedbabu": [
        "the head is trained",
        "the head is trained and sent",
        "each client has a head of its own",
    ],
    "lg-fedavg": ["shares the representation", "the shared part is not trained"],
    "fedrod": [
        "the personal loss reaches the body",
        "the personal loss reaches the generic head",
        "the personal loss without the generic logits",
        "the personal gradient after the generic step",
        "the prior has the wrong sign",
        "no prior",
    ],
    "fedala": [
        "weights are not clipped",
        "weights on the new model",
        "lower layers are mixed too",
        "until convergence in every round",
        "never converges",
        "all of the data",
        "keeps the start",
    ],
}


@cache
def run(name: str, engine_type: Any) -> Trained:
    return trained(CASES[name], {}, engine_type, ROUNDS)


@cache
def draws(name: str) -> Any:
    """The batches of a run, drawn once for all references."""
    return cache(run(name, Sequential).draws)


def expected(name: str, wrong: str = "") -> tuple[Any, list[Any]]:
    """What the reference makes of the same rounds."""
    own, method = run(name, Sequential), CASES[name]
    update = reference_heads.METHODS[method.name][0]
    return reference.rounds(
        own.clients,
        own.first,
        method,
        own.cohorts,
        draws(name),
        False,
        partial(update, wrong=wrong) if wrong else update,
        reference_heads.first_kept(method.name, own.first),
    )


def gap(leaves: Any, parts: Any) -> float:
    """The largest difference among the leaves that are there."""
    pairs = [(a, b) for a, b in zip(leaves, parts, strict=True) if a is not None]
    assert pairs
    return max(float(np.abs(np.asarray(a) - b).max()) for a, b in pairs)


def difference(found: Trained, w: Any, kept: list[Any]) -> float:
    """The largest difference of anything that the server or a client has."""
    state, parts = found.state, found.clients[0].parts
    gaps = [gap(state.params, parts(w))]
    for i, own in enumerate(kept):
        mine = jax.tree.map(lambda leaf, i=i: leaf[i], state.clients)
        if mine.personal is not None:
            gaps.append(gap(mine.personal, parts(own)))
        if isinstance(mine.state, ALAState):
            gaps += [gap(mine.state.theta, parts(own.theta))]
            gaps += [gap(mine.state.weights, parts(own.weights))]
            gaps += [float(bool(mine.state.learned) != own.learned)]
        elif mine.state is not None:
            gaps.append(gap(mine.state, parts(own)))
    return max(gaps)


@pytest.mark.parametrize(("name", "engine_type"), ENGINES)
def test_eight_rounds(name: str, engine_type: Any) -> None:
    """Global model, personal leaves, client states and personal models, to 1e-10."""
    with jax.enable_x64(True):
        found, (w, kept) = run(name, engine_type), expected(name)
        assert difference(found, w, kept) < 1e-10
        assert any(len(np.unique(client.y)) < client.classes for client in found.clients)
        moved = np.abs(w - found.first)
        assert moved.max() > 0.05  # it went somewhere
        personalize = reference_heads.METHODS[CASES[name].name][1]
        for i, client in enumerate(found.clients):
            draw = found.draws(ROUNDS, i, Purpose.PERSONALIZE)
            own = personalize(client, w, kept[i], ROUNDS, draw, CASES[name])
            np.testing.assert_allclose(found.personal_model(i), own, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("name", "wrong"), [(n, m) for n, own in MISTAKES.items() for m in own])
def test_a_mistake_is_noticed(name: str, wrong: str) -> None:
    with jax.enable_x64(True):
        assert difference(run(name, Sequential), *expected(name, wrong)) > 1e-4


ADAPTED = [
    ("fedbabu", {"adapt_part": "body"}),
    ("fedbabu", {"adapt_part": "head"}),
    ("fedrod", {"adapt_steps": 3}),
    ("fedala", {"adapt_steps": 3}),
]


@pytest.mark.parametrize(("name", "settings"), ADAPTED)
def test_fine_tuning(name: str, settings: Any) -> None:
    """FedBABU's ablations; FedRoD's personal head with all else held fixed; FedALA's training."""
    with jax.enable_x64(True):
        found, (w, kept) = run(name, Sequential), expected(name)
        client, method = found.clients[4], replace(CASES[name], head=HEAD, **settings)
        state = jax.tree.map(lambda leaf: leaf[4], found.state.clients.state)
        objective = found.experiment.objective(found.experiment.device_data().train, 4)
        key = fold(SEED, Purpose.LOCAL, ROUNDS, 4)
        received = Received([jnp.asarray(leaf) for leaf in client.parts(w)])
        own = method.personalize(objective, received, state, found.experiment.context(8, key))
        draw, personalize = found.draws(ROUNDS, 4), reference_heads.METHODS[name][1]
        wanted = personalize(client, w, kept[4], ROUNDS, draw, method)
        assert gap(own, client.parts(wanted)) < 1e-10
