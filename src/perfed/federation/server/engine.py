"""Rounds with clients that are elsewhere: the same sentence as ever, over the network."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Self, final, get_args

import jax
import jax.numpy as jnp
import numpy as np

from perfed.core.errors import DivergedError
from perfed.core.random import Purpose, fold, permuted
from perfed.data.federation import FlatExamples
from perfed.evaluation.evaluator import Evaluation, ModelKind, Scorer, Scores, score_names
from perfed.federation.protocol.messages import Scoring, Turn, packed
from perfed.federation.server.checks import (
    Lengths,
    Received,
    read_change,
    read_scores,
    usual_length,
)
from perfed.federation.server.clients import RETURN, Clients
from perfed.federation.transport.messenger import Fault
from perfed.pipeline.codecs import Float32
from perfed.runs.sections import FederationSection
from perfed.simulation import Kept, Rounds, Setup, State, Traffic
from perfed.simulation.engine import Advanced


class TooFewError(OSError):
    """A round that too few clients have answered, again and again."""


@final
class Remote(Rounds):
    """A run whose clients are asked over the network.

    The state has no client's memory, which never leaves it. In its place it holds, for each client,
    the last round in which its answer counted: so a client knows which of its own memories is the
    right one, whatever was lost on the way.
    """

    def __init__(self, setup: Setup, clients: Clients, terms: FederationSection) -> None:
        self.setup, self.clients, self._terms = setup, clients, terms
        self._lengths = Lengths(terms.norm_factor, terms.max_norm)
        self._usual: float | None = None

    @property
    def aside(self) -> None:
        """All is in the state."""
        return None

    def start(self) -> State:
        """The first model, and nobody has been heard of."""
        federation = self.setup.federation
        one = FlatExamples.joined(
            np.zeros((1, *federation.example_shape), federation.train.x.dtype),
            np.zeros(1, federation.train.y.dtype),
            [1],
        )
        # A client's first state, for the model and whether iterates are sent.
        alone = replace(federation, train=one, test=one, names=("",))
        first = replace(self.setup, federation=alone, cohort=1).first_state()
        counted = jnp.full(federation.clients, -1, jnp.int32)
        return State(first.round, first.w, Kept(counted, None), first.iterate)

    def record_all(
        self, setups: Sequence[Setup], states: Sequence[State], rounds: int
    ) -> list[Advanced]:
        """The rounds of one run."""
        (state,) = states
        parts = [self.nothing_sent()]
        for _ in range(rounds):
            state, traffic = self._round(state)
            parts.append(traffic)
        return [(state, Traffic.joined(parts))]

    def _round(self, state: State) -> tuple[State, Traffic]:
        """One round, tried a few times if too few clients answer."""
        round, least = int(state.round), self._terms.least(self.setup.cohort)
        faults: dict[str, str] = {}
        failed: set[int] = set()  # in an earlier attempt
        for attempt in range(self._terms.attempts):
            self.clients.gather(least)
            cohort = self._cohort(round, failed)
            good, faults = self._turns(state, cohort)
            failed |= set(cohort) - good.keys()
            if len(good) >= least:
                return self._closed(state, cohort, good)
            left = self._terms.attempts - attempt - 1
            again = "once more" if left else "no more"
            self.clients.say(
                f"round {round}: {len(good)} of {len(cohort)} answers count, {least} are needed; "
                f"it is tried {again}"
            )
        told = "; ".join(f"{name}: {reason}" for name, reason in faults.items())
        raise TooFewError(
            f"round {round}: fewer than {least} answers count after {self._terms.attempts} "
            f"attempts ({told})"
        )

    def _cohort(self, round: int, failed: Collection[int] = ()) -> list[int]:
        """As a simulation picks it; the seat of a client that is away goes to the next one.

        So does that of one that has failed in this round, as long as there is a next one.
        """
        n = self.setup.federation.clients
        order = permuted(fold(self.setup.seed, Purpose.COHORT, round), jnp.arange(n), n)
        here = set(self.clients.here())
        ready = [int(i) for i in order if int(i) in here]
        return sorted(ready, key=lambda i: i in failed)[: self.setup.cohort]

    def _turns(self, state: State, cohort: list[int]) -> tuple[dict[int, Received], dict[str, str]]:
        """The cohort's changes that count, and why others do not."""
        setup, clients, round = self.setup, self.clients, int(state.round)
        message = self._downlink(state)
        questions = {
            i: packed(self.asked(Turn, state, i), *([message] if setup.method.sends else ()))
            for i in cohort
        }
        answers = clients.ask("turn", round, questions)
        read = {i: read_change(answers[i], setup, state, clients.experiment) for i in cohort}
        good = {i: found for i, found in read.items() if isinstance(found, Received)}
        bad = {i: found for i, found in read.items() if isinstance(found, Fault)}
        usual = usual_length([received.norm for received in good.values()], self._usual)
        for i in list(good):
            if (fault := self._lengths.fault(good[i].norm, usual)) is not None:
                del good[i]
                bad[i] = fault
        if good:
            lengths = [received.norm for received in good.values()]
            # One that says nothing is no reason to forget what is usual.
            self._usual = usual_length(lengths, None) or self._usual
        for i, fault in bad.items():
            name = clients.names[i]
            if clients.seats[name].doing != "late":
                clients.seats[name].now("refused", fault.reason)
            clients.say(f"round {round}: {name} does not count: {fault.reason}")
            clients.forget(i, fault)
        for i in cohort:
            clients.seats[clients.names[i]].downlink_bytes += len(message)
        return good, {clients.names[i]: fault.reason for i, fault in bad.items()}

    def _downlink(self, state: State) -> bytes:
        """The model as it is sent."""
        if not self.setup.method.sends:
            return b""
        return self.setup.downlink.encode(self.setup.downlink_key(int(state.round)), state.w)

    def asked(self, kind: Any, state: State, client: int) -> Any:
        """The header of a question to a client."""
        return kind(
            experiment=self.clients.experiment,
            round=int(state.round),
            number=client,
            counted=int(state.kept.memory[client]),
        )

    def _closed(
        self, state: State, cohort: list[int], good: dict[int, Received]
    ) -> tuple[State, Traffic]:
        """The next state, from the changes that count."""
        setup, round = self.setup, int(state.round)
        total: Any = None
        for i, received in good.items():
            size = setup.federation.train.size[i]
            weight = jnp.asarray(size if setup.weighting == "size" else 1.0, float)
            part = jax.tree.map(
                lambda leaf, weight=weight: weight.astype(leaf.dtype) * leaf,
                (jnp.ones(()), received.change, received.iterate),
            )
            total = part if total is None else jax.tree.map(jnp.add, total, part)
            seat = self.clients.seats[self.clients.names[i]]
            seat.rounds, seat.uplink_bytes = seat.rounds + 1, seat.uplink_bytes + received.bytes
        counted = state.kept.memory.at[jnp.array(list(good))].set(round)
        seats = np.full(setup.cohort, -1, np.int32)
        seats[: len(cohort)] = cohort
        uplink = np.array([good[int(i)].bytes if int(i) in good else 0 for i in seats], np.int32)
        downlink = np.array([len(self._downlink(state))], np.int32)
        return setup.close_round(state, total, Kept(counted, None)), Traffic(
            seats[None], uplink[None], downlink
        )


