"""Rounds and evaluations with clients on other machines."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np

from perfed.core.errors import DivergedError
from perfed.core.random import Purpose, fold, permuted
from perfed.data import FlatExamples
from perfed.evaluation import Evaluation, Evaluator, Scores, model_kinds, score_names
from perfed.federation.protocol.framing import pack
from perfed.federation.protocol.messages import EvaluateRequest, TrainRequest
from perfed.federation.protocol.parts import encode_parts
from perfed.federation.server.checks import (
    CheckedUpdate,
    NormLimit,
    read_scores,
    read_update,
    typical_norm,
)
from perfed.federation.server.clients import RECONNECT_TIME, ClientManager
from perfed.federation.transport.messenger import Failure
from perfed.pipeline.codecs import Codec, Float32
from perfed.runs.sections import FederationSection
from perfed.simulation import ClientRecord, Engine, EngineState, Experiment, Traffic
from perfed.simulation.engine import RoundsResult
from perfed.simulation.experiment import NO_RECORD
from perfed.simulation.round import STATE_CODEC, Trained, server_update, train_client


class TooFewClientsError(OSError):
    """Too few valid updates in a round, after all attempts."""


@final
class RemoteEngine(Engine):
    """A run with clients on other machines.

    What clients keep never leaves them. In its place the state has, for each client, the last round
    in which its update was accepted: by this a client knows which of its saved records is valid,
    whatever messages were lost.
    """

    def __init__(
        self, experiment: Experiment, clients: ClientManager, settings: FederationSection
    ) -> None:
        self.experiment, self.clients, self._settings = experiment, clients, settings
        self._limit = NormLimit(settings.norm_factor, settings.max_norm)
        self._typical: float | None = None

    def init(self) -> EngineState:
        """The first model; no update has been accepted."""
        state = self._alone.init_server(self._alone.init_params())
        accepted = jnp.full(self.experiment.federation.clients, -1, jnp.int32)
        return state._replace(clients=ClientRecord(accepted, None, None))

    @cached_property
    def _alone(self) -> Experiment:
        """The same experiment with one client and one row, for shapes."""
        federation = self.experiment.federation
        one = FlatExamples.from_rows(
            np.zeros((1, *federation.example_shape), federation.train.x.dtype),
            np.zeros(1, federation.train.y.dtype),
            [1],
        )
        alone = replace(federation, train=one, test=one, names=("",))
        return replace(self.experiment, federation=alone, cohort=1)

    @cached_property
    def _update_shapes(self) -> Trained:
        """The shapes of what clients send."""
        alone = self._alone
        params = alone.init_params()
        received = alone.received(alone.init_server(params), NO_RECORD)
        received = received._replace(params=params)
        record, data = alone.init_record(params), alone.device_data()
        shapes: Trained = jax.eval_shape(lambda: train_client(alone, data, received, record, 0, 0))
        return shapes

    def run_rounds(
        self, experiments: Sequence[Experiment], states: Sequence[EngineState], rounds: int
    ) -> list[RoundsResult]:
        """The rounds of one run."""
        (state,) = states
        parts = [Traffic.none(self.experiment.cohort)]
        for _ in range(rounds):
            state, traffic = self._round(state)
            parts.append(traffic)
        return [(state, Traffic.concatenate(parts))]

    def _round(self, state: EngineState) -> tuple[EngineState, Traffic]:
        """One round, with retries if there are too few valid updates."""
        round, minimum = int(state.round), self._settings.least(self.experiment.cohort)
        reasons: dict[str, str] = {}
        failed: set[int] = set()  # in an earlier attempt
        for attempt in range(self._settings.attempts):
            self.clients.wait_for(minimum)
            cohort = self._cohort(round, failed)
            good, reasons = self._updates(state, cohort)
            failed |= set(cohort) - good.keys()
            if len(good) >= minimum:
                return self._aggregate(state, cohort, good)
            last = attempt == self._settings.attempts - 1
            self.clients.log(
                f"round {round}: {len(good)} of {len(cohort)} updates are valid, {minimum} are "
                f"needed; {'giving up' if last else 'retrying'}"
            )
        text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise TooFewClientsError(
            f"round {round}: fewer than {minimum} valid updates after {self._settings.attempts} "
            f"attempts ({text})"
        )

    def _cohort(self, round: int, failed: Collection[int] = ()) -> list[int]:
        """The cohort of a simulation, with the next clients in the place of those not connected.

        The next ones also replace clients that failed in this round, as long as there are any.
        """
        n = self.experiment.federation.clients
        order = permuted(fold(self.experiment.seed, Purpose.COHORT, round), jnp.arange(n), n)
        connected = set(self.clients.connected())
        ready = [int(i) for i in order if int(i) in connected]
        return sorted(ready, key=lambda i: i in failed)[: self.experiment.cohort]

    def _updates(
        self, state: EngineState, cohort: list[int]
    ) -> tuple[dict[int, CheckedUpdate], dict[str, str]]:
        """The cohort's valid updates, and why others are not."""
        experiment, clients, round = self.experiment, self.clients, int(state.round)
        messages = self.broadcast(state, experiment.downlink)
        requests = {i: pack(self.request(TrainRequest, state, i), *messages) for i in cohort}
        replies = clients.send("train", round, requests)
        shapes, name, pipeline = self._update_shapes, clients.experiment, experiment.pipeline
        read = {i: read_update(replies[i], pipeline, round, shapes, name) for i in cohort}
        good = {i: found for i, found in read.items() if isinstance(found, CheckedUpdate)}
        bad = {i: found for i, found in read.items() if isinstance(found, Failure)}
        typical = typical_norm([update.norm for update in good.values()], self._typical)
        for i in list(good):
            if (failure := self._limit.check(good[i].norm, typical)) is not None:
                del good[i]
                bad[i] = failure
        # A round without any norm keeps the one before.
        norms = [update.norm for update in good.values()]
        self._typical = typical_norm(norms, None) or self._typical
        for i, failure in bad.items():
            client = clients.names[i]
            if clients.statuses[client].activity != "late":
                clients.statuses[client].set("failed", failure.reason)
            clients.log(f"round {round}: no update from {client}: {failure.reason}")
            clients.record_failure(i, failure)
        for i in cohort:
            clients.statuses[clients.names[i]].downlink_bytes += sum(map(len, messages))
        return good, {clients.names[i]: failure.reason for i, failure in bad.items()}

    def broadcast(self, state: EngineState, codec: Codec) -> list[bytes]:
        """The parts of the server's messages.

        They are the shared parameters, the method's broadcast, and running statistics.
        """
        weights, model_state = self.experiment.split_state(state.params)
        extra = self.experiment.method.broadcast(state.server_state)
        trees = ((codec, weights), (codec, extra), (STATE_CODEC, model_state))
        keys = [self.experiment.downlink_key(int(state.round), i) for i in range(len(trees))]
        return encode_parts(
            *((own, key, tree) for key, (own, tree) in zip(keys, trees, strict=True))
        )

    def request(self, kind: Any, state: EngineState, client: int) -> Any:
        """The header of a request to a client."""
        return kind(
            experiment=self.clients.experiment,
            round=int(state.round),
            number=client,
            last_accepted=int(state.clients.state[client]),
        )

    def _aggregate(
        self, state: EngineState, cohort: list[int], good: dict[int, CheckedUpdate]
    ) -> tuple[EngineState, Traffic]:
        """The next state, from the valid updates."""
        experiment, round = self.experiment, int(state.round)
        aggregate, total = experiment.pipeline.aggregate, None
        for i, update in good.items():
            size = experiment.federation.train.size[i]
            weight = jnp.asarray(size if experiment.weighting == "size" else 1.0, float)
            of_client = (update.delta, update.extra, update.model_state)
            alone = jax.tree.map(lambda leaf: leaf[None], of_client)
            own = aggregate.total(weight[None], alone)
            total = own if total is None else aggregate.add(total, own)
            status = self.clients.statuses[self.clients.names[i]]
            status.rounds += 1
            status.uplink_bytes += update.bytes
        assert total is not None
        accepted = state.clients.state.at[jnp.array(list(good))].set(round)
        slots = np.full(experiment.cohort, -1, np.int32)
        slots[: len(cohort)] = cohort
        uplink = np.array([good[int(i)].bytes if int(i) in good else 0 for i in slots], np.int32)
        sent = self.broadcast(state, experiment.downlink)
        downlink = np.array([sum(map(len, sent))], np.int32)
        records = ClientRecord(accepted, None, None)
        after = server_update(experiment, state, aggregate.finish(total), records)
        return after, Traffic(slots[None], uplink[None], downlink)


