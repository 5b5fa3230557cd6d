"""The plain engine: one client after another, one round after another.

For tests, and for debugging: under `jax.disable_jit()` every line of a method runs as it stands,
with prints and breakpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from perfed.core.errors import DivergedError, require
from perfed.simulation.engine import (
    Advanced,
    ClientFunction,
    Clients,
    Engine,
    OnAllRuns,
    Traffic,
    kept_by,
)
from perfed.simulation.experiment import Contribution, DeviceData, Numbers, Setup, State


@final
@dataclass(frozen=True)
class Sequential(Engine):
    """A loop over rounds around a loop over the cohort."""

    setup: Setup

    @cached_property
    def _world(self) -> DeviceData:
        return self.setup.world()

    @cached_property
    def _take_turn(self) -> Any:
        return self._compiled("take_turn")

    @cached_property
    def _broadcast(self) -> Any:
        return self._compiled("broadcast")

    def _compiled(self, name: str) -> Any:
        @jax.jit
        def function(numbers: Numbers, *arguments: Any) -> Any:
            return getattr(self.setup.with_numbers(numbers), name)(*arguments)

        return function

    @property
    def aside(self) -> None:
        """All is in the state."""
        return None

    def start(self) -> State:
        """The state before the first round."""
        return self.setup.first_state()

    def record_all(
        self, setups: Sequence[Setup], states: Sequence[State], rounds: int
    ) -> list[Advanced]:
        """One run after another."""
        outcomes: list[Advanced] = []
        for setup, state in zip(setups, states, strict=True):
            try:
                outcomes.append(self._rounds(setup, state, rounds))
            except DivergedError as error:
                outcomes.append(error)
        return outcomes

    def _rounds(self, setup: Setup, state: State, rounds: int) -> tuple[State, Traffic]:
        """So many rounds, one client at a time."""
        log, numbers = [], setup.numbers()
        for _ in range(rounds):
            kept, uplink = state.kept, []
            total: Any = None
            culprits = []
            cohort = setup.pick_cohort(state.round)
            w, downlink = self._broadcast(numbers, state.w, state.round)
            for client in cohort:
                own = kept_by(client, state.kept)
                given: Contribution = self._take_turn(
                    numbers, self._world, w, own, state.round, client
                )
                uplink.append(int(given.bytes))
                culprits += [] if given.finite else [int(client)]
                part = jax.tree.map(
                    lambda leaf, weight=given.weight: weight.astype(leaf.dtype) * leaf,
                    (jnp.ones(()), given.change, given.iterate),
                )
                total = part if total is None else jax.tree.map(jnp.add, total, part)
                kept = jax.tree.map(lambda all, new, i=client: all.at[i].set(new), kept, given.kept)
            if culprits:
                raise setup.diverged(int(state.round), min(culprits))
            state = setup.close_round(state, total, kept)
            log.append((cohort, uplink, downlink))
        if not log:
            return state, self.nothing_sent()
        return state, Traffic(*(np.array(part) for part in zip(*log, strict=True)))

    def each_client_of_all(self, function: ClientFunction) -> OnAllRuns:
        """A loop over the clients, in a loop over the runs."""

        @jax.jit
        def compiled(numbers: Numbers, *of_client: Any) -> Any:
            return function(self.setup.with_numbers(numbers), *of_client)

        def one(setup: Setup, state: State, chosen: Clients) -> Any:
            results = [
                compiled(
                    setup.numbers(), self._world, state.w, kept_by(i, state.kept), state.round, i
                )
                for i in chosen
            ]
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)

        def run(
            setups: Sequence[Setup], states: Sequence[State], clients: Clients | None = None
        ) -> list[Any]:
            chosen = range(self.setup.federation.clients) if clients is None else clients
            require(len(chosen) >= 1, "clients", clients, "name at least one")
            return [one(*of_run, chosen) for of_run in zip(setups, states, strict=True)]

        return run
