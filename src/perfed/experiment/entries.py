"""Many runs, each in a folder of its own: what is finished is kept, what was left is taken up."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perfed.data import Federation
from perfed.errors import ConfigError, DataError, DivergedError, FieldError
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
    data: dict[str, Federation] = {}

    def fail(entry: Entry, error: Exception) -> None:
        failures[entry.name] = str(error)
        say(f"{entry.name} failed: {error}")

    begun: list[Entry] = []
    recordings: list[Recording] = []
    for entry in entries:
        if (entry.folder / rundir.SUMMARY).exists():
            continue
        try:
            config = Config.checked(entry.values)
            key = json.dumps([config.data.model_dump(mode="json"), config.validation])
            if key not in data:
                data[key] = config.scored(config.build_federation())
            if (entry.folder / rundir.CONFIG).exists():
                recordings.append(Recording.take_up(entry.folder, config, data[key]))
            else:
                recordings.append(Recording.begin(config, entry.folder, data[key]))
            begun.append(entry)
        except (ConfigError, DataError, FieldError) as error:
            fail(entry, error)

    def show(together: Sequence[int], progress: Progress) -> None:
        more = f" and {len(together) - 1} more" if len(together) > 1 else ""
        on_progress(f"{begun[together[0]].name}{more}", progress)

    outcomes = record(recordings, show, say)
    for entry, outcome in zip(begun, outcomes, strict=True):
        if isinstance(outcome, DivergedError):
            fail(entry, outcome)
    return failures
