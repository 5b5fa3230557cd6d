"""Readers of the formats that data are published in.

No memory is allocated for what a header claims but the file does not have, nothing in a file can
run code, and every error is a `DataError` that names the file.
"""

import gzip
import os
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast, final

import numpy as np
from jaxtyping import Shaped

from perfed.core.errors import DataError

# The most bytes that an array may have; all published ones are far smaller.
MAX_BYTES = 2**31

_IDX_TYPES: dict[int, np.dtype[Any]] = {0x08: np.dtype(np.uint8), 0x0C: np.dtype(">i4")}
_NUMPY_AXES = 64
_CHUNK = 1 << 20


def read_idx(path: str | Path) -> Shaped[np.ndarray, "..."]:
    """The array of an IDX file, gzipped or not: bytes (ubyte) or whole numbers (int32)."""
    with _open(path) as stream:
        head = _read_up_to(stream, 4)
        if len(head) < 4 or head[:2] != b"\0\0":
            raise format_error(path, f"not an IDX file: it begins with {head.hex() or 'nothing'}")
        code, axes = head[2], head[3]
        if code not in _IDX_TYPES:
            known = " or ".join(f"0x{known:02x}" for known in _IDX_TYPES)
            raise format_error(path, f"IDX type 0x{code:02x} is not supported; use {known}")
        sizes = _read_up_to(stream, 4 * axes)
        if len(sizes) < 4 * axes or not 1 <= axes <= _NUMPY_AXES:
            raise format_error(path, f"the IDX header says {axes} axes and has {len(sizes) // 4}")
        shape = tuple(int(size) for size in np.frombuffer(sizes, ">u4"))
        # Python's integers do not overflow.
        claimed = prod(shape) * _IDX_TYPES[code].itemsize
        if not 0 < claimed <= MAX_BYTES:
            raise format_error(
                path, f"the IDX header claims sizes {shape}, that is {claimed:,} bytes"
            )
        body = _read_up_to(stream, claimed + 1)
    if len(body) != claimed:
        found = f"{len(body):,}" if len(body) < claimed else "more"
        wrong = f"the IDX header claims {claimed:,} bytes of values, the file has {found}"
        raise format_error(path, wrong)
    values = np.frombuffer(body, _IDX_TYPES[code]).reshape(shape)
    return values.astype(_IDX_TYPES[code].newbyteorder("="), copy=False)


def read_text(path: str | Path, limit: int = 1 << 28) -> str:
    """The text of a UTF-8 file, gzipped or not; line endings become newlines."""
    with _open(path) as stream:
        raw = _read_up_to(stream, limit + 1)
    if len(raw) > limit:
        raise format_error(path, f"the text is longer than {limit:,} bytes", "use a shorter one")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise format_error(
            path, f"not UTF-8 text ({error.reason} at byte {error.start})"
        ) from error


def read_bytes(path: str | Path, limit: int) -> bytes:
    """The bytes of a file of at most `limit`."""
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > limit:
                raise format_error(path, f"it has {size:,} bytes, and the limit is {limit:,}")
            return stream.read(limit)
    except OSError as error:
        raise format_error(path, f"it cannot be read ({error.strerror})") from error


def read_tar(
    path: str | Path, names: Collection[str], limit: int = 1 << 26
) -> Iterator[tuple[str, bytes]]:
    """The named members of a tar archive, gzipped or not, in the archive's order.

    Nothing is written to disk. A member may have `limit` bytes, and the archive that many for each
    name and a little more, so that a compressed archive cannot fill the memory. The folder of a
    member is not compared.
    """
    missing = set(names)
    with _open(path) as stream:
        bounded = _Bounded(stream, limit * len(missing) + _CHUNK, path)
        try:
            with tarfile.open(fileobj=bounded, mode="r|") as archive:  # type: ignore[call-overload]
                for member in archive:
                    name = PurePosixPath(member.name).name
                    if name not in names or not member.isreg():
                        continue
                    if name not in missing:
                        raise format_error(path, f"the archive has {name} twice")
                    if member.size > limit:
                        raise format_error(path, f"{name} in it has {member.size:,} bytes")
                    missing.remove(name)
                    yield name, archive.extractfile(member).read()
        except (DataError, OSError, EOFError, zlib.error):
            raise
        except Exception as error:  # a damaged archive can raise anything
            raise format_error(path, f"not a complete tar archive ({error})") from error
    if missing:
        raise format_error(path, f"the archive has no {', '.join(sorted(missing))}")


