"""What a federated method is: a few small pure functions, called by every engine alike."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from numbers import Real
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from perfed.core.errors import require, require_count
from perfed.core.objective import Batch, BatchSize, Objective, Params

Memory: TypeAlias = Any  # a pytree of arrays, or None


class Turn(NamedTuple):
    """What the server tells every client of a round beside the model.

    Attributes:
        round: the round's number, 0 for the first (k in Per-FedAvg, t in pFedMe).
        key: randomness the whole cohort shares in this round.
    """

    round: Int[Array, ""]
    key: PRNGKeyArray


class Reply(NamedTuple):
    """What a client's turn ends with: `w` and `iterate` are sent, `memory` stays with it.

    Attributes:
        w: the client's local model.
        memory: what the client keeps for its next turn.
        iterate: a second model for the server, where a method was asked for one.
    """

    w: Params
    memory: Memory
    iterate: Params | None = None


class Method(ABC):
    """A frozen dataclass of hyperparameters with the four functions of a federated method."""

    name: ClassVar[str]
    # The settings that are only ever reckoned with, never branched on: runs that differ in nothing
    # else are computed together.
    rates: ClassVar[tuple[str, ...]] = ()
    # Whether anything is sent between server and clients at all.
    sends: ClassVar[bool] = True
    # Whether clients send an iterate, too; a method that can has this as a setting.
    send_iterate: bool = False

    def __post_init__(self) -> None:
        self.check()

    @abstractmethod
    def check(self) -> None:
        """Raise `FieldError` if a hyperparameter makes no sense."""

    @abstractmethod
    def first_memory(self, w: Params) -> Memory:
        """What a client remembers before its first turn; None if it never remembers anything."""

    @abstractmethod
    def local(
        self, objective: Objective, w: Params, memory: Memory, turn: Turn, key: PRNGKeyArray
    ) -> Reply:
        """One client's turn, started from the server's model w."""

    @abstractmethod
    def gradients(self, size: int) -> int:
        """How many gradients of one example a turn takes, for a client of so many examples."""

    @abstractmethod
    def merge(self, w: Params, mean_change: Params) -> Params:
        """The server's next model, from the mean over the cohort of (local model - w)."""

    @abstractmethod
    def personalize(
        self, objective: Objective, w: Params, memory: Memory, turn: Turn, key: PRNGKeyArray
    ) -> Params:
        """The client's own model, from the server's model w and its own data."""

    # What these check may be None where a field's type allows it.

    def _positive(self, *fields: str) -> None:
        for field, value in self._given(fields):
            real = isinstance(value, Real) and not isinstance(value, bool)
            valid = real and 0 < float(value) < float("inf")
            require(valid, field, value, "must be a number greater than 0")

    def _count(self, *fields: str) -> None:
        for field, value in self._given(fields):
            require_count(field, value)

    def _batch_size(self, *fields: str) -> None:
        for field, value in self._given(fields):
            if isinstance(value, str):
                allowed = 'must be a whole number, or "full" for all of the client\'s data'
                require(value == "full", field, value, allowed)
            else:
                require_count(field, value)

    def _given(self, fields: tuple[str, ...]) -> list[tuple[str, Any]]:
        return [(f, value) for f in fields if (value := getattr(self, f)) is not None]


def examples(batch: BatchSize, size: int) -> int:
    """How many examples a batch has, for a client of so many."""
    return size if isinstance(batch, str) else batch


def descend(w: Params, rate: float | Array, direction: Params) -> Params:
    """W - rate * direction."""
    return jax.tree.map(lambda a, d: (a - rate * d).astype(a.dtype), w, direction)


def change(new: Params, old: Params) -> Params:
    """New - old."""
    return jax.tree.map(jnp.subtract, new, old)


def changed(w: Params, by: Params) -> Params:
    """W + by."""
    return jax.tree.map(jnp.add, w, by)


def take_steps(
    step: Callable[[Params, Any], Params],
    w: Params,
    batches: Any,
    steps: int,
    pick: Int[Array, ""] | None = None,
) -> tuple[Params, Params | None]:
    """Repeat w <- step(w, batches[t]), t = 0..steps-1; also give the iterate before step `pick`."""

    def body(
        carry: tuple[Params, Params | None], t_and_batch: tuple[Int[Array, ""], Any]
    ) -> tuple[tuple[Params, Params | None], None]:
        w, picked = carry
        t, batch = t_and_batch
        if pick is not None:
            picked = jax.tree.map(lambda new, old: jnp.where(t == pick, new, old), w, picked)
        return (step(w, batch), picked), None

    start = (w, None if pick is None else w)
    (w, picked), _ = jax.lax.scan(body, start, (jnp.arange(steps), batches))
    return w, picked


def sgd(
    objective: Objective,
    w: Params,
    rate: float | Array,
    steps: int,
    batch: BatchSize,
    key: PRNGKeyArray,
) -> Params:
    """Steps w <- w - rate grad f_i(w; D) on the client's own data, each on a fresh batch D."""

    def step(w: Params, d: Batch) -> Params:
        return descend(w, rate, objective.grad(w, d))

    return take_steps(step, w, objective.batches(key, steps, batch), steps)[0]
