"""Errors that name what was wrong, where, and what to do."""

from collections.abc import Sequence


class FieldError(ValueError):
    """A setting that cannot be used: which one, what it was, and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} = {value!r}: {allowed}")
        self.field, self.value, self.allowed = field, value, allowed


class DataError(ValueError):
    """Data that cannot be used, or a split that the data cannot give."""


class ConfigError(ValueError):
    """A configuration that cannot be run: every fault in it, one a line."""


class DivergedError(RuntimeError):
    """An update that was not finite: of which client, in which round."""


def require_choice(field: str, value: object, choices: Sequence[str]) -> None:
    """Raise `FieldError` unless the value is one of the choices."""
    allowed = "must be one of " + ", ".join(f'"{choice}"' for choice in choices)
    require(value in choices, field, value, allowed)


def require(holds: bool, field: str, value: object, allowed: str) -> None:
    """Raise `FieldError` unless the condition holds."""
    if not holds:
        raise FieldError(field, value, allowed)
