"""FedPAQ's low-precision quantiser, eq. (4) (QSGD's), and the shortest of three codes for it."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from perfed.codecs import packing
from perfed.codecs.base import AnyArray, Codec, Sizes, Vector
from perfed.codecs.packing import Reader, whole_bytes
from perfed.errors import CodecError, require, require_count
from perfed.randomness import quick_uniform

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
    """FedPAQ's low-precision quantiser: norm * sign(x_i) * level/s, the level rounded at random.

    With y_i = s |x_i| / norm, the level is floor(y_i), or one more with probability
    y_i - floor(y_i), so the receiver's vector is x on average. Levels are written in the shortest
    of three codes: sign and level in fixed width; the places, signs and levels of the entries that
    are not zero; or a Rice code of all.

    Attributes:
        levels: s, the number of levels above zero.
        norm: what the Euclidean norm is taken of: the `whole` change as in the paper, each `tensor`
            of the model, or buckets of so many entries.
    """

    name: ClassVar[str] = "low-precision"
    number: ClassVar[int] = 2

    levels: int = 1
    norm: Literal["whole", "tensor"] | int = "whole"

    def __post_init__(self) -> None:
        require_count("levels", self.levels)
        allowed = f"must be at most {MOST_LEVELS}: more say less than float16 for as many bits"
        require(self.levels <= MOST_LEVELS, "levels", self.levels, allowed)
        if self.norm not in ("whole", "tensor"):
            whole = isinstance(self.norm, int) and not isinstance(self.norm, bool)
            allowed = 'must be "whole", "tensor", or the size of a bucket'
            require(whole and int(self.norm) >= 1, "norm", self.norm, allowed)

    def symbols(self, key: PRNGKeyArray, x: Vector, sizes: Sizes) -> Levels:
        """Norms and levels of x."""
        norm = self._norms(x, sizes)
        size = jnp.abs(x)
        # A part that is all zero has no norm to divide by; a lone entry may be rounded past s.
        y = size / self._each(jnp.where(norm > 0, norm, 1.0), sizes) * self.levels
        low = jnp.minimum(jnp.floor(y), self.levels)
        up = quick_uniform(key, x.shape[0]) < y - low
        level = jnp.minimum(low + up, self.levels).astype(jnp.int32)
        return Levels(norm, jnp.where(x < 0, -level, level))

    def values(self, symbols: Levels, sizes: Sizes) -> Vector:
        """norm/s * level, in this order: one rounding each, the same everywhere."""
        unit = symbols.norm * jnp.float32(1 / self.levels)
        return self._each(unit, sizes) * symbols.level.astype(jnp.float32)

    def symbols_bytes(self, symbols: Levels, sizes: Sizes) -> Int[Array, ""]:
        """The setting, the norms, and the shortest code."""
        fixed = len(packing.varint(self.levels)) + 4 * symbols.norm.shape[0] + 1
        return jnp.asarray(fixed + self._plan(symbols.level).bytes)

    def write(self, symbols: Levels, sizes: Sizes) -> bytes:
        """The setting, the norms, the choice of code, and the levels in it."""
        level = np.asarray(symbols.level)
        plan = _plan(self, level)
        code, width = int(plan.code), int(plan.width)
        head = packing.varint(self.levels) + np.asarray(symbols.norm, "<f4").tobytes()
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
            raise CodecError(f"the message has {found} levels, but {s} are due")
        norm = np.frombuffer(reader.take(4 * self._parts(sizes)), "<f4").astype(np.float32)
        if not np.isfinite(norm).all() or (norm < 0).any():
            raise CodecError("the message's norms are not what norms can be")
        code, width = divmod(reader.byte(), 1 << 6)
        if code == FIXED and width == 0:
            level = reader.fixed(p, self._width)
            negative = level & 1 == 1
            level >>= 1
        elif code == DENSE and width < 16:
            level = reader.rice(p, width, p * s)
            negative = level > 0
            negative[negative] = reader.flags(int(np.count_nonzero(negative)))
        elif code == SPARSE and width < 16:
            n = reader.varint()
            if n > p:
                raise CodecError(f"{n} of {p} numbers are said to be other than 0")
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
        """The shortest code for these levels; its length follows from a few sums."""
        p = level.shape[0]
        size = jnp.abs(level)
        n, total = jnp.sum(size > 0, dtype=jnp.int32), jnp.sum(size, dtype=jnp.int32)
        signs = whole_bytes(n)
        dense = packing.rice(size, jnp.int32(p), total)
        above = packing.rice(jnp.maximum(size - 1, 0), n, total - n)
        places = packing.varint_bytes(n) + jnp.where(
            n > 0, packing.positions_bytes(n, p) + signs, 0
        )
        lengths = jnp.stack(
            [
                jnp.int32(whole_bytes(p * self._width)),
                places + (0 if self.levels == 1 else above.bytes),
                dense.bytes + signs,
            ]
        ).astype(jnp.int32)
        code = jnp.argmin(lengths)
        sparse_width = jnp.int32(0) if self.levels == 1 else above.width
        width = jnp.stack([jnp.int32(0), sparse_width, dense.width])[code]
        return Plan(code, width, lengths[code])

    @property
    def _width(self) -> int:
        """The bits of a sign and a level."""
        return 1 + self.levels.bit_length()

    def _parts(self, sizes: Sizes) -> int:
        if self.norm == "tensor":
            return len(sizes)
        return 1 if self.norm == "whole" else -(-sum(sizes) // int(self.norm))

    def _norms(self, x: Vector, sizes: Sizes) -> Float[Array, " parts"]:
        if self.norm == "whole":
            parts = [x]
        elif self.norm == "tensor":
            parts = jnp.split(x, np.cumsum(sizes)[:-1])
        else:
            bucket = int(self.norm)
            padded = jnp.pad(x, (0, self._parts(sizes) * bucket - x.shape[0]))
            return _norm(padded.reshape(-1, bucket))
        return jnp.stack([_norm(part) for part in parts])

    def _each(self, parts: Float[Array, " parts"], sizes: Sizes) -> Float[Array, "..."]:
        """Each entry's part, from one number a part."""
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


def _norm(x: Float[Array, "... n"]) -> Float[Array, "..."]:
    """The Euclidean norm, without squares that are too large or too small for a float."""
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0.0)
    scaled = x / jnp.where(largest > 0, largest, 1.0)
    return largest[..., 0] * jnp.sqrt(jnp.sum(scaled**2, axis=-1))
