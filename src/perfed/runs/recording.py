"""A run with a folder: begun, interrupted, taken up again, and finished."""

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

from perfed.data import Federation
from perfed.core.errors import ConfigError, DataError, DivergedError, ToldError
from perfed.evaluation.evaluator import Scorer
from perfed.runs import run_dir
from perfed.runs.checkpoint import Checkpoints
from perfed.runs.config import Config
from perfed.runs.files import read_json
from perfed.runs.trackers import Guarded, Observer, observers_of, values_of
from perfed.training.trainer import Course, Progress, Result, run_together
from perfed.simulation import Engine, Network, Rounds, hosts
from perfed.simulation.auto import room
from perfed.simulation.client_store import KeptAside

Say = Callable[[str], None]


@final
@dataclass(frozen=True)
class Recording:
    """A run and the folder it is recorded in.

    Attributes:
        config: the run's configuration.
        folder: where it is recorded.
        engine: what runs it.
        scorer: what scores its clients; None: the engine.
        observers: who is told of it.
        network: what its messages cost in time; None: nobody asks.
        data_seconds: how long it took to read and split the data.
    """

    config: Config
    folder: Path
    engine: Rounds
    observers: tuple[Observer, ...] = ()
    network: Network | None = None
    data_seconds: float = 0.0
    scorer: Scorer | None = None

    @classmethod
    def begin(
        cls, config: Config, folder: Path, federation: Federation | None = None
    ) -> "Recording":
        """Make the folder; `run_dir.check_vacant` says whether one may.

        Data that were read already can be given.
        """
        recording = cls.planned(config, folder, federation)
        recording.begin_folder()
        return recording

    @classmethod
    def planned(
        cls, config: Config, folder: Path, federation: Federation | None = None
    ) -> "Recording":
        """The same, before anything is written."""
        # Of several processes the first has the folder; what others keep lasts as long as they do.
        observers = observers_of(config.output.trackers) if hosts.leads() else ()
        begun = time.perf_counter()
        engine = config.build(federation, folder / run_dir.KEPT if hosts.leads() else None)
        spent = time.perf_counter() - begun
        _check_room(config, engine)
        return cls(config, folder, engine, observers, config.network_of(engine), spent)

    def begin_folder(self) -> None:
        """Write what is known before the first round."""
        if not hosts.leads():
            return
        if isinstance(self.engine, Engine):
            (self.folder / run_dir.FEDERATION).unlink(missing_ok=True)
        run_dir.begin(self.folder, self.config.resolved(), self.engine.setup.federation)

    @classmethod
    def take_up(
        cls,
        folder: Path,
        config: Config | None = None,
        federation: Federation | None = None,
        left: "Left | None" = None,
    ) -> "Recording":
        """A run that was left, by its own configuration or by one that says the same."""
        found, before, aside = left or read_left(folder)
        config = config or found
        if config.engine.name == "auto" and aside:
            # What clients keep is on the disk, whether it would fit in memory or not.
            streamed = config.engine.model_copy(update={"name": "streamed"})
            config = config.model_copy(update={"engine": streamed})
        recording = cls.planned(config, folder, federation)
        if recording.engine.setup.federation.checksum() != before:
            raise ConfigError(
                f"{folder}: the data are not those the run began with (their checksum differs); "
                "bring those back, or begin anew"
            )
        return recording

    def run(
        self,
        on_progress: Callable[[Progress], None] | None = None,
        say: Say = lambda _: None,
    ) -> Result:
        """From the last checkpoint, or from the beginning, to the end.

        An interruption leaves a checkpoint behind and is passed on.

        Args:
            on_progress: told how far the run has come.
            say: told what a user should know.
        """
        clerk = _Clerk(self, say)
        with _holding([clerk]):
            clerk.find_checkpoint()
            try:
                (outcome,) = _record_together([clerk], on_progress)
            except KeyboardInterrupt:
                if clerk.checkpoints.rounds() and not run_dir.federated(self.folder):
                    say(f"go on with: perfed resume {self.folder}")
                raise
        if isinstance(outcome, DivergedError):
            raise outcome
        return outcome


def record(
    recordings: list[Recording],
    on_progress: Callable[[Recording, int, Progress], None],
    say: Say,
    on_end: Callable[[Recording, Exception | None], None],
) -> None:
    """Several runs, as `Recording.run` does one: those that are alike are computed together.

    Args:
        recordings: the runs. They leave this list as they end, and with them what they hold.
        on_progress: told of one run how far it has come, with how many beside it.
        say: told what a user should know.
        on_end: told of every run whether it has failed; a run that fails does not stop others.
    """
    clerks = []
    while recordings:
        recording = recordings.pop(0)
        clerks.append(_Clerk(recording, _naming(recording.folder, say)))
    for group in _alike(clerks, on_end):
        clerks = []  # those of other groups are held by their groups alone
        show = partial(on_progress, group[0].recording, len(group))
        with _holding(group):
            outcomes = _record_together(group, show)
        for clerk, outcome in zip(group, outcomes, strict=True):
            on_end(clerk.recording, outcome if isinstance(outcome, DivergedError) else None)
        group.clear()


