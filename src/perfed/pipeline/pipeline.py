"""The update pipeline: one chain of stages, the same code in a simulation and between machines."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self, final

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from perfed.core.errors import require
from perfed.core.trees import Params, tree_add, tree_sub, tree_zeros_like
from perfed.pipeline.codecs import Codec, Float32, Sent
from perfed.pipeline.stages import Aggregate, Clip, Encode, ErrorFeedback, Mean, Stage


@final
@dataclass(frozen=True)
class Pipeline:
    """What happens to a client's delta between its local update and the server update.

    At the client: clip, error feedback, encode. At the server: decode, aggregate. By default
    messages are float32 and the aggregate is the weighted mean.

    Example:
        >>> import perfed
        >>> perfed.Pipeline((perfed.Clip(10.0), perfed.Encode(perfed.LowPrecision(15)))).names
        ('clip', 'encode')
        >>> perfed.Pipeline((perfed.Encode(), perfed.Clip()))
        Traceback (most recent call last):
        perfed.core.errors.FieldError: pipeline = ('encode', 'clip'): clip must come before ...

    Attributes:
        stages: the stages, in the order of their places.
    """

    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        for stage in self.stages:
            what = "must be stages of the update pipeline, such as Clip(norm=1.0)"
            require(isinstance(stage, Stage), "pipeline", stage, what)
        for first, second in pairwise(self.stages):
            what = f"{second.name} must come before {first.name}, with at most one stage of a kind"
            require(first.place < second.place, "pipeline", self.names, what)

    @classmethod
    def of(
        cls, codec: Codec | None = None, error_feedback: bool = False, clip: float | None = None
    ) -> Self:
        """The common chains, from settings."""
        stages: list[Stage] = [] if clip is None else [Clip(clip)]
        stages += [ErrorFeedback()] if error_feedback else []
        return cls((*stages, *([] if codec is None else [Encode(codec)])))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stages."""
        return tuple(stage.name for stage in self.stages)

    @cached_property
    def clip(self) -> Clip | None:
        """What clips deltas, if anything does."""
        return next((stage for stage in self.stages if isinstance(stage, Clip)), None)

    @cached_property
    def error_feedback(self) -> bool:
        """Whether clients keep what messages leave out."""
        return any(isinstance(stage, ErrorFeedback) for stage in self.stages)

    @cached_property
    def codec(self) -> Codec:
        """How deltas are written."""
        found = next((stage.codec for stage in self.stages if isinstance(stage, Encode)), Float32())
        return found.with_feedback() if self.error_feedback else found

    @cached_property
    def extra_codec(self) -> Codec:
        """How the extra is encoded; error feedback does not apply to it."""
        return next((stage.codec for stage in self.stages if isinstance(stage, Encode)), Float32())

    @cached_property
    def aggregate(self) -> Aggregate:
        """How the server makes one delta of many."""
        return next((stage for stage in self.stages if isinstance(stage, Aggregate)), Mean())

    def variance(self, sizes: tuple[int, ...]) -> float | None:
        """FedPAQ's q (`Codec.variance`); None: what the server receives is biased."""
        biased = self.error_feedback or self.clip is not None
        return None if biased else self.codec.variance(sizes)

    # The client's side, in a simulation and in a real client alike.

    def init_residual(self, params: Params) -> Params | None:
        """The residual before the first round; None without error feedback."""
        return tree_zeros_like(params) if self.error_feedback else None

    def prepare(self, delta: Params, residual: Params | None) -> Params:
        """What is to be encoded: the clipped delta plus the residual."""
        if self.clip is not None:
            delta = self.clip(delta)
        return delta if residual is None else tree_add(delta, residual)

    def left_out(self, written: Params, received: Params) -> Params | None:
        """The new residual: what the message lost."""
        return tree_sub(written, received) if self.error_feedback else None

    def send(self, key: PRNGKeyArray, written: Params) -> Sent:
        """What the server receives, and how long the message is."""
        return send(self.codec, key, written)

    def send_extra(self, key: PRNGKeyArray, extra: Params) -> Sent:
        """The same for the extra."""
        return send(self.extra_codec, key, extra)


def send(codec: Codec, key: PRNGKeyArray, tree: Params) -> Sent:
    """What the receiver of a tree decodes, and the message's bytes; an empty tree is not sent."""
    return codec.send(key, tree) if jax.tree.leaves(tree) else Sent(tree, jnp.int32(0))
