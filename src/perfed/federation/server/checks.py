"""Checks of clients' replies: nothing that comes over the network is trusted.

A valid reply belongs to the experiment and the round, its codec's bounds hold, all numbers are
finite, and an update is not much longer than those of other clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import NamedTuple, TypeVar, final

from perfed.core.errors import CodecError
from perfed.core.trees import Params, all_finite, squared_norm
from perfed.evaluation import ModelKind
from perfed.federation.protocol.framing import unpack
from perfed.federation.protocol.messages import ClientInfo, EvaluateReply, Header, TrainReply
from perfed.federation.protocol.parts import decode_parts
from perfed.federation.transport.messenger import Failure, Reply
from perfed.pipeline import Pipeline
from perfed.simulation.round import STATE_CODEC, Trained


class CheckedUpdate(NamedTuple):
    """A client's update that has passed all checks except that of its norm.

    Attributes:
        delta: the decoded difference of the shared leaves.
        extra: what the method sends beside it.
        model_state: how shared running statistics have changed.
        bytes: the length of its messages.
        norm: that of the delta, or of the extra if it is larger.
    """

    delta: Params
    extra: Params
    model_state: Params | None
    bytes: int
    norm: float


def read_update(
    reply: Reply, pipeline: Pipeline, round: int, shapes: Trained, name: str
) -> CheckedUpdate | Failure:
    """A client's update in a round.

    Args:
        reply: what the client sent.
        pipeline: how updates are sent.
        round: the round.
        shapes: those of what a client sends.
        name: the experiment's.
    """
    if isinstance(reply, Failure):
        return reply
    try:
        header, parts = _unpack(reply, TrainReply, name)
        if header.round != round:
            return Failure(f"its reply is of round {header.round}, not {round}")
        delta, extra, model_state = decode_parts(
            parts,
            (pipeline.codec, shapes.written),
            (pipeline.extra_codec, shapes.extra),
            (STATE_CODEC, shapes.model_state),
        )
    except CodecError as error:
        return Failure(str(error))
    norm = max(sqrt(float(squared_norm(tree))) for tree in (delta, extra))
    if not bool(all_finite((delta, extra, model_state))) or not isfinite(norm):
        return Failure("its update is not finite")
    return CheckedUpdate(delta, extra, model_state, sum(map(len, parts)), norm)


@final
@dataclass(frozen=True)
class NormLimit:
    """The limit of an update's norm.

    Attributes:
        factor: relative to the typical norm.
        max_norm: absolute; None: no such limit.
    """

    factor: float
    max_norm: float | None

    def check(self, norm: float, typical: float | None) -> Failure | None:
        """What is wrong with an update of this norm, if anything.

        Args:
            norm: the update's.
            typical: the typical one (`typical_norm`).
        """
        if self.max_norm is not None and norm > self.max_norm:
            return Failure(
                f"its update has norm {norm:.3g}; at most {self.max_norm:.3g} is allowed"
            )
        if typical and norm > self.factor * typical:
            return Failure(
                f"its update has norm {norm:.3g}, {norm / typical:.3g} times the typical one "
                f"({typical:.3g}); {self.factor:g} times are allowed (federation.norm_factor)"
            )
        return None


def typical_norm(norms: list[float], previous: float | None) -> float | None:
    """The lower median of this round's norms and the typical norm of the previous round.

    The lower one, so that of two clients the larger norm is compared with the smaller. Zeros are
    ignored; None: there are no others.
    """
    known = sorted(norm for norm in (*norms, previous) if norm)
    return known[(len(known) - 1) // 2] if known else None


def read_scores(
    reply: Reply, experiment: str, round: int, kinds: Sequence[ModelKind], names: Sequence[str]
) -> dict[ModelKind, dict[str, float]] | Failure:
    """A client's scores under these names; NaN where one is undefined."""
    if isinstance(reply, Failure):
        return reply
    try:
        header, parts = _unpack(reply, EvaluateReply, experiment)
    except CodecError as error:
        return Failure(str(error))
    if header.round != round or parts:
        return Failure("its reply is not one to this evaluation")
    if set(header.scores) != set(kinds) or any(
        set(own) != set(names) for own in header.scores.values()
    ):
        return Failure("its scores are not the requested ones")
    given = {kind: header.scores[kind] for kind in kinds}
    return {
        kind: {name: float("nan") if (v := own[name]) is None else v for name in names}
        for kind, own in given.items()
    }


def read_client_info(reply: Reply, experiment: str) -> ClientInfo | Failure:
    """A client's description of its data."""
    if isinstance(reply, Failure):
        return reply
    try:
        header, parts = _unpack(reply, ClientInfo, experiment)
    except CodecError as error:
        return Failure(str(error))
    return Failure("its reply to the join request has parts") if parts else header


_Header = TypeVar("_Header", bound=Header)


def _unpack(reply: bytes, kind: type[_Header], experiment: str) -> tuple[_Header, list[bytes]]:
    header, parts = unpack(reply, kind)
    if header.experiment != experiment:
        raise CodecError("the message belongs to another experiment")
    return header, parts