def _alike(
    clerks: Sequence["_Clerk"], on_end: Callable[[Recording, Exception | None], None]
) -> list[list["_Clerk"]]:
    """Those that can be computed together, because they stand at the same round too."""
    groups: list[list[_Clerk]] = []
    for clerk in clerks:
        place = next((group for group in groups if group[0].alike(clerk)), None)
        if place is None:
            groups.append([clerk])
        else:
            place.append(clerk)
    standing: list[list[_Clerk]] = []
    for group in groups:
        # A kill may have come between the checkpoints of one round: take the last that all have.
        rounds = [found for clerk in group if (found := clerk.checkpoints.rounds())]
        common = max(set.intersection(*map(set, rounds)), default=None) if rounds else None
        by_round: dict[int, list[_Clerk]] = {}
        for clerk in group:
            try:
                clerk.find_checkpoint(common)
                by_round.setdefault(clerk.round, []).append(clerk)
            except (ConfigError, DataError) as error:
                on_end(clerk.recording, error)
        standing += by_round.values()
    return standing


@contextmanager
def _holding(clerks: Sequence["_Clerk"]) -> Iterator[None]:
    """Nobody else is at work in these folders; of several processes the first has them."""
    with ExitStack() as stack:
        for clerk in clerks if hosts.leads() else ():
            stack.enter_context(run_dir.held(clerk.recording.folder))
        yield


def _record_together(
    clerks: Sequence["_Clerk"], on_progress: Callable[[Progress], None] | None
) -> list[Result | DivergedError]:
    config = clerks[0].recording.config
    courses = [clerk.course for clerk in clerks if clerk.course is not None]
    scorers = [scorer for clerk in clerks if (scorer := clerk.recording.scorer) is not None]

    def hear(courses: dict[int, Course]) -> None:
        for i, course in courses.items():
            clerks[i].course = course
        heard = [clerks[i] for i in courses]
        due = bool(hosts.agreed(any(clerk.checkpoint_due() for clerk in heard)))
        for clerk in heard:
            clerk.hear(due)

    try:
        for clerk in clerks:
            clerk.begin()
        outcomes = run_together(
            [clerk.recording.engine for clerk in clerks],
            config.rounds,
            config.scored_every,
            config.adapt_on,
            on_progress,
            [clerk.recording.network for clerk in clerks],
            courses or None,
            hear,
            config.output.personal_models != "none",
            {"data": sum(clerk.recording.data_seconds for clerk in clerks)},
            config.score_training,
            scorers or None,
            config.eval_clients,
        )
        for clerk, outcome in zip(clerks, outcomes, strict=True):
            if isinstance(outcome, Result):
                clerk.finish(outcome)
            else:
                clerk.course = None  # it leads nowhere
    except BaseException as error:
        for clerk in clerks:
            clerk.leave(error)
        raise
    finally:
        for clerk in clerks:
            clerk.close()
    return outcomes


