"""The rows of one file, and the roles of its columns."""

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, final, get_args

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float32, Shaped

from perfed.core.errors import require, require_choice
from perfed.data.files.columns import (
    TextColumn,
    canonical_names,
    file_error,
    quote,
    quote_list,
    read_columns,
    require_columns,
    to_float32,
    to_text,
)

Task = Literal["classification", "regression"]

TABLES: Final = (".csv", ".parquet")

# The name that pandas writes for its index, which must not become a feature.
_INDEX_NAMES: Final = ("", "__index_level_0__")


@final
@dataclass(frozen=True)
class ColumnRoles:
    """Which columns are inputs, label, part and client."""

    label: str
    features: tuple[str, ...] | None
    task: Task
    labels: tuple[str, ...] | None
    part: str | None
    client: str | None = None

    def __post_init__(self) -> None:
        require_choice("task", self.task, get_args(Task))
        others = self.others
        distinct = len(set(others)) == len(others)
        require(distinct, "label, part, client", others, "must be different columns")
        if self.features is not None:
            chosen = self.features
            require(len(chosen) > 0, "features", chosen, "must have at least one column")
            require(len(set(chosen)) == len(chosen), "features", chosen, "must be all different")
            for name in others:
                allowed = f'must not have "{name}", the label, part or client; leave it out'
                require(name not in chosen, "features", chosen, allowed)
        if self.labels is not None:
            given = self.labels
            has_classes = self.task == "classification"
            require(has_classes, "labels", given, 'must be left out where task = "regression"')
            distinct = len(set(canonical_names(set(given)).values())) == len(given)
            require(
                distinct and len(given) >= 2, "labels", given, "must be two or more, all different"
            )

    @property
    def others(self) -> tuple[str, ...]:
        """The columns that are not features."""
        return tuple(c for c in (self.label, self.part, self.client) if c is not None)


@final
@dataclass(frozen=True)
class FileRows:
    """Rows of one file.

    Attributes:
        path: the file.
        target: the column or array of the labels, for messages.
        x: the inputs.
        y: the labels as written, or the targets of a regression.
        test: which rows are held out; None: they are not marked.
    """

    path: Path
    target: str
    x: Shaped[np.ndarray, "rows ..."]
    y: TextColumn | Float32[np.ndarray, " rows"]
    test: Bool[np.ndarray, " rows"] | None


def feature_columns(path: Path, names: Sequence[str], roles: ColumnRoles) -> tuple[str, ...]:
    """All columns that have no other role."""
    require_columns(path, names, roles.others)
    chosen = tuple(name for name in names if name not in roles.others)
    if not chosen:
        raise file_error(path, f"no features; the columns are {quote_list(names)}")
    for name in _INDEX_NAMES:
        if name in chosen:
            message = f"column {names.index(name) + 1} has no name; name it or drop it"
            raise file_error(path, f"{message} (in pandas, index=False drops it)")
    return chosen


def require_no_more(path: Path, names: Sequence[str], roles: ColumnRoles, first: Path) -> None:
    """Raise if the file has columns that the first file does not have."""
    extra = [name for name in names if name not in (*roles.others, *(roles.features or ()))]
    if extra:
        message = f"column {quote(extra[0])} is not in {first.name}"
        raise file_error(path, f"{message}; drop it, or list the columns to use in features")


def read_table(
    path: Path, names: Sequence[str], roles: ColumnRoles
) -> tuple[FileRows, TextColumn | None]:
    """The rows of a CSV or Parquet file, and the names of their clients."""
    chosen = roles.features or ()
    require_columns(path, names, (*roles.others, *chosen))
    regression = roles.task == "regression"
    numeric = (*chosen, roles.label) if regression else chosen
    text = [name for name in roles.others if name not in numeric]
    sheet = read_columns(path, names, numeric, text)
    x, test = sheet.numbers[:, : len(chosen)], None
    if roles.part is not None:
        parts = sheet.texts[roles.part]
        wrong = set(parts.values) - {"train", "test"}
        if wrong:
            row = parts.find(wrong) or 0
            message = f'the cell has {quote(parts.values[parts.index[row]])}; use "train" or "test"'
            raise file_error(path, message, row, f"column {quote(roles.part)}")
        test = np.array([value == "test" for value in parts.values])[parts.index]
    y = sheet.numbers[:, -1] if regression else sheet.texts[roles.label]
    owner = None if roles.client is None else sheet.texts[roles.client]
    return FileRows(path, f"column {quote(roles.label)}", x, y, test), owner


