"""Messages between the server and its clients: a small header and codecs' bytes, in one blob.

A blob is the mark `perfed`, a version, the length of the header, the header as JSON, and parts
whose lengths the header says. Nothing in it is ever run or unpickled, and whatever is not exactly
of this form is refused.
"""

import json
from math import isfinite, prod
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from perfed.core.errors import CodecError

MARK: Final = b"perfed"
VERSION: Final = 1
# Sections of a configuration that may change while a run goes on: no result depends on them.
TERMS: Final = ("federation", "output")
_FIXED: Final = len(MARK) + 1 + 4
# The digits of the largest whole number that anything here could be.
_LONGEST_NUMBER: Final = 20
# Scores are computed in this precision.
_LARGEST_SCORE: Final = 3.4028235e38


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it has characters that cannot be printed")
    return text


def _addressable(shape: tuple[int, ...]) -> tuple[int, ...]:
    if prod(shape) >= 2**31:
        raise ValueError("no input has so many numbers")
    return shape


Name = Annotated[str, Field(min_length=1, max_length=120)]
# It is shown to the operator.
OwnName = Annotated[str, Field(max_length=120), AfterValidator(_printable)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Shape = Annotated[
    tuple[Count, ...], Field(max_length=8, strict=False), AfterValidator(_addressable)
]
Features = Annotated[
    tuple[Annotated[str, Field(max_length=1000)], ...], Field(strict=False, fail_fast=True)
]
Score = Annotated[float, Field(ge=-_LARGEST_SCORE, le=_LARGEST_SCORE, allow_inf_nan=False)]


class Header(BaseModel):
    """What a message is, and which experiment it is of."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    # A header holds a few names and numbers; what is longer is none.
    longest: ClassVar[int] = 1 << 16

    experiment: Name


@final
class JoinRequest(Header):
    """The server to a client: what is going to be trained, and what the client is called in it.

    Without keys the name is empty, and the client says its own.
    """

    longest: ClassVar[int] = 1 << 20  # labels may be many

    kind: Literal["join"] = "join"
    config: dict[str, Any]
    name: Annotated[str, Field(max_length=120)]


@final
class ClientInfo(Header):
    """A client's answer: what its data look like, from outside."""

    longest: ClassVar[int] = 1 << 20  # columns may be many

    kind: Literal["client-info"] = "client-info"
    name: OwnName
    shape: Shape
    dtype: Literal["float32", "uint8", "int32"]
    features: Features | None
    train: Annotated[int, Field(ge=1, lt=2**31)]
    test: Annotated[int, Field(ge=1, lt=2**31)]


@final
class TrainRequest(Header):
    """The server to a client of the cohort. The parts are its model, and what goes beside it.

    `number` is the client's among all. `counted` is the last round in which an answer of its own
    counted, -1 if none did: what it keeps is what it kept then.
    """

    kind: Literal["train"] = "train"
    round: Count
    number: Count
    counted: Annotated[int, Field(ge=-1, lt=2**31)]


@final
class TrainReply(Header):
    """A client's answer: the parts are its delta, and what its method sends beside it."""

    kind: Literal["train-reply"] = "train-reply"
    round: Count


@final
class EvaluateRequest(Header):
    """The server to every client: score this model, and your own. The parts are as for training."""

    kind: Literal["evaluate"] = "evaluate"
    round: Count
    number: Count
    counted: Annotated[int, Field(ge=-1, lt=2**31)]


@final
class EvaluateReply(Header):
    """A client's scores by model kind and name; None where one is not defined."""

    kind: Literal["evaluate-reply"] = "evaluate-reply"
    round: Count
    scores: dict[str, dict[str, Score | None]]


def without_terms(settings: dict[str, Any]) -> dict[str, Any]:
    """A configuration as it is told to clients, who need not know on what terms they are asked."""
    return {key: value for key, value in settings.items() if key not in TERMS}


_Kind = TypeVar("_Kind", bound=Header)


def packed(header: Header, *parts: bytes) -> bytes:
    """The blob of a message."""
    facts = header.model_dump(mode="json") | {"parts": [len(part) for part in parts]}
    text = json.dumps(facts, allow_nan=False, separators=(",", ":")).encode()
    return b"".join([MARK, bytes([VERSION]), len(text).to_bytes(4, "little"), text, *parts])


def unpacked(blob: bytes, kind: type[_Kind]) -> tuple[_Kind, list[bytes]]:
    """The header and the parts of a message of this kind; anything else raises `CodecError`."""
    if blob[: len(MARK)] != MARK:
        raise CodecError("this is not a message of perfed")
    if len(blob) < _FIXED:
        raise CodecError("the message ends in its first bytes")
    if (version := blob[len(MARK)]) != VERSION:
        raise CodecError(
            f"the message is of version {version}, but {VERSION} is understood here; run the same "
            "perfed on all machines"
        )
    length = int.from_bytes(blob[len(MARK) + 1 : _FIXED], "little")
    if length > min(kind.longest, len(blob) - _FIXED):
        raise CodecError(f"the message's header claims {length} bytes, which it cannot have")
    facts = _table(blob[_FIXED : _FIXED + length])
    lengths = facts.pop("parts", None)
    if not isinstance(lengths, list) or not all(type(n) is int and n >= 0 for n in lengths):
        raise CodecError("the message's header does not say how long its parts are")
    found, due = facts.get("kind"), kind.model_fields["kind"].default
    if found != due:
        said = legible(found, 40) if isinstance(found, str) else "none"
        raise CodecError(f'the message is of kind "{said}", but "{due}" is due')
    # Before they are validated: that would make a fault of each, however many there are.
    if unknown := facts.keys() - kind.model_fields.keys():
        raise CodecError(f"the message's header: {legible(min(unknown), 40)}: there is no such key")
    try:
        header = kind.model_validate(facts)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = legible(".".join(str(key) for key in first["loc"]), 80)
        raise CodecError(f"the message's header: {place}: {first['msg']}") from None
    if _FIXED + length + sum(lengths) != len(blob):
        raise CodecError(
            f"the message's parts claim {sum(lengths)} bytes, but there are "
            f"{len(blob) - _FIXED - length}"
        )
    parts, at = [], _FIXED + length
    for n in lengths:
        parts.append(blob[at : at + n])
        at += n
    return header, parts


def legible(text: str, most: int = 500) -> str:
    """What others wrote, as one line of a log: cut where it is long, with nothing unprintable.

    So it cannot pass for other lines, steer a terminal, or be impossible to write.
    """
    some = text[: 2 * most]
    line = " ".join("".join(c if c.isprintable() else " " for c in some).split())
    return line if len(line) <= most and len(some) == len(text) else line[:most] + "..."


def _table(text: bytes) -> dict[str, Any]:
    """A header's JSON, which says each thing once, in numbers of a reasonable size."""
    try:
        # Bytes would be taken for UTF-16 too, and for characters that there are none of.
        facts = json.loads(
            text.decode(),
            parse_constant=_no_number,
            parse_float=_finite,
            parse_int=_whole,
            object_pairs_hook=_once,
        )
    except CodecError:
        raise
    except (ValueError, RecursionError):
        raise CodecError("the message's header is no JSON") from None
    if not isinstance(facts, dict):
        raise CodecError("the message's header is no table")
    return facts


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise CodecError("the message's header says something twice")
    return found


def _finite(text: str) -> float:
    value = float(text)
    return value if isfinite(value) else _no_number(text)


def _whole(text: str) -> int:
    return int(text) if len(text) <= _LONGEST_NUMBER else _no_number(text)


def _no_number(text: str) -> Any:
    raise CodecError(f"the message's header: {legible(text, 40)} is no number here")
