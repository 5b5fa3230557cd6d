"""Users' own clients: every format gives the same data, and every fault is named by its place."""

import csv
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfed.core.errors import DataError, FieldError
from perfed.data.dataset import Dataset
from perfed.data.files import folder, table

Columns = Mapping[str, Sequence[Any]]

# Three clients of different sizes: their names, two features and labels.
CLIENTS: dict[str, dict[str, Sequence[Any]]] = {
    "ward1": {"age": [31, 64, 7], "dose": [0.5, 1.25, -3.0], "label": ["ill", "well", "ill"]},
    "ward2": {"age": [80, 12], "dose": [2.0, 1e-3], "label": ["well", "well"]},
    "ward3": {"age": [55], "dose": [0.1], "label": ["ill"]},
}


def write(path: Path, columns: Columns) -> Path:
    """Columns as CSV or Parquet; the CSV as anyone's program writes it, without Arrow."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.table(dict(columns)), path)
        return path
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def text(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def save(path: Path, **arrays: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, allow_pickle=True, **arrays)
    return path


def stacked(columns: Columns) -> np.ndarray:
    return np.column_stack([columns["age"], columns["dose"]])


def assert_same(one: Dataset, other: Dataset) -> None:
    for name in ("x", "y", "client", "test"):
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None), name
        if a is not None:
            np.testing.assert_array_equal(a, b, err_msg=name)
            assert a.dtype == b.dtype, name
    assert (one.names, one.labels) == (other.names, other.labels)


# The same clients in every form


def test_the_values_are_those_written(tmp_path: Path) -> None:
    for name, columns in CLIENTS.items():
        write(tmp_path / f"{name}.csv", columns)
    pool = folder(str(tmp_path))
    assert pool.x.dtype == np.float32
    np.testing.assert_array_equal(
        pool.x,
        np.array([[31, 0.5], [64, 1.25], [7, -3], [80, 2], [12, 1e-3], [55, 0.1]], np.float32),
    )
    np.testing.assert_array_equal(pool.y, [0, 1, 0, 1, 1, 0])
    assert pool.client is not None
    np.testing.assert_array_equal(pool.client, [0, 0, 0, 1, 1, 2])
    assert pool.y.dtype == pool.client.dtype == np.int32
    assert pool.names == ("ward1", "ward2", "ward3")
    assert pool.labels == ("ill", "well")
    assert pool.test is None


@pytest.mark.parametrize(
    "labels",
    [
        {"ill": "ill", "well": "well"},
        {"ill": 7, "well": 10},
        {"ill": -1, "well": 1},
        {"ill": False, "well": True},
        {"ill": 3.0, "well": 12.0},
        {"ill": "01", "well": "1"},
    ],
    ids=lambda labels: str(next(iter(labels.values()))),
)
def test_every_format_gives_the_same_pool(tmp_path: Path, labels: dict[str, Any]) -> None:
    clients = {
        name: columns | {"label": [labels[label] for label in columns["label"]]}
        for name, columns in CLIENTS.items()
    }
    whole: dict[str, list[Any]] = {"age": [], "dose": [], "label": [], "ward": []}
    for name, columns in clients.items():
        write(tmp_path / "csv" / f"{name}.csv", columns)
        write(tmp_path / "parquet" / f"{name}.parquet", columns)
        save(tmp_path / "npz" / f"{name}.npz", x=stacked(columns), y=columns["label"])
        for column in ("age", "dose", "label"):
            whole[column] += columns[column]
        whole["ward"] += [name] * len(columns["age"])
    write(tmp_path / "mixed" / "ward1.csv", clients["ward1"])
    write(tmp_path / "mixed" / "ward2.parquet", clients["ward2"])
    save(tmp_path / "mixed" / "ward3.npz", x=stacked(clients["ward3"]), y=clients["ward3"]["label"])
    expected = folder(str(tmp_path / "csv"))
    assert expected.labels is not None
    assert len(expected.labels) == 2
    for form in ("parquet", "npz", "mixed"):
        assert_same(expected, folder(str(tmp_path / form)))
    for ending in ("csv", "parquet"):
        path = write(tmp_path / f"all.{ending}", whole)
        assert_same(expected, table(str(path), client="ward"))


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_table_without_clients(tmp_path: Path, ending: str) -> None:
    pool = table(str(write(tmp_path / f"t.{ending}", CLIENTS["ward1"])))
    assert pool.client is None
    assert pool.names is None
    np.testing.assert_array_equal(pool.y, [0, 1, 0])


def test_columns_may_come_in_any_order(tmp_path: Path) -> None:
    write(tmp_path / "a" / "1.csv", {"label": [0, 1], "u": [1, 2], "v": [3, 4]})
    write(tmp_path / "a" / "2.csv", {"v": [7, 8], "label": [1, 0], "u": [5, 6]})
    np.testing.assert_array_equal(folder(str(tmp_path / "a")).x, [[1, 3], [2, 4], [5, 7], [6, 8]])


def test_features_are_those_named_and_other_columns_may_hold_anything(tmp_path: Path) -> None:
    write(
        tmp_path / "1.csv", {"u": [1, 2], "note": ['a "quoted"\nnote, long', ""], "label": [0, 1]}
    )
    write(tmp_path / "2.csv", {"label": [1], "w": ["?"], "u": [3]})
    np.testing.assert_array_equal(folder(str(tmp_path), features=("u",)).x, [[1], [2], [3]])


def test_the_same_column_may_be_whole_in_one_file_and_not_in_another(tmp_path: Path) -> None:
    text(tmp_path / "a.csv", "u,label\n1,0\n2,1\n")
    text(tmp_path / "b.csv", "u,label\n 1.5 ,0\n1e2,1\n")
    text(tmp_path / "c.csv", "u,label\ntrue,0\nfalse,1\n")
    np.testing.assert_array_equal(folder(str(tmp_path)).x[:, 0], [1, 2, 1.5, 100, 1, 0])


def test_quotes_unicode_blank_lines_and_line_endings(tmp_path: Path) -> None:
    rows = [
        '\ufeff"größe, cm",label,Klinik',
        '1,"ja, sehr","Zürich, ""Süd"""',
        "",
        "2,nein,Łódź",
        "3,nein,łódź",
        "",
    ]
    content = "\r\n".join(rows)
    pool = table(str(text(tmp_path / "t.csv", content)), client="Klinik")
    assert pool.names == ('Zürich, "Süd"', "Łódź", "łódź")
    assert pool.labels == ("ja, sehr", "nein")
    np.testing.assert_array_equal(pool.x, [[1], [2], [3]])


