"""The contract of a codec: it turns a delta into bytes, and bytes back into a delta."""

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from perfed.core.errors import CodecError
from perfed.pipeline.codecs.packing import Reader, varint

AnyArray: TypeAlias = Any  # a NumPy array or a device array
Tree: TypeAlias = Any  # a pytree of float arrays
Vector = Float[AnyArray, " p"]
Symbols: TypeAlias = (
    Any  # a pytree of arrays: the content of a message, before it is packed into bits
)
Sizes = tuple[int, ...]  # of the tree's arrays, whose entries follow each other in a vector

MAGIC = 0x70
VERSION = 1


class Sent(NamedTuple):
    """A delta after it was sent: what the receiver decodes, and the message's bytes."""

    received: Tree
    bytes: Int[Array, ""]


@dataclass(frozen=True)
class Codec(ABC):
    """A way to encode a delta.

    The laws: `decode(encode(key, x), x)` is `compress(key, x)`, bit for bit, and
    `8 * len(encode(key, x))` is `bits(key, x)`. A subclass defines how a vector becomes symbols,
    how symbols become values, and how they are packed; so the laws hold if `read` undoes `write`.

    Example:
        >>> import jax, perfed
        >>> delta = {"w": jax.numpy.linspace(-1.0, 1.0, 1000)}
        >>> codec = perfed.LowPrecision(levels=15)
        >>> message = codec.encode(jax.random.key(0), delta)
        >>> 4 * 1000 // len(message)  # so many times shorter than float32
        16
        >>> codec.decode(message, delta)["w"].shape
        (1000,)
    """

    name: ClassVar[str]
    number: ClassVar[int]

    def with_feedback(self) -> "Codec":
        """The codec to use where the client keeps what messages leave out (`ErrorFeedback`)."""
        return self

    def send(self, key: PRNGKeyArray, tree: Tree) -> Sent:
        """What the receiver decodes, and the message's length; for use inside a compiled round."""
        x, sizes = _flatten(tree)
        symbols = self.symbols(key, x, sizes)
        length = self.symbols_bytes(symbols, sizes) + len(self._header(tree))
        return Sent(_unflatten(self.values(symbols, sizes), tree), jnp.asarray(length, jnp.int32))

    def compress(self, key: PRNGKeyArray, tree: Tree) -> Tree:
        """What the receiver decodes."""
        x, sizes = _flatten(tree)
        return _unflatten(_values(self, _symbols(self, key, x, sizes), sizes), tree)

    def bits(self, key: PRNGKeyArray, tree: Tree) -> int:
        """The exact length of the message, in bits."""
        return 8 * int(_sent(self, key, tree).bytes)

    def encode(self, key: PRNGKeyArray, tree: Tree) -> bytes:
        """The message."""
        x, sizes = _flatten(tree)
        if not np.isfinite(x).all():
            raise CodecError("the delta is not finite, so it cannot be sent")
        symbols = jax.tree.map(np.asarray, _symbols(self, key, x, sizes))
        if not all(np.isfinite(part).all() for part in _floats(symbols)):
            raise CodecError(f"the delta is too large for {self.name}; is the run diverging?")
        return self._header(tree) + self.write(symbols, sizes)

    def decode(self, message: bytes, like: Tree) -> Tree:
        """The delta in a message, shaped like `like`; an invalid message raises `CodecError`."""
        sizes = _sizes(like)
        p = sum(sizes)
        header, reader = self._header(like), Reader(message)
        for expected, what in zip(header[:3], ("mark", "version", "codec"), strict=True):
            if (found := reader.byte()) != expected:
                raise CodecError(f"the message's {what} is {found}, not {expected} ({self.name})")
        if (found := reader.varint()) != p:
            raise CodecError(f"the message has {found} numbers, expected {p}")
        if reader.take(2) != header[-2:]:
            raise CodecError("the message is for a model of other shapes")
        symbols = self.read(reader, sizes)
        reader.end()
        return _unflatten(_values(self, symbols, sizes), like)

    def _header(self, like: Tree) -> bytes:
        """A mark, the version, the codec, how many numbers there are, a hash of their shapes."""
        shapes = str([tuple(leaf.shape) for leaf in jax.tree.leaves(like)])
        check = zlib.crc32(shapes.encode()) & 0xFFFF
        start = bytes([MAGIC, VERSION, self.number])
        return start + varint(sum(_sizes(like))) + check.to_bytes(2, "little")

    def variance(self, sizes: Sizes) -> float | None:
        """FedPAQ's q, Assumption 1: E|Q(x) - x|^2 <= q |x|^2 for a tree of arrays so large.

        None where E Q(x) is not x, which the assumption requires as well.
        """
        return None

    # For subclasses: a vector becomes symbols, symbols become values or bytes, bytes symbols.

    @abstractmethod
    def symbols(self, key: PRNGKeyArray, x: Vector, sizes: Sizes) -> Symbols:
        """The symbols for x."""

    @abstractmethod
    def values(self, symbols: Symbols, sizes: Sizes) -> Vector:
        """The values that the receiver computes from symbols."""

    @abstractmethod
    def symbols_bytes(self, symbols: Symbols, sizes: Sizes) -> Int[Array, ""] | int:
        """How many bytes `write` gives."""

    @abstractmethod
    def write(self, symbols: Symbols, sizes: Sizes) -> bytes:
        """The symbols as bytes."""

    @abstractmethod
    def read(self, reader: Reader, sizes: Sizes) -> Symbols:
        """The symbols that `write` wrote."""


def _floats(symbols: Symbols) -> list[np.ndarray]:
    return [leaf for leaf in jax.tree.leaves(symbols) if leaf.dtype == np.float32]


def _sizes(tree: Tree) -> Sizes:
    return tuple(leaf.size for leaf in jax.tree.leaves(tree))


def _flatten(tree: Tree) -> tuple[Vector, Sizes]:
    leaves = [jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    return jnp.concatenate(leaves), tuple(leaf.size for leaf in leaves)


def _unflatten(x: Vector, like: Tree) -> Tree:
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    parts = jnp.split(x, ends)
    shaped = [
        part.reshape(leaf.shape).astype(leaf.dtype)
        for part, leaf in zip(parts, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, shaped)


_sent = jax.jit(lambda codec, key, tree: codec.send(key, tree), static_argnums=0)


@partial(jax.jit, static_argnums=(0, 3))
def _symbols(codec: Codec, key: PRNGKeyArray, x: Vector, sizes: Sizes) -> Symbols:
    return codec.symbols(key, x, sizes)


@partial(jax.jit, static_argnums=(0, 2))
def _values(codec: Codec, symbols: Symbols, sizes: Sizes) -> Vector:
    # On the device like `compress`, so that even the rounding of the last bit is the same.
    return codec.values(symbols, sizes)
