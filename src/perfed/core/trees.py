"""Arithmetic on trees of parameters. A leaf that is None is not there, and stays away."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Params: TypeAlias = Any  # a pytree of float arrays
Scalar = Float[Array, ""]
# The place of a leaf in its tree: keys, positions and names, as in `("layers", 0, "w")`.
Path = tuple[Any, ...]
# Which leaves: one pattern or several, as `is_named` reads them.
Patterns: TypeAlias = str | tuple[str, ...]


def tree_add(a: Params, b: Params) -> Params:
    """A + b."""
    return jax.tree.map(jnp.add, a, b)


def tree_sub(a: Params, b: Params) -> Params:
    """A - b."""
    return jax.tree.map(jnp.subtract, a, b)


def tree_scale(factor: float | Array, a: Params) -> Params:
    """Factor * a, in the type of a."""
    return jax.tree.map(lambda leaf: (factor * leaf).astype(leaf.dtype), a)


def tree_zeros_like(a: Params) -> Params:
    """Zeros."""
    return jax.tree.map(jnp.zeros_like, a)


def sgd_step(params: Params, lr: float | Array, grad: Params) -> Params:
    """Params - lr * grad, in the type of params."""
    return jax.tree.map(lambda p, g: (p - lr * g).astype(p.dtype), params, grad)


def tree_vdot(a: Params, b: Params) -> Scalar:
    """The inner product of all entries together."""
    return jnp.asarray(sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b))))


def squared_norm(tree: Params) -> Scalar:
    """The squared Euclidean norm of all entries together."""
    return tree_vdot(tree, tree)


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Whether every entry of every leaf is finite."""
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return jnp.array(finite).all() if finite else jnp.array(True)


def tree_size(tree: Params) -> int:
    """The number of entries."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def tree_bytes(tree: Any) -> int:
    """The bytes of all leaves."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def leaf_paths(tree: Params) -> list[Path]:
    """The place of every leaf."""
    return [_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def leaves_where(chosen: Callable[[Path], bool], tree: Params) -> Params:
    """The tree, with zeros for all leaves but those whose place is chosen."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if chosen(_path(path)) else jnp.zeros_like(leaf), tree
    )


def path_name(path: Path) -> str:
    """A place as text: `layers.0.w`; that of a tree which is a single leaf is `w`."""
    return ".".join(map(str, path)) or "w"


def is_named(name: str, pattern: str) -> bool:
    """Whether a leaf is named by a pattern: by its name, or as a part of the tree that it is in.

    `head` stands for `head.w` and `head.b`, and `*.lora_B` for what is so called in any layer.
    """
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def is_any_named(path: Path, patterns: Patterns) -> bool:
    """Whether the leaf at a place is named by one of the patterns."""
    name = path_name(path)
    return any(is_named(name, pattern) for pattern in as_tuple(patterns))


def as_tuple(patterns: Patterns) -> tuple[str, ...]:
    """All patterns."""
    return (patterns,) if isinstance(patterns, str) else patterns


def partition(tree: Params, chosen: Sequence[bool]) -> tuple[Params, Params]:
    """Two trees of one structure: one with the chosen leaves, one with the others."""
    leaves, structure = jax.tree.flatten(tree)
    if all(chosen):
        return tree, None
    parts = [
        jax.tree.unflatten(
            structure,
            [leaf if own == part else None for leaf, own in zip(leaves, chosen, strict=True)],
        )
        for part in (True, False)
    ]
    return parts[0], parts[1]


def combine(chosen: Params, others: Params) -> Params:
    """The tree that `partition` took apart."""
    if others is None:
        return chosen
    return jax.tree.map(
        lambda a, b: b if a is None else a, chosen, others, is_leaf=lambda leaf: leaf is None
    )


def split(tree: Params, chosen: Callable[[Path], bool]) -> tuple[Params, Params]:
    """The leaves at chosen places, and the others; of a part of a tree as of all of it."""
    parts = [
        jax.tree_util.tree_map_with_path(
            lambda path, leaf, part=part: leaf if chosen(_path(path)) == part else None, tree
        )
        for part in (True, False)
    ]
    return parts[0], parts[1]


def matching(part: Params, tree: Params) -> Params:
    """Of a tree the leaves that a part of it has."""
    return jax.tree.map(
        lambda own, leaf: None if own is None else leaf,
        part,
        tree,
        is_leaf=lambda leaf: leaf is None,
    )


def stack(trees: Sequence[Any]) -> Any:
    """Trees of one structure, stacked along a first axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def unstack(tree: Any) -> list[Any]:
    """The trees that `stack` put together."""
    count = len(jax.tree.leaves(tree)[0])
    return [row(tree, i) for i in range(count)]


def row(tree: Any, i: Any) -> Any:
    """One tree of a stack, or several for an array of positions."""
    return jax.tree.map(lambda leaf: leaf[i], tree)


def _path(path: Any) -> Path:
    return tuple(_key(part) for part in path)


def _key(part: Any) -> Any:
    for name in ("key", "idx", "name"):
        if hasattr(part, name):
            return getattr(part, name)
    return str(part)