@final
class RemoteEvaluator(Evaluator):
    """Evaluation by all connected clients; the others have no scores in that round.

    Args:
        remote: the run.
        training: whether training data are scored too.
        last: the round of the last evaluation, which gives clients their final models: it waits for
            clients that are not connected.
    """

    def __init__(self, remote: RemoteEngine, training: bool, last: int | None = None) -> None:
        self._remote, self._last = remote, last
        task, federation = remote.experiment.task, remote.experiment.federation
        self._names = score_names(federation.labels is not None, training, task.l2 > 0)

    @property
    def experiment(self) -> Experiment:
        """What is trained."""
        return self._remote.experiment

    @property
    def clients(self) -> None:
        """All connected clients are scored."""
        return None

    def evaluate_runs(
        self, evaluators: Sequence[Self], states: Sequence[EngineState]
    ) -> list[Evaluation | DivergedError]:
        """The evaluation of the one run."""
        (state,) = states
        remote, clients = self._remote, self._remote.clients
        round, kinds = int(state.round), model_kinds(self.experiment)
        clients.wait_for(1, everyone=RECONNECT_TIME if round == self._last else None)
        messages = remote.broadcast(state, Float32())
        connected = clients.connected()
        requests = {
            i: pack(remote.request(EvaluateRequest, state, i), *messages) for i in connected
        }
        replies = clients.send("evaluate", round, requests)
        n = self.experiment.federation.clients
        values = {kind: {name: np.full(n, np.nan) for name in self._names} for kind in kinds}
        missing = set(range(n))
        for i, reply in replies.items():
            scores = read_scores(reply, clients.experiment, round, kinds, self._names)
            if isinstance(scores, Failure):
                clients.log(f"round {round}: no scores from {clients.names[i]}: {scores.reason}")
                clients.record_failure(i, scores)
                continue
            missing.remove(i)
            for kind, own in scores.items():
                for name, value in own.items():
                    values[kind][name][i] = value
        if missing and round == self._last:
            names = ", ".join(clients.names[i] for i in sorted(missing))
            clients.log(
                f"these clients have no model of the last round: {names}; they keep that of the "
                "last evaluation in which they took part"
            )
        sizes = np.asarray(self.experiment.federation.test.size)
        return [Evaluation(round, {kind: Scores(own, sizes) for kind, own in values.items()})]