def read_npz(path: str | Path, names: Sequence[str]) -> dict[str, Shaped[np.ndarray, "..."]]:
    """The named arrays of a NumPy archive; arrays of Python objects, which are pickles, raise."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {name: _read_npy(archive, name, path) for name in names}
    except DataError:
        raise
    except OSError as error:
        raise format_error(path, f"it cannot be read ({error.strerror or error})") from error
    except Exception as error:  # a damaged archive can raise anything
        raise format_error(path, f"not an .npz archive, or a damaged one ({error})") from error


def _read_npy(archive: zipfile.ZipFile, name: str, path: str | Path) -> Shaped[np.ndarray, "..."]:
    """One array of an archive.

    NumPy allocates what a header claims before it reads on, so the claim is checked first.
    """
    members = archive.namelist()
    if f"{name}.npy" not in members:
        has = ", ".join(member.removesuffix(".npy") for member in members) or "nothing"
        raise format_error(path, f'the archive has no array "{name}"; it has {has}')
    info = archive.getinfo(f"{name}.npy")
    with archive.open(info) as stream:
        npy = np.lib.format
        version = npy.read_magic(stream)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read_header(stream)
    if dtype.hasobject:
        wrong = f'array "{name}" has Python objects, which are never loaded'
        raise format_error(path, wrong, "store it as numbers")
    claimed = prod(shape) * dtype.itemsize
    if claimed > min(info.file_size, MAX_BYTES):
        raise format_error(
            path, f'array "{name}" claims {claimed:,} bytes and has {info.file_size:,}'
        )
    with archive.open(info) as stream:
        array: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)
        # The checksum is compared at the array's end.
        if stream.read(1):
            raise format_error(path, f'array "{name}" has more bytes than it claims')
    return array


def format_error(
    where: str | Path, wrong: str, remedy: str = "get the file again from where it is published"
) -> DataError:
    """The error for a file: what is wrong with it, and what to do."""
    return DataError(f"{where}: {wrong}; {remedy}")


@contextmanager
def _open(path: str | Path) -> Iterator[IO[bytes]]:
    """A file's bytes, unpacked if they are gzipped, whatever the file's name."""
    try:
        with open(path, "rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not zipped:
                yield raw
                return
            with gzip.GzipFile(fileobj=raw) as stream:
                yield cast(IO[bytes], stream)
    except EOFError as error:
        raise format_error(path, "its gzip data are truncated") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise format_error(path, f"its gzip data are damaged ({error})") from error
    except OSError as error:
        raise format_error(path, f"it cannot be read ({error.strerror or error})") from error


def _read_up_to(stream: IO[bytes], count: int) -> bytearray:
    """At most this many bytes; memory grows as they arrive."""
    data = bytearray()
    while len(data) < count:
        more = stream.read(min(_CHUNK, count - len(data)))
        if not more:
            break
        data += more
    return data


@final
class _Bounded:
    """A stream that raises after `limit` bytes."""

    def __init__(self, stream: IO[bytes], limit: int, where: str | Path) -> None:
        self._stream, self._remaining, self._where = stream, limit, where

    def read(self, count: int) -> bytes:
        found = self._stream.read(count)
        self._remaining -= len(found)
        if self._remaining < 0:
            raise format_error(self._where, "the archive has far more bytes than it should")
        return found
