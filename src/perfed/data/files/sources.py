"""Your own clients: a folder with a file for each, or one table with a column that names them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from perfed.core.errors import require
from perfed.data.dataset import Dataset
from perfed.data.files.columns import (
    canonical_names,
    file_error,
    quote,
    read_columns,
    read_header,
    require_columns,
)
from perfed.data.files.join import join_files, number_names, require_same_form
from perfed.data.files.rows import (
    TABLES,
    ColumnRoles,
    FileRows,
    Task,
    feature_columns,
    read_npz_client,
    read_npz_inputs,
    read_table,
    require_no_more,
)


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
    with names, the same in all files, in any order. Clients are sorted by name, or by size if all
    names are whole numbers. Errors name file, row and column; the header of a CSV file is row 1.

    Args:
        root: the folder.
        label: the column with the label.
        features: the columns with the inputs; None: all but the label's and the part's.
        task: `classification`: labels are text, whole numbers or Booleans, in sorted order.
            `regression`: they are numbers.
        labels: all labels, in this order; None: those that occur.
        part: the column that says which rows are held out, by `train` or `test`.
    """
    return client_files(
        list_client_files(Path(root).expanduser()), label, features, task, labels, part
    )


def client_files(
    paths: Sequence[Path],
    label: str = "label",
    features: tuple[str, ...] | None = None,
    task: Task = "classification",
    labels: tuple[str, ...] | None = None,
    part: str | None = None,
) -> Dataset:
    """The data in these files, one per client; a client of a real federation has its own file."""
    roles = ColumnRoles(label, features, task, labels, part)
    for path in paths:
        _require_file(path, "a .csv, .parquet or .npz file", (*TABLES, ".npz"))
    clients: list[list[FileRows]] = []
    first: Path | None = None  # the file whose columns all others must have
    for path in paths:
        if path.suffix.lower() == ".npz":
            clients.append(read_npz_client(path, task))
            continue
        names = read_header(path)
        if roles.features is None:
            roles, first = replace(roles, features=feature_columns(path, names, roles)), path
        elif first is not None:
            require_no_more(path, names, roles, first)
        clients.append([read_table(path, names, roles)[0]])
    tables = any(path.suffix.lower() != ".npz" for path in paths)
    for name, value in (("features", features), ("part", part)):
        allowed = (
            f"is for files with columns, and {paths[0].parent} has only .npz files; leave it out"
        )
        require(value is None or tables, name, value, allowed)
    require_same_form(clients)
    rows = [rows for client in clients for rows in client]
    sizes = [sum(len(rows.x) for rows in client) for client in clients]
    owner = np.repeat(np.arange(len(clients), dtype=np.int32), sizes)
    return join_files(rows, roles, owner, tuple(path.stem for path in paths))


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

    Clients are sorted by name, or by size if all names are whole numbers; names with leading zeros,
    such as 007, are text. Errors name row and column; the header of a CSV file is row 1.

    Args:
        path: the file.
        client: the column with the client's name, text or a whole number; None: the rows
            have no clients, and are split over artificial ones.
        label: the column with the label.
        features: the columns with the inputs; None: all but the label's, client's and part's.
        task: `classification`: labels are text, whole numbers or Booleans, in sorted order.
            `regression`: they are numbers.
        labels: all labels, in this order; None: those that occur.
        part: the column that says which rows are held out, by `train` or `test`.
    """
    roles = ColumnRoles(label, features, task, labels, part, client)
    file = Path(path).expanduser()
    if file.is_dir():
        raise file_error(file, 'is a folder; name a file, or use source = "folder"')
    _require_file(file, "a .csv or .parquet file", TABLES)
    names = read_header(file)
    if roles.features is None:
        roles = replace(roles, features=feature_columns(file, names, roles))
    rows, owners = read_table(file, names, roles)
    if owners is None:
        return join_files([rows], roles, None, None)
    canonical = canonical_names(set(owners.values))
    clients = tuple(dict.fromkeys(canonical.values()))
    return join_files([rows], roles, number_names(owners, canonical, clients), clients)


def one_client(
    path: Path,
    label: str | None,
    features: tuple[str, ...] | None,
    labels: tuple[str, ...] | None,
) -> Dataset:
    """One client's rows, from a file like those of `folder`, for a trained model.

    Args:
        path: the file.
        label: the column with the label; None: the rows have none.
        features: the columns with the inputs, in the model's order; None: all others.
        labels: the model's classes; None: a regression.
    """
    _require_file(path, "a .csv, .parquet or .npz file", (*TABLES, ".npz"))
    task: Task = "regression" if labels is None or label is None else "classification"
    labels = labels if task == "classification" else None
    if path.suffix.lower() == ".npz":
        rows = [read_npz_inputs(path)] if label is None else read_npz_client(path, task)
        return join_files(rows, ColumnRoles(label or "label", None, task, labels, None), None, None)
    names = read_header(path)
    if label is None:
        require_columns(path, names, features or ())
        chosen = features or names
        sheet = read_columns(path, names, chosen, ())
        zeros = np.zeros(len(sheet.numbers), np.float32)
        return Dataset(x=sheet.numbers, y=zeros, labels=None, features=tuple(chosen))
    roles = ColumnRoles(label, features, task, labels, None)
    if roles.features is None:
        roles = replace(roles, features=feature_columns(path, names, roles))
    return join_files([read_table(path, names, roles)[0]], roles, None, None)


def _require_file(path: Path, kind: str, suffixes: tuple[str, ...]) -> None:
    if not path.is_file():
        raise file_error(path.absolute(), "no such file; check the path")
    if path.suffix.lower() not in suffixes:
        raise file_error(path, f"is not {kind}; convert it")


def list_client_files(root: Path) -> list[Path]:
    """The clients' files, in the order of the clients."""
    if root.is_file():
        raise file_error(root, 'is a file; name its folder, or use source = "table"')
    if not root.is_dir():
        raise file_error(root.absolute(), "no such folder; check the path")
    paths = sorted(path for path in root.iterdir() if not path.name.startswith("."))
    if not paths:
        raise file_error(
            root, "the folder is empty; put one .npz, .csv or .parquet file per client there"
        )
    by_name: dict[str, Path] = {}
    for path in paths:
        if path.is_dir() or path.suffix.lower() not in (".npz", *TABLES):
            kind = "a folder" if path.is_dir() else "not an .npz, .csv or .parquet file"
            raise file_error(path, f"is {kind}; move it: only clients' files may be here")
        if path.stem in by_name:
            other = by_name[path.stem].name
            raise file_error(path, f"{other} has the same client {quote(path.stem)}; remove one")
        by_name[path.stem] = path
    return [by_name[stem] for stem in canonical_names(set(by_name))]
