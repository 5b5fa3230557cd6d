"""What an engine does: it takes a setup from round to round, and applies a function to clients."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array, Int

from perfed.methods.base import Memory
from perfed.objective import Params
from perfed.simulation.setup import Setup, State, World

# (world, w, the client's memory, round, client) -> anything made of arrays
ClientFunction = Callable[[World, Params, Memory, Int[Array, ""], Int[Array, ""]], Any]
# (state, clients or None for all) -> the results, stacked in the order of the clients
OnClients = Callable[[State, Sequence[int] | None], Any]


class Engine(ABC):
    """Runs a setup. All engines give the same results; they differ in speed."""

    setup: Setup

    @abstractmethod
    def start(self) -> State:
        """The state before the first round."""

    @abstractmethod
    def advance(self, state: State, rounds: int) -> State:
        """The state so many rounds later. An update that is not finite raises `DivergedError`."""

    @abstractmethod
    def each_client(self, function: ClientFunction) -> OnClients:
        """A function of one client, made into one of many."""


def memory_of(memory: Memory, client: Any) -> Memory:
    """One client's memory, or several clients' for an array of clients."""
    return jax.tree.map(lambda leaf: leaf[client], memory)
