"""Your own data: CSV, Parquet and .npz files."""

from perfed.data.files.columns import canonical_names, quote
from perfed.data.files.sources import client_files, folder, list_client_files, one_client, table

__all__ = [
    "canonical_names",
    "client_files",
    "folder",
    "list_client_files",
    "one_client",
    "quote",
    "table",
]