@final
class RemoteScorer(Scorer):
    """Asks every client that is there how good the models are.

    A client that is away, or whose answer does not count, has no scores in that round.

    Args:
        remote: the run.
        training: whether training data are scored too.
        last: the round of the last scoring, in which clients get the models they are left with: one
            that is away is waited for.
    """

    def __init__(self, remote: Remote, training: bool, last: int | None = None) -> None:
        self._remote, self._last = remote, last
        task, federation = remote.setup.task, remote.setup.federation
        self._names = score_names(federation.labels is not None, training, task.l2 > 0)

    @property
    def setup(self) -> Setup:
        """What is run."""
        return self._remote.setup

    @property
    def clients(self) -> None:
        """Everyone is scored who is there."""
        return None

    def score_all(
        self, scorers: Sequence[Self], states: Sequence[State]
    ) -> list[Evaluation | DivergedError]:
        """Of the one run."""
        (state,) = states
        remote, clients = self._remote, self._remote.clients
        round = int(state.round)
        clients.gather(1, everyone=RETURN if round == self._last else None)
        message = Float32().encode(jax.random.key(0), state.w)
        here = clients.here()
        questions = {i: packed(remote.asked(Scoring, state, i), message) for i in here}
        answers = clients.ask("scoring", round, questions)
        n = self.setup.federation.clients
        values = {
            kind: {name: np.full(n, np.nan) for name in self._names} for kind in get_args(ModelKind)
        }
        left = set(range(n))
        for i, answer in answers.items():
            scores = read_scores(answer, clients.experiment, round, self._names)
            if isinstance(scores, Fault):
                clients.say(f"{clients.names[i]} has no scores after {round}: {scores.reason}")
                clients.forget(i, scores)
                continue
            left.remove(i)
            for kind, own in scores.items():
                for name, value in own.items():
                    values[kind][name][i] = value
        if left and round == self._last:
            names = ", ".join(clients.names[i] for i in sorted(left))
            clients.say(
                f"without a model of their own from the last round: {names}; what they have is of "
                "the last scoring that they answered"
            )
        sizes = np.asarray(self.setup.federation.test.size)
        return [Evaluation(round, {kind: Scores(own, sizes) for kind, own in values.items()}, None)]
