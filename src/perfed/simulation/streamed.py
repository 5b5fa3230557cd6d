"""The engine for what does not fit: the cohort's rows are read as they are needed.

Memory and time grow with the cohort, not with the federation. A thread reads the next cohorts'
rows while this one is at work; what clients keep is in a store on disk. On several hosts each reads
the rows of its own part of a cohort.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from perfed.core.errors import DivergedError, require, require_count
from perfed.core.trees import row
from perfed.simulation.client_store import ClientStore, RunStore
from perfed.simulation.cohort_reader import CohortReader, on_host, replicated
from perfed.simulation.device_round import (
    REPLICATED,
    SHARDED,
    all_reduce,
    on_devices,
    update_clients,
)
from perfed.simulation.devices import AXIS, compiler_options, device_mesh
from perfed.simulation.engine import (
    ClientFunction,
    Clients,
    MappedFunctions,
    RoundsResult,
    Simulator,
    Traffic,
)
from perfed.simulation.experiment import (
    NO_RECORD,
    ClientRecord,
    DeviceData,
    EngineState,
    Experiment,
    Variables,
)
from perfed.simulation.hosts import is_multihost
from perfed.simulation.layout import Layout
from perfed.simulation.round import broadcast

# So many cohorts are read before they are needed.
_AHEAD: Final = 2
# So many clients of a device are scored between two readings.
_SCORED_AT_ONCE: Final = 128


class _LoadedCohort(NamedTuple):
    """A cohort and its rows."""

    cohort: Int[np.ndarray, "devices slots"]
    data: DeviceData


@final
@dataclass(frozen=True)
class Streamed(Simulator):
    """Clients in parallel, read a cohort at a time.

    A run goes one way: what clients keep is changed in its place.

    Attributes:
        experiment: what is trained.
        devices: how many devices; None: all.
        chunk: at most so many clients at once on a device; None: as many as fit in memory well.
        store: the folder for what clients keep; None: a temporary one.
    """

    experiment: Experiment
    devices: int | None = None
    chunk: int | None = None
    store: Path | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None:
            require_count("chunk", self.chunk)
        here = self.experiment.federation.has_examples
        require(here, "federation", "remote", "the clients' rows are not here to be read")
        _ = self._mesh  # checks the devices now, before anything heavy

    @cached_property
    def _mesh(self) -> Mesh:
        return device_mesh(self.devices)

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self.experiment, self._mesh, self.chunk)

    @cached_property
    def _reader(self) -> CohortReader:
        return CohortReader(self.experiment, self._mesh)

    @cached_property
    def _first_record(self) -> ClientRecord:
        """What one client keeps before its first round."""
        return self.experiment.init_record(self.experiment.init_params())

    @cached_property
    def run_store(self) -> RunStore | None:
        """What clients keep, if they keep anything."""
        if not jax.tree.leaves(self._first_record):
            return None
        clients = self.experiment.federation.clients
        return RunStore(ClientStore(self.store, clients, self._first_record))

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "reader")

    @cached_property
    def _loads(self) -> dict[tuple[int, int], Future[_LoadedCohort]]:
        return {}

    def init(self) -> EngineState:
        """The state before the first round."""
        state = self.experiment.init_server(self.experiment.init_params())
        placed: EngineState = replicated(state, self._mesh)
        return placed

    def run_rounds(
        self, experiments: Sequence[Experiment], states: Sequence[EngineState], rounds: int
    ) -> list[RoundsResult]:
        """One run after another."""
        one = len(experiments) == 1 or self.run_store is None
        require(one, "engine", "streamed", "runs of a method that keeps something go one at a time")
        outcomes: list[RoundsResult] = []
        for experiment, state in zip(experiments, states, strict=True):
            try:
                outcomes.append(self._rounds(experiment, state, rounds))
            except DivergedError as error:
                outcomes.append(error)
        return outcomes

    def _rounds(
        self, experiment: Experiment, state: EngineState, rounds: int
    ) -> tuple[EngineState, Traffic]:
        if rounds == 0:
            return state, Traffic.none(experiment.cohort)
        variables, nobody = experiment.variables(), experiment.federation.clients
        first = int(state.round)
        state, lost = replicated((state, jnp.int32(nobody)), self._mesh)
        store = self.run_store
        if store is not None:
            store.go_to(first)
        log: list[Any] = []
        for round in range(first, first + rounds):
            load = self._cohort(experiment, round)
            if store is not None:
                state = state._replace(clients=self._read_records(store, load.cohort))
            state, lost, uplink, downlink, records = self._round(variables, load.data, state, lost)
            log.append((load.cohort.ravel(), uplink, downlink))
            if store is not None:
                if int(lost) != nobody:
                    break
                taken = load.cohort.ravel() < nobody
                own = jax.tree.map(lambda leaf, taken=taken: leaf[taken], on_host(records))
                store.write(round, load.cohort.ravel()[taken], own)
            elif len(log) > _AHEAD:
                # No more cohorts in memory than are read ahead.
                jax.block_until_ready(log[-_AHEAD])
        if int(lost) != nobody:
            raise experiment.diverged(int(state.round), int(lost))
        cohort, uplink, downlink = map(np.array, zip(*on_host(log), strict=True))
        n = experiment.cohort
        return state, Traffic(cohort[:, :n], uplink[:, :n], downlink)

    def _read_records(
        self, store: RunStore, cohort: Int[np.ndarray, "devices slots"]
    ) -> ClientRecord:
        """What this cohort keeps, each client on its device."""
        mine = self._reader.mine(np.minimum(cohort, self.experiment.federation.clients - 1))
        stacked = store.store.read(mine.ravel())
        shape = mine.shape
        own: ClientRecord = jax.tree.map(
            lambda leaf: self._reader.placed(leaf.reshape(*shape, *leaf.shape[1:])), stacked
        )
        return own

    def _cohort(self, experiment: Experiment, round: int) -> _LoadedCohort:
        """This round's cohort and its rows; the next ones are being read meanwhile."""
        wanted = [(int(experiment.seed), round + i) for i in range(_AHEAD + 1)]
        for key in [key for key in self._loads if key not in wanted]:
            self._loads.pop(key).cancel()
        for key in wanted:
            if key not in self._loads:
                self._loads[key] = self._pool.submit(self._load, experiment, key[1])
        return self._loads.pop(wanted[0]).result()

    def _load(self, experiment: Experiment, round: int) -> _LoadedCohort:
        cohort = np.asarray(self._sample(np.int32(experiment.seed), np.int32(round)))
        cohort = cohort.reshape(self._mesh.size, -1)
        return _LoadedCohort(cohort, self._reader.device_data(cohort, test=False))

    @cached_property
    def _sample(self) -> Any:
        slots = self._layout.slots(self.experiment.cohort)[1] * self._mesh.size

        def sample(seed: Int[Array, ""], round: Int[Array, ""]) -> Int[Array, " slots"]:
            variables = Variables(seed, self.experiment.method)
            experiment = self.experiment.with_variables(variables)
            return experiment.sample_cohort(round, jnp.arange(slots, dtype=jnp.int32))

        return jax.jit(sample, compiler_options=compiler_options())

    @cached_property
    def _round(self) -> Any:
        chunk, slots = self._layout.slots(self.experiment.cohort)
        nobody = self.experiment.federation.clients

        def one_round(
            variables: Variables, data: DeviceData, state: EngineState, lost: Int[Array, ""]
        ) -> tuple[EngineState, Int[Array, ""], Array, Array, ClientRecord]:
            experiment = self.experiment.with_variables(variables)
            sent = broadcast(experiment, state)
            slot, present = jnp.arange(slots), data.number < nobody
            update = update_clients(experiment, data, state, sent, slot, present, chunk)
            after, diverged, (uplink,) = all_reduce(experiment, state, update, update.uplink)
            # Of a run that is lost nothing changes any more: rounds may be asked for in advance.
            still = lost != nobody
            after = jax.tree.map(
                lambda new, old: jnp.where(still, old, new), after, state.without_clients()
            )
            records = self._gather(update.records)
            return after, jnp.where(still, lost, diverged), uplink, sent.bytes, records

        records = REPLICATED if is_multihost() else SHARDED
        return on_devices(
            self._mesh,
            one_round,
            (REPLICATED, self._reader.specs(test=False), _STATE_SPEC, REPLICATED),
            (REPLICATED, REPLICATED, REPLICATED, REPLICATED, records),
        )

    def _gather(self, tree: Any) -> Any:
        """What a device has, sent to all processes if there are several."""
        if not is_multihost():
            return tree
        return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, AXIS, tiled=True), tree)

    def map_clients_of_runs(self, function: ClientFunction) -> MappedFunctions:
        """Some clients at a time, the largest first, so that what has room for them has for all."""
        sizes = np.asarray(self.experiment.federation.train.size)

        def run(
            experiments: Sequence[Experiment],
            states: Sequence[EngineState],
            clients: Clients | None = None,
        ) -> list[Any]:
            chosen = np.arange(len(sizes)) if clients is None else np.asarray(clients)
            require(len(chosen) >= 1, "clients", clients, "name at least one")
            return [one_run(*of_run, chosen) for of_run in zip(experiments, states, strict=True)]

        def one_run(
            experiment: Experiment, state: EngineState, chosen: Int[np.ndarray, " clients"]
        ) -> Any:
            chunk, slots = self._slots_to_score(len(chosen))
            store = self.run_store
            if store is not None:
                store.go_to(int(state.round))
            state = replicated(state, self._mesh)
            group = slots * self._mesh.size
            order = np.argsort(-sizes[chosen], kind="stable")
            places = np.resize(order, -(-len(chosen) // group) * group)
            groups = places.reshape(-1, slots, self._mesh.size).swapaxes(1, 2)
            compiled = self._map(function, chunk, slots)
            ahead = [
                self._pool.submit(self._reader.device_data, chosen[some], True)
                for some in groups[:_AHEAD]
            ]
            found = []
            for i, some in enumerate(groups):
                if i + _AHEAD < len(groups):
                    more = chosen[groups[i + _AHEAD]]
                    ahead.append(self._pool.submit(self._reader.device_data, more, True))
                own = NO_RECORD if store is None else self._read_records(store, chosen[some])
                data = ahead.pop(0).result()
                of_group = state._replace(clients=own)
                # One at a time: processes must not meet in different ones.
                found.append(on_host(compiled(experiment.variables(), data, of_group)))
            results = jax.tree.map(lambda *leaves: np.concatenate(leaves), *found)
            slot = np.empty(len(chosen), int)
            slot[groups.ravel()] = np.arange(groups.size)
            return jax.tree.map(lambda leaf: leaf[slot], results)

        return run

    def _slots_to_score(self, clients: int) -> tuple[int, int]:
        at_most = min(self._layout.at_once, _SCORED_AT_ONCE) * self._mesh.size
        return self._layout.slots(min(clients, at_most))

    def _map(self, function: ClientFunction, chunk: int, slots: int) -> Any:
        key = (function, chunk, slots)
        if key not in self._programs:

            def share(variables: Variables, data: DeviceData, state: EngineState) -> Any:
                experiment = self.experiment.with_variables(variables)

                def one(client: Int[Array, ""]) -> Any:
                    record = row(state.clients, client)
                    return function(experiment, data, state.without_clients(), record, client)

                results = jax.lax.map(jax.vmap(one), jnp.arange(slots).reshape(-1, chunk))
                flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), results)
                return self._gather(flat)

            self._programs[key] = on_devices(
                self._mesh,
                share,
                (REPLICATED, self._reader.specs(test=True), _STATE_SPEC),
                REPLICATED if is_multihost() else SHARDED,
            )
        return self._programs[key]

    @cached_property
    def _programs(self) -> dict[Any, Any]:
        return {}


# Where the parts of a state lie.
_STATE_SPEC: Final[Any] = EngineState(REPLICATED, REPLICATED, REPLICATED, SHARDED)  # type: ignore[arg-type]
