"""Trackers: send a run to TensorBoard or MLflow while it goes on.

Their packages are extras, imported by the tracker that needs them and by nothing else.
"""

import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any, Literal, final

from perfed.core.errors import ConfigError
from perfed.runs.files import read_json, write_whole
from perfed.training import Costs, TrainState

Tracker = Literal["tensorboard", "mlflow"]

_EVENTS, _RUN = "tensorboard", "mlflow.json"  # files in a run's folder
# MLflow's limits: those of old servers, too. The whole configuration is a file of the run.
_KEY_LENGTH, _VALUE_LENGTH, _PARAMS_A_CALL = 250, 500, 100


class TrackerBackend(ABC):
    """Told of a run from its beginning to its end; one that was left is begun again."""

    @abstractmethod
    def begin(self, config: dict[str, Any], folder: Path) -> None:
        """The run begins, or goes on if `folder` is that of a run begun earlier."""

    @abstractmethod
    def score(self, round: int, values: Mapping[str, float]) -> None:
        """Clients have been scored; after a resume a round may come again."""

    @abstractmethod
    def end(self, values: Mapping[str, float], files: Sequence[Path]) -> None:
        """The run is finished: the last values, and the files that came of it."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more comes, be the run finished, interrupted or failed."""


@final
class TensorBoard(TrackerBackend):
    """Event files in `FOLDER/tensorboard`."""

    def __init__(self) -> None:
        self._writers = _import("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._events = _import("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries = _import("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._writer: Any = None
        self._resumed = False
        self._round, self._told = 0, frozenset[str]()

    def begin(self, config: dict[str, Any], folder: Path) -> None:
        """Open one more event file."""
        path = folder / _EVENTS
        self._resumed = any(path.glob("events.*"))
        self._writer = self._writers.EventFileWriter(str(path))

    def score(self, round: int, values: Mapping[str, float]) -> None:
        """Write the values, in place of those of an earlier part of the run from here on."""
        if self._resumed:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(round, session_log=start)
            self._resumed = False
        value = self._summaries.Summary.Value
        written = [value(tag=name, simple_value=number) for name, number in values.items()]
        self._write(round, summary=self._summaries.Summary(value=written))
        self._writer.flush()  # a killed run has logged all that its checkpoint has
        self._round, self._told = round, frozenset(values)

    def end(self, values: Mapping[str, float], files: Sequence[Path]) -> None:
        """Write those of the last values that the last score did not have."""
        self.score(self._round, {k: v for k, v in values.items() if k not in self._told})

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, round: int, **contents: Any) -> None:
        event = self._events.Event(wall_time=time.time(), step=round, **contents)
        self._writer.add_event(event)


@final
class MLflow(TrackerBackend):
    """A run at the user's tracking URI; its id is in `FOLDER/mlflow.json`.

    Its experiment is `output.experiment`, or MLFLOW_EXPERIMENT_NAME, or `perfed`.
    """

    def __init__(self) -> None:
        self._mlflow = _import("mlflow", "mlflow")
        self._client: Any = None
        self._folder, self._run = Path(), ""
        self._logged: dict[str, int] = {}  # the last round of each metric

    def begin(self, config: dict[str, Any], folder: Path) -> None:
        """Make a run, or go on with the one that was made."""
        self._client, self._folder = self._mlflow.MlflowClient(), folder
        if (folder / _RUN).exists():
            run = str(read_json(folder / _RUN)["run_id"])
            known = self._client.get_run(run).data.metrics
            histories = {name: self._client.get_metric_history(run, name) for name in known}
            self._logged = {name: max(m.step for m in h) for name, h in histories.items()}
            self._client.update_run(run, status="RUNNING")
            self._run = run
            return
        named = config.get("output", {}).get("experiment")
        name = named or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "perfed"
        made = self._client.create_run(self._experiment(name), run_name=folder.absolute().name)
        self._run = made.info.run_id
        write_whole(folder / _RUN, json.dumps({"run_id": self._run}).encode())
        params = [
            self._mlflow.entities.Param(key[:_KEY_LENGTH], str(value)[:_VALUE_LENGTH])
            for key, value in _flat(config).items()
        ]
        for i in range(0, len(params), _PARAMS_A_CALL):
            some = params[i : i + _PARAMS_A_CALL]
            self._client.log_batch(self._run, params=some, synchronous=True)

    def score(self, round: int, values: Mapping[str, float]) -> None:
        """Log the values that this round does not have yet."""
        new = {k: v for k, v in values.items() if round > self._logged.get(k, -1)}
        if new:
            now, metric = int(1000 * time.time()), self._mlflow.entities.Metric
            metrics = [metric(name, number, now, round) for name, number in new.items()]
            self._client.log_batch(self._run, metrics=metrics, synchronous=True)
            self._logged |= dict.fromkeys(new, round)

    def end(self, values: Mapping[str, float], files: Sequence[Path]) -> None:
        """Log the last values and the files."""
        self.score(max(self._logged.values(), default=0), values)
        for file in files:
            inside = file.parent != self._folder and file.is_relative_to(self._folder)
            path = file.parent.relative_to(self._folder).as_posix() if inside else None
            self._client.log_artifact(self._run, str(file), path)
        self._client.set_terminated(self._run, "FINISHED")
        self._run = ""

    def close(self) -> None:
        """A run that has not ended has failed, until it is resumed."""
        if self._run:
            self._client.set_terminated(self._run, "FAILED")

    def _experiment(self, name: str) -> str:
        if (found := self._client.get_experiment_by_name(name)) is None:
            # Another run may make it at this very moment.
            with suppress(self._mlflow.MlflowException):
                return str(self._client.create_experiment(name))
            found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id)


