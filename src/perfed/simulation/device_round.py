"""A round as one device sees it: its share of the cohort works, then all devices add up."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Int

from perfed.core.trees import row
from perfed.pipeline.stages import Total
from perfed.simulation.devices import AXIS, compiler_options
from perfed.simulation.experiment import ClientRecord, DeviceData, EngineState, Experiment
from perfed.simulation.round import Broadcast, ClientUpdate, client_update, server_update

REPLICATED = PartitionSpec()
SHARDED = PartitionSpec(AXIS)

# Smaller leaves than this are added up as one: a sum over devices takes 50 us, and one over
# processes 2 ms. Of larger ones, putting them together and apart takes longer than it saves.
_LARGE = 10_000


def on_devices(mesh: Mesh, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    """A function of what one device has, compiled for all of them."""
    sharded = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(sharded, compiler_options=compiler_options())


class DeviceUpdate(NamedTuple):
    """The result of a device's share of the cohort.

    Attributes:
        total: of its clients' deltas, extras and statistics, for the aggregation.
        records: what each of its clients keeps.
        diverged: the number of a client whose update is not finite; that of all clients: none.
        uplink: the length of each one's messages.
    """

    total: Total
    records: ClientRecord
    diverged: Int[Array, ""]
    uplink: Int[Array, " slots"]


def update_clients(
    experiment: Experiment,
    data: DeviceData,
    state: EngineState,
    sent: Broadcast,
    clients: Int[Array, " slots"],
    present: Bool[Array, " slots"],
    chunk: int,
) -> DeviceUpdate:
    """The updates of a device's clients, chunk by chunk.

    Args:
        experiment: what is trained.
        data: where the clients are.
        state: where the run stands; what clients keep is in the order of the data.
        sent: what the cohort has received.
        clients: who is in the device's slots, by their places in the data.
        present: which slots are taken; the work of the others is thrown away.
        chunk: how many at once.
    """
    nobody, aggregate = experiment.federation.clients, experiment.pipeline.aggregate

    def update(record: ClientRecord, client: Int[Array, ""]) -> ClientUpdate:
        return client_update(experiment, data, sent, record, state.round, client)

    def add_chunk(
        total: Total, slots: tuple[Int[Array, " chunk"], Bool[Array, " chunk"]]
    ) -> tuple[Total, Any]:
        clients, present = slots
        updates: ClientUpdate = jax.vmap(update)(row(state.clients, clients), clients)
        # An empty slot repeats some client's work; by its weight of 0 it does not count.
        weights = jnp.where(present, updates.weight, 0.0)
        more = aggregate.total(weights, (updates.delta, updates.extra, updates.model_state))
        diverged = jnp.where(present & ~updates.finite, data.number[clients], nobody).min()
        return aggregate.add(total, more), (updates.record, diverged, updates.bytes)

    one: ClientUpdate = jax.eval_shape(update, row(state.clients, clients[0]), clients[0])
    slots = (clients.reshape(-1, chunk), present.reshape(-1, chunk))
    start = aggregate.start((one.delta, one.extra, one.model_state))
    total, (records, diverged, uplink) = jax.lax.scan(add_chunk, start, slots)
    records = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), records)
    return DeviceUpdate(total, records, diverged.min(), uplink.ravel())


def all_reduce(
    experiment: Experiment, state: EngineState, update: DeviceUpdate, *slots: Int[Array, " slots"]
) -> tuple[EngineState, Int[Array, ""], list[Int[Array, " all_slots"]]]:
    """The next state, but for what clients keep, and a client whose update was not finite.

    If there is one, the state does not change. Also gathers the values of all devices' slots.
    """
    total = _sum_over_devices(update.total)
    gathered = jax.lax.all_gather(jnp.concatenate([update.diverged[None], *slots]), AXIS)
    diverged = gathered[:, 0].min()
    of_all = [part.ravel() for part in jnp.split(gathered[:, 1:], len(slots), axis=1)]
    before = state.without_clients()
    mean = experiment.pipeline.aggregate.finish(total)
    after = server_update(experiment, state, mean, before.clients)
    good = diverged == experiment.federation.clients
    after = jax.tree.map(lambda new, old: jnp.where(good, new, old), after, before)
    return after, diverged, of_all


def _sum_over_devices(total: Total) -> Total:
    """The devices' totals, added up."""
    leaves, tree = jax.tree.flatten(total)
    small = [leaf for leaf in leaves if leaf.size < _LARGE]
    flat, shaped = ravel_pytree(small)
    sums = iter(shaped(jax.lax.psum(flat, AXIS)))
    added = [next(sums) if leaf.size < _LARGE else jax.lax.psum(leaf, AXIS) for leaf in leaves]
    summed: Total = jax.tree.unflatten(tree, added)
    return summed
