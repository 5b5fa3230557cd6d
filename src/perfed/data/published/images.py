"""Published sets of images."""

from collections.abc import Iterator
from importlib.resources import as_file, files
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, Shaped, UInt8

from perfed.core.errors import DataError, require
from perfed.data.dataset import Dataset
from perfed.data.published.cifar import read_binary_batch, read_python_batch
from perfed.data.published.download import LocatedFiles, PublishedSet, locate
from perfed.data.published.formats import read_bytes, read_idx, read_npz, read_tar
from perfed.data.published.sets import CIFAR10, CIFAR_BATCHES, FASHION_MNIST, MNIST, MNIST_WRITERS

_DIGITS = tuple("0123456789")
_FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_OBJECTS = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)

# Images of each class in the training and the test set. MNIST's files have the names of
# Fashion-MNIST's, and these numbers tell them apart.
_MNIST_COUNTS = (
    (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
    (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
)
_FASHION_COUNTS = ((6000,) * 10, (1000,) * 10)
_CIFAR_COUNTS = ((5000,) * 10, (1000,) * 10)

_WRITERS = 836
_BATCH_ROWS = 10_000


def digits() -> Dataset:
    """1,797 handwritten digits of 8x8 pixels, which ship with the package."""
    with as_file(files("perfed.data").joinpath("digits.npz")) as path:
        arrays = read_npz(path, ("images", "labels"))
    x = arrays["images"].astype(np.uint8)[..., None]
    y = arrays["labels"].astype(np.int32)
    return Dataset(x, y, _DIGITS, limits=(0, 16), standardize="unit")


def mnist(root: str | None = None, only: tuple[int, ...] | None = None) -> Dataset:
    """MNIST: 70,000 handwritten digits of 28x28 pixels, 10,000 of them test images.

    Args:
        root: a folder with the four files; None: PERFED_DATA, the cache or a download.
        only: the digits to keep, which become classes 0, 1, ... in this order; None: all.
    """
    _require_only(only, len(_DIGITS))
    x, y = _read_mnist(MNIST, _MNIST_COUNTS, root)
    return _images(x, y, _MNIST_COUNTS, _DIGITS, only)


def fashion_mnist(root: str | None = None, only: tuple[int, ...] | None = None) -> Dataset:
    """Fashion-MNIST: 70,000 pictures of clothes of 28x28 pixels, 10,000 of them test images.

    Args:
        root: a folder with the four files; None: PERFED_DATA, the cache or a download.
        only: the classes to keep, which become classes 0, 1, ... in this order; None: all.
    """
    _require_only(only, len(_FASHION))
    x, y = _read_mnist(FASHION_MNIST, _FASHION_COUNTS, root)
    return _images(x, y, _FASHION_COUNTS, _FASHION, only)


def cifar10(root: str | None = None, only: tuple[int, ...] | None = None) -> Dataset:
    """CIFAR-10: 60,000 color photographs of 32x32 pixels, 10,000 of them test images.

    Args:
        root: a folder with the files: the Python or the binary version, unpacked or as
            published, or NumPy archives; None: PERFED_DATA, the cache or a download.
        only: the classes to keep, which become classes 0, 1, ... in this order; None: all.
    """
    _require_only(only, len(_OBJECTS))
    located = locate(CIFAR10, root)
    read = _read_cifar_npz if located.kind == "npz" else _read_cifar_batches
    x, y = read(located)
    where = str(located.paths[0].parent)
    for rows, counts in zip(_halves(_CIFAR_COUNTS), _CIFAR_COUNTS, strict=True):
        _require_counts(y[rows], counts, "CIFAR-10", where)
    return _images(x, y, _CIFAR_COUNTS, _OBJECTS, only)


def mnist_writers(root: str | None = None) -> Dataset:
    """MNIST by writer: 836 natural clients, 8 to 131 digits each.

    Args:
        root: a folder with MNIST's four files and either `mnist_writers.npz` or QMNIST's two files
            of labels; None: PERFED_DATA, the cache or a download.
    """
    x, y = _read_mnist(MNIST, _MNIST_COUNTS, root)
    writer = _read_writers(locate(MNIST_WRITERS, root), y)
    ids, client = np.unique(writer, return_inverse=True)
    names = tuple(f"writer {number:04d}" for number in ids.tolist())
    # The test set has other writers than the training set, so it is not used for testing.
    return Dataset(
        x,
        y,
        _DIGITS,
        client=client.astype(np.int32),
        names=names,
        limits=(0, 255),
        standardize="unit",
    )


def _require_only(only: Any, classes: int) -> None:
    if only is None:
        return
    whole = all(isinstance(c, Integral) and not isinstance(c, bool) for c in only)
    known = whole and all(0 <= c < classes for c in only)
    require(known, "only", only, f"must be classes, whole numbers from 0 to {classes - 1}")
    require(len(set(only)) == len(only), "only", only, "must not have a class twice")
    require(len(only) >= 2, "only", only, "must have at least two classes")


def _halves(counts: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[slice, slice]:
    """The rows of the training set, and those of the test set, which follow."""
    train, test = map(sum, counts)
    return slice(0, train), slice(train, train + test)


def _images(
    x: UInt8[np.ndarray, "n height width depth"],
    y: Int32[np.ndarray, " n"],
    counts: tuple[tuple[int, ...], tuple[int, ...]],
    labels: tuple[str, ...],
    only: tuple[int, ...] | None,
) -> Dataset:
    """Images of all classes or some, the last rows of which are test images."""
    test = np.zeros(len(y), bool)
    test[_halves(counts)[1]] = True
    if only is not None:
        number = np.full(len(labels), -1, np.int32)
        number[list(only)] = np.arange(len(only))
        y = number[y]
        selected = y >= 0
        x, y, test = x[selected], y[selected], test[selected]
        labels = tuple(labels[c] for c in only)
    return Dataset(x, y, labels, test=test, limits=(0, 255), standardize="unit")


def _require_counts(
    y: Shaped[np.ndarray, " n"], counts: tuple[int, ...], name: str, where: str | Path
) -> None:
    """Raise unless there are as many rows of each class as were published."""
    found = np.bincount(y, minlength=len(counts))
    if tuple(found.tolist()) != counts:
        has, published = (" ".join(map(str, c)) for c in (found.tolist()[:16], counts))
        raise DataError(
            f"{where}: these are not {name}'s labels: there are {has} of class 0, 1, ..., and "
            f"{name} has {published}; check that the file is in the right folder"
        )


def _require_array(
    array: np.ndarray, shape: tuple[int, ...], types: tuple[str, ...], what: str, where: str | Path
) -> None:
    if array.shape != shape or array.dtype.name not in types:
        raise DataError(
            f"{where}: {what} have shape {array.shape} and type {array.dtype}, not {shape} and "
            f"{' or '.join(types)}; get the file again from where it is published"
        )


def _read_mnist(
    published: PublishedSet, counts: tuple[tuple[int, ...], tuple[int, ...]], root: str | None
) -> tuple[UInt8[np.ndarray, "n 28 28 1"], Int32[np.ndarray, " n"]]:
    paths = locate(published, root).paths
    total = sum(map(sum, counts))
    x, y = np.empty((total, 28, 28, 1), np.uint8), np.empty(total, np.int32)
    pairs = zip(paths[::2], paths[1::2], strict=True)
    for (images_path, labels_path), rows, expected in zip(
        pairs, _halves(counts), counts, strict=True
    ):
        labels, images = read_idx(labels_path), read_idx(images_path)
        if images.shape[:1] != labels.shape[:1]:
            raise DataError(
                f"{images_path} has {len(images)} images, and {labels_path} {len(labels)} labels; "
                f"get both again from where {published.name} is published"
            )
        _require_array(labels, (len(labels),), ("uint8",), "labels", labels_path)
        _require_counts(labels, expected, published.name, labels_path)
        _require_array(images, (sum(expected), 28, 28), ("uint8",), "images", images_path)
        x[rows, ..., 0], y[rows] = images, labels
    return x, y


def _read_cifar_npz(
    located: LocatedFiles,
) -> tuple[UInt8[np.ndarray, "n 32 32 3"], Int32[np.ndarray, " n"]]:
    halves = _halves(_CIFAR_COUNTS)
    x, y = _empty_cifar()
    for path, rows in zip(located.paths, halves, strict=True):
        size = rows.stop - rows.start
        # One array at a time, since the images are large.
        for name, target, shape in (("images", x, (size, 32, 32, 3)), ("labels", y, (size,))):
            array = read_npz(path, (name,))[name]
            _require_array(array, shape, ("uint8",), name, path)
            target[rows] = array
            del array
    return x, y


def _read_cifar_batches(
    located: LocatedFiles,
) -> tuple[UInt8[np.ndarray, "n 32 32 3"], Int32[np.ndarray, " n"]]:
    """From the six batches of either version, in files or in an archive."""
    python = located.kind.startswith("python")
    read = read_python_batch if python else read_binary_batch
    x, y = _empty_cifar()
    for batch, raw, where in _batches(located, "" if python else ".bin"):
        images, labels = read(raw, where)
        if len(labels) != _BATCH_ROWS:
            raise DataError(
                f"{where}: the batch has {len(labels)} images, and should have {_BATCH_ROWS}; "
                "get the file again from where it is published"
            )
        rows = slice(batch * _BATCH_ROWS, (batch + 1) * _BATCH_ROWS)
        x[rows], y[rows] = images, labels
    return x, y


def _batches(located: LocatedFiles, ending: str) -> Iterator[tuple[int, bytes, str]]:
    """The number, the bytes and the place of each batch."""
    limit = 1 << 26
    names = [batch + ending for batch in CIFAR_BATCHES]
    if located.kind.endswith(".tar"):
        path = located.paths[0]
        for name, raw in read_tar(path, names, limit):
            yield names.index(name), raw, f"{path}, {name}"
    else:
        for number, path in enumerate(located.paths):
            yield number, read_bytes(path, limit), str(path)


def _empty_cifar() -> tuple[UInt8[np.ndarray, "60000 32 32 3"], Int32[np.ndarray, " 60000"]]:
    total = sum(map(sum, _CIFAR_COUNTS))
    return np.empty((total, 32, 32, 3), np.uint8), np.empty(total, np.int32)


def _read_writers(located: LocatedFiles, y: Int32[np.ndarray, " n"]) -> Shaped[np.ndarray, " n"]:
    """The writer of each digit."""
    halves = _halves(_MNIST_COUNTS)
    if located.kind == "npz":
        path = located.paths[0]
        arrays = read_npz(path, ("train_writer", "test_writer"))
        for (name, array), rows in zip(arrays.items(), halves, strict=True):
            _require_array(
                array, (rows.stop - rows.start,), ("int16", "int32", "int64"), name, path
            )
        writer = np.concatenate([*arrays.values()])
    else:
        parts = []
        for path, rows in zip(located.paths, halves, strict=True):
            # QMNIST's test set begins with MNIST's, and is larger.
            table = read_idx(path)
            _require_array(table, (60_000, 8), ("int32",), "labels", path)
            table = table[: rows.stop - rows.start]
            different = int(np.count_nonzero(table[:, 0] != y[rows]))
            if different:
                raise DataError(
                    f"{path}: {different} of its {len(table)} classes differ from MNIST's labels; "
                    "get both again from where they are published"
                )
            parts.append(table[:, 2])
        writer = np.concatenate(parts)
    writers = len(np.unique(writer))
    if writers != _WRITERS:
        raise DataError(
            f"{located.paths[0]}: these are not MNIST's writers: there are {writers}, and MNIST "
            f"has {_WRITERS}; get the file again from where it is published"
        )
    return writer
