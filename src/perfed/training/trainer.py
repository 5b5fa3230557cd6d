"""The training loop: rounds, scores on the way, callbacks."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import numpy as np

from perfed.core.errors import DivergedError, require, require_count
from perfed.evaluation import Evaluator, SimulationEvaluator, mean_defined
from perfed.evaluation.evaluator import check_adapt_on
from perfed.simulation import Engine, Network, Simulator, Traffic, hosts
from perfed.training.callbacks import Callback, OnProgress, Progress
from perfed.training.result import Result
from perfed.training.state import TrainState, round_seconds

# Rounds run in blocks of about this many seconds, so that progress shows and Ctrl-C works.
_BLOCK_SECONDS = 0.5


@final
@dataclass(frozen=True)
class TrainOptions:
    """How long to train, and how to score on the way.

    Attributes:
        rounds: global rounds in all.
        eval_every: score every so many rounds; None: only before the first and after the last.
        eval_clients: score a sample of so many clients, always the same; None: all.
        eval_training: whether training data are scored too.
        adapt_on: the data personal models are made from (`SimulationEvaluator`).
        keep_models: whether the last evaluation is to hold the personal models that it scored.
    """

    rounds: int
    eval_every: int | None = None
    eval_clients: int | None = None
    eval_training: bool = False
    adapt_on: str = "train"
    keep_models: bool = False

    def __post_init__(self) -> None:
        require_count("rounds", self.rounds)
        if self.eval_every is not None:
            require_count("eval_every", self.eval_every)
        check_adapt_on(self.adapt_on)

    def evaluator(self, engine: Simulator) -> SimulationEvaluator:
        """What scores an engine's clients so."""
        return SimulationEvaluator(
            engine, self.adapt_on, self.keep_models, self.eval_training, self.eval_clients
        )


@final
@dataclass
class Run:
    """One run of a trainer.

    Attributes:
        engine: what runs its rounds.
        evaluator: what scores its clients; None: made from the options, for clients that are here.
        callbacks: called at its steps.
        network: what messages and computations cost in time; None: not computed.
        state: where it was left; None: from the beginning. Moves on as it is trained.
    """

    engine: Engine
    evaluator: Evaluator | None = None
    callbacks: Sequence[Callback] = ()
    network: Network | None = None
    state: TrainState | None = None


@final
class Trainer:
    """Trains one run, or several at once by the same programs.

    Args:
        options: how long, and how to score.
        on_progress: called as the runs go on; the loss is the mean over them.
        spent: seconds spent before, by what they were spent on; each run has its share.
    """

    def __init__(
        self,
        options: TrainOptions,
        on_progress: OnProgress | None = None,
        spent: dict[str, float] | None = None,
    ) -> None:
        self.options = options
        self._on_progress, self._spent = on_progress, spent or {}

    def train(self, run: Run) -> Result:
        """One run, to its end. An interruption is raised again, after the callbacks' `on_failure`.

        Raises:
            DivergedError: an update, or a loss, is not finite.
        """
        (outcome,) = self.train_all([run])
        if isinstance(outcome, DivergedError):
            raise outcome
        return outcome

    def train_all(self, runs: Sequence[Run]) -> list[Result | DivergedError]:
        """Several runs; one that diverges does not stop the others.

        Args:
            runs: they must differ in numbers only (`Experiment.same_program`), and stand at the
                same round.
        """
        _check(runs)
        loop = _Loop(self.options, runs, _evaluators(runs, self.options), self._spent)
        try:
            for run in runs:
                for callback in run.callbacks:
                    callback.on_start(run.state)
            for progress in loop.blocks():
                if self._on_progress is not None:
                    self._on_progress(progress)
            return loop.finish()
        except BaseException as error:
            for run in runs:
                for callback in run.callbacks:
                    callback.on_failure(run.state, error)
            raise
        finally:
            for run in runs:
                for callback in run.callbacks:
                    callback.on_close()


