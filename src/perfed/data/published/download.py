"""Where the files of published data come from: your own folder, the cache, or a download.

If `[data] root` is given, only that folder is searched. Otherwise: the folder in the environment
variable PERFED_DATA, then the cache (PERFED_DATA_CACHE, or the system's default), and then the
address of publication, or the mirror in PERFED_MIRROR.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, final

import pooch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from perfed.core.errors import DataError

DATA, CACHE, MIRROR = "PERFED_DATA", "PERFED_DATA_CACHE", "PERFED_MIRROR"

# Timeouts for connecting, and between two pieces of a file.
CONNECT_SECONDS, READ_SECONDS = 20, 60


@final
@dataclass(frozen=True)
class PublishedFile:
    """One file of a published set.

    Attributes:
        name: its name where it is published.
        folders: subfolders in which it may be; the first is its folder in the cache.
        url: its address; None: it is not downloaded.
        checksum: checksum of the published file, as "sha256:..." or "md5:...".
    """

    name: str
    folders: tuple[str, ...]
    url: str | None = None
    checksum: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The file's name, packed and unpacked."""
        unpacked = self.name.removesuffix(".gz")
        return (self.name,) if unpacked == self.name else (self.name, unpacked)

    @property
    def address(self) -> str:
        """Where to download it: its address, or that on the mirror, with the cache's folders."""
        mirror = os.environ.get(MIRROR)
        if mirror:
            return "/".join((mirror.rstrip("/"), self.folders[0], self.name))
        assert self.url is not None
        return self.url

    @property
    def cached(self) -> Path:
        """Its path in the cache."""
        return cache_folder() / self.folders[0] / self.name

    def find(self, folder: Path) -> Path | None:
        """Its path in a folder: in one of its subfolders, or in the folder itself."""
        for subfolder in (*self.folders, ""):
            for name in self.names:
                path = folder / subfolder / name
                if os.path.isfile(path):
                    return path
        return None


@final
@dataclass(frozen=True)
class FileFormat:
    """The files of a published set in one format, and the name of the format."""

    kind: str
    files: tuple[PublishedFile, ...]

    def missing(self, folder: Path) -> list[PublishedFile]:
        """The files that are not in a folder."""
        return [file for file in self.files if file.find(folder) is None]


@final
@dataclass(frozen=True)
class PublishedSet:
    """A published data set, and the formats it may be in, by preference."""

    name: str
    formats: tuple[FileFormat, ...]

    @property
    def download(self) -> FileFormat:
        """The format that can be downloaded."""
        return next(f for f in self.formats if all(file.url is not None for file in f.files))


@final
@dataclass(frozen=True)
class LocatedFiles:
    """The files of a set on this machine: their format, and their paths in its order."""

    kind: str
    paths: tuple[Path, ...]


def locate(published: PublishedSet, root: str | None = None) -> LocatedFiles:
    """Find the files of a set, or download them.

    Files in your own folder are used as they are; those in the cache have the published checksums.
    """
    if root is not None:
        return _in_root(published, Path(root).expanduser())
    folder = _data_folder()
    if folder is not None:
        for form in published.formats:
            if located := _complete(form, folder):
                return located
    return _from_cache(published, folder)


def describe_location(sets: Sequence[PublishedSet]) -> str:
    """Where these sets are on this machine, as text, judged by the names of files."""
    folder = _data_folder()
    places = []
    for one in sets:
        if folder is not None and any(not form.missing(folder) for form in one.formats):
            places.append(f"in {DATA}")
        elif all(_is_here(file, folder) for file in one.download.files):
            places.append("in the cache")
        else:
            return "needs a download"
    return " and ".join(dict.fromkeys(places)) or "ships with the package"


def cache_folder() -> Path:
    """The folder of downloaded files."""
    return Path(os.environ.get(CACHE) or pooch.os_cache("perfed")).expanduser()


def _data_folder() -> Path | None:
    path = os.environ.get(DATA)
    return Path(path).expanduser() if path else None


def _complete(form: FileFormat, folder: Path) -> LocatedFiles | None:
    paths = [path for file in form.files if (path := file.find(folder)) is not None]
    return LocatedFiles(form.kind, tuple(paths)) if len(paths) == len(form.files) else None


def _is_here(file: PublishedFile, folder: Path | None) -> bool:
    own = folder is not None and file.find(folder) is not None
    return own or os.path.isfile(file.cached)


def _in_root(published: PublishedSet, folder: Path) -> LocatedFiles:
    if not folder.is_dir():
        raise DataError(
            f"root = {str(folder)!r}: there is no such folder; create it and put {published.name} "
            "there, or leave root out to use the cache"
        )
    for form in published.formats:
        if located := _complete(form, folder):
            return located
    raise DataError(
        f"{published.name} is not in {folder}, which is data.root. Put there"
        f"{_missing_files(published, folder)}"
    )


