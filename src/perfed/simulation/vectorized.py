"""The fast engine: clients vectorized on each device and shared out over all of them.

Blocks of rounds are one compiled program, in which every device takes its part of each cohort,
chunk by chunk, and the devices add up their sums. Nothing returns to the host between rounds.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Int

from perfed.core.errors import require, require_count
from perfed.simulation.cohort_reader import on_all
from perfed.simulation.device_round import EVERYWHERE, SHARED_OUT, meet, on_devices, take_turns
from perfed.simulation.devices import AXIS, mesh
from perfed.simulation.engine import (
    Advanced,
    ClientFunction,
    Clients,
    Engine,
    OnAllRuns,
    Traffic,
    kept_by,
)
from perfed.simulation.experiment import DeviceData, Numbers, Setup, State
from perfed.simulation.layout import Layout

# The traffic of a block of rounds comes back with it, so a block is at most so long.
_LOG = 256

# Of all runs that are computed at once, clients may keep so many bytes in all, models included.
_BYTES_OF_RUNS = 4 * 2**30

# On a CPU, runs of small models are faster side by side: with 610 parameters a round takes 1.5 ms
# instead of 1.85; but with 68,000 it is 25 instead of 19.5. The limit is between the two.
_SMALL = 4000

# A state, a client whose update was not finite (or the number of clients), and the rounds' traffic.
_Progress = tuple[State, Int[Array, ""], tuple[Array, Array, Array]]


@final
@dataclass(frozen=True)
class Vectorized(Engine):
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
    def _layout(self) -> Layout:
        return Layout(self.setup, self._mesh, self.chunk)

    @cached_property
    def _world(self) -> DeviceData:
        return self.setup.world(partial(on_all, mesh=self._mesh))

    @property
    def aside(self) -> None:
        """All is in the state."""
        return None

    def start(self) -> State:
        """The state before the first round."""
        # Large data take as long to be copied as the program to be compiled that draws a model.
        with ThreadPoolExecutor(1) as meanwhile:
            meanwhile.submit(lambda: self._world)
            state = self.setup.first_state()
        placed: State = jax.device_put(state, NamedSharding(self._mesh, EVERYWHERE))
        return placed

    def record_all(
        self, setups: Sequence[Setup], states: Sequence[State], rounds: int
    ) -> list[Advanced]:
        """So many rounds, in blocks that are one call of a compiled program each."""
        outcomes: list[Advanced] = []
        for some, of_them in self._batches(setups, states):
            outcomes += self._side_by_side(some, of_them, rounds)
        return outcomes

    def _side_by_side(
        self, setups: Sequence[Setup], states: Sequence[State], rounds: int
    ) -> list[Advanced]:
        numbers, states = [setup.numbers() for setup in setups], list(states)
        nobody, cohort = self.setup.federation.clients, self.setup.cohort
        culprit = np.full(len(setups), nobody)
        parts = [[self.nothing_sent()] for _ in setups]
        for done in range(0, rounds, _LOG):
            count = min(_LOG, rounds - done)
            states, lost, log = self._block(numbers, self._world, states, jnp.int32(count))
            culprit = np.asarray(lost)
            if (culprit < nobody).all():
                break
            picked, uplink, downlink = (np.asarray(part)[:, :count] for part in log)
            for i, own in enumerate(parts):
                own.append(Traffic(picked[i, :, :cohort], uplink[i, :, :cohort], downlink[i]))
        return [
            (own, Traffic.joined(part))
            if client == nobody
            else setup.diverged(int(own.round), int(client))
            for setup, own, part, client in zip(setups, states, parts, culprit, strict=True)
        ]

    def _batches(
        self, setups: Sequence[Setup], states: Sequence[State]
    ) -> Iterator[tuple[Sequence[Setup], Sequence[State]]]:
        """Runs to compute side by side, which is faster than one after another if there is room.

        An accelerator has room for more than one; so have a CPU's cores if what they do is small.
        """
        size = min(self._room(states[0]), len(setups))
        for i in range(0, len(setups), size):
            yield setups[i : i + size], states[i : i + size]

    def _room(self, state: State) -> int:
        """How many runs are computed side by side."""
        parameters = int(sum(leaf.size for leaf in jax.tree.leaves(state.w)))
        if self._layout.on_cpu and parameters >= _SMALL:
            return 1
        kept = int(sum(leaf.nbytes for leaf in jax.tree.leaves(state.kept)))
        # Personal models, and the ones before them.
        models = 2 * self.setup.federation.clients * self._layout.model_bytes
        return max(1, min(_BYTES_OF_RUNS // (kept + models), self._layout.at_once))

    @cached_property
    def _block(self) -> Any:
        nobody = self.setup.federation.clients

        def block(
            numbers: Sequence[Numbers], world: DeviceData, states: Sequence[State], count: Array
        ) -> tuple[list[State], Array, tuple[Array, Array, Array]]:
            runs = len(states)
            seats = self._layout.of(self.setup.cohort, runs)[1] * self._mesh.size
            empty = (
                jnp.zeros((runs, _LOG, seats), jnp.int32),
                jnp.zeros((runs, _LOG, seats), jnp.int32),
                jnp.zeros((runs, _LOG), jnp.int32),
            )
            first = (_stacked(states), jnp.full(runs, nobody, jnp.int32), empty)
            of_all = _stacked(numbers)

            def one_round(numbers: Numbers, state: State) -> _Progress:
                return self._round(self.setup.with_numbers(numbers), world, state, runs)

            def going_on(carry: tuple[Int[Array, ""], _Progress]) -> Bool[Array, ""]:
                done, (_, culprit, _) = carry
                return (done < count) & (culprit == nobody).any()

            def next_round(
                carry: tuple[Int[Array, ""], _Progress],
            ) -> tuple[Int[Array, ""], _Progress]:
                done, (state, _, log) = carry
                # A run that has diverged stands still, and does so again while others go on.
                after, culprit, traffic = _in_each_run(one_round, runs)(of_all, state)
                log = jax.tree.map(lambda all, new: all.at[:, done].set(new), log, traffic)
                return done + 1, (after, culprit, log)

            _, (state, culprit, log) = jax.lax.while_loop(
                going_on, next_round, (jnp.int32(0), first)
            )
            return _unstacked(state), culprit, log

        return on_devices(self._mesh, block, (EVERYWHERE,) * 4, EVERYWHERE)

    def _round(self, setup: Setup, world: DeviceData, state: State, runs: int) -> _Progress:
        """One round as one device sees it; also a client whose update was not finite, if any."""
        nobody = self.setup.federation.clients
        w, downlink = setup.broadcast(state.w, state.round)
        chunk, seats = self._layout.of(setup.cohort, runs)
        mine = setup.pick_cohort(
            state.round, jax.lax.axis_index(AXIS) * seats + jnp.arange(seats, dtype=jnp.int32)
        )
        present, clients = mine < nobody, jnp.minimum(mine, nobody - 1)
        share = take_turns(setup, world, state, w, clients, present, chunk)
        after, culprit, (cohort, uplink) = meet(setup, state, share, mine, share.uplink)
        written = jnp.where(culprit == nobody, cohort, nobody)

        def write(everyones: Array, new: Array) -> Array:
            return everyones.at[written].set(jax.lax.all_gather(new, AXIS, tiled=True), mode="drop")

        everyones = jax.tree.map(write, state.kept, share.kept)
        traffic = (cohort, uplink, downlink)
        return after._replace(kept=everyones), culprit, traffic

    def each_client_of_all(self, function: ClientFunction) -> OnAllRuns:
        """All clients in parallel, dealt to the devices so that each has as much to do."""

        def share(
            numbers: Sequence[Numbers],
            world: DeviceData,
            states: Sequence[State],
            clients: Int[Array, " seats"],
        ) -> list[Any]:
            runs = len(states)
            chunk, _ = self._layout.of(len(clients) * self._mesh.size, runs)

            def one(numbers: Numbers, state: State, client: Int[Array, ""]) -> Any:
                own = kept_by(client, state.kept)
                setup = self.setup.with_numbers(numbers)
                return function(setup, world, state.w, own, state.round, client)

            def of_run(numbers: Numbers, state: State) -> Any:
                some = partial(one, numbers, state)
                results = jax.lax.map(jax.vmap(some), clients.reshape(-1, chunk))
                return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), results)

            return _unstacked(_in_each_run(of_run, runs)(_stacked(numbers), _stacked(states)))

        shared_out = (EVERYWHERE, EVERYWHERE, EVERYWHERE, SHARED_OUT)
        compiled = on_devices(self._mesh, share, shared_out, SHARED_OUT)
        sizes = self.setup.federation.train.size

        def run(
            setups: Sequence[Setup], states: Sequence[State], clients: Clients | None = None
        ) -> list[Any]:
            chosen = np.arange(len(sizes)) if clients is None else np.asarray(clients)
            require(len(chosen) >= 1, "clients", clients, "name at least one")
            outcomes = []
            for some, of_them in self._batches(setups, states):
                outcomes += side_by_side(some, of_them, chosen)
            return outcomes

        def side_by_side(
            setups: Sequence[Setup], states: Sequence[State], chosen: Int[np.ndarray, " clients"]
        ) -> list[Any]:
            numbers = [setup.numbers() for setup in setups]
            _, seats = self._layout.of(len(chosen), len(setups))
            all_seats = seats * self._mesh.size
            # By size, so that clients of one chunk take about as long; dealt like cards.
            order = np.argsort(sizes[chosen], kind="stable")
            dealt = np.resize(order, all_seats).reshape(seats, self._mesh.size).T.ravel()
            results = compiled(numbers, self._world, list(states), jnp.asarray(chosen[dealt]))
            seat = np.empty(len(chosen), int)
            seat[dealt] = np.arange(all_seats)
            # Put in order on the host: on the devices every leaf would be another program that
            # they have to meet in, and two such programs at once may wait for each other for ever.
            ordered: list[Any] = jax.tree.map(lambda leaf: leaf[seat], jax.device_get(results))
            return ordered

        return run


def _in_each_run(function: Callable[..., Any], runs: int) -> Callable[..., Any]:
    """A function of one run, made into one of all, which are stacked along a first axis."""
    if runs > 1:
        return jax.vmap(function)

    def alone(*arguments: Any) -> Any:
        # A vectorized dimension of one makes programs for the CPU a third slower.
        result = function(*jax.tree.map(lambda leaf: leaf[0], arguments))
        return jax.tree.map(lambda leaf: leaf[None], result)

    return alone


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _unstacked(tree: Any) -> list[Any]:
    runs = len(jax.tree.leaves(tree)[0])
    return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(runs)]
