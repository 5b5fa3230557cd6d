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
from perfed.simulation.client_store import ClientStore, KeptAside
from perfed.simulation.cohort_reader import Reader, everywhere, on_host
from perfed.simulation.device_round import EVERYWHERE, SHARED_OUT, meet, on_devices, take_turns
from perfed.simulation.devices import AXIS, compiler_options, mesh
from perfed.simulation.engine import (
    Advanced,
    ClientFunction,
    Clients,
    Engine,
    OnAllRuns,
    Traffic,
    kept_by,
)
from perfed.simulation.experiment import DeviceData, Kept, Numbers, Setup, State
from perfed.simulation.hosts import several
from perfed.simulation.layout import Layout

# So many cohorts are read before they are needed.
_AHEAD: Final = 2
# So many clients of a device are scored between two readings.
_SCORED_AT_ONCE: Final = 128
_NOTHING: Final = Kept(None, None)


class _Load(NamedTuple):
    """A cohort and its rows."""

    cohort: Int[np.ndarray, "devices seats"]
    world: DeviceData


@final
@dataclass(frozen=True)
class Streamed(Engine):
    """Clients in parallel, read a cohort at a time.

    A run goes one way: what clients keep is changed in its place.

    Attributes:
        setup: what is simulated.
        devices: how many devices; None: all.
        chunk: at most so many clients at once on a device; None: as many as fit in memory well.
        store: the folder for what clients keep; None: one that is gone with the engine.
    """

    setup: Setup
    devices: int | None = None
    chunk: int | None = None
    store: Path | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None:
            require_count("chunk", self.chunk)
        here = self.setup.federation.here
        require(here, "federation", "told", "the clients' rows are not here to be read")
        _ = self._mesh  # asks for the devices now, before anything heavy

    @cached_property
    def _mesh(self) -> Mesh:
        return mesh(self.devices)

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self.setup, self._mesh, self.chunk)

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self.setup, self._mesh)

    @cached_property
    def _first_kept(self) -> Kept:
        """What one client keeps before its first turn."""
        return self.setup.first_kept(self.setup.first_model())

    @cached_property
    def aside(self) -> KeptAside | None:
        """What clients keep, if they keep anything."""
        if not jax.tree.leaves(self._first_kept):
            return None
        clients = self.setup.federation.clients
        return KeptAside(ClientStore(self.store, clients, self._first_kept))

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "reader")

    @cached_property
    def _loads(self) -> dict[tuple[int, int], Future[_Load]]:
        return {}

    def start(self) -> State:
        """The state before the first round."""
        w = self.setup.first_model()
        iterate = w if self.setup.method.send_iterate else None
        placed: State = everywhere(State(jnp.int32(0), w, _NOTHING, iterate), self._mesh)
        return placed

    def record_all(
        self, setups: Sequence[Setup], states: Sequence[State], rounds: int
    ) -> list[Advanced]:
        """One run after another."""
        one = len(setups) == 1 or self.aside is None
        require(one, "engine", "streamed", "runs of a method that keeps something go one at a time")
        outcomes: list[Advanced] = []
        for setup, state in zip(setups, states, strict=True):
            try:
                outcomes.append(self._rounds(setup, state, rounds))
            except DivergedError as error:
                outcomes.append(error)
        return outcomes

    def _rounds(self, setup: Setup, state: State, rounds: int) -> tuple[State, Traffic]:
        if rounds == 0:
            return state, self.nothing_sent()
        numbers, nobody = setup.numbers(), setup.federation.clients
        first = int(state.round)
        state, lost = everywhere((state, jnp.int32(nobody)), self._mesh)
        aside = self.aside
        if aside is not None:
            aside.stand_at(first)
        log: list[Any] = []
        for round in range(first, first + rounds):
            load = self._loaded(setup, round)
            if aside is not None:
                state = state._replace(kept=self._recalled(aside, load.cohort))
            state, lost, uplink, downlink, kept = self._round(numbers, load.world, state, lost)
            log.append((load.cohort.ravel(), uplink, downlink))
            if aside is not None:
                if int(lost) != nobody:
                    break
                taken = load.cohort.ravel() < nobody
                own = jax.tree.map(lambda leaf, taken=taken: leaf[taken], on_host(kept))
                aside.write(round, load.cohort.ravel()[taken], own)
            elif len(log) > _AHEAD:
                # No more cohorts in memory than are read ahead.
                jax.block_until_ready(log[-_AHEAD])
        if int(lost) != nobody:
            raise setup.diverged(int(state.round), int(lost))
        cohort, uplink, downlink = map(np.array, zip(*on_host(log), strict=True))
        n = setup.cohort
        return state, Traffic(cohort[:, :n], uplink[:, :n], downlink)

    def _recalled(self, aside: KeptAside, cohort: Int[np.ndarray, "devices seats"]) -> Kept:
        """What this cohort keeps, each client on its device."""
        mine = self._reader.mine(np.minimum(cohort, self.setup.federation.clients - 1))
        stacked = aside.store.read(mine.ravel())
        shape = mine.shape
        own: Kept = jax.tree.map(
            lambda leaf: self._reader.placed(leaf.reshape(*shape, *leaf.shape[1:])), stacked
        )
        return own

    def _loaded(self, setup: Setup, round: int) -> _Load:
        """This round's cohort and its rows; the next ones are being read meanwhile."""
        wanted = [(int(setup.seed), round + i) for i in range(_AHEAD + 1)]
        for key in [key for key in self._loads if key not in wanted]:
            self._loads.pop(key).cancel()
        for key in wanted:
            if key not in self._loads:
                self._loads[key] = self._pool.submit(self._load, setup, key[1])
        return self._loads.pop(wanted[0]).result()

    def _load(self, setup: Setup, round: int) -> _Load:
        cohort = np.asarray(self._pick(setup.numbers().seed, np.int32(round)))
        cohort = cohort.reshape(self._mesh.size, -1)
        return _Load(cohort, self._reader.world(cohort, test=False))

    @cached_property
    def _pick(self) -> Any:
        seats = self._layout.of(self.setup.cohort)[1] * self._mesh.size

        def pick(seed: Int[Array, ""], round: Int[Array, ""]) -> Int[Array, " seats"]:
            setup = self.setup.with_numbers(Numbers(seed, {}))
            return setup.pick_cohort(round, jnp.arange(seats, dtype=jnp.int32))

        return jax.jit(pick, compiler_options=compiler_options())

    @cached_property
    def _round(self) -> Any:
        chunk, seats = self._layout.of(self.setup.cohort)
        nobody = self.setup.federation.clients

        def one_round(
            numbers: Numbers, world: DeviceData, state: State, lost: Int[Array, ""]
        ) -> tuple[State, Int[Array, ""], Array, Array, Kept]:
            setup = self.setup.with_numbers(numbers)
            w, downlink = setup.broadcast(state.w, state.round)
            seat, present = jnp.arange(seats), world.number < nobody
            share = take_turns(setup, world, state, w, seat, present, chunk)
            after, culprit, (uplink,) = meet(setup, state, share, share.uplink)
            # Of a run that is lost nothing changes any more: rounds may be asked for in advance.
            still = lost != nobody
            after = jax.tree.map(
                lambda new, old: jnp.where(still, old, new), after, state._replace(kept=_NOTHING)
            )
            return after, jnp.where(still, lost, culprit), uplink, downlink, self._told(share.kept)

        kept = EVERYWHERE if self._apart else SHARED_OUT
        state = State(EVERYWHERE, EVERYWHERE, SHARED_OUT, EVERYWHERE)  # type: ignore[arg-type]
        return on_devices(
            self._mesh,
            one_round,
            (EVERYWHERE, self._reader.specs(test=False), state, EVERYWHERE),
            (EVERYWHERE, EVERYWHERE, EVERYWHERE, EVERYWHERE, kept),
        )

    @property
    def _apart(self) -> bool:
        """Whether some devices are another process's."""
        return several()

    def _told(self, tree: Any) -> Any:
        """What a device has, told to all processes if there are several."""
        if not self._apart:
            return tree
        return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, AXIS, tiled=True), tree)

    def each_client_of_all(self, function: ClientFunction) -> OnAllRuns:
        """Some clients at a time, the largest first, so that what has room for them has for all."""
        sizes = np.asarray(self.setup.federation.train.size)

        def run(
            setups: Sequence[Setup], states: Sequence[State], clients: Clients | None = None
        ) -> list[Any]:
            chosen = np.arange(len(sizes)) if clients is None else np.asarray(clients)
            require(len(chosen) >= 1, "clients", clients, "name at least one")
            return [one_run(*of_run, chosen) for of_run in zip(setups, states, strict=True)]

        def one_run(setup: Setup, state: State, chosen: Int[np.ndarray, " clients"]) -> Any:
            chunk, seats = self._seats_to_score(len(chosen))
            aside = self.aside
            if aside is not None:
                aside.stand_at(int(state.round))
            state = everywhere(state, self._mesh)
            group = seats * self._mesh.size
            order = np.argsort(-sizes[chosen], kind="stable")
            places = np.resize(order, -(-len(chosen) // group) * group)
            groups = places.reshape(-1, seats, self._mesh.size).swapaxes(1, 2)
            compiled = self._scoring(function, chunk, seats)
            ahead = [
                self._pool.submit(self._reader.world, chosen[some], True)
                for some in groups[:_AHEAD]
            ]
            found = []
            for i, some in enumerate(groups):
                if i + _AHEAD < len(groups):
                    more = chosen[groups[i + _AHEAD]]
                    ahead.append(self._pool.submit(self._reader.world, more, True))
                own = _NOTHING if aside is None else self._recalled(aside, chosen[some])
                world = ahead.pop(0).result()
                of_group = state._replace(kept=own)
                # One at a time: processes must not meet in different ones.
                found.append(on_host(compiled(setup.numbers(), world, of_group)))
            results = jax.tree.map(lambda *leaves: np.concatenate(leaves), *found)
            seat = np.empty(len(chosen), int)
            seat[groups.ravel()] = np.arange(groups.size)
            return jax.tree.map(lambda leaf: leaf[seat], results)

        return run

    def _seats_to_score(self, clients: int) -> tuple[int, int]:
        at_most = min(self._layout.at_once, _SCORED_AT_ONCE) * self._mesh.size
        return self._layout.of(min(clients, at_most))

    def _scoring(self, function: ClientFunction, chunk: int, seats: int) -> Any:
        key = (function, chunk, seats)
        if key not in self._scorings:

            def share(numbers: Numbers, world: DeviceData, state: State) -> Any:
                setup = self.setup.with_numbers(numbers)

                def one(client: Int[Array, ""]) -> Any:
                    own = kept_by(client, state.kept)
                    return function(setup, world, state.w, own, state.round, client)

                results = jax.lax.map(jax.vmap(one), jnp.arange(seats).reshape(-1, chunk))
                flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), results)
                return self._told(flat)

            state = State(EVERYWHERE, EVERYWHERE, SHARED_OUT, EVERYWHERE)  # type: ignore[arg-type]
            self._scorings[key] = on_devices(
                self._mesh,
                share,
                (EVERYWHERE, self._reader.specs(test=True), state),
                EVERYWHERE if self._apart else SHARED_OUT,
            )
        return self._scorings[key]

    @cached_property
    def _scorings(self) -> dict[Any, Any]:
        return {}
