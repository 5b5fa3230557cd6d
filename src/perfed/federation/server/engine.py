"""Rounds with clients that are elsewhere: the same sentence as ever, over the network."""

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
    Lengths,
    read_scores,
    read_update,
    usual_length,
)
from perfed.federation.server.clients import RETURN, ClientManager
from perfed.federation.transport.messenger import Failure
from perfed.pipeline.codecs import Codec, Float32
from perfed.runs.sections import FederationSection
from perfed.simulation import ClientRecord, Engine, EngineState, Experiment, Traffic
from perfed.simulation.engine import RoundsResult
from perfed.simulation.experiment import NO_RECORD
from perfed.simulation.round import server_update, train_client


class TooFewError(OSError):
    """A round that too few clients have answered, again and again."""


@final
class RemoteEngine(Engine):
    """A run whose clients are asked over the network.

    The state has nothing of what clients keep, which never leaves them. In its place it holds, for
    each client, the last round in which its answer counted: so a client knows which of its own
    records is the right one, whatever was lost on the way.
    """

    def __init__(
        self, experiment: Experiment, clients: ClientManager, terms: FederationSection
    ) -> None:
        self.experiment, self.clients, self._terms = experiment, clients, terms
        self._lengths = Lengths(terms.norm_factor, terms.max_norm)
        self._usual: float | None = None

    def init(self) -> EngineState:
        """The first model, and nobody has been heard of."""
        state = self._alone.init_server(self._alone.init_params())
        counted = jnp.full(self.experiment.federation.clients, -1, jnp.int32)
        return state._replace(clients=ClientRecord(counted, None, None))

    @cached_property
    def _alone(self) -> Experiment:
        """The same experiment of one client with one row: for the shapes of all there is."""
        federation = self.experiment.federation
        one = FlatExamples.from_rows(
            np.zeros((1, *federation.example_shape), federation.train.x.dtype),
            np.zeros(1, federation.train.y.dtype),
            [1],
        )
        alone = replace(federation, train=one, test=one, names=("",))
        return replace(self.experiment, federation=alone, cohort=1)

    @cached_property
    def _extra_shape(self) -> Any:
        """What clients send beside their deltas, by its shapes."""
        alone = self._alone
        params = alone.init_params()
        received = alone.received(alone.init_server(params), NO_RECORD)
        received = received._replace(params=params)
        record, data = alone.init_record(params), alone.device_data()
        return jax.eval_shape(lambda: train_client(alone, data, received, record, 0, 0)).extra

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
        """One round, tried a few times if too few clients answer."""
        round, least = int(state.round), self._terms.least(self.experiment.cohort)
        reasons: dict[str, str] = {}
        failed: set[int] = set()  # in an earlier attempt
        for attempt in range(self._terms.attempts):
            self.clients.gather(least)
            cohort = self._cohort(round, failed)
            good, reasons = self._updates(state, cohort)
            failed |= set(cohort) - good.keys()
            if len(good) >= least:
                return self._aggregated(state, cohort, good)
            left = self._terms.attempts - attempt - 1
            again = "once more" if left else "no more"
            self.clients.log(
                f"round {round}: {len(good)} of {len(cohort)} answers count, {least} are needed; "
                f"it is tried {again}"
            )
        text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise TooFewError(
            f"round {round}: fewer than {least} answers count after {self._terms.attempts} "
            f"attempts ({text})"
        )

    def _cohort(self, round: int, failed: Collection[int] = ()) -> list[int]:
        """As a simulation samples it; the slot of a client that is away goes to the next one.

        So does that of one that has failed in this round, as long as there is a next one.
        """
        n = self.experiment.federation.clients
        order = permuted(fold(self.experiment.seed, Purpose.COHORT, round), jnp.arange(n), n)
        here = set(self.clients.here())
        ready = [int(i) for i in order if int(i) in here]
        return sorted(ready, key=lambda i: i in failed)[: self.experiment.cohort]

    def _updates(
        self, state: EngineState, cohort: list[int]
    ) -> tuple[dict[int, CheckedUpdate], dict[str, str]]:
        """The cohort's updates that count, and why others do not."""
        experiment, clients, round = self.experiment, self.clients, int(state.round)
        messages = self.broadcast(state, experiment.downlink)
        requests = {i: pack(self.request(TrainRequest, state, i), *messages) for i in cohort}
        answers = clients.ask("train", round, requests)
        extra, name = self._extra_shape, clients.experiment
        read = {i: read_update(answers[i], experiment, state, extra, name) for i in cohort}
        good = {i: found for i, found in read.items() if isinstance(found, CheckedUpdate)}
        bad = {i: found for i, found in read.items() if isinstance(found, Failure)}
        usual = usual_length([update.norm for update in good.values()], self._usual)
        for i in list(good):
            if (failure := self._lengths.fault(good[i].norm, usual)) is not None:
                del good[i]
                bad[i] = failure
        if good:
            lengths = [update.norm for update in good.values()]
            # One that says nothing is no reason to forget what is usual.
            self._usual = usual_length(lengths, None) or self._usual
        for i, failure in bad.items():
            client = clients.names[i]
            if clients.statuses[client].activity != "late":
                clients.statuses[client].now("refused", failure.reason)
            clients.log(f"round {round}: {client} does not count: {failure.reason}")
            clients.forget(i, failure)
        for i in cohort:
            clients.statuses[clients.names[i]].downlink_bytes += sum(map(len, messages))
        return good, {clients.names[i]: failure.reason for i, failure in bad.items()}

    def broadcast(self, state: EngineState, codec: Codec) -> list[bytes]:
        """What the server sends, as messages: its model, and what goes beside it."""
        trees = (state.params, self.experiment.method.broadcast(state.server_state))
        keys = (self.experiment.downlink_key(int(state.round), i) for i in range(len(trees)))
        return encode_parts(*((codec, key, tree) for key, tree in zip(keys, trees, strict=True)))

    def request(self, kind: Any, state: EngineState, client: int) -> Any:
        """The header of a request to a client."""
        return kind(
            experiment=self.clients.experiment,
            round=int(state.round),
            number=client,
            last_accepted=int(state.clients.state[client]),
        )

    def _aggregated(
        self, state: EngineState, cohort: list[int], good: dict[int, CheckedUpdate]
    ) -> tuple[EngineState, Traffic]:
        """The next state, from the updates that count."""
        experiment, round = self.experiment, int(state.round)
        aggregate, total = experiment.pipeline.aggregate, None
        for i, update in good.items():
            size = experiment.federation.train.size[i]
            weight = jnp.asarray(size if experiment.weighting == "size" else 1.0, float)
            alone = jax.tree.map(lambda leaf: leaf[None], (update.delta, update.extra))
            more = aggregate.total(weight[None], alone)
            total = more if total is None else aggregate.add(total, more)
            status = self.clients.statuses[self.clients.names[i]]
            status.rounds, status.uplink_bytes = (
                status.rounds + 1,
                status.uplink_bytes + update.bytes,
            )
        assert total is not None
        counted = state.clients.state.at[jnp.array(list(good))].set(round)
        slots = np.full(experiment.cohort, -1, np.int32)
        slots[: len(cohort)] = cohort
        uplink = np.array([good[int(i)].bytes if int(i) in good else 0 for i in slots], np.int32)
        sent = self.broadcast(state, experiment.downlink)
        downlink = np.array([sum(map(len, sent))], np.int32)
        records = ClientRecord(counted, None, None)
        after = server_update(experiment, state, aggregate.finish(total), records)
        return after, Traffic(slots[None], uplink[None], downlink)


