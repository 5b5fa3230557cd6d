"""Numbers as bits: fixed width, unary, Rice and Elias-Fano codes, without a loop over elements.

Every stream starts on a byte. `..._bytes` compute, on the device, the exact length of a stream;
`pack_...` make the stream, and `Reader` reads it and checks everything.
"""

from typing import Any, NamedTuple, final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from perfed.core.errors import CodecError

Ints = Int[np.ndarray, " n"]
Count = Int[Array, ""]

# Bits are spread out to bytes this many at a time: memory stays near the size of what is read.
_BLOCK = 1 << 18
_LOW_WIDTHS = 31
# The most bits of a number that a Rice code keeps plain.
MOST_WIDTH = 15
# The length of a code that is never chosen.
NEVER = 1 << 30


def whole_bytes(bits: Any) -> Any:
    """How many bytes hold so many bits."""
    return (bits + 7) // 8


def varint(value: int) -> bytes:
    """A whole number, seven bits a byte, the lowest first."""
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def varint_bytes(value: Count) -> Count:
    """The length of `varint(value)`."""
    limits = jnp.asarray([1 << 7, 1 << 14, 1 << 21, 1 << 28], jnp.uint32)
    return 1 + jnp.sum(value.astype(jnp.uint32) >= limits)


def pack_fixed(values: Ints, width: int) -> bytes:
    """Each value in `width` bits, the highest first."""
    if width == 0:
        return b""
    kind = ">u1" if width <= 8 else ">u2" if width <= 16 else ">u4"
    size = np.dtype(kind).itemsize
    parts = []
    for i in range(0, len(values), _BLOCK):
        raw = values[i : i + _BLOCK].astype(kind).view(np.uint8)
        if width == 8 * size:
            parts.append(raw.tobytes())
        else:
            bits = np.unpackbits(raw.reshape(-1, size), axis=1)[:, 8 * size - width :]
            parts.append(np.packbits(bits).tobytes())
    return b"".join(parts)


def pack_unary(values: Ints) -> bytes:
    """Each value as so many zeros and a one."""
    if len(values) == 0:
        return b""
    ends = np.cumsum(values.astype(np.int64) + 1)
    bits = np.zeros(ends[-1], np.uint8)
    bits[ends - 1] = 1
    return np.packbits(bits).tobytes()


class Rice(NamedTuple):
    """How a stream of numbers is written: the low `width` bits plain, the rest in unary."""

    width: Count
    bytes: Count


def rice(values: Int[Array, " p"], n: Count, total: Float[Array, ""], most: int) -> Rice:
    """The Rice code for n numbers that add up to `total`; other entries must be 0 and not count.

    The width follows from the mean m: the best one for a geometric law is about log2(m ln 2).
    What is known beforehand, `most`, is the largest sum there can be.
    """
    limits = n.astype(jnp.float32) * 2.0 ** jnp.arange(MOST_WIDTH, dtype=jnp.float32)
    width = jnp.sum(total * jnp.float32(0.693) > limits).astype(jnp.int32)
    high = values >> width
    length = whole_bytes(n + jnp.sum(high, dtype=jnp.int32)) + whole_bytes(n * width)
    if most < NEVER:
        return Rice(width, length)
    # A sum that an int32 may not hold belongs to a code that is not the shortest anyway.
    fits = jnp.sum(high.astype(jnp.float32)) < NEVER
    return Rice(width, jnp.where(fits, length, NEVER))


def exact_sum(values: Int[Array, " p"], most: int) -> Float[Array, ""]:
    """The sum of whole numbers below 2^17, at most `most`, as a float, whatever the order."""
    if most < NEVER:
        return jnp.sum(values, dtype=jnp.int32).astype(jnp.float32)
    high = jnp.sum(values >> 8, dtype=jnp.uint32).astype(jnp.float32)
    low = jnp.sum(values & 255, dtype=jnp.uint32).astype(jnp.float32)
    return high * 256 + low


def pack_rice(values: Ints, width: int) -> bytes:
    """The numbers' high parts in unary, then their low parts plain."""
    return pack_unary(values >> width) + pack_fixed(values & ((1 << width) - 1), width)


def positions_width(n: Any, p: int, np_or_jnp: Any = jnp) -> Any:
    """How many low bits the Elias-Fano code of n positions below p keeps plain."""
    widths = np_or_jnp.arange(_LOW_WIDTHS, dtype=np.uint32)
    lengths = whole_bytes(n * widths) + whole_bytes(n + (np_or_jnp.uint32(p - 1) >> widths))
    return np_or_jnp.argmin(lengths)


def positions_bytes(n: Count, p: int) -> Count:
    """The length of `pack_positions`: it depends on how many positions there are, not on which."""
    width = positions_width(n.astype(jnp.uint32), p).astype(jnp.int32)
    return jnp.asarray(1 + whole_bytes(n * width) + whole_bytes(n + ((p - 1) >> width)))