def read_npz_client(path: Path, task: Task) -> list[FileRows]:
    """The rows of an .npz file: those to train on, then those held out."""
    arrays = _read_arrays(path)
    held_out = not {"x_test", "y_test"}.isdisjoint(arrays)
    needed = ("x", "y", "x_test", "y_test") if held_out else ("x", "y")
    for name in needed:
        if name not in arrays:
            present = quote_list(list(arrays)) or "none"
            raise file_error(path, f'no array "{name}"; the arrays are {present}; add it')
    for name in arrays:
        if name not in needed:
            message = f"unknown array {quote(name)}; keep only x, y, x_test and y_test"
            raise file_error(path, message)
    train = _check_arrays(path, arrays, "x", "y", task)
    if not held_out:
        return [train]
    test = _check_arrays(path, arrays, "x_test", "y_test", task)
    return [
        replace(train, test=np.zeros(len(train.x), bool)),
        replace(test, test=np.ones(len(test.x), bool)),
    ]


def read_npz_inputs(path: Path) -> FileRows:
    """The inputs of an .npz file without labels: array `x`, or else the first one."""
    arrays = _read_arrays(path)
    if not arrays:
        raise file_error(path, "the archive has no arrays; add x")
    x = arrays.get("x", next(iter(arrays.values())))
    unlabeled = {"x": x, "y": np.zeros(len(x) if x.ndim else 0)}
    return _check_arrays(path, unlabeled, "x", "y", "regression")


def _read_arrays(path: Path) -> Mapping[str, np.ndarray]:
    if not zipfile.is_zipfile(path):
        raise file_error(path, "is not an .npz file; write it with numpy.savez")
    name = ""
    arrays = {}
    try:
        # Pickled objects could run code, so they are never loaded.
        with np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                arrays[name] = np.asarray(archive[name])
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if "allow_pickle" in str(error):
            message = "it has Python objects; store plain numbers or text"
            raise file_error(path, message, place=f"array {quote(name)}") from None
        raise file_error(path, f"cannot be read as .npz ({error}); write it again") from None
    return arrays


def _check_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], inputs: str, target: str, task: Task
) -> FileRows:
    """Inputs and labels of an .npz file, checked."""
    x, y = arrays[inputs], arrays[target]
    from_x, from_y = f'array "{inputs}"', f'array "{target}"'
    if x.ndim < 2 or 0 in x.shape[1:]:
        message = f"its shape is {x.shape}; use (rows, features) or (rows, height, width, depth)"
        raise file_error(path, message, place=from_x)
    if y.ndim != 1:
        message = f"its shape is {y.shape}; use one label per row, shape ({len(x)},)"
        raise file_error(path, message, place=from_y)
    if len(x) != len(y):
        message = (
            f"{inputs} has {len(x)} rows, but {target} has {len(y)}; they must have the same number"
        )
        raise file_error(path, message)
    if len(x) == 0:
        raise file_error(path, "no rows; add some or remove the file", place=from_x)
    x = x if x.dtype == np.uint8 else _to_float32(path, x, inputs)
    if task == "regression":
        return FileRows(path, from_y, x, _to_float32(path, y, target), None)
    if y.dtype.kind not in "biufU":
        raise file_error(path, f"its type is {y.dtype}; store whole numbers or text", place=from_y)
    # Arrow supports neither foreign byte orders nor floats of more than 64 bits.
    y = y.astype(np.float64 if y.dtype.kind == "f" else y.dtype.newbyteorder("="))
    texts = to_text(pa.chunked_array([pa.array(y)]))
    if not isinstance(texts, TextColumn):
        raise file_error(path, texts.message, texts.row, from_y)
    return FileRows(path, from_y, x, texts, None)


def _to_float32(path: Path, values: np.ndarray, name: str) -> Float32[np.ndarray, "rows ..."]:
    """An array as float32."""
    if values.dtype.kind not in "biuf":
        message = f"its type is {values.dtype}; store numbers"
        raise file_error(path, message, place=f'array "{name}"')
    narrow, row, message = to_float32(values)
    if row is not None:
        raise file_error(path, message, row, f'array "{name}"')
    return narrow
