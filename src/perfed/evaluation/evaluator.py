"""Scores the global model and each client's own, on every client's held-out data."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self, final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from perfed.core.errors import DivergedError, require, require_choice, require_count
from perfed.core.objective import Measure
from perfed.core.trees import Params, Scalar, squared_norm
from perfed.data import Federation, FlatExamples
from perfed.evaluation.metrics import Scores, Values, named_scores
from perfed.simulation import EngineState, Experiment, Simulator
from perfed.simulation.engine import Clients, MappedFunctions
from perfed.simulation.experiment import HINT, ClientRecord, DeviceData, DeviceRows
from perfed.simulation.round import personalize_client

ModelKind = Literal["global", "personalized"]

# (experiment, data, the server's state, what the client keeps, client) -> the client's own model
PersonalModel = Callable[[Experiment, DeviceData, EngineState, ClientRecord, Array], Params]


@final
@dataclass(frozen=True)
class Evaluation:
    """All clients' scores after a number of rounds.

    Attributes:
        round: how many rounds.
        scores: the scores, of all clients or of the evaluator's sample, by model kind. There is no
            `global` where a method has no global model.
        models: the personal models that were scored, stacked, where they were asked for.
    """

    round: int
    scores: dict[ModelKind, Scores]
    models: Params | None = None


class ClientMeasures(NamedTuple):
    """One client's measures, or all clients' stacked; each by model kind.

    Attributes:
        test: on held-out data.
        train: on training data, where it was asked for.
        penalty: (l2/2)|w|^2, beside `train`.
        models: its own model, where it was asked for.
    """

    test: dict[ModelKind, Measure]
    train: dict[ModelKind, Measure] | None
    penalty: dict[ModelKind, Scalar] | None
    models: Params | None


def sample_clients(clients: int, count: int | None) -> Int[np.ndarray, " some"] | None:
    """So many of all clients, at random but always the same; None for all of them."""
    if count is None:
        return None
    require_count("eval_clients", count)
    if count >= clients:
        return None
    # By no seed of a run's: runs that are compared are scored on the same clients.
    return np.sort(np.random.default_rng(0).choice(clients, count, replace=False))


def model_kinds(experiment: Experiment) -> tuple[ModelKind, ...]:
    """The models that are scored."""
    return ("global", "personalized") if experiment.has_global_model else ("personalized",)


class Evaluator(ABC):
    """Scores the states of a run, wherever its clients are."""

    @property
    @abstractmethod
    def experiment(self) -> Experiment:
        """What is trained."""

    @property
    @abstractmethod
    def clients(self) -> Int[np.ndarray, " some"] | None:
        """Who is scored, by number; None: everyone."""

    def scored(self) -> Federation:
        """The data of those who are scored."""
        federation = self.experiment.federation
        return federation if self.clients is None else federation.select(self.clients)

    @abstractmethod
    def evaluate_runs(
        self, evaluators: Sequence[Self], states: Sequence[EngineState]
    ) -> list[Evaluation | DivergedError]:
        """All clients' scores in the states of several runs, each by an evaluator of its own."""


def _personalize(
    experiment: Experiment,
    data: DeviceData,
    state: EngineState,
    record: ClientRecord,
    client: Array,
    rows: DeviceRows | None,
) -> Params:
    """One client's own model, made from one side of its data."""
    received = experiment.received(state, record)
    return personalize_client(experiment, data, rows, received, record, state.round, client)


def _on_train(
    experiment: Experiment,
    data: DeviceData,
    state: EngineState,
    record: ClientRecord,
    client: Array,
) -> Params:
    """`adapt_on = "train"`: the honest choice."""
    return _personalize(experiment, data, state, record, client, data.train)


def _on_test(
    experiment: Experiment,
    data: DeviceData,
    state: EngineState,
    record: ClientRecord,
    client: Array,
) -> Params:
    """`adapt_on = "test"`: on the data that are scored, the protocol of Per-FedAvg's Table 1."""
    return _personalize(experiment, data, state, record, client, data.test)


# How personal models are made, by name; a paper's own protocol can be added.
ADAPTATIONS: dict[str, PersonalModel] = {"train": _on_train, "test": _on_test}


def check_adapt_on(adapt_on: str) -> None:
    """Raise unless there is such an adaptation."""
    require_choice("adapt_on", adapt_on, tuple(ADAPTATIONS))


