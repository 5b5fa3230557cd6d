"""A whole simulated run: rounds, scores on the way, and a result to hold."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, final, get_args

import jax
import numpy as np
from jaxtyping import Float, Int, Shaped

from perfed.codecs import Codec, Float32
from perfed.data import Federation
from perfed.errors import DivergedError, require, require_choice, require_count
from perfed.evaluation import AdaptOn, Evaluation, Evaluator, ModelKind, Scores
from perfed.experiment.saved import named_outputs, scaled
from perfed.methods import Method
from perfed.objective import Model, Params, Sampling, Task
from perfed.simulation import Engine, Network, Setup, State, Traffic, Vectorised, Weighting
from perfed.simulation.engine import OnAllRuns, Recorded

# Rounds run in blocks of about this many seconds, so that progress shows and Ctrl-C is heard.
_BLOCK_SECONDS = 0.5


class Progress(NamedTuple):
    """How far a run has come.

    Attributes:
        round: rounds done.
        rounds: rounds in all.
        loss: the mean held-out loss of the personalised models when last scored.
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

        cohort = traffic.cohort.shape[1]
        return cls(
            summed(traffic.uplink.sum(axis=1, dtype=np.int64)),
            summed(traffic.downlink.astype(np.int64) * cohort),
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
        evaluator: what scored the clients.
        round_seconds: how long each round would have taken over the network; None: none was given.
    """

    method: Method
    rounds: int
    seed: int
    seconds: float
    course: Course
    evaluator: Evaluator
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

    def personal_model(self, client: int) -> Params:
        """One client's own parameters."""
        models = self.evaluator.personal_models(self.state, [client])
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
        setup = self.evaluator.engine.setup
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
    adapt_on: AdaptOn = "train",
    l2: float = 0.0,
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
        adapt_on: the data personal models are made from (`Evaluator`).
        l2: the weight of the penalty (l2/2) |w|^2 in every client's loss.
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
        Task(model, l2),
        method,
        cohort,
        seed,
        weighting,
        sampling,
        codec or Float32(),
        downlink or Float32(),
    )
    engine = Vectorised(setup, devices, chunk)
    return run(engine, rounds, eval_every, adapt_on, on_progress, network)


