"""A federation in files that are read where they lie: for more clients than fit in memory.

A folder with the rows of all clients, one client after another, as plain binary arrays: `train_x`,
`train_y`, `test_x`, `test_y`; how many rows each client has, `train_size` and `test_size`; `shift`
and `scale`, if inputs are scaled; `names.json`, if clients have names; and `federation.json`, which
says the arrays' types, shapes and checksums, and is written last.
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

from perfed.core.errors import DataError, require
from perfed.data.federation import Federation, FlatExamples, joined_checksum
from perfed.data.scaling import SCALING, Scaling

FORMAT: Final = "perfed-federation-1"
FACTS: Final = "federation.json"
NAMES: Final = "names.json"
_ARRAYS: Final = ("train_x", "train_y", "train_size", "test_x", "test_y", "test_size")


@final
class FederationWriter:
    """Writes a federation client by client, into a folder that `stored` reads.

    Within `with`, `add` one client after another; at the end the folder is whole, or, if something
    goes wrong on the way, is no federation. Rows are written as they come, so it needs little
    memory, however many there are.
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
        """Begin a folder.

        Args:
            root: the folder; it must not hold a federation already.
            labels: the names of the classes, by number; None: a regression.
            vocabulary: inputs are positions in this list of symbols; None: they are numbers.
            scaling: how inputs are scaled before a model sees them.
            target: shift and spread of a regression's targets.
            features: the names of the inputs' columns, where they have any.
        """
        self._root = Path(root).expanduser()
        self._facts: dict[str, Any] = {
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

    def add(
        self,
        train: tuple[Any, Any],
        test: tuple[Any, Any],
        name: str | None = None,
    ) -> None:
        """One client: (x, y) to learn from, (x, y) held out, and what it is called."""
        who = f"client {len(self._names) if name is None else name}"
        rows: dict[str, np.ndarray] = {}
        for part, (x, y), what in (("train", train, "train on"), ("test", test, "be scored on")):
            x, y = np.asarray(x), self._labeled(np.asarray(y), who)
            if len(x) != len(y):
                raise DataError(f"{who} has {len(x)} inputs but {len(y)} labels")
            if len(x) == 0:
                raise DataError(f"{who} has no examples to {what}")
            if x.dtype == bool:
                x = x.astype(np.uint8)
            if x.dtype.kind not in "iuf":
                raise DataError(f"{who}: inputs are {x.dtype}; give numbers")
            if np.issubdtype(x.dtype, np.floating):
                x = x.astype(np.float32)
                if not np.isfinite(x).all():
                    raise DataError(f"{who}: some inputs are not finite numbers")
            rows |= {f"{part}_x": x, f"{part}_y": y, f"{part}_size": np.array([len(x)], np.int32)}
        if rows["train_x"].shape[1:] != rows["test_x"].shape[1:]:
            raise DataError(f"{who}: inputs to train on and held-out ones are of different shapes")
        # All or nothing of a client.
        for array, column in self._files.items():
            column.check(rows[array], who)
        for array, column in self._files.items():
            column.append(rows[array])
        self._names.append(name)

    def _labeled(self, y: np.ndarray, who: str) -> np.ndarray:
        labels = self._facts["labels"]
        if y.ndim != 1:
            raise DataError(f"{who}: labels are of shape {y.shape}; give one an example")
        if labels is None:
            numbers = y.astype(np.float32)
            if not np.isfinite(numbers).all():
                raise DataError(f"{who}: some targets are not finite numbers")
            return numbers
        whole = np.issubdtype(y.dtype, np.integer)
        if not whole or (len(y) and not 0 <= int(y.min()) <= int(y.max()) < len(labels)):
            raise DataError(f"{who}: labels must be whole numbers, 0..{len(labels) - 1}")
        return y.astype(np.int32)

    def _finish(self) -> None:
        if not self._names:
            raise DataError(f"{self._root}: no client was added")
        named = {name is not None for name in self._names}
        if len(named) > 1:
            raise DataError(f"{self._root}: give all clients a name, or none")
        arrays = {name: column.facts() for name, column in self._files.items()}
        if self._scaling is not None:
            for name in SCALING:
                column = _Column(self._root / f"{name}.bin")
                given = np.asarray(getattr(self._scaling, name), np.float32)
                column.check(given, "scaling")
                column.append(given)
                column.close()
                arrays[name] = column.facts()
        if self._names[0] is not None:
            (self._root / NAMES).write_text(json.dumps(self._names))
        facts = {"format": FORMAT, "clients": len(self._names), **self._facts, "arrays": arrays}
        partial = self._root / f"{FACTS}.partial"
        partial.write_text(json.dumps(facts, indent=1))
        os.replace(partial, self._root / FACTS)


@final
class _Column:
    """One array's file, which grows."""

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
                f"clients before is {self.dtype} of {self.shape}"
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

    def facts(self) -> dict[str, Any]:
        shape = [self._rows, *(self.shape or ())]
        return {"dtype": self.dtype.str, "shape": shape, "sha256": self._digest.hexdigest()}


def check_free(root: Path) -> None:
    """Raise if a folder holds something already or cannot be written: before anything heavy."""
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise DataError(f"{root}: it is there already; name another folder")
    there = next(place for place in (root, *root.absolute().parents) if place.exists())
    try:
        with TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise DataError(f"{root}: cannot write there: {error.strerror}") from None


def store(federation: Federation, root: str | Path) -> None:
    """Write a federation into a folder that `stored` reads."""
    require(federation.here, "federation", "told", "the clients' rows are not here")
    scaling, named = federation.scaling, not _by_number(federation.names)
    if scaling is not None:
        scaling = Scaling(*map(np.asarray, scaling.arrays))
    with FederationWriter(
        root,
        federation.labels,
        federation.vocabulary,
        scaling,
        federation.target,
        federation.features,
    ) as writer:
        for i, name in enumerate(federation.names):
            parts = (federation.train.client(i), federation.test.client(i))
            writer.add(*parts, name if named else None)


def _by_number(names: Sequence[str]) -> bool:
    return all(name == str(i) for i, name in enumerate(names))


def stored(root: str) -> Federation:
    """A federation that `perfed data store` or `FederationWriter` wrote, read where it lies.

    Rows stay in their files, and are read as they are needed: a federation may be larger than the
    memory.

    Args:
        root: the folder.
    """
    folder = Path(root).expanduser()
    facts = _facts(folder)
    arrays = {name: _mapped(folder, name, facts) for name in facts["arrays"]}
    try:
        train, test = (_side(part, arrays) for part in ("train", "test"))
        clients = int(facts["clients"])
        names: Sequence[str] = [str(i) for i in range(clients)]
        if (folder / NAMES).exists():
            names = json.loads((folder / NAMES).read_text(encoding="utf-8"))
        scaling = Scaling(*(arrays[k] for k in SCALING)) if SCALING[0] in arrays else None
        checksums = {name: facts["arrays"][name]["sha256"] for name in _ARRAYS}
        labels, vocabulary, features = (
            None if facts[key] is None else tuple(facts[key])
            for key in ("labels", "vocabulary", "features")
        )
        target = (float(facts["target"][0]), float(facts["target"][1]))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder / FACTS} is damaged: {error}") from None
    if not len(train.size) == len(test.size) == len(names) == clients:
        raise DataError(f"{folder}: it is of {clients} clients, but its files are not")
    described = {name: (arrays[name], checksums[name]) for name in _ARRAYS}
    return Federation(
        train, test, tuple(names), labels, vocabulary, scaling, target, features,
        joined_checksum(described.values()),
    )  # fmt: skip


