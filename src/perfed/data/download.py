"""Where the files of published data come from: a folder of one's own, the cache, or a download.

`[data] root`, if given, is the only place looked at. Otherwise it is the folder that the
environment variable PERFED_DATA names, then the cache (PERFED_DATA_CACHE, or the system's usual
place), and then the address of publication, or the mirror that PERFED_MIRROR names.
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

# How long to wait for a server to answer at all, and between two pieces of a file.
CONNECT_SECONDS, SILENT_SECONDS = 20, 60


@final
@dataclass(frozen=True)
class PublishedFile:
    """One file of a published set.

    Attributes:
        name: what it is called where it is published.
        folders: subfolders in which it may lie; the first is where the cache keeps it.
        url: its address; None: it is not downloaded.
        checksum: of the published file, as "sha256:..." or "md5:...".
    """

    name: str
    folders: tuple[str, ...]
    url: str | None = None
    checksum: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The file's name, and its name unpacked."""
        unpacked = self.name.removesuffix(".gz")
        return (self.name,) if unpacked == self.name else (self.name, unpacked)

    @property
    def address(self) -> str:
        """Where to download it: its address, or that on the mirror, laid out as the cache is."""
        mirror = os.environ.get(MIRROR)
        if mirror:
            return "/".join((mirror.rstrip("/"), self.folders[0], self.name))
        assert self.url is not None
        return self.url

    @property
    def cached(self) -> Path:
        """Where the cache keeps it."""
        return cache_folder() / self.folders[0] / self.name

    def found(self, folder: Path) -> Path | None:
        """Where it lies in a folder: in one of its subfolders, or in the folder itself."""
        for place in (*self.folders, ""):
            for name in self.names:
                path = folder / place / name
                if os.path.isfile(path):
                    return path
        return None


@final
@dataclass(frozen=True)
class Form:
    """Files that hold a published set between them, and the name of their format."""

    kind: str
    files: tuple[PublishedFile, ...]

    def missing(self, folder: Path) -> list[PublishedFile]:
        """Which of the files a folder lacks."""
        return [file for file in self.files if file.found(folder) is None]


@final
@dataclass(frozen=True)
class PublishedSet:
    """A published set of data and the forms it is kept in; each is enough, the first is best."""

    name: str
    forms: tuple[Form, ...]

    @property
    def download(self) -> Form:
        """The form that can be downloaded."""
        return next(f for f in self.forms if all(file.url is not None for file in f.files))


@final
@dataclass(frozen=True)
class Located:
    """The files of a set on this machine: their form, and their paths in its order."""

    kind: str
    paths: tuple[Path, ...]


def locate(wanted: PublishedSet, root: str | None = None) -> Located:
    """Find the files of a set, or download them.

    Files in a folder of one's own are taken as they are; those in the cache have the published
    checksums.
    """
    if root is not None:
        return _in_root(wanted, Path(root).expanduser())
    folder = _data_folder()
    if folder is not None:
        for form in wanted.forms:
            if located := _whole(form, folder):
                return located
    return _from_cache(wanted, folder)


def available(wanted: Sequence[PublishedSet]) -> str:
    """Where these sets are on this machine, in words, as far as their names tell."""
    folder = _data_folder()
    places = []
    for one in wanted:
        if folder is not None and any(not form.missing(folder) for form in one.forms):
            places.append(f"in {DATA}")
        elif all(_at_hand(file, folder) for file in one.download.files):
            places.append("in the cache")
        else:
            return "needs a download"
    return " and ".join(dict.fromkeys(places)) or "ships with the package"


def cache_folder() -> Path:
    """The folder that downloads are kept in."""
    return Path(os.environ.get(CACHE) or pooch.os_cache("perfed")).expanduser()


def _data_folder() -> Path | None:
    named = os.environ.get(DATA)
    return Path(named).expanduser() if named else None


def _whole(form: Form, folder: Path) -> Located | None:
    paths = [path for file in form.files if (path := file.found(folder)) is not None]
    return Located(form.kind, tuple(paths)) if len(paths) == len(form.files) else None


def _at_hand(file: PublishedFile, folder: Path | None) -> bool:
    mine = folder is not None and file.found(folder) is not None
    return mine or os.path.isfile(file.cached)


def _in_root(wanted: PublishedSet, folder: Path) -> Located:
    if not folder.is_dir():
        raise DataError(
            f"root = {str(folder)!r}: there is no such folder; make it and put {wanted.name} into "
            "it, or leave root out to use the cache"
        )
    for form in wanted.forms:
        if located := _whole(form, folder):
            return located
    raise DataError(
        f"{wanted.name} is not in {folder}, the root that was asked for. Put there"
        f"{_wishes(wanted, folder)}"
    )


