"""Settings of methods, optimizers and schedules: checked by their types, numbers are leaves.

A class made by `settings_tree` is a frozen dataclass and a pytree. Its leaves are the settings
annotated as `Rate`, `Weight` or `Decay`, which are only computed with: values that differ in
nothing else have the same tree structure, and are one compiled program. All other settings are
static.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from numbers import Real
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import jax

from perfed.core.errors import require, require_choice, require_count
from perfed.core.objective import BatchSize
from perfed.core.trees import Patterns


class Leaf(NamedTuple):
    """Marks a setting as a leaf.

    Attributes:
        zero: whether it may be 0.
        below_one: whether it must be below 1.
    """

    zero: bool
    below_one: bool = False


Rate = Annotated[float, Leaf(zero=False)]  # a number greater than 0
Weight = Annotated[float, Leaf(zero=True)]  # a number of at least 0
Decay = Annotated[float, Leaf(zero=True, below_one=True)]  # a number from 0 to below 1

_Class = TypeVar("_Class")
_Check = Callable[[str, Any], None]
# All classes that were made by `settings_tree`, and may be settings of others.
_TREES: list[type[Any]] = []


@dataclass_transform(frozen_default=True)
def settings_tree(cls: type[_Class]) -> type[_Class]:
    """Make a class of settings a frozen dataclass and a pytree."""
    made: Any = dataclass(frozen=True)(cls)
    _TREES.append(made)

    # Annotations are read when first needed: the class may refer to what comes after it.
    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        children, static = _leaf_and_static_fields(made)
        return [getattr(value, f) for f in children], tuple(getattr(value, f) for f in static)

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        values, static = flatten(value)
        keys = [jax.tree_util.GetAttrKey(f) for f in _leaf_and_static_fields(made)[0]]
        return list(zip(keys, values, strict=True)), static

    def unflatten(static: tuple[Any, ...], values: Any) -> Any:
        # Not by the constructor, which checks settings: here they may be traced.
        new = object.__new__(made)
        names = [*_leaf_and_static_fields(made)[0], *_leaf_and_static_fields(made)[1]]
        for field, value in zip(names, [*values, *static], strict=True):
            object.__setattr__(new, field, value)
        return new

    jax.tree_util.register_pytree_with_keys(made, flatten_with_keys, unflatten, flatten)
    found: type[_Class] = made
    return found


def check_settings(value: Any) -> None:
    """Raise `FieldError` for the first setting that does not fit its type."""
    cls: Any = type(value)
    for field, check in _checks(cls).items():
        check(field, getattr(value, field))


def batch_settings(value: Any) -> dict[str, BatchSize | None]:
    """The settings that are sizes of batches."""
    return _settings_of_type(value, BatchSize)


def pattern_settings(value: Any) -> dict[str, Patterns]:
    """The settings that name leaves of the model."""
    return _settings_of_type(value, Patterns)


def _settings_of_type(value: Any, union: Any) -> dict[str, Any]:
    """The settings of a type that is a union, or of that or None."""
    options = list(get_args(union))
    return {
        name: getattr(value, name)
        for name, hint in get_type_hints(type(value), include_extras=True).items()
        if [part for part in get_args(hint) if part is not type(None)] == options
    }


@cache
def _leaf_and_static_fields(cls: type[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The settings that are leaves or trees of them, and the others."""
    hints = get_type_hints(cls, include_extras=True)
    names = [f.name for f in fields(cls)]
    chosen = [name for name in names if _leaf_of(hints[name]) is not None or _is_tree(hints[name])]
    return tuple(chosen), tuple(name for name in names if name not in chosen)


def _leaf_of(hint: Any) -> Leaf | None:
    """What marks a setting as a leaf, if it is one; it may be optional."""
    for part in (hint, *get_args(hint)):
        if get_origin(part) is Annotated:
            return next((mark for mark in part.__metadata__ if isinstance(mark, Leaf)), None)
    return None


def _is_tree(hint: Any) -> bool:
    return isinstance(hint, type) and any(issubclass(tree, hint) for tree in _TREES)


@cache
def _checks(cls: type[Any]) -> dict[str, _Check]:
    """How each setting is checked, by its type."""
    hints = get_type_hints(cls, include_extras=True)
    found = {f.name: _check_of(hints[f.name]) for f in fields(cls)}
    return {name: check for name, check in found.items() if check is not None}


def _check_of(hint: Any) -> _Check | None:
    optional = type(None) in get_args(hint)
    check = _check_of_type(hint, [part for part in get_args(hint) if part is not type(None)])
    if check is None or not optional:
        return check
    return lambda field, value: None if value is None else check(field, value)


def _check_of_type(hint: Any, options: list[Any]) -> _Check | None:
    if (mark := _leaf_of(hint)) is not None:
        return lambda field, value: _check_number(field, value, mark)
    if options == list(get_args(BatchSize)):
        return _check_batch_size
    if options == list(get_args(Patterns)):
        return _check_patterns
    if hint is int or options == [int]:
        return require_count
    if get_origin(hint) is Literal:
        return lambda field, value: require_choice(field, value, get_args(hint))
    if _is_tree(hint):
        what = f"must be an instance of {hint.__name__}"
        return lambda field, value: require(isinstance(value, hint), field, value, what)
    return None


def _check_number(field: str, value: Any, mark: Leaf) -> None:
    if isinstance(value, jax.Array):
        return  # computed: engines notice what is not finite
    real = isinstance(value, Real) and not isinstance(value, bool)
    end = 1.0 if mark.below_one else float("inf")
    valid = real and (0 < float(value) < end or (mark.zero and float(value) == 0))
    allowed = "must be a number, at least 0" if mark.zero else "must be a number greater than 0"
    if mark.below_one:
        allowed = "must be a number from 0 to below 1"
    require(bool(valid), field, value, allowed)


def _check_patterns(field: str, value: Any) -> None:
    names = value if isinstance(value, tuple) else (value,)
    valid = bool(names) and all(isinstance(name, str) and name for name in names)
    require(valid, field, value, "must be the name of a part of the model, or a tuple of names")


def _check_batch_size(field: str, value: Any) -> None:
    if isinstance(value, str):
        allowed = 'must be a whole number, or "full" for all of the client\'s data'
        require(value == "full", field, value, allowed)
    else:
        require_count(field, value)
