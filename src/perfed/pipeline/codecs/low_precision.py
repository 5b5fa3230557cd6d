"""FedPAQ's low-precision quantizer, eq. (4) (QSGD's), and the shortest of three codes for it."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from perfed.core.errors import CodecError, require, require_choice, require_count
from perfed.core.random import quick_uniform
from perfed.pipeline.codecs import packing
from perfed.pipeline.codecs.base import AnyArray, Codec, Sizes, Vector
from perfed.pipeline.codecs.packing import Reader, whole_bytes

MOST_LEVELS = 1 << 16

FIXED, SPARSE, DENSE = range(3)


class Levels(NamedTuple):
    """The norm of each part, and the level of each entry with its sign, -s..s."""

    norm: Float[AnyArray, " parts"]
    level: Int[AnyArray, " p"]


class Plan(NamedTuple):
    """How levels are written: the code, its Rice width, and the length."""

    code: Int[Array, ""]
    width: Int[Array, ""]
    bytes: Int[Array, ""]


@final
@dataclass(frozen=True)
class LowPrecision(Codec):
    """FedPAQ's low-precision quantizer: norm * sign(x_i) * level/s, the level rounded at random.

    With y_i = s |x_i| / norm, the level is floor(y_i), or one more with probability
    y_i - floor(y_i), so the receiver's vector is x on average. Levels are written in the shortest
    of three codes: sign and level in fixed width; the places, signs and levels of the entries that
    are not zero; or a Rice code of all. The receiver knows which from the message.

    Attributes:
        levels: s, the number of levels above zero.
        norm: what the Euclidean norm is taken of: the `whole` change as in the paper, each `tensor`
            of the model, or buckets of so many entries.
        code: the `shortest` code, or always the one of `fixed` width, whose messages are all
            equally long: 1 + ceil(log2(s + 1)) bits an entry.
    """

    name: ClassVar[str] = "low-precision"
    number: ClassVar[int] = 2

    levels: int = 1
    norm: Literal["whole", "tensor"] | int = "whole"
    code: Literal["shortest", "fixed"] = "shortest"

    def __post_init__(self) -> None:
        require_count("levels", self.levels)
        require_choice("code", self.code, ("shortest", "fixed"))
        allowed = f"must be at most {MOST_LEVELS}; beyond that float16 is more accurate per bit"
        require(self.levels <= MOST_LEVELS, "levels", self.levels, allowed)
        if self.norm not in ("whole", "tensor"):
            whole = isinstance(self.norm, int) and not isinstance(self.norm, bool)
            allowed = 'must be "whole", "tensor", or the size of a bucket'
            require(whole and int(self.norm) >= 1, "norm", self.norm, allowed)

    def symbols(self, key: PRNGKeyArray, x: Vector, sizes: Sizes) -> Levels:
        """Norms and levels of x."""
        # By powers of two near the largest entries, so that no square or quotient is too large or
        # too small for a float.
        scale, back = _scales(self._split(x, sizes))
        norm = _norms(self._split(x * self._each(scale, sizes), sizes))
        # A part that is all zero has no norm to divide by; a lone entry may be rounded past s.
        y = jnp.abs(x) * self._each(self.levels / jnp.where(norm > 0, norm, 1.0) * scale, sizes)
        low = jnp.minimum(jnp.floor(y), self.levels)
        up = quick_uniform(key, x.shape[0]) < y - low
        level = jnp.minimum(low + up, self.levels).astype(jnp.int32)
        return Levels(norm * back, jnp.where(x < 0, -level, level))

    def values(self, symbols: Levels, sizes: Sizes) -> Vector:
        """norm/s * level, in this order: one rounding each, the same everywhere."""
        unit = symbols.norm * jnp.float32(1 / self.levels)
        return self._each(unit, sizes) * symbols.level.astype(jnp.float32)

    def variance(self, sizes: Sizes) -> float | None:
        """min(d/s^2, sqrt(d)/s) for the largest part, of d entries, that has a norm of its own."""
        if self.norm == "tensor":
            d = max(sizes)
        else:
            d = sum(sizes) if self.norm == "whole" else min(int(self.norm), sum(sizes))
        return float(min(d / self.levels**2, d**0.5 / self.levels))

    def symbols_bytes(self, symbols: Levels, sizes: Sizes) -> Int[Array, ""]:
        """The setting, the norms, and the shortest code."""
        fixed = len(self._settings) + 4 * symbols.norm.shape[0] + 1
        return jnp.asarray(fixed + self._plan(symbols.level).bytes)

    def write(self, symbols: Levels, sizes: Sizes) -> bytes:
        """The setting, the norms, the choice of code, and the levels in it."""
        level = np.asarray(symbols.level)
        plan = _plan(self, level)
        code, width = int(plan.code), int(plan.width)
        head = self._settings + np.asarray(symbols.norm, "<f4").tobytes()
        head += bytes([code << 6 | width])
        if code == FIXED:
            return head + packing.pack_fixed(np.abs(level) << 1 | (level < 0), self._width)
        where = np.flatnonzero(level)
        signs = np.packbits(level[where] < 0).tobytes()
        if code == DENSE:
            return head + packing.pack_rice(np.abs(level), width) + signs
        head += packing.varint(len(where))
        if len(where) == 0:
            return head
        places = packing.pack_positions(where.astype(np.int32), len(level))
        more = b"" if self.levels == 1 else packing.pack_rice(np.abs(level[where]) - 1, width)
        return head + places + signs + more

    def read(self, reader: Reader, sizes: Sizes) -> Levels:
        """Norms and levels, whatever the code."""
        p, s = sum(sizes), self.levels
        if (found := reader.varint()) != s:
            raise CodecError(f"the message has {found} levels, expected {s}")
        if reader.varint() != self._norm_kind:
            raise CodecError("the message's norms are of other parts than expected")
        norm = np.frombuffer(reader.take(4 * self._parts(sizes)), "<f4").astype(np.float32)
        if not np.isfinite(norm).all() or (norm < 0).any():
            raise CodecError("the message's norms are not what norms can be")
        code, width = divmod(reader.byte(), 1 << 6)
        if reader.left > whole_bytes(p * self._width):
            raise CodecError("the message is longer than the plainest code of its levels")
        if code == FIXED and width == 0:
            level = reader.fixed(p, self._width)
            negative = level & 1 == 1
            level >>= 1
        elif code == DENSE and width <= packing.MOST_WIDTH:
            level = reader.rice(p, width, p * s)
            negative = level > 0
            negative[negative] = reader.flags(int(np.count_nonzero(negative)))
        elif code == SPARSE and width <= packing.MOST_WIDTH:
            n = reader.varint()
            if n > p:
                raise CodecError(f"invalid count of non-zero numbers: {n} of {p}")
            level, negative = np.zeros(p, np.int32), np.zeros(p, bool)
            if n:
                where = reader.positions(n, p)
                negative[where] = reader.flags(n)
                level[where] = 1 if s == 1 else reader.rice(n, width, n * s) + 1
        else:
            raise CodecError(f"the message is in a code that does not exist ({code}, {width})")
        if level.size and (level.max() > s or level.min() < 0):
            raise CodecError(f"a level in the message is above {s}")
        return Levels(norm, np.negative(level, out=level, where=negative))

    def _plan(self, level: Int[Array, " p"]) -> Plan:
        """The code for these levels; its length follows from a few sums."""
        p = level.shape[0]
        plain = jnp.int32(whole_bytes(p * self._width))
        if self.code == "fixed":
            return Plan(jnp.int32(FIXED), jnp.int32(0), plain)
        size = jnp.abs(level)
        n, most = jnp.sum(size > 0, dtype=jnp.int32), p * self.levels
        signs = whole_bytes(n)
        if self.levels == 1:  # all that is not 0 is 1: there is nothing more to add up
            dense = packing.Rice(jnp.int32(0), whole_bytes(p + n))
            above = packing.Rice(jnp.int32(0), jnp.int32(0))
        else:
            total = packing.exact_sum(size, most)
            dense = packing.rice(size, jnp.int32(p), total, most)
            above = packing.rice(jnp.maximum(size - 1, 0), n, total - n.astype(jnp.float32), most)
        places = packing.varint_bytes(n) + jnp.where(
            n > 0, packing.positions_bytes(n, p) + signs, 0
        )
        lengths = jnp.stack(
            [
                plain,
                places + above.bytes,
                dense.bytes + signs,
            ]
        ).astype(jnp.int32)
        code = jnp.argmin(lengths)
        width = jnp.stack([jnp.int32(0), above.width, dense.width])[code]
        return Plan(code, width, lengths[code])

    @property
    def _width(self) -> int:
        """The bits of a sign and a level."""
        return 1 + self.levels.bit_length()

    def _parts(self, sizes: Sizes) -> int:
        if self.norm == "tensor":
            return len(sizes)
        return 1 if self.norm == "whole" else -(-sum(sizes) // int(self.norm))

    @property
    def _norm_kind(self) -> int:
        """What the norms are of, as a number in the message: 0, 1, or a bucket's size plus one."""
        return {"whole": 0, "tensor": 1}[self.norm] if isinstance(self.norm, str) else self.norm + 1

    @property
    def _settings(self) -> bytes:
        return packing.varint(self.levels) + packing.varint(self._norm_kind)

    def _split(self, x: Vector, sizes: Sizes) -> list[Vector] | Float[Array, "parts bucket"]:
        """The parts that have a norm each."""
        if self.norm == "whole":
            return [x]
        if self.norm == "tensor":
            return list(jnp.split(x, np.cumsum(sizes)[:-1]))
        bucket = int(self.norm)
        padded = jnp.pad(x, (0, self._parts(sizes) * bucket - x.shape[0]))
        return padded.reshape(-1, bucket)

    def _each(self, parts: Float[Array, " parts"], sizes: Sizes) -> Float[Array, "..."]:
        """Each entry's part, from one number per part."""
        if self.norm == "whole":
            return parts[0]
        if self.norm == "tensor":
            return jnp.concatenate(
                [jnp.broadcast_to(part, size) for part, size in zip(parts, sizes, strict=True)]
            )
        spread = jnp.broadcast_to(parts[:, None], (parts.shape[0], int(self.norm)))
        return spread.ravel()[: sum(sizes)]


@partial(jax.jit, static_argnums=0)
def _plan(codec: LowPrecision, level: Int[Array, " p"]) -> Plan:
    return codec._plan(level)


def _norms(parts: list[Vector] | Float[Array, "parts bucket"]) -> Float[Array, " parts"]:
    """The Euclidean norm of each part."""
    if isinstance(parts, list):
        return jnp.stack([jnp.sqrt(jnp.sum(part**2)) for part in parts])
    return jnp.sqrt(jnp.sum(parts**2, axis=1))


def _scales(
    parts: list[Vector] | Float[Array, "parts bucket"],
) -> tuple[Float[Array, " parts"], Float[Array, " parts"]]:
    """For each part a power of two that brings its largest entry near 1, and its inverse."""
    if isinstance(parts, list):
        largest = jnp.stack([jnp.max(jnp.abs(part), initial=0.0) for part in parts])
    else:
        largest = jnp.max(jnp.abs(parts), axis=1)
    # A float without its fraction is a power of two; its inverse has the opposite exponent. Both
    # must be floats of full precision.
    exponent = jax.lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
    exponent = jnp.clip(exponent, 1 << 23, 253 << 23)
    power = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    return jax.lax.bitcast_convert_type((254 << 23) - exponent, jnp.float32), power
