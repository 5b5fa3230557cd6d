"""The rows of several files as one data set, with one numbering of their labels."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from jaxtyping import Int32, Shaped

from perfed.core.errors import DataError
from perfed.data.dataset import Dataset
from perfed.data.files.columns import (
    NUMBER,
    TextColumn,
    canonical_names,
    file_error,
    quote,
    quote_list,
)
from perfed.data.files.rows import ColumnRoles, FileRows

# What programs write for a missing label.
_MISSING: Final = frozenset({"na", "nan", "null", "none", "n/a"})

_NUMBER: Final = re.compile(rf"{NUMBER}|[+-]?(nan|inf|infinity)", re.IGNORECASE)
_INTEGER: Final = re.compile(r"[+-]?[0-9]+(\.0*)?")


def require_same_form(clients: Sequence[Sequence[FileRows]]) -> None:
    """Raise unless inputs have one shape, and all files mark held-out rows, or none does."""
    first = clients[0][0]
    for rows in (rows for client in clients for rows in client):
        if rows.x.shape[1:] != first.x.shape[1:]:
            shape, other = rows.x.shape[1:], first.x.shape[1:]
            message = f"inputs have shape {shape}, but {other} in {first.path.name}"
            raise file_error(rows.path, f"{message}; they must be equal")
        if (rows.test is None) != (first.test is None):
            marked, unmarked = (rows, first) if first.test is None else (first, rows)
            message = f"held-out rows are marked in {marked.path.name}, but not here"
            raise file_error(unmarked.path, f"{message}; mark them in every file or in none")


def join_files(
    rows: Sequence[FileRows],
    roles: ColumnRoles,
    client: Int32[np.ndarray, " examples"] | None,
    names: tuple[str, ...] | None,
) -> Dataset:
    """The rows of all files, one file after another."""
    y, labels = _number_labels(rows, roles.labels)
    x = np.concatenate([part.x for part in rows])
    tests = [part.test for part in rows if part.test is not None]
    test = np.concatenate(tests) if tests else None
    return Dataset(
        x=x,
        y=y,
        labels=labels,
        test=test,
        client=client,
        names=names,
        test_from=None if test is None else "test-set",
        features=roles.features,
    )


def _number_labels(
    rows: Sequence[FileRows], given: tuple[str, ...] | None
) -> tuple[Shaped[np.ndarray, " examples"], tuple[str, ...] | None]:
    """All labels as numbers, and their names; targets of a regression as they are."""
    columns = [part.y for part in rows if isinstance(part.y, TextColumn)]
    if not columns:
        return np.concatenate([part.y for part in rows if not isinstance(part.y, TextColumn)]), None
    values = set().union(*(column.values for column in columns))
    if all(_NUMBER.fullmatch(value) for value in values):
        fractions = {value for value in values if not _INTEGER.fullmatch(value)}
        remedy = 'use whole numbers or text, or set task = "regression"'
        _require_no_labels(rows, fractions, f"is not a whole number; {remedy}")
    if given is None:
        missing = {value for value in values if value.lower() in _MISSING}
        remedy = "fill it in, drop the row, or list it in labels if it is a class"
        _require_no_labels(rows, missing, f"means a missing label; {remedy}")
    # Given labels are included, so that 1 and 1.0 are the same there too.
    canonical = canonical_names(values | set(given or ()))
    classes = tuple(dict.fromkeys(canonical[value] for value in given or canonical))
    unknown = values - {value for value in canonical if canonical[value] in frozenset(classes)}
    message = f"is not in labels = {quote_list(given or ())}; add it or correct it"
    _require_no_labels(rows, unknown, message)
    if len(classes) < 2:
        message = f"all labels are {quote(classes[0])}, but two classes are needed; check"
        raise DataError(f'{rows[0].path}: {message} {rows[0].target}, or set task = "regression"')
    y = np.concatenate([number_names(column, canonical, classes) for column in columns])
    return y, given or classes


def _require_no_labels(rows: Sequence[FileRows], wrong: set[str], message: str) -> None:
    """Raise if a label is one of these, for the first row that has it."""
    for part in rows if wrong else ():
        if isinstance(part.y, TextColumn):
            row = part.y.find(wrong)
            if row is not None:
                label = quote(part.y.values[part.y.index[row]])
                raise file_error(part.path, f"the label {label} {message}", row, part.target)


def number_names(
    column: TextColumn, canonical: Mapping[str, str], names: Sequence[str]
) -> Int32[np.ndarray, " rows"]:
    """The number of each row's name."""
    number = {name: i for i, name in enumerate(names)}
    numbers: np.ndarray = np.array([number[canonical[value]] for value in column.values], np.int32)
    return np.take(numbers, column.index)
