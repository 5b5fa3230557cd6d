"""Codecs that write every entry alike: as a float of some width, or as its sign."""

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Bool, Float, PRNGKeyArray

from perfed.core.errors import CodecError
from perfed.pipeline.codecs.base import AnyArray, Codec, Sent, Sizes, Tree, Vector
from perfed.pipeline.codecs.packing import Reader, whole_bytes


@final
@dataclass(frozen=True)
class Float32(Codec):
    """Every entry as it is: four bytes each."""

    name: ClassVar[str] = "float32"
    number: ClassVar[int] = 0

    def send(self, key: PRNGKeyArray, tree: Tree) -> Sent:
        """The change itself: nothing is to be computed."""
        p = sum(leaf.size for leaf in jax.tree.leaves(tree))
        return Sent(tree, jnp.int32(len(self._header(tree)) + 4 * p))

    def symbols(self, key: PRNGKeyArray, x: Vector, sizes: Sizes) -> Vector:
        """The entries."""
        return x

    def values(self, symbols: Vector, sizes: Sizes) -> Vector:
        """The entries."""
        return symbols

    def variance(self, sizes: Sizes) -> float:
        """Nothing is lost."""
        return 0.0

    def symbols_bytes(self, symbols: Vector, sizes: Sizes) -> int:
        """Four for each entry."""
        return 4 * sum(sizes)

    def write(self, symbols: Vector, sizes: Sizes) -> bytes:
        """Little-endian floats."""
        return np.asarray(symbols, "<f4").tobytes()

    def read(self, reader: Reader, sizes: Sizes) -> Vector:
        """Little-endian floats."""
        return _finite(np.frombuffer(reader.take(4 * sum(sizes)), "<f4").astype(np.float32))


@dataclass(frozen=True)
class _Half(Codec, ABC):
    """Two bytes for each entry."""

    kind: ClassVar[type[np.generic]]

    def symbols(self, key: PRNGKeyArray, x: Vector, sizes: Sizes) -> Vector:
        """The nearest float of the kind; what is beyond the largest becomes the largest."""
        most = float(jnp.finfo(self.kind).max)
        return jnp.clip(x, -most, most).astype(self.kind)

    def values(self, symbols: Vector, sizes: Sizes) -> Vector:
        """The same numbers."""
        return symbols.astype(jnp.float32)

    def symbols_bytes(self, symbols: Vector, sizes: Sizes) -> int:
        """Two for each entry."""
        return 2 * sum(sizes)

    def write(self, symbols: Vector, sizes: Sizes) -> bytes:
        """Little-endian, as the machine has them."""
        return np.asarray(symbols).view(np.uint16).astype("<u2").tobytes()

    def read(self, reader: Reader, sizes: Sizes) -> Vector:
        """What was written."""
        raw = np.frombuffer(reader.take(2 * sum(sizes)), "<u2").astype(np.uint16)
        return _finite(raw.view(self.kind))


@final
@dataclass(frozen=True)
class Float16(_Half):
    """Every entry as a half-precision float: two bytes each, of limited range."""

    name: ClassVar[str] = "float16"
    number: ClassVar[int] = 1
    kind: ClassVar[type[np.generic]] = np.float16


@final
@dataclass(frozen=True)
class BFloat16(_Half):
    """Every entry as a bfloat16: two bytes each, float32's range at less precision."""

    name: ClassVar[str] = "bfloat16"
    number: ClassVar[int] = 3
    kind: ClassVar[type[np.generic]] = ml_dtypes.bfloat16


class Signs(NamedTuple):
    """The mean size of the entries, and which are negative."""

    scale: Float[AnyArray, ""]
    negative: Bool[AnyArray, " p"]


@final
@dataclass(frozen=True)
class Sign(Codec):
    """The sign of every entry, and their mean size: one bit each. Best with error feedback."""

    name: ClassVar[str] = "sign"
    number: ClassVar[int] = 4

    def symbols(self, key: PRNGKeyArray, x: Vector, sizes: Sizes) -> Signs:
        """Mean |x| and the signs."""
        # Divided before it is added up, for sums that a float cannot hold.
        return Signs(jnp.sum(jnp.abs(x) / x.shape[0]), x < 0)

    def values(self, symbols: Signs, sizes: Sizes) -> Vector:
        """The mean size with each entry's sign."""
        return jnp.where(symbols.negative, -symbols.scale, symbols.scale)

    def symbols_bytes(self, symbols: Signs, sizes: Sizes) -> int:
        """Four, and a bit for each entry."""
        return 4 + int(whole_bytes(sum(sizes)))

    def write(self, symbols: Signs, sizes: Sizes) -> bytes:
        """The scale and the bits."""
        scale = np.asarray(symbols.scale, "<f4").tobytes()
        return scale + np.packbits(symbols.negative).tobytes()

    def read(self, reader: Reader, sizes: Sizes) -> Signs:
        """The scale and the bits."""
        scale = _finite(np.frombuffer(reader.take(4), "<f4").astype(np.float32))[0]
        return Signs(scale, reader.flags(sum(sizes)))


def _finite(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # some NaNs of a bfloat16 raise a flag when looked at
        finite = np.isfinite(values).all()
    if not finite:
        raise CodecError("the message holds numbers that are not finite")
    return values
