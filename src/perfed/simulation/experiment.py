"""What is simulated, and the steps of a round that every engine shares."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, NamedTuple, final, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from perfed.core.errors import DivergedError, FieldError, require, require_choice, require_count
from perfed.core.objective import Examples, Model, Objective, Params, Sampling, Task
from perfed.core.random import IntLike, Purpose, fold, permuted
from perfed.data import Federation, FlatExamples
from perfed.data.scaling import own_row
from perfed.methods import Method, Turn
from perfed.methods.base import Memory, change, changed
from perfed.pipeline.codecs import Codec, Float32, RandomK, Sent, TopK
from perfed.simulation.devices import compiler_options

Weighting = Literal["uniform", "size"]

_AS_IT_IS = Float32()

# What to do about a run that diverges.
HINT = (
    "Smaller step sizes usually help, or inputs and targets of a common scale (data.standardize); "
    "perfed diagnose says which settings the theory finds too large"
)


class Kept(NamedTuple):
    """What a client keeps between its turns, and never sends.

    Attributes:
        memory: the method's; None if nothing.
        residual: what its messages have left out so far; None without error feedback.
    """

    memory: Memory
    residual: Params | None


class State(NamedTuple):
    """Where a run stands; all there is to save.

    Attributes:
        round: how many rounds are done.
        w: the global model.
        kept: what each client keeps, stacked along a first axis.
        iterate: the cohort's mean iterate in the last round, where the method sends one.
    """

    round: Int[Array, ""]
    w: Params
    kept: Kept
    iterate: Params | None


class Numbers(NamedTuple):
    """What may differ between runs that are computed at once.

    Attributes:
        seed: the run's seed.
        rates: the method's settings that are only numbers (`Method.rates`).
    """

    seed: Int[Array, ""]
    rates: dict[str, Float[Array, ""]]


class DeviceRows(NamedTuple):
    """`FlatExamples` as arrays of a device program, with the inputs' scaling if they have one."""

    x: Array
    y: Array
    start: Int[Array, " clients"]
    size: Int[Array, " clients"]
    scaling: tuple[Array, Array, Array] | None


class DeviceData(NamedTuple):
    """Clients' examples, on the devices. Here a client is its place among those that are in it.

    Attributes:
        train: what they learn from.
        test: what they are scored on; None: nobody asks here.
        number: the clients' numbers among all there are, which their randomness is drawn by.
    """

    train: DeviceRows
    test: DeviceRows | None
    number: Int[Array, " clients"]


class Due(NamedTuple):
    """What a client has after its turn, before anything is sent.

    Attributes:
        weight: the client's weight in the mean.
        change: what it has to send: its local model minus the one it was sent, and what earlier
            messages have left out.
        iterate: its iterate minus the model it was sent, if the method sends one.
        memory: what it remembers.
    """

    weight: Float[Array, ""]
    change: Params
    iterate: Params | None
    memory: Memory


class Contribution(NamedTuple):
    """What one client's turn adds to the round.

    Attributes:
        weight: the client's weight in the mean.
        change: its local model minus the one it was sent, as the server receives it.
        iterate: its iterate minus the model it was sent, if the method sends one.
        kept: what it keeps; this one stays with the client.
        finite: whether all that it sends and keeps is finite.
        bytes: the length of its messages.
    """

    weight: Float[Array, ""]
    change: Params
    iterate: Params | None
    kept: Kept
    finite: Bool[Array, ""]
    bytes: Int[Array, ""]


