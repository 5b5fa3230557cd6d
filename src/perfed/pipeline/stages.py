"""The stages of the update pipeline: what happens to a client's delta on its way to the server."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from perfed.core.errors import require
from perfed.core.trees import Params, squared_norm, tree_add
from perfed.pipeline.codecs import Codec, Float32


class Stage(ABC):
    """A stage: a frozen dataclass of settings, found by name in a configuration.

    Attributes:
        name: what it is called in a configuration.
        place: where in the chain it stands; stages follow each other by it.
    """

    name: ClassVar[str]
    place: ClassVar[int]


@final
@dataclass(frozen=True)
class Clip(Stage):
    """At the client: a delta that is longer is scaled down to this length.

    Attributes:
        norm: the largest Euclidean norm, of all entries together.
    """

    name: ClassVar[str] = "clip"
    place: ClassVar[int] = 0

    norm: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.norm < float("inf"), "norm", self.norm, "must be a number greater than 0")

    def __call__(self, delta: Params) -> Params:
        """Delta * min(1, norm / |delta|)."""
        length = jnp.sqrt(squared_norm(delta))
        factor = jnp.minimum(1.0, self.norm / jnp.where(length > 0, length, 1.0))
        return jax.tree.map(lambda leaf: (factor * leaf).astype(leaf.dtype), delta)


@final
@dataclass(frozen=True)
class ErrorFeedback(Stage):
    """At the client: the part that a message loses is stored, and added to the next delta."""

    name: ClassVar[str] = "error-feedback"
    place: ClassVar[int] = 1


@final
@dataclass(frozen=True)
class Encode(Stage):
    """At the client: the delta becomes a message.

    Attributes:
        codec: how it is written.
    """

    name: ClassVar[str] = "encode"
    place: ClassVar[int] = 2

    codec: Codec = field(default_factory=Float32)

    def __post_init__(self) -> None:
        what = "must be a codec, such as LowPrecision(), not its class or name"
        require(isinstance(self.codec, Codec), "codec", self.codec, what)


class Total(NamedTuple):
    """The running sums of an aggregation over clients: their weights, and what is weighted."""

    weight: Float[Array, ""]
    tree: Any


class Aggregate(Stage, ABC):
    """At the server: deltas become one. Totals of disjoint groups of clients can be added up."""

    place: ClassVar[int] = 4

    def start(self, like: Any) -> Total:
        """Nothing so far."""
        return Total(
            jnp.zeros(()), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        )

    def add(self, total: Total, other: Total) -> Total:
        """Two totals as one."""
        both: Total = tree_add(total, other)
        return both

    @abstractmethod
    def total(self, weights: Float[Array, " clients"], stacked: Any) -> Total:
        """The total of some clients; one whose weight is 0 does not count, whatever it has."""

    @abstractmethod
    def finish(self, total: Total) -> Any:
        """The aggregate, from a cohort's total."""


@final
@dataclass(frozen=True)
class Mean(Aggregate):
    """The weighted mean."""

    name: ClassVar[str] = "mean"

    def total(self, weights: Float[Array, " clients"], stacked: Any) -> Total:
        """Weighted sums."""

        def weighted_sum(leaf: Array) -> Array:
            counts = (weights > 0).reshape(-1, *[1] * (leaf.ndim - 1))
            leaf = jnp.where(counts, leaf, 0.0)
            # As a product: on a CPU a sum over the clients took a tenth of a whole round.
            return jnp.tensordot(weights.astype(leaf.dtype), leaf, 1, precision="highest")

        return Total(weights.sum(), jax.tree.map(weighted_sum, stacked))

    def finish(self, total: Total) -> Any:
        """The sums by the sum of the weights."""
        return jax.tree.map(lambda leaf: (leaf / total.weight).astype(leaf.dtype), total.tree)


STAGES: dict[str, type[Stage]] = {
    stage.name: stage for stage in (Clip, ErrorFeedback, Encode, Mean)
}
