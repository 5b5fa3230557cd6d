"""What takes a run from round to round: on this machine, or over a network."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int

from perfed.core.errors import DivergedError
from perfed.simulation.client_store import RunStore
from perfed.simulation.experiment import ClientRecord, DeviceData, EngineState, Experiment

# (experiment, data, the server's state, what the client keeps, client) -> anything made of arrays
ClientFunction = Callable[[Experiment, DeviceData, EngineState, ClientRecord, Int[Array, ""]], Any]
Clients = Sequence[int] | Int[np.ndarray, " some"]
# (state, clients or None for all) -> the results, stacked in the order of the clients
MappedFunction = Callable[[EngineState, Clients | None], Any]
# (experiments, states, clients or None for all) -> the results of each run
MappedFunctions = Callable[[Sequence[Experiment], Sequence[EngineState], Clients | None], list[Any]]


class Traffic(NamedTuple):
    """The bytes of all messages of some rounds.

    Attributes:
        cohort: who took part; an empty slot is -1.
        uplink: what each of them sent; nothing, if nothing of it counted.
        downlink: what each of them was sent.
    """

    cohort: Int[np.ndarray, "rounds cohort"]
    uplink: Int[np.ndarray, "rounds cohort"]
    downlink: Int[np.ndarray, " rounds"]

    @classmethod
    def concatenate(cls, parts: Sequence["Traffic"]) -> "Traffic":
        """Several rounds' after another."""
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    @classmethod
    def none(cls, cohort: int) -> "Traffic":
        """The messages of no rounds."""
        empty = np.zeros((0, cohort), np.int32)
        return cls(empty, empty, np.zeros(0, np.int32))


# What came of some rounds of a run.
RoundsResult = tuple[EngineState, Traffic] | DivergedError


class Engine(ABC):
    """Takes a run from round to round, wherever its clients are."""

    experiment: Experiment

    @abstractmethod
    def init(self) -> EngineState:
        """The state before the first round."""

    @abstractmethod
    def run_rounds(
        self, experiments: Sequence[Experiment], states: Sequence[EngineState], rounds: int
    ) -> list[RoundsResult]:
        """So many rounds of several runs at once; one that diverges does not stop the others.

        Args:
            experiments: the runs', which differ from this engine's in numbers only
                (`Experiment.same_program`).
            states: where each of them stands.
            rounds: how many.
        """

    @property
    def run_store(self) -> RunStore | None:
        """What the run keeps beside its state; None: nothing.

        Runs that do are not computed together, whatever they have in common.
        """
        return None

    def run(self, state: EngineState, rounds: int) -> tuple[EngineState, Traffic]:
        """The state so many rounds later, and the messages on the way.

        Raises:
            DivergedError: an update is not finite.
        """
        (outcome,) = self.run_rounds((self.experiment,), (state,), rounds)
        if isinstance(outcome, DivergedError):
            raise outcome
        return outcome

    def advance(self, state: EngineState, rounds: int) -> EngineState:
        """As `run`, without the messages."""
        return self.run(state, rounds)[0]


class Simulator(Engine, ABC):
    """An engine whose clients are here. All of them give the same results, and differ in speed."""

    def map_clients(self, function: ClientFunction) -> MappedFunction:
        """A function of one client, made into one of many."""
        of_all = self.map_clients_of_runs(function)

        def run(state: EngineState, clients: Clients | None = None) -> Any:
            return of_all((self.experiment,), (state,), clients)[0]

        return run

    @abstractmethod
    def map_clients_of_runs(self, function: ClientFunction) -> MappedFunctions:
        """As `map_clients`, for several runs at once."""
