"""Data of all clients: sources, splits over clients, and the federation they make."""

from collections.abc import Callable

from perfed.data.federation import Federation, FlatExamples
from perfed.data.sources import digits, synthetic

SOURCES: dict[str, Callable[..., Federation]] = {"synthetic": synthetic, "digits": digits}

__all__ = ["SOURCES", "Federation", "FlatExamples", "digits", "synthetic"]