def pack_positions(positions: Ints, p: int) -> bytes:
    """Increasing positions below p: Elias-Fano, within about half a bit a position of the least."""
    n = len(positions)
    width = int(positions_width(np.uint32(n), p, np))
    bits = np.zeros(n + ((p - 1) >> width), np.uint8)
    bits[(positions >> width) + np.arange(n)] = 1
    low = pack_fixed(positions & ((1 << width) - 1), width)
    return bytes([width]) + low + np.packbits(bits).tobytes()


@final
class Reader:
    """Takes a message apart; every length is checked before anything is made of it."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._at = 0

    def take(self, count: int) -> bytes:
        """So many bytes."""
        if count < 0 or count > len(self._message) - self._at:
            raise CodecError(
                f"the message ends early: expected {count} bytes at byte {self._at} of "
                f"{len(self._message)}"
            )
        self._at += count
        return self._message[self._at - count : self._at]

    def byte(self) -> int:
        """One byte as a number."""
        return self.take(1)[0]

    def varint(self) -> int:
        """A whole number below 2^35."""
        value = 0
        for i in range(5):
            byte = self.byte()
            value |= (byte & 127) << 7 * i
            if byte < 128:
                return value
        raise CodecError(f"the number before byte {self._at} is too long")

    @property
    def left(self) -> int:
        """How many bytes are left."""
        return len(self._message) - self._at

    def end(self) -> None:
        """Nothing may be left."""
        if self._at != len(self._message):
            raise CodecError(f"the message is {len(self._message) - self._at} bytes too long")

    def fixed(self, count: int, width: int) -> Ints:
        """What `pack_fixed` wrote."""
        if width == 0:
            return np.zeros(count, np.int32)
        raw = np.frombuffer(self.take(whole_bytes(count * width)), np.uint8)
        size = 1 if width <= 8 else 2 if width <= 16 else 4
        values = np.empty(count, np.int32)
        step = max(8, _BLOCK // (8 * size) // 8 * 8)
        for i in range(0, count, step):
            n = min(step, count - i)
            bits = np.unpackbits(
                raw[i * width // 8 : whole_bytes((i + n) * width)], count=n * width
            )
            wide = np.zeros((n, 8 * size), np.uint8)
            wide[:, 8 * size - width :] = bits.reshape(n, width)
            values[i : i + n] = np.packbits(wide, axis=1).view(f">u{size}").ravel()
        return values

    def flags(self, count: int) -> Bool[np.ndarray, " n"]:
        """One bit each."""
        raw = np.frombuffer(self.take(whole_bytes(count)), np.uint8)
        return np.unpackbits(raw, count=count).view(bool)

    def ones(self, count: int, most: int) -> Ints:
        """The places of the next `count` ones in a stream of at most so many bits."""
        places = np.empty(count, np.int32)
        found = at = 0
        limit = whole_bytes(most)
        while found < count:
            raw = self._message[self._at : self._at + min(_BLOCK // 8, limit - at)]
            if not raw:
                raise CodecError(f"the message ends early: {count - found} codes are missing")
            here = np.flatnonzero(np.unpackbits(np.frombuffer(raw, np.uint8)))[: count - found]
            places[found : found + len(here)] = here + 8 * at
            found += len(here)
            used = whole_bytes(int(here[-1]) + 1) if found == count else len(raw)
            at += used
            self._at += used
        return places

    def unary(self, count: int, most: int) -> Ints:
        """What `pack_unary` wrote; the numbers may add up to at most `most`."""
        places = self.ones(count, count + most)
        places[1:] -= places[:-1].copy() + 1
        return places

    def rice(self, count: int, width: int, most: int) -> Ints:
        """What `pack_rice` wrote; the numbers may add up to at most `most`."""
        values = self.unary(count, most >> width)
        values <<= width
        values |= self.fixed(count, width)
        return values

    def positions(self, count: int, p: int) -> Ints:
        """What `pack_positions` wrote: increasing, and below p."""
        width = self.byte()
        if width != int(positions_width(np.uint32(count), p, np)):
            raise CodecError(f"{count} positions below {p} are not written with {width} low bits")
        low = self.fixed(count, width)
        upper_bits = count + ((p - 1) >> width)
        start = self._at
        positions = self.ones(count, upper_bits)
        self._at = start
        self.take(whole_bytes(upper_bits))
        # Within its bits the last one is at most at p - 1, so nothing below can overflow.
        good = count == 0 or positions[-1] < upper_bits
        positions -= np.arange(count, dtype=np.int32)
        positions <<= width
        positions |= low
        if not good or (count and positions[-1] >= p) or not np.all(positions[1:] > positions[:-1]):
            raise CodecError("positions are out of range or out of order")
        return positions
