"""Columns of CSV and Parquet files, checked cell by cell: the first fault is named by its place.

Rows of a CSV file are numbered as a spreadsheet shows them: the header is row 1, and blank lines
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
# A whole number as one writes it. Leading zeros make it a code, such as 007, and codes are text.
_WHOLE: Final = re.compile(r"[+-]?(0|[1-9][0-9]{0,17})(\.0*)?")
_EMPTY: Final = "the cell is empty; fill it in or drop the row"
# Large enough for very wide rows, which must fit into one block.
_BLOCK: Final = 1 << 23


@final
@dataclass(frozen=True)
class Texts:
    """A column of names: the distinct ones as they are written, and which one each row holds."""

    values: tuple[str, ...]
    index: Int[np.ndarray, " rows"]

    def first(self, wanted: set[str]) -> int | None:
        """The first row that holds one of these values."""
        hit = np.array([value in wanted for value in self.values], bool)
        return _first(hit[self.index])


@final
@dataclass(frozen=True)
class Sheet:
    """What was asked of a file: columns of numbers side by side, and columns of names."""

    numbers: Float32[np.ndarray, "rows columns"]
    texts: dict[str, Texts]


@final
@dataclass(frozen=True)
class Fault:
    """What is wrong with a cell, and in which row of the data it is, counted from 0."""

    row: int
    says: str


def fault(path: Path, says: str, row: int | None = None, what: str | None = None) -> DataError:
    """The error for a file, or for one row (counted from 0) and column or array of it."""
    number = None if row is None else f"row {_shown_row(path, row)}"
    place = ", ".join(part for part in (str(path), number, what) if part is not None)
    return DataError(f"{place}: {says}")


def shown(value: object) -> str:
    """A value as messages show it: text in quotes, cut where it is long."""
    if not isinstance(value, str):
        return str(value)
    return json.dumps(value if len(value) <= 40 else value[:40] + "...", ensure_ascii=False)


def listed(values: Sequence[str]) -> str:
    """Names as messages list them; of many, the first dozen."""
    more = f" and {len(values) - 12} more" if len(values) > 12 else ""
    return ", ".join(shown(value) for value in values[:12]) + more


def named(values: set[str]) -> dict[str, str]:
    """The name each text stands for: in the order of size for whole numbers, else of the letters.

    Whole numbers and truth values are written in several ways (1 and 1.0, true and True), which
    depends on what wrote the file; each is given one name.
    """
    texts = sorted(values)  # so that ties, too, have one order
    if all(_WHOLE.fullmatch(value) for value in texts):
        whole = {value: int(value.partition(".")[0]) for value in texts}
        return {value: str(whole[value]) for value in sorted(texts, key=lambda v: whole[v])}
    if all(value.lower() in ("false", "true") for value in texts):
        return {value: value.lower() for value in sorted(texts, key=str.lower)}
    return {value: value for value in texts}


def header(path: Path) -> tuple[str, ...]:
    """The names of a file's columns."""
    if path.suffix.lower() == ".csv":
        names = _csv_header(path)
    else:
        try:
            names = tuple(pyarrow.parquet.read_schema(path).names)
        except (pa.ArrowException, OSError) as error:
            raise _parquet_fault(path, error) from None
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise fault(path, f"two columns are named {shown(twice[0])}; rename or drop one")
    return names


