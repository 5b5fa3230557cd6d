"""Errors that name what was wrong, where, and what to do."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any, final


class FieldError(ValueError):
    """A setting that cannot be used: which one, what it was, and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} = {value!r}: {allowed}")
        self.field, self.value, self.allowed = field, value, allowed


class DataError(ValueError):
    """Data that cannot be used, or a split that the data cannot give."""


class ConfigError(ValueError):
    """A configuration that cannot be run: what is wrong with it, one fault a line."""


@final
class BroadcastError(ConfigError):
    """A fault that all of the processes that compute a run have heard of: one may speak for all."""


class CodecError(ValueError):
    """A message that cannot be what it should be, or a change that cannot be made into one."""


class DivergedError(RuntimeError):
    """An update that was not finite: of which client, in which round."""


def require_choice(field: str, value: object, choices: Sequence[str]) -> None:
    """Raise `FieldError` unless the value is one of the choices."""
    allowed = "must be one of " + ", ".join(f'"{choice}"' for choice in choices)
    require(value in choices, field, value, allowed)


def require_count(field: str, value: Any) -> None:
    """Raise `FieldError` unless the value is a whole number of at least 1."""
    whole = not isinstance(value, bool) and isinstance(value, Integral)
    require(whole and int(value) >= 1, field, value, "must be a whole number, at least 1")


def require(holds: bool, field: str, value: object, allowed: str) -> None:
    """Raise `FieldError` unless the condition holds."""
    if not holds:
        raise FieldError(field, value, allowed)
