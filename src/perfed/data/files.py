"""Your own clients: a folder with a file for each, or one table with a column that names them."""

import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, final, get_args

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float32, Int32, Shaped

from perfed.core.errors import DataError, require, require_choice
from perfed.data import columns
from perfed.data.columns import Texts, fault, listed, shown
from perfed.data.dataset import Dataset

# What programs write for a label that is not there.
_MISSING = frozenset({"na", "nan", "null", "none", "n/a"})

Task = Literal["classification", "regression"]

_TABLES: Final = (".csv", ".parquet")
_NUMBER: Final = re.compile(rf"{columns.NUMBER}|[+-]?(nan|inf|infinity)", re.IGNORECASE)
_INTEGER: Final = re.compile(r"[+-]?[0-9]+(\.0*)?")
# What pandas calls the rows' numbers when it writes them; they must not pass for a feature.
_ROW_NUMBERS: Final = ("", "__index_level_0__")


def folder(
    root: str,
    label: str = "label",
    features: tuple[str, ...] | None = None,
    task: Task = "classification",
    labels: tuple[str, ...] | None = None,
    part: str | None = None,
) -> Dataset:
    """Your own clients: a folder with one .npz, .csv or .parquet file for each.

    A file's name without its ending is the client's. An .npz file has the arrays `x` (rows first)
    and `y`, and may have `x_test` and `y_test`, which are held out. The other files have columns
    with names; they may come in any order, but must be the same in all. Clients are in the order
    of their names: by size where all are whole numbers. Faults are named by file, row and column;
    the header of a CSV file is row 1.

    Args:
        root: the folder.
        label: the column with the label.
        features: the columns with the inputs; None: all but the label's and the part's.
        task: `classification`: labels are text, whole numbers or truth values, numbered in sorted
            order. `regression`: they are numbers.
        labels: the labels there are, in this order; None: those that occur.
        part: the column that says which rows are held out, by `train` or `test`; None: none does.
    """
    return client_files(_client_files(Path(root).expanduser()), label, features, task, labels, part)


def client_files(
    paths: Sequence[Path],
    label: str = "label",
    features: tuple[str, ...] | None = None,
    task: Task = "classification",
    labels: tuple[str, ...] | None = None,
    part: str | None = None,
) -> Dataset:
    """The same of these files, one a client; a client of a real federation has one of its own."""
    roles = _Roles(label, features, task, labels, part)
    for path in paths:
        if not path.is_file():
            raise fault(path.absolute(), "there is no such file; check the path")
        if path.suffix.lower() not in (*_TABLES, ".npz"):
            raise fault(path, "is no .csv, .parquet or .npz file")
    clients: list[list[_Rows]] = []
    model: Path | None = None  # the file whose columns all others must have
    for path in paths:
        if path.suffix.lower() == ".npz":
            clients.append(_archive(path, task))
            continue
        names = columns.header(path)
        if roles.features is None:
            roles, model = replace(roles, features=_features(path, names, roles)), path
        elif model is not None:
            _require_no_more(path, names, roles, model)
        clients.append([_sheet(path, names, roles)[0]])
    for name, value in (("features", features), ("part", part)):
        says = f"names columns, which no file in {paths[0].parent} has; leave it out"
        require(value is None or any(p.suffix.lower() != ".npz" for p in paths), name, value, says)
    _require_alike(clients)
    rows = [rows for client in clients for rows in client]
    sizes = [sum(len(rows.x) for rows in client) for client in clients]
    owner = np.repeat(np.arange(len(clients), dtype=np.int32), sizes)
    return _pool(rows, roles, owner, tuple(path.stem for path in paths))


def table(
    path: str,
    client: str | None = None,
    label: str = "label",
    features: tuple[str, ...] | None = None,
    task: Task = "classification",
    labels: tuple[str, ...] | None = None,
    part: str | None = None,
) -> Dataset:
    """Your own clients: one .csv or .parquet file with a column that names each row's client.

    Clients are in the order of their names: by size where all are whole numbers. Names with leading
    zeros, such as 007, are text. Faults are named by row and column; the header of a CSV file is
    row 1.

    Args:
        path: the file.
        client: the column with the client's name, text or a whole number; None: rows have no
            client, and a split deals them out.
        label: the column with the label.
        features: the columns with the inputs; None: all but the label's, client's and part's.
        task: `classification`: labels are text, whole numbers or truth values, numbered in sorted
            order. `regression`: they are numbers.
        labels: the labels there are, in this order; None: those that occur.
        part: the column that says which rows are held out, by `train` or `test`; None: none does.
    """
    roles = _Roles(label, features, task, labels, part, client)
    file = Path(path).expanduser()
    if file.is_dir():
        raise fault(file, 'is a folder; name a file, or use source = "folder"')
    if not file.is_file():
        raise fault(file, "there is no such file; check the path")
    if file.suffix.lower() not in _TABLES:
        raise fault(file, "is neither .csv nor .parquet; write the table as one of these")
    names = columns.header(file)
    if roles.features is None:
        roles = replace(roles, features=_features(file, names, roles))
    rows, owners = _sheet(file, names, roles)
    if owners is None:
        return _pool([rows], roles, None, None)
    known = columns.named(set(owners.values))
    called = tuple(dict.fromkeys(known.values()))
    return _pool([rows], roles, _numbered(owners, known, called), called)


