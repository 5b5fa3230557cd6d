"""A federation in memory-mapped files: for more clients than fit in memory.

A folder with the rows of all clients, one client after another, as plain binary arrays: `train_x`,
`train_y`, `test_x`, `test_y`; the number of rows of each client, `train_size` and `test_size`;
`shift`, `scale` and `clip`, if inputs are scaled; `names.json`, if clients have names; and
`federation.json` with the arrays' types, shapes and checksums, which is written last.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any, BinaryIO, Final, Self, final

import numpy as np

from perfed.core.errors import DataError
from perfed.data.examples import FlatExamples
from perfed.data.federation import Federation, joint_checksum
from perfed.data.scaling import SCALING_ARRAYS, Scaling

FORMAT: Final = "perfed-federation-1"
METADATA: Final = "federation.json"
NAMES: Final = "names.json"
_ARRAYS: Final = ("train_x", "train_y", "train_size", "test_x", "test_y", "test_size")


@final
class FederationWriter:
    """Writes a federation client by client, into a folder that `stored` reads.

    Use it in a `with` statement, and `add` one client after another. If an error ends it, the
    folder is not a federation. Rows are written at once, so it needs little memory.
    """

    def __init__(
        self,
        root: str | Path,
        labels: Sequence[str] | None = None,
        vocabulary: Sequence[str] | None = None,
        scaling: Scaling | None = None,
        target: tuple[float, float] = (0.0, 1.0),
        features: Sequence[str] | None = None,
    ) -> None:
        """Prepare to write.

        Args:
            root: the folder, which must be empty or new.
            labels: the names of the classes, by number; None: a regression.
            vocabulary: the symbols that inputs are indices of; None: inputs are numbers.
            scaling: how inputs are scaled before a model sees them.
            target: shift and spread of a regression's targets.
            features: the names of the inputs' columns, if they have any.
        """
        self._root = Path(root).expanduser()
        self._metadata: dict[str, Any] = {
            "labels": None if labels is None else list(labels),
            "vocabulary": None if vocabulary is None else list(vocabulary),
            "target": list(target),
            "features": None if features is None else list(features),
        }
        self._scaling = scaling
        self._files: dict[str, _Column] = {}
        self._names: list[str | None] = []

    def __enter__(self) -> Self:
        check_free(self._root)
        self._root.mkdir(parents=True, exist_ok=True)
        self._files = {name: _Column(self._root / f"{name}.bin") for name in _ARRAYS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for column in self._files.values():
            column.close()
        if kind is None:
            self._finish()

    def add(self, train: tuple[Any, Any], test: tuple[Any, Any], name: str | None = None) -> None:
        """Write a client: (x, y) to train on, (x, y) held out, and its name."""
        who = f"client {len(self._names) if name is None else name}"
        rows: dict[str, np.ndarray] = {}
        for part, (x, y), use in (("train", train, "train on"), ("test", test, "be scored on")):
            x, y = np.asarray(x), self._checked_labels(np.asarray(y), who)
            if len(x) != len(y):
                raise DataError(f"{who} has {len(x)} inputs but {len(y)} labels")
            if len(x) == 0:
                raise DataError(f"{who} has no examples to {use}")
            if x.dtype == bool:
                x = x.astype(np.uint8)
            if x.dtype.kind not in "iuf":
                raise DataError(f"{who}: inputs have type {x.dtype}; use numbers")
            if np.issubdtype(x.dtype, np.floating):
                x = x.astype(np.float32)
                if not np.isfinite(x).all():
                    raise DataError(f"{who}: some inputs are not finite numbers")
            rows |= {f"{part}_x": x, f"{part}_y": y, f"{part}_size": np.array([len(x)], np.int32)}
        if rows["train_x"].shape[1:] != rows["test_x"].shape[1:]:
            raise DataError(f"{who}: inputs to train on and held-out ones have different shapes")
        # Check all arrays before any is written.
        for array, column in self._files.items():
            column.check(rows[array], who)
        for array, column in self._files.items():
            column.append(rows[array])
        self._names.append(name)

    def _checked_labels(self, y: np.ndarray, who: str) -> np.ndarray:
        labels = self._metadata["labels"]
        if y.ndim != 1:
            raise DataError(f"{who}: labels have shape {y.shape}; use one per example")
        if labels is None:
            numbers = y.astype(np.float32)
            if not np.isfinite(numbers).all():
                raise DataError(f"{who}: some targets are not finite numbers")
            return numbers
        whole = np.issubdtype(y.dtype, np.integer)
        if not whole or (len(y) and not 0 <= int(y.min()) <= int(y.max()) < len(labels)):
            raise DataError(f"{who}: labels must be whole numbers from 0 to {len(labels) - 1}")
        return y.astype(np.int32)

    def _finish(self) -> None:
        if not self._names:
            raise DataError(f"{self._root}: no clients were added")
        if len({name is None for name in self._names}) > 1:
            raise DataError(f"{self._root}: give all clients a name, or none")
        arrays = {name: column.metadata() for name, column in self._files.items()}
        if self._scaling is not None:
            for name in SCALING_ARRAYS:
                column = _Column(self._root / f"{name}.bin")
                rows = np.asarray(getattr(self._scaling, name), np.float32)
                column.check(rows, "scaling")
                column.append(rows)
                column.close()
                arrays[name] = column.metadata()
        if self._names[0] is not None:
            (self._root / NAMES).write_text(json.dumps(self._names))
        metadata = {
            "format": FORMAT,
            "clients": len(self._names),
            **self._metadata,
            "arrays": arrays,
        }
        partial = self._root / f"{METADATA}.partial"
        partial.write_text(json.dumps(metadata, indent=1))
        os.replace(partial, self._root / METADATA)


@final
class _Column:
    """The file of one array, written row by row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("wb")
        self._digest = hashlib.sha256()
        self._rows = 0
        self.shape: tuple[int, ...] | None = None
        self.dtype = np.dtype(np.uint8)

    def check(self, rows: np.ndarray, who: str) -> None:
        if self.shape is None:
            self.shape, self.dtype = rows.shape[1:], rows.dtype
        if rows.shape[1:] != self.shape or rows.dtype != self.dtype:
            raise DataError(
                f"{who}: {self._path.stem} is {rows.dtype} of shape {rows.shape[1:]}, but that of "
                f"earlier clients is {self.dtype} of shape {self.shape}"
            )

    def append(self, rows: np.ndarray) -> None:
        contents = np.ascontiguousarray(rows).data.cast("B") if rows.size else b""
        self._digest.update(contents)
        self._file.write(contents)
        self._rows += len(rows)

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def metadata(self) -> dict[str, Any]:
        shape = [self._rows, *(self.shape or ())]
        return {"dtype": self.dtype.str, "shape": shape, "sha256": self._digest.hexdigest()}


