"""Columns of CSV and Parquet files, checked cell by cell: errors name the first bad cell.

Rows of a CSV file have the numbers that a spreadsheet shows: the header is row 1, and blank lines
count, although they are skipped. Rows of other files are numbered from 1.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from jaxtyping import Float32, Int

from perfed.core.errors import DataError

NUMBER: Final = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
# A whole number. With leading zeros, such as 007, it is a code, and codes are text.
_WHOLE: Final = re.compile(r"[+-]?(0|[1-9][0-9]{0,17})(\.0*)?")
_EMPTY: Final = "the cell is empty; fill it in or drop the row"
# A row must fit into a block, and rows may be very wide.
_BLOCK: Final = 1 << 23


@final
@dataclass(frozen=True)
class TextColumn:
    """A column of text: its distinct values, as written, and the index of each row's value."""

    values: tuple[str, ...]
    index: Int[np.ndarray, " rows"]

    def find(self, values: set[str]) -> int | None:
        """The first row that has one of these values."""
        matches = np.array([value in values for value in self.values], bool)
        return _first(matches[self.index])


@final
@dataclass(frozen=True)
class Sheet:
    """Columns of a file: those of numbers as one array, and those of text by name."""

    numbers: Float32[np.ndarray, "rows columns"]
    texts: dict[str, TextColumn]


@final
@dataclass(frozen=True)
class CellError:
    """What is wrong with a cell, and its row of the data, counted from 0."""

    row: int
    message: str


def file_error(
    path: Path, message: str, row: int | None = None, place: str | None = None
) -> DataError:
    """The error for a file, or for a row (counted from 0) and a column or array of it."""
    number = None if row is None else f"row {_row_number(path, row)}"
    where = ", ".join(part for part in (str(path), number, place) if part is not None)
    return DataError(f"{where}: {message}")


def quote(value: object) -> str:
    """A value for a message: text in quotes, shortened if it is long."""
    if not isinstance(value, str):
        return str(value)
    return json.dumps(value if len(value) <= 40 else value[:40] + "...", ensure_ascii=False)


def quote_list(values: Sequence[str]) -> str:
    """Names for a message; of many, the first dozen."""
    more = f" and {len(values) - 12} more" if len(values) > 12 else ""
    return ", ".join(quote(value) for value in values[:12]) + more


def canonical_names(values: set[str]) -> dict[str, str]:
    """One name for each text: sorted by size if all are whole numbers, else alphabetically.

    Programs write whole numbers and Booleans in several ways (1 and 1.0, true and True); these get
    the same name.
    """
    texts = sorted(values)  # a fixed order for ties
    if all(_WHOLE.fullmatch(value) for value in texts):
        whole = {value: int(value.partition(".")[0]) for value in texts}
        return {value: str(whole[value]) for value in sorted(texts, key=lambda v: whole[v])}
    if all(value.lower() in ("false", "true") for value in texts):
        return {value: value.lower() for value in sorted(texts, key=str.lower)}
    return {value: value for value in texts}


def read_header(path: Path) -> tuple[str, ...]:
    """The names of a file's columns."""
    if path.suffix.lower() == ".csv":
        names = _csv_header(path)
    else:
        try:
            names = tuple(pyarrow.parquet.read_schema(path).names)
        except (pa.ArrowException, OSError) as error:
            raise _parquet_error(path, error) from None
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise file_error(path, f"two columns are named {quote(repeated[0])}; rename or drop one")
    return names


def require_columns(path: Path, columns: Sequence[str], names: Sequence[str]) -> None:
    """Raise unless the file has all these columns."""
    for name in names:
        if name not in columns:
            message = f"no column {quote(name)}; the columns are {quote_list(columns)}"
            close = get_close_matches(name, columns, n=1)
            if len(columns) == 1 and path.suffix.lower() == ".csv":
                message += "; cells must be separated by commas"
            elif close:
                message += f"; did you mean {quote(close[0])}?"
            else:
                message += "; add it or use another"
            raise file_error(path, message)