def one_client(
    path: Path,
    label: str | None,
    features: tuple[str, ...] | None,
    labels: tuple[str, ...] | None,
) -> Dataset:
    """One client's rows, from a file like those of `folder`, for a model that is trained already.

    Args:
        path: the file.
        label: the column with the label; None: the rows have none.
        features: the columns with the inputs, in the model's order; None: all others.
        labels: the classes the model knows; None: it is a regression.
    """
    if not path.is_file():
        raise fault(path.absolute(), "there is no such file; check the path")
    if path.suffix.lower() not in (*_TABLES, ".npz"):
        raise fault(path, "is no .csv, .parquet or .npz file")
    task: Task = "regression" if labels is None or label is None else "classification"
    labels = labels if task == "classification" else None
    if path.suffix.lower() == ".npz":
        if label is None:
            arrays = _arrays(path)
            x = arrays.get("x", next(iter(arrays.values())))
            rows = [_pair(path, {"x": x, "y": np.zeros(len(x))}, "x", "y", "regression")]
        else:
            rows = _archive(path, task)
        return _pool(rows, _Roles(label or "label", None, task, labels, None), None, None)
    names = columns.header(path)
    if label is None:
        columns.require_columns(path, names, features or ())
        chosen = features or names
        sheet = columns.read(path, names, chosen, ())
        zeros = np.zeros(len(sheet.numbers), np.float32)
        return Dataset(x=sheet.numbers, y=zeros, labels=None, features=tuple(chosen))
    roles = _Roles(label, features, task, labels, None)
    if roles.features is None:
        roles = replace(roles, features=_features(path, names, roles))
    return _pool([_sheet(path, names, roles)[0]], roles, None, None)


@final
@dataclass(frozen=True)
class _Roles:
    """What each column is for, as the settings say."""

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
            require(len(chosen) > 0, "features", chosen, "must name at least one column")
            require(len(set(chosen)) == len(chosen), "features", chosen, "must be all different")
            for name in others:
                says = f'must not have "{name}", which is the label, part or client; leave it out'
                require(name not in chosen, "features", chosen, says)
        if self.labels is not None:
            given = self.labels
            has_classes = self.task == "classification"
            require(has_classes, "labels", given, 'must be left out where task = "regression"')
            stands_for = columns.named(set(given))
            enough = len(set(stands_for.values())) == len(given) >= 2
            require(enough, "labels", given, "must be two or more, all different")

    @property
    def others(self) -> tuple[str, ...]:
        """The columns that are no features."""
        return tuple(c for c in (self.label, self.part, self.client) if c is not None)


@final
@dataclass(frozen=True)
class _Rows:
    """Rows of one file.

    Attributes:
        path: the file.
        target: where the labels come from, for messages.
        x: the inputs.
        y: the labels as they are written, or the targets of a regression.
        test: which rows are held out; None: the file does not say.
    """

    path: Path
    target: str
    x: Shaped[np.ndarray, "rows ..."]
    y: Texts | Float32[np.ndarray, " rows"]
    test: Bool[np.ndarray, " rows"] | None


def _client_files(root: Path) -> list[Path]:
    """The clients' files, in the order of the clients."""
    if root.is_file():
        raise fault(root, 'is a file; name its folder, or use source = "table"')
    if not root.is_dir():
        raise fault(root.absolute(), "there is no such folder; check the path")
    paths = sorted(path for path in root.iterdir() if not path.name.startswith("."))
    if not paths:
        raise fault(root, "the folder is empty; put one .npz, .csv or .parquet file a client there")
    seen: dict[str, Path] = {}
    for path in paths:
        if path.is_dir() or path.suffix.lower() not in (".npz", *_TABLES):
            kind = "a folder" if path.is_dir() else "neither .npz nor .csv nor .parquet"
            raise fault(path, f"is {kind}; move it elsewhere, only clients' files may be here")
        if path.stem in seen:
            other = seen[path.stem].name
            raise fault(path, f"{other} is of the same client {shown(path.stem)}; remove one")
        seen[path.stem] = path
    return [seen[stem] for stem in columns.named(set(seen))]


