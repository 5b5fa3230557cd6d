"""The messages between the server and its clients: one class per kind, with the fields it has.

`framing` writes them as bytes, and refuses what is not valid.
"""

from abc import ABC
from math import prod
from typing import Annotated, Any, ClassVar, Final, Literal, final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

# Sections of a configuration that are the server's alone. No result depends on them, so they may
# change when a run is resumed.
SERVER_SECTIONS: Final = ("federation", "output")
# Scores are computed in float32.
_MAX_SCORE: Final = 3.4028235e38


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it contains unprintable characters")
    return text


def _check_size(shape: tuple[int, ...]) -> tuple[int, ...]:
    if prod(shape) >= 2**31:
        raise ValueError("it is too large")
    return shape


Name = Annotated[str, Field(min_length=1, max_length=120)]
# Shown to the operator of the server.
PrintableName = Annotated[str, Field(max_length=120), AfterValidator(_check_printable)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Shape = Annotated[tuple[Count, ...], Field(max_length=8, strict=False), AfterValidator(_check_size)]
Features = Annotated[
    tuple[Annotated[str, Field(max_length=1000)], ...], Field(strict=False, fail_fast=True)
]
Score = Annotated[float, Field(ge=-_MAX_SCORE, le=_MAX_SCORE, allow_inf_nan=False)]


class Header(BaseModel):
    """What every message has."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    max_bytes: ClassVar[int] = 1 << 16

    experiment: Name


@final
class JoinRequest(Header):
    """Server to client: what will be trained, and the client's name ("" without keys)."""

    max_bytes: ClassVar[int] = 1 << 20  # there may be many labels

    kind: Literal["join"] = "join"
    config: dict[str, Any]
    name: Annotated[str, Field(max_length=120)]


@final
class ClientInfo(Header):
    """Client to server: the form of its data, and how many examples it has."""

    max_bytes: ClassVar[int] = 1 << 20  # there may be many columns

    kind: Literal["client-info"] = "client-info"
    name: PrintableName
    shape: Shape
    dtype: Literal["float32", "uint8", "int32"]
    features: Features | None
    train_examples: Annotated[int, Field(ge=1, lt=2**31)]
    test_examples: Annotated[int, Field(ge=1, lt=2**31)]


class RoundRequest(Header, ABC):
    """Server to client, in a round. The parts: the shared parameters, and the method's broadcast.

    `number` is the client's among all. `last_accepted` is the last round in which the server
    accepted an update of this client, -1 if there is none: it says which of its states is valid.
    """

    round: Count
    number: Count
    last_accepted: Annotated[int, Field(ge=-1, lt=2**31)]


@final
class TrainRequest(RoundRequest):
    """Server to client: make a local update."""

    kind: Literal["train"] = "train"


@final
class TrainReply(Header):
    """Client to server. The parts: the delta, and what the method sends beside it."""

    kind: Literal["train-reply"] = "train-reply"
    round: Count


@final
class EvaluateRequest(RoundRequest):
    """Server to client: score the global model and your own."""

    kind: Literal["evaluate"] = "evaluate"


@final
class EvaluateReply(Header):
    """Client to server: scores by model kind and name; None where a score is undefined."""

    kind: Literal["evaluate-reply"] = "evaluate-reply"
    round: Count
    scores: dict[str, dict[str, Score | None]]


def client_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that clients get: without the server's sections."""
    return {key: value for key, value in config.items() if key not in SERVER_SECTIONS}