@final
class _Clerk:
    """Keeps the books of one run: checkpoints, trackers, and its folder."""

    def __init__(self, recording: Recording, say: Say) -> None:
        output = recording.config.output
        self.recording = recording
        self.course: Course | None = None
        self.checkpoints = Checkpoints(
            recording.folder / run_dir.CHECKPOINTS,
            recording.config.resolved(),
            output.checkpoint_rounds,
            output.checkpoint_minutes,
            output.keep,
        )
        self._say, self._scored, self._finished = say, 0, False
        self._watching = [Guarded(observer, say) for observer in recording.observers]

    def find_checkpoint(self, at_most: int | None = None) -> None:
        """Where an earlier run was left, if it was."""
        own = self.checkpoints.latest(self._say, at_most) if hosts.leads() else None
        contents = hosts.told(own)
        self.course = None
        if contents is not None:
            self.course = self.checkpoints.course(contents, self.recording.engine.start())
            if self._aside is not None:
                self._aside.take_up(self.course.round)
        self._scored = 0 if self.course is None else len(self.course.history)

    @property
    def round(self) -> int:
        """Where the run stands; -1: it has not been begun."""
        return -1 if self.course is None else self.course.round

    def alike(self, other: "_Clerk") -> bool:
        """Whether the two runs can be computed together."""
        mine, its = self.recording, other.recording
        terms = [
            (
                r.config.rounds, r.config.eval_every, r.config.adapt_on, r.config.engine,
                r.config.output.personal_models, r.config.score_training, r.config.eval_clients,
            )
            for r in (mine, its)
        ]  # fmt: skip
        return (
            terms[0] == terms[1]
            and mine.engine.aside is None
            and mine.engine.setup.alike(its.engine.setup)
        )

    def begin(self) -> None:
        """Before the first round, or the next one."""
        config, folder = self.recording.config, self.recording.folder
        self.checkpoints.begin()
        if self.course is not None:
            self._say(f"going on from round {self.course.round}")
        if caution := self.recording.engine.setup.federation.caution:
            self._say(f"caution: {caution}")
        for observer in self._watching:
            observer.begin(config.resolved(), folder)
        if self.course is not None:
            self._tell(self.course)  # a kill may have come between the checkpoint and the trackers

    def hear(self, due: bool) -> None:
        """The run has come further; if it is due, write a checkpoint."""
        assert self.course is not None
        if due:
            self._checkpoint(self.course)
            if self._aside is not None:
                self._aside.after_checkpoint(self.course.round)
        if len(self.course.history) > self._scored:
            self._scored = len(self.course.history)
            self._tell(self.course)

    def checkpoint_due(self) -> bool:
        """Whether it is time for one."""
        asked = self._aside is not None and self._aside.checkpoint_due()
        return asked or self.checkpoints.due(self.round)

    @property
    def _aside(self) -> KeptAside | None:
        return self.recording.engine.aside

    def _checkpoint(self, course: Course) -> Path:
        if self._aside is not None:
            self._aside.before_checkpoint()
        return self.checkpoints.write(course, hosts.leads())

    def _tell(self, course: Course) -> None:
        values = values_of(course) if self._watching else {}
        for observer in self._watching:
            observer.score(course.history[-1].round, values)

    def leave(self, error: BaseException) -> None:
        """Something has ended the run before its time: leave a checkpoint behind, if one can."""
        if self.course is None or self._finished or isinstance(error, DivergedError):
            return
        if hosts.several():
            return  # others may stand elsewhere: the last one that all agreed on is good
        try:
            path = self._checkpoint(self.course)
        except OSError as problem:
            self._say(f"no checkpoint could be written: {problem}")
            return
        self._say(f"interrupted; round {self.course.round} is kept in {path}")

    def finish(self, result: Result) -> None:
        """Write what came of it."""
        config, folder = self.recording.config, self.recording.folder
        personal = config.output.personal_models
        models = result.history[-1].models
        if personal != "none" and models is None:  # scored before the run was taken up again
            models = result.personal_models(result.scorer.clients)
        written = []
        if hosts.leads():
            written = run_dir.finish(folder, result, config.resolved(), personal, models)
        self._finished = True
        if self._aside is not None:
            self._aside.clear()
        files = [folder / name for name in (run_dir.CONFIG, run_dir.ENVIRONMENT, *written)]
        for observer in self._watching:
            observer.end(values_of(result.course), files)

    def close(self) -> None:
        """The run is over, one way or another."""
        for observer in self._watching:
            observer.close()


class Left(NamedTuple):
    """What a run that was left says of itself.

    Attributes:
        config: its configuration.
        data: the checksum of its data.
        aside: whether what its clients keep is on the disk.
    """

    config: Config
    data: str
    aside: bool


def read_left(folder: Path) -> Left:
    """The run in a folder. Of several processes the first has the folder, and tells the others."""
    said: dict[str, Any] = {}
    if hosts.leads():
        try:
            said = _found(folder)
        except (ConfigError, DataError, OSError, KeyError, TypeError) as error:
            said["fault"] = str(error)
    said = json.loads(hosts.told(json.dumps(said).encode()) or b"{}")
    if "fault" in said:
        raise ToldError(said["fault"])
    return Left(Config.checked(without_none(said["config"])), said["data"], said["aside"])


def _found(folder: Path) -> dict[str, Any]:
    if not (folder / run_dir.CONFIG).is_file():
        raise ConfigError(f"{folder} is no folder of a run: there is no {run_dir.CONFIG}")
    if (folder / run_dir.SUMMARY).exists():
        raise ConfigError(f"{folder}: this run is finished; its results are all there")
    if run_dir.federated(folder):
        raise ConfigError(
            f"{folder}: this run is a federation's; go on with it by `perfed serve --resume`"
        )
    return {
        "config": read_json(folder / run_dir.CONFIG),
        "data": read_json(folder / run_dir.ENVIRONMENT)["data_sha256"],
        "aside": (folder / run_dir.KEPT).exists(),
    }


def _check_room(config: Config, engine: Rounds) -> None:
    """Before anything is computed: the personal models that are asked for fit in the memory."""
    clients = engine.setup.federation.clients
    scored = min(clients, config.eval_clients or clients)
    leaves = jax.tree.leaves(engine.setup.model_shape())
    wanted = scored * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    if config.output.personal_models != "none" and wanted > room():
        raise ConfigError(
            f"eval_clients: the personal models of {scored:,} clients take "
            f"{wanted / 2**30:.0f} GiB of memory; score a sample by eval_clients, or set "
            'output.personal_models to "none"'
        )


def in_common(config: Config, federation: Federation) -> list[tuple[str, str]]:
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


def _naming(folder: Path, say: Say) -> Say:
    return lambda line: say(f"{folder}: {line}")


def recorded_config(folder: Path) -> Config:
    """The configuration of a run, from its folder."""
    return Config.checked(without_none(read_json(folder / run_dir.CONFIG)))


def without_none(value: Any) -> Any:
    """A resolved configuration as a file would say it: what is None is left out."""
    if isinstance(value, dict):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    return value
