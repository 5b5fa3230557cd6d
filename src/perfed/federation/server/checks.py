"""What a client's answer must be before it counts: nothing that comes over the network is trusted.

A message is of the right experiment and round, its codec's bounds hold, all numbers are finite, and
the change is not far longer than those of others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import NamedTuple, final, get_args

import jax
import jax.numpy as jnp

from perfed.core.errors import CodecError
from perfed.core.objective import Params, squared_norm
from perfed.evaluation.evaluator import ModelKind
from perfed.federation.protocol.messages import Change, Header, Introduction, Scored, unpacked
from perfed.federation.transport.messenger import Answer, Fault
from perfed.simulation import Setup, State
from perfed.simulation.experiment import all_finite


class Received(NamedTuple):
    """A client's change that has passed the checks, but for its length.

    Attributes:
        change: its local model minus the one it was sent, as the codec says it.
        iterate: its iterate minus that model, if the method sends one.
        bytes: how long its messages were.
        norm: how long the change is, or the iterate's if that is longer.
    """

    change: Params
    iterate: Params | None
    bytes: int
    norm: float


def read_change(answer: Answer, setup: Setup, state: State, experiment: str) -> Received | Fault:
    """A client's answer to its turn in the round that a state is at."""
    if isinstance(answer, Fault):
        return answer
    w, round = state.w, int(state.round)
    codecs = [setup.codec] + ([setup.iterate_codec] if state.iterate is not None else [])
    codecs = codecs if setup.method.sends else []
    try:
        header, parts = unpacked(answer, Change)
        _require_of(header, experiment)
        if header.round != round:
            return Fault(f"it answers round {header.round}, not {round}")
        if len(parts) != len(codecs):
            return Fault(f"it sent {len(parts)} models where {len(codecs)} are due")
        decoded = [codec.decode(part, w) for codec, part in zip(codecs, parts, strict=True)]
    except CodecError as error:
        return Fault(str(error))
    nothing = jax.tree.map(jnp.zeros_like, w)
    change = decoded[0] if decoded else nothing
    iterate = decoded[1] if len(decoded) > 1 else None if state.iterate is None else nothing
    sent = [change] if iterate is None else [change, iterate]
    norm = max(sqrt(float(squared_norm(model))) for model in sent)
    if not bool(all_finite((change, iterate))) or not isfinite(norm):
        return Fault("its change is not finite")
    return Received(change, iterate, sum(map(len, parts)), norm)


@final
@dataclass(frozen=True)
class Lengths:
    """How long a change may be.

    Attributes:
        factor: so many times the length of a usual one.
        most: never longer than this; None: no such limit.
    """

    factor: float
    most: float | None

    def fault(self, norm: float, usual: float | None) -> Fault | None:
        """What is wrong with a change of this length, if anything.

        Args:
            norm: its length.
            usual: that of a usual one; None: none is known.
        """
        if self.most is not None and norm > self.most:
            return Fault(f"its change has the length {norm:.3g}, more than {self.most:.3g}")
        if usual and norm > self.factor * usual:
            return Fault(
                f"its change has the length {norm:.3g}, {norm / usual:.3g} times that of a usual "
                f"one ({usual:.3g}); {self.factor:g} times are allowed (federation.norm_factor)"
            )
        return None


def usual_length(norms: list[float], before: float | None) -> float | None:
    """The lower median of this round's lengths and that of the round before.

    The lower one, so that of two clients the longer is held against the shorter. No change at all
    is no length to hold others against; None: there is no other.
    """
    known = sorted(norm for norm in (*norms, before) if norm)
    return known[(len(known) - 1) // 2] if known else None


def read_scores(
    answer: Answer, experiment: str, round: int, names: Sequence[str]
) -> dict[ModelKind, dict[str, float]] | Fault:
    """A client's scores under these names, with NaN where one is not defined."""
    if isinstance(answer, Fault):
        return answer
    try:
        header, parts = unpacked(answer, Scored)
        _require_of(header, experiment)
    except CodecError as error:
        return Fault(str(error))
    if header.round != round or parts:
        return Fault("it answers another question than the one about scores")
    kinds = get_args(ModelKind)
    if set(header.scores) != set(kinds) or any(
        set(own) != set(names) for own in header.scores.values()
    ):
        return Fault("it has other scores than were asked for")
    given = {kind: header.scores[kind] for kind in kinds}
    return {
        kind: {name: float("nan") if (v := own[name]) is None else v for name in names}
        for kind, own in given.items()
    }


def read_introduction(answer: Answer, experiment: str) -> Introduction | Fault:
    """What a client tells of its data."""
    if isinstance(answer, Fault):
        return answer
    try:
        header, parts = unpacked(answer, Introduction)
        _require_of(header, experiment)
    except CodecError as error:
        return Fault(str(error))
    return Fault("its introduction has parts") if parts else header


def _require_of(header: Header, experiment: str) -> None:
    if header.experiment != experiment:
        raise CodecError("the message is of another experiment")
