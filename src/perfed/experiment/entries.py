"""Many runs, each in a folder of its own: what is finished is kept, what was left is taken up."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perfed.data import Federation
from perfed.errors import ConfigError, DataError, FieldError
from perfed.experiment import rundir
from perfed.experiment.config import Config
from perfed.experiment.recording import Recording, record
from perfed.experiment.simulate import Progress


class Entry(NamedTuple):
    """One of many runs.

    Attributes:
        name: what it is called.
        folder: where it is recorded.
        values: its configuration, as a file would say it.
    """

    name: str
    folder: Path
    values: dict[str, Any]


def record_entries(
    entries: Sequence[Entry],
    on_progress: Callable[[str, Progress], None],
    say: Callable[[str], None],
) -> dict[str, str]:
    """Record all that are not finished; why some failed, by name.

    Entries on the same data share them in memory, and those that are alike are computed together.
    """
    failures: dict[str, str] = {}
    data: dict[str, Federation | Exception] = {}
    names: dict[Path, str] = {}
    recordings: list[Recording] = []

    def fail(name: str, error: Exception) -> None:
        failures[name] = str(error)
        say(f"{name} failed: {error}")

    for entry in entries:
        if (entry.folder / rundir.SUMMARY).exists():
            continue
        try:
            config = Config.checked(entry.values)
            read = _data_of(config, data)
            if (entry.folder / rundir.CONFIG).exists():
                recordings.append(Recording.take_up(entry.folder, config, read))
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

    record(recordings, show, say, end)
    return failures


def _data_of(config: Config, data: dict[str, Federation | Exception]) -> Federation:
    """What is read once is kept, and so is why it could not be read."""
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
