"""What a client's answer must be before it counts: nothing that comes over the network is trusted.

A message is of the right experiment and round, its codec's bounds hold, all numbers are finite, and
an update is not far longer than those of others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import NamedTuple, final

from perfed.core.errors import CodecError
from perfed.core.trees import Params, all_finite, squared_norm
from perfed.evaluation import ModelKind
from perfed.federation.protocol.framing import unpack
from perfed.federation.protocol.messages import ClientInfo, EvaluateReply, Header, TrainReply
from perfed.federation.protocol.parts import decode_parts
from perfed.federation.transport.messenger import Answer, Failure
from perfed.simulation import EngineState, Experiment


class CheckedUpdate(NamedTuple):
    """A client's update that has passed the checks, but for its length.

    Attributes:
        delta: the change of the shared leaves, as the codec says it.
        extra: what its method sends beside it.
        bytes: how long its messages were.
        norm: how long the delta is, or what is beside it if that is longer.
    """

    delta: Params
    extra: Params
    bytes: int
    norm: float


def read_update(
    answer: Answer, experiment: Experiment, state: EngineState, extra_shape: Params, name: str
) -> CheckedUpdate | Failure:
    """A client's answer in the round that a state is at.

    Args:
        answer: what came.
        experiment: what is trained.
        state: where the run stands.
        extra_shape: what clients send beside their deltas, by its shapes.
        name: the experiment's.
    """
    if isinstance(answer, Failure):
        return answer
    round, pipeline = int(state.round), experiment.pipeline
    try:
        header, parts = unpack(answer, TrainReply)
        _require_of(header, name)
        if header.round != round:
            return Failure(f"it answers round {header.round}, not {round}")
        expected = (pipeline.codec, state.params), (pipeline.extra_codec, extra_shape)
        delta, extra = decode_parts(parts, *expected)
    except CodecError as error:
        return Failure(str(error))
    norm = max(sqrt(float(squared_norm(tree))) for tree in (delta, extra))
    if not bool(all_finite((delta, extra))) or not isfinite(norm):
        return Failure("its update is not finite")
    return CheckedUpdate(delta, extra, sum(map(len, parts)), norm)


@final
@dataclass(frozen=True)
class Lengths:
    """How long an update may be.

    Attributes:
        factor: so many times the length of a usual one.
        most: never longer than this; None: no such limit.
    """

    factor: float
    most: float | None

    def fault(self, norm: float, usual: float | None) -> Failure | None:
        """What is wrong with an update of this length, if anything.

        Args:
            norm: its length.
            usual: that of a usual one; None: none is known.
        """
        if self.most is not None and norm > self.most:
            return Failure(f"its update has the length {norm:.3g}, more than {self.most:.3g}")
        if usual and norm > self.factor * usual:
            return Failure(
                f"its update has the length {norm:.3g}, {norm / usual:.3g} times that of a usual "
                f"one ({usual:.3g}); {self.factor:g} times are allowed (federation.norm_factor)"
            )
        return None


def usual_length(norms: list[float], before: float | None) -> float | None:
    """The lower median of this round's lengths and that of the round before.

    The lower one, so that of two clients the longer is held against the shorter. No update at all
    is no length to hold others against; None: there is no other.
    """
    known = sorted(norm for norm in (*norms, before) if norm)
    return known[(len(known) - 1) // 2] if known else None


def read_scores(
    answer: Answer, experiment: str, round: int, kinds: Sequence[ModelKind], names: Sequence[str]
) -> dict[ModelKind, dict[str, float]] | Failure:
    """A client's scores under these names, with NaN where one is not defined."""
    if isinstance(answer, Failure):
        return answer
    try:
        header, parts = unpack(answer, EvaluateReply)
        _require_of(header, experiment)
    except CodecError as error:
        return Failure(str(error))
    if header.round != round or parts:
        return Failure("it answers another question than the one about scores")
    if set(header.scores) != set(kinds) or any(
        set(own) != set(names) for own in header.scores.values()
    ):
        return Failure("it has other scores than were asked for")
    given = {kind: header.scores[kind] for kind in kinds}
    return {
        kind: {name: float("nan") if (v := own[name]) is None else v for name in names}
        for kind, own in given.items()
    }


def read_client_info(answer: Answer, experiment: str) -> ClientInfo | Failure:
    """What a client tells of its data."""
    if isinstance(answer, Failure):
        return answer
    try:
        header, parts = unpack(answer, ClientInfo)
        _require_of(header, experiment)
    except CodecError as error:
        return Failure(str(error))
    return Failure("its answer has parts") if parts else header


def _require_of(header: Header, experiment: str) -> None:
    if header.experiment != experiment:
        raise CodecError("the message is of another experiment")
