"""Readers of the formats that data are published in: from files to arrays, trusting nothing.

What a header claims is believed only once the bytes are there, nothing in a file can run code, and
every fault is a `DataError` that names the file.
"""

import gzip
import io
import os
import pickle
import pickletools
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast, final

import numpy as np
from jaxtyping import Shaped, UInt8

from perfed.core.errors import DataError

# The most bytes that one array may take; all the published ones are far smaller.
LARGEST = 2**31

CIFAR_CLASSES = 10
CIFAR_PIXELS = 3 * 32 * 32

_IDX_TYPES: dict[int, np.dtype[Any]] = {0x08: np.dtype(np.uint8), 0x0C: np.dtype(">i4")}
_NUMPY_AXES = 64
_CHUNK = 1 << 20


def read_idx(path: str | Path) -> Shaped[np.ndarray, "..."]:
    """The array of an IDX file, gzipped or not: bytes (ubyte) or whole numbers (int32)."""
    with _opened(path) as stream:
        head = _read_up_to(stream, 4)
        if len(head) < 4 or head[:2] != b"\0\0":
            raise _bad(path, f"this is no IDX file: it begins with {head.hex() or 'nothing'}")
        code, axes = head[2], head[3]
        if code not in _IDX_TYPES:
            known = " and ".join(f"0x{known:02x}" for known in _IDX_TYPES)
            raise _bad(path, f"IDX values of type 0x{code:02x} are not read; known are {known}")
        sizes = _read_up_to(stream, 4 * axes)
        if len(sizes) < 4 * axes or not 1 <= axes <= _NUMPY_AXES:
            raise _bad(path, f"the IDX header names {axes} axes and holds {len(sizes) // 4}")
        shape = tuple(int(size) for size in np.frombuffer(sizes, ">u4"))
        # Python's whole numbers: a product of sizes cannot wrap round to something small.
        claimed = prod(shape) * _IDX_TYPES[code].itemsize
        if not 0 < claimed <= LARGEST:
            raise _bad(path, f"the IDX header claims sizes {shape}, that is {claimed:,} bytes")
        body = _read_up_to(stream, claimed + 1)
    if len(body) != claimed:
        held = f"{len(body):,}" if len(body) < claimed else "more"
        raise _bad(path, f"the IDX header claims {claimed:,} bytes of values, the file has {held}")
    values = np.frombuffer(body, _IDX_TYPES[code]).reshape(shape)
    return values.astype(_IDX_TYPES[code].newbyteorder("="), copy=False)


def read_text(path: str | Path, limit: int = 1 << 28) -> str:
    """The text of a UTF-8 file, gzipped or not; lines end in a newline only."""
    with _opened(path) as stream:
        raw = _read_up_to(stream, limit + 1)
    if len(raw) > limit:
        raise _bad(path, f"the text is longer than {limit:,} bytes", "use a shorter one")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise _bad(path, f"this is no UTF-8 text ({error.reason} at byte {error.start})") from error


def read_bytes(path: str | Path, limit: int) -> bytes:
    """The bytes of a file of at most `limit`."""
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > limit:
                raise _bad(path, f"it is of {size:,} bytes, more than {limit:,}")
            return stream.read(limit)
    except OSError as error:
        raise _bad(path, f"it cannot be read ({error.strerror})") from error


def read_tar(
    path: str | Path, names: Collection[str], limit: int = 1 << 26
) -> Iterator[tuple[str, bytes]]:
    """The named members of a tar archive, gzipped or not, one by one as they come in it.

    Nothing is written to disk. A member may have `limit` bytes, and the whole archive as many for
    each name and a little more, so that what is compressed cannot fill the memory. A folder before
    a member's name is no part of it.
    """
    missing = set(names)
    with _opened(path) as stream:
        bounded = _Bounded(stream, limit * len(missing) + _CHUNK, path)
        try:
            with tarfile.open(fileobj=bounded, mode="r|") as archive:  # type: ignore[call-overload]
                for member in archive:
                    name = PurePosixPath(member.name).name
                    if name not in names or not member.isreg():
                        continue
                    if name not in missing:
                        raise _bad(path, f"the archive holds {name} twice")
                    if member.size > limit:
                        raise _bad(path, f"{name} in it is of {member.size:,} bytes")
                    missing.remove(name)
                    yield name, archive.extractfile(member).read()
        except (DataError, OSError, EOFError, zlib.error):
            raise
        except Exception as error:  # a damaged archive can raise anything at all
            raise _bad(path, f"this is no whole tar archive ({error})") from error
    if missing:
        raise _bad(path, f"the archive has no {', '.join(sorted(missing))}")


def read_cifar_binary(
    raw: bytes, where: str
) -> tuple[UInt8[np.ndarray, "n 32 32 3"], UInt8[np.ndarray, " n"]]:
    """Images and labels of a batch of CIFAR-10's binary version, as views of its bytes."""
    record = 1 + CIFAR_PIXELS
    if not raw or len(raw) % record:
        wrong = f"a CIFAR-10 batch is made of records of {record} bytes, and this has {len(raw):,}"
        raise _bad(where, wrong)
    rows = np.frombuffer(raw, np.uint8).reshape(-1, record)
    labels = rows[:, 0]
    if labels.max() >= CIFAR_CLASSES:
        wrong = f"label {labels.max()} of image {labels.argmax()} is not one of CIFAR-10's, 0 to 9"
        raise _bad(where, wrong)
    return _channels_last(rows[:, 1:]), labels


