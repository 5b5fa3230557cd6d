"""Codecs that send a few entries: the largest, or some at random. The values go by a codec too."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray, UInt32

from perfed.core.errors import CodecError, require
from perfed.core.random import permuted
from perfed.pipeline.codecs import packing
from perfed.pipeline.codecs.base import AnyArray, Codec, Sizes, Symbols, Vector
from perfed.pipeline.codecs.packing import Reader
from perfed.pipeline.codecs.plain import Float32


class LargestEntries(NamedTuple):
    """Some entries: their positions, and their values as symbols of the inner codec."""

    position: Int[AnyArray, " k"]
    value: Symbols


@final
@dataclass(frozen=True)
class TopK(Codec):
    """The entries of largest size. Best with error feedback.

    Attributes:
        fraction: the part of all entries that is sent.
        inner: the codec their values go by.
    """

    name: ClassVar[str] = "top-k"
    number: ClassVar[int] = 5

    fraction: float = 0.01
    inner: Codec = field(default_factory=Float32)

    def __post_init__(self) -> None:
        _check(self.fraction, self.inner)

    def symbols(self, key: PRNGKeyArray, x: Vector, sizes: Sizes) -> LargestEntries:
        """The k largest, by position."""
        k = _count(self.fraction, x.shape[0])
        position = jnp.sort(jax.lax.top_k(jnp.abs(x), k)[1])
        return LargestEntries(position, self.inner.symbols(key, x[position], (k,)))

    def values(self, symbols: LargestEntries, sizes: Sizes) -> Vector:
        """Zero elsewhere."""
        k = _count(self.fraction, sum(sizes))
        value = self.inner.values(symbols.value, (k,))
        return jnp.zeros(sum(sizes)).at[symbols.position].set(value, unique_indices=True)

    def symbols_bytes(self, symbols: LargestEntries, sizes: Sizes) -> Int[Array, ""]:
        """Positions, whose length depends on k only, and values."""
        p = sum(sizes)
        k = _count(self.fraction, p)
        places = packing.positions_bytes(jnp.int32(k), p)
        return places + 1 + self.inner.symbols_bytes(symbols.value, (k,))

    def write(self, symbols: LargestEntries, sizes: Sizes) -> bytes:
        """Positions, then values."""
        p = sum(sizes)
        k = _count(self.fraction, p)
        places = packing.pack_positions(np.asarray(symbols.position), p)
        return places + _inner_bytes(self.inner, symbols.value, k)

    def read(self, reader: Reader, sizes: Sizes) -> LargestEntries:
        """Positions, then values."""
        k = _count(self.fraction, sum(sizes))
        return LargestEntries(
            reader.positions(k, sum(sizes)), _inner_symbols(self.inner, reader, k)
        )


class RandomEntries(NamedTuple):
    """Some entries: the seed that chose them, and their values as symbols of the inner codec."""

    seed: UInt32[AnyArray, " 2"]
    value: Symbols


@final
@dataclass(frozen=True)
class RandomK(Codec):
    """Entries at random, scaled up so that the receiver's vector is the delta on average.

    The message has a seed of eight bytes that chooses them. With error feedback they are not
    scaled.

    Attributes:
        fraction: the part of all entries that is sent.
        inner: the codec their values go by.
        scaled: whether they are scaled up, as is right without error feedback.
    """

    name: ClassVar[str] = "random-k"
    number: ClassVar[int] = 6

    fraction: float = 0.01
    inner: Codec = field(default_factory=Float32)
    scaled: bool = True

    def __post_init__(self) -> None:
        _check(self.fraction, self.inner)

    def with_feedback(self) -> "RandomK":
        """Without scaling: error feedback sends later what is left out."""
        return replace(self, scaled=False)

    def symbols(self, key: PRNGKeyArray, x: Vector, sizes: Sizes) -> RandomEntries:
        """A seed, and the values of the entries that it draws."""
        p = x.shape[0]
        k = _count(self.fraction, p)
        seed_key, value_key = jax.random.split(key)
        seed = jax.random.bits(seed_key, (2,), jnp.uint32)
        value = x[_sample_positions(seed, k, p)]
        if self.scaled:
            value = value * jnp.float32(p / k)
        return RandomEntries(seed, self.inner.symbols(value_key, value, (k,)))

    def values(self, symbols: RandomEntries, sizes: Sizes) -> Vector:
        """Zero elsewhere."""
        p = sum(sizes)
        k = _count(self.fraction, p)
        value = self.inner.values(symbols.value, (k,))
        return (
            jnp.zeros(p).at[_sample_positions(symbols.seed, k, p)].set(value, unique_indices=True)
        )

    def variance(self, sizes: Sizes) -> float | None:
        """p/k - 1, and what the inner codec adds to what is drawn; if they are scaled."""
        p = sum(sizes)
        k = _count(self.fraction, p)
        inner = self.inner.variance((k,))
        return None if inner is None or not self.scaled else (1 + inner) * p / k - 1

    def symbols_bytes(self, symbols: RandomEntries, sizes: Sizes) -> Any:
        """The seed and the values."""
        k = _count(self.fraction, sum(sizes))
        return 8 + 1 + self.inner.symbols_bytes(symbols.value, (k,))

    def write(self, symbols: RandomEntries, sizes: Sizes) -> bytes:
        """The seed, then the values."""
        k = _count(self.fraction, sum(sizes))
        seed = np.asarray(symbols.seed, "<u4").tobytes()
        return seed + _inner_bytes(self.inner, symbols.value, k)

    def read(self, reader: Reader, sizes: Sizes) -> RandomEntries:
        """The seed, then the values."""
        k = _count(self.fraction, sum(sizes))
        seed = np.frombuffer(reader.take(8), "<u4").astype(np.uint32)
        return RandomEntries(seed, _inner_symbols(self.inner, reader, k))


def _inner_bytes(inner: Codec, symbols: Symbols, k: int) -> bytes:
    """The inner codec's number, and what it writes."""
    return bytes([inner.number]) + inner.write(symbols, (k,))


def _inner_symbols(inner: Codec, reader: Reader, k: int) -> Symbols:
    if (found := reader.byte()) != inner.number:
        raise CodecError(f"the values go by codec {found}, not {inner.number} ({inner.name})")
    return inner.read(reader, (k,))


def _sample_positions(seed: UInt32[Array, " 2"], k: int, p: int) -> Int[Array, " k"]:
    """The first k entries of a random permutation."""
    return permuted(jax.random.wrap_key_data(seed, impl="threefry2x32"), jnp.arange(k), p)


def _count(fraction: float, p: int) -> int:
    return min(p, max(1, round(fraction * p)))


def _check(fraction: float, inner: Any) -> None:
    require(0 < fraction <= 1, "fraction", fraction, "must be greater than 0, and at most 1")
    require(isinstance(inner, Codec), "inner", inner, "must be a codec, such as LowPrecision()")
    plain = not isinstance(inner, TopK | RandomK)
    allowed = "must be a codec of all entries"
    require(plain, "inner", inner.name, allowed)