def _missing_files(published: PublishedSet, folder: Path) -> str:
    """Which files to put into which folders, one paragraph per format."""
    lines = []
    for form in published.formats:
        missing = form.missing(folder)
        names = ", ".join(file.name for file in missing)
        packed = " (or unpacked)" if any(len(file.names) > 1 for file in missing) else ""
        places = [str(folder / place) for place in (*form.files[0].folders, "")]
        lines.append(f"  {names}{packed}\n    into {' or '.join(places)}")
    head = ":\n" if len(lines) == 1 else " one of these sets of files:\n"
    return head + "\n".join(lines)


def _from_cache(published: PublishedSet, folder: Path | None) -> LocatedFiles:
    """The files of the format that can be downloaded; missing ones are downloaded."""
    form, paths = published.download, []
    for file in form.files:
        path = None if folder is None else file.find(folder)
        if path is None:
            damaged = os.path.isfile(file.cached)
            try:
                path = _retrieve(file)
            except (OSError, ValueError) as error:
                with suppress(OSError):  # removes only an empty folder
                    file.cached.parent.rmdir()
                raise DataError(_failure(published, folder, file, damaged, error)) from error
        paths.append(path)
    return LocatedFiles(form.kind, tuple(paths))


def _retrieve(file: PublishedFile) -> Path:
    """A file from the cache, if its checksum is right; else downloaded into it."""
    show = sys.stderr is not None and sys.stderr.isatty() and not os.path.isfile(file.cached)
    progress: AbstractContextManager[_Bar | None] = _Bar(file.name) if show else nullcontext()
    with progress as bar:
        downloader = pooch.HTTPDownloader(
            progressbar=bar or False,
            chunk_size=1 << 16,
            timeout=(CONNECT_SECONDS, READ_SECONDS),
            # Gzipped files must stay so: the checksum is that of the packed file.
            headers={"Accept-Encoding": "identity"},
        )
        path = pooch.retrieve(
            file.address,
            known_hash=file.checksum,
            fname=file.name,
            path=file.cached.parent,
            downloader=downloader,
        )
    return Path(path)


def _failure(
    published: PublishedSet,
    folder: Path | None,
    file: PublishedFile,
    damaged: bool,
    error: OSError | ValueError,
) -> str:
    """Which files are missing, where they were searched, and what to do."""
    missing = [f.name for f in published.download.files if f is file or not _is_here(f, folder)]
    if folder is None:
        own = f"the folder in {DATA} (not set)"
    else:
        absent = "" if folder.is_dir() else ", which does not exist"
        places = ", ".join(dict.fromkeys(p for f in published.formats for p in f.files[0].folders))
        own = f"{folder} ({DATA}{absent}) and its subfolders {places}"
    lines = [
        f"{published.name} is not on this machine, and the download failed.",
        f"  missing: {', '.join(missing)}",
        f"  looked in: {own}",
        f"  looked in: {cache_folder()} (the cache)",
        f"  tried: {file.address}: {_reason(error)}",
        "Put the files, packed or unpacked, into a folder, and set data.root or the environment "
        f"variable {DATA} to it.",
    ]
    if damaged:
        lines.insert(1, f"  damaged: {file.cached} does not have the published checksum; delete it")
    others = [form for form in published.formats if form is not published.download]
    if others:
        sets = "; ".join(", ".join(f.name for f in form.files) for form in others)
        lines.append(f"Other files that can be used: {sets}.")
    return "\n".join(lines)


def _reason(error: BaseException) -> str:
    """Why a download failed, in a few words."""
    if isinstance(error, ValueError) and not isinstance(error, OSError):
        return f"the downloaded file is not the published one, and was deleted ({error})"
    response = getattr(error, "response", None)
    if response is not None:
        return f"the server answered {response.status_code} {response.reason}"
    # The first cause has the plainest message.
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error) or type(error).__name__


@final
class _Bar:
    """A progress bar of `rich` with the methods that `pooch` calls."""

    def __init__(self, name: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        console = Console(stderr=True)
        self._progress = Progress(*columns, TransferSpeedColumn(), console=console, transient=True)
        self._task = self._progress.add_task(name, total=None)
        self._total = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # `pooch` closes the bar only after a complete download.
        self.close()

    @property
    def total(self) -> int:
        """The size of the file; 0: unknown."""
        return self._total

    @total.setter
    def total(self, size: int) -> None:
        self._total = size
        self._progress.update(self._task, total=size or None)

    def update(self, count: int) -> None:
        """Add this many bytes."""
        self._progress.advance(self._task, count)

    def reset(self) -> None:
        """Start again from 0 bytes."""
        self._progress.reset(self._task, total=self._total or None)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()
