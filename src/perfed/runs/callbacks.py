"""Callbacks of a run with a folder: checkpoints, trackers, and the files of its results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from perfed.core.errors import DivergedError
from perfed.runs import run_dir
from perfed.runs.checkpoint import Checkpoints
from perfed.runs.config import Config
from perfed.runs.local_run import local_run_for
from perfed.runs.trackers import Guarded, tracked_values
from perfed.simulation import hosts
from perfed.simulation.client_store import RunStore
from perfed.training import Callback, Result, TrainState

Log = Callable[[str], None]


@final
class CheckpointClock:
    """Decides, for all runs that are computed together, whether one is to be written now."""

    def __init__(self) -> None:
        self._asked: list[Callable[[], bool]] = []
        self._at: tuple[int, bool] | None = None

    def add(self, due: Callable[[], bool]) -> None:
        """One more run, with a function that tells whether it needs a checkpoint."""
        self._asked.append(due)

    def due(self, round: int) -> bool:
        """Whether any run needs one; decided once per round."""
        if self._at is None or self._at[0] != round:
            wanted = [due() for due in self._asked]
            self._at = (round, bool(hosts.agree(any(wanted))))
        return self._at[1]


@final
class CheckpointCallback(Callback):
    """Writes a checkpoint every so often, and one when a run is interrupted."""

    def __init__(
        self, checkpoints: Checkpoints, store: RunStore | None, clock: CheckpointClock, log: Log
    ) -> None:
        self._checkpoints, self._store, self._clock, self._log = checkpoints, store, clock, log
        self._round, self._finished = -1, False
        clock.add(self._due)

    def on_start(self, state: TrainState | None) -> None:
        """Minutes count from now."""
        self._checkpoints.begin()
        if state is not None:
            self._log(f"going on from round {state.round}")

    def on_rounds_end(self, state: TrainState) -> None:
        """Write one, if it is time."""
        self._round = state.round
        if self._clock.due(state.round):
            self._write(state)
            if self._store is not None:
                self._store.after_checkpoint(state.round)

    def on_end(self, result: Result) -> None:
        """What clients keep is not needed any more."""
        self._finished = True
        if self._store is not None:
            self._store.clear()

    def on_failure(self, state: TrainState | None, error: BaseException) -> None:
        """Something has ended the run before its time: leave a checkpoint behind, if one can."""
        if state is None or self._finished or isinstance(error, DivergedError):
            return
        if hosts.is_multihost():
            return  # others may stand elsewhere: the last one that all agreed on is good
        try:
            path = self._write(state)
        except OSError as problem:
            self._log(f"no checkpoint could be written: {problem}")
            return
        self._log(f"interrupted; round {state.round} is saved in {path}")

    def _due(self) -> bool:
        asked = self._store is not None and self._store.checkpoint_due()
        return asked or self._checkpoints.due(self._round)

    def _write(self, state: TrainState) -> Path:
        if self._store is not None:
            self._store.before_checkpoint()
        return self._checkpoints.write(state, hosts.is_first())


@final
class FolderCallback(Callback):
    """Writes what came of a run into its folder."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config, self._folder = config, folder
        self.files: list[Path] = []

    def on_end(self, result: Result) -> None:
        """Write the results; the summary last, so that its presence means that all are there."""
        config = self._config
        personal = config.output.personal_models
        models = result.history[-1].models
        if personal != "none" and models is None:  # scored before the run was resumed
            models = result.personal_models(result.evaluator.clients)
        written = []
        if hosts.is_first():
            local = local_run_for(config.output.local, result.experiment.federation)
            settings = config.resolved()
            written = run_dir.finish(self._folder, result, settings, personal, models, local)
        names = (run_dir.CONFIG, run_dir.ENVIRONMENT, *written)
        self.files = [self._folder / name for name in names]


@final
class TrackerCallback(Callback):
    """Passes a run on to a tracker, whose failure does not end it."""

    def __init__(
        self, tracker: Guarded, config: dict[str, Any], folder: Path, files: FolderCallback
    ) -> None:
        self._tracker, self._config, self._folder, self._files = tracker, config, folder, files

    def on_start(self, state: TrainState | None) -> None:
        """Begin, or begin again."""
        self._tracker.begin(self._config, self._folder)
        if state is not None:
            self.on_evaluate(state)  # a kill may have come between the checkpoint and this

    def on_evaluate(self, state: TrainState) -> None:
        """The last scores."""
        self._tracker.score(state.history[-1].round, tracked_values(state))

    def on_end(self, result: Result) -> None:
        """The last values, and the files."""
        self._tracker.end(tracked_values(result.train_state), self._files.files)

    def on_close(self) -> None:
        """Nothing more comes."""
        self._tracker.close()
