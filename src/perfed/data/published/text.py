"""Plays of Shakespeare, by speaking role."""

import re
from math import ceil
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from numpy.lib.stride_tricks import sliding_window_view

from perfed.core.errors import DataError, FieldError, require_count
from perfed.data.dataset import Dataset
from perfed.data.published.download import locate
from perfed.data.published.formats import read_text
from perfed.data.published.sets import SHAKESPEARE

# Each role must have at least this many examples.
_MIN_WINDOWS = 4


def shakespeare(
    root: str | None = None, context: int = 80, stride: int = 1, min_characters: int = 1000
) -> Dataset:
    """Plays of Shakespeare: predict the next character; one natural client per speaking role.

    Args:
        root: a folder with `tinyshakespeare.txt` or `input.txt`; None: PERFED_DATA, the cache or a
            download.
        context: number of characters from which the next is predicted.
        stride: number of characters between the starts of two examples.
        min_characters: leave out roles with fewer characters.
    """
    require_count("context", context)
    require_count("stride", stride)
    require_count("min_characters", min_characters)
    path = locate(SHAKESPEARE, root).paths[0]
    text = read_text(path)
    roles = {name: "\n".join(own) for name, own in _speeches(text, path).items()}
    used = {name: own for name, own in roles.items() if len(own) >= min_characters}
    if not used:
        most = max(map(len, roles.values()))
        allowed = f"no role has as many; the longest of the {len(roles)} has {most}"
        raise FieldError("min_characters", min_characters, allowed)
    lengths = {name: len(own) for name, own in used.items()}
    _require_long_enough(lengths, min_characters, context, stride)
    vocabulary = tuple(sorted(set(text)))
    if len(vocabulary) > 256:
        raise DataError(
            f"{path}: the text has {len(vocabulary)} different characters, and 256 are allowed; "
            "replace some"
        )
    sizes = [_windows(len(own), context, stride) for own in used.values()]
    x = np.empty((sum(sizes), context), np.uint8)
    y = np.empty(sum(sizes), np.int32)
    ends = np.cumsum(sizes)
    for own, end, size in zip(used.values(), ends, sizes, strict=True):
        windows = sliding_window_view(_indices(own, vocabulary), context + 1)[::stride]
        x[end - size : end], y[end - size : end] = windows[:, :context], windows[:, context]
    return Dataset(
        x,
        y,
        vocabulary,
        client=np.repeat(np.arange(len(used), dtype=np.int32), sizes),
        names=tuple(used),
        vocabulary=vocabulary,
        gap=ceil(context / stride),
    )


def _speeches(text: str, path: Path) -> dict[str, list[str]]:
    """The speeches of each role; roles are in the order of their first speech."""
    roles: dict[str, list[str]] = {}
    for block in re.split(r"\n\s*\n", text.strip()):
        head, _, speech = block.partition("\n")
        name = head.strip().removesuffix(":")
        if not name or not head.strip().endswith(":"):
            raise DataError(
                f"{path}: a block begins with {head[:40]!r}; the first line of each must be the "
                "speaker's name and a colon, and an empty line must follow it"
            )
        roles.setdefault(name, [])
        if speech:
            roles[name].append(speech)
    return roles


def _windows(length: int, context: int, stride: int) -> int:
    """The number of windows of a text: a context and the character after it."""
    return max(0, (length - context - 1) // stride + 1)


def _require_long_enough(
    lengths: dict[str, int], min_characters: int, context: int, stride: int
) -> None:
    """Raise unless each role has windows on both sides of the gap."""
    gap = ceil(context / stride)
    needed = context + 1 + (gap + _MIN_WINDOWS - 1) * stride
    short = {name: length for name, length in lengths.items() if length < needed}
    if short:
        name = min(short, key=short.__getitem__)
        raise FieldError(
            "min_characters",
            min_characters,
            f"{len(short)} of {len(lengths)} roles are too short for {_MIN_WINDOWS} examples of "
            f"{context} characters and a gap of {gap} ({name} has {short[name]} characters); with "
            f"context = {context} and stride = {stride} it must be at least {needed}",
        )


def _indices(text: str, vocabulary: tuple[str, ...]) -> UInt8[np.ndarray, " n"]:
    """Each character's index in the sorted vocabulary."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    known = np.array([ord(character) for character in vocabulary], np.uint32)
    return np.searchsorted(known, codes).astype(np.uint8)
