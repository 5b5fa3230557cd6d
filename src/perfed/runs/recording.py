"""A run with a folder: begun, interrupted, resumed, and finished."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, final

import jax

from perfed.core.errors import BroadcastError, ConfigError, DataError, DivergedError
from perfed.core.trees import tree_bytes
from perfed.data import Federation
from perfed.evaluation import Evaluator
from perfed.runs import run_dir
from perfed.runs.callbacks import (
    CheckpointCallback,
    CheckpointClock,
    FolderCallback,
    Log,
    TrackerCallback,
)
from perfed.runs.checkpoint import Checkpoints
from perfed.runs.config import Config, without_none
from perfed.runs.files import read_json
from perfed.runs.local_run import local_run_for
from perfed.runs.trackers import Guarded, TrackerBackend, trackers_of
from perfed.simulation import Engine, Network, Simulator, hosts
from perfed.simulation.auto import memory_limit
from perfed.training import Callback, OnProgress, Progress, Result, Run, Trainer, TrainState


@final
@dataclass(frozen=True)
class Recording:
    """A run and the folder it is recorded in.

    Attributes:
        config: the run's configuration.
        folder: where it is recorded.
        engine: what runs it.
        trackers: where it is tracked.
        network: what its messages cost in time; None: not computed.
        data_seconds: how long it took to read and split the data.
        evaluator: what scores its clients; None: from the configuration, for clients that are here.
    """

    config: Config
    folder: Path
    engine: Engine
    trackers: tuple[TrackerBackend, ...] = ()
    network: Network | None = None
    data_seconds: float = 0.0
    evaluator: Evaluator | None = None

    @classmethod
    def begin(
        cls, config: Config, folder: Path, federation: Federation | None = None
    ) -> "Recording":
        """Make the folder; `run_dir.check_vacant` tells whether that is possible.

        Data that were read already can be given.
        """
        recording = cls.prepare(config, folder, federation)
        recording.begin_folder()
        return recording

    @classmethod
    def prepare(
        cls, config: Config, folder: Path, federation: Federation | None = None
    ) -> "Recording":
        """The same, before anything is written."""
        # Of several processes the first has the folder; what others keep lasts as long as they do.
        trackers = trackers_of(config.output.trackers) if hosts.is_first() else ()
        begun = time.perf_counter()
        engine = config.build(federation, folder / run_dir.KEPT if hosts.is_first() else None)
        spent = time.perf_counter() - begun
        _check_memory(config, engine)
        network = config.network_of(engine.experiment)
        if hosts.is_first():  # before training, so that an error costs nothing
            local_run_for(config.output.local, engine.experiment.federation)
        return cls(config, folder, engine, trackers, network, spent)

    def begin_folder(self) -> None:
        """Write what is known before the first round."""
        if not hosts.is_first():
            return
        if isinstance(self.engine, Simulator):
            (self.folder / run_dir.FEDERATION).unlink(missing_ok=True)
        run_dir.begin(self.folder, self.config.resolved(), self.engine.experiment.federation)

    @classmethod
    def resume(
        cls,
        folder: Path,
        config: Config | None = None,
        federation: Federation | None = None,
        interrupted: "InterruptedRun | None" = None,
    ) -> "Recording":
        """An interrupted run, by its own configuration or an equal one."""
        found, checksum, has_store = interrupted or read_interrupted(folder)
        config = config or found
        if config.engine.name == "auto" and has_store:
            # What clients keep is on the disk, whether it would fit in memory or not.
            streamed = config.engine.model_copy(update={"name": "streamed"})
            config = config.model_copy(update={"engine": streamed})
        recording = cls.prepare(config, folder, federation)
        if recording.engine.experiment.federation.checksum() != checksum:
            raise ConfigError(
                f"{folder}: the data are not those the run began with (their checksum differs); "
                "bring those back, or begin anew"
            )
        return recording

    def train(self, on_progress: OnProgress | None = None, log: Log = lambda _: None) -> Result:
        """From the last checkpoint, or from the beginning, to the end.

        An interruption leaves a checkpoint behind and is passed on.

        Args:
            on_progress: called as the run goes on.
            log: called with messages for the user.
        """
        recorded = _RecordedRun(self, log)
        with _lock([recorded]):
            recorded.find_checkpoint()
            try:
                (outcome,) = _train_together([recorded], on_progress)
            except KeyboardInterrupt:
                if recorded.checkpoints.rounds() and not run_dir.is_federated(self.folder):
                    log(f"go on with: perfed resume {self.folder}")
                raise
        if isinstance(outcome, DivergedError):
            raise outcome
        return outcome


def record_all(
    recordings: list[Recording],
    on_progress: Callable[[Recording, int, Progress], None],
    log: Log,
    on_end: Callable[[Recording, Exception | None], None],
) -> None:
    """Several runs, as `Recording.train` does one; those of the same program computed together.

    Args:
        recordings: the runs. They leave this list as they end, and with them what they hold.
        on_progress: called with the progress of one run, and how many run beside it.
        log: called with messages for the user.
        on_end: called for every run with its error, if it failed; others go on.
    """
    runs = []
    while recordings:
        recording = recordings.pop(0)
        runs.append(_RecordedRun(recording, _naming(recording.folder, log)))
    for group in _groups(runs, on_end):
        runs = []  # those of other groups are held by their groups alone
        show = partial(on_progress, group[0].recording, len(group))
        with _lock(group):
            outcomes = _train_together(group, show)
        for run, outcome in zip(group, outcomes, strict=True):
            on_end(run.recording, outcome if isinstance(outcome, DivergedError) else None)
        group.clear()


def _train_together(
    runs: Sequence["_RecordedRun"], on_progress: OnProgress | None
) -> list[Result | DivergedError]:
    """Runs of the same program, each into its own folder."""
    config, clock = runs[0].recording.config, CheckpointClock()
    spent = {"data": sum(run.recording.data_seconds for run in runs)}
    trainer = Trainer(config.train_options(keep_models=True), on_progress, spent)
    return trainer.train_all([run.trained(clock) for run in runs])


def _groups(
    runs: Sequence["_RecordedRun"], on_end: Callable[[Recording, Exception | None], None]
) -> list[list["_RecordedRun"]]:
    """Those that can be computed together, because they stand at the same round too."""
    groups: list[list[_RecordedRun]] = []
    for run in runs:
        place = next((group for group in groups if group[0].same_program(run)), None)
        if place is None:
            groups.append([run])
        else:
            place.append(run)
    standing: list[list[_RecordedRun]] = []
    for group in groups:
        # A kill may have come between the checkpoints of one round: take the last that all have.
        rounds = [found for run in group if (found := run.checkpoints.rounds())]
        common = max(set.intersection(*map(set, rounds)), default=None) if rounds else None
        by_round: dict[int, list[_RecordedRun]] = {}
        for run in group:
            try:
                run.find_checkpoint(common)
                by_round.setdefault(run.round, []).append(run)
            except (ConfigError, DataError) as error:
                on_end(run.recording, error)
        standing += by_round.values()
    return standing


@contextmanager
def _lock(runs: Sequence["_RecordedRun"]) -> Iterator[None]:
    """Nobody else is at work in these folders; of several processes the first has them."""
    with ExitStack() as stack:
        for run in runs if hosts.is_first() else ():
            stack.enter_context(run_dir.locked(run.recording.folder))
        yield


@final
class _RecordedRun:
    """One run, and where it was interrupted."""

    def __init__(self, recording: Recording, log: Log) -> None:
        output = recording.config.output
        self.recording, self._log = recording, log
        self.state: TrainState | None = None
        self.checkpoints = Checkpoints(
            recording.folder / run_dir.CHECKPOINTS,
            recording.config.resolved(),
            output.checkpoint_rounds,
            output.checkpoint_minutes,
            output.keep,
        )

    def find_checkpoint(self, at_most: int | None = None) -> None:
        """Where the run was interrupted, if it was."""
        own = self.checkpoints.latest(self._log, at_most) if hosts.is_first() else None
        contents = hosts.broadcast(own)
        self.state = None
        if contents is not None:
            engine = self.recording.engine
            self.state = self.checkpoints.read(contents, engine.init())
            if engine.run_store is not None:
                engine.run_store.resume_at(self.state.round)

    @property
    def round(self) -> int:
        """Where the run stands; -1: it has not been begun."""
        return -1 if self.state is None else self.state.round

    def same_program(self, other: "_RecordedRun") -> bool:
        """Whether the two runs can be computed together."""
        mine, its = self.recording, other.recording
        options = [(r.config.train_options(), r.config.engine) for r in (mine, its)]
        kept = [r.config.output.personal_models for r in (mine, its)]
        return (
            options[0] == options[1]
            and kept[0] == kept[1]
            and mine.engine.run_store is None
            and mine.engine.experiment.same_program(its.engine.experiment)
        )

    def trained(self, clock: CheckpointClock) -> Run:
        """The run as a trainer takes it, with callbacks that record it."""
        recording = self.recording
        config, folder, engine = recording.config, recording.folder, recording.engine
        for caution in engine.experiment.cautions:
            self._log(f"caution: {caution}")
        written = FolderCallback(config, folder)
        checkpoints = CheckpointCallback(self.checkpoints, engine.run_store, clock, self._log)
        # A run is finished when its files are written: until then it may need its checkpoints.
        callbacks: list[Callback] = [written, checkpoints]
        for tracker in recording.trackers:
            guarded = Guarded(tracker, self._log)
            callbacks.append(TrackerCallback(guarded, config.resolved(), folder, written))
        return Run(engine, recording.evaluator, callbacks, recording.network, self.state)


class InterruptedRun(NamedTuple):
    """The recorded configuration of an interrupted run.

    Attributes:
        config: its configuration.
        checksum: that of its data.
        has_store: whether what its clients keep is on the disk.
    """

    config: Config
    checksum: str
    has_store: bool


def read_interrupted(folder: Path) -> InterruptedRun:
    """The run in a folder. Of several processes the first has the folder, and tells the others."""
    facts: dict[str, Any] = {}
    if hosts.is_first():
        try:
            facts = _facts(folder)
        except (ConfigError, DataError, OSError, KeyError, TypeError) as error:
            facts["error"] = str(error)
    facts = json.loads(hosts.broadcast(json.dumps(facts).encode()) or b"{}")
    if "error" in facts:
        raise BroadcastError(facts["error"])
    config = Config.checked(without_none(facts["config"]))
    return InterruptedRun(config, facts["checksum"], facts["has_store"])


def _facts(folder: Path) -> dict[str, Any]:
    if not (folder / run_dir.CONFIG).is_file():
        raise ConfigError(f"{folder} is not a run folder: there is no {run_dir.CONFIG}")
    if (folder / run_dir.SUMMARY).exists():
        raise ConfigError(f"{folder}: this run is finished; its results are all there")
    if run_dir.is_federated(folder):
        raise ConfigError(
            f"{folder}: this run is a federation's; go on with it by `perfed serve --resume`"
        )
    return {
        "config": read_json(folder / run_dir.CONFIG),
        "checksum": read_json(folder / run_dir.ENVIRONMENT)["data_sha256"],
        "has_store": (folder / run_dir.KEPT).exists(),
    }


def _check_memory(config: Config, engine: Engine) -> None:
    """Raise, before anything is computed, if the personal models do not fit in memory."""
    clients = engine.experiment.federation.clients
    scored = min(clients, config.eval_clients or clients)
    wanted = scored * tree_bytes(engine.experiment.model_shape)
    if config.output.personal_models != "none" and wanted > memory_limit():
        raise ConfigError(
            f"eval_clients: the personal models of {scored:,} clients take "
            f"{wanted / 2**30:.0f} GiB of memory; score a sample by eval_clients, or set "
            'output.personal_models to "none"'
        )


def shared_facts(config: Config, federation: Federation) -> list[tuple[str, str]]:
    """What must be the same in all processes that compute a run together."""
    settings = config.resolved()
    # Where data are, and what is written, is each one's own business; not so what decides which
    # programs they meet in.
    settings["data"] = {k: v for k, v in settings["data"].items() if k not in ("root", "path")}
    settings["output"] = settings["output"]["personal_models"]
    settings["engine"] = settings["engine"]["chunk"]
    text = json.dumps(settings, sort_keys=True).encode()
    return [
        ("configuration", hashlib.sha256(text).hexdigest()),
        ("federation", federation.checksum()),
        ("version of perfed", version("perfed")),
        ("version of JAX", version("jax")),
        ("kind of device", jax.local_devices()[0].device_kind),
    ]


def recorded_config(folder: Path) -> Config:
    """The configuration of a run, from its folder."""
    return Config.checked(without_none(read_json(folder / run_dir.CONFIG)))


def _naming(folder: Path, log: Log) -> Log:
    return lambda line: log(f"{folder}: {line}")
