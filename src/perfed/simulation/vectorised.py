"""The fast engine: clients vectorised on each device and shared out over all of them.

Blocks of rounds are one compiled program, in which every device takes its part of each cohort,
chunk by chunk, and the devices add up their sums. Nothing returns to the host between rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from perfed.errors import require, require_count
from perfed.objective import BLOCK
from perfed.simulation.devices import AXIS, mesh
from perfed.simulation.engine import ClientFunction, Engine, OnClients, Traffic, kept_by
from perfed.simulation.setup import Contribution, Kept, Setup, State, World

# A client at work holds several copies of the model (iterates, gradients) and a block of examples;
# all the clients that a device vectorises at once should stay below this many bytes of them.
_COPIES = 8
_BYTES_AT_ONCE = 512 * 2**20

# The traffic of a block of rounds comes back with it, so a block is at most so long.
_LOG = 256

EVERYWHERE = PartitionSpec()
SHARED_OUT = PartitionSpec(AXIS)

# A state, a client whose update was not finite (or the number of clients), and the rounds' traffic.
_Progress = tuple[State, Int[Array, ""], tuple[Array, Array, Array]]
_Block = Callable[[World, State, Int[Array, ""]], _Progress]


@final
@dataclass(frozen=True)
class Vectorised(Engine):
    """Clients in parallel.

    Attributes:
        setup: what is simulated.
        devices: how many devices; None: all.
        chunk: at most so many clients at once on a device; None: as many as fit in memory well.
    """

    setup: Setup
    devices: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None:
            require_count("chunk", self.chunk)
        _ = self._mesh  # asks for the devices now, before anything heavy

    @cached_property
    def _mesh(self) -> Mesh:
        return mesh(self.devices)

    @cached_property
    def _world(self) -> World:
        world: World = jax.device_put(self.setup.world(), NamedSharding(self._mesh, EVERYWHERE))
        return world

    def start(self) -> State:
        """The state before the first round."""
        state = self.setup.first_state(self._world)
        placed: State = jax.device_put(state, NamedSharding(self._mesh, EVERYWHERE))
        return placed

    def record(self, state: State, rounds: int) -> tuple[State, Traffic]:
        """So many rounds, in blocks that are one call of a compiled program each."""
        parts, cohort = [self.nothing_sent()], self.setup.cohort
        for done in range(0, rounds, _LOG):
            count = min(_LOG, rounds - done)
            state, culprit, log = self._block(self._world, state, state.round + count)
            if int(culprit) < self.setup.federation.clients:
                raise self.setup.diverged(int(state.round), int(culprit))
            picked, uplink, downlink = (np.asarray(part)[:count] for part in log)
            parts.append(Traffic(picked[:, :cohort], uplink[:, :cohort], downlink))
        return state, Traffic.joined(parts)

    @cached_property
    def _block(self) -> "_Block":
        nobody = self.setup.federation.clients

        def block(world: World, state: State, end: Int[Array, ""]) -> _Progress:
            seats = self._layout(self.setup.cohort, state)[1] * self._mesh.size
            first = state.round
            empty = (
                jnp.zeros((_LOG, seats), jnp.int32),
                jnp.zeros((_LOG, seats), jnp.int32),
                jnp.zeros(_LOG, jnp.int32),
            )

            def going_on(carry: _Progress) -> Bool[Array, ""]:
                state, culprit, _ = carry
                return (state.round < end) & (culprit == nobody)

            def one_round(carry: _Progress) -> _Progress:
                state, _, log = carry
                after, culprit, traffic = self._round(world, state)
                place = state.round - first
                log = jax.tree.map(lambda all, new: all.at[place].set(new), log, traffic)
                return after, culprit, log

            return jax.lax.while_loop(going_on, one_round, (state, jnp.int32(nobody), empty))

        compiled: _Block = self._on_devices(block, (EVERYWHERE,) * 3, EVERYWHERE)
        return compiled

    def _round(self, world: World, state: State) -> _Progress:
        """One round as one device sees it; also a client whose update was not finite, if any."""
        setup, nobody = self.setup, self.setup.federation.clients
        w, downlink = setup.broadcast(state.w, state.round)
        chunk, seats = self._layout(setup.cohort, state)
        mine = setup.pick_cohort(
            state.round, jax.lax.axis_index(AXIS) * seats + jnp.arange(seats, dtype=jnp.int32)
        )

        def add_chunk(total: Any, clients: Int[Array, " chunk"]) -> tuple[Any, Any]:
            present = clients < nobody
            own = kept_by(jnp.minimum(clients, nobody - 1), state.kept)
            given: Contribution = jax.vmap(setup.take_turn, in_axes=(None, None, 0, None, 0))(
                world, w, own, state.round, jnp.minimum(clients, nobody - 1)
            )
            weight = jnp.where(present, given.weight, 0.0)

            def weighted_sum(leaf: Array) -> Array:
                # An empty seat repeats some client's work; what it gives is thrown away here.
                leaf = jnp.where(_like(present, leaf), leaf, 0.0)
                return jnp.sum(_like(weight, leaf).astype(leaf.dtype) * leaf, axis=0)

            sums = jax.tree.map(weighted_sum, (given.change, given.iterate))
            culprit = jnp.where(present & ~given.finite, clients, nobody).min()
            total = jax.tree.map(jnp.add, total, (weight.sum(), *sums))
            return total, (given.kept, culprit, given.bytes)

        zeros = (jnp.zeros(()), *jax.tree.map(jnp.zeros_like, (state.w, state.iterate)))
        total, (kept, culprits, uplink) = jax.lax.scan(add_chunk, zeros, mine.reshape(-1, chunk))
        total = jax.lax.psum(total, AXIS)
        culprit = jax.lax.pmin(culprits.min(), AXIS)

        good = culprit == nobody
        cohort = jax.lax.all_gather(mine, AXIS, tiled=True)
        written = jnp.where(good, cohort, nobody)

        def write(everyones: Array, new: Array) -> Array:
            new = jax.lax.all_gather(new, AXIS).reshape(-1, *everyones.shape[1:])
            return everyones.at[written].set(new, mode="drop")

        everyones = jax.tree.map(write, state.kept, kept)
        nothing = Kept(None, None)
        after = setup.close_round(state, total, nothing)
        after = jax.tree.map(
            lambda new, old: jnp.where(good, new, old), after, state._replace(kept=nothing)
        )
        traffic = (cohort, jax.lax.all_gather(uplink.ravel(), AXIS, tiled=True), downlink)
        return after._replace(kept=everyones), culprit, traffic

    def each_client(self, function: ClientFunction) -> OnClients:
        """All clients in parallel, dealt to the devices so that each has as much to do."""

        def share(world: World, state: State, clients: Int[Array, " seats"]) -> Any:
            chunk, _ = self._layout(clients.shape[0] * self._mesh.size, state)

            def one(client: Int[Array, ""]) -> Any:
                own = kept_by(client, state.kept)
                return function(world, state.w, own, state.round, client)

            results = jax.lax.map(jax.vmap(one), clients.reshape(-1, chunk))
            return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), results)

        compiled = self._on_devices(share, (EVERYWHERE, EVERYWHERE, SHARED_OUT), SHARED_OUT)
        sizes = self.setup.federation.train.size

        def run(state: State, clients: Sequence[int] | None = None) -> Any:
            chosen = np.arange(len(sizes)) if clients is None else np.asarray(clients)
            require(len(chosen) >= 1, "clients", clients, "name at least one")
            _, seats = self._layout(len(chosen), state)
            all_seats = seats * self._mesh.size
            # By size, so that clients of one chunk take about as long; dealt like cards.
            order = np.argsort(sizes[chosen], kind="stable")
            dealt = np.resize(order, all_seats).reshape(seats, self._mesh.size).T.ravel()
            results = compiled(self._world, state, jnp.asarray(chosen[dealt]))
            seat = np.empty(len(chosen), int)
            seat[dealt] = np.arange(all_seats)
            return jax.tree.map(lambda leaf: leaf[seat], results)

        return run

    def _layout(self, clients: int, state: State) -> tuple[int, int]:
        """How many of so many clients a device takes at once, and how many seats it has in all."""
        share = ceil(clients / self._mesh.size)
        model = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.w))
        block = BLOCK * 4 * prod(self.setup.federation.example_shape)
        limit = self.chunk or max(1, _BYTES_AT_ONCE // (_COPIES * model + 2 * block))
        chunks = ceil(share / limit)
        chunk = ceil(share / chunks)
        return chunk, chunk * chunks

    def _on_devices(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        return jax.jit(
            jax.shard_map(
                function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
            )
        )


def _like(vector: Array, leaf: Array) -> Array:
    """A vector over clients, shaped to multiply a leaf whose first axis they are."""
    return vector.reshape(-1, *[1] * (leaf.ndim - 1))