@final
class Guarded(TrackerBackend):
    """A tracker whose failure does not end the run: it is reported once, then left alone."""

    def __init__(self, tracker: TrackerBackend, say: Callable[[str], None]) -> None:
        self._tracker, self._say = tracker, say
        self._failed = False

    def begin(self, config: dict[str, Any], folder: Path) -> None:
        """Pass it on."""
        self._try(lambda: self._tracker.begin(config, folder))

    def score(self, round: int, values: Mapping[str, float]) -> None:
        """Pass it on."""
        self._try(lambda: self._tracker.score(round, values))

    def end(self, values: Mapping[str, float], files: Sequence[Path]) -> None:
        """Pass it on."""
        self._try(lambda: self._tracker.end(values, files))

    def close(self) -> None:
        """Pass it on, even to one that has failed: it may have something open."""
        if self._failed:
            with suppress(Exception):
                self._tracker.close()
        self._try(self._tracker.close)

    def _try(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:
            self._failed = True
            who, what = type(self._tracker).__name__, type(error).__name__
            self._say(f"{who} failed ({what}: {error}); the run goes on without it")


TRACKERS: dict[str, type[TrackerBackend]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def trackers_of(names: Sequence[str]) -> tuple[TrackerBackend, ...]:
    """The trackers of these names; a `ConfigError` names the extra that is missing."""
    return tuple(TRACKERS[name]() for name in dict.fromkeys(names))


def forget(folder: Path) -> None:
    """Before a new run in a folder: an earlier one's events and MLflow run are not its own."""
    (folder / _RUN).unlink(missing_ok=True)
    shutil.rmtree(folder / _EVENTS, ignore_errors=True)


def tracked_values(state: TrainState) -> dict[str, float]:
    """The last scores as `KIND/SCORE/SUMMARY`, and what the run had cost by then.

    What is not defined, such as the R2 of clients whose targets are all alike, is left out.
    """
    last = state.history[-1]
    values = {
        f"{kind}/{score}/{name}": number
        for kind, scores in last.scores.items()
        for score, summary in scores.summary().items()
        for name, number in summary._asdict().items()
        if name != "clients" and isfinite(number)
    }
    costs = Costs.of(state.traffic, None)
    values["uplink_bytes"] = float(costs.uplink_bytes[last.round])
    values["downlink_bytes"] = float(costs.downlink_bytes[last.round])
    return values | {"seconds": state.marks[-1]}


def _import(module: str, extra: Tracker) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f'output.trackers: "{extra}" needs a package that is not installed ({error}); '
            f'install it by: pip install "perfed[{extra}]"'
        ) from None


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`, without what is None."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat[prefix + key] = value
    return flat
