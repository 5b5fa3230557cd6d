"""Several seeds and several settings: every point recorded in a folder of its own.

Where there is something to choose between, points are compared on a validation part of the clients'
training data; only what was chosen is then trained on all of it and scored on the held-out data.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import numpy as np

from perfed.core.errors import ConfigError, DataError, FieldError, require
from perfed.evaluation.evaluator import ModelKind
from perfed.runs import run_dir
from perfed.runs.batch import Data, Entry, data_of, record_batch
from perfed.runs.config import Config, overridden, read_toml
from perfed.runs.files import read_json, write_whole
from perfed.runs.local_run import LOCAL, read_local_run
from perfed.runs.statistics import over_seeds
from perfed.runs.summary import summary_bytes, with_local_run
from perfed.training import Progress

CHOICE = "sweep.json"

# What a run is scored on: a validation part of the training data, or held-out data.
Place = Literal["validation", "test"]


@final
@dataclass(frozen=True)
class GridPoint:
    """One combination of settings.

    Attributes:
        method: which of the methods compared it is of.
        settings: what it sets, as `section.key=value`.
        values: the whole configuration, as in a file.
        kind: the model kind whose score it is compared by.
    """

    method: str
    settings: tuple[str, ...]
    values: dict[str, Any]
    kind: ModelKind = "personalized"

    @property
    def label(self) -> str:
        """What it is called in tables and folders."""
        return ", ".join((self.method, *self.settings))


class Outcome(NamedTuple):
    """What came of a point.

    Attributes:
        point: the point.
        scores: each seed's score (the mean over clients after the last round); empty if it failed.
        failure: why it failed, if it did.
        tested: whether the scores are on held-out data; if not, on the validation part.
    """

    point: GridPoint
    scores: tuple[float, ...]
    failure: str | None
    tested: bool

    @property
    def mean(self) -> float:
        """Over seeds."""
        return sum(self.scores) / len(self.scores) if self.scores else math.nan


def grid_points(
    path: Path, methods: Sequence[Path], grid: Sequence[str], settings: Sequence[str] = ()
) -> list[GridPoint]:
    """All combinations, checked.

    Args:
        path: the configuration they share.
        methods: files whose sections replace its own; none: its own method only.
        grid: `section.key=value,value,...` each.
        settings: `section.key=value` for all.
    """
    base = overridden(read_toml(path), settings)
    axes = [_axis(text) for text in grid]
    own_keys = {"validation": "use --validation", "seed": "use --seeds for how many there are"}
    for key, instead in own_keys.items():
        if key in base or any(axis[0].partition("=")[0].strip() == key for axis in axes):
            raise ConfigError(f"{key}: a sweep sets it itself; leave it out ({instead})")
    if base.get("output", {}).get("local") is not None:
        raise ConfigError(
            "output.local: a sweep compares with its own runs of Local; leave it out, and name a "
            "file of Local in --methods"
        )
    found: list[GridPoint] = []
    files: Sequence[Path | None] = list(methods) or [None]
    for file in files:
        values = base if file is None else base | read_toml(file)
        name = values.get("method", {}).get("name", "") if file is None else file.stem
        for chosen in product(*axes):
            whole = overridden(values, chosen)
            Config.checked(whole)
            found.append(GridPoint(str(name), tuple(chosen), whole))
    labels = [point.label for point in found]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"two points are both called {label}; name files or values apart")
    return found


def _axis(text: str) -> list[str]:
    key, equals, values = text.partition("=")
    if not equals or not values:
        raise ConfigError(f"--grid {text}: write it as section.key=value,value")
    return [f"{key}={value}" for value in values.split(",")]


@final
@dataclass(frozen=True)
class Sweep:
    """Points and seeds, and the folder they are recorded in.

    Attributes:
        points: the points.
        seeds: how many seeds, 0, 1, 2, ....
        folder: where all is recorded.
        validation: the part of the training data that points are compared on.
        tuning_seeds: with how many seeds they are compared; None: with all.
        always_validate: whether a method with one point is scored on the validation part too.
    """

    points: tuple[GridPoint, ...]
    seeds: int
    folder: Path
    validation: float = 0.25
    tuning_seeds: int | None = None
    always_validate: bool = False

    def __post_init__(self) -> None:
        good = 0 < self.validation < 1
        require(good, "--validation", self.validation, "must be between 0 and 1")

    def run(
        self,
        on_progress: Callable[[str, Progress], None],
        say: Callable[[str], None],
        data: Data | None = None,
    ) -> list[Outcome]:
        """Train all that is not finished yet; a failure is logged, and does not stop the others.

        Args:
            on_progress: called with a run's name and its progress.
            say: called with messages for the user.
            data: what has been read already (`data_of`).
        """
        data = {} if data is None else data
        self._begin()
        methods = list(dict.fromkeys(point.method for point in self.points))
        of_method = {m: [p for p in self.points if p.method == m] for m in methods}
        least = 0 if self.always_validate else 1
        compared = [p for m in methods if len(of_method[m]) > least for p in of_method[m]]
        outcomes = self._outcomes(compared, False, on_progress, say, data)
        chosen = []
        for points in of_method.values():
            if len(points) == 1 and not self.always_validate:
                chosen += points
            elif good := [o for o in outcomes if o.point in points and o.scores]:
                # The headline, accuracy or R2, is better when larger.
                chosen.append(max(good, key=lambda o: o.mean).point)
        tested = self._outcomes(chosen, True, on_progress, say, data)
        self._compare_with_local([outcome for outcome in tested if outcome.scores])
        return outcomes + tested

    def _compare_with_local(self, outcomes: Sequence[Outcome]) -> None:
        """Write into the summaries who is worse off than with Local, if that was swept too."""
        points = [outcome.point for outcome in outcomes]
        alone_outcomes = [o for o in outcomes if o.point.values["method"]["name"] == LOCAL]
        if not alone_outcomes:
            return
        # As in a report: of several files of Local, the strongest one.
        local = max(alone_outcomes, key=lambda outcome: outcome.mean).point
        for seed in range(self.seeds):
            alone = read_local_run(str(self.folder_of(local, "test", seed)))
            for point in points:
                folder = self.folder_of(point, "test", seed)
                checksum = read_json(folder / run_dir.ENVIRONMENT)["data_sha256"]
                # A method's file may have data of its own.
                if point is not local and checksum == alone.checksum:
                    summary = with_local_run(read_json(folder / run_dir.SUMMARY), alone)
                    write_whole(folder / run_dir.SUMMARY, summary_bytes(summary))

    def folder_of(self, point: GridPoint, place: Place, seed: int) -> Path:
        """Where one run of a point is recorded."""
        return self.folder / place / _folder_name(point.label) / f"seed-{seed}"

    def _begin(self) -> None:
        """Write what the sweep is of, so that another sweep does not go on in its folder."""
        what = {
            "points": [[point.label, point.values] for point in self.points],
            "validation": self.validation,
        }
        path = self.folder / CHOICE
        if path.exists() and read_json(path) != json.loads(json.dumps(what)):
            raise ConfigError(
                f"{self.folder} holds another sweep or benchmark, or other settings of it; "
                "name another folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(what, indent=1).encode())

    def _on_validation(self, point: GridPoint, data: Data) -> dict[str, Any]:
        """A point's configuration, scored on the validation part."""
        values = point.values | {"validation": self.validation}
        try:
            config = Config.checked(values)
            clients = data_of(config, data).clients
        except (ConfigError, DataError, FieldError):
            return values  # the run itself will say so
        # Clients with too few rows for a validation part are not there: the cohort is the others.
        return values | ({"cohort": clients} if config.cohort > clients else {})

    def _outcomes(
        self,
        points: Sequence[GridPoint],
        tested: bool,
        on_progress: Callable[[str, Progress], None],
        say: Callable[[str], None],
        data: Data,
    ) -> list[Outcome]:
        """The outcomes of some points; those that share a program are computed together."""
        place: Place = "test" if tested else "validation"
        seeds = self.seeds if tested else (self.tuning_seeds or self.seeds)
        wanted = [
            Entry(
                f"{point.label} ({place}, seed {seed})",
                self.folder_of(point, place, seed),
                (point.values if tested else self._on_validation(point, data)) | {"seed": seed},
            )
            for point in points
            for seed in range(seeds)
        ]
        failures = record_batch(wanted, on_progress, say, data)
        found = []
        for i, point in enumerate(points):
            mine = wanted[i * seeds : (i + 1) * seeds]
            lost = [failures[e.name] for e in mine if e.name in failures]
            scores = () if lost else tuple(_score(entry.folder, point.kind) for entry in mine)
            if any(map(math.isnan, scores)):
                lost, scores = [f"no client has a score on its {place} data"], ()
            found.append(Outcome(point, scores, lost[0] if lost else None, tested))
        return found


