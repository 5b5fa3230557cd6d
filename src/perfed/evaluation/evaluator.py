"""Scores: the global model and each client's own, on every client's held-out data."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self, final, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from perfed.core.errors import DivergedError, require, require_choice, require_count
from perfed.core.objective import Measure, Params, Scalar, squared_norm
from perfed.core.random import Purpose
from perfed.data import Federation, FlatExamples
from perfed.simulation import Engine, State
from perfed.simulation.engine import Clients, OnAllRuns
from perfed.simulation.experiment import HINT, DeviceData, Kept, Setup

AdaptOn = Literal["train", "test"]
ModelKind = Literal["global", "personalized"]
Values = Float[np.ndarray, " clients"]


# Of these, less is better.
ERRORS = ("loss", "rmse", "train_loss", "train_rmse", "train_objective")


class Summary(NamedTuple):
    """One number per client, and what it comes to over the clients that have one.

    Attributes:
        mean: the plain mean over clients, as Per-FedAvg reports it.
        weighted: the mean weighted by the clients' held-out examples.
        worst: the worst client's.
        p10: the 10th percentile over clients.
        p50: the median.
        p90: the 90th percentile.
        clients: each client's; NaN where it is not defined.
    """

    mean: float
    weighted: float
    worst: float
    p10: float
    p50: float
    p90: float
    clients: list[float]

    @classmethod
    def of(
        cls, values: Values, sizes: Int[np.ndarray, " clients"], less_is_better: bool = False
    ) -> "Summary":
        """Summarize one value per client."""
        clients, defined = [float(v) for v in values], np.isfinite(values)
        if not defined.any():
            return cls._make([*[float("nan")] * 6, clients])
        values, sizes = values[defined], sizes[defined]
        worst = values.max() if less_is_better else values.min()
        weighted = np.average(values, weights=sizes)
        percentiles = np.percentile(values, [10, 50, 90])
        numbers = map(float, (values.mean(), weighted, worst, *percentiles))
        return cls._make([*numbers, clients])


@final
@dataclass(frozen=True)
class Scores:
    """One model kind's scores on every client's held-out data.

    Attributes:
        values: every client's score, by name; the first name is the headline. `accuracy` and `loss`
            for classes; `r2`, `rmse` (in the targets' own unit) and `loss` for a regression. The
            same with `train_` before it, where training data were scored, and `train_objective`,
            f_i itself, where an l2 penalty makes it another than the loss.
        sizes: how many held-out examples there are.
    """

    values: dict[str, Values]
    sizes: Int[np.ndarray, " clients"]

    @property
    def accuracy(self) -> Values:
        """The part of its held-out examples each client's model gets right."""
        return self.values["accuracy"]

    @property
    def loss(self) -> Values:
        """The mean loss on each client's held-out examples."""
        return self.values["loss"]

    def summary(self) -> dict[str, Summary]:
        """All scores, summarized over clients."""
        return {k: Summary.of(v, self.sizes, k in ERRORS) for k, v in self.values.items()}


@final
@dataclass(frozen=True)
class Evaluation:
    """All clients' scores after a number of rounds.

    Attributes:
        round: how many rounds.
        scores: the scores, of all clients or of the scorer's sample.
        models: the personal models that were scored, stacked, where they were asked for.
    """

    round: int
    scores: dict[ModelKind, Scores]
    models: Params | None = None


class Scored(NamedTuple):
    """One client's measures, or all clients' stacked.

    Attributes:
        common: of the global model.
        own: of its own.
        training: of both on its training data, where it was asked for.
        penalty: of both, (l2/2)|w|^2, beside `training`.
        models: its own model, where it was asked for.
    """

    common: Measure
    own: Measure
    training: tuple[Measure, Measure] | None
    penalty: tuple[Scalar, Scalar] | None
    models: Params | None


def sample_of(clients: int, count: int | None) -> Int[np.ndarray, " some"] | None:
    """So many of all clients, at random but always the same; None for all of them."""
    if count is None:
        return None
    require_count("eval_clients", count)
    if count >= clients:
        return None
    # By no seed of a run's: runs that are compared are scored on the same clients.
    return np.sort(np.random.default_rng(0).choice(clients, count, replace=False))


class Scorer(ABC):
    """Scores the states of a run, wherever its clients are."""

    @property
    @abstractmethod
    def setup(self) -> Setup:
        """What is run."""

    @property
    @abstractmethod
    def clients(self) -> Int[np.ndarray, " some"] | None:
        """Who is scored, by number; None: everyone."""

    def scored(self) -> Federation:
        """The data of those who are scored."""
        federation = self.setup.federation
        return federation if self.clients is None else federation.some(self.clients)

    @abstractmethod
    def score_all(
        self, scorers: Sequence[Self], states: Sequence[State]
    ) -> list[Evaluation | DivergedError]:
        """All clients' scores in the states of several runs, each by a scorer of its own."""


@final
@dataclass(frozen=True)
class Evaluator(Scorer):
    """Scores the states of an engine.

    Attributes:
        engine: what runs the clients.
        adapt_on: the data that personal models are made from. `train` is the honest choice; `test`
            adapts on the very data that is scored, which is the protocol of Per-FedAvg's Table 1.
        keep_models: whether evaluations hold the personal models that they scored.
        training: whether training data are scored too (`train_loss`, ...): all of them, which is
            as much work again, or several times that.
        count: how many clients are scored (`sample_of`); None: all.
    """

    engine: Engine
    adapt_on: AdaptOn = "train"
    keep_models: bool = False
    training: bool = False
    count: int | None = None

    def __post_init__(self) -> None:
        require_choice("adapt_on", self.adapt_on, get_args(AdaptOn))
        _ = self.clients

    @cached_property
    def clients(self) -> Int[np.ndarray, " some"] | None:
        """Who is scored, by number; None: everyone."""
        return sample_of(self.engine.setup.federation.clients, self.count)

    @cached_property
    def _scored(self) -> Federation:
        return self.scored()

    def __call__(self, state: State) -> Evaluation:
        """Score the global and every personalized model; a loss that is not finite is refused."""
        return self.evaluation(int(state.round), self._score(state, self.clients))

    @property
    def setup(self) -> Setup:
        """What the engine runs."""
        return self.engine.setup

    def score_all(
        self, scorers: Sequence[Self], states: Sequence[State]
    ) -> list[Evaluation | DivergedError]:
        """By one program for all runs, which must be alike but for numbers."""
        setups = [scorer.setup for scorer in scorers]
        found: list[Evaluation | DivergedError] = []
        scored = self._score_all(setups, list(states), self.clients)
        for scorer, state, own in zip(scorers, states, scored, strict=True):
            try:
                found.append(scorer.evaluation(int(state.round), own))
            except DivergedError as error:
                found.append(error)
        return found

    def evaluation(self, round: int, scored: Scored) -> Evaluation:
        """What clients' measures, stacked in their order, come to."""
        federation, scores = self._scored, {}
        sizes = np.asarray(federation.test.size)
        for i, kind in enumerate(get_args(ModelKind)):
            values = self._named(round, kind, (scored.common, scored.own)[i], federation.test)
            if scored.training is not None:
                trained = self._named(round, kind, scored.training[i], federation.train)
                values |= {f"train_{name}": value for name, value in trained.items()}
                if self.engine.setup.task.l2 > 0 and scored.penalty is not None:
                    penalty = np.asarray(scored.penalty[i], np.float64)
                    values["train_objective"] = values["train_loss"] + penalty
            scores[kind] = Scores(values, sizes)
        return Evaluation(round, scores, scored.models)

    def _named(
        self, round: int, kind: ModelKind, measure: Measure, rows: FlatExamples
    ) -> dict[str, Values]:
        setup, federation = self.engine.setup, self._scored
        loss, score = (np.asarray(part, np.float64) for part in measure)
        lost = np.flatnonzero(~np.isfinite(loss))
        if len(lost):
            raise DivergedError(
                f"{setup.method.name} diverged: after {round} rounds the {kind} "
                f"model's loss on client {federation.names[lost[0]]} is not finite. {HINT}"
            )
        if federation.labels is not None:
            return scores_of(score) | {"loss": loss}
        targets = [rows.client(i)[1] for i in range(federation.clients)]
        return scores_of(score, targets, federation.target[1]) | {"loss": loss}

    def personal_models(self, state: State, clients: Clients | None = None) -> Params:
        """The clients' own models, stacked in the order asked for (None: all clients)."""
        n = self.engine.setup.federation.clients
        for client in [] if clients is None else clients:
            require(0 <= client < n, "client", client, f"must be between 0 and {n - 1}")
        return self._personalize(state, clients)

    @cached_property
    def _personalize(self) -> Any:
        return self.engine.each_client(self.personal_model)

    @cached_property
    def _score_all(self) -> OnAllRuns:
        return self.engine.each_client_of_all(self.score)

    @cached_property
    def _score(self) -> Any:
        return self.engine.each_client(self.score)

    def score(
        self,
        setup: Setup,
        world: DeviceData,
        w: Params,
        kept: Kept,
        round: Int[Array, ""],
        client: Int[Array, ""],
    ) -> Scored:
        """One client's measures under both models; a `ClientFunction`."""
        own = self.personal_model(setup, world, w, kept, round, client)
        test = setup.objective(world.test, client)
        training, penalty = None, None
        if self.training:
            train = setup.objective(world.train, client)
            training = (train.measure(w), train.measure(own))
            penalty = (_penalty(setup, w), _penalty(setup, own))
        models = own if self.keep_models else None
        return Scored(test.measure(w), test.measure(own), training, penalty, models)

    def personal_model(
        self,
        setup: Setup,
        world: DeviceData,
        w: Params,
        kept: Kept,
        round: Int[Array, ""],
        client: Int[Array, ""],
    ) -> Params:
        """One client's own model; a `ClientFunction`."""
        own_data = setup.objective(world.train if self.adapt_on == "train" else world.test, client)
        key = setup.client_key(Purpose.PERSONALIZE, round, world.number[client])
        return setup.method.personalize(own_data, w, kept.memory, setup.turn(round), key)


def _penalty(setup: Setup, w: Params) -> Scalar:
    return jnp.asarray(0.5 * setup.task.l2 * squared_norm(w))


def score_names(classes: bool, training: bool, penalty: bool) -> tuple[str, ...]:
    """The scores that an evaluation has.

    Args:
        classes: whether labels are classes.
        training: whether training data are scored too.
        penalty: whether there is an l2 penalty.
    """
    held_out = ("accuracy", "loss") if classes else ("r2", "rmse", "loss")
    if not training:
        return held_out
    extra = ("train_objective",) if penalty else ()
    return (*held_out, *(f"train_{name}" for name in held_out), *extra)


def score_order(name: str) -> tuple[bool, bool, str]:
    """A key to sort names of scores by: held-out before training data, losses last."""
    return (name.startswith("train_"), name.endswith(("loss", "objective")), name)


def scores_of(
    score: Values, targets: Sequence[np.ndarray] | None = None, spread: float = 1.0
) -> dict[str, Values]:
    """What `Measure.score` means: accuracy, or R2 = 1 - MSE / Var(y) and RMSE.

    Args:
        score: each client's.
        targets: each client's, in a regression; None: these are classes.
        spread: what targets were divided by.
    """
    if targets is None:
        return {"accuracy": score}
    variance = np.array([np.var(own, dtype=np.float64) for own in targets])
    # No model can be compared with the mean of targets that are all alike.
    r2 = 1 - np.divide(score, variance, out=np.full_like(score, np.nan), where=variance > 0)
    return {"r2": r2, "rmse": np.sqrt(score) * spread}
