"""Errors that a client answers with, and how much of an error the server is told."""

import os
from typing import final

from perfed.core.errors import CodecError, ConfigError, DataError, DivergedError

# What a client says of an experiment that it has to be asked to join first.
UNKNOWN = "no such experiment here:"


@final
class RefusalError(DataError):
    """Why a client gives no answer, in words for the server too: no row, and no path."""


@final
class OwnDataError(DataError):
    """The client's own file cannot be used; the text may quote it."""


# What these say is ours, and is about messages, settings and rounds.
_OPEN = (RefusalError, CodecError, ConfigError, DivergedError)


def public_text(error: Exception) -> str:
    """What the server is told of an error: nothing that may quote a row, or name a file."""
    if isinstance(error, OwnDataError):
        return "its data cannot be read as the configuration says; its own log says why"
    text = "its own log says why"
    if isinstance(error, _OPEN):
        text = " ".join(str(error).split())
    elif isinstance(error, OSError) and error.errno:
        text = f"[Errno {error.errno}] {os.strerror(error.errno)}"
    return f"{type(error).__name__}: {text}"
