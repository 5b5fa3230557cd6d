"""The plain engine: one client after another, one round after another.

For tests, and for debugging: under `jax.disable_jit()` every line of a method runs as it stands,
with prints and breakpoints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from perfed.core.errors import DivergedError, require
from perfed.core.trees import row
from perfed.simulation.engine import (
    ClientFunction,
    Clients,
    MappedFunctions,
    RoundsResult,
    Simulator,
    Traffic,
)
from perfed.simulation.experiment import DeviceData, EngineState, Experiment, Variables
from perfed.simulation.round import ClientUpdate, broadcast, client_update, server_update


@final
@dataclass(frozen=True)
class Sequential(Simulator):
    """A loop over rounds around a loop over the cohort."""

    experiment: Experiment

    @cached_property
    def _data(self) -> DeviceData:
        return self.experiment.device_data()

    @cached_property
    def _client_update(self) -> Any:
        return self._compile(client_update)

    @cached_property
    def _broadcast(self) -> Any:
        return self._compile(broadcast)

    def _compile(self, function: Callable[..., Any]) -> Any:
        @jax.jit
        def of_variables(variables: Variables, *arguments: Any) -> Any:
            return function(self.experiment.with_variables(variables), *arguments)

        return of_variables

    def init(self) -> EngineState:
        """The state before the first round."""
        return self.experiment.init_state()

    def run_rounds(
        self, experiments: Sequence[Experiment], states: Sequence[EngineState], rounds: int
    ) -> list[RoundsResult]:
        """One run after another."""
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
        log = []
        for _ in range(rounds):
            state, *messages = self._round(experiment, state)
            log.append(messages)
        if not log:
            return state, Traffic.none(experiment.cohort)
        return state, Traffic(*(np.array(part) for part in zip(*log, strict=True)))

    def _round(
        self, experiment: Experiment, state: EngineState
    ) -> tuple[EngineState, Any, Any, Any]:
        """One round, and its messages: the cohort, what each sent, and what each was sent."""
        variables, aggregate = experiment.variables(), experiment.pipeline.aggregate
        cohort = experiment.sample_cohort(state.round)
        sent = self._broadcast(variables, state)
        records, uplink, diverged = state.clients, [], []
        total: Any = None
        for client in cohort:
            update: ClientUpdate = self._client_update(
                variables, self._data, sent, row(state.clients, client), state.round, client
            )
            uplink.append(int(update.bytes))
            diverged += [] if update.finite else [int(client)]
            of_client = (update.delta, update.extra, update.model_state)
            alone = jax.tree.map(lambda leaf: leaf[None], of_client)
            more = aggregate.total(update.weight[None], alone)
            total = more if total is None else aggregate.add(total, more)
            records = jax.tree.map(
                lambda all, new, i=client: all.at[i].set(new), records, update.record
            )
        if diverged:
            raise experiment.diverged(int(state.round), min(diverged))
        after = server_update(experiment, state, aggregate.finish(total), records)
        return after, cohort, uplink, sent.bytes

    def map_clients_of_runs(self, function: ClientFunction) -> MappedFunctions:
        """A loop over the clients, in a loop over the runs."""
        compiled = self._compile(function)

        def one_run(experiment: Experiment, state: EngineState, chosen: Clients) -> Any:
            results = [
                compiled(
                    experiment.variables(), self._data, state.without_clients(),
                    row(state.clients, i), i,
                )
                for i in chosen
            ]  # fmt: skip
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)

        def run(
            experiments: Sequence[Experiment],
            states: Sequence[EngineState],
            clients: Clients | None = None,
        ) -> list[Any]:
            everyone = range(self.experiment.federation.clients)
            chosen = everyone if clients is None else clients
            require(len(chosen) >= 1, "clients", clients, "name at least one")
            return [one_run(*of_run, chosen) for of_run in zip(experiments, states, strict=True)]

        return run
