"""Messages as bytes: a small JSON header and the bytes of codecs, in one blob.

A blob is the magic `perfed`, a version, the length of the header, the header as JSON, and parts
whose lengths the header gives. Nothing in it is executed or unpickled, and whatever is not exactly
of this form is refused.
"""

import json
from collections.abc import Iterator
from math import isfinite
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from perfed.core.errors import CodecError
from perfed.federation.protocol.messages import Header

MAGIC: Final = b"perfed"
VERSION: Final = 1
_PREFIX: Final = len(MAGIC) + 1 + 4
# No whole number in a header has more digits.
_MAX_DIGITS: Final = 20

_Header = TypeVar("_Header", bound=Header)


def pack(header: Header, *parts: bytes) -> bytes:
    """The blob of a message."""
    values = header.model_dump(mode="json") | {"parts": [len(part) for part in parts]}
    text = json.dumps(values, allow_nan=False, separators=(",", ":")).encode()
    return b"".join([MAGIC, bytes([VERSION]), len(text).to_bytes(4, "little"), text, *parts])


def unpack(blob: bytes, kind: type[_Header]) -> tuple[_Header, list[bytes]]:
    """The header and the parts of a message of this kind; anything else raises `CodecError`."""
    text = _header_text(blob, kind.max_bytes)
    values = _parse_json(text)
    lengths = values.pop("parts", None)
    if not isinstance(lengths, list) or not all(type(n) is int and n >= 0 for n in lengths):
        raise CodecError("the message header has no valid lengths of parts")
    header = _validate(values, kind)
    body = blob[_PREFIX + len(text) :]
    if sum(lengths) != len(body):
        raise CodecError(
            f"the parts of the message should have {sum(lengths)} bytes, but have {len(body)}"
        )
    return header, list(_split(body, lengths))


def one_line(text: str, limit: int = 500) -> str:
    """Text from elsewhere as one printable line, cut where it is long.

    So it cannot imitate other lines of a log, or control a terminal.
    """
    start = text[: 2 * limit]
    line = " ".join("".join(c if c.isprintable() else " " for c in start).split())
    whole = len(line) <= limit and len(start) == len(text)
    return line if whole else line[:limit] + "..."


def _header_text(blob: bytes, max_bytes: int) -> bytes:
    """The JSON text of a header."""
    if blob[: len(MAGIC)] != MAGIC:
        raise CodecError("not a perfed message")
    if len(blob) < _PREFIX:
        raise CodecError("the message is truncated")
    if (version := blob[len(MAGIC)]) != VERSION:
        raise CodecError(
            f"the message has version {version}, but this perfed reads version {VERSION}; install "
            "the same version of perfed on all machines"
        )
    length = int.from_bytes(blob[len(MAGIC) + 1 : _PREFIX], "little")
    if length > min(max_bytes, len(blob) - _PREFIX):
        raise CodecError(f"invalid length of the message header: {length} bytes")
    return blob[_PREFIX : _PREFIX + length]


def _validate(values: dict[str, Any], kind: type[_Header]) -> _Header:
    found, expected = values.get("kind"), kind.model_fields["kind"].default
    if found != expected:
        got = f'"{one_line(found, 40)}"' if isinstance(found, str) else "none"
        raise CodecError(f'expected a message of kind "{expected}", got {got}')
    # Before validation, which would report each of them, however many there are.
    if unknown := values.keys() - kind.model_fields.keys():
        raise CodecError(f"message header: unknown key {one_line(min(unknown), 40)}")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        key = one_line(".".join(str(key) for key in first["loc"]), 80)
        raise CodecError(f"message header: {key}: {first['msg']}") from None


def _split(body: bytes, lengths: list[int]) -> Iterator[bytes]:
    start = 0
    for length in lengths:
        yield body[start : start + length]
        start += length


def _parse_json(text: bytes) -> dict[str, Any]:
    """A header's JSON: an object without duplicate keys, with numbers of a reasonable size."""
    try:
        # json.loads would take bytes for UTF-16 too, and accept lone surrogates.
        values = json.loads(
            text.decode(),
            parse_constant=_refuse_number,
            parse_float=_parse_float,
            parse_int=_parse_int,
            object_pairs_hook=_object,
        )
    except CodecError:
        raise
    except (ValueError, RecursionError):
        raise CodecError("the message header is not valid JSON") from None
    if not isinstance(values, dict):
        raise CodecError("the message header is not a JSON object")
    return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise CodecError("the message header has duplicate keys")
    return values


def _parse_float(text: str) -> float:
    value = float(text)
    return value if isfinite(value) else _refuse_number(text)


def _parse_int(text: str) -> int:
    return int(text) if len(text) <= _MAX_DIGITS else _refuse_number(text)


def _refuse_number(text: str) -> Any:
    raise CodecError(f"message header: invalid number {one_line(text, 40)}")
