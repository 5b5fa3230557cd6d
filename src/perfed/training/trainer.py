"""A whole simulated run: rounds, scores on the way, and a result to hold."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, final, get_args

import jax
import numpy as np
from jaxtyping import Float, Int, Shaped

from perfed.core.errors import DataError, DivergedError, require, require_choice, require_count
from perfed.core.objective import Model, Params, Precision, Sampling, Task
from perfed.data import Federation
from perfed.evaluation.evaluator import (
    AdaptOn,
    Evaluation,
    Evaluator,
    ModelKind,
    Scorer,
    Scores,
    Values,
)
from perfed.methods import Method
from perfed.pipeline.codecs import Codec, Float32
from perfed.runs.saved_model import named_outputs, scaled
from perfed.simulation import (
    Engine,
    Network,
    Rounds,
    Setup,
    State,
    Traffic,
    Weighting,
    engine_for,
    hosts,
)
from perfed.simulation.engine import Clients

# Rounds run in blocks of about this many seconds, so that progress shows and Ctrl-C is heard.
_BLOCK_SECONDS = 0.5


class Progress(NamedTuple):
    """How far a run has come.

    Attributes:
        round: rounds done.
        rounds: rounds in all.
        loss: the mean held-out loss of the personalized models when last scored.
    """

    round: int
    rounds: int
    loss: float


class Costs(NamedTuple):
    """What a run has cost after 0, 1, 2, ... rounds.

    Attributes:
        uplink_bytes: all that clients have sent.
        downlink_bytes: all that the server has sent, one message to each client of a cohort.
        seconds: the time it would have taken over the network; None: none was given.
    """

    uplink_bytes: Int[np.ndarray, " rounds+1"]
    downlink_bytes: Int[np.ndarray, " rounds+1"]
    seconds: Float[np.ndarray, " rounds+1"] | None

    @classmethod
    def of(cls, traffic: Traffic, round_seconds: Float[np.ndarray, " rounds"] | None) -> "Costs":
        """Running sums."""

        def summed(values: np.ndarray) -> np.ndarray:
            return np.concatenate([[0], np.cumsum(values)])

        taken = (traffic.cohort >= 0).sum(axis=1)
        return cls(
            summed(traffic.uplink.sum(axis=1, dtype=np.int64)),
            summed(traffic.downlink.astype(np.int64) * taken),
            None if round_seconds is None else summed(round_seconds),
        )


@final
@dataclass(frozen=True)
class Course:
    """Where a run stands, and all it has come by on the way: what it takes to go on.

    Attributes:
        state: the state.
        history: the scores so far.
        sent: the messages so far, in parts.
        marks: how many seconds in each of the scores were taken.
        timing: what the time was spent on.
    """

    state: State
    history: tuple[Evaluation, ...]
    sent: tuple[Traffic, ...]
    marks: tuple[float, ...]
    timing: dict[str, float]

    @property
    def traffic(self) -> Traffic:
        """The messages so far."""
        return Traffic.joined(self.sent)

    @property
    def round(self) -> int:
        """How many rounds are done."""
        return int(self.state.round)


@final
@dataclass(frozen=True)
class Result:
    """What a run ends with.

    Attributes:
        method: the method that ran.
        rounds: how many rounds it ran.
        seed: its seed.
        seconds: how long it took, compiling and scoring included.
        course: the state it ended in, and the scores and messages on the way.
        scorer: what scored the clients.
        round_seconds: how long each round would have taken over the network; None: none was given.
    """

    method: Method
    rounds: int
    seed: int
    seconds: float
    course: Course
    scorer: Scorer
    round_seconds: Float[np.ndarray, " rounds"] | None = None

    @property
    def history(self) -> tuple[Evaluation, ...]:
        """The scores of all clients, from round 0 to the last."""
        return self.course.history

    @property
    def state(self) -> State:
        """The last state: the global model and what clients keep."""
        return self.course.state

    @property
    def traffic(self) -> Traffic:
        """The bytes of every message of every round."""
        return self.course.traffic

    @property
    def costs(self) -> Costs:
        """Bytes and simulated time after 0, 1, 2, ... rounds."""
        return Costs.of(self.traffic, self.round_seconds)

    @property
    def scores(self) -> dict[ModelKind, Scores]:
        """The scores of all clients after the last round."""
        return self.history[-1].scores

    @property
    def iterate(self) -> Params | None:
        """The cohort's mean iterate in the last round (Per-FedAvg, Remark 4.7), if it was sent."""
        return self.state.iterate

    @property
    def global_model(self) -> Params:
        """The global model's parameters."""
        return self.state.w

    @property
    def setup(self) -> Setup:
        """What ran."""
        return self.scorer.setup

    @property
    def scored(self) -> Federation:
        """The data of the clients that were scored."""
        return self.scorer.scored()

    def personal_models(self, clients: Clients | None = None) -> Params:
        """Clients' own parameters, stacked in the order asked for (None: all clients)."""
        if not isinstance(self.scorer, Evaluator):
            raise DataError("personal models stay with their clients, who have them in files")
        return self.scorer.personal_models(self.state, clients)

    def personal_model(self, client: int) -> Params:
        """One client's own parameters."""
        models = self.personal_models([client])
        return jax.tree.map(lambda leaf: leaf[0], models)

    def predict(
        self, client: int, x: Shaped[Any, "examples ..."], kind: ModelKind = "personalized"
    ) -> np.ndarray:
        """What a client's model says of inputs, given as they were before any scaling.

        Args:
            client: whose model, and whose scaling.
            x: inputs, along the first axis.
            kind: the client's own model, or the `global` one.

        Returns:
            The names of the most likely classes, or the targets of a regression, in their own unit.
        """
        require_choice("kind", kind, get_args(ModelKind))
        setup = self.setup
        federation, x = setup.federation, np.asarray(x)
        last = federation.clients - 1
        require(0 <= client <= last, "client", client, f"must be between 0 and {last}")
        shape = federation.example_shape
        allowed = f"must be some inputs of shape {shape}"
        require(x.shape[1:] == shape, "x", f"an array of shape {x.shape}", allowed)
        w = self.personal_model(client) if kind == "personalized" else self.state.w
        return named_outputs(
            setup.task.model, w, scaled(x, federation.scaling, client), federation.labels,
            federation.target,
        )  # fmt: skip