def _score(folder: Path, kind: ModelKind) -> float:
    summary = read_json(folder / run_dir.SUMMARY)
    headline = next(iter(summary[kind]))
    mean = summary[kind][headline]["mean"]
    return math.nan if mean is None else float(mean)


class SweepLine(NamedTuple):
    """One line of a sweep's table.

    Attributes:
        label: the point.
        validation: mean and half of its interval on the validation part; None: not compared.
        test: the same on held-out data; None: it was not chosen.
        failure: why it failed, if it did.
    """

    label: str
    validation: tuple[float, float] | None
    test: tuple[float, float] | None
    failure: str | None


def sweep_lines(outcomes: Sequence[Outcome]) -> list[SweepLine]:
    """What a sweep came to, one line per point."""
    found: dict[str, SweepLine] = {}
    for outcome in outcomes:
        label = outcome.point.label
        line = found.get(label, SweepLine(label, None, None, None))
        if outcome.failure is not None:
            line = line._replace(failure=outcome.failure)
        else:
            spread = over_seeds(np.array(outcome.scores))
            pair = (float(spread.mean), float(spread.half))
            line = line._replace(test=pair) if outcome.tested else line._replace(validation=pair)
        found[label] = line
    return list(found.values())


def _folder_name(label: str) -> str:
    plain = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in label.replace(", ", "_"))
    if len(plain) <= 100 and plain == label.replace(", ", "_"):
        return plain
    # What was left out or replaced may be all that tells two points apart.
    return f"{plain[:100]}-{sha256(label.encode()).hexdigest()[:8]}"
