"""A run with a folder: begun, interrupted, taken up again, and finished."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

from perfed.data import Federation
from perfed.errors import ConfigError, DivergedError
from perfed.experiment import rundir
from perfed.experiment.checkpoint import Checkpoints
from perfed.experiment.config import Config
from perfed.experiment.files import read_json
from perfed.experiment.observers import Guarded, Observer, observers_of, values_of
from perfed.experiment.simulate import Course, Progress, Result, run_together
from perfed.simulation import Engine

Say = Callable[[str], None]


@final
@dataclass(frozen=True)
class Recording:
    """A run and the folder it is recorded in.

    Attributes:
        config: the run's configuration.
        folder: where it is recorded.
        engine: what runs it.
        observers: who is told of it.
        data_seconds: how long it took to read and split the data.
    """

    config: Config
    folder: Path
    engine: Engine
    observers: tuple[Observer, ...] = ()
    data_seconds: float = 0.0

    @classmethod
    def begin(
        cls, config: Config, folder: Path, federation: Federation | None = None
    ) -> "Recording":
        """Make the folder; `rundir.check_vacant` says whether one may.

        Data that were read already can be given.
        """
        recording = cls._built(config, folder, federation)
        recording.begin_folder()
        return recording

    @classmethod
    def _built(cls, config: Config, folder: Path, federation: Federation | None) -> "Recording":
        observers = observers_of(config.output.trackers)
        begun = time.perf_counter()
        engine = config.build(federation)
        return cls(config, folder, engine, observers, time.perf_counter() - begun)

    def begin_folder(self) -> None:
        """Write what is known before the first round."""
        rundir.begin(self.folder, self.config.resolved(), self.engine.setup.federation)

    @classmethod
    def take_up(
        cls, folder: Path, config: Config | None = None, federation: Federation | None = None
    ) -> "Recording":
        """A run that was left, by its own configuration or by one that says the same."""
        if not (folder / rundir.CONFIG).is_file():
            raise ConfigError(f"{folder} is no folder of a run: there is no {rundir.CONFIG}")
        if (folder / rundir.SUMMARY).exists():
            raise ConfigError(f"{folder}: this run is finished; its results are all there")
        config = config or Config.checked(_without_none(read_json(folder / rundir.CONFIG)))
        recording = cls._built(config, folder, federation)
        before = read_json(folder / rundir.ENVIRONMENT)["data_sha256"]
        if rundir.data_checksum(recording.engine.setup.federation) != before:
            raise ConfigError(
                f"{folder}: the data are not those the run began with (their checksum differs); "
                "bring those back, or begin anew"
            )
        return recording

    def run(
        self,
        on_progress: Callable[[Progress], None] | None = None,
        say: Say = lambda _: None,
        on_score: Callable[[Course], None] | None = None,
    ) -> Result:
        """From the last checkpoint, or from the beginning, to the end.

        An interruption leaves a checkpoint behind and is passed on.

        Args:
            on_progress: told how far the run has come.
            say: told what a user should know.
            on_score: told where the run stands whenever clients have been scored.
        """
        try:
            show = None if on_progress is None else lambda _, progress: on_progress(progress)
            (outcome,) = record([self], show, say, on_score)
        except KeyboardInterrupt:
            say(f"go on with: perfed resume {self.folder}")
            raise
        if isinstance(outcome, DivergedError):
            raise outcome
        return outcome


def record(
    recordings: Sequence[Recording],
    on_progress: Callable[[Sequence[int], Progress], None] | None = None,
    say: Say = lambda _: None,
    on_score: Callable[[Course], None] | None = None,
) -> list[Result | DivergedError]:
    """Several runs, as `Recording.run` does one: those that are alike are computed together.

    What comes back is in their order; a run that diverges does not stop the others. Progress is
    told with the numbers of the runs that make it together.
    """
    clerks = [_Clerk(recording, say, on_score) for recording in recordings]
    outcomes: dict[int, Result | DivergedError] = {}
    for together in _alike(clerks):
        show = None if on_progress is None else partial(on_progress, together)
        done = _record_together([clerks[i] for i in together], show)
        outcomes |= zip(together, done, strict=True)
    return [outcomes[i] for i in range(len(clerks))]


def _alike(clerks: Sequence["_Clerk"]) -> list[list[int]]:
    """The numbers of those that can be computed together."""
    groups: list[list[int]] = []
    for i, clerk in enumerate(clerks):
        place = next((g for g in groups if clerks[g[0]].alike(clerk)), None)
        if place is None:
            groups.append([i])
        else:
            place.append(i)
    return groups


def _record_together(
    clerks: Sequence["_Clerk"], on_progress: Callable[[Progress], None] | None
) -> list[Result | DivergedError]:
    config = clerks[0].recording.config
    try:
        for clerk in clerks:
            clerk.begin()
        try:
            outcomes = run_together(
                [clerk.recording.engine for clerk in clerks],
                config.rounds,
                config.scored_every,
                config.adapt_on,
                on_progress,
                [clerk.recording.config.network_of(clerk.recording.engine) for clerk in clerks],
                [clerk.course for clerk in clerks],
                lambda i, course: clerks[i].hear(course),
                config.output.personal_models != "none",
                {"data": sum(clerk.recording.data_seconds for clerk in clerks)},
            )
        except KeyboardInterrupt:
            for clerk in clerks:
                clerk.interrupted()
            raise
        for clerk, outcome in zip(clerks, outcomes, strict=True):
            if isinstance(outcome, Result):
                clerk.finish(outcome)
    finally:
        for clerk in clerks:
            clerk.close()
    return outcomes


@final
class _Clerk:
    """Keeps the books of one run: checkpoints, trackers, and its folder."""

    def __init__(
        self, recording: Recording, say: Say, on_score: Callable[[Course], None] | None
    ) -> None:
        config, output = recording.config, recording.config.output
        self.recording = recording
        self._say, self._on_score = say, on_score
        self._checkpoints = Checkpoints(
            recording.folder / rundir.CHECKPOINTS,
            config.resolved(),
            output.checkpoint_rounds,
            output.checkpoint_minutes,
            output.keep,
        )
        self.course = self._checkpoints.latest(recording.engine.start, say)
        self._scored = 0 if self.course is None else len(self.course.history)
        self._watching = [Guarded(observer, say) for observer in recording.observers]

    def alike(self, other: "_Clerk") -> bool:
        """Whether the two runs can be computed together."""
        mine, its = self.recording, other.recording
        where = [None if c.course is None else c.course.round for c in (self, other)]
        terms = [
            (
                r.config.rounds, r.config.eval_every, r.config.adapt_on, r.config.engine,
                r.config.output.personal_models,
            )
            for r in (mine, its)
        ]  # fmt: skip
        same = where[0] == where[1] and terms[0] == terms[1]
        return same and mine.engine.setup.alike(its.engine.setup)

    def begin(self) -> None:
        """Before the first round, or the next one."""
        config, folder = self.recording.config, self.recording.folder
        if self.course is not None:
            self._say(f"going on from round {self.course.round}")
        for observer in self._watching:
            observer.begin(config.resolved(), folder)
        if self.course is not None:
            self._tell(self.course)  # a kill may have come between the checkpoint and the trackers

    def hear(self, course: Course) -> None:
        """The run has come so far."""
        self.course = course
        self._checkpoints.offer(course)
        if len(course.history) > self._scored:
            self._scored = len(course.history)
            self._tell(course)
            if self._on_score is not None:
                self._on_score(course)

    def _tell(self, course: Course) -> None:
        values = values_of(course) if self._watching else {}
        for observer in self._watching:
            observer.score(course.history[-1].round, values)

    def interrupted(self) -> None:
        """Leave a checkpoint behind."""
        if self.course is not None:
            path = self._checkpoints.write(self.course)
            self._say(f"interrupted; round {self.course.round} is kept in {path}")

    def finish(self, result: Result) -> None:
        """Write what came of it."""
        config, folder = self.recording.config, self.recording.folder
        written = rundir.finish(folder, result, config.resolved(), config.output.personal_models)
        files = [folder / name for name in (rundir.CONFIG, rundir.ENVIRONMENT, *written)]
        for observer in self._watching:
            observer.end(values_of(result.course), files)

    def close(self) -> None:
        """The run is over, one way or another."""
        for observer in self._watching:
            observer.close()


def _without_none(value: Any) -> Any:
    """A resolved configuration as a file would say it: what is None is left out."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return value
