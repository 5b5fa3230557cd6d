"""The parts of a message: trees as their codecs write them. An empty tree has no part."""

from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from perfed.core.errors import CodecError
from perfed.core.trees import Params
from perfed.pipeline.codecs import Codec


def encode_parts(*trees: tuple[Codec, PRNGKeyArray, Params]) -> list[bytes]:
    """Trees as parts of a message, each by its codec with its own randomness."""
    return [codec.encode(key, tree) for codec, key, tree in trees if jax.tree.leaves(tree)]


def decode_parts(parts: list[bytes], *expected: tuple[Codec, Params]) -> list[Any]:
    """The trees in the parts of a message, each with the shapes of the expected one."""
    count = sum(bool(jax.tree.leaves(like)) for _, like in expected)
    if len(parts) != count:
        raise CodecError(f"expected {count} parts in the message, got {len(parts)}")
    rest = iter(parts)
    return [
        codec.decode(next(rest), like) if jax.tree.leaves(like) else like
        for codec, like in expected
    ]