def read_columns(
    path: Path, columns: Sequence[str], numeric: Sequence[str], text: Sequence[str]
) -> Sheet:
    """Some columns of a file, every cell of them checked; `columns` are all that it has."""
    if path.suffix.lower() == ".csv":
        table = _read_csv(path, numeric, text)
    else:
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                table = file.read(columns=[*numeric, *text])
        except (pa.ArrowException, OSError) as error:
            raise _parquet_error(path, error) from None
    if table.num_rows == 0:
        raise file_error(path, "no rows; add some or remove the file")
    numbers = np.empty((table.num_rows, len(numeric)), np.float32)
    texts: dict[str, TextColumn] = {}
    errors: list[tuple[CellError, str]] = []
    for i, name in enumerate(numeric):
        column = _numbers(table[name])
        if isinstance(column, CellError):
            errors.append((column, name))
        else:
            numbers[:, i] = column
    for name in text:
        values = to_text(table[name])
        if isinstance(values, CellError):
            errors.append((values, name))
        else:
            texts[name] = values
    if errors:
        first, name = min(errors, key=lambda pair: (pair[0].row, columns.index(pair[1])))
        raise file_error(path, first.message, first.row, f"column {quote(name)}")
    return Sheet(numbers, texts)


def to_text(column: Any) -> TextColumn | CellError:
    """An Arrow column of text, whole numbers or Booleans as text, stripped of spaces."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    floating = pa.types.is_floating(kind)
    tests = (_is_text, pa.types.is_integer, pa.types.is_boolean, pa.types.is_decimal)
    if pa.types.is_null(kind):
        return CellError(0, _EMPTY)
    if not floating and not any(test(kind) for test in tests):
        return CellError(0, f"the cell has type {kind}; use text or whole numbers")
    if floating:
        column = column.cast(pa.float64())
    # Only distinct values are converted to text, for speed.
    encoded = column.dictionary_encode().combine_chunks()
    distinct = [value.strip() for value in encoded.dictionary.cast(pa.string()).to_pylist()]
    if floating:  # some programs write missing cells so
        distinct = ["" if value == "nan" else value for value in distinct]
    index = encoded.indices.fill_null(len(distinct)).to_numpy(zero_copy_only=False)
    texts = TextColumn((*distinct, ""), index.astype(np.int32))
    # A quote that is not closed makes one text of all rows after it.
    broken = {value for value in distinct if "\n" in value or "\r" in value}
    wrong = texts.find({"", *broken})
    if wrong is None:
        return replace(texts, values=tuple(distinct))
    several = texts.values[texts.index[wrong]] in broken
    return CellError(wrong, "the cell has several lines; close its quote" if several else _EMPTY)


def to_float32(wide: np.ndarray) -> tuple[Float32[np.ndarray, " ..."], int | None, str]:
    """Numbers as float32, the first row with one that does not fit, and what is wrong with it."""
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    good = np.isfinite(narrow)
    if good.all():
        # Times in seconds, for example, are large and differ little.
        if len(wide) and np.abs(narrow - wide).max() > 0.05 * np.std(wide, dtype=np.float64) > 0:
            message = "the values differ too little for 32-bit floats; subtract an offset"
            return narrow, 0, message
        return narrow, None, ""
    row = int(np.argmin(good.reshape(len(good), -1).all(axis=1)))
    value = wide[row][~good[row]].flat[0]
    if np.isnan(value):
        return narrow, row, "the value is NaN; put a number there or drop the row"
    if np.isinf(value):
        return narrow, row, "the value is infinite; put a finite number there or drop the row"
    return narrow, row, f"the value {value:g} is too large for a 32-bit float; rescale it"


def _numbers(column: Any) -> Float32[np.ndarray, " rows"] | CellError:
    """An Arrow column as float32."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    if pa.types.is_null(kind):
        return CellError(0, _EMPTY)
    plain = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if not plain and not pa.types.is_boolean(kind) and not pa.types.is_decimal(kind):
        return _text_error(column)
    if column.null_count or not plain:  # NaN stands for an empty cell
        column = column.cast(pa.float64())
    narrow, row, message = to_float32(column.to_numpy())
    if row is None:
        return narrow
    return CellError(row, message if column[row].is_valid else _EMPTY)