@final
@dataclass(frozen=True)
class SimulationEvaluator(Evaluator):
    """Scores the states of an engine whose clients are here.

    Attributes:
        engine: what runs the clients.
        adapt_on: the data that personal models are made from, by its name in `ADAPTATIONS`. `train`
            is the honest choice; `test` adapts on the very data that is scored, which is the
            protocol of Per-FedAvg's Table 1.
        keep_models: whether evaluations hold the personal models that they scored.
        training: whether training data are scored too (`train_loss`, ...): all of them, which is
            as much work again, or several times that.
        count: how many clients are scored (`sample_clients`); None: all.
    """

    engine: Simulator
    adapt_on: str = "train"
    keep_models: bool = False
    training: bool = False
    count: int | None = None

    def __post_init__(self) -> None:
        check_adapt_on(self.adapt_on)
        _ = self.clients

    @property
    def experiment(self) -> Experiment:
        """What the engine runs."""
        return self.engine.experiment

    @cached_property
    def clients(self) -> Int[np.ndarray, " some"] | None:
        """Who is scored, by number; None: everyone."""
        return sample_clients(self.experiment.federation.clients, self.count)

    @cached_property
    def _scored_federation(self) -> Federation:
        return self.scored()

    def __call__(self, state: EngineState) -> Evaluation:
        """Score the global and every personalized model; a loss that is not finite is refused."""
        return self.evaluation(int(state.round), self._measure_clients(state, self.clients))

    def evaluate_runs(
        self, evaluators: Sequence[Self], states: Sequence[EngineState]
    ) -> list[Evaluation | DivergedError]:
        """By one program for all runs, which must differ in numbers only."""
        experiments = [evaluator.experiment for evaluator in evaluators]
        found: list[Evaluation | DivergedError] = []
        measured = self._measure_runs(experiments, list(states), self.clients)
        for evaluator, state, own in zip(evaluators, states, measured, strict=True):
            try:
                found.append(evaluator.evaluation(int(state.round), own))
            except DivergedError as error:
                found.append(error)
        return found

    def evaluation(self, round: int, measures: ClientMeasures) -> Evaluation:
        """The evaluation from clients' measures, stacked in their order."""
        federation, scores = self._scored_federation, {}
        sizes = np.asarray(federation.test.size)
        for kind in model_kinds(self.experiment):
            values = self._named_scores(round, kind, measures.test[kind], federation.test)
            if measures.train is not None:
                trained = self._named_scores(round, kind, measures.train[kind], federation.train)
                values |= {f"train_{name}": value for name, value in trained.items()}
                if self.experiment.task.l2 > 0 and measures.penalty is not None:
                    penalty = np.asarray(measures.penalty[kind], np.float64)
                    values["train_objective"] = values["train_loss"] + penalty
            scores[kind] = Scores(values, sizes)
        return Evaluation(round, scores, measures.models)

    def _named_scores(
        self, round: int, kind: ModelKind, measure: Measure, rows: FlatExamples
    ) -> dict[str, Values]:
        federation = self._scored_federation
        loss, score = (np.asarray(part, np.float64) for part in measure)
        lost = np.flatnonzero(~np.isfinite(loss))
        if len(lost):
            raise DivergedError(
                f"{self.experiment.method.name} diverged: after {round} rounds the {kind} "
                f"model's loss on client {federation.names[lost[0]]} is not finite. {HINT}"
            )
        if federation.labels is not None:
            return named_scores(score) | {"loss": loss}
        targets = [rows.client(i)[1] for i in range(federation.clients)]
        return named_scores(score, targets, federation.target[1]) | {"loss": loss}

    def personal_models(self, state: EngineState, clients: Clients | None = None) -> Params:
        """The clients' own models, stacked in the order asked for (None: all clients)."""
        n = self.experiment.federation.clients
        for client in [] if clients is None else clients:
            require(0 <= client < n, "client", client, f"must be between 0 and {n - 1}")
        return self._personalize_clients(state, clients)

    @cached_property
    def _personalize_clients(self) -> Any:
        return self.engine.map_clients(ADAPTATIONS[self.adapt_on])

    @cached_property
    def _measure_runs(self) -> MappedFunctions:
        return self.engine.map_clients_of_runs(self.measure)

    @cached_property
    def _measure_clients(self) -> Any:
        return self.engine.map_clients(self.measure)

    def measure(
        self,
        experiment: Experiment,
        data: DeviceData,
        state: EngineState,
        record: ClientRecord,
        client: Int[Array, ""],
    ) -> ClientMeasures:
        """One client's measures under the models that are scored; a `ClientFunction`."""
        own = ADAPTATIONS[self.adapt_on](experiment, data, state, record, client)
        models: dict[ModelKind, Params] = {"global": state.params, "personalized": own}
        models = {kind: models[kind] for kind in model_kinds(experiment)}
        test = experiment.objective(data.test, client, data.frozen)
        train, penalty = None, None
        if self.training:
            objective = experiment.objective(data.train, client, data.frozen)
            train = {kind: objective.measure(model) for kind, model in models.items()}
            penalty = {kind: _penalty(experiment, model) for kind, model in models.items()}
        on_test = {kind: test.measure(model) for kind, model in models.items()}
        return ClientMeasures(on_test, train, penalty, own if self.keep_models else None)


def _penalty(experiment: Experiment, params: Params) -> Scalar:
    weights, _ = experiment.split_state(params)
    return jnp.asarray(0.5 * experiment.task.l2 * squared_norm(weights))
