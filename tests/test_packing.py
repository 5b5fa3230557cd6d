"""The bytes of messages: the format itself, which other programs may read, and its parts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfed.core.errors import CodecError
from perfed.pipeline.codecs import (
    BFloat16,
    Codec,
    Float16,
    Float32,
    LowPrecision,
    RandomK,
    Sign,
    TopK,
)
from perfed.pipeline.codecs.packing import (
    Reader,
    pack_fixed,
    pack_positions,
    pack_rice,
    pack_unary,
    positions_bytes,
    positions_width,
    rice,
    varint,
    varint_bytes,
)

# Twenty entries of which the eighth is -2. A message begins with p, version 1, the codec's number,
# how many entries there are, and two bytes about their shapes.
MESSAGES: list[tuple[Codec, str]] = [
    (Float32(), "7001001409fb" + 7 * "00000000" + "000000c0" + 12 * "00000000"),
    (Float16(), "7001011409fb" + 7 * "0000" + "00c0" + 12 * "0000"),
    (BFloat16(), "7001031409fb" + 7 * "0000" + "00c0" + 12 * "0000"),
    (LowPrecision(), "7001021409fb01000000004080fefff880"),
    (LowPrecision(5), "7001021409fb05000000004080fe0fff8080"),
    (LowPrecision(5, norm="tensor"), "7001021409fb05010000004080fe0fff8080"),
    (LowPrecision(5, code="fixed"), "7001021409fb050000000040000000000b000000000000"),
    (Sign(), "7001041409fbcdcccc3d010000"),
    (TopK(0.05), "7001051409fb02c04000000000c0"),
    (TopK(0.1, Float16()), "7001051409fb0230a001000000c0"),
    (
        RandomK(1.0, Float16()),  # in an order that follows from the eight bytes in the message
        "7001061409fbc1dc390232d5420b01" + 18 * "0000" + "00c0" + "0000",
    ),
]


@pytest.mark.parametrize(("codec", "message"), MESSAGES, ids=lambda value: str(value)[:60])
def test_messages_are_these_bytes(codec: Codec, message: str) -> None:
    x = np.zeros(20, np.float32)
    x[7] = -2
    assert codec.encode(jax.random.key(3), x).hex() == message
    np.testing.assert_array_equal(
        codec.decode(bytes.fromhex(message), x), codec.compress(jax.random.key(3), x)
    )


@pytest.mark.parametrize("value", [0, 1, *(2**k + d for k in (7, 14, 21, 28) for d in (-1, 0))])
def test_whole_numbers(value: int) -> None:
    """Seven bits a byte."""
    written = varint(value)
    assert len(written) == max(1, -(-value.bit_length() // 7))
    assert varint_bytes(jnp.asarray(value)) == len(written)
    assert Reader(written).varint() == value


def test_bytes_of_whole_numbers() -> None:
    assert varint(300) == b"\xac\x02"
    with pytest.raises(CodecError, match="too long"):
        Reader(b"\x80" * 5).varint()


@pytest.mark.parametrize("width", range(32))
def test_fixed_width(width: int) -> None:
    """The highest bit first, one number after another."""
    most = 2**width - 1
    values = np.array([most, 0, most // 3, 1 if width else 0, most - most // 5] * 7, np.int32)
    packed = pack_fixed(values, width)
    bits = "".join(f"{v:0{width}b}" for v in values) if width else ""
    expected = bytes(int(bits[i : i + 8].ljust(8, "0"), 2) for i in range(0, len(bits), 8))
    assert packed == expected
    reader = Reader(packed)
    np.testing.assert_array_equal(reader.fixed(len(values), width), values)
    reader.end()


def test_unary() -> None:
    assert pack_unary(np.array([0, 2, 1, 3])) == bytes([0b10010100, 0b01000000])
    np.testing.assert_array_equal(
        Reader(pack_unary(np.array([0, 2, 1, 3]))).unary(4, 6), [0, 2, 1, 3]
    )
    assert pack_unary(np.zeros(0, np.int32)) == b""
    with pytest.raises(CodecError, match="1 codes are missing"):
        Reader(b"\x90").unary(3, 20)


@pytest.mark.parametrize("mean", [0, 1, 5, 40, 3000])
def test_rice(mean: int) -> None:
    """What it says it takes is what it takes, and no other width is much shorter."""
    values = np.random.default_rng(mean).geometric(1 / (mean + 1), 500).astype(np.int32) - 1
    total = int(values.sum())
    found = rice(jnp.asarray(values), jnp.asarray(500), jnp.float32(total), total)
    packed = pack_rice(values, int(found.width))
    assert len(packed) == int(found.bytes)
    np.testing.assert_array_equal(Reader(packed).rice(500, int(found.width), total), values)
    assert len(packed) <= 1.04 * min(len(pack_rice(values, width)) for width in range(16)) + 1


@pytest.mark.parametrize(("count", "p"), [(0, 9), (1, 1), (3, 10), (9, 9), (40, 5000), (7, 2**20)])
def test_positions(count: int, p: int) -> None:
    places = np.sort(np.random.default_rng(p).permutation(p)[:count]).astype(np.int32)
    packed = pack_positions(places, p)
    assert len(packed) == int(positions_bytes(jnp.asarray(count), p))
    assert packed[0] == int(positions_width(np.uint32(count), p, np))
    reader = Reader(packed)
    np.testing.assert_array_equal(reader.positions(count, p), places)
    reader.end()


def crafted(places: list[int], width: int = 2) -> bytes:
    """A message of positions that need not be good ones."""
    whole = np.array(places, np.int32)
    bits = np.zeros(len(places) + 16, np.uint8)
    bits[(whole >> width) + np.arange(len(places))] = 1
    lows = pack_fixed(whole & ((1 << width) - 1), width)
    return bytes([width]) + lows + np.packbits(bits).tobytes()


def test_wrong_positions_are_refused() -> None:
    """Each fault alone: the same position twice, two out of order, one too large."""
    good = [1, 2, 7, 20, 30, 31, 50, 63]
    assert pack_positions(np.array(good, np.int32), 64) == crafted(good)
    np.testing.assert_array_equal(Reader(crafted(good)).positions(8, 64), good)

    def refused(places: list[int], p: int = 64) -> None:
        with pytest.raises(CodecError, match="out of range or out of order"):
            Reader(crafted(places)).positions(8, p)

    refused([1, 2, 7, 7, 30, 31, 50, 63])
    refused([1, 2, 7, 6, 30, 31, 50, 63])
    refused(good, 63)
    refused([1, 2, 7, 20, 30, 31, 50, 66])
    with pytest.raises(CodecError, match="are not written with 3 low bits"):
        Reader(crafted(good, 3)).positions(8, 64)


def test_readers_take_no_more_than_there_is() -> None:
    reader = Reader(b"abc")
    assert (reader.take(2), reader.left, reader.byte(), reader.left) == (b"ab", 1, ord("c"), 0)
    reader.end()
    for count in (1, -1):
        with pytest.raises(CodecError, match="ends early"):
            reader.take(count)
    with pytest.raises(CodecError, match="2 bytes too long"):
        Reader(b"ab").end()


def test_rice_of_nothing() -> None:
    empty: Any = jnp.zeros(4, jnp.int32)
    found = rice(empty, jnp.asarray(0), jnp.float32(0), 0)
    assert (int(found.width), int(found.bytes)) == (0, 0)
