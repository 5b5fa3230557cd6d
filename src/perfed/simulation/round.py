"""The steps of a round, which all engines share: a client's update, and the server's."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from perfed.core.objective import Objective
from perfed.core.random import IntLike, Purpose, fold
from perfed.core.trees import Params, all_finite, combine, tree_add, tree_sub
from perfed.methods import Extra, Method, Received
from perfed.pipeline import send
from perfed.pipeline.codecs import Float32
from perfed.simulation.experiment import (
    ClientRecord,
    DeviceData,
    DeviceRows,
    EngineState,
    Experiment,
)

# For methods that do not say how many examples a batch has.
_STATE_BATCH = 32
# What folds the key of a personalization into that of the running statistics after it.
_AFTER_PERSONALIZE = 1
# Running statistics are not quantized: a variance must stay one.
STATE_CODEC = Float32()


class Broadcast(NamedTuple):
    """What the server sends to a cohort, as it arrives.

    Attributes:
        params: the shared parameters, with the running statistics that are shared.
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
        extra: what the method sends beside it.
        model_state: how the shared running statistics of the model have changed, if it has any.
        state: the method's client state.
        personal: the personal leaves.
    """

    weight: Float[Array, ""]
    written: Params
    extra: Extra
    model_state: Params | None
    state: Any
    personal: Params | None


class ClientUpdate(NamedTuple):
    """What one client adds to a round.

    Attributes:
        weight: the client's weight in the mean.
        delta: the change of the shared leaves, as the server receives it.
        extra: what goes beside it, as the server receives it.
        model_state: how the shared running statistics have changed.
        record: what the client keeps; this stays with it.
        finite: whether all that it sends and keeps is finite.
        bytes: the length of its messages.
    """

    weight: Float[Array, ""]
    delta: Params
    extra: Extra
    model_state: Params | None
    record: ClientRecord
    finite: Bool[Array, ""]
    bytes: Int[Array, ""]


def broadcast(experiment: Experiment, state: EngineState) -> Broadcast:
    """The server's messages to a cohort."""
    extra = experiment.method.broadcast(state.server_state)
    weights, model_state = experiment.split_state(state.params)
    trees = (
        (experiment.downlink, weights),
        (experiment.downlink, extra),
        (STATE_CODEC, model_state),
    )
    sent = [
        send(codec, experiment.downlink_key(state.round, i), tree)
        for i, (codec, tree) in enumerate(trees)
    ]
    params = combine(sent[0].received, sent[2].received)
    return Broadcast(params, sent[1].received, sum((own.bytes for own in sent), jnp.int32(0)))


def train_client(
    experiment: Experiment,
    data: DeviceData,
    received: Received,
    record: ClientRecord,
    round: IntLike,
    client: IntLike,
) -> Trained:
    """One client's local update in a round, and the pipeline's first stages."""
    weights, model_state = experiment.split_state(received.params)
    objective = experiment.objective(data.train, client, data.frozen, model_state)
    key = experiment.client_key(Purpose.LOCAL, round, data.number[client])
    context, method = experiment.context(round, key), experiment.method
    update = method.local_update(
        objective, received._replace(params=weights), record.state, context
    )
    state_key = experiment.client_key(Purpose.MODEL_STATE, round, data.number[client])
    params = with_state(objective, method, update.params, state_key, method.step_count)
    before, _ = experiment.divided(received.params)
    after, personal = experiment.divided(params)
    delta, state_delta = experiment.split_state(tree_sub(after, before))
    written = experiment.pipeline.prepare(delta, record.residual)
    weight = objective.examples.size if experiment.weighting == "size" else 1.0
    return Trained(
        jnp.asarray(weight, float),
        written,
        update.extra,
        state_delta,
        update.client_state,
        personal,
    )


def with_state(
    objective: Objective, method: Method, params: Params, key: PRNGKeyArray, steps: int
) -> Params:
    """A client's parameters with the running statistics that belong to them.

    A method only sees parameters that are trained. So statistics are renewed after its work, by as
    many batches as it took steps.
    """
    size = getattr(method, "batch", _STATE_BATCH)
    return combine(params, objective.renewed_state(params, key, steps, size))


def personalize_client(
    experiment: Experiment,
    data: DeviceData,
    rows: DeviceRows | None,
    received: Received,
    record: ClientRecord,
    round: IntLike,
    client: IntLike,
) -> Params:
    """One client's own model, made from one side of its data."""
    weights, model_state = experiment.split_state(received.params)
    objective = experiment.objective(rows, client, data.frozen, model_state)
    key = experiment.client_key(Purpose.PERSONALIZE, round, data.number[client])
    method = experiment.method
    own = method.personalize(
        objective,
        received._replace(params=weights),
        record.state,
        experiment.context(round, key),
    )
    state_key = jax.random.fold_in(key, _AFTER_PERSONALIZE)
    return with_state(objective, method, own, state_key, method.adapt_count)


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
    keys = [experiment.uplink_key(round, number, message) for message in range(3)]
    delta = pipeline.send(keys[0], trained.written)
    extra = pipeline.send_extra(keys[1], trained.extra)
    model_state = send(STATE_CODEC, keys[2], trained.model_state)
    residual = pipeline.left_out(trained.written, delta.received)
    after = ClientRecord(trained.state, trained.personal, residual)
    received_all = (delta.received, extra.received, model_state.received)
    finite = all_finite((trained.written, trained.extra, received_all, after))
    length = delta.bytes + extra.bytes + model_state.bytes
    return ClientUpdate(trained.weight, *received_all, after, finite, length)


def server_update(
    experiment: Experiment,
    state: EngineState,
    mean: tuple[Params, Extra, Params | None],
    clients: ClientRecord,
) -> EngineState:
    """The next state, from what the cohort's deltas and extras were aggregated to."""
    context = experiment.context(state.round, fold(experiment.seed, Purpose.SERVER, state.round))
    weights, model_state = experiment.split_state(state.params)
    delta, extra, state_delta = mean
    weights, server_state = experiment.method.server_update(
        weights, state.server_state, delta, extra, context
    )
    if model_state is not None:
        model_state = tree_add(model_state, state_delta)
    return EngineState(state.round + 1, combine(weights, model_state), server_state, clients)