def require_columns(path: Path, columns: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise unless the file has all these columns."""
    for name in wanted:
        if name not in columns:
            says = f"there is no column {shown(name)}; the columns are {listed(columns)}"
            close = get_close_matches(name, columns, n=1)
            if len(columns) == 1 and path.suffix.lower() == ".csv":
                says += "; cells must be separated by commas"
            elif close:
                says += f"; did you mean {shown(close[0])}?"
            else:
                says += "; add it or name another"
            raise fault(path, says)


def read(path: Path, columns: Sequence[str], numeric: Sequence[str], text: Sequence[str]) -> Sheet:
    """Some columns of a file, without a fault in any cell; `columns` are all that it has."""
    if path.suffix.lower() == ".csv":
        table = _read_csv(path, numeric, text)
    else:
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                table = file.read(columns=[*numeric, *text])
        except (pa.ArrowException, OSError) as error:
            raise _parquet_fault(path, error) from None
    if table.num_rows == 0:
        raise fault(path, "there are no rows; add some or remove the file")
    numbers = np.empty((table.num_rows, len(numeric)), np.float32)
    texts: dict[str, Texts] = {}
    faults: list[tuple[Fault, str]] = []
    for i, name in enumerate(numeric):
        column = _numbers(table[name])
        if isinstance(column, Fault):
            faults.append((column, name))
        else:
            numbers[:, i] = column
    for name in text:
        found = texts_of(table[name])
        if isinstance(found, Fault):
            faults.append((found, name))
        else:
            texts[name] = found
    if faults:
        first, name = min(faults, key=lambda pair: (pair[0].row, columns.index(pair[1])))
        raise fault(path, first.says, first.row, f"column {shown(name)}")
    return Sheet(numbers, texts)


def texts_of(column: Any) -> Texts | Fault:
    """An Arrow column of text, whole numbers or truth values as names; spaces around them go."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    floating = pa.types.is_floating(kind)
    tests = (_is_text, pa.types.is_integer, pa.types.is_boolean, pa.types.is_decimal)
    if pa.types.is_null(kind):
        return Fault(0, _EMPTY)
    if not floating and not any(test(kind) for test in tests):
        return Fault(0, f"the cell holds a {kind}; use text or whole numbers")
    if floating:
        column = column.cast(pa.float64())
    # Only the distinct values become text, so long columns stay cheap.
    encoded = column.dictionary_encode().combine_chunks()
    distinct = [value.strip() for value in encoded.dictionary.cast(pa.string()).to_pylist()]
    if floating:  # some writers mark a missing cell so
        distinct = ["" if value == "nan" else value for value in distinct]
    index = encoded.indices.fill_null(len(distinct)).to_numpy(zero_copy_only=False)
    texts = Texts((*distinct, ""), index.astype(np.int32))
    # A quote that is never closed makes the rows after it one long name.
    broken = {value for value in distinct if "\n" in value or "\r" in value}
    wrong = texts.first({"", *broken})
    if wrong is None:
        return replace(texts, values=tuple(distinct))
    runs_on = texts.values[texts.index[wrong]] in broken
    return Fault(wrong, "the cell has several lines; close its quote" if runs_on else _EMPTY)


def narrowed(wide: np.ndarray) -> tuple[Float32[np.ndarray, " ..."], int | None, str]:
    """Numbers as float32, with the first row that has one it cannot hold, and what to say of it."""
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    good = np.isfinite(narrow)
    if good.all():
        # Times in seconds, say, or numbers of accounts: large, and all but alike.
        if len(wide) and np.abs(narrow - wide).max() > 0.05 * np.std(wide, dtype=np.float64) > 0:
            says = "the values differ by less than 32-bit floats can tell; subtract an offset"
            return narrow, 0, says
        return narrow, None, ""
    row = int(np.argmin(good.reshape(len(good), -1).all(axis=1)))
    value = wide[row][~good[row]].flat[0]
    if np.isnan(value):
        return narrow, row, "the value is NaN; put a number there or drop the row"
    if np.isinf(value):
        return narrow, row, "the value is infinite; put a finite number there or drop the row"
    return narrow, row, f"the value {value:g} is too large for a 32-bit float; rescale it"


def _numbers(column: Any) -> Float32[np.ndarray, " rows"] | Fault:
    """An Arrow column as float32."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    if pa.types.is_null(kind):
        return Fault(0, _EMPTY)
    plain = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if not plain and not pa.types.is_boolean(kind) and not pa.types.is_decimal(kind):
        return _text_fault(column)
    if column.null_count or not plain:  # NaN stands for an empty cell
        column = column.cast(pa.float64())
    narrow, row, says = narrowed(column.to_numpy())
    if row is None:
        return narrow
    return Fault(row, says if column[row].is_valid else _EMPTY)


def _text_fault(column: Any) -> Fault:
    """The first cell that is no number in a column that should hold numbers."""
    row = 0
    if _is_text(column.type):
        good = pc.match_substring_regex(column, rf"^\s*({NUMBER})\s*$").fill_null(False)
        row = _first(~good.to_numpy()) or 0
    if not column[row].is_valid:
        return Fault(row, _EMPTY)
    value = shown(column[row].as_py())
    return Fault(row, f"the cell holds {value}, not a number; use numbers or leave the column out")


def _read_csv(path: Path, numeric: Sequence[str], text: Sequence[str]) -> Any:
    """The columns as Arrow reads them; those that should be numeric and are not, as text."""
    table = _parsed(path, [*numeric, *text], text)
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null)
    wrong = [name for name in numeric if not any(test(table[name].type) for test in tests)]
    if wrong:  # dates and times too: messages show what the file says
        again = _parsed(path, wrong, wrong)
        for name in wrong:
            table = table.set_column(table.schema.get_field_index(name), name, again[name])
    return table


def _parsed(path: Path, columns: Sequence[str], text: Sequence[str]) -> Any:
    """A CSV file's columns, of which some are text whatever they look like."""
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
        raise _csv_fault(path, error) from None


def _csv_header(path: Path) -> tuple[str, ...]:
    try:
        cells = next((cells for _, cells in _records(path)), None)
    except (csv.Error, OSError) as error:
        raise fault(path, f"cannot be read as CSV ({_line(error)}); check its quotes") from None
    if cells is None:
        raise fault(path, "the file is empty; its first row must name the columns")
    if not _is_utf8(cells):
        raise _csv_fault(path, None)
    return tuple(cells)


def _parquet_fault(path: Path, error: Exception) -> DataError:
    return fault(path, f"cannot be read as Parquet ({_line(error)}); write it anew")


def _csv_fault(path: Path, error: Exception | None) -> DataError:
    """Why a CSV file could not be read: the first row that is at fault, found one by one."""
    columns = None
    try:
        for row, cells in _records(path):
            columns = columns or len(cells)
            if not _is_utf8(cells):
                return DataError(
                    f"{path}, row {row}: the text is not UTF-8; save the file as UTF-8"
                )
            if len(cells) != columns:
                says = f"{len(cells)} cells, but the header has {columns}; make them as many"
                return DataError(f"{path}, row {row}: {says}")
    except (csv.Error, OSError):
        pass  # what Arrow says is shown instead
    return fault(path, f"cannot be read as CSV ({_line(error)}); check its quotes")


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file that are not blank, with the numbers a spreadsheet gives them."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        for number, cells in enumerate(csv.reader(file), 1):
            if cells:
                yield number, cells


def _shown_row(path: Path, row: int) -> int:
    if path.suffix.lower() != ".csv":
        return row + 1
    try:
        return next(number for i, (number, _) in enumerate(_records(path)) if i == row + 1)
    except (csv.Error, StopIteration):  # quotes that the two readers take differently
        return row + 2


def _is_utf8(cells: Sequence[str]) -> bool:
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:  # a byte that was no UTF-8 was kept as half a surrogate pair
        return False
    return True


def _is_text(kind: Any) -> bool:
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in tests)


def _first(mask: np.ndarray) -> int | None:
    return int(np.argmax(mask)) if mask.any() else None


def _line(error: object) -> str:
    """The first line of an error, and not too much of it."""
    return (str(error).splitlines() or [""])[0][:120]
