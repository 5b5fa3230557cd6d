"""The steps of a round, which all engines share: a client's update, and the server's."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from perfed.core.random import IntLike, Purpose, fold
from perfed.core.trees import Params, all_finite, combine, tree_sub
from perfed.methods import Extra, Received
from perfed.pipeline import send
from perfed.simulation.experiment import ClientRecord, DeviceData, EngineState, Experiment


class Broadcast(NamedTuple):
    """What the server sends to a cohort, as it arrives.

    Attributes:
        params: the shared parameters.
        extra: what the method sends beside them.
        bytes: the length of the messages to one client.
    """

    params: Params
    extra: Extra
    bytes: Int[Array, ""]


class Trained(NamedTuple):
    """What a client has after its local update, before anything is sent.

    Attributes:
        weight: the client's weight in the mean.
        written: what its message is to say: the delta of the shared leaves, after the pipeline's
            stages at the client.
        extra: what is sent beside it.
        state: the method's client state.
        personal: the personal leaves.
    """

    weight: Float[Array, ""]
    written: Params
    extra: Extra
    state: Any
    personal: Params | None


class ClientUpdate(NamedTuple):
    """What one client adds to a round.

    Attributes:
        weight: the client's weight in the mean.
        delta: the change of the shared leaves, as the server receives it.
        extra: what goes beside it, as the server receives it.
        record: what the client keeps; this stays with it.
        finite: whether all that it sends and keeps is finite.
        bytes: the length of its messages.
    """

    weight: Float[Array, ""]
    delta: Params
    extra: Extra
    record: ClientRecord
    finite: Bool[Array, ""]
    bytes: Int[Array, ""]


def broadcast(experiment: Experiment, state: EngineState) -> Broadcast:
    """The server's messages to a cohort."""
    extra = experiment.method.broadcast(state.server_state)
    sent = [
        send(experiment.downlink, experiment.downlink_key(state.round, i), tree)
        for i, tree in enumerate((state.params, extra))
    ]
    return Broadcast(sent[0].received, sent[1].received, sent[0].bytes + sent[1].bytes)


def train_client(
    experiment: Experiment,
    data: DeviceData,
    received: Received,
    record: ClientRecord,
    round: IntLike,
    client: IntLike,
) -> Trained:
    """One client's local update in a round, and the pipeline's first stages."""
    objective = experiment.objective(data.train, client)
    key = experiment.client_key(Purpose.LOCAL, round, data.number[client])
    context = experiment.context(round, key)
    update = experiment.method.local_update(objective, received, record.state, context)
    before, _ = experiment.divided(received.params)
    after, personal = experiment.divided(update.params)
    written = experiment.pipeline.prepare(tree_sub(after, before), record.residual)
    weight = objective.examples.size if experiment.weighting == "size" else 1.0
    return Trained(jnp.asarray(weight, float), written, update.extra, update.client_state, personal)


def client_update(
    experiment: Experiment,
    data: DeviceData,
    sent: Broadcast,
    record: ClientRecord,
    round: IntLike,
    client: IntLike,
) -> ClientUpdate:
    """One client's part of a round, and what the server receives of it."""
    received = Received(combine(sent.params, record.personal), sent.extra)
    trained = train_client(experiment, data, received, record, round, client)
    number, pipeline = data.number[client], experiment.pipeline
    delta = pipeline.send(experiment.uplink_key(round, number, 0), trained.written)
    extra = pipeline.send_extra(experiment.uplink_key(round, number, 1), trained.extra)
    residual = pipeline.left_out(trained.written, delta.received)
    after = ClientRecord(trained.state, trained.personal, residual)
    finite = all_finite((trained.written, delta.received, trained.extra, extra.received, after))
    length = delta.bytes + extra.bytes
    return ClientUpdate(trained.weight, delta.received, extra.received, after, finite, length)


def server_update(
    experiment: Experiment, state: EngineState, mean: tuple[Params, Extra], clients: ClientRecord
) -> EngineState:
    """The next state, from what the cohort's deltas and extras were aggregated to."""
    context = experiment.context(state.round, fold(experiment.seed, Purpose.SERVER, state.round))
    params, server_state = experiment.method.server_update(
        state.params, state.server_state, *mean, context
    )
    return EngineState(state.round + 1, params, server_state, clients)