def _text_error(column: Any) -> CellError:
    """The first cell that is not a number in a column of numbers."""
    row = 0
    if _is_text(column.type):
        good = pc.match_substring_regex(column, rf"^\s*({NUMBER})\s*$").fill_null(False)
        row = _first(~good.to_numpy()) or 0
    if not column[row].is_valid:
        return CellError(row, _EMPTY)
    value = quote(column[row].as_py())
    return CellError(
        row, f"the cell has {value}, not a number; use numbers or leave the column out"
    )


def _read_csv(path: Path, numeric: Sequence[str], text: Sequence[str]) -> Any:
    """The columns as Arrow reads them; those that should be numbers and are not, as text."""
    table = _parse(path, [*numeric, *text], text)
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null)
    wrong = [name for name in numeric if not any(test(table[name].type) for test in tests)]
    if wrong:  # as text, so that messages show dates and times as in the file
        again = _parse(path, wrong, wrong)
        for name in wrong:
            table = table.set_column(table.schema.get_field_index(name), name, again[name])
    return table


def _parse(path: Path, columns: Sequence[str], text: Sequence[str]) -> Any:
    """A CSV file's columns, some of them always as text."""
    try:
        return pyarrow.csv.read_csv(
            path,
            pyarrow.csv.ReadOptions(block_size=_BLOCK),
            pyarrow.csv.ParseOptions(newlines_in_values=True),
            pyarrow.csv.ConvertOptions(
                include_columns=columns,
                column_types={name: pa.string() for name in text},
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _csv_error(path, error) from None


def _csv_header(path: Path) -> tuple[str, ...]:
    try:
        cells = next((cells for _, cells in _records(path)), None)
    except (csv.Error, OSError) as error:
        raise file_error(
            path, f"cannot be read as CSV ({_line(error)}); check its quotes"
        ) from None
    if cells is None:
        raise file_error(path, "the file is empty; its first row must name the columns")
    if not _is_utf8(cells):
        raise _csv_error(path, None)
    return tuple(cells)


def _parquet_error(path: Path, error: Exception) -> DataError:
    return file_error(path, f"cannot be read as Parquet ({_line(error)}); write it again")


def _csv_error(path: Path, error: Exception | None) -> DataError:
    """Why a CSV file cannot be read: the first bad row."""
    columns = None
    try:
        for row, cells in _records(path):
            columns = columns or len(cells)
            if not _is_utf8(cells):
                return DataError(
                    f"{path}, row {row}: the text is not UTF-8; save the file as UTF-8"
                )
            if len(cells) != columns:
                message = f"{len(cells)} cells, but the header has {columns}; correct the row"
                return DataError(f"{path}, row {row}: {message}")
    except (csv.Error, OSError):
        pass  # Arrow's own message is used
    return file_error(path, f"cannot be read as CSV ({_line(error)}); check its quotes")


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file that are not blank, with the numbers a spreadsheet shows."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        for number, cells in enumerate(csv.reader(file), 1):
            if cells:
                yield number, cells


def _row_number(path: Path, row: int) -> int:
    if path.suffix.lower() != ".csv":
        return row + 1
    try:
        return next(number for i, (number, _) in enumerate(_records(path)) if i == row + 1)
    except (csv.Error, StopIteration):  # the two readers differ about quotes
        return row + 2


def _is_utf8(cells: Sequence[str]) -> bool:
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:  # bytes that are not UTF-8 were read as surrogates
        return False
    return True


def _is_text(kind: Any) -> bool:
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in tests)


def _first(mask: np.ndarray) -> int | None:
    return int(np.argmax(mask)) if mask.any() else None


def _line(error: object) -> str:
    """The first line of an error, shortened."""
    return (str(error).splitlines() or [""])[0][:120]