@final
class RemoteEvaluator(Evaluator):
    """Asks every client that is there how good the models are.

    A client that is away, or whose answer does not count, has no scores in that round.

    Args:
        remote: the run.
        training: whether training data are scored too.
        last: the round of the last scoring, in which clients get the models they are left with: one
            that is away is waited for.
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
        """Everyone is scored who is there."""
        return None

    def evaluate_runs(
        self, evaluators: Sequence[Self], states: Sequence[EngineState]
    ) -> list[Evaluation | DivergedError]:
        """Of the one run."""
        (state,) = states
        remote, clients = self._remote, self._remote.clients
        round, kinds = int(state.round), model_kinds(self.experiment)
        clients.gather(1, everyone=RETURN if round == self._last else None)
        messages = remote.broadcast(state, Float32())
        here = clients.here()
        requests = {i: pack(remote.request(EvaluateRequest, state, i), *messages) for i in here}
        answers = clients.ask("evaluate", round, requests)
        n = self.experiment.federation.clients
        values = {kind: {name: np.full(n, np.nan) for name in self._names} for kind in kinds}
        left = set(range(n))
        for i, answer in answers.items():
            scores = read_scores(answer, clients.experiment, round, kinds, self._names)
            if isinstance(scores, Failure):
                clients.log(f"{clients.names[i]} has no scores after {round}: {scores.reason}")
                clients.forget(i, scores)
                continue
            left.remove(i)
            for kind, own in scores.items():
                for name, value in own.items():
                    values[kind][name][i] = value
        if left and round == self._last:
            names = ", ".join(clients.names[i] for i in sorted(left))
            clients.log(
                f"without a model of their own from the last round: {names}; what they have is of "
                "the last scoring that they answered"
            )
        sizes = np.asarray(self.experiment.federation.test.size)
        return [Evaluation(round, {kind: Scores(own, sizes) for kind, own in values.items()})]