@final
class _Loop:
    """The loop over blocks of rounds, of runs that are computed together.

    The programs are those of the first run. What becomes of a run is in its `state`.
    """

    def __init__(
        self,
        options: TrainOptions,
        runs: Sequence[Run],
        evaluators: Sequence[Evaluator],
        spent: dict[str, float],
    ) -> None:
        self._options, self._runs, self._evaluators = options, runs, evaluators
        self._timer = Timer(len(runs), [run.state for run in runs], spent)
        self._failed: dict[int, DivergedError] = {}

    def blocks(self) -> Iterator[Progress]:
        """Train; how far it has come, after every block of rounds."""
        if self._runs[0].state is None:
            self._begin()
        yield from self._progress()
        rounds, every = self._options.rounds, self._options.eval_every
        # Clients elsewhere compile on their own, at a time unknown here; and a finished round with
        # them must not be lost because others follow it in the same block.
        remote = not isinstance(self._runs[0].engine, Simulator)
        block, compiled = 1, remote
        while self._active and (done := self._round) < rounds:
            stop = min(rounds, done - done % every + every) if every else rounds
            step = hosts.agree(min(block, stop - done))
            pace = self._advance(step, "rounds" if compiled else "compiling") / step
            # The first block compiles, so it is slower than others: grow from it with care.
            if not remote:
                block = max(1, min(int(_BLOCK_SECONDS / pace), 10 * block))
            compiled = True
            if done + step == stop:
                self._evaluate()
            yield from self._progress()

    def finish(self) -> list[Result | DivergedError]:
        """The outcome of every run; calls `on_end` for those that are finished."""
        outcomes: list[Result | DivergedError] = []
        for i, run in enumerate(self._runs):
            if i in self._failed:
                outcomes.append(self._failed[i])
                continue
            state, network = self._state(i), run.network
            experiment = run.engine.experiment
            lasted = None if network is None else round_seconds(network, experiment, state.traffic)
            seconds, evaluator = self._timer.seconds(i), self._evaluators[i]
            result = Result(self._options.rounds, seconds, state, evaluator, lasted)
            for callback in run.callbacks:
                callback.on_end(result)
            outcomes.append(result)
        return outcomes

    @property
    def _active(self) -> list[int]:
        """The runs that have not failed."""
        return [i for i in range(len(self._runs)) if i not in self._failed]

    @property
    def _round(self) -> int:
        """Where they all stand."""
        return self._state(self._active[0]).round

    def _state(self, i: int) -> TrainState:
        state = self._runs[i].state
        assert state is not None
        return state

    def _begin(self) -> None:
        states = [run.engine.init() for run in self._runs]
        with self._timer.timing("scoring"):
            found = self._evaluators[0].evaluate_runs(self._evaluators, states)
        for i, evaluation in self._succeeded(range(len(self._runs)), found):
            nothing = Traffic.none(self._runs[i].engine.experiment.cohort)
            marks = (self._timer.seconds(i),)
            timing = self._timer.parts(i)
            self._runs[i].state = TrainState(states[i], (evaluation,), (nothing,), marks, timing)
            self._report_scores(i)

    def _advance(self, rounds: int, what: str) -> float:
        """So many rounds of all runs; the seconds they took."""
        going = self._active
        experiments = [self._runs[i].engine.experiment for i in going]
        states = [self._state(i).engine for i in going]
        with self._timer.timing(what):
            begun = time.perf_counter()
            found = self._runs[0].engine.run_rounds(experiments, states, rounds)
            jax.block_until_ready([o for o in found if not isinstance(o, DivergedError)])
            seconds = time.perf_counter() - begun
        for i, (engine, messages) in self._succeeded(going, found):
            state = self._state(i)
            # Models are those of the last scores only: by now they are of an earlier state.
            history = (*state.history[:-1], replace(state.history[-1], models=None))
            sent = (*state.messages, messages)
            timing = self._timer.parts(i)
            self._runs[i].state = TrainState(engine, history, sent, state.marks, timing)
        return seconds

    def _evaluate(self) -> None:
        if not (going := self._active):
            return
        with self._timer.timing("scoring"):
            found = self._evaluators[0].evaluate_runs(
                [self._evaluators[i] for i in going], [self._state(i).engine for i in going]
            )
        for i, evaluation in self._succeeded(going, found):
            state = self._state(i)
            self._runs[i].state = replace(
                state,
                history=(*state.history, evaluation),
                marks=(*state.marks, self._timer.seconds(i)),
                timing=self._timer.parts(i),
            )
            self._report_scores(i)

    def _succeeded(self, runs: Sequence[int], outcomes: Sequence[Any]) -> list[tuple[int, Any]]:
        """The outcomes of runs that succeeded; the others are marked as failed."""
        good = []
        for i, outcome in zip(runs, outcomes, strict=True):
            if isinstance(outcome, DivergedError):
                self._failed[i] = outcome
                self._runs[i].state = None  # it leads nowhere
            else:
                good.append((i, outcome))
        return good

    def _report_scores(self, i: int) -> None:
        with self._timer.timing("recording"):
            for callback in self._runs[i].callbacks:
                callback.on_evaluate(self._state(i))

    def _progress(self) -> Iterator[Progress]:
        if not self._active:
            return
        with self._timer.timing("recording"):
            for i in self._active:
                for callback in self._runs[i].callbacks:
                    callback.on_rounds_end(self._state(i))
        losses = [
            mean_defined(self._state(i).history[-1].scores["personalized"].loss)
            for i in self._active
        ]
        yield Progress(self._round, self._options.rounds, float(np.mean(losses)))


@final
class Timer:
    """How long runs have taken, and what it was spent on; each has a like share of the time."""

    def __init__(
        self, runs: int, states: Sequence[TrainState | None], spent: dict[str, float]
    ) -> None:
        self._runs, self._spent = runs, dict(spent)
        self._before = [
            (0.0, dict[str, float]()) if state is None else (state.marks[-1], state.timing)
            for state in states
        ]
        self._begun = time.perf_counter()

    def seconds(self, run: int) -> float:
        """How long a run has taken."""
        return self._before[run][0] + (time.perf_counter() - self._begun) / self._runs

    def parts(self, run: int) -> dict[str, float]:
        """What its time was spent on."""
        before = self._before[run][1]
        return {
            part: before.get(part, 0.0) + self._spent.get(part, 0.0) / self._runs
            for part in {**before, **self._spent}
        }

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """The time within this is spent on a part."""
        begun = time.perf_counter()
        yield
        self._spent[part] = self._spent.get(part, 0.0) + time.perf_counter() - begun


def _check(runs: Sequence[Run]) -> None:
    first = runs[0].engine.experiment
    for run in runs:
        experiment = run.engine.experiment
        what = "runs can be computed together if they differ in numbers only"
        require(first.same_program(experiment), "runs", experiment.method, what)
        if run.network is not None:
            run.network.check(experiment.federation.clients)
    at = {-1 if run.state is None else run.state.round for run in runs}
    require(len(at) == 1, "runs", sorted(at), "must all stand at one round")


def _evaluators(runs: Sequence[Run], options: TrainOptions) -> list[Evaluator]:
    found: list[Evaluator] = []
    for run in runs:
        engine = run.engine
        if run.evaluator is not None:
            found.append(run.evaluator)
        else:
            assert isinstance(engine, Simulator), "clients elsewhere need an evaluator of their own"
            found.append(options.evaluator(engine))
    return found