def _features(path: Path, names: Sequence[str], roles: _Roles) -> tuple[str, ...]:
    """All columns that have no other role."""
    columns.require_columns(path, names, roles.others)
    chosen = tuple(name for name in names if name not in roles.others)
    if not chosen:
        raise fault(path, f"there are no features; the columns are {listed(names)}")
    for name in _ROW_NUMBERS:
        if name in chosen:
            says = f"column {names.index(name) + 1} has no name of its own; name it or drop it"
            raise fault(path, f"{says} (in pandas, index=False drops it)")
    return chosen


def _require_no_more(path: Path, names: Sequence[str], roles: _Roles, model: Path) -> None:
    extra = [name for name in names if name not in (*roles.others, *(roles.features or ()))]
    if extra:
        says = f"there is a column {shown(extra[0])}, which {model.name} has not"
        raise fault(path, f"{says}; drop it, or list the columns to use in features")


def _sheet(path: Path, names: Sequence[str], roles: _Roles) -> tuple[_Rows, Texts | None]:
    """The rows of a CSV or Parquet file, and the name of each one's client."""
    chosen = roles.features or ()
    columns.require_columns(path, names, (*roles.others, *chosen))
    regression = roles.task == "regression"
    numeric = (*chosen, roles.label) if regression else chosen
    text = [name for name in roles.others if name not in numeric]
    sheet = columns.read(path, names, numeric, text)
    x, test = sheet.numbers[:, : len(chosen)], None
    if roles.part is not None:
        parts = sheet.texts[roles.part]
        wrong = set(parts.values) - {"train", "test"}
        if wrong:
            row = parts.first(wrong) or 0
            says = f'the cell holds {shown(parts.values[parts.index[row]])}; use "train" or "test"'
            raise fault(path, says, row, f"column {shown(roles.part)}")
        test = np.array([value == "test" for value in parts.values])[parts.index]
    y = sheet.numbers[:, -1] if regression else sheet.texts[roles.label]
    owner = None if roles.client is None else sheet.texts[roles.client]
    return _Rows(path, f"column {shown(roles.label)}", x, y, test), owner


def _archive(path: Path, task: Task) -> list[_Rows]:
    """The rows of an .npz file: those to train on, then those held out."""
    arrays = _arrays(path)
    held_out = not {"x_test", "y_test"}.isdisjoint(arrays)
    needed = ("x", "y", "x_test", "y_test") if held_out else ("x", "y")
    for name in needed:
        if name not in arrays:
            there = listed(list(arrays)) or "none"
            raise fault(path, f'there is no array "{name}"; the arrays are {there}; add it')
    for name in arrays:
        if name not in needed:
            says = f"the array {shown(name)} has no meaning; keep only x, y, x_test and y_test"
            raise fault(path, says)
    train = _pair(path, arrays, "x", "y", task)
    if not held_out:
        return [train]
    test = _pair(path, arrays, "x_test", "y_test", task)
    return [
        replace(train, test=np.zeros(len(train.x), bool)),
        replace(test, test=np.ones(len(test.x), bool)),
    ]


def _arrays(path: Path) -> Mapping[str, np.ndarray]:
    if not zipfile.is_zipfile(path):
        raise fault(path, "is no .npz file; write it with numpy.savez")
    name = ""
    arrays = {}
    try:
        # Pickled objects could run code of their own, so they are never loaded.
        with np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                arrays[name] = np.asarray(archive[name])
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if "allow_pickle" in str(error):
            says = "it holds objects; store plain numbers or text"
            raise fault(path, says, what=f"array {shown(name)}") from None
        raise fault(path, f"cannot be read as .npz ({error}); write it anew") from None
    return arrays


def _pair(
    path: Path, arrays: Mapping[str, np.ndarray], inputs: str, target: str, task: Task
) -> _Rows:
    """Inputs and labels of an .npz file, checked."""
    x, y = arrays[inputs], arrays[target]
    from_x, from_y = f'array "{inputs}"', f'array "{target}"'
    if x.ndim < 2 or 0 in x.shape[1:]:
        says = f"its shape is {x.shape}; make it (rows, features) or (rows, height, width, depth)"
        raise fault(path, says, what=from_x)
    if y.ndim != 1:
        says = f"its shape is {y.shape}; give one label a row, in the shape ({len(x)},)"
        raise fault(path, says, what=from_y)
    if len(x) != len(y):
        says = f"{inputs} has {len(x)} rows, but {target} has {len(y)}; make them as many"
        raise fault(path, says)
    if len(x) == 0:
        raise fault(path, "there are no rows; add some or remove the file", what=from_x)
    x = x if x.dtype == np.uint8 else _narrowed(path, x, inputs)
    if task == "regression":
        return _Rows(path, from_y, x, _narrowed(path, y, target), None)
    if y.dtype.kind not in "biufU":
        raise fault(path, f"its type is {y.dtype}; store whole numbers or text", what=from_y)
    # Arrow takes neither foreign byte orders nor floats of more than 64 bits.
    y = y.astype(np.float64 if y.dtype.kind == "f" else y.dtype.newbyteorder("="))
    texts = columns.texts_of(pa.chunked_array([pa.array(y)]))
    if not isinstance(texts, Texts):
        raise fault(path, texts.says, texts.row, from_y)
    return _Rows(path, from_y, x, texts, None)


