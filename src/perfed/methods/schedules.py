"""Schedules of step sizes over rounds, by name: a factor for every step of a round."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, final

import jax.numpy as jnp
from jaxtyping import Array, Int

from perfed.methods.settings import Rate, Weight, check_settings, settings_tree


class Schedule(ABC):
    """The factor by which step sizes are multiplied in a round."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_settings(self)

    def __call__(self, lr: float | Array, round: Int[Array, ""], steps: int) -> Any:
        """The step size of a round, 0 for the first, whose local updates have so many steps."""
        return lr * self.factor(round, steps)

    @abstractmethod
    def factor(self, round: Int[Array, ""], steps: int) -> Any:
        """The factor of a round."""


@final
@settings_tree
class Constant(Schedule):
    """Always 1."""

    name: ClassVar[str] = "constant"

    def __call__(self, lr: float | Array, round: Int[Array, ""], steps: int) -> Any:
        """The step size itself."""
        return lr

    def factor(self, round: Int[Array, ""], steps: int) -> float:
        """1."""
        return 1.0


@final
@settings_tree
class Harmonic(Schedule):
    """1 / (k tau + 1) in round k: FedPAQ's Theorem 1, with lr = 4 / mu."""

    name: ClassVar[str] = "harmonic"

    def __call__(self, lr: float | Array, round: Int[Array, ""], steps: int) -> Array:
        """Lr / (k tau + 1)."""
        return lr / (round * steps + 1)

    def factor(self, round: Int[Array, ""], steps: int) -> Array:
        """1 / (k tau + 1)."""
        return 1 / (round * steps + 1)


@final
@settings_tree
class Polynomial(Schedule):
    """1 / (k + 1)^power in round k, as Per-FedAvg's Remark 4.8 has it, which leaves the power open.

    Attributes:
        power: 0.5 is the usual choice.
    """

    name: ClassVar[str] = "polynomial"

    power: Weight = 0.5

    def __call__(self, lr: float | Array, round: Int[Array, ""], steps: int) -> Array:
        """Lr / (k + 1)^power."""
        return lr / (round + 1.0) ** self.power

    def factor(self, round: Int[Array, ""], steps: int) -> Array:
        """1 / (k + 1)^power."""
        return 1 / (round + 1.0) ** self.power


@final
@settings_tree
class Exponential(Schedule):
    """rate^k in round k.

    Attributes:
        rate: the factor from round to round.
    """

    name: ClassVar[str] = "exponential"

    rate: Rate = 0.99

    def factor(self, round: Int[Array, ""], steps: int) -> Array:
        """rate^k."""
        return jnp.asarray(self.rate) ** round


@final
@settings_tree
class Cosine(Schedule):
    """From 1 down to `final` along half a cosine, and constant from there on.

    Attributes:
        rounds: how many rounds it takes.
        final: the last factor.
    """

    name: ClassVar[str] = "cosine"

    rounds: int = 100
    final: Weight = 0.0

    def factor(self, round: Int[Array, ""], steps: int) -> Array:
        """`optax.cosine_decay_schedule`."""
        import optax

        return jnp.asarray(optax.cosine_decay_schedule(1.0, self.rounds, self.final)(round))


SCHEDULES: dict[str, type[Schedule]] = {
    s.name: s for s in (Constant, Harmonic, Polynomial, Exponential, Cosine)
}