def _wishes(wanted: PublishedSet, folder: Path) -> str:
    """What to put into which folders, a line for each form."""
    lines = []
    for form in wanted.forms:
        missing = form.missing(folder)
        names = ", ".join(file.name for file in missing)
        packed = " (or unpacked)" if any(len(file.names) > 1 for file in missing) else ""
        places = [str(folder / place) for place in (*form.files[0].folders, "")]
        lines.append(f"  {names}{packed}\n    into {' or '.join(places)}")
    head = ":\n" if len(lines) == 1 else " one of these sets of files:\n"
    return head + "\n".join(lines)


def _from_cache(wanted: PublishedSet, folder: Path | None) -> Located:
    """The files of the form that can be downloaded; those not here are."""
    form, paths = wanted.download, []
    for file in form.files:
        mine = None if folder is None else file.found(folder)
        if mine is None:
            damaged = os.path.isfile(file.cached)
            try:
                mine = _retrieved(file)
            except (OSError, ValueError) as error:
                with suppress(OSError):  # if nothing else is in it, it was made just now
                    file.cached.parent.rmdir()
                raise DataError(_in_vain(wanted, folder, file, damaged, error)) from error
        paths.append(mine)
    return Located(form.kind, tuple(paths))


def _retrieved(file: PublishedFile) -> Path:
    """A file from the cache, if its checksum is right; else downloaded into it."""
    showing = sys.stderr is not None and sys.stderr.isatty() and not os.path.isfile(file.cached)
    shown: AbstractContextManager[_Bar | None] = _Bar(file.name) if showing else nullcontext()
    with shown as bar:
        downloader = pooch.HTTPDownloader(
            progressbar=bar or False,
            chunk_size=1 << 16,
            timeout=(CONNECT_SECONDS, SILENT_SECONDS),
            # What is gzipped is to stay so: the checksum is that of the file as it is kept.
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


def _in_vain(
    wanted: PublishedSet,
    folder: Path | None,
    file: PublishedFile,
    damaged: bool,
    error: OSError | ValueError,
) -> str:
    """What is missing, where it was sought, and what to do."""
    missing = [f.name for f in wanted.download.files if f is file or not _at_hand(f, folder)]
    if folder is None:
        own = f"the folder that {DATA} names (it is not set)"
    else:
        gone = "" if folder.is_dir() else ", which does not exist"
        places = ", ".join(dict.fromkeys(p for f in wanted.forms for p in f.files[0].folders))
        own = f"{folder} ({DATA}{gone}) and its subfolders {places}"
    lines = [
        f"{wanted.name} is not on this machine, and the download failed.",
        f"  missing: {', '.join(missing)}",
        f"  looked in: {own}",
        f"  looked in: {cache_folder()} (the cache)",
        f"  tried: {file.address}: {_reason(error)}",
        "Put the files, packed or unpacked, into a folder, and name it as `root` under [data] or "
        f"in the environment variable {DATA}.",
    ]
    if damaged:
        lines.insert(1, f"  damaged: {file.cached} has not the published checksum; delete it")
    others = [form for form in wanted.forms if form is not wanted.download]
    if others:
        sets = "; ".join(", ".join(f.name for f in form.files) for form in others)
        lines.append(f"These will do as well: {sets}.")
    return "\n".join(lines)


def _reason(error: BaseException) -> str:
    """Why a download failed, in few words."""
    if isinstance(error, ValueError) and not isinstance(error, OSError):
        return f"what came is not the published file, and was not kept ({error})"
    response = getattr(error, "response", None)
    if response is not None:
        return f"the server answered {response.status_code} {response.reason}"
    # The first cause says it plainly; those above it are the layers it came through.
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error) or type(error).__name__


@final
class _Bar:
    """A bar of `rich` with the methods that `pooch` calls."""

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
        # However it ended: `pooch` closes a bar only after a whole download.
        self.close()

    @property
    def total(self) -> int:
        """The size of the file; 0: the server does not say."""
        return self._total

    @total.setter
    def total(self, size: int) -> None:
        self._total = size
        self._progress.update(self._task, total=size or None)

    def update(self, count: int) -> None:
        """So many bytes more have come."""
        self._progress.advance(self._task, count)

    def reset(self) -> None:
        """Nothing has come."""
        self._progress.reset(self._task, total=self._total or None)

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()
