"""Batches of CIFAR-10, binary or pickled; nothing in a pickle is run."""

import io
import pickle
import pickletools
from collections.abc import Callable
from math import prod
from typing import Any, cast, final

import numpy as np
from jaxtyping import UInt8

from perfed.data.published.formats import format_error

CLASSES = 10
PIXELS = 3 * 32 * 32


def read_binary_batch(
    raw: bytes, where: str
) -> tuple[UInt8[np.ndarray, "n 32 32 3"], UInt8[np.ndarray, " n"]]:
    """Images and labels of a batch of CIFAR-10's binary version, as views of its bytes."""
    record = 1 + PIXELS
    if not raw or len(raw) % record:
        wrong = f"a CIFAR-10 batch has records of {record} bytes, and this has {len(raw):,} bytes"
        raise format_error(where, wrong)
    rows = np.frombuffer(raw, np.uint8).reshape(-1, record)
    labels = rows[:, 0]
    if labels.max() >= CLASSES:
        wrong = f"label {labels.max()} of image {labels.argmax()} is not one of CIFAR-10's, 0 to 9"
        raise format_error(where, wrong)
    return _channels_last(rows[:, 1:]), labels


def read_python_batch(
    raw: bytes, where: str
) -> tuple[UInt8[np.ndarray, "n 32 32 3"], UInt8[np.ndarray, " n"]]:
    """Images and labels of a batch of CIFAR-10's Python version.

    Such a batch is a pickle, and a pickle is a program. So its ops are checked first, and only
    those that plain values need are allowed; then every name in it means a replacement in this
    module, which checks its arguments.
    """
    try:
        _require_allowed_ops(raw)
        batch = _BatchUnpickler(io.BytesIO(raw), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise format_error(where, f"not a readable CIFAR-10 batch: {error}") from error
    if not isinstance(batch, dict):
        raise format_error(where, "not a CIFAR-10 batch: it is not a dictionary")
    data, labels = (batch.get(key, batch.get(key.encode())) for key in ("data", "labels"))
    if not isinstance(data, _Array) or data.values is None:
        raise format_error(where, "the batch has no array `data`")
    images = data.values
    if images.ndim != 2 or images.shape[1] != PIXELS:
        wrong = f"`data` has shape {images.shape}, and should have (n, {PIXELS})"
        raise format_error(where, wrong)
    if not isinstance(labels, list) or len(labels) != len(images):
        count = len(labels) if isinstance(labels, list) else "none"
        raise format_error(
            where, f"the batch needs a list of {len(images)} `labels`, and has {count}"
        )
    # True is an int in Python, but not a label.
    if not all(type(label) is int and 0 <= label < CLASSES for label in labels):
        raise format_error(where, "`labels` must be whole numbers from 0 to 9")
    return _channels_last(images), np.array(labels, np.uint8)


def _channels_last(rows: UInt8[np.ndarray, "n 3072"]) -> UInt8[np.ndarray, "n 32 32 3"]:
    """Rows of red, green and blue planes as images; a view wherever the layout allows one."""
    return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


# Ops that put values on the pickle's stack, collect them into tuples, lists and dictionaries, and
# store them in its memo. Persistent ids, extensions, classes and external buffers are not here.
_ALLOWED_OPS = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1
    BINSTRING SHORT_BINSTRING BINUNICODE SHORT_BINUNICODE BINUNICODE8
    BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS
    BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
"""


def _require_allowed_ops(raw: bytes) -> None:
    """Raise unless the pickle has allowed ops only; nothing is run.

    An op that claims more bytes than there are raises too, before memory is allocated for it.
    """
    allowed = frozenset(_ALLOWED_OPS.split())
    for count, (op, argument, _) in enumerate(pickletools.genops(raw)):
        if op.name not in allowed:
            raise pickle.UnpicklingError(f"the pickle has the op {op.name}, which is not allowed")
        # The memo grows to the largest index used.
        if op.name == "LONG_BINPUT" and cast(int, argument) > count:
            raise pickle.UnpicklingError(
                "the pickle has a memo index greater than its number of ops"
            )


@final
class _Array:
    """Replaces an array while a batch is read."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: np.ndarray | None = None

    def __setstate__(self, state: object) -> None:
        match state:
            case (int(), tuple(shape), _Bytes(ready=True), bool(fortran), bytes(data)):
                self.fill(data, shape, "F" if fortran else "C")
            case _:
                raise pickle.UnpicklingError("an array's contents are not bytes")

    def fill(self, data: bytes | bytearray, shape: tuple[Any, ...], order: str) -> None:
        """Set the values, once, if the shape fits them."""
        sizes = all(type(size) is int and size >= 0 for size in shape) and len(shape) <= 8
        if self.values is not None or not sizes or prod(shape) != len(data) or not data:
            raise pickle.UnpicklingError("an array's shape does not fit its bytes")
        values = np.frombuffer(data, np.uint8)
        self.values = values.reshape(shape, order="F" if order == "F" else "C")


@final
class _Bytes:
    """Replaces the dtype of an array of bytes, the only one a batch needs."""

    __slots__ = ("ready",)

    def __init__(self) -> None:
        self.ready = False

    def __setstate__(self, state: object) -> None:
        if state not in _BYTES_STATES:
            raise pickle.UnpicklingError("an array's dtype has unknown properties")
        self.ready = True


# Version, byte order, fields, names, shape of subarrays, item size, alignment, flags.
_BYTES_STATES = tuple((3, order, None, None, None, -1, -1, 0) for order in ("|", b"|"))


@final
class _Replacement:
    """Replaces a global that a batch may name; a pickle cannot change it."""

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
    raise pickle.UnpicklingError("the pickle encodes text in an unexpected way")


def _dtype(*args: object) -> _Bytes:
    if args[:1] not in (("u1",), (b"u1",), ("|u1",), (b"|u1",)):
        raise pickle.UnpicklingError("the pickle has an array of another type than bytes")
    return _Bytes()


def _ndarray(*args: object) -> object:
    raise pickle.UnpicklingError("the pickle creates an array in an unexpected way")


def _empty_array(*args: object) -> _Array:
    if len(args) != 3 or args[0] is not _NDARRAY:
        raise pickle.UnpicklingError("the pickle creates an array in an unexpected way")
    return _Array()


def _filled_array(*args: object) -> _Array:
    """An array as protocol 5 writes it."""
    array = _Array()
    match args:
        case (bytes() | bytearray() as data, _Bytes(ready=True), tuple(shape), "C" | "F" as order):
            array.fill(data, shape, order)
            return array
    raise pickle.UnpicklingError("the pickle creates an array in an unexpected way")


_NDARRAY = _Replacement(_ndarray)

# The names in the published batches, and in the same batches saved by newer Python and NumPy.
_REPLACEMENTS = {
    ("_codecs", "encode"): _Replacement(_encoded),
    ("numpy", "dtype"): _Replacement(_dtype),
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy.core.multiarray", "_reconstruct"): _Replacement(_empty_array),
    ("numpy._core.multiarray", "_reconstruct"): _Replacement(_empty_array),
    ("numpy.core.numeric", "_frombuffer"): _Replacement(_filled_array),
    ("numpy._core.numeric", "_frombuffer"): _Replacement(_filled_array),
}


@final
class _BatchUnpickler(pickle.Unpickler):
    """An unpickler that knows no names but those above."""

    def find_class(self, module: str, name: str) -> Any:
        replacement = _REPLACEMENTS.get((module, name))
        if replacement is None:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which no CIFAR-10 batch needs; nothing was run"
            )
        return replacement
