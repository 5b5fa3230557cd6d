"""A whole simulated run: rounds, scores on the way, and a result to hold."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, final, get_args

import jax
import numpy as np
from jaxtyping import Float, Int, Shaped

from perfed.codecs import Codec, Float32
from perfed.data import Federation
from perfed.errors import require, require_choice, require_count
from perfed.evaluation import AdaptOn, Evaluation, Evaluator, ModelKind, Scores
from perfed.experiment.saved import named_outputs, scaled
from perfed.methods import Method
from perfed.objective import Model, Params, Sampling, Task
from perfed.simulation import Engine, Network, Setup, State, Traffic, Vectorised, Weighting

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
    """
    require_count("rounds", rounds)
    if network is not None:
        network.check(engine.setup.federation.clients)
    if eval_every is not None:
        require_count("eval_every", eval_every)
    evaluator = Evaluator(engine, adapt_on)
    watch = _Watch(course)
    if course is None:
        state = engine.start()
        with watch.timing("scoring"):
            first = evaluator(state)
        course = Course(state, (first,), (engine.nothing_sent(),), (watch.seconds,), watch.parts)

    def report(course: Course) -> None:
        if on_progress is not None:
            loss = float(course.history[-1].scores["personalized"].loss.mean())
            on_progress(Progress(course.round, rounds, loss))
        if on_course is not None:
            with watch.timing("recording"):
                on_course(course)

    report(course)
    block = 1
    while (done := course.round) < rounds:
        stop = min(rounds, done - done % eval_every + eval_every) if eval_every else rounds
        step = min(block, stop - done)
        with watch.timing("compiling" if block == 1 else "rounds") as spent:
            state, sent = engine.record(course.state, step)
            jax.block_until_ready(state)
        # The first block compiles, so it says little about the pace: grow from it with care.
        pace = spent() / step
        block = max(1, min(int(_BLOCK_SECONDS / pace), 10 * block))
        history, marks = course.history, course.marks
        if done + step == stop:
            with watch.timing("scoring"):
                history = (*history, evaluator(state))
            marks = (*marks, watch.seconds)
        course = Course(state, history, (*course.sent, sent), marks, watch.parts)
        report(course)
    setup = engine.setup
    return Result(
        setup.method,
        rounds,
        setup.seed,
        watch.seconds,
        course,
        evaluator,
        None if network is None else _round_seconds(network, setup, course.traffic),
    )


@final
class _Watch:
    """How long a run has taken, in all its parts, and what it was spent on."""

    def __init__(self, course: Course | None) -> None:
        before = 0.0 if course is None else course.marks[-1]
        self._spent = {} if course is None else dict(course.timing)
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
