"""The head of a model, its last layer, for methods that treat it and the body differently."""

from dataclasses import replace
from typing import TypeVar

from perfed.core.errors import require
from perfed.core.objective import Batch, Objective
from perfed.core.trees import (
    Params,
    Patterns,
    as_tuple,
    is_any_named,
    is_named,
    leaf_paths,
    leaves_where,
    path_name,
)
from perfed.methods.base import Method
from perfed.methods.settings import pattern_settings

HEAD = "head"

_Method = TypeVar("_Method", bound=Method)


def resolve_patterns(
    field: str, patterns: Patterns, head: tuple[str, ...] | None, params: Params
) -> tuple[str, ...]:
    """Patterns as a model has them: the word "head" stands for what the model calls its head.

    Args:
        field: the setting, for the error if a pattern names no leaf.
        patterns: the patterns.
        head: the model's head; None: the model does not say, and "head" is a name like any other.
        params: the model's parameters, or their shapes.
    """
    names = [path_name(path) for path in leaf_paths(params)]
    found: list[str] = []
    for pattern in as_tuple(patterns):
        own = head if pattern == HEAD and head is not None else (pattern,)
        known = all(any(is_named(name, part) for name in names) for part in own)
        allowed = f"names no leaf of the model; they are {', '.join(names)}"
        require(known, field, pattern, allowed)
        found.extend(own)
    return tuple(found)


def resolve_heads(method: _Method, head: tuple[str, ...] | None, params: Params) -> _Method:
    """The method with its settings that name leaves as the model has them."""
    found = {
        field: resolve_patterns(field, patterns, head, params)
        for field, patterns in pattern_settings(method).items()
        if patterns is not None
    }
    return replace(method, **found) if found else method  # type: ignore[type-var]


def require_body(head: Patterns, params: Params) -> None:
    """Raise unless some of the model is not its head."""
    paths = leaf_paths(params)
    allowed = (
        "is the whole model, and this method needs a body below the head: take a model with "
        f"hidden layers, or name a part of this one ({', '.join(map(path_name, paths))})"
    )
    require(not all(is_any_named(path, head) for path in paths), "head", head, allowed)


def head_grad(objective: Objective, head: Patterns, w: Params, d: Batch) -> Params:
    """The gradient with the body held fixed."""
    return leaves_where(lambda path: is_any_named(path, head), objective.grad(w, d))


def body_grad(objective: Objective, head: Patterns, w: Params, d: Batch) -> Params:
    """The gradient with the head held fixed."""
    return leaves_where(lambda path: not is_any_named(path, head), objective.grad(w, d))
