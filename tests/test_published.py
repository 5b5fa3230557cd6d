"""Published data: the files read right, the damaged and the hostile refused, downloads kept."""

import gzip
import hashlib
import io
import os
import pickle
import re
import shutil
import struct
import tarfile
import threading
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfed.core.errors import DataError, FieldError
from perfed.data import published
from perfed.data.dataset import Dataset
from perfed.data.published import cifar, download, formats, sets
from perfed.data.published.download import FileFormat, PublishedFile, PublishedSet
from perfed.data.published.text import _speeches
from real_data import REAL, needs_real_data

MNIST_TRAIN = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
MNIST_TEST = (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test, and nobody's server to download from."""
    cache = tmp_path / "cache"
    monkeypatch.delenv("PERFED_DATA", raising=False)
    monkeypatch.setenv("PERFED_DATA_CACHE", str(cache))
    monkeypatch.setenv("PERFED_MIRROR", NOWHERE)
    return cache


# Files made up for the tests.


def idx(values: np.ndarray) -> bytes:
    code, kind = (0x08, "u1") if values.dtype == np.uint8 else (0x0C, ">i4")
    head = bytes([0, 0, code, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return head + values.astype(kind).tobytes()


def npz(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def labels_of(counts: tuple[int, ...]) -> np.ndarray:
    """Labels with these counts, mixed so that each class is everywhere."""
    ordered = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
    return np.random.default_rng(sum(counts)).permutation(ordered)


def write_mnist(
    folder: Path, train: tuple[int, ...] = MNIST_TRAIN, test: tuple[int, ...] = MNIST_TEST
) -> None:
    """Images of one gray each, by label; the training images gzipped, all else not."""
    folder.mkdir(parents=True)
    for stem, counts in (("train", train), ("t10k", test)):
        labels = labels_of(counts)
        images = np.broadcast_to(labels[:, None, None], (len(labels), 28, 28))
        raw = idx(np.ascontiguousarray(images))
        if stem == "train":
            name, raw = f"{stem}-images-idx3-ubyte.gz", gzip.compress(raw, 1, mtime=0)
        else:
            name = f"{stem}-images-idx3-ubyte"
        (folder / name).write_bytes(raw)
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(idx(labels))


@pytest.fixture(scope="module")
def made_up_mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mnist")
    write_mnist(root / "MNIST" / "raw")
    return root


class Cifar(NamedTuple):
    images: np.ndarray
    labels: np.ndarray

    @property
    def planes(self) -> np.ndarray:
        return self.images.transpose(0, 3, 1, 2).reshape(len(self.images), -1)


def cifar_batch(images: int, seed: int = 0) -> Cifar:
    pixels = np.random.default_rng(seed).integers(0, 256, (images, 1, 32, 3), dtype=np.uint8)
    labels = (np.arange(images) % 10).astype(np.uint8)
    return Cifar(np.ascontiguousarray(np.broadcast_to(pixels, (images, 32, 32, 3))), labels)


def binary_batch(batch: Cifar) -> bytes:
    return np.column_stack([batch.labels, batch.planes]).tobytes()


def short(text: bytes) -> bytes:
    """A string as Python 2 pickles it."""
    return b"U" + bytes([len(text)]) + text


def published_batch(
    batch: Cifar, dtype: bytes = b"u1", rows: int | None = None, labels: bytes | None = None
) -> bytes:
    """A pickle as the published one is: protocol 2, from Python 2."""
    data = batch.planes.tobytes()
    shape = struct.pack("<BHBH", ord("M"), rows or len(batch.labels), ord("M"), 3072) + b"\x86"
    kind = b"cnumpy\ndtype\nq\x0a" + short(dtype) + b"K\x00K\x01\x87Rq\x0b(K\x03" + short(b"|")
    kind += b"NNN" + 2 * b"J\xff\xff\xff\xff" + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85"
    array += short(b"b") + b"\x87Rq\x09(K\x01" + shape + kind + b"\x89"
    array += b"T" + struct.pack("<i", len(data)) + data + b"tb"
    if labels is None:
        labels = b"]q\x05(" + b"".join(b"K" + bytes([label]) for label in batch.labels) + b"e"
    return (
        b"\x80\x02}q\x01("
        + short(b"batch_label")
        + short(b"training batch 1 of 5")
        + short(b"labels")
        + labels
        + short(b"data")
        + array
        + short(b"filenames")
        + b"]("
        + short(b"a_car.png")
        + b"eu."
    )


def repickled(protocol: int, text: bool = False) -> Callable[[Cifar], bytes]:
    """The same batch saved anew by Python 3, its keys bytes or text."""

    def dump(batch: Cifar) -> bytes:
        labels = batch.labels.tolist()
        if text:
            return pickle.dumps({"data": batch.planes, "labels": labels}, protocol)
        return pickle.dumps({b"data": batch.planes, b"labels": labels}, protocol)

    return dump


# Readers of formats.


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzipped"])
@pytest.mark.parametrize(
    "values",
    [
        np.arange(7, dtype=np.uint8),
        np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
        np.array([[-1, 2**31 - 1], [-(2**31), 70_000]], np.int32),
        np.ones((1, 1, 1, 1, 3), np.uint8),
    ],
    ids=["bytes", "images", "int32", "five axes"],
)
def test_idx_files_are_read(
    tmp_path: Path, values: np.ndarray, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "a name that says nothing"
    path.write_bytes(pack(idx(values)))
    found = formats.read_idx(path)
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)


FEW = idx(np.arange(200, dtype=np.uint8).reshape(50, 2, 2))
DAMAGED_CRC = bytearray(gzip.compress(FEW, mtime=0))
DAMAGED_CRC[-8] ^= 0xFF


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (gzip.compress(FEW, mtime=0)[:-20], "gzip data are truncated"),
        (gzip.compress(FEW, mtime=0)[:12], "gzip data are truncated"),
        (bytes(DAMAGED_CRC), "gzip data are damaged .*CRC"),
        (gzip.compress(FEW, mtime=0) + b"more", "gzip data are damaged"),
        (b"<!DOCTYPE html>", "not an IDX file: it begins with 3c21444f"),
        (b"", "not an IDX file: it begins with nothing"),
        (b"\0\0\x08", "not an IDX file"),
        (b"\0\0\x0d\x01" + FEW[4:], "type 0x0d is not supported; use 0x08 or 0x0c"),
        (b"\0\0\x08\0" + FEW[4:], "says 0 axes"),
        (b"\0\0\x08\xff" + b"\0\0\0\x01" * 255 + b"x", "says 255 axes"),
        (FEW[:9], "says 3 axes and has 1"),
        (FEW[:-1], "claims 200 bytes of values, the file has 199"),
        (FEW + b"x", "claims 200 bytes of values, the file has more"),
        (gzip.compress(FEW[:-1], mtime=0), "claims 200 bytes of values, the file has 199"),
        (b"\0\0\x08\x02" + b"\xff" * 8 + b"x", r"claims sizes \(4294967295, 4294967295\)"),
        (b"\0\0\x0c\x01" + struct.pack(">I", 2**29 + 1), "claims sizes .* 2,147,483,652 bytes"),
        # A product of 2^64, which would be nothing in a machine's whole numbers.
        (b"\0\0\x08\x04" + struct.pack(">4I", *[2**16] * 4), "claims sizes"),
        (b"\0\0\x08\x02" + struct.pack(">2I", 0, 5), "claims sizes .* 0 bytes"),
    ],
)
def test_bad_idx_files_are_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(raw)
    with pytest.raises(DataError, match=f"{re.escape(str(path))}: .*{message}"):
        formats.read_idx(path)


@pytest.mark.parametrize("read", [formats.read_idx, formats.read_text])
def test_what_cannot_be_opened_is_named(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    with pytest.raises(DataError, match=r"gone: it cannot be read .No such file"):
        read(tmp_path / "gone")
    with pytest.raises(DataError, match=r"it cannot be read .Is a directory"):
        read(tmp_path)


def test_headers_get_no_memory_on_trust(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.write_bytes(gzip.compress(b"\0\0\x08\x01" + struct.pack(">I", 2**31) + bytes(1000)))
    tracemalloc.start()
    with pytest.raises(DataError, match="claims 2,147,483,648 bytes of values, the file has 1,000"):
        formats.read_idx(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_text_is_read_plain_or_gzipped(tmp_path: Path) -> None:
    for name, raw in {
        "a": "Où?\r\nIci.".encode(),
        "b": gzip.compress("Où?\nIci.".encode(), mtime=0),
    }.items():
        (tmp_path / name).write_bytes(raw)
        assert formats.read_text(tmp_path / name) == "Où?\nIci."
    (tmp_path / "c").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r"not UTF-8 text .* at byte 3"):
        formats.read_text(tmp_path / "c")
    with pytest.raises(DataError, match="longer than 5 bytes"):
        formats.read_text(tmp_path / "a", limit=5)


BATCH = cifar_batch(30)

PICKLES = {
    "published": published_batch,
    "protocol 2": repickled(2),
    "protocol 3": repickled(3),
    "protocol 4": repickled(4),
    "protocol 4, text keys": repickled(4, text=True),
    "protocol 5": repickled(5),
}


@pytest.mark.parametrize("dump", PICKLES.values(), ids=PICKLES)
def test_cifar_python_batches_are_read(dump: Callable[[Cifar], bytes]) -> None:
    images, labels = cifar.read_python_batch(dump(BATCH), "a batch")
    np.testing.assert_array_equal(images, BATCH.images)
    np.testing.assert_array_equal(labels, BATCH.labels)
    assert images.dtype == labels.dtype == np.uint8


def test_cifar_python_batches_may_be_in_column_order() -> None:
    planes = np.asfortranarray(BATCH.planes)
    for protocol in (2, 4, 5):
        raw = pickle.dumps({"data": planes, "labels": BATCH.labels.tolist()}, protocol)
        images, _ = cifar.read_python_batch(raw, "a batch")
        np.testing.assert_array_equal(images, BATCH.images)


def test_cifar_binary_batches_are_read() -> None:
    images, labels = cifar.read_binary_batch(binary_batch(BATCH), "a batch")
    np.testing.assert_array_equal(images, BATCH.images)
    np.testing.assert_array_equal(labels, BATCH.labels)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "records of 3073 bytes, and this has 0 bytes"),
        (binary_batch(BATCH)[:-1], "records of 3073 bytes, and this has 92,189 bytes"),
        (bytes(3073) + b"\x0a" + bytes(3072), "label 10 of image 1 is not one of CIFAR-10's"),
    ],
)
def test_bad_cifar_binary_batches_are_refused(raw: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"batch_1.bin: .*{message}"):
        cifar.read_binary_batch(raw, "batch_1.bin")


class Attack:
    """An object whose pickle runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_a_command_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    ran = tmp_path / "ran"
    raw = pickle.dumps({"data": Attack(f"touch '{ran}'"), "labels": []}, protocol)
    wrong = "system, which no CIFAR-10 batch needs" if protocol else "is not allowed"
    with pytest.raises(DataError, match=f"data_batch_1: .*{wrong}"):
        cifar.read_python_batch(raw, "data_batch_1")
    assert not ran.exists()
    # The attack is a real one.
    pickle.loads(raw)
    assert ran.exists()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not a readable CIFAR-10 batch"),
        (b"not a pickle", "not a readable CIFAR-10 batch"),
        (published_batch(BATCH)[:-100], "not a readable CIFAR-10 batch"),
        (b"\x80\x02cbuiltins\neval\nU\x011\x85R.", "names builtins.eval"),
        (b"\x80\x02cnumpy\nfromfile\nU\x01x\x85R.", "names numpy.fromfile"),
        (b"\x80\x02cnumpy\nndarray\nK\x01\x85R.", "creates an array in an unexpected way"),
        (b"\x80\x02cnumpy\nndarray\n)\x81.", "op NEWOBJ, which is not allowed"),
        (b"\x80\x02U\x04nameQ.", "op BINPERSID, which is not allowed"),
        (b"Pname\n.", "op PERSID, which is not allowed"),
        (b"\x80\x02\x82\x01.", "op EXT1, which is not allowed"),
        (b"(cos\nsystem\nU\x01xo.", "op OBJ, which is not allowed"),
        (b"(U\x01xios\nsystem\n.", "op INST, which is not allowed"),
        (b"\x80\x05\x97.", "op NEXT_BUFFER, which is not allowed"),
        (b"\x80\x02c_codecs\nencode\n}b.", "changes a function"),
        (b"\x80\x02c_codecs\nencode\nU\x01xU\x03hex\x86R.", "encodes text in an unexpected way"),
        (b"\x80\x02]r\xf0\xff\xff\xff.", "memo index greater than its number of ops"),
        (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fx.", "not a readable CIFAR-10 batch"),
        (b"\x80\x02]q\x01h\x01a.", "not a dictionary"),
        (pickle.dumps({"labels": []}, 2), "no array `data`"),
        (pickle.dumps({"data": b"x" * 3072, "labels": [1]}, 2), "no array `data`"),
        (pickle.dumps({"data": BATCH.planes, "fine_labels": []}, 2), "30 `labels`, and has none"),
        (repickled(4)(Cifar(BATCH.images, BATCH.labels[:-1])), "30 `labels`, and has 29"),
        (published_batch(BATCH, rows=31), "shape does not fit its bytes"),
        (published_batch(BATCH, dtype=b"O8"), "an array of another type than bytes"),
        (pickle.dumps({"data": np.array([{}])}, 4), "an array of another type than bytes"),
        (
            pickle.dumps({"data": BATCH.planes.astype(np.int32)}, 5),
            "an array of another type than bytes",
        ),
        (pickle.dumps({"data": BATCH.images, "labels": []}, 4), r"shape \(30, 32, 32, 3\)"),
        (published_batch(BATCH, labels=b"](" + b"K\x0a" * 30 + b"e"), "whole numbers from 0 to 9"),
        (published_batch(BATCH, labels=b"](" + b"\x88" * 30 + b"e"), "whole numbers from 0 to 9"),
    ],
)
def test_bad_cifar_python_batches_are_refused(raw: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"data_batch_1: .*{message}"):
        cifar.read_python_batch(raw, "data_batch_1")


@settings(max_examples=300, deadline=None)
@given(
    dump=st.sampled_from([*PICKLES.values()]),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 300),
)
def test_a_damaged_pickle_gives_a_batch_or_a_data_error(
    dump: Callable[[Cifar], bytes], changes: list[tuple[int, int]], cut: int
) -> None:
    raw = bytearray(dump(cifar_batch(1)))
    raw = raw[: len(raw) - cut] if cut < 20 else raw
    # The pixels are most of the file and hold nothing to break: spare them.
    ends = [*range(250), *range(len(raw) - 100, len(raw))]
    for place, value in changes:
        raw[ends[place % len(ends)] % len(raw)] = value
    try:
        images, labels = cifar.read_python_batch(bytes(raw), "a batch")
    except DataError:
        return
    assert images.shape == (len(labels), 32, 32, 3)


@settings(max_examples=200, deadline=None)
@given(change=st.tuples(st.integers(0, len(FEW) - 1), st.integers(0, 255)), zipped=st.booleans())
def test_a_damaged_idx_file_gives_an_array_or_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, change: tuple[int, int], zipped: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged-idx"
    raw = bytearray(gzip.compress(FEW, mtime=0) if zipped else FEW)
    raw[change[0] % len(raw)] = change[1]
    path.write_bytes(raw)
    try:
        assert formats.read_idx(path).size == 200
    except DataError:
        return


def test_npz_archives_are_read(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", x=np.arange(6).reshape(2, 3), name=np.array(["a", "bc"]))
    found = formats.read_npz(path, ("name", "x"))
    assert found["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["name"].tolist() == ["a", "bc"]
    assert list(found) == ["name", "x"]


def claiming(path: Path, shape: tuple[int, ...]) -> Path:
    """An archive whose array claims a shape that it does not have."""
    head = io.BytesIO()
    fields = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, fields)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", head.getvalue() + bytes(10))
    return path


def test_bad_npz_archives_are_refused(tmp_path: Path) -> None:
    good = npz(tmp_path / "good.npz", x=np.arange(1000), y=np.arange(3)).read_bytes()
    bad = tmp_path / "bad.npz"

    def refused(message: str, raw: bytes | None = None) -> None:
        if raw is not None:
            bad.write_bytes(raw)
        with pytest.raises(DataError, match=f"bad.npz: .*{message}"):
            formats.read_npz(bad, ("x",))

    refused("cannot be read .No such file")
    refused("not an .npz archive, or a damaged one", b"plain text")
    refused("not an .npz archive, or a damaged one", b"")
    refused("not an .npz archive, or a damaged one", good[:-200])
    refused("not an .npz archive, or a damaged one .*CRC", good.replace(b"\x07\x01", b"\x08\x01"))
    npz(bad, z=np.zeros(1), y=np.zeros(1))
    refused('no array "x"; it has z, y')
    npz(bad, x=np.array([{"an": "object"}], object))
    refused('array "x" has Python objects, which are never loaded')
    claiming(bad, (2**40,))
    refused('array "x" claims 1,099,511,627,776 bytes and has 138')
    claiming(bad, (11,))
    refused("not an .npz archive, or a damaged one")
    claiming(bad, (9,))
    refused("has more bytes than it claims")
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr("x.npy", b"no array")
    refused("not an .npz archive, or a damaged one")


def tar(path: Path, members: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode, **({"compresslevel": 1} if "gz" in mode else {})) as archive:  # type: ignore[call-overload]
        for name, raw in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return path


@pytest.mark.parametrize("mode", ["w:gz", "w"])
def test_tar_members_are_read_in_memory(tmp_path: Path, mode: str) -> None:
    members = {"a/readme": b"?", "a/two": b"22", "../../one": b"1"}
    path = tar(tmp_path / "a.tar.gz", members, mode)
    assert list(formats.read_tar(path, ("one", "two"), 2)) == [("two", b"22"), ("one", b"1")]
    assert [p.name for p in tmp_path.iterdir()] == ["a.tar.gz"]


def test_bad_tar_archives_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"

    def refused(message: str) -> None:
        with pytest.raises(DataError, match=f"a.tar.gz: .*{message}"):
            list(formats.read_tar(path, ("one", "two"), 2**16))

    tar(path, {"a/one": b"1"})
    refused("the archive has no two")
    tar(path, {"a/one": b"1", "b/one": b"1", "two": b"2"})
    refused("has one twice")
    tar(path, {"one": bytes(2**16 + 1)})
    refused("one in it has 65,537 bytes")
    tar(path, {"bulk": bytes(2**21), "one": b"1", "two": b"2"})
    refused("has far more bytes than it should")
    path.write_bytes(b"no archive" * 100)
    refused("not a complete tar archive")
    tar(path, {"one": os.urandom(2**16)})
    path.write_bytes(path.read_bytes()[:3000])
    refused("truncated")
    tar(path, {"one": b"1" * 5000}, "w")
    path.write_bytes(path.read_bytes()[:3000])
    refused("not a complete tar archive")
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("one")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)
    refused("the archive has no one, two")


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(["npz", "tar"]),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_a_damaged_archive_gives_its_contents_or_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, kind: str, changes: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / f"damaged.{kind}"
    if kind == "npz":
        npz(path, x=np.arange(20))
    else:
        tar(path, {"one": b"1" * 20}, "w")
    raw = bytearray(path.read_bytes())
    for place, value in changes:
        raw[place % min(len(raw), 800)] = value
    path.write_bytes(raw)
    try:
        if kind == "npz":
            assert formats.read_npz(path, ("x",))["x"].nbytes == 160
        else:
            assert [name for name, _ in formats.read_tar(path, ("one",), 2**16)] == ["one"]
    except DataError:
        return


def test_files_longer_than_they_should_be_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(bytes(11))
    assert len(formats.read_bytes(tmp_path / "batch", 11)) == 11
    with pytest.raises(DataError, match="batch: it has 11 bytes, and the limit is 10"):
        formats.read_bytes(tmp_path / "batch", 10)
    with pytest.raises(DataError, match="gone: it cannot be read"):
        formats.read_bytes(tmp_path / "gone", 10)


# Where files come from.


class Web(NamedTuple):
    """A server on this machine: what it answers (status, body, claimed length), and was asked."""

    address: str
    answers: dict[str, tuple[int, bytes, int]]
    asked: list[str]

    def serve(self, path: str, body: bytes, status: int = 200, length: int | None = None) -> None:
        self.answers[path] = (status, body, len(body) if length is None else length)


@pytest.fixture
def web() -> Iterator[Web]:
    answers: dict[str, tuple[int, bytes, int]] = {}
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status, body, length = answers.get(self.path, (404, b"", 0))
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Web(f"http://127.0.0.1:{server.server_port}", answers, asked)
    server.shutdown()
    thread.join()
    server.server_close()


GOOD = gzip.compress(b"the published bytes", mtime=0)


def small_set(url: str = NOWHERE, checksum: str | None = None) -> PublishedSet:
    """Two files that can be downloaded, or one that cannot."""
    checksum = checksum or "sha256:" + hashlib.sha256(GOOD).hexdigest()
    folders = ("small", "Small/raw")
    names = ("a.gz", "b.gz")
    downloaded = tuple(PublishedFile(n, folders, f"{url}/at/{n}", checksum) for n in names)
    return PublishedSet(
        "Small",
        (FileFormat("npz", (PublishedFile("small.npz", folders),)), FileFormat("gz", downloaded)),
    )


def files_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_downloads_are_kept_and_not_fetched_twice(
    web: Web, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PERFED_MIRROR")
    wanted = small_set(web.address)
    for name in ("a.gz", "b.gz"):
        web.serve(f"/at/{name}", GOOD)
    assert download.describe_location([wanted]) == "needs a download"
    for _ in range(2):
        located = download.locate(wanted)
        assert located.kind == "gz"
        assert [path.read_bytes() for path in located.paths] == [GOOD, GOOD]
    assert web.asked == ["/at/a.gz", "/at/b.gz"]
    assert files_in(own_cache) == ["small/a.gz", "small/b.gz"]
    assert download.describe_location([wanted]) == "in the cache"


def test_a_mirror_is_laid_out_as_the_cache_is(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    for base in (web.address, f"{web.address}/deep/"):
        monkeypatch.setenv("PERFED_MIRROR", base)
        assert small_set().download.files[0].address == base.rstrip("/") + "/small/a.gz"
    for name in ("a.gz", "b.gz"):
        web.serve(f"/deep/small/{name}", GOOD)
    download.locate(small_set())
    assert web.asked == ["/deep/small/a.gz", "/deep/small/b.gz"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, b"something else", None), "is not the published one, and was deleted"),
        ((200, GOOD[:-5], len(GOOD)), "IncompleteRead"),
        ((200, GOOD[:-5], None), "is not the published one, and was deleted"),
        ((404, b"", None), "the server answered 404 Not Found"),
        ((500, GOOD, None), "the server answered 500"),
    ],
    ids=["another file", "cut transfer", "short file", "404", "500"],
)
def test_a_failed_download_leaves_nothing(
    web: Web,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: tuple[int, bytes, int | None],
    message: str,
) -> None:
    monkeypatch.setenv("PERFED_MIRROR", web.address)
    status, body, length = answer
    web.serve("/small/a.gz", body, status, length)
    with pytest.raises(DataError, match=f"tried: {web.address}/small/a.gz: .*{message}"):
        download.locate(small_set())
    assert web.asked == ["/small/a.gz"]
    assert [*own_cache.rglob("*")] == []


def test_md5_checksums_are_checked_too(
    web: Web, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERFED_MIRROR", web.address)
    for name in ("a.gz", "b.gz"):
        web.serve(f"/small/{name}", GOOD)
    with pytest.raises(DataError, match="is not the published one"):
        download.locate(small_set(checksum="md5:" + "0" * 32))
    download.locate(small_set(checksum="md5:" + hashlib.md5(GOOD).hexdigest()))
    assert files_in(own_cache) == ["small/a.gz", "small/b.gz"]


def test_without_network_the_error_says_all(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError) as unset:
        download.locate(small_set())
    monkeypatch.setenv("PERFED_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError) as gone:
        download.locate(small_set())
    mine = tmp_path / "mine"
    (mine / "Small" / "raw").mkdir(parents=True)
    (mine / "Small" / "raw" / "a").write_bytes(b"x")
    monkeypatch.setenv("PERFED_DATA", str(mine))
    with pytest.raises(DataError) as partial:
        download.locate(small_set())
    for error in (unset, gone, partial):
        for part in (
            "Small is not on this machine, and the download failed",
            f"looked in: {own_cache} (the cache)",
            "Connection refused",
            "set data.root or the environment variable PERFED_DATA to it",
            "Other files that can be used: small.npz.",
        ):
            assert part in str(error.value)
    assert "the folder in PERFED_DATA (not set)" in str(unset.value)
    assert "missing: a.gz, b.gz" in str(unset.value)
    assert f"tried: {NOWHERE}/small/a.gz" in str(unset.value)
    assert f"{tmp_path / 'nowhere'} (PERFED_DATA, which does not exist)" in str(gone.value)
    assert f"{mine} (PERFED_DATA) and its subfolders small, Small/raw" in str(partial.value)
    assert "missing: b.gz\n" in str(partial.value)


@pytest.mark.parametrize("mirror", ["no-scheme", "gopher://127.0.0.1/x", "http://"])
def test_a_mirror_that_is_no_address_is_a_data_error(
    monkeypatch: pytest.MonkeyPatch, mirror: str
) -> None:
    monkeypatch.setenv("PERFED_MIRROR", mirror)
    with pytest.raises(DataError, match=f"tried: {mirror[:5]}"):
        download.locate(small_set())


def test_a_damaged_file_in_the_cache_is_fetched_again(
    web: Web, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_cache / "small").mkdir(parents=True)
    (own_cache / "small" / "a.gz").write_bytes(GOOD[:-1])
    (own_cache / "small" / "b.gz").write_bytes(GOOD)
    with pytest.raises(
        DataError, match=r"damaged: .*small/a.gz does not have the published checksum"
    ):
        download.locate(small_set())
    monkeypatch.setenv("PERFED_MIRROR", web.address)
    web.serve("/small/a.gz", GOOD)
    download.locate(small_set())
    assert web.asked == ["/small/a.gz"]
    assert (own_cache / "small" / "a.gz").read_bytes() == GOOD


def test_a_cache_that_cannot_be_written_is_a_data_error(tmp_path: Path, own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    with pytest.raises(DataError, match="the download failed"):
        download.locate(small_set())


@pytest.mark.parametrize("place", ["small", "Small/raw", "."])
@pytest.mark.parametrize("names", [("a.gz", "b.gz"), ("a", "b"), ("a.gz", "b")])
def test_a_folder_is_searched_with_its_subfolders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, names: tuple[str, str]
) -> None:
    mine = tmp_path / "mine"
    (mine / place).mkdir(parents=True)
    for name in names:
        (mine / place / name).write_bytes(b"x")
    expected = download.LocatedFiles("gz", tuple(mine / place / name for name in names))
    assert download.locate(small_set(), str(mine)) == expected
    assert download.describe_location([small_set()]) == "needs a download"
    monkeypatch.setenv("PERFED_DATA", str(mine))
    assert download.locate(small_set()) == expected
    assert download.describe_location([small_set()]) == "in PERFED_DATA"
    # The form that comes first is the one taken.
    (mine / place / "small.npz").write_bytes(b"x")
    assert download.locate(small_set()) == download.LocatedFiles(
        "npz", (mine / place / "small.npz",)
    )


def test_a_root_is_the_only_place_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder, names in ((mine, ("a.gz",)), (other, ("a.gz", "b.gz"))):
        (folder / "small").mkdir(parents=True)
        for name in names:
            (folder / "small" / name).write_bytes(b"x")
    monkeypatch.setenv("PERFED_DATA", str(other))
    with pytest.raises(DataError) as error:
        download.locate(small_set(), str(mine))
    assert str(error.value) == (
        f"Small is not in {mine}, which is data.root. Put there one of these sets of "
        f"files:\n  small.npz\n    into {mine}/small or {mine}/Small/raw or {mine}\n"
        f"  b.gz (or unpacked)\n    into {mine}/small or {mine}/Small/raw or {mine}"
    )
    with pytest.raises(DataError, match=r"root = '.*nowhere': there is no such folder"):
        download.locate(small_set(), str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="there is no such folder"):
        download.locate(small_set(), str(mine / "small" / "a.gz"))


def test_a_bar_is_shown_on_a_terminal_only(
    web: Web, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("PERFED_MIRROR", web.address)
    web.serve("/small/a.gz", GOOD)
    for screen, shown in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr("sys.stderr", screen)
        # The second file is not there: a bar must go away after a failure too.
        with pytest.raises(DataError, match="404"):
            download.locate(small_set())
        assert ("a.gz" in screen.getvalue()) is shown
        (own_cache / "small" / "a.gz").unlink()


def test_where_sources_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded = {"digits", "heart"}
    assert {published.available(name) for name in embedded} == {"ships with the package"}
    assert published.available("synthetic") is None
    assert {published.available(name) for name in set(published.NEEDS) - embedded} == {
        "needs a download"
    }
    cached = sets.MNIST_WRITERS.download.files
    for file in (*cached, *sets.SHAKESPEARE.download.files):
        file.cached.parent.mkdir(parents=True, exist_ok=True)
        file.cached.write_bytes(b"x")
    assert published.available("shakespeare") == "in the cache"
    assert published.available("mnist-writers") == "needs a download"
    (tmp_path / "mnist").mkdir()
    for file in sets.MNIST.download.files:
        (tmp_path / "mnist" / file.name).write_bytes(b"x")
    monkeypatch.setenv("PERFED_DATA", str(tmp_path))
    assert published.available("mnist") == "in PERFED_DATA"
    assert published.available("mnist-writers") == "in PERFED_DATA and in the cache"
    assert published.available("cifar10") == "needs a download"


# The sets themselves, on files made up to their measure.


def test_digits() -> None:
    pool = published.digits()
    assert pool.x.shape == (1797, 8, 8, 1)
    assert (pool.x.dtype.name, pool.y.dtype.name) == ("uint8", "int32")
    assert (int(pool.x.min()), int(pool.x.max())) == (0, 16)
    assert np.bincount(pool.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert pool.labels == tuple("0123456789")
    assert (pool.test, pool.client, pool.limits, pool.standardize) == (None, None, (0, 16), "unit")


def test_mnist_is_read_from_files(made_up_mnist: Path) -> None:
    pool = published.mnist(str(made_up_mnist))
    assert pool.x.shape == (70_000, 28, 28, 1)
    assert (pool.x.dtype.name, pool.y.dtype.name) == ("uint8", "int32")
    np.testing.assert_array_equal(pool.x[:, 3, 4, 0], pool.y)
    np.testing.assert_array_equal(pool.y[:60_000], labels_of(MNIST_TRAIN))
    np.testing.assert_array_equal(pool.y[60_000:], labels_of(MNIST_TEST))
    np.testing.assert_array_equal(pool.test, np.arange(70_000) >= 60_000)
    assert (pool.labels, pool.limits, pool.standardize) == (tuple("0123456789"), (0, 255), "unit")


def test_some_classes_can_be_chosen(made_up_mnist: Path) -> None:
    pool = published.mnist(str(made_up_mnist), only=(8, 0))
    assert pool.labels == ("8", "0")
    assert pool.test is not None
    assert np.bincount(pool.y[~pool.test]).tolist() == [5851, 5923]
    assert np.bincount(pool.y[pool.test]).tolist() == [974, 980]
    np.testing.assert_array_equal(pool.x[:, 0, 0, 0], np.array([8, 0])[pool.y])
    assert pool.y.dtype == np.int32


@pytest.mark.parametrize("make", [published.mnist, published.fashion_mnist, published.cifar10])
@pytest.mark.parametrize(
    ("only", "message"),
    [
        ((1, 1), "must not have a class twice"),
        ((1, 10), "whole numbers from 0 to 9"),
        ((-1, 1), "whole numbers from 0 to 9"),
        ((0, True), "whole numbers from 0 to 9"),
        ((0, 1.5), "whole numbers from 0 to 9"),
        ((3,), "at least two classes"),
        ((), "at least two classes"),
    ],
)
def test_a_bad_choice_of_classes_is_refused(
    make: Callable[..., Dataset], only: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(FieldError, match=f"only = .*{message}"):
        make(only=only)


def test_mnist_and_fashion_mnist_are_told_apart(tmp_path: Path, made_up_mnist: Path) -> None:
    raw = made_up_mnist / "MNIST" / "raw"
    message = "train-labels-idx1-ubyte: these are not Fashion-MNIST's labels: there are 5923 6742"
    with pytest.raises(DataError, match=message):
        published.fashion_mnist(str(raw))
    write_mnist(tmp_path / "FashionMNIST" / "raw", (6000,) * 10, (1000,) * 10)
    pool = published.fashion_mnist(str(tmp_path))
    assert pool.labels is not None
    assert (pool.labels[0], pool.labels[9]) == ("T-shirt/top", "Ankle boot")
    assert np.bincount(pool.y).tolist() == [7000] * 10
    with pytest.raises(DataError, match="these are not MNIST's labels: there are 6000 6000"):
        published.mnist(str(tmp_path / "FashionMNIST" / "raw"))
    # Not found under its own name, it is not taken from the other's folder.
    with pytest.raises(DataError, match="MNIST is not in"):
        published.mnist(str(tmp_path))


def test_bad_sets_of_mnist_files_are_refused(tmp_path: Path, made_up_mnist: Path) -> None:
    raw = made_up_mnist / "MNIST" / "raw"
    for file in raw.iterdir():
        (tmp_path / file.name).symlink_to(file)
    labels, images = tmp_path / "t10k-labels-idx1-ubyte", tmp_path / "t10k-images-idx3-ubyte"

    def refused(path: Path, values: np.ndarray, message: str) -> None:
        path.unlink()
        path.write_bytes(idx(values))
        with pytest.raises(DataError, match=message):
            published.mnist(str(tmp_path))
        path.unlink()
        path.symlink_to(raw / path.name)

    good = labels_of(MNIST_TEST)
    message = f"{images} has 10000 images, and {labels} 9999 labels"
    refused(labels, good[:-1], message)
    refused(labels, good.astype(np.int32), "labels have shape .10000,. and type int32")
    refused(labels, good[:, None], r"labels have shape \(10000, 1\)")
    high = good.copy()
    high[0] = 10
    refused(labels, high, "these are not MNIST's labels")
    refused(images, np.zeros((10_000, 28, 27), np.uint8), r"images have shape \(10000, 28, 27\)")


@pytest.fixture(scope="module")
def made_up_cifar() -> Cifar:
    return cifar_batch(60_000)


def cifar_batches(cifar: Cifar) -> dict[str, Cifar]:
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    rows = [slice(i * 10_000, (i + 1) * 10_000) for i in range(6)]
    return {n: Cifar(cifar.images[r], cifar.labels[r]) for n, r in zip(names, rows, strict=True)}


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[Path]:
    """A folder for large files, which are not kept for a look afterwards as others are."""
    folder = tmp_path / "roomy"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def write_cifar(root: Path, cifar: Cifar, form: str) -> None:
    if form == "npz":
        for name, rows in (("train", slice(0, 50_000)), ("test", slice(50_000, None))):
            path = root / f"cifar10_{name}.npz"
            npz(path, images=cifar.images[rows], labels=cifar.labels[rows])
        return
    dump: Callable[[Cifar], bytes]
    if form.startswith("python"):
        folder, ending, dump = "cifar-10-batches-py", "", published_batch
    else:
        folder, ending, dump = "cifar-10-batches-bin", ".bin", binary_batch
    batches = {f"{folder}/{n}{ending}": dump(b) for n, b in cifar_batches(cifar).items()}
    if form.endswith(".tar"):
        # In another order than that of the rows.
        members = {f"{folder}/readme.html": b"", **dict(reversed(batches.items()))}
        tar(root / f"cifar-10-{form}.gz", members)
        return
    (root / folder).mkdir()
    for name, raw in batches.items():
        (root / name).write_bytes(raw)


@pytest.mark.parametrize(
    "form",
    [
        "binary.tar",
        *(
            pytest.param(form, marks=pytest.mark.slow)
            for form in ("npz", "python", "python.tar", "binary")
        ),
    ],
)
def test_cifar10_is_the_same_from_each_of_its_forms(
    roomy: Path, made_up_cifar: Cifar, form: str
) -> None:
    write_cifar(roomy, made_up_cifar, form)
    pool = published.cifar10(str(roomy))
    assert download.locate(sets.CIFAR10, str(roomy)).kind == form
    np.testing.assert_array_equal(pool.x, made_up_cifar.images)
    np.testing.assert_array_equal(pool.y, made_up_cifar.labels)
    np.testing.assert_array_equal(pool.test, np.arange(60_000) >= 50_000)
    assert (pool.x.dtype.name, pool.y.dtype.name) == ("uint8", "int32")
    assert pool.x.flags.c_contiguous
    assert pool.labels is not None
    assert pool.labels[:2] == ("airplane", "automobile")


def test_bad_sets_of_cifar10_files_are_refused(roomy: Path, made_up_cifar: Cifar) -> None:
    folder = roomy / "cifar-10-batches-bin"
    write_cifar(roomy, made_up_cifar, "binary")
    batch = folder / "data_batch_3.bin"
    good = batch.read_bytes()

    def refused(raw: bytes, message: str) -> None:
        batch.write_bytes(raw)
        with pytest.raises(DataError, match=message):
            published.cifar10(str(roomy))

    refused(good[: 3073 * 9999], "data_batch_3.bin: the batch has 9999 images")
    refused(good[:-1], "data_batch_3.bin: .* records of 3073 bytes")
    refused(b"\x01" + good[1:], "these are not CIFAR-10's labels: there are 4999 5001 5000")
    refused(bytes(2**26 + 1), "data_batch_3.bin: it has 67,108,865 bytes")
    batch.unlink()
    with pytest.raises(DataError, match=r"  data_batch_3.bin\n    into"):
        published.cifar10(str(roomy))
    tar(roomy / "cifar-10-binary.tar.gz", {"data_batch_1.bin": good})
    with pytest.raises(DataError, match=r"no data_batch_2.bin, .*test_batch.bin"):
        published.cifar10(str(roomy))
    train = npz(roomy / "cifar10_train.npz", images=np.zeros((3, 32, 32, 3), np.uint8))
    npz(roomy / "cifar10_test.npz", images=np.zeros((3, 32, 32, 3), np.uint8))
    with pytest.raises(DataError, match=f"{train}: images have shape"):
        published.cifar10(str(roomy))


def made_up_writers() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(60_000) % 539, 1000 + np.arange(10_000) % 297


def write_qmnist(folder: Path, classes: np.ndarray, writers: tuple[np.ndarray, ...]) -> None:
    rows = zip(("train", "test"), (classes[:60_000], classes[60_000:]), writers, strict=True)
    for name, labels, writer in rows:
        table = np.zeros((60_000, 8), np.int32)
        table[: len(labels), 0], table[: len(labels), 2] = labels, writer
        raw = gzip.compress(idx(table), 1, mtime=0)
        (folder / f"qmnist-{name}-labels-idx2-int.gz").write_bytes(raw)


@pytest.mark.parametrize("form", ["npz", "qmnist"])
def test_mnist_by_writers(tmp_path: Path, made_up_mnist: Path, form: str) -> None:
    (tmp_path / "MNIST").symlink_to(made_up_mnist / "MNIST")
    with pytest.raises(DataError, match="MNIST's list of writers is not in"):
        published.mnist_writers(str(tmp_path))
    train, test = made_up_writers()
    if form == "npz":
        npz(tmp_path / "mnist_writers.npz", train_writer=train, test_writer=test)
    else:
        labels = np.concatenate([labels_of(MNIST_TRAIN), labels_of(MNIST_TEST)])
        write_qmnist(tmp_path, labels, (train, test))
    pool = published.mnist_writers(str(tmp_path))
    assert pool.client is not None
    assert pool.names is not None
    assert len(pool.names) == 836
    assert (pool.names[0], pool.names[538], pool.names[539]) == (
        "writer 0000",
        "writer 0538",
        "writer 1000",
    )
    ids = np.array([int(name.removeprefix("writer ")) for name in pool.names])
    np.testing.assert_array_equal(ids[pool.client], np.concatenate([train, test]))
    assert pool.test is None
    assert pool.x.shape == (70_000, 28, 28, 1)


def test_bad_lists_of_writers_are_refused(tmp_path: Path, made_up_mnist: Path) -> None:
    (tmp_path / "MNIST").symlink_to(made_up_mnist / "MNIST")
    train, test = made_up_writers()
    path = tmp_path / "mnist_writers.npz"
    npz(path, train_writer=train, test_writer=test[:-1])
    with pytest.raises(DataError, match=r"test_writer have shape \(9999,\)"):
        published.mnist_writers(str(tmp_path))
    npz(path, train_writer=train, test_writer=test * 0)
    with pytest.raises(DataError, match="not MNIST's writers: there are 539, and MNIST has 836"):
        published.mnist_writers(str(tmp_path))
    path.unlink()
    labels = np.concatenate([labels_of(MNIST_TRAIN), labels_of(MNIST_TEST)])
    labels[:5] = (labels[:5] + 1) % 10
    write_qmnist(tmp_path, labels, (train, test))
    message = "qmnist-train-labels-idx2-int.gz: 5 of its 60000 classes differ from MNIST's"
    with pytest.raises(DataError, match=message):
        published.mnist_writers(str(tmp_path))


PLAY = """KING LEAR:
Nothing will come of nothing.

Fool:

CORDELIA:
Unhappy that I am.
I cannot heave.


KING LEAR:
Speak again.
"""


def write_play(folder: Path, text: str = PLAY) -> str:
    (folder / "input.txt").write_text(text)
    return str(folder)


def test_roles_of_a_play_are_clients(tmp_path: Path) -> None:
    pool = published.shakespeare(write_play(tmp_path), context=4, stride=1, min_characters=5)
    assert pool.names == ("KING LEAR", "CORDELIA")
    assert pool.labels == pool.vocabulary == tuple(sorted(set(PLAY)))
    assert (pool.gap, pool.test, pool.limits, pool.standardize) == (4, None, None, "none")
    assert pool.client is not None
    kinds = [array.dtype.name for array in (pool.x, pool.y, pool.client)]
    assert kinds == ["uint8", "int32", "int32"]
    said = ("Nothing will come of nothing.\nSpeak again.", "Unhappy that I am.\nI cannot heave.")
    for client, text in enumerate(said):
        rows = np.flatnonzero(pool.client == client)
        assert len(rows) == len(text) - 4
        symbols = np.array(pool.vocabulary)
        for start, row in enumerate(rows):
            assert "".join(symbols[pool.x[row]]) == text[start : start + 4]
            assert symbols[pool.y[row]] == text[start + 4]


@given(context=st.integers(1, 12), stride=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_windows_on_both_sides_of_the_gap_share_nothing(context: int, stride: int) -> None:
    folder = Path(os.environ["PERFED_DATA_CACHE"])
    folder.mkdir(exist_ok=True)
    text = "A:\n" + "".join(chr(0x21 + i % 90) for i in range(400)) + "\n\nB:\n" + "ab" * 200
    pool = published.shakespeare(write_play(folder, text), context, stride, 1)
    assert pool.gap is not None
    assert pool.client is not None
    n = int(np.count_nonzero(pool.client == 0))
    starts = np.arange(n) * stride
    # A window and its target reach up to start + context.
    assert starts[-1] + context <= 399 < starts[-1] + stride + context
    last_kept, first_out = starts[0], starts[pool.gap + 1]
    assert last_kept + context < first_out


def test_strides_leave_windows_out(tmp_path: Path) -> None:
    root = write_play(tmp_path)
    every = published.shakespeare(root, context=4, min_characters=5)
    third = published.shakespeare(root, context=4, stride=3, min_characters=5)
    assert third.gap == 2
    assert every.client is not None
    assert third.client is not None
    for client in (0, 1):
        expected = every.x[every.client == client][::3]
        np.testing.assert_array_equal(third.x[third.client == client], expected)


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"context": 0}, "context = 0: must be a whole number"),
        ({"stride": 0}, "stride = 0: must be a whole number"),
        ({"min_characters": 0}, "min_characters = 0: must be a whole number"),
        ({}, "min_characters = 1000: no role has as many; the longest of the 3 has 42"),
        (
            {"context": 16, "min_characters": 1},
            r"min_characters = 1: 1 of 2 roles are too short for 4 examples of 16 characters and "
            r"a gap of 16 \(CORDELIA has 34 characters\); .* it must be at least 36",
        ),
        (
            {"context": 16, "stride": 5, "min_characters": 1},
            "a gap of 4 .*; with context = 16 and stride = 5 it must be at least 52",
        ),
    ],
)
def test_bad_settings_of_shakespeare_are_refused(
    tmp_path: Path, given_settings: dict[str, int], message: str
) -> None:
    with pytest.raises(FieldError, match=message):
        published.shakespeare(write_play(tmp_path), **given_settings)


@pytest.mark.parametrize("context", [1, 5, 16])
@pytest.mark.parametrize("stride", [1, 3, 20])
def test_the_length_asked_for_is_enough_and_no_more(
    tmp_path: Path, context: int, stride: int
) -> None:
    write_play(tmp_path, "A:\n" + "x" * 3)
    with pytest.raises(FieldError, match="it must be at least") as error:
        published.shakespeare(str(tmp_path), context, stride, 1)
    needed = int(re.findall(r"at least (\d+)", str(error.value))[0])
    pool = published.shakespeare(write_play(tmp_path, "A:\n" + "x" * needed), context, stride, 1)
    assert pool.gap is not None
    assert len(pool.y) == pool.gap + 4
    with pytest.raises(FieldError, match=f"at least {needed}"):
        published.shakespeare(write_play(tmp_path, "A:\n" + "x" * (needed - 1)), context, stride, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Once upon a time\nthere was", "a block begins with 'Once upon a time'"),
        ("A:\nhello\n\nno speaker here", "a block begins with 'no speaker here'"),
        ("", "a block begins with ''"),
        (":\nhello", "a block begins with ':'"),
        ("A:\n" + "".join(map(chr, range(0x100, 0x300))), "515 different characters, and 256"),
    ],
)
def test_texts_in_another_layout_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=f"input.txt: .*{message}"):
        published.shakespeare(write_play(tmp_path, text), context=4, min_characters=1)


# The real files.


@needs_real_data
def test_real_mnist() -> None:
    pool = published.mnist(str(REAL))
    assert pool.x.shape == (70_000, 28, 28, 1)
    assert pool.test is not None
    assert tuple(np.bincount(pool.y[~pool.test]).tolist()) == MNIST_TRAIN
    assert tuple(np.bincount(pool.y[pool.test]).tolist()) == MNIST_TEST
    assert pool.y[:5].tolist() == [5, 0, 4, 1, 9]
    assert pool.y[60_000:60_003].tolist() == [7, 2, 1]
    assert pool.y[-3:].tolist() == [4, 5, 6]
    train = pool.x[:60_000]
    assert (train.mean(), train.std()) == pytest.approx((33.318, 78.567), abs=1e-3)


@needs_real_data
def test_real_mnist_comes_by_download_too(
    web: Web, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the checksums and names that the package has for it."""
    monkeypatch.setenv("PERFED_MIRROR", web.address)
    names = [file.name for file in sets.MNIST.download.files]
    for name in names:
        web.serve(f"/mnist/{name}", (REAL / "mnist" / name).read_bytes())
    text = formats.read_text(REAL / "shakespeare" / "tinyshakespeare.txt.gz")
    web.serve("/shakespeare/input.txt", text.encode())
    for _ in range(2):
        assert published.mnist().y[:3].tolist() == [5, 0, 4]
        assert published.shakespeare(stride=100).x.shape[1] == 80
    assert web.asked == [*(f"/mnist/{name}" for name in names), "/shakespeare/input.txt"]
    assert len(files_in(own_cache)) == 5


@needs_real_data
def test_real_writers() -> None:
    pool = published.mnist_writers(str(REAL))
    assert pool.client is not None
    assert pool.names is not None
    sizes = np.bincount(pool.client)
    assert (len(pool.names), len(sizes)) == (836, 836)
    assert (sizes.sum(), sizes.min(), sizes.max()) == (70_000, 8, 131)
    in_train = np.bincount(pool.client[:60_000], minlength=836)
    in_test = np.bincount(pool.client[60_000:], minlength=836)
    assert [np.count_nonzero(part) for part in (in_train, in_test)] == [539, 297]
    assert not np.any((in_train > 0) & (in_test > 0))
    assert (pool.names[0], pool.names[-1]) == ("writer 0000", "writer 2599")


@pytest.mark.slow
@needs_real_data
def test_real_cifar10() -> None:
    pool = published.cifar10(str(REAL))
    assert pool.x.shape == (60_000, 32, 32, 3)
    assert pool.test is not None
    assert np.bincount(pool.y[~pool.test]).tolist() == [5000] * 10
    assert np.bincount(pool.y[pool.test]).tolist() == [1000] * 10
    assert pool.y[:5].tolist() == [6, 9, 9, 4, 1]
    assert pool.y[50_000:50_004].tolist() == [3, 8, 8, 0]
    means = pool.x[:50_000].mean(axis=(0, 1, 2))
    np.testing.assert_allclose(means, [125.307, 122.950, 113.865], atol=1e-3)
    # Written out as it is published, it reads the same.
    whole = Cifar(pool.x, pool.y.astype(np.uint8))
    for name, batch in cifar_batches(whole).items():
        if name in ("data_batch_2", "test_batch"):
            for images, labels in (
                cifar.read_python_batch(published_batch(batch), name),
                cifar.read_binary_batch(binary_batch(batch), name),
            ):
                np.testing.assert_array_equal(images, batch.images)
                np.testing.assert_array_equal(labels, batch.labels)


@needs_real_data
def test_the_real_cifar10_batches_are_the_published_ones() -> None:
    """The test batch written as a binary one has the sum of the published file."""
    arrays = formats.read_npz(REAL / "cifar10" / "cifar10_test.npz", ("images", "labels"))
    raw = binary_batch(Cifar(arrays["images"], arrays["labels"]))
    assert hashlib.sha1(raw).hexdigest().startswith("67eb016d")


@needs_real_data
def test_real_shakespeare() -> None:
    pool = published.shakespeare(str(REAL))
    assert pool.client is not None
    assert pool.names is not None
    assert pool.labels is not None
    assert len(pool.labels) == 65
    assert len(pool.names) == 141
    assert pool.names[:2] == ("First Citizen", "Second Citizen")
    sizes = np.bincount(pool.client)
    assert sizes.min() >= 1000 - 80
    assert len(pool.y) == sizes.sum() == len(pool.x)
    assert np.all(np.diff(pool.client) >= 0)
    first = "".join(np.array(pool.labels)[pool.x[0]])
    assert first.startswith("Before we proceed any further, hear me speak.\nYou are all resolved")
    # 309 names; ten of them are given no speech at all, and many of the others very little.
    with pytest.raises(FieldError, match=r"67 of 299 roles .* it must be at least 164"):
        published.shakespeare(str(REAL), min_characters=1)
    path = REAL / "shakespeare" / "tinyshakespeare.txt.gz"
    assert len(_speeches(formats.read_text(path), path)) == 309
    assert len(published.shakespeare(str(REAL), min_characters=164).names or ()) == 299 - 67


@needs_real_data
def test_real_data_are_found_by_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFED_DATA", str(REAL))
    for name in ("mnist", "mnist-writers", "cifar10", "shakespeare"):
        assert published.available(name) == "in PERFED_DATA"
    assert published.mnist(only=(0, 8)).labels == ("0", "8")