# Clients


def test_names_with_leading_zeros_stay_text(tmp_path: Path) -> None:
    columns: Columns = {"u": [1, 2, 3], "label": [0, 1, 0], "id": ["10", "007", "7"]}
    for ending in ("csv", "parquet"):
        pool = table(str(write(tmp_path / f"t.{ending}", columns)), client="id")
        assert pool.names == ("007", "10", "7")
        assert pool.client is not None
        np.testing.assert_array_equal(pool.client, [1, 0, 2])


@pytest.mark.parametrize("names", [["10", "9", "100"], [10, 9, 100], [10.0, 9.0, 100.0]])
def test_whole_numbers_are_sorted_by_size(tmp_path: Path, names: list[Any]) -> None:
    for ending in ("csv", "parquet"):
        path = write(tmp_path / f"t.{ending}", {"u": [1, 2, 3], "label": [0, 1, 0], "id": names})
        pool = table(str(path), client="id")
        assert pool.names == ("9", "10", "100")
        assert pool.client is not None
        np.testing.assert_array_equal(pool.client, [1, 0, 2])
    for name in ("10", "9", "100"):
        write(tmp_path / "folder" / f"{name}.csv", {"u": [1, 2], "label": [0, 1]})
    assert folder(str(tmp_path / "folder")).names == ("9", "10", "100")


def test_hidden_files_are_skipped_and_endings_may_be_capitals(tmp_path: Path) -> None:
    write(tmp_path / "A.CSV", {"u": [1, 2], "label": [0, 1]})
    write(tmp_path / "b.csv", {"u": [3, 4], "label": [0, 1]})
    text(tmp_path / ".DS_Store", "x")
    assert folder(str(tmp_path)).names == ("A", "b")


# Labels