def run(
    engine: Engine,
    rounds: int,
    eval_every: int | None = None,
    adapt_on: AdaptOn = "train",
    on_progress: Callable[[Progress], None] | None = None,
    network: Network | None = None,
    course: Course | None = None,
    on_course: Callable[[Course], None] | None = None,
    keep_models: bool = False,
    spent: dict[str, float] | None = None,
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
    """

    def tell(_: int, course: Course) -> None:
        if on_course is not None:
            on_course(course)

    (outcome,) = run_together(
        [engine], rounds, eval_every, adapt_on, on_progress, [network], [course], tell,
        keep_models, spent,
    )  # fmt: skip
    if isinstance(outcome, DivergedError):
        raise outcome
    return outcome


def run_together(
    engines: Sequence[Engine],
    rounds: int,
    eval_every: int | None = None,
    adapt_on: AdaptOn = "train",
    on_progress: Callable[[Progress], None] | None = None,
    networks: Sequence[Network | None] | None = None,
    courses: Sequence[Course | None] | None = None,
    on_course: Callable[[int, Course], None] | None = None,
    keep_models: bool = False,
    spent: dict[str, float] | None = None,
) -> list[Result | DivergedError]:
    """Several runs at once, by one compiled program; one that diverges does not stop the others.

    Args:
        engines: one a run. Several must be alike except for numbers (`Setup.alike`).
        rounds: as for `run`.
        eval_every: as for `run`.
        adapt_on: as for `run`.
        on_progress: as for `run`; the loss is the mean over the runs.
        networks: one a run.
        courses: where each was left, all after as many rounds; None: from the beginning.
        on_course: as for `run`, with the number of the run.
        keep_models: as for `run`.
        spent: as for `run`.
    """
    require_count("rounds", rounds)
    networks = networks or [None] * len(engines)
    for engine, network in zip(engines, networks, strict=True):
        if network is not None:
            network.check(engine.setup.federation.clients)
    if eval_every is not None:
        require_count("eval_every", eval_every)
    crew = _Crew([Evaluator(engine, adapt_on, keep_models) for engine in engines])
    begun = [course for course in courses or [] if course is not None]
    watch = _Watch(begun[0] if begun else None, spent or {})
    failed: dict[int, DivergedError] = {}

    def kept(outcomes: Sequence[_Kind | DivergedError]) -> dict[int, _Kind]:
        """What came of the runs that go on."""
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, DivergedError):
                failed.setdefault(i, outcome)
        return {i: o for i, o in enumerate(outcomes) if not isinstance(o, DivergedError)}

    def report() -> None:
        going = {i: course for i, course in enumerate(now) if i not in failed}
        if on_progress is not None and going:
            losses = [c.history[-1].scores["personalized"].loss.mean() for c in going.values()]
            on_progress(Progress(done(), rounds, float(np.mean(losses))))
        if on_course is not None:
            with watch.timing("recording"):
                for i, course in going.items():
                    on_course(i, course)

    if begun:
        now = list(begun)
    else:
        states = [engine.start() for engine in engines]
        with watch.timing("scoring"):
            first = crew.score(states)
        scored = kept(first)
        now = [
            Course(
                state,
                (scored[i],) if i in scored else (),
                (engines[i].nothing_sent(),),
                (watch.seconds,),
                watch.parts,
            )
            for i, state in enumerate(states)
        ]

    def done() -> int:
        return max(course.round for i, course in enumerate(now) if i not in failed)

    if len(failed) < len(now):
        report()
    block = 1
    while len(failed) < len(now) and (at := done()) < rounds:
        stop = min(rounds, at - at % eval_every + eval_every) if eval_every else rounds
        step = min(block, stop - at)
        with watch.timing("compiling" if block == 1 else "rounds") as lasted:
            advanced = crew.record([course.state for course in now], step)
        # The first block compiles, so it says little about the pace: grow from it with care.
        pace = lasted() / step
        block = max(1, min(int(_BLOCK_SECONDS / pace), 10 * block))
        # A run that has diverged stays where it was.
        for i, (state, sent) in kept(advanced).items():
            now[i] = replace(now[i], state=state, sent=(*now[i].sent, sent), timing=watch.parts)
        if at + step == stop:
            with watch.timing("scoring"):
                evaluations = crew.score([course.state for course in now])
            for i, evaluation in kept(evaluations).items():
                *before, last = now[i].history
                history = (*before, replace(last, models=None), evaluation)
                marks = (*now[i].marks, watch.seconds)
                now[i] = replace(now[i], history=history, marks=marks, timing=watch.parts)
        report()
    return [
        failed.get(i)
        or Result(
            engine.setup.method,
            rounds,
            engine.setup.seed,
            watch.seconds,
            now[i],
            crew.evaluators[i],
            None if network is None else _round_seconds(network, engine.setup, now[i].traffic),
        )
        for i, (engine, network) in enumerate(zip(engines, networks, strict=True))
    ]


_Kind = TypeVar("_Kind")


@final
@dataclass(frozen=True)
class _Crew:
    """Runs that are alike, by the programs of the first of them."""

    evaluators: Sequence[Evaluator]

    def record(self, states: Sequence[State], rounds: int) -> Sequence[Recorded]:
        outcomes = self._first.engine.record_all(self._setups, states, rounds)
        jax.block_until_ready([o for o in outcomes if not isinstance(o, DivergedError)])
        return outcomes

    def score(self, states: Sequence[State]) -> Sequence[Evaluation | DivergedError]:
        found: list[Evaluation | DivergedError] = []
        scored = self._score(self._setups, states, None)
        for evaluator, state, own in zip(self.evaluators, states, scored, strict=True):
            try:
                found.append(evaluator.evaluation(int(state.round), own))
            except DivergedError as error:
                found.append(error)
        return found

    @property
    def _first(self) -> Evaluator:
        return self.evaluators[0]

    @property
    def _setups(self) -> list[Setup]:
        return [evaluator.engine.setup for evaluator in self.evaluators]

    @cached_property
    def _score(self) -> OnAllRuns:
        return self._first.engine.each_client_of_all(self._first.score)


@final
class _Watch:
    """How long a run has taken, in all its parts, and what it was spent on."""

    def __init__(self, course: Course | None, spent: dict[str, float]) -> None:
        before = 0.0 if course is None else course.marks[-1]
        self._spent = {} if course is None else dict(course.timing)
        for part, seconds in spent.items():
            self._spent[part] = self._spent.get(part, 0.0) + seconds
        self._begun = time.perf_counter() - before

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begun

    @property
    def parts(self) -> dict[str, float]:
        return dict(self._spent)

    @contextmanager
    def timing(self, part: str) -> Iterator[Callable[[], float]]:
        begun = time.perf_counter()
        yield lambda: time.perf_counter() - begun
        self._spent[part] = self._spent.get(part, 0.0) + time.perf_counter() - begun


def _round_seconds(
    network: Network, setup: Setup, traffic: Traffic
) -> Float[np.ndarray, " rounds"]:
    sizes = np.asarray(setup.federation.train.size)
    gradients = np.array([setup.method.gradients(int(size)) for size in sizes])
    return network.seconds(traffic, gradients, setup.seed, first_round=0)
