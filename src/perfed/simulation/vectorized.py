"""The fast engine: clients vectorized on each device and divided over all of them.

Blocks of rounds are one compiled program, in which every device takes its part of each cohort,
chunk by chunk, and the devices add up their totals. Nothing returns to the host between rounds.
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
from perfed.core.trees import row, stack, tree_bytes, tree_size, unstack
from perfed.simulation.cohort_reader import replicated_array
from perfed.simulation.device_round import (
    REPLICATED,
    SHARDED,
    all_reduce,
    on_devices,
    update_clients,
)
from perfed.simulation.devices import AXIS, device_mesh
from perfed.simulation.engine import (
    ClientFunction,
    Clients,
    MappedFunctions,
    RoundsResult,
    Simulator,
    Traffic,
)
from perfed.simulation.experiment import DeviceData, EngineState, Experiment, Variables
from perfed.simulation.layout import Layout
from perfed.simulation.round import broadcast

# The traffic of a block of rounds comes back with it, so a block is at most so long.
_MOST_ROUNDS = 256

# Of all runs that are computed at once, clients may keep so many bytes in all, models included.
_BYTES_OF_RUNS = 4 * 2**30

# On a CPU, runs of small models are faster side by side: with 610 parameters a round takes 1.5 ms
# instead of 1.85; but with 68,000 it is 25 instead of 19.5. The limit is between the two.
_SMALL = 4000

# A state, a client whose update was not finite (or the number of clients), and the rounds' traffic.
_Progress = tuple[EngineState, Int[Array, ""], tuple[Array, Array, Array]]


@final
@dataclass(frozen=True)
class Vectorized(Simulator):
    """Clients in parallel.

    Attributes:
        experiment: what is trained.
        devices: how many devices; None: all.
        chunk: at most so many clients at once on a device; None: as many as fit in memory well.
    """

    experiment: Experiment
    devices: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None:
            require_count("chunk", self.chunk)
        _ = self._mesh  # checks the devices now, before anything heavy

    @cached_property
    def _mesh(self) -> Mesh:
        return device_mesh(self.devices)

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self.experiment, self._mesh, self.chunk)

    @cached_property
    def _data(self) -> DeviceData:
        return self.experiment.device_data(partial(replicated_array, mesh=self._mesh))

    def init(self) -> EngineState:
        """The state before the first round."""
        # Large data take as long to be copied as the program to be compiled that draws a model.
        with ThreadPoolExecutor(1) as meanwhile:
            meanwhile.submit(lambda: self._data)
            state = self.experiment.init_state()
        placed: EngineState = jax.device_put(state, NamedSharding(self._mesh, REPLICATED))
        return placed

    def run_rounds(
        self, experiments: Sequence[Experiment], states: Sequence[EngineState], rounds: int
    ) -> list[RoundsResult]:
        """So many rounds, in blocks that are one call of a compiled program each."""
        outcomes: list[RoundsResult] = []
        for some, of_them in self._batches(experiments, states):
            outcomes += self._side_by_side(some, of_them, rounds)
        return outcomes

    def _side_by_side(
        self, experiments: Sequence[Experiment], states: Sequence[EngineState], rounds: int
    ) -> list[RoundsResult]:
        variables, states = [e.variables() for e in experiments], list(states)
        nobody, cohort = self.experiment.federation.clients, self.experiment.cohort
        diverged = np.full(len(experiments), nobody)
        parts = [[Traffic.none(cohort)] for _ in experiments]
        for done in range(0, rounds, _MOST_ROUNDS):
            count = min(_MOST_ROUNDS, rounds - done)
            states, lost, log = self._block(variables, self._data, states, jnp.int32(count))
            diverged = np.asarray(lost)
            if (diverged < nobody).all():
                break
            picked, uplink, downlink = (np.asarray(part)[:, :count] for part in log)
            for i, own in enumerate(parts):
                own.append(Traffic(picked[i, :, :cohort], uplink[i, :, :cohort], downlink[i]))
        return [
            (own, Traffic.concatenate(part))
            if client == nobody
            else experiment.diverged(int(own.round), int(client))
            for experiment, own, part, client in zip(
                experiments, states, parts, diverged, strict=True
            )
        ]

    def _batches(
        self, experiments: Sequence[Experiment], states: Sequence[EngineState]
    ) -> Iterator[tuple[Sequence[Experiment], Sequence[EngineState]]]:
        """Runs to compute side by side, which is faster than one after another if there is room.

        An accelerator has room for more than one; so have a CPU's cores if what they do is small.
        """
        size = min(self._runs_at_once(states[0]), len(experiments))
        for i in range(0, len(experiments), size):
            yield experiments[i : i + size], states[i : i + size]

    def _runs_at_once(self, state: EngineState) -> int:
        if self._layout.on_cpu and tree_size(self.experiment.model_shape) >= _SMALL:
            return 1
        # Personal models, and the ones before them.
        models = 2 * self.experiment.federation.clients * self._layout.model_bytes
        most = _BYTES_OF_RUNS // (tree_bytes(state.clients) + models)
        return max(1, min(most, self._layout.at_once))

    @cached_property
    def _block(self) -> Any:
        nobody = self.experiment.federation.clients

        def block(
            variables: Sequence[Variables],
            data: DeviceData,
            states: Sequence[EngineState],
            count: Array,
        ) -> tuple[list[EngineState], Array, tuple[Array, Array, Array]]:
            runs = len(states)
            slots = self._layout.slots(self.experiment.cohort, runs)[1] * self._mesh.size
            empty = (
                jnp.zeros((runs, _MOST_ROUNDS, slots), jnp.int32),
                jnp.zeros((runs, _MOST_ROUNDS, slots), jnp.int32),
                jnp.zeros((runs, _MOST_ROUNDS), jnp.int32),
            )
            first = (stack(states), jnp.full(runs, nobody, jnp.int32), empty)
            of_all = stack(variables)

            def one_round(variables: Variables, state: EngineState) -> _Progress:
                return self._round(self.experiment.with_variables(variables), data, state, runs)

            def proceed(carry: tuple[Int[Array, ""], _Progress]) -> Bool[Array, ""]:
                done, (_, diverged, _) = carry
                return (done < count) & (diverged == nobody).any()

            def next_round(
                carry: tuple[Int[Array, ""], _Progress],
            ) -> tuple[Int[Array, ""], _Progress]:
                done, (state, _, log) = carry
                # A run that has diverged stands still, and does so again while others go on.
                after, diverged, traffic = _in_each_run(one_round, runs)(of_all, state)
                log = jax.tree.map(lambda all, new: all.at[:, done].set(new), log, traffic)
                return done + 1, (after, diverged, log)

            _, (state, diverged, log) = jax.lax.while_loop(
                proceed, next_round, (jnp.int32(0), first)
            )
            return unstack(state), diverged, log

        return on_devices(self._mesh, block, (REPLICATED,) * 4, REPLICATED)

    def _round(
        self, experiment: Experiment, data: DeviceData, state: EngineState, runs: int
    ) -> _Progress:
        """One round as one device sees it; also a client whose update was not finite, if any."""
        nobody = experiment.federation.clients
        sent = broadcast(experiment, state)
        chunk, slots = self._layout.slots(experiment.cohort, runs)
        mine = experiment.sample_cohort(
            state.round, jax.lax.axis_index(AXIS) * slots + jnp.arange(slots, dtype=jnp.int32)
        )
        present, clients = mine < nobody, jnp.minimum(mine, nobody - 1)
        update = update_clients(experiment, data, state, sent, clients, present, chunk)
        after, diverged, (cohort, uplink) = all_reduce(
            experiment, state, update, mine, update.uplink
        )
        written = jnp.where(diverged == nobody, cohort, nobody)

        def write(records: Array, new: Array) -> Array:
            return records.at[written].set(jax.lax.all_gather(new, AXIS, tiled=True), mode="drop")

        records = jax.tree.map(write, state.clients, update.records)
        return after._replace(clients=records), diverged, (cohort, uplink, sent.bytes)

    def map_clients_of_runs(self, function: ClientFunction) -> MappedFunctions:
        """All clients in parallel, divided over the devices so that each has as much to do."""

        def share(
            variables: Sequence[Variables],
            data: DeviceData,
            states: Sequence[EngineState],
            clients: Int[Array, " slots"],
        ) -> list[Any]:
            runs = len(states)
            chunk, _ = self._layout.slots(len(clients) * self._mesh.size, runs)

            def one(variables: Variables, state: EngineState, client: Int[Array, ""]) -> Any:
                experiment = self.experiment.with_variables(variables)
                record = row(state.clients, client)
                return function(experiment, data, state.without_clients(), record, client)

            def of_run(variables: Variables, state: EngineState) -> Any:
                some = partial(one, variables, state)
                results = jax.lax.map(jax.vmap(some), clients.reshape(-1, chunk))
                return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), results)

            return unstack(_in_each_run(of_run, runs)(stack(variables), stack(states)))

        specs = (REPLICATED, REPLICATED, REPLICATED, SHARDED)
        compiled = on_devices(self._mesh, share, specs, SHARDED)
        sizes = self.experiment.federation.train.size

        def run(
            experiments: Sequence[Experiment],
            states: Sequence[EngineState],
            clients: Clients | None = None,
        ) -> list[Any]:
            chosen = np.arange(len(sizes)) if clients is None else np.asarray(clients)
            require(len(chosen) >= 1, "clients", clients, "name at least one")
            outcomes = []
            for some, of_them in self._batches(experiments, states):
                outcomes += side_by_side(some, of_them, chosen)
            return outcomes

        def side_by_side(
            experiments: Sequence[Experiment],
            states: Sequence[EngineState],
            chosen: Int[np.ndarray, " clients"],
        ) -> list[Any]:
            variables = [experiment.variables() for experiment in experiments]
            _, slots = self._layout.slots(len(chosen), len(experiments))
            all_slots = slots * self._mesh.size
            # By size, so that clients of one chunk take about as long; assigned to devices in turn.
            order = np.argsort(sizes[chosen], kind="stable")
            placed = np.resize(order, all_slots).reshape(slots, self._mesh.size).T.ravel()
            results = compiled(variables, self._data, list(states), jnp.asarray(chosen[placed]))
            slot = np.empty(len(chosen), int)
            slot[placed] = np.arange(all_slots)
            # Put in order on the host: on the devices every leaf would be another program that
            # they all have to run, and two such programs at once may wait for each other forever.
            ordered: list[Any] = jax.tree.map(lambda leaf: leaf[slot], jax.device_get(results))
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