def test_whole_numbers_with_gaps_are_numbered_by_size(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", {"u": [1, 2, 3], "label": [10, -2, 9]})
    write(tmp_path / "b.parquet", {"u": [1.0], "label": [100.0]})
    pool = folder(str(tmp_path))
    assert pool.labels == ("-2", "9", "10", "100")
    np.testing.assert_array_equal(pool.y, [2, 0, 1, 3])


def test_truth_values_are_one_however_written(tmp_path: Path) -> None:
    text(tmp_path / "a.csv", "u,label\n1,True\n2, FALSE\n")
    write(tmp_path / "b.parquet", {"u": [1.0], "label": [True]})
    save(tmp_path / "c.npz", x=[[1.0]], y=[False])
    pool = folder(str(tmp_path))
    assert pool.labels == ("false", "true")
    np.testing.assert_array_equal(pool.y, [1, 0, 1, 0])
    named = folder(str(tmp_path), labels=("True", "False"))
    assert named.labels == ("True", "False")
    np.testing.assert_array_equal(named.y, [0, 1, 0, 1])


def test_given_labels_set_the_order_and_may_not_all_occur(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", {"u": [1, 2], "label": ["low", "high"]})
    pool = table(str(path), labels=("low", "middle", "high"))
    assert pool.labels == ("low", "middle", "high")
    np.testing.assert_array_equal(pool.y, [0, 2])


def test_categories_that_do_not_occur_are_no_classes(tmp_path: Path) -> None:
    label = pa.DictionaryArray.from_arrays(pa.array([2, 0, 2]), pa.array(["b", "unused", "a"]))
    write(tmp_path / "t.parquet", {"u": [1, 2, 3], "label": label})
    pool = table(str(tmp_path / "t.parquet"))
    assert pool.labels == ("a", "b")
    np.testing.assert_array_equal(pool.y, [0, 1, 0])


@pytest.mark.parametrize("ending", ["csv", "parquet", "npz"])
def test_regression(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    if ending == "npz":
        save(path, x=[[1], [2]], y=[1.5, -2])
    else:
        write(path, {"target": [1.5, -2.0], "u": [1, 2]})
    pool = folder(str(tmp_path), label="target", task="regression")
    assert pool.labels is None
    assert pool.y.dtype == np.float32
    np.testing.assert_array_equal(pool.y, np.array([1.5, -2]))
    np.testing.assert_array_equal(pool.x, np.array([[1], [2]]))


# Rows held out


def test_rows_held_out_in_every_format(tmp_path: Path) -> None:
    columns: Columns = {"u": [1, 2, 3], "label": [0, 1, 1], "set": ["train", "train", "test"]}
    write(tmp_path / "csv" / "a.csv", columns)
    write(tmp_path / "parquet" / "a.parquet", columns)
    save(tmp_path / "npz" / "a.npz", x=[[1], [2]], y=[0, 1], x_test=[[3]], y_test=[1])
    pools = [folder(str(tmp_path / form), part="set") for form in ("csv", "parquet")]
    pools.append(folder(str(tmp_path / "npz")))
    with pytest.raises(FieldError, match="part = 'set': is for files with columns"):
        folder(str(tmp_path / "npz"), part="set")
    for pool in pools:
        assert pool.test is not None
        np.testing.assert_array_equal(pool.test, [False, False, True])
        assert_same(pools[0], pool)
    path = write(tmp_path / "t.csv", {**columns, "site": ["a"] * 3})
    assert_same(pools[0], table(str(path), client="site", part="set"))


# Arrays


def test_arrays_keep_their_shape_and_bytes_stay_bytes(tmp_path: Path) -> None:
    images = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    save(tmp_path / "a.npz", x=images, y=[0, 1])
    save(tmp_path / "b.npz", x=images[:1], y=[1])
    pool = folder(str(tmp_path))
    assert pool.x.dtype == np.uint8
    np.testing.assert_array_equal(pool.x, np.concatenate([images, images[:1]]))
    save(tmp_path / "c.npz", x=images.astype(">f8"), y=np.array([0, 1], ">i4"))
    pool = folder(str(tmp_path))
    assert pool.x.dtype == np.float32
    assert pool.x.shape == (5, 3, 4)


# Faults

GOOD = "u,v,label\n1,2,0\n3,4,1\n"


def a_csv(content: str | bytes) -> Callable[[Path], object]:
    return lambda root: text(root / "a.csv", content)


def a_parquet(**columns: Any) -> Callable[[Path], object]:
    return lambda root: write(root / "a.parquet", columns)


def an_npz(**arrays: Any) -> Callable[[Path], object]:
    return lambda root: save(root / "a.npz", **arrays)


def beside(name: str, content: str | bytes) -> Callable[[Path], object]:
    """A good client and one more file."""
    return lambda root: (text(root / "a.csv", GOOD), text(root / name, content))


def cut_short(root: Path) -> None:
    path = save(root / "a.npz", x=np.random.default_rng(0).normal(size=(50, 9)), y=[0, 1] * 25)
    content = bytearray(path.read_bytes())
    content[200:400] = bytes(200)
    path.write_bytes(content)


def two_shapes(root: Path) -> None:
    save(root / "a.npz", x=np.zeros((2, 3)), y=[0, 1])
    save(root / "b.npz", x=np.zeros((2, 4)), y=[0, 1])


def held_out_in_one(root: Path) -> None:
    save(root / "a.npz", x=[[1]], y=[0], x_test=[[1]], y_test=[1])
    save(root / "b.npz", x=[[1]], y=[0])


def number(value: float) -> Callable[[Path], object]:
    return a_parquet(u=[1.0, value], label=[0, 1])


TIME = pa.array([0, 1], pa.timestamp("ms"))

FOLDER_FAULTS: dict[str, tuple[Callable[[Path], object], dict[str, Any], list[str]]] = {
    # Cells
    "empty cell": (
        a_csv("age,v,label\n1,2,0\n3,,1\n,4,1\n"),
        {},
        ['a.csv, row 3, column "v": the cell is empty; fill it in or drop the row'],
    ),
    "the first by row, not by column": (
        a_csv("u,v,label\n1,2,0\n3,NA,1\n,4,1\n"),
        {},
        ['a.csv, row 3, column "v": the cell has "NA", not a number', "leave the column out"],
    ),
    "rows count as in a spreadsheet": (
        a_csv('u,note,label\n1,"two\nlines",0\n\n3,x,1\n,x,1\n'),
        {"features": ("u",)},
        ['a.csv, row 5, column "u": the cell is empty'],
    ),
    "text": (a_csv("u,label\n1,0\nfoo,1\n"), {}, ['row 3, column "u": the cell has "foo", not']),
    "date": (
        a_csv("u,label\n2020-01-01,0\n2020-01-02,1\n"),
        {},
        ['row 2, column "u": the cell has "2020-01-01", not a number'],
    ),
    "decimal comma": (a_csv('u,label\n"1,5",0\n2,1\n'), {}, ['row 2, column "u"', '"1,5", not a']),
    "NaN": (
        a_csv("u,label\n1,0\nNaN,1\n"),
        {},
        ['a.csv, row 3, column "u": the value is NaN; put a number there or drop the row'],
    ),
    "infinity": (a_csv("u,label\n1,0\n-inf,1\n"), {}, ['row 3, column "u": the value is infinite']),
    "too large": (
        a_csv("u,label\n1,0\n1e39,1\n"),
        {},
        ['row 3, column "u": the value 1e+39 is too large for a 32-bit float; rescale'],
    ),
    "empty column": (a_csv("u,label\n,0\n,1\n"), {}, ['row 2, column "u": the cell is empty']),
    "empty label": (a_csv("u,label\n1,a\n2,\n"), {}, ['row 3, column "label": the cell is empty']),
    "blank label": (a_csv('u,label\n1,a\n2," "\n'), {}, ['row 3, column "label": the cell is em']),
    "open quote": (
        a_csv('u,label\n1,a\n2,"b\n3,a\n4,b\n'),
        {},
        ['a.csv, row 3, column "label": the cell has several lines; close its quote'],
    ),
    "parquet null": (
        a_parquet(u=[1, None], label=[0, 1]),
        {},
        ['a.parquet, row 2, column "u": the cell is empty; fill it in'],
    ),
    "parquet NaN": (number(np.nan), {}, ['a.parquet, row 2, column "u": the value is NaN']),
    "parquet too large": (number(-1e39), {}, ['row 2, column "u": the value -1e+39 is too large']),
    "parquet text": (
        a_parquet(u=["1", "x"], label=[0, 1]),
        {},
        ['a.parquet, row 2, column "u": the cell has "x", not a number'],
    ),
    "parquet number as text": (
        a_parquet(u=["1", "2"], label=[0, 1]),
        {},
        ['a.parquet, row 1, column "u": the cell has "1", not a number; use numbers'],
    ),
    "parquet time": (
        a_parquet(u=TIME, label=[0, 1]),
        {},
        ['row 1, column "u": the cell has 1970-01-01 00:00:00, not a number'],
    ),
    "parquet time as label": (
        a_parquet(u=[1, 2], label=TIME),
        {},
        ['row 1, column "label": the cell has type timestamp[ms]; use text or whole numbers'],
    ),
    "parquet label NaN": (
        a_parquet(u=[1, 2], label=[1.0, np.nan]),
        {},
        ['row 2, column "label": the cell is empty'],
    ),
    # Rows and files
    "too few cells": (
        a_csv("u,v,label\n1,2,0\n\n3,1\n"),
        {},
        ["a.csv, row 4: 2 cells, but the header has 3; correct the row"],
    ),
    "too many cells": (a_csv(GOOD + "1,2,3,4\n"), {}, ["a.csv, row 4: 4 cells", "has 3"]),
    "not UTF-8": (
        a_csv("u,label\n1,ja\n2,schön\n".encode("latin-1")),
        {},
        ["a.csv, row 3: the text is not UTF-8; save the file as UTF-8"],
    ),
    "header not UTF-8": (a_csv(GOOD.encode("utf-16")), {}, ["a.csv, row 1: the text is not UTF-8"]),
    "empty file": (a_csv(""), {}, ["a.csv: the file is empty; its first row must name"]),
    "header only": (a_csv("u,label\n"), {}, ["a.csv: no rows; add some or remove"]),
    "parquet without rows": (
        a_parquet(u=pa.array([], pa.int64()), label=pa.array([], pa.int64())),
        {},
        ["a.parquet: no rows"],
    ),
    "no parquet": (
        lambda root: text(root / "a.parquet", GOOD),
        {},
        ["a.parquet: cannot be read as Parquet", "write it again"],
    ),
    # Columns
    "missing label": (
        a_csv("u,lable\n1,0\n"),
        {},
        ['a.csv: no column "label"; the columns are "u", "lable"; did you mean "lable"?'],
    ),
    "missing feature": (
        a_csv(GOOD),
        {"features": ("u", "height")},
        ['a.csv: no column "height"; the columns are "u", "v", "label"; add it'],
    ),
    "missing part": (a_csv(GOOD), {"part": "set"}, ['a.csv: no column "set"']),
    "label not there": (
        a_csv("u,label\n1,a\n2,b\n3,NA\n"),
        {},
        ['a.csv, row 4, column "label"', 'the label "NA" means a missing label', "labels"],
    ),
    "all but alike": (
        a_csv("u,label\n1700000001,0\n1700000002,1\n1700000009,0\n"),
        {},
        ['a.csv, row 2, column "u"', "too little for 32-bit floats", "subtract an offset"],
    ),
    "semicolons": (
        a_csv("u;v;label\n1;2;0\n"),
        {},
        ['no column "label"', "cells must be separated by commas"],
    ),
    "column twice": (
        a_csv("u,u,label\n1,2,0\n"),
        {},
        ['a.csv: two columns are named "u"; rename or drop one'],
    ),
    "no features": (a_csv("label\n0\n1\n"), {}, ["a.csv: no features; the columns are"]),
    "row numbers": (a_csv(",u,label\n0,1,0\n"), {}, ["a.csv: column 1 has no name", "index=False"]),
    "fewer columns": (
        beside("b.csv", "u,label\n1,0\n"),
        {},
        ['b.csv: no column "v"; the columns are "u", "label"'],
    ),
    "more columns": (
        beside("b.csv", "u,v,w,label\n1,2,3,0\n"),
        {},
        ['b.csv: column "w" is not in a.csv; drop it, or list', "in features"],
    ),
    # Labels
    "unknown label": (
        a_csv(GOOD + "5,6,2\n"),
        {"labels": ("0", "1")},
        ['a.csv, row 4, column "label": the label "2" is not in labels = "0", "1"; add it or'],
    ),
    "broken numbers": (
        a_csv("u,label\n1,0\n2,0.5\n"),
        {},
        ['row 3, column "label": the label "0.5" is not a whole number', 'set task = "regression"'],
    ),
    "broken numbers in the second file": (
        lambda root: (text(root / "a.csv", GOOD), save(root / "b.npz", x=[[1, 2]], y=[1.5])),
        {},
        ['b.npz, row 1, array "y": the label "1.5" is not a whole number'],
    ),
    "one class": (
        a_csv("u,label\n1,7\n2,7\n"),
        {},
        ['all labels are "7", but two classes are needed; check column "label"'],
    ),
    "text in a regression": (
        a_csv("u,label\n1,0.5\n2,high\n"),
        {"task": "regression"},
        ['row 3, column "label": the cell has "high", not a number'],
    ),
    "part": (
        a_csv("u,label,set\n1,0,train\n2,1,valid\n"),
        {"part": "set"},
        ['a.csv, row 3, column "set": the cell has "valid"; use "train" or "test"'],
    ),
    # Arrays
    "no zip": (
        lambda root: text(root / "a.npz", "u"),
        {},
        ["a.npz: is not an .npz file; write it with numpy.savez"],
    ),
    "corrupt": (cut_short, {}, ["a.npz: cannot be read as .npz", "write it again"]),
    "no y": (an_npz(x=[[1]], Y=[0]), {}, ['a.npz: no array "y"; the arrays are "x", "Y"']),
    "no y_test": (an_npz(x=[[1]], y=[0], x_test=[[1]]), {}, ['no array "y_test"']),
    "stray array": (
        an_npz(x=[[1]], y=[0], x_val=[[1]]),
        {},
        ['unknown array "x_val"; keep only x, y'],
    ),
    "objects": (
        an_npz(x=[[1]], y=np.array([{}], object)),
        {},
        ['a.npz, array "y": it has Python objects; store plain numbers or text'],
    ),
    "lengths": (an_npz(x=[[1], [2]], y=[0]), {}, ["a.npz: x has 2 rows, but y has 1; they must"]),
    "rank of x": (an_npz(x=[1, 2], y=[0, 1]), {}, ['a.npz, array "x": its shape is (2,); use (']),
    "rank of y": (
        an_npz(x=[[1], [2]], y=[[0], [1]]),
        {},
        ['a.npz, array "y": its shape is (2, 1); use one label per row, shape (2,)'],
    ),
    "no rows": (
        an_npz(x=np.zeros((0, 2)), y=np.zeros(0, int)),
        {},
        ['a.npz, array "x": no rows; add some or remove the file'],
    ),
    "array NaN": (
        an_npz(x=[[1, 2], [3, np.nan]], y=[0, 1]),
        {},
        ['a.npz, row 2, array "x": the value is NaN; put a number there or drop the row'],
    ),
    "array too large": (
        an_npz(x=[[1, 2], [3, 1e300]], y=[0, 1]),
        {},
        ['row 2, array "x": the value 1e+300 is too large'],
    ),
    "target NaN": (
        an_npz(x=[[1], [2]], y=[0, 1], x_test=[[1]], y_test=[np.nan]),
        {"task": "regression"},
        ['a.npz, row 1, array "y_test": the value is NaN'],
    ),
    "text in x": (an_npz(x=[["a"]], y=[0]), {}, ['array "x": its type is <U1; store numbers']),
    "complex y": (an_npz(x=[[1]], y=[1j]), {}, ['array "y": its type is complex128; store whole']),
    "shapes": (
        two_shapes,
        {},
        ["b.npz: inputs have shape (4,), but (3,) in a.npz; they must be equal"],
    ),
    "held out in one": (
        held_out_in_one,
        {},
        ["b.npz: held-out rows are marked in a.npz, but not here; mark them in every file"],
    ),
    # The folder
    "empty folder": (lambda root: root.mkdir(), {}, ["in: the folder is empty; put one .npz"]),
    "no folder": (lambda root: None, {}, ["in: no such folder; check the path"]),
    "a file": (
        lambda root: text(root, GOOD),
        {},
        ['in: is a file; name its folder, or use source = "table"'],
    ),
    "stray file": (
        beside("notes.txt", ""),
        {},
        ["notes.txt: is not an .npz, .csv or .parquet file; move it"],
    ),
    "stray folder": (beside("more/b.csv", GOOD), {}, ["more: is a folder; move it"]),
    "client twice": (
        beside("a.npz", GOOD),
        {},
        ['a.npz: a.csv has the same client "a"; remove one'],
    ),
}


@pytest.mark.parametrize("fault", FOLDER_FAULTS)
def test_faults_of_a_folder_are_named(tmp_path: Path, fault: str) -> None:
    make, more, parts = FOLDER_FAULTS[fault]
    root = tmp_path / "in"
    make(root)
    with pytest.raises(DataError) as caught:
        folder(str(root), **more)
    for part in parts:
        assert part in str(caught.value)
    assert str(caught.value).startswith(str(root))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        (
            "t.csv",
            "u,site,label\n1,a,0\n2,,1\n",
            ['t.csv, row 3, column "site": the cell is empty'],
        ),
        ("t.csv", "u,sit,label\n1,a,0\n", ['no column "site"', 'did you mean "sit"?']),
        ("t.txt", GOOD, ["t.txt: is not a .csv or .parquet file; convert it"]),
        ("t.csv/t", GOOD, ['t.csv: is a folder; name a file, or use source = "folder"']),
        ("u.csv", GOOD, ["t.csv: no such file; check the path"]),
    ],
)
def test_faults_of_a_table_are_named(
    tmp_path: Path, name: str, content: str, parts: list[str]
) -> None:
    text(tmp_path / name, content)
    ending = "txt" if name == "t.txt" else "csv"
    with pytest.raises(DataError) as caught:
        table(str(tmp_path / f"t.{ending}"), client="site")
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ({"task": "ranking"}, ["task = 'ranking'", 'one of "classification", "regression"']),
        ({"features": ()}, ["features", "at least one column"]),
        ({"features": ("u", "u")}, ["features", "all different"]),
        ({"features": ("u", "label")}, ["features", 'must not have "label"', "leave it out"]),
        ({"client": "label"}, ["label, part, client", "must be different columns"]),
        ({"labels": ("a",)}, ["labels = ('a',)", "two or more, all different"]),
        ({"labels": ("1", "1.0")}, ["labels", "all different"]),
        ({"labels": ("a", "b"), "task": "regression"}, ["labels", "left out where task"]),
    ],
)
def test_settings_that_cannot_be_used(
    tmp_path: Path, more: dict[str, Any], parts: list[str]
) -> None:
    path = text(tmp_path / "t.csv", GOOD)
    with pytest.raises(FieldError) as caught:
        table(str(path), **more)
    for part in parts:
        assert part in str(caught.value)


