"""Files that are whole or not there: written aside, flushed to the disk, then renamed."""

import json
import os
from pathlib import Path
from typing import Any

from perfed.core.errors import DataError


def read_json(path: Path) -> Any:
    """What a JSON file holds."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def write_whole(path: Path, contents: bytes) -> None:
    """Write a file so that, whatever happens, it is the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    """A rename is on the disk only once its folder is."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