def _narrowed(path: Path, values: np.ndarray, name: str) -> Float32[np.ndarray, "rows ..."]:
    """An array as float32."""
    if values.dtype.kind not in "biuf":
        says = f"its type is {values.dtype}; store numbers"
        raise fault(path, says, what=f'array "{name}"')
    narrow, row, says = columns.narrowed(values)
    if row is not None:
        raise fault(path, says, row, f'array "{name}"')
    return narrow


def _require_alike(clients: Sequence[Sequence[_Rows]]) -> None:
    """Raise unless all clients have inputs of one shape and all or none of them rows held out."""
    first = clients[0][0]
    for rows in (rows for client in clients for rows in client):
        if rows.x.shape[1:] != first.x.shape[1:]:
            ours, theirs = rows.x.shape[1:], first.x.shape[1:]
            says = f"inputs have the shape {ours}, but {theirs} in {first.path.name}"
            raise fault(rows.path, f"{says}; make them alike")
        if (rows.test is None) != (first.test is None):
            given, missing = (rows, first) if first.test is None else (first, rows)
            says = f"rows held out are not marked here, but are in {given.path.name}"
            raise fault(missing.path, f"{says}; mark them in every file or in none")


def _pool(
    rows: Sequence[_Rows],
    roles: _Roles,
    client: Int32[np.ndarray, " examples"] | None,
    names: tuple[str, ...] | None,
) -> Dataset:
    """The rows of all files, one file after another."""
    y, labels = _labeled(rows, roles.labels)
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


def _labeled(
    rows: Sequence[_Rows], given: tuple[str, ...] | None
) -> tuple[Shaped[np.ndarray, " examples"], tuple[str, ...] | None]:
    """All labels by number, and their names; targets of a regression as they are."""
    written = [part.y for part in rows if isinstance(part.y, Texts)]
    if not written:
        return np.concatenate([part.y for part in rows if not isinstance(part.y, Texts)]), None
    values = set().union(*(texts.values for texts in written))
    if all(_NUMBER.fullmatch(value) for value in values):
        broken = {value for value in values if not _INTEGER.fullmatch(value)}
        remedy = 'use whole numbers or text, or set task = "regression"'
        _refuse_labels(rows, broken, f"is no whole number; {remedy}")
    if given is None:
        missing = {value for value in values if value.lower() in _MISSING}
        remedy = "fill it in, drop the row, or list it in labels if it is a class"
        _refuse_labels(rows, missing, f"stands for a missing one; {remedy}")
    # What is given is named along with what is written, so that 1 and 1.0 are the same there too.
    known = columns.named(values | set(given or ()))
    classes = tuple(dict.fromkeys(known[value] for value in given or known))
    unknown = values - {value for value in known if known[value] in frozenset(classes)}
    _refuse_labels(rows, unknown, f"is not in labels = {listed(given or ())}; add it or correct it")
    if len(classes) < 2:
        says = f"all labels are {shown(classes[0])}, and two classes are needed; check"
        raise DataError(f'{rows[0].path}: {says} {rows[0].target}, or set task = "regression"')
    y = np.concatenate([_numbered(texts, known, classes) for texts in written])
    return y, given or classes


def _refuse_labels(rows: Sequence[_Rows], wrong: set[str], says: str) -> None:
    """Raise for the first row whose label is one of these."""
    for part in rows if wrong else ():
        if isinstance(part.y, Texts):
            row = part.y.first(wrong)
            if row is not None:
                label = shown(part.y.values[part.y.index[row]])
                raise fault(part.path, f"the label {label} {says}", row, part.target)


def _numbered(
    texts: Texts, known: Mapping[str, str], names: Sequence[str]
) -> Int32[np.ndarray, " rows"]:
    """Each row's name by its number."""
    number = {name: i for i, name in enumerate(names)}
    numbers: np.ndarray = np.array([number[known[value]] for value in texts.values], np.int32)
    return np.take(numbers, texts.index)