def test_pickled_arrays_never_run(tmp_path: Path) -> None:
    """A file that is a pickle in disguise is refused before anything in it is loaded."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", b"cos\nsystem\n(S'exit 1'\ntR.")
        archive.writestr("y.npy", b"")
    with pytest.raises(DataError, match=r"a\.npz"):
        folder(str(tmp_path))


# Any table

NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=6
)
VALUES = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.integers(-999, 999)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, list[Any]]:
    rows = draw(st.integers(2, 12))
    features = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    cells = NAMES.map(str.strip).filter(bool)
    columns: dict[str, list[Any]] = {}
    for name in features:
        columns[f"f {name}"] = draw(st.lists(VALUES, min_size=rows, max_size=rows))
    # A letter first, so that no label is a number; numbers have tests of their own.
    labels = draw(st.lists(cells, min_size=rows, max_size=rows))
    columns["label"] = ["a" + label for label in labels[:-1]] + ["b"]
    columns["client"] = ["c" + c for c in draw(st.lists(cells, min_size=rows, max_size=rows))]
    return columns


@settings(max_examples=60, deadline=None)
@given(columns=tables())
def test_any_table_comes_back(
    tmp_path_factory: pytest.TempPathFactory, columns: dict[str, list[Any]]
) -> None:
    root = tmp_path_factory.mktemp("any")
    for ending in ("csv", "parquet"):
        if ending == "parquet":  # a column of one type
            columns = {
                name: [float(v) for v in column] if name.startswith("f ") else column
                for name, column in columns.items()
            }
        pool = table(str(write(root / f"t.{ending}", columns)), client="client")
        features = [column for name, column in columns.items() if name.startswith("f ")]
        np.testing.assert_array_equal(pool.x, np.column_stack(features).astype(np.float32))
        assert pool.labels == tuple(sorted(set(columns["label"])))
        assert [pool.labels[i] for i in pool.y] == columns["label"]
        assert pool.names == tuple(sorted(set(columns["client"])))
        assert pool.client is not None
        assert [pool.names[i] for i in pool.client] == columns["client"]
