"""A run with a folder: begun, interrupted, taken up again, and finished."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from perfed.errors import ConfigError
from perfed.experiment import rundir
from perfed.experiment.checkpoint import Checkpoints
from perfed.experiment.config import Config
from perfed.experiment.files import read_json
from perfed.experiment.observers import Guarded, Observer, observers_of, values_of
from perfed.experiment.simulate import Course, Progress, Result
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
    """

    config: Config
    folder: Path
    engine: Engine
    observers: tuple[Observer, ...] = ()

    @classmethod
    def begin(cls, config: Config, folder: Path) -> "Recording":
        """Read the data, and make the folder; `rundir.check_vacant` says whether one may."""
        observers = observers_of(config.output.trackers)
        recording = cls(config, folder, config.build(), observers)
        recording.begin_folder()
        return recording

    def begin_folder(self) -> None:
        """Write what is known before the first round."""
        rundir.begin(self.folder, self.config.resolved(), self.engine.setup.federation)

    @classmethod
    def take_up(cls, folder: Path, config: Config | None = None) -> "Recording":
        """A run that was left, by its own configuration or by one that says the same."""
        if not (folder / rundir.CONFIG).is_file():
            raise ConfigError(f"{folder} is no folder of a run: there is no {rundir.CONFIG}")
        if (folder / rundir.SUMMARY).exists():
            raise ConfigError(f"{folder}: this run is finished; its results are all there")
        config = config or Config.checked(_without_none(read_json(folder / rundir.CONFIG)))
        observers = observers_of(config.output.trackers)
        engine = config.build()
        before = read_json(folder / rundir.ENVIRONMENT)["data_sha256"]
        if rundir.data_checksum(engine.setup.federation) != before:
            raise ConfigError(
                f"{folder}: the data are not those the run began with (their checksum differs); "
                "bring those back, or begin anew"
            )
        return cls(config, folder, engine, observers)

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
        output = self.config.output
        checkpoints = Checkpoints(
            self.folder / rundir.CHECKPOINTS,
            self.config.resolved(),
            output.checkpoint_rounds,
            output.checkpoint_minutes,
            output.keep,
        )
        course = checkpoints.latest(self.engine.start(), say)
        if course is not None:
            say(f"going on from round {course.round}")
        watching = [Guarded(observer, say) for observer in self.observers]

        def tell(course: Course) -> None:
            values = values_of(course) if watching else {}
            for observer in watching:
                observer.score(course.history[-1].round, values)

        latest: list[Course] = []
        scored = 0 if course is None else len(course.history)

        def on_course(course: Course) -> None:
            nonlocal scored
            latest[:] = [course]
            checkpoints.offer(course)
            if len(course.history) > scored:
                scored = len(course.history)
                tell(course)
                if on_score is not None:
                    on_score(course)

        try:
            for observer in watching:
                observer.begin(self.config.resolved(), self.folder)
            if course is not None:
                tell(course)  # a kill may have come between the checkpoint and the trackers
            try:
                result = self.config.run(self.engine, on_progress, course, on_course)
            except KeyboardInterrupt:
                if latest:
                    path = checkpoints.write(latest[0])
                    say(f"interrupted; round {latest[0].round} is kept in {path}")
                    say(f"go on with: perfed resume {self.folder}")
                raise
            resolved = self.config.resolved()
            written = rundir.finish(self.folder, result, resolved, output.personal_models)
            names = (rundir.CONFIG, rundir.ENVIRONMENT, *written)
            for observer in watching:
                observer.end(values_of(result.course), [self.folder / name for name in names])
        finally:
            for observer in watching:
                observer.close()
        return result


def _without_none(value: Any) -> Any:
    """A resolved configuration as a file would say it: what is None is left out."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return value