def _facts(folder: Path) -> dict[str, Any]:
    path = folder / FACTS
    if not folder.is_dir():
        raise DataError(f"{folder.absolute()}: there is no such folder; check the path")
    if not path.is_file():
        raise DataError(
            f"{folder}: it has no {FACTS}, so no federation was written there, or not to the end; "
            "write one by `perfed data store CONFIG --out DIR`"
        )
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = facts["format"]
        missing = [name for name in _ARRAYS if name not in facts["arrays"]]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is damaged: {error}") from None
    if known != FORMAT or missing:
        raise DataError(f"{path} is of another version than {FORMAT}; write it anew")
    return facts


def _mapped(folder: Path, name: str, facts: dict[str, Any]) -> np.ndarray:
    """One of the arrays, in its file."""
    path = folder / f"{name}.bin"
    try:
        about = facts["arrays"][name]
        dtype, shape = np.dtype(about["dtype"]), tuple(int(n) for n in about["shape"])
        if dtype.hasobject or dtype.kind not in "iuf" or min(shape) < 0:
            raise ValueError(f"{name} is {dtype} of shape {shape}")
        due = prod(shape) * dtype.itemsize
        found = path.stat().st_size
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder}: {name} cannot be read: {error}") from None
    if found != due:
        raise DataError(f"{path} has {found} bytes, but {due} were written; write it anew")
    return np.memmap(path, dtype, "r", shape=shape) if due else np.zeros(shape, dtype)


def _side(part: str, arrays: dict[str, np.ndarray]) -> FlatExamples:
    # Sizes and starts are looked at all the time; they are small.
    size = np.array(arrays[f"{part}_size"])
    x, y = arrays[f"{part}_x"], arrays[f"{part}_y"]
    if len(size) and int(size.min()) < 1:
        raise ValueError(f"a client of {size.min()} rows")
    if not len(x) == len(y) == int(size.sum(dtype=np.int64)):
        raise ValueError(f"{len(x)} inputs, {len(y)} labels and clients of {size.sum()} rows")
    return FlatExamples.joined(x, y, size)
