"""Many runs, each in its own folder: finished ones are kept, interrupted ones are resumed."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perfed.core.errors import ConfigError, DataError, FieldError
from perfed.data import Federation
from perfed.runs import run_dir
from perfed.runs.config import Config
from perfed.runs.recording import Recording, record_all
from perfed.training import Progress

# What was read, or why reading failed, by the settings of its source.
Data = dict[str, Federation | Exception]


class Entry(NamedTuple):
    """One of many runs.

    Attributes:
        name: what it is called.
        folder: where it is recorded.
        values: its configuration, as a file would log it.
    """

    name: str
    folder: Path
    values: dict[str, Any]

    @property
    def finished(self) -> bool:
        """Whether its results are all there."""
        return (self.folder / run_dir.SUMMARY).exists()


def record_batch(
    entries: Sequence[Entry],
    on_progress: Callable[[str, Progress], None],
    log: Callable[[str], None],
    data: Data | None = None,
) -> dict[str, str]:
    """Record all that are not finished; why some failed, by name.

    Entries on the same data share them in memory, and those that are alike are computed together.

    Args:
        entries: the runs.
        on_progress: called with the progress of one of them, its name, and how many run beside it.
        log: called with messages for the user.
        data: what has been read already (`data_of`).
    """
    failures: dict[str, str] = {}
    data = {} if data is None else data
    names: dict[Path, str] = {}
    recordings: list[Recording] = []

    def fail(name: str, error: Exception) -> None:
        failures[name] = str(error)
        log(f"{name} failed: {error}")

    for entry in entries:
        if entry.finished:
            continue
        try:
            config = Config.checked(entry.values)
            read = data_of(config, data)
            if (entry.folder / run_dir.CONFIG).exists():
                recordings.append(Recording.resume(entry.folder, config, read))
            else:
                recordings.append(Recording.begin(config, entry.folder, read))
            names[entry.folder] = entry.name
        except (ConfigError, DataError, FieldError) as error:
            fail(entry.name, error)

    def show(recording: Recording, together: int, progress: Progress) -> None:
        more = f" and {together - 1} more" if together > 1 else ""
        on_progress(f"{names[recording.folder]}{more}", progress)

    def end(recording: Recording, error: Exception | None) -> None:
        if error is not None:
            fail(names[recording.folder], error)

    record_all(recordings, show, log, end)
    return failures


def data_of(config: Config, data: Data) -> Federation:
    """A run's data: read once, as is the reason why reading failed."""
    key = json.dumps([config.data.model_dump(mode="json"), config.validation])
    if key not in data:
        try:
            data[key] = config.scored(config.build_federation())
        except (ConfigError, DataError) as error:
            data[key] = error
    found = data[key]
    if isinstance(found, Exception):
        raise found
    return found