def simulate(
    federation: Federation,
    model: Model,
    method: Method,
    *,
    rounds: int,
    cohort: int,
    seed: int = 0,
    eval_every: int | None = None,
    eval_clients: int | None = None,
    adapt_on: AdaptOn = "train",
    l2: float = 0.0,
    precision: Precision = "float32",
    weighting: Weighting = "uniform",
    sampling: Sampling = "replacement",
    codec: Codec | None = None,
    downlink: Codec | None = None,
    network: Network | None = None,
    devices: int | None = None,
    chunk: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Train a method on a federation and score every client.

    Args:
        federation: all clients' data.
        model: what is trained; anything with `init` and `apply`.
        method: how.
        rounds: global rounds.
        cohort: clients a round.
        seed: the seed of everything random in the run.
        eval_every: score every so many rounds; None: only before the first and after the last.
        eval_clients: score a sample of so many clients, always the same; None: all.
        adapt_on: the data personal models are made from (`Evaluator`).
        l2: the weight of the penalty (l2/2) |w|^2 in every client's loss.
        precision: of matrix products (`Task`).
        weighting: how the cohort is averaged (`Setup`).
        sampling: how batches are drawn (`Objective.batches`).
        codec: how clients' changes are sent; None: as float32.
        downlink: how the server's model is sent; None: as float32.
        network: what messages and computations cost in time; None: nobody asks.
        devices: how many devices; None: all.
        chunk: at most so many clients at once on a device; None: chosen by memory.
        on_progress: called as the run goes on.
    """
    setup = Setup(
        federation,
        Task(model, l2, precision=precision),
        method,
        cohort,
        seed,
        weighting,
        sampling,
        codec or Float32(),
        downlink or Float32(),
    )
    engine = engine_for(setup, devices, chunk)
    return run(
        engine, rounds, eval_every, adapt_on, on_progress, network, eval_clients=eval_clients
    )


def run(
    engine: Rounds,
    rounds: int,
    eval_every: int | None = None,
    adapt_on: AdaptOn = "train",
    on_progress: Callable[[Progress], None] | None = None,
    network: Network | None = None,
    course: Course | None = None,
    on_course: Callable[[Course], None] | None = None,
    keep_models: bool = False,
    spent: dict[str, float] | None = None,
    score_training: bool = False,
    scorer: Scorer | None = None,
    eval_clients: int | None = None,
) -> Result:
    """Train on a given engine and score every client, as `simulate` does.

    Args:
        engine: what runs the rounds.
        rounds: global rounds in all.
        eval_every: as for `simulate`.
        adapt_on: as for `simulate`.
        on_progress: as for `simulate`.
        network: as for `simulate`.
        course: where an earlier run was left; None: from the beginning.
        on_course: told where the run stands, again and again; what it is told last, even when
            interrupted, is where the run can be taken up.
        keep_models: whether the last evaluation is to hold the personal models that it scored.
        spent: what time was spent on before.
        score_training: whether training data are scored too.
        scorer: what scores the clients; None: the engine, which must then run them here.
        eval_clients: as for `simulate`.
    """

    def tell(courses: dict[int, Course]) -> None:
        if on_course is not None:
            on_course(courses[0])

    (outcome,) = run_together(
        [engine], rounds, eval_every, adapt_on, on_progress, [network],
        None if course is None else [course], tell, keep_models, spent,
        score_training, None if scorer is None else [scorer], eval_clients,
    )  # fmt: skip
    if isinstance(outcome, DivergedError):
        raise outcome
    return outcome


def run_together(
    engines: Sequence[Rounds],
    rounds: int,
    eval_every: int | None = None,
    adapt_on: AdaptOn = "train",
    on_progress: Callable[[Progress], None] | None = None,
    networks: Sequence[Network | None] | None = None,
    courses: Sequence[Course] | None = None,
    on_courses: Callable[[dict[int, Course]], None] | None = None,
    keep_models: bool = False,
    spent: dict[str, float] | None = None,
    score_training: bool = False,
    scorers: Sequence[Scorer] | None = None,
    eval_clients: int | None = None,
) -> list[Result | DivergedError]:
    """Several runs at once, by the same programs; one that diverges does not stop the others.

    Args:
        engines: one a run. Several must be alike except for numbers (`Setup.alike`).
        rounds: as for `run`.
        eval_every: as for `run`.
        adapt_on: as for `run`.
        on_progress: as for `run`; the loss is the mean over the runs.
        networks: one a run.
        courses: where each was left, all after as many rounds; None: from the beginning.
        on_courses: as for `run`, with all runs that go on, by number.
        keep_models: as for `run`.
        spent: as for `run`, by all of them; of this as of all time, each run has its share.
        score_training: as for `run`.
        scorers: as for `run`, one a run.
        eval_clients: as for `run`.
    """
    require_count("rounds", rounds)
    networks = networks or [None] * len(engines)
    for engine, network in zip(engines, networks, strict=True):
        what = "runs can be computed together if they differ in nothing but numbers"
        require(engines[0].setup.alike(engine.setup), "engines", engine.setup.method, what)
        if network is not None:
            network.check(engine.setup.federation.clients)
    if eval_every is not None:
        require_count("eval_every", eval_every)
    if courses is not None:
        at_once = {course.round for course in courses}
        require(len(at_once) == 1, "courses", sorted(at_once), "must all stand at one round")
    if scorers is None:
        here = [engine for engine in engines if isinstance(engine, Engine)]
        assert len(here) == len(engines), "clients that are elsewhere need a scorer of their own"
        scorers = [Evaluator(e, adapt_on, keep_models, score_training, eval_clients) for e in here]
    crew, watch = _Crew(engines, scorers), _Watch(len(engines), courses, spent or {})
    failed: dict[int, DivergedError] = {}
    going: dict[int, Course] = {}  # the others

    def kept(outcomes: dict[int, _Kind | DivergedError]) -> dict[int, _Kind]:
        """What came of the runs that go on."""
        good = {}
        for i, outcome in outcomes.items():
            if isinstance(outcome, DivergedError):
                failed[i] = outcome
                going.pop(i, None)
            else:
                good[i] = outcome
        return good

    def report() -> None:
        if not going:
            return
        if on_progress is not None:
            losses = [_mean(c.history[-1].scores["personalized"].loss) for c in going.values()]
            on_progress(Progress(at(), rounds, float(np.mean(losses))))
        if on_courses is not None:
            with watch.timing("recording"):
                on_courses(dict(going))

    def at() -> int:
        return next(iter(going.values())).round

    if courses is not None:
        going.update(enumerate(courses))
    else:
        states = {i: engine.start() for i, engine in enumerate(engines)}
        with watch.timing("scoring"):
            first = crew.score(states)
        for i, evaluation in kept(first).items():
            nothing = engines[i].nothing_sent()
            marks = (watch.seconds(i),)
            going[i] = Course(states[i], (evaluation,), (nothing,), marks, watch.parts(i))
    report()
    # Clients elsewhere compile on their own, and nobody here knows when; and a round with them is
    # not to be lost because others were to follow it.
    elsewhere = not isinstance(engines[0], Engine)
    block, compiled = 1, elsewhere
    while going and (done := at()) < rounds:
        stop = min(rounds, done - done % eval_every + eval_every) if eval_every else rounds
        step = hosts.agreed(min(block, stop - done))
        with watch.timing("rounds" if compiled else "compiling") as lasted:
            advanced = crew.record({i: course.state for i, course in going.items()}, step)
        # The first block compiles, so it says little about the pace: grow from it with care.
        pace = lasted() / step
        if not elsewhere:
            block = max(1, min(int(_BLOCK_SECONDS / pace), 10 * block))
        compiled = True
        for i, (state, sent) in kept(advanced).items():
            # Models are those of the last scores only: by now they are of an earlier state.
            history = (*going[i].history[:-1], replace(going[i].history[-1], models=None))
            sent_so_far = (*going[i].sent, sent)
            going[i] = Course(state, history, sent_so_far, going[i].marks, watch.parts(i))
        if done + step == stop:
            with watch.timing("scoring"):
                scored = crew.score({i: course.state for i, course in going.items()})
            for i, evaluation in kept(scored).items():
                going[i] = replace(
                    going[i],
                    history=(*going[i].history, evaluation),
                    marks=(*going[i].marks, watch.seconds(i)),
                    timing=watch.parts(i),
                )
        report()

    def result(i: int, course: Course) -> Result:
        setup, network = engines[i].setup, networks[i]
        lasted = None if network is None else _round_seconds(network, setup, course.traffic)
        return Result(
            setup.method, rounds, setup.seed, watch.seconds(i), course, scorers[i], lasted
        )

    return [failed[i] if i in failed else result(i, going[i]) for i in range(len(engines))]


_Kind = TypeVar("_Kind")


def _mean(values: Values) -> float:
    """Over the clients that have been scored; those elsewhere may have been away."""
    defined = values[np.isfinite(values)]
    return float(defined.mean()) if len(defined) else float("nan")


@final
@dataclass(frozen=True)
class _Crew:
    """Runs that are alike, by the programs of the first of them."""

    engines: Sequence[Rounds]
    scorers: Sequence[Scorer]

    def record(
        self, states: dict[int, State], rounds: int
    ) -> dict[int, tuple[State, Traffic] | DivergedError]:
        setups = [self.engines[i].setup for i in states]
        outcomes = self.engines[0].record_all(setups, list(states.values()), rounds)
        jax.block_until_ready([o for o in outcomes if not isinstance(o, DivergedError)])
        return dict(zip(states, outcomes, strict=True))

    def score(self, states: dict[int, State]) -> dict[int, Evaluation | DivergedError]:
        if not states:
            return {}
        scorers = [self.scorers[i] for i in states]
        scored = self.scorers[0].score_all(scorers, list(states.values()))
        return dict(zip(states, scored, strict=True))


@final
class _Watch:
    """How long runs have taken, and what it was spent on; each has a like share of the time."""

    def __init__(
        self, runs: int, courses: Sequence[Course] | None, spent: dict[str, float]
    ) -> None:
        self._runs, self._spent = runs, dict(spent)
        self._before = [(0.0, dict[str, float]())] * runs
        if courses is not None:
            self._before = [(course.marks[-1], course.timing) for course in courses]
        self._begun = time.perf_counter()

    def seconds(self, run: int) -> float:
        return self._before[run][0] + (time.perf_counter() - self._begun) / self._runs

    def parts(self, run: int) -> dict[str, float]:
        before = self._before[run][1]
        return {
            part: before.get(part, 0.0) + self._spent.get(part, 0.0) / self._runs
            for part in {**before, **self._spent}
        }

    @contextmanager
    def timing(self, part: str) -> Iterator[Callable[[], float]]:
        begun = time.perf_counter()
        yield lambda: time.perf_counter() - begun
        self._spent[part] = self._spent.get(part, 0.0) + time.perf_counter() - begun


def _round_seconds(
    network: Network, setup: Setup, traffic: Traffic
) -> Float[np.ndarray, " rounds"]:
    sizes = np.asarray(setup.federation.train.size)
    different, which = np.unique(sizes, return_inverse=True)
    gradients = np.array([setup.method.gradients(int(size)) for size in different])[which]
    return network.seconds(traffic, gradients, setup.seed, first_round=0)
