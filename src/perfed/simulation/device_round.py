"""A round as one device sees it: its share of the cohort takes turns, then all devices meet."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Int

from perfed.core.objective import Params
from perfed.simulation.devices import AXIS, compiler_options
from perfed.simulation.engine import kept_by
from perfed.simulation.experiment import Contribution, DeviceData, Kept, Setup, State

EVERYWHERE = PartitionSpec()
SHARED_OUT = PartitionSpec(AXIS)

# Smaller leaves than this are added up as one: to meet takes devices 50 us, and processes 2 ms. Of
# larger ones, putting them together and apart takes longer than it saves.
_LARGE = 10_000


def on_devices(mesh: Mesh, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    """A function of what one device has, compiled for all of them."""
    shared_out = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(shared_out, compiler_options=compiler_options())


class Share(NamedTuple):
    """What comes of a device's share of the cohort.

    Attributes:
        total: the sums of its clients' weights, changes and iterates.
        kept: what each of its clients keeps.
        culprit: the number of a client whose update is not finite; that of all clients: none.
        uplink: the length of each one's messages.
    """

    total: Any
    kept: Kept
    culprit: Int[Array, ""]
    uplink: Int[Array, " seats"]


def take_turns(
    setup: Setup,
    world: DeviceData,
    state: State,
    w: Params,
    clients: Int[Array, " seats"],
    present: Bool[Array, " seats"],
    chunk: int,
) -> Share:
    """The turns of a device's clients, chunk by chunk.

    Args:
        setup: what is simulated.
        world: where the clients are.
        state: where the run stands; what clients keep is in the order of the world.
        w: the model as they were sent it.
        clients: who has the device's seats, by their places in the world.
        present: which seats are taken; the work of the others is thrown away.
        chunk: how many at once.
    """
    nobody = setup.federation.clients

    def add_chunk(
        total: Any, seats: tuple[Int[Array, " chunk"], Bool[Array, " chunk"]]
    ) -> tuple[Any, Any]:
        clients, present = seats
        own = kept_by(clients, state.kept)
        given: Contribution = jax.vmap(setup.take_turn, in_axes=(None, None, 0, None, 0))(
            world, w, own, state.round, clients
        )
        weight = jnp.where(present, given.weight, 0.0)

        def weighted_sum(leaf: Array) -> Array:
            # An empty seat repeats some client's work; what it gives is thrown away here.
            leaf = jnp.where(_like(present, leaf), leaf, 0.0)
            # As a product: on a CPU a sum over the clients took a tenth of a whole round.
            return jnp.tensordot(weight.astype(leaf.dtype), leaf, 1, precision="highest")

        sums = jax.tree.map(weighted_sum, (given.change, given.iterate))
        culprit = jnp.where(present & ~given.finite, world.number[clients], nobody).min()
        total = jax.tree.map(jnp.add, total, (weight.sum(), *sums))
        return total, (given.kept, culprit, given.bytes)

    zeros = (jnp.zeros(()), *jax.tree.map(jnp.zeros_like, (state.w, state.iterate)))
    parts = (clients.reshape(-1, chunk), present.reshape(-1, chunk))
    total, (kept, culprits, uplink) = jax.lax.scan(add_chunk, zeros, parts)
    kept = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), kept)
    return Share(total, kept, culprits.min(), uplink.ravel())


def meet(
    setup: Setup, state: State, share: Share, *told: Int[Array, " seats"]
) -> tuple[State, Int[Array, ""], list[Int[Array, " all_seats"]]]:
    """The next state, but for what clients keep, and a client whose update was not finite.

    If there is one, the state stands still. Also what devices tell each other of their seats
    (`told`), of all of them.
    """
    total = _added_up(share.total)
    everyones = jax.lax.all_gather(jnp.concatenate([share.culprit[None], *told]), AXIS)
    culprit = everyones[:, 0].min()
    of_all = [part.ravel() for part in jnp.split(everyones[:, 1:], len(told), axis=1)]
    nothing = Kept(None, None)
    after = setup.close_round(state, total, nothing)
    good = culprit == setup.federation.clients
    after = jax.tree.map(
        lambda new, old: jnp.where(good, new, old), after, state._replace(kept=nothing)
    )
    return after, culprit, of_all


def _added_up(total: Any) -> Any:
    """The devices' sums, added up."""
    leaves, tree = jax.tree.flatten(total)
    small = [leaf for leaf in leaves if leaf.size < _LARGE]
    flat, shaped = ravel_pytree(small)
    sums = iter(shaped(jax.lax.psum(flat, AXIS)))
    added_up = [next(sums) if leaf.size < _LARGE else jax.lax.psum(leaf, AXIS) for leaf in leaves]
    return jax.tree.unflatten(tree, added_up)


def _like(vector: Array, leaf: Array) -> Array:
    """A vector over clients, shaped to multiply a leaf whose first axis they are."""
    return vector.reshape(-1, *[1] * (leaf.ndim - 1))
