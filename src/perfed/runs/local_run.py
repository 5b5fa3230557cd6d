"""The folder of the Local run that another run is compared with."""

from pathlib import Path

from perfed.core.errors import ConfigError
from perfed.data import Federation
from perfed.runs import run_dir
from perfed.runs.files import read_json
from perfed.runs.summary import LocalRun

LOCAL = "local"


def read_local_run(folder: str) -> LocalRun:
    """The Local run in a folder.

    Raises:
        ConfigError: there is none, or it is not finished.
    """
    path, setting = Path(folder), f'output.local = "{folder}"'
    if not (path / run_dir.SUMMARY).is_file():
        raise ConfigError(f"{setting}: must be the folder of a finished run")
    try:
        method = read_json(path / run_dir.CONFIG)["method"]["name"]
        checksum = str(read_json(path / run_dir.ENVIRONMENT)["data_sha256"])
        found = LocalRun.of_summary(folder, read_json(path / run_dir.SUMMARY), checksum)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{setting}: cannot be read as a run: {error!r}") from None
    if method != LOCAL:
        raise ConfigError(f'{setting}: is a run of {method}; name one of method.name = "{LOCAL}"')
    return found


def local_run_for(folder: str | None, federation: Federation) -> LocalRun | None:
    """The Local run of `output.local`, which must be on the same data; None: none is named."""
    if folder is None:
        return None
    found = read_local_run(folder)
    if found.checksum != federation.checksum():
        raise ConfigError(
            f'output.local = "{folder}": is a run on other data (their checksum differs); train '
            "Local with the same [data] and validation"
        )
    return found