@final
@dataclass(frozen=True)
class Setup:
    """What is simulated.

    Attributes:
        federation: all clients' data.
        task: model and loss.
        method: the federated method.
        cohort: how many clients, uniformly sampled without replacement, take part in a round.
        seed: the seed of everything random in the run.
        weighting: the mean over the cohort: `uniform` as in the papers, or by training `size`.
        sampling: how batches are drawn (`Objective.batches`).
        codec: how clients' changes become messages.
        downlink: how the server's model becomes one, the same for the whole cohort.
        first: the number of the first client among all there are, where these are only some.
    """

    federation: Federation
    task: Task
    method: Method
    cohort: int
    seed: int = 0
    weighting: Weighting = "uniform"
    sampling: Sampling = "replacement"
    codec: Codec = _AS_IT_IS
    downlink: Codec = _AS_IT_IS
    first: int = 0

    def __post_init__(self) -> None:
        what = "must be a method, such as FedAvg(), not its class or name"
        require(isinstance(self.method, Method), "method", self.method, what)
        require(0 <= self.seed < 2**31, "seed", self.seed, "must be between 0 and 2^31 - 1")
        require_count("cohort", self.cohort)
        self._check_model()
        clients = self.federation.clients
        allowed = f"must be between 1 and the number of clients, {clients}"
        require(1 <= self.cohort <= clients, "cohort", self.cohort, allowed)
        require_choice("weighting", self.weighting, get_args(Weighting))
        require_choice("sampling", self.sampling, get_args(Sampling))
        for field in ("codec", "downlink"):
            given = getattr(self, field)
            what = "must be a codec, such as LowPrecision(), not its class or name"
            require(isinstance(given, Codec), field, given, what)
        allowed = "must write all of a model, without error feedback: cohorts change every round"
        whole = not self.downlink.error_feedback and not isinstance(self.downlink, TopK | RandomK)
        require(whole, "downlink", self.downlink, allowed)

    def _check_model(self) -> None:
        """The model takes these inputs, and gives an output for each class or for the target."""
        model, shape = self.task.model, self.federation.example_shape
        example = jax.ShapeDtypeStruct((1, *shape), self.federation.example_type)
        try:
            outputs = jax.eval_shape(
                lambda x: model.apply(model.init(jax.random.key(0)), x), example
            ).shape
        except (TypeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise FieldError(
                "model", model, f"cannot take inputs of shape {shape}: {reason}"
            ) from None
        if self.task.loss is not None:
            return
        wanted = self.federation.outputs
        if self.federation.labels is None:
            fits, what = outputs in ((1,), (1, 1)), "the data are a regression, with one target"
        else:
            fits = len(outputs) == 2 and outputs[1] >= wanted
            what = f"the data have {wanted} classes"
        require(fits, "model", model, f"gives outputs of shape {outputs[1:]}, but {what}")

    def numbers(self) -> Numbers:
        """What may differ between runs that are computed at once."""
        given = {name: getattr(self.method, name) for name in type(self.method).rates}
        return Numbers(
            jnp.int32(self.seed),
            {k: jnp.asarray(v, float) for k, v in given.items() if v is not None},
        )

    def with_numbers(self, numbers: Numbers) -> "Setup":
        """The same with other numbers, which may be traced: they are not checked again."""
        method, setup = copy(self.method), copy(self)
        for name, value in numbers.rates.items():
            object.__setattr__(method, name, value)
        object.__setattr__(setup, "method", method)
        object.__setattr__(setup, "seed", numbers.seed)
        return setup

    def alike(self, other: "Setup") -> bool:
        """Whether the two differ in nothing but numbers, so that they can be computed at once."""
        if type(self.method) is not type(other.method):
            return False
        rates = type(self.method).rates
        both = [
            {
                field.name: (value is None) if field.name in rates else value
                for field in fields(method)  # type: ignore[arg-type]
                for value in [getattr(method, field.name)]
            }
            for method in (self.method, other.method)
        ]
        rest = [f.name for f in fields(self) if f.name not in ("federation", "method", "seed")]
        return (
            both[0] == both[1]
            and self.federation is other.federation
            and all(getattr(self, name) == getattr(other, name) for name in rest)
        )

    def model_shape(self) -> Params:
        """The shapes of the model's parameters."""
        return jax.eval_shape(self.task.model.init, jax.random.key(0))

    def world(self, place: Callable[[np.ndarray], Array] = jnp.asarray) -> DeviceData:
        """The federation as arrays, which `place` puts where they are needed."""
        scaling = None
        if self.federation.scaling is not None:
            shift, scale, clip = map(place, self.federation.scaling.arrays)
            scaling = (shift, scale, clip)

        def rows(flat: FlatExamples) -> DeviceRows:
            x, y, start, size = map(place, (flat.x, flat.y, flat.start, flat.size))
            return DeviceRows(x, y, start, size, scaling)

        number = place(self.first + np.arange(self.federation.clients, dtype=np.int32))
        return DeviceData(rows(self.federation.train), rows(self.federation.test), number)

    def first_model(self) -> Params:
        """Fresh parameters."""
        model = self.task.model
        # Inside another program, it is a part of that.
        traced = isinstance(jnp.zeros(()), jax.core.Tracer)
        return (_drawn if traced or not _hashable(model) else _drawing())(model, self.seed)

    def first_kept(self, w: Params) -> Kept:
        """What a client keeps that has not had a turn."""
        residual = jax.tree.map(jnp.zeros_like, w) if self.codec.error_feedback else None
        return Kept(self.method.first_memory(w), residual)

    def first_state(self) -> State:
        """Fresh parameters, and the memory of clients that have not had a turn."""
        w, n = self.first_model(), self.federation.clients
        everyones = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (n, *leaf.shape)), self.first_kept(w)
        )
        return State(jnp.int32(0), w, everyones, w if self.method.send_iterate else None)

    def pick_cohort(
        self, round: IntLike, seat: Int[Array, " seats"] | None = None
    ) -> Int[Array, " seats"]:
        """A uniform sample of clients without replacement: who has these seats (None: all of them).

        A seat past the cohort is empty: nobody has it, which is said by the number of clients.
        """
        seat = jnp.arange(self.cohort) if seat is None else seat
        nobody = self.federation.clients
        picked = permuted(fold(self.seed, Purpose.COHORT, round), seat % nobody, nobody)
        return jnp.where(seat < self.cohort, picked, nobody)

    def turn(self, round: IntLike) -> Turn:
        """What the server tells every client of the round."""
        return Turn(jnp.asarray(round), fold(self.seed, Purpose.TURN, round))

    def objective(self, rows: DeviceRows | None, client: IntLike) -> Objective:
        """One client's problem on one side of its data."""
        assert rows is not None, "these rows were not asked for"
        scaling = None
        if rows.scaling is not None:
            shift, scale, clip = (own_row(part, client) for part in rows.scaling)
            scaling = (shift, scale, clip)
        examples = Examples(rows.x, rows.y, rows.start[client], rows.size[client], scaling)
        return Objective(self.task, examples, self.sampling)

    def broadcast(self, w: Params, round: IntLike) -> Sent:
        """The server's model as the cohort receives it, and the length of the message."""
        sent = self.downlink.send(self.downlink_key(round), w)
        return sent if self.method.sends else Sent(w, jnp.int32(0))

    def downlink_key(self, round: IntLike) -> PRNGKeyArray:
        """The randomness of the server's message."""
        return fold(self.seed, Purpose.DOWNLINK, round)

    def uplink_key(self, round: IntLike, number: IntLike, message: int) -> PRNGKeyArray:
        """The randomness of a client's message, 0 for its change and 1 for its iterate."""
        return jax.random.fold_in(self.client_key(Purpose.UPLINK, round, number), message)

    def client_key(self, purpose: Purpose, round: IntLike, number: IntLike) -> PRNGKeyArray:
        """The randomness of one client in a round."""
        return fold(self.seed, purpose, round, number)

    @property
    def iterate_codec(self) -> Codec:
        """How iterates are sent: nothing makes up for what a message leaves out, so as if alone."""
        return replace(self.codec, error_feedback=False)

    def work(
        self, world: DeviceData, w: Params, kept: Kept, round: IntLike, client: IntLike
    ) -> Due:
        """One client's turn in a round, from the model it was sent."""
        objective = self.objective(world.train, client)
        key = self.client_key(Purpose.LOCAL, round, world.number[client])
        reply = self.method.local(objective, w, kept.memory, self.turn(round), key)
        asked, what = self.method.send_iterate, "the method's replies say otherwise: see Method"
        require((reply.iterate is not None) == asked, "send_iterate", asked, what)
        due = change(reply.w, w)
        if kept.residual is not None:
            due = changed(due, kept.residual)
        iterate = None if reply.iterate is None else change(reply.iterate, w)
        weight = objective.examples.size if self.weighting == "size" else 1.0
        return Due(jnp.asarray(weight, float), due, iterate, reply.memory)

    def take_turn(
        self, world: DeviceData, w: Params, kept: Kept, round: IntLike, client: IntLike
    ) -> Contribution:
        """One client's turn, and what the server receives of it."""
        due = self.work(world, w, kept, round, client)
        number = world.number[client]
        sent = self.codec.send(self.uplink_key(round, number, 0), due.change)
        residual = None if kept.residual is None else change(due.change, sent.received)
        iterate, extra = None, jnp.int32(0)
        if due.iterate is not None:
            key = self.uplink_key(round, number, 1)
            iterate, extra = self.iterate_codec.send(key, due.iterate)
        kept = Kept(due.memory, residual)
        finite = all_finite((due.change, sent.received, iterate, kept))
        return Contribution(
            due.weight,
            sent.received,
            iterate,
            kept,
            finite,
            sent.bytes + extra if self.method.sends else jnp.int32(0),
        )

    def close_round(
        self, state: State, total: tuple[Float[Array, ""], Params, Params | None], kept: Kept
    ) -> State:
        """The next state, from the cohort's weighted sums (weight, change, iterate)."""
        weight, change_sum, iterate_sum = total
        mean_change, mean_iterate = jax.tree.map(
            lambda leaf: (leaf / weight).astype(leaf.dtype), (change_sum, iterate_sum)
        )
        w = self.method.merge(state.w, mean_change)
        iterate = None if mean_iterate is None else changed(state.w, mean_iterate)
        return State(state.round + 1, w, kept, iterate)

    def diverged(self, round: int, client: int) -> DivergedError:
        """The error for an update that is not finite."""
        return DivergedError(
            f"{self.method.name} diverged: the update of client {self.federation.names[client]} in "
            f"round {round} is not finite. {HINT}; the rounds before are not affected"
        )


def _drawn(model: Model, seed: IntLike) -> Params:
    return model.init(fold(seed, Purpose.INIT))


@cache
def _drawing() -> Callable[[Model, int], Params]:
    # One program instead of one for every kind of draw: a second less to compile.
    return jax.jit(_drawn, static_argnums=0, compiler_options=compiler_options())


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Whether every entry of every leaf is finite."""
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()
