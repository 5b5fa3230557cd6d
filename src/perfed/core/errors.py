"""Errors that name what was wrong, where, and what to do."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any, final


class FieldError(ValueError):
    """An invalid setting: its name, its value, and what is allowed.

    Example:
        >>> import perfed
        >>> perfed.FedAvg(lr=-1)
        Traceback (most recent call last):
        perfed.core.errors.FieldError: lr = -1: must be a number greater than 0
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} = {value!r}: {allowed}")
        self.field, self.value, self.allowed = field, value, allowed


class DataError(ValueError):
    """Invalid data, or a split that the data do not allow."""


class ConfigError(ValueError):
    """An invalid configuration: what is wrong with it, one error per line."""


@final
class BroadcastError(ConfigError):
    """An error that all processes of a run know of, so that one of them may report it for all."""


class CodecError(ValueError):
    """A message that cannot be decoded, or a delta that cannot be encoded."""


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
