"""Published sets of data as pools of rows, read from their original files."""

import re
from collections.abc import Iterable, Iterator
from importlib.resources import as_file, files
from math import ceil
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, Shaped, UInt8
from numpy.lib.stride_tricks import sliding_window_view

from perfed.core.errors import DataError, FieldError, require, require_count
from perfed.data import download as fetch
from perfed.data import formats
from perfed.data.dataset import Dataset
from perfed.data.download import Form, PublishedFile, PublishedSet

_DIGITS = tuple("0123456789")
_CLOTHES = (
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
_THINGS = (
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

# How many images of each class the training and the test set have. MNIST's files and those of
# Fashion-MNIST have the same names, so this is what tells them apart.
_MNIST_COUNTS = (
    (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
    (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
)
_FASHION_COUNTS = ((6000,) * 10, (1000,) * 10)
_CIFAR_COUNTS = ((5000,) * 10, (1000,) * 10)

_WRITERS = 836


def _idx_form(folders: tuple[str, ...], base: str, checksums: Iterable[str]) -> Form:
    names = (
        "train-images-idx3-ubyte.gz",
        "train-labels-idx1-ubyte.gz",
        "t10k-images-idx3-ubyte.gz",
        "t10k-labels-idx1-ubyte.gz",
    )
    pairs = zip(names, checksums, strict=True)
    return Form("idx", tuple(PublishedFile(n, folders, base + n, c) for n, c in pairs))


def _form(kind: str, folders: tuple[str, ...], *names: str) -> Form:
    return Form(kind, tuple(PublishedFile(name, folders) for name in names))


MNIST = PublishedSet(
    "MNIST",
    (
        _idx_form(
            ("mnist", "MNIST/raw"),
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            (
                "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
    ),
)

FASHION_MNIST = PublishedSet(
    "Fashion-MNIST",
    (
        _idx_form(
            ("fashion-mnist", "FashionMNIST/raw"),
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            (
                "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "md5:25c81989df183df01b3e8a0aad5dffbe",
                "md5:bef4ecab320f06d8554ea6380940ec79",
                "md5:bb300cfdad3c16e7a12a480ee83cd310",
            ),
        ),
    ),
)

_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_BATCH_ROWS = 10_000
_CIFAR_PYTHON = ("cifar-10-batches-py", "cifar10/cifar-10-batches-py")
_CIFAR_BINARY = ("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin")

CIFAR10 = PublishedSet(
    "CIFAR-10",
    (
        _form("npz", ("cifar10",), "cifar10_train.npz", "cifar10_test.npz"),
        _form("python", _CIFAR_PYTHON, *_BATCHES),
        _form("python.tar", ("cifar10",), "cifar-10-python.tar.gz"),
        _form("binary", _CIFAR_BINARY, *(f"{batch}.bin" for batch in _BATCHES)),
        # The one that is downloaded: it holds plain bytes and no pickles.
        Form(
            "binary.tar",
            (
                PublishedFile(
                    "cifar-10-binary.tar.gz",
                    ("cifar10",),
                    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                    "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                ),
            ),
        ),
    ),
)

_QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/"
_QMNIST_FOLDERS = ("qmnist", "QMNIST/raw", "mnist", "MNIST/raw")

MNIST_WRITERS = PublishedSet(
    "MNIST's list of writers",
    (
        _form("npz", ("mnist", "MNIST/raw", "qmnist"), "mnist_writers.npz"),
        Form(
            "qmnist",
            (
                PublishedFile(
                    "qmnist-train-labels-idx2-int.gz",
                    _QMNIST_FOLDERS,
                    _QMNIST + "qmnist-train-labels-idx2-int.gz",
                    "md5:0058f8dd561b90ffdd0f734c6a30e5e4",
                ),
                PublishedFile(
                    "qmnist-test-labels-idx2-int.gz",
                    _QMNIST_FOLDERS,
                    _QMNIST + "qmnist-test-labels-idx2-int.gz",
                    "md5:5b5b05890a5e13444e108efe57b788aa",
                ),
            ),
        ),
    ),
)

SHAKESPEARE = PublishedSet(
    "Shakespeare",
    (
        _form("text", ("shakespeare",), "tinyshakespeare.txt.gz"),
        Form(
            "text",
            (
                PublishedFile(
                    "input.txt",
                    ("shakespeare",),
                    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                    "tinyshakespeare/input.txt",
                    "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                ),
            ),
        ),
    ),
)

# What each source is read from.
NEEDS: dict[str, tuple[PublishedSet, ...]] = {
    "digits": (),
    "mnist": (MNIST,),
    "fashion-mnist": (FASHION_MNIST,),
    "cifar10": (CIFAR10,),
    "mnist-writers": (MNIST, MNIST_WRITERS),
    "shakespeare": (SHAKESPEARE,),
}


def available(source: str) -> str | None:
    """Where a source's files are on this machine, in words; None if it is not published data."""
    return fetch.available(NEEDS[source]) if source in NEEDS else None


def digits() -> Dataset:
    """1,797 handwritten digits of 8x8 pixels, which ship with the package."""
    with as_file(files("perfed.data").joinpath("digits.npz")) as path:
        arrays = formats.read_npz(path, ("images", "labels"))
    x = arrays["images"].astype(np.uint8)[..., None]
    y = arrays["labels"].astype(np.int32)
    return Dataset(x, y, _DIGITS, limits=(0, 16), standardize="unit")


def mnist(root: str | None = None, only: tuple[int, ...] | None = None) -> Dataset:
    """MNIST: 70,000 handwritten digits of 28x28 pixels, 10,000 of them for testing.

    Args:
        root: a folder that holds the four files; None: PERFED_DATA, the cache or a download.
        only: the digits to keep, which become classes 0, 1, ... in this order; None: all.
    """
    _require_only(only, len(_DIGITS))
    x, y = _read_mnist(MNIST, _MNIST_COUNTS, root)
    return _images(x, y, _MNIST_COUNTS, _DIGITS, only)


def fashion_mnist(root: str | None = None, only: tuple[int, ...] | None = None) -> Dataset:
    """Fashion-MNIST: 70,000 pictures of clothes of 28x28 pixels, 10,000 of them for testing.

    Args:
        root: a folder that holds the four files; None: PERFED_DATA, the cache or a download.
        only: the classes to keep, which become classes 0, 1, ... in this order; None: all.
    """
    _require_only(only, len(_CLOTHES))
    x, y = _read_mnist(FASHION_MNIST, _FASHION_COUNTS, root)
    return _images(x, y, _FASHION_COUNTS, _CLOTHES, only)


def cifar10(root: str | None = None, only: tuple[int, ...] | None = None) -> Dataset:
    """CIFAR-10: 60,000 color photographs of 32x32 pixels, 10,000 of them for testing.

    Args:
        root: a folder that holds the files: the Python or the binary version, unpacked or as
            published, or NumPy archives; None: PERFED_DATA, the cache or a download.
        only: the classes to keep, which become classes 0, 1, ... in this order; None: all.
    """
    _require_only(only, len(_THINGS))
    located = fetch.locate(CIFAR10, root)
    read = _read_cifar_npz if located.kind == "npz" else _read_cifar_batches
    x, y = read(located)
    where = str(located.paths[0].parent)
    for rows, counts in zip(_halves(_CIFAR_COUNTS), _CIFAR_COUNTS, strict=True):
        _require_counts(y[rows], counts, "CIFAR-10", where)
    return _images(x, y, _CIFAR_COUNTS, _THINGS, only)


def mnist_writers(root: str | None = None) -> Dataset:
    """MNIST by the people who wrote it: 836 natural clients, 8 to 131 digits each.

    Args:
        root: a folder that holds MNIST's four files and either `mnist_writers.npz` or QMNIST's two
            files of labels; None: PERFED_DATA, the cache or a download.
    """
    x, y = _read_mnist(MNIST, _MNIST_COUNTS, root)
    writer = _read_writers(fetch.locate(MNIST_WRITERS, root), y)
    ids, client = np.unique(writer, return_inverse=True)
    names = tuple(f"writer {number:04d}" for number in ids.tolist())
    # The test set was written by other people than the training set, so it tests nobody here.
    return Dataset(
        x,
        y,
        _DIGITS,
        client=client.astype(np.int32),
        names=names,
        limits=(0, 255),
        standardize="unit",
    )


def shakespeare(
    root: str | None = None, context: int = 80, stride: int = 1, min_characters: int = 1000
) -> Dataset:
    """Plays of Shakespeare: the next character of a speech, one natural client per speaking role.

    Args:
        root: a folder that holds `tinyshakespeare.txt` or `input.txt`; None: PERFED_DATA, the cache
            or a download.
        context: how many characters the next one is to be told from.
        stride: how many characters lie between the starts of two examples.
        min_characters: roles that say less are left out.
    """
    require_count("context", context)
    require_count("stride", stride)
    require_count("min_characters", min_characters)
    path = fetch.locate(SHAKESPEARE, root).paths[0]
    text = formats.read_text(path)
    roles = {name: "\n".join(said) for name, said in _speeches(text, path).items()}
    kept = {name: said for name, said in roles.items() if len(said) >= min_characters}
    if not kept:
        most = max(map(len, roles.values()))
        allowed = f"no role says as much; the longest of the {len(roles)} has {most} characters"
        raise FieldError("min_characters", min_characters, allowed)
    lengths = {name: len(said) for name, said in kept.items()}
    _require_long_enough(lengths, min_characters, context, stride)
    vocabulary = tuple(sorted(set(text)))
    if len(vocabulary) > 256:
        raise DataError(
            f"{path}: the text has {len(vocabulary)} different characters, and 256 are the most; "
            "spell it with fewer"
        )
    sizes = [_windows(len(said), context, stride) for said in kept.values()]
    x = np.empty((sum(sizes), context), np.uint8)
    y = np.empty(sum(sizes), np.int32)
    ends = np.cumsum(sizes)
    for said, end, size in zip(kept.values(), ends, sizes, strict=True):
        windows = sliding_window_view(_positions(said, vocabulary), context + 1)[::stride]
        x[end - size : end], y[end - size : end] = windows[:, :context], windows[:, context]
    return Dataset(
        x,
        y,
        vocabulary,
        client=np.repeat(np.arange(len(kept), dtype=np.int32), sizes),
        names=tuple(kept),
        vocabulary=vocabulary,
        gap=ceil(context / stride),
    )


def _require_only(only: Any, classes: int) -> None:
    if only is None:
        return
    whole = all(isinstance(c, Integral) and not isinstance(c, bool) for c in only)
    known = whole and all(0 <= c < classes for c in only)
    require(known, "only", only, f"classes are whole numbers from 0 to {classes - 1}")
    require(len(set(only)) == len(only), "only", only, "each class may be named once")
    require(len(only) >= 2, "only", only, "must name at least two classes")


def _halves(counts: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[slice, slice]:
    """The rows of the training and of the test set: one lies behind the other."""
    train, test = map(sum, counts)
    return slice(0, train), slice(train, train + test)


def _images(
    x: UInt8[np.ndarray, "n height width depth"],
    y: Int32[np.ndarray, " n"],
    counts: tuple[tuple[int, ...], tuple[int, ...]],
    labels: tuple[str, ...],
    only: tuple[int, ...] | None,
) -> Dataset:
    """Images whose last rows are for testing, of some classes or of all."""
    test = np.zeros(len(y), bool)
    test[_halves(counts)[1]] = True
    if only is not None:
        number = np.full(len(labels), -1, np.int32)
        number[list(only)] = np.arange(len(only))
        y = number[y]
        kept = y >= 0
        x, y, test = x[kept], y[kept], test[kept]
        labels = tuple(labels[c] for c in only)
    return Dataset(x, y, labels, test=test, limits=(0, 255), standardize="unit")


def _require_counts(
    y: Shaped[np.ndarray, " n"], counts: tuple[int, ...], name: str, where: str | Path
) -> None:
    """Raise `DataError` unless there are as many rows of each class as were published."""
    found = np.bincount(y, minlength=len(counts))
    if tuple(found.tolist()) != counts:
        has, wanted = (" ".join(map(str, c)) for c in (found.tolist()[:16], counts))
        raise DataError(
            f"{where}: these are not {name}'s labels: there are {has} of class 0, 1, ..., and "
            f"{name} has {wanted}; look whether the file is in the right folder"
        )


def _require_array(
    array: np.ndarray, shape: tuple[int, ...], types: tuple[str, ...], what: str, where: str | Path
) -> None:
    if array.shape != shape or array.dtype.name not in types:
        raise DataError(
            f"{where}: {what} are of shape {array.shape} and type {array.dtype}, not {shape} and "
            f"{' or '.join(types)}; get the file again from where it is published"
        )


def _read_mnist(
    wanted: PublishedSet, counts: tuple[tuple[int, ...], tuple[int, ...]], root: str | None
) -> tuple[UInt8[np.ndarray, "n 28 28 1"], Int32[np.ndarray, " n"]]:
    paths = fetch.locate(wanted, root).paths
    total = sum(map(sum, counts))
    x, y = np.empty((total, 28, 28, 1), np.uint8), np.empty(total, np.int32)
    pairs = zip(paths[::2], paths[1::2], strict=True)
    for (images_path, labels_path), rows, expected in zip(
        pairs, _halves(counts), counts, strict=True
    ):
        labels, images = formats.read_idx(labels_path), formats.read_idx(images_path)
        if images.shape[:1] != labels.shape[:1]:
            raise DataError(
                f"{images_path} has {len(images)} images and {labels_path} {len(labels)} labels; "
                f"get both again from where {wanted.name} is published"
            )
        _require_array(labels, (len(labels),), ("uint8",), "labels", labels_path)
        _require_counts(labels, expected, wanted.name, labels_path)
        _require_array(images, (sum(expected), 28, 28), ("uint8",), "images", images_path)
        x[rows, ..., 0], y[rows] = images, labels
    return x, y


def _read_cifar_npz(
    located: fetch.Located,
) -> tuple[UInt8[np.ndarray, "n 32 32 3"], Int32[np.ndarray, " n"]]:
    halves = _halves(_CIFAR_COUNTS)
    x, y = _room_for_cifar()
    for path, rows in zip(located.paths, halves, strict=True):
        size = rows.stop - rows.start
        # One array at a time: the larger one's room is needed again.
        for name, room, shape in (("images", x, (size, 32, 32, 3)), ("labels", y, (size,))):
            array = formats.read_npz(path, (name,))[name]
            _require_array(array, shape, ("uint8",), name, path)
            room[rows] = array
            del array
    return x, y


def _read_cifar_batches(
    located: fetch.Located,
) -> tuple[UInt8[np.ndarray, "n 32 32 3"], Int32[np.ndarray, " n"]]:
    """From the six batches of either version, in files of their own or in an archive."""
    python = located.kind.startswith("python")
    read = formats.read_cifar_python if python else formats.read_cifar_binary
    x, y = _room_for_cifar()
    for batch, raw, where in _batches(located, "" if python else ".bin"):
        images, labels = read(raw, where)
        if len(labels) != _BATCH_ROWS:
            raise DataError(
                f"{where}: the batch has {len(labels)} images, and CIFAR-10's have {_BATCH_ROWS}; "
                "get the file again from where it is published"
            )
        rows = slice(batch * _BATCH_ROWS, (batch + 1) * _BATCH_ROWS)
        x[rows], y[rows] = images, labels
    return x, y


def _batches(located: fetch.Located, ending: str) -> Iterator[tuple[int, bytes, str]]:
    """The number, the bytes and the place of each batch, in the order they are kept in."""
    limit = 1 << 26
    names = [batch + ending for batch in _BATCHES]
    if located.kind.endswith(".tar"):
        path = located.paths[0]
        for name, raw in formats.read_tar(path, names, limit):
            yield names.index(name), raw, f"{path}, {name}"
    else:
        for number, path in enumerate(located.paths):
            yield number, formats.read_bytes(path, limit), str(path)


def _room_for_cifar() -> tuple[UInt8[np.ndarray, "60000 32 32 3"], Int32[np.ndarray, " 60000"]]:
    total = sum(map(sum, _CIFAR_COUNTS))
    return np.empty((total, 32, 32, 3), np.uint8), np.empty(total, np.int32)


def _read_writers(located: fetch.Located, y: Int32[np.ndarray, " n"]) -> Shaped[np.ndarray, " n"]:
    """Who wrote each digit."""
    halves = _halves(_MNIST_COUNTS)
    if located.kind == "npz":
        path = located.paths[0]
        arrays = formats.read_npz(path, ("train_writer", "test_writer"))
        for (name, array), rows in zip(arrays.items(), halves, strict=True):
            _require_array(
                array, (rows.stop - rows.start,), ("int16", "int32", "int64"), name, path
            )
        writer = np.concatenate([*arrays.values()])
    else:
        parts = []
        for path, rows in zip(located.paths, halves, strict=True):
            # QMNIST's test set is larger than MNIST's, and begins with it.
            table = formats.read_idx(path)
            _require_array(table, (60_000, 8), ("int32",), "labels", path)
            table = table[: rows.stop - rows.start]
            other = int(np.count_nonzero(table[:, 0] != y[rows]))
            if other:
                raise DataError(
                    f"{path}: {other} of its {len(table)} classes are not those of MNIST's labels; "
                    "get both again from where they are published"
                )
            parts.append(table[:, 2])
        writer = np.concatenate(parts)
    found = len(np.unique(writer))
    if found != _WRITERS:
        raise DataError(
            f"{located.paths[0]}: these are not MNIST's writers: there are {found}, and MNIST has "
            f"{_WRITERS}; get the file again from where it is published"
        )
    return writer


def _speeches(text: str, path: Path) -> dict[str, list[str]]:
    """What each role says, speech by speech; roles in the order they first appear in."""
    roles: dict[str, list[str]] = {}
    for block in re.split(r"\n\s*\n", text.strip()):
        head, _, speech = block.partition("\n")
        name = head.strip().removesuffix(":")
        if not name or not head.strip().endswith(":"):
            raise DataError(
                f"{path}: a block begins {head[:40]!r}; each is to begin with a line that is the "
                "speaker's name and a colon, and to end at an empty line"
            )
        roles.setdefault(name, [])
        if speech:
            roles[name].append(speech)
    return roles


def _windows(length: int, context: int, stride: int) -> int:
    """How many windows of a context and the character after it a text gives."""
    return max(0, (length - context - 1) // stride + 1)


def _require_long_enough(
    lengths: dict[str, int], min_characters: int, context: int, stride: int
) -> None:
    """Raise `FieldError` unless each role gives windows on both sides of the gap."""
    gap = ceil(context / stride)
    least = 4
    needed = context + 1 + (gap + least - 1) * stride
    short = {name: length for name, length in lengths.items() if length < needed}
    if short:
        name = min(short, key=short.__getitem__)
        raise FieldError(
            "min_characters",
            min_characters,
            f"{len(short)} of {len(lengths)} roles say too little for {least} examples of "
            f"{context} characters and a gap of {gap} ({name} has {short[name]} characters); with "
            f"context = {context} and stride = {stride} it must be at least {needed}",
        )


def _positions(text: str, vocabulary: tuple[str, ...]) -> UInt8[np.ndarray, " n"]:
    """Each character's place in the sorted vocabulary."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    known = np.array([ord(character) for character in vocabulary], np.uint32)
    return np.searchsorted(known, codes).astype(np.uint8)