def read_cifar_python(
    raw: bytes, where: str
) -> tuple[UInt8[np.ndarray, "n 32 32 3"], UInt8[np.ndarray, " n"]]:
    """Images and labels of a batch of CIFAR-10's Python version.

    Such a batch is a pickle, and a pickle is a program. This one is read op by op first, and only
    the ops that plain values need are let through; then whatever it calls is a stand-in of this
    module, which checks its arguments and keeps them.
    """
    try:
        _require_plain_pickle(raw)
        batch = _BatchUnpickler(io.BytesIO(raw), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise anything at all
        raise _bad(where, f"this is no CIFAR-10 batch that can be read: {error}") from error
    if not isinstance(batch, dict):
        raise _bad(where, "this is no CIFAR-10 batch: it holds no table")
    data, labels = (batch.get(key, batch.get(key.encode())) for key in ("data", "labels"))
    if not isinstance(data, _Array) or data.values is None:
        raise _bad(where, "the batch has no array `data`")
    images = data.values
    if images.ndim != 2 or images.shape[1] != CIFAR_PIXELS:
        wrong = f"`data` is of shape {images.shape}, and a batch's is (n, {CIFAR_PIXELS})"
        raise _bad(where, wrong)
    if not isinstance(labels, list) or len(labels) != len(images):
        held = f"{len(labels)} of them" if isinstance(labels, list) else "none"
        raise _bad(where, f"the batch needs a list of {len(images)} `labels` and has {held}")
    # Python calls True a 1; a label is a whole number and nothing else.
    if not all(type(label) is int and 0 <= label < CIFAR_CLASSES for label in labels):
        raise _bad(where, "`labels` are not all whole numbers from 0 to 9, as CIFAR-10's are")
    return _channels_last(images), np.array(labels, np.uint8)


def read_npz(path: str | Path, names: Sequence[str]) -> dict[str, Shaped[np.ndarray, "..."]]:
    """The named arrays of a NumPy archive; none that holds Python objects, which are pickles."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {name: _read_npy(archive, name, path) for name in names}
    except DataError:
        raise
    except OSError as error:
        raise _bad(path, f"it cannot be read ({error.strerror or error})") from error
    except Exception as error:  # a damaged archive can raise anything at all
        raise _bad(path, f"this is no .npz archive, or a damaged one ({error})") from error


def _read_npy(archive: zipfile.ZipFile, name: str, path: str | Path) -> Shaped[np.ndarray, "..."]:
    """One array of an archive.

    NumPy makes room for what a header claims before it reads on, so the claim is checked first.
    """
    held = archive.namelist()
    if f"{name}.npy" not in held:
        has = ", ".join(member.removesuffix(".npy") for member in held) or "nothing"
        raise _bad(path, f'the archive has no array "{name}"; it has {has}')
    info = archive.getinfo(f"{name}.npy")
    with archive.open(info) as stream:
        form = np.lib.format
        first = form.read_magic(stream) == (1, 0)
        shape, _, dtype = (
            form.read_array_header_1_0(stream) if first else form.read_array_header_2_0(stream)
        )
    if dtype.hasobject:
        wrong = f'array "{name}" holds Python objects, which are never loaded'
        raise _bad(path, wrong, "store it as numbers")
    claimed = prod(shape) * dtype.itemsize
    if claimed > min(info.file_size, LARGEST):
        raise _bad(path, f'array "{name}" claims {claimed:,} bytes and has {info.file_size:,}')
    with archive.open(info) as stream:
        array: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)
        # Only at its end is an array's checksum compared.
        if stream.read(1):
            raise _bad(path, f'array "{name}" has more bytes than it claims')
    return array


def _channels_last(rows: UInt8[np.ndarray, "n 3072"]) -> UInt8[np.ndarray, "n 32 32 3"]:
    """Rows of red, green and blue planes as images; a view wherever the layout allows one."""
    return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _bad(
    where: str | Path, wrong: str, remedy: str = "get the file again from where it is published"
) -> DataError:
    return DataError(f"{where}: {wrong}; {remedy}")


@contextmanager
def _opened(path: str | Path) -> Iterator[IO[bytes]]:
    """A file's bytes, unpacked if they are gzipped, whatever the file is called."""
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
        raise _bad(path, "its gzip data are cut short") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _bad(path, f"its gzip data are damaged ({error})") from error
    except OSError as error:
        raise _bad(path, f"it cannot be read ({error.strerror or error})") from error


def _read_up_to(stream: IO[bytes], count: int) -> bytearray:
    """At most so many bytes, with room made only as they arrive."""
    found = bytearray()
    while len(found) < count:
        more = stream.read(min(_CHUNK, count - len(found)))
        if not more:
            break
        found += more
    return found


@final
class _Bounded:
    """A stream that ends in an error after `limit` bytes."""

    def __init__(self, stream: IO[bytes], limit: int, where: str | Path) -> None:
        self._stream, self._left, self._where = stream, limit, where

    def read(self, count: int) -> bytes:
        found = self._stream.read(count)
        self._left -= len(found)
        if self._left < 0:
            raise _bad(self._where, "the archive holds far more than it should")
        return found


# Ops that put values on the pickle's stack, gather them into tuples, lists and tables, and remember
# them. Persistent ids, registered extensions, classes and buffers from elsewhere are not here.
_PLAIN_OPS = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1
    BINSTRING SHORT_BINSTRING BINUNICODE SHORT_BINUNICODE BINUNICODE8
    BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS
    BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
"""


def _require_plain_pickle(raw: bytes) -> None:
    """Raise unless the pickle is made of plain ops; nothing is run.

    An op that claims more bytes than there are ends this too, before any room is made for it.
    """
    allowed = frozenset(_PLAIN_OPS.split())
    for count, (op, argument, _) in enumerate(pickletools.genops(raw)):
        if op.name not in allowed:
            raise pickle.UnpicklingError(f"the pickle has the op {op.name}, which is not allowed")
        # The memory of remembered values grows up to the largest place named.
        if op.name == "LONG_BINPUT" and cast(int, argument) > count:
            raise pickle.UnpicklingError("the pickle remembers more values than it has")


@final
class _Array:
    """Stands in for an array while a batch is read."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: np.ndarray | None = None

    def __setstate__(self, state: object) -> None:
        match state:
            case (int(), tuple(shape), _Bytes(ready=True), bool(fortran), bytes(data)):
                self.fill(data, shape, "F" if fortran else "C")
            case _:
                raise pickle.UnpicklingError("an array's contents are not those of bytes")

    def fill(self, data: bytes | bytearray, shape: tuple[Any, ...], order: str) -> None:
        """Take the values, once, if they are as many as the shape says."""
        sizes = all(type(size) is int and size >= 0 for size in shape) and len(shape) <= 8
        if self.values is not None or not sizes or prod(shape) != len(data) or not data:
            raise pickle.UnpicklingError("an array's shape is not that of its bytes")
        values = np.frombuffer(data, np.uint8)
        self.values = values.reshape(shape, order="F" if order == "F" else "C")


@final
class _Bytes:
    """Stands in for the type of an array of bytes, the only one a batch needs."""

    __slots__ = ("ready",)

    def __init__(self) -> None:
        self.ready = False

    def __setstate__(self, state: object) -> None:
        if state not in _BYTES_STATES:
            raise pickle.UnpicklingError("an array's type has odd properties")
        self.ready = True


# Version, byte order (none), fields, names and shape of its own (none), size, alignment, flags.
_BYTES_STATES = tuple((3, order, None, None, None, -1, -1, 0) for order in ("|", b"|"))


@final
class _Part:
    """Stands in for one global that a batch may name; no part of it can be changed by a pickle."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *args: object) -> object:
        return self._call(*args)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("the pickle changes a function")


def _encoded(*args: object) -> bytes:
    """Bytes, which older protocols write as text."""
    match args:
        case (str(text), "latin1" | "latin-1" | b"latin1" | b"latin-1"):
            return text.encode("latin-1")
    raise pickle.UnpicklingError("the pickle encodes text in an odd way")


def _dtype(*args: object) -> _Bytes:
    if args[:1] not in (("u1",), (b"u1",), ("|u1",), (b"|u1",)):
        raise pickle.UnpicklingError("the pickle has an array that is not of bytes")
    return _Bytes()


def _ndarray(*args: object) -> object:
    raise pickle.UnpicklingError("the pickle makes an array in an odd way")


def _empty_array(*args: object) -> _Array:
    if len(args) != 3 or args[0] is not _NDARRAY:
        raise pickle.UnpicklingError("the pickle makes an array in an odd way")
    return _Array()


def _filled_array(*args: object) -> _Array:
    """An array as protocol 5 writes it."""
    array = _Array()
    match args:
        case (bytes() | bytearray() as data, _Bytes(ready=True), tuple(shape), "C" | "F" as order):
            array.fill(data, shape, order)
            return array
    raise pickle.UnpicklingError("the pickle makes an array in an odd way")


_NDARRAY = _Part(_ndarray)

# What the published batches name, and what Python 3 and NumPy name in the same batches saved anew.
_PARTS = {
    ("_codecs", "encode"): _Part(_encoded),
    ("numpy", "dtype"): _Part(_dtype),
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy.core.multiarray", "_reconstruct"): _Part(_empty_array),
    ("numpy._core.multiarray", "_reconstruct"): _Part(_empty_array),
    ("numpy.core.numeric", "_frombuffer"): _Part(_filled_array),
    ("numpy._core.numeric", "_frombuffer"): _Part(_filled_array),
}


@final
class _BatchUnpickler(pickle.Unpickler):
    """An unpickler to which no name means anything but the stand-ins above."""

    def find_class(self, module: str, name: str) -> Any:
        part = _PARTS.get((module, name))
        if part is None:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no CIFAR-10 batch needs; nothing was run"
            )
        return part