def check_free(root: Path) -> None:
    """Raise if a folder is not empty or cannot be written."""
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise DataError(f"{root} exists and is not an empty folder; use another one")
    existing = next(path for path in (root, *root.absolute().parents) if path.exists())
    try:
        with TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise DataError(f"{root} cannot be written: {error.strerror}") from None


def store(federation: Federation, root: str | Path) -> None:
    """Write a federation into a folder that `stored` reads."""
    if not federation.has_examples:
        raise DataError("the clients of this federation are remote, so it cannot be stored here")
    numbers = [str(i) for i in range(federation.clients)]
    named = list(federation.names) != numbers
    with FederationWriter(
        root,
        federation.labels,
        federation.vocabulary,
        federation.scaling,
        federation.target,
        federation.features,
    ) as writer:
        for i, name in enumerate(federation.names):
            parts = (federation.train.client(i), federation.test.client(i))
            writer.add(*parts, name if named else None)


def stored(root: str) -> Federation:
    """A federation written by `perfed data store` or `FederationWriter`, memory-mapped.

    Rows are read from the files when needed, so a federation may be larger than memory.

    Args:
        root: the folder.
    """
    folder = Path(root).expanduser()
    metadata = _read_metadata(folder)
    arrays = {name: _map_array(folder, name, metadata) for name in metadata["arrays"]}
    try:
        train, test = (_examples(part, arrays) for part in ("train", "test"))
        clients = int(metadata["clients"])
        names: Sequence[str] = [str(i) for i in range(clients)]
        if (folder / NAMES).exists():
            names = json.loads((folder / NAMES).read_text(encoding="utf-8"))
        scaling = (
            Scaling(*(arrays[k] for k in SCALING_ARRAYS)) if SCALING_ARRAYS[0] in arrays else None
        )
        checksums = {name: metadata["arrays"][name]["sha256"] for name in _ARRAYS}
        labels, vocabulary, features = (
            None if metadata[key] is None else tuple(metadata[key])
            for key in ("labels", "vocabulary", "features")
        )
        target = (float(metadata["target"][0]), float(metadata["target"][1]))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder / METADATA} is damaged: {error}") from None
    if not len(train.size) == len(test.size) == len(names) == clients:
        raise DataError(
            f"{folder}: the metadata say {clients} clients, but the arrays have another number"
        )
    checksum = joint_checksum((arrays[name], checksums[name]) for name in _ARRAYS)
    return Federation(
        train, test, tuple(names), labels, vocabulary, scaling, target, features, checksum
    )  # fmt: skip


def _read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / METADATA
    if not folder.is_dir():
        raise DataError(f"{folder.absolute()}: no such folder; check the path")
    if not path.is_file():
        raise DataError(
            f"{folder} has no {METADATA}, so it is not a complete federation; write one with "
            "`perfed data store CONFIG --out DIR`"
        )
    try:
        metadata: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = metadata["format"]
        missing = [name for name in _ARRAYS if name not in metadata["arrays"]]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is damaged: {error}") from None
    if version != FORMAT or missing:
        raise DataError(f"{path} does not have the format {FORMAT}; write it again")
    return metadata


def _map_array(folder: Path, name: str, metadata: dict[str, Any]) -> np.ndarray:
    """One of the arrays, memory-mapped."""
    path = folder / f"{name}.bin"
    try:
        about = metadata["arrays"][name]
        dtype, shape = np.dtype(about["dtype"]), tuple(int(n) for n in about["shape"])
        if dtype.hasobject or dtype.kind not in "iuf" or min(shape) < 0:
            raise ValueError(f"{name} is {dtype} of shape {shape}")
        expected = prod(shape) * dtype.itemsize
        size = path.stat().st_size
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder}: {name} cannot be read: {error}") from None
    if size != expected:
        raise DataError(f"{path} has {size} bytes, but should have {expected}; write it again")
    return np.memmap(path, dtype, "r", shape=shape) if expected else np.zeros(shape, dtype)


def _examples(part: str, arrays: dict[str, np.ndarray]) -> FlatExamples:
    # Sizes are used all the time, and small: they are copied into memory.
    size = np.array(arrays[f"{part}_size"])
    x, y = arrays[f"{part}_x"], arrays[f"{part}_y"]
    if len(size) and int(size.min()) < 1:
        raise ValueError(f"a client has {size.min()} rows")
    if not len(x) == len(y) == int(size.sum(dtype=np.int64)):
        raise ValueError(f"{len(x)} inputs, {len(y)} labels and sizes of {size.sum()} rows")
    return FlatExamples.from_rows(x, y, size)
