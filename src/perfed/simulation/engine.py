"""What takes a setup from round to round; and what applies a function to its clients, too."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

from perfed.core.errors import DivergedError
from perfed.core.objective import Params
from perfed.simulation.client_store import KeptAside
from perfed.simulation.experiment import DeviceData, Kept, Setup, State

# (setup, world, w, what the client keeps, round, client) -> anything made of arrays
ClientFunction = Callable[[Setup, DeviceData, Params, Kept, Int[Array, ""], Int[Array, ""]], Any]
Clients = Sequence[int] | Int[np.ndarray, " some"]
# (state, clients or None for all) -> the results, stacked in the order of the clients
OnClients = Callable[[State, Clients | None], Any]
# (setups, states, clients or None for all) -> the results of each run
OnAllRuns = Callable[[Sequence[Setup], Sequence[State], Clients | None], list[Any]]


class Traffic(NamedTuple):
    """The bytes of all messages of some rounds.

    Attributes:
        cohort: who took part; a seat that was left empty is -1.
        uplink: what each of them sent; nothing, if nothing of it counted.
        downlink: what each of them was sent.
    """

    cohort: Int[np.ndarray, "rounds cohort"]
    uplink: Int[np.ndarray, "rounds cohort"]
    downlink: Int[np.ndarray, " rounds"]

    @classmethod
    def joined(cls, parts: Sequence["Traffic"]) -> "Traffic":
        """Several rounds' after another."""
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


# What came of some rounds of a run.
Advanced = tuple[State, Traffic] | DivergedError


class Rounds(ABC):
    """Takes a setup from round to round, wherever its clients are."""

    setup: Setup

    @abstractmethod
    def start(self) -> State:
        """The state before the first round."""

    def advance(self, state: State, rounds: int) -> State:
        """The state so many rounds later. An update that is not finite raises `DivergedError`."""
        return self.record(state, rounds)[0]

    def record(self, state: State, rounds: int) -> tuple[State, Traffic]:
        """As `advance`, with the length of every message on the way."""
        (outcome,) = self.record_all((self.setup,), (state,), rounds)
        if isinstance(outcome, DivergedError):
            raise outcome
        return outcome

    @abstractmethod
    def record_all(
        self, setups: Sequence[Setup], states: Sequence[State], rounds: int
    ) -> list[Advanced]:
        """As `record`, for several runs at once; one that diverges does not stop the others.

        Args:
            setups: the runs': as this engine's own, except for numbers (`Setup.alike`).
            states: where each of them stands.
            rounds: how many.
        """

    @property
    @abstractmethod
    def aside(self) -> KeptAside | None:
        """What the run keeps beside its state; None: nothing.

        Runs that do are not computed together, whatever they have in common.
        """

    def nothing_sent(self) -> Traffic:
        """The messages of no rounds."""
        none = np.zeros((0, self.setup.cohort), np.int32)
        return Traffic(none, none, np.zeros(0, np.int32))


class Engine(Rounds, ABC):
    """Runs a setup here. All engines give the same results; they differ in speed."""

    def each_client(self, function: ClientFunction) -> OnClients:
        """A function of one client, made into one of many."""
        of_all = self.each_client_of_all(function)

        def run(state: State, clients: Clients | None = None) -> Any:
            return of_all((self.setup,), (state,), clients)[0]

        return run

    @abstractmethod
    def each_client_of_all(self, function: ClientFunction) -> OnAllRuns:
        """As `each_client`, for several runs at once."""


def kept_by(client: Any, kept: Kept) -> Kept:
    """What one client keeps, or several clients for an array of clients."""
    own: Kept = jax.tree.map(lambda leaf: leaf[client], kept)
    return own
