"""Which functions of the user's own may make a model (`[model] factory`): naming one runs code."""

from collections.abc import Collection, Mapping
from typing import Any

from perfed.core.errors import ConfigError
from perfed.models import PYTHON


def factories_of(model: Mapping[str, Any]) -> tuple[str, ...]:
    """The functions that a `[model]` section names."""
    return (model["factory"],) if model["name"] == PYTHON else ()


def check_factories(model: Mapping[str, Any], allowed: Collection[str], whose: str) -> None:
    """Raise if a `[model]` section from elsewhere names a function that is not allowed.

    Args:
        model: the section.
        allowed: the functions that are, as `package.module:function`.
        whose: where the section comes from.
    """
    for factory in factories_of(model):
        if factory not in allowed:
            raise ConfigError(
                f"model.factory = {factory!r}: {whose} names a Python function, which is not run "
                f"unless it is allowed here; if you know it, add --allow-factory {factory}"
            )
