"""Errors that a client replies with, and how much of an error the server may know."""

import os
from typing import Final, final

from perfed.core.errors import CodecError, ConfigError, DataError, DivergedError

# How a client says that it has to join an experiment first.
UNKNOWN_EXPERIMENT: Final = "unknown experiment"


@final
class RequestError(DataError):
    """A request that a client refuses. The server gets this text: it quotes no row and no path."""


@final
class ClientDataError(DataError):
    """The client's file cannot be used. The text may quote it, so the server does not get it."""


# Their texts are about messages, settings and rounds only.
_PUBLIC: Final = (RequestError, CodecError, ConfigError, DivergedError)


def public_message(error: Exception) -> str:
    """What the server is told of an error: nothing that may quote a row, or name a file."""
    if isinstance(error, ClientDataError):
        return "its data do not fit the configuration; see the client's log"
    text = "see the client's log"
    if isinstance(error, _PUBLIC):
        text = " ".join(str(error).split())
    elif isinstance(error, OSError) and error.errno:
        text = f"[Errno {error.errno}] {os.strerror(error.errno)}"
    return f"{type(error).__name__}: {text}"
