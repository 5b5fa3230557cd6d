"""What is trained: data, model, method, and how a cohort is drawn and its updates travel."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple, final, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from perfed.core.errors import DivergedError, FieldError, require, require_choice, require_count
from perfed.core.objective import BLOCK, Examples, Objective, Sampling
from perfed.core.random import IntLike, Purpose, fold, permuted
from perfed.core.rewriting import Review
from perfed.core.task import Model, Task
from perfed.core.trees import (
    Params,
    Path,
    combine,
    is_any_named,
    leaf_paths,
    partition,
    split,
)
from perfed.data import Federation, FlatExamples
from perfed.data.scaling import client_row
from perfed.methods import ClientState, Method, Received, RoundContext, ServerState
from perfed.methods.base import batch_examples
from perfed.methods.heads import resolve_heads, resolve_patterns
from perfed.methods.settings import batch_settings
from perfed.pipeline import Pipeline
from perfed.pipeline.codecs import Codec, Float32, RandomK, TopK
from perfed.simulation.devices import compiler_options

Weighting = Literal["uniform", "size"]
BatchNorm = Literal["shared", "personal", "personal-statistics"]

_FLOAT32 = Float32()
_PLAIN = Pipeline()

# What to do about a run that diverges.
HINT = (
    "Smaller step sizes usually help, or inputs and targets of a common scale (data.standardize); "
    "perfed diagnose says which settings the theory finds too large"
)


class ClientRecord(NamedTuple):
    """What a client keeps between its rounds, and never sends.

    Attributes:
        state: the method's; None if it keeps nothing.
        personal: the leaves of the model that are the client's own; None if there are none.
        residual: what its messages have left out so far; None without error feedback.
    """

    state: ClientState
    personal: Params | None
    residual: Params | None


NO_RECORD = ClientRecord(None, None, None)


class EngineState(NamedTuple):
    """Where a run stands; all there is to save.

    Attributes:
        round: how many rounds are done.
        params: the shared parameters. A personal leaf is None here.
        server_state: what the method keeps at the server.
        clients: what each client keeps, stacked along a first axis.
    """

    round: Int[Array, ""]
    params: Params
    server_state: ServerState
    clients: ClientRecord

    def without_clients(self) -> "EngineState":
        """The server's part."""
        return self._replace(clients=NO_RECORD)


class ServerExtra(NamedTuple):
    """What a client elsewhere knows of the server's state: what the method sends of it."""

    extra: Any


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
        test: what they are scored on; None: not needed here.
        number: the clients' numbers among all there are, which their randomness is drawn by.
        frozen: what of the model is neither trained nor sent, in one copy; None: nothing.
    """

    train: DeviceRows
    test: DeviceRows | None
    number: Int[Array, " clients"]
    frozen: Params | None = None


class Variables(NamedTuple):
    """What may differ between runs that are one compiled program.

    Attributes:
        seed: the run's seed.
        method: the method, whose leaves are numbers on a device.
    """

    seed: Int[Array, ""]
    method: Any


@final
@dataclass(frozen=True)
class Experiment:
    """What is trained.

    Attributes:
        federation: all clients' data.
        task: model and loss.
        method: the federated method.
        cohort: how many clients, uniformly sampled without replacement, take part in a round.
        seed: the seed of everything random in the run.
        weighting: the mean over the cohort: `uniform` as in the papers, or by training `size`.
        sampling: how batches are drawn (`Objective.batches`).
        pipeline: what happens to clients' deltas on their way.
        downlink: how the server's model is written, the same for the whole cohort.
        personal: leaves that stay with their clients, whatever the method, by name or by the start
            of it: `out` stands for `out.w` and `out.b`, `*.lora_B` for those of all layers, and
            `head` for the model's last layer.
        batch_norm: what clients share of layers that keep running statistics, as batch
            normalization does: all (`shared`), nothing (`personal`, which is FedBN), or all but the
            statistics (`personal-statistics`).
        first: the number of the first client among all there are, where these are only some.
    """

    federation: Federation
    task: Task
    method: Method
    cohort: int
    seed: int = 0
    weighting: Weighting = "uniform"
    sampling: Sampling = "replacement"
    pipeline: Pipeline = _PLAIN
    downlink: Codec = _FLOAT32
    personal: tuple[str, ...] = ()
    batch_norm: BatchNorm = "shared"
    first: int = 0

    def __post_init__(self) -> None:
        what = "must be a method, such as FedAvg(), not its class or name"
        require(isinstance(self.method, Method), "method", self.method, what)
        require(0 <= self.seed < 2**31, "seed", self.seed, "must be between 0 and 2^31 - 1")
        require_count("cohort", self.cohort)
        _check_model(self.task, self.federation)
        clients = self.federation.clients
        allowed = f"must be between 1 and the number of clients, {clients}"
        require(1 <= self.cohort <= clients, "cohort", self.cohort, allowed)
        require_choice("weighting", self.weighting, get_args(Weighting))
        require_choice("sampling", self.sampling, get_args(Sampling))
        require_choice("batch_norm", self.batch_norm, get_args(BatchNorm))
        allowed = "is for models that keep running statistics, and this one keeps none"
        known = self.batch_norm == "shared" or self.task.is_state is not None
        require(known, "batch_norm", self.batch_norm, allowed)
        if self.task.is_state is not None:
            _check_batches(self.method)
        what = "must be a Pipeline, such as Pipeline.of(LowPrecision())"
        require(isinstance(self.pipeline, Pipeline), "pipeline", self.pipeline, what)
        what = "must be a codec, such as LowPrecision(), not its class or name"
        require(isinstance(self.downlink, Codec), "downlink", self.downlink, what)
        allowed = "must write all of a model: cohorts change every round"
        whole = not isinstance(self.downlink, TopK | RandomK)
        require(whole, "downlink", self.downlink, allowed)
        # From here on, settings name leaves as this model has them.
        head, shape = self.task.head, self.model_shape
        personal = resolve_patterns("personal", self.personal, head, shape)
        object.__setattr__(self, "personal", personal)
        object.__setattr__(self, "method", resolve_heads(self.method, head, shape))
        classes = None if self.federation.labels is None else self.federation.outputs
        self.method.check_task(self.task, shape, classes)

    # Runs that are computed together

    def variables(self) -> Variables:
        """What may differ between runs that are computed together, as arrays."""
        leaves = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), self.method)
        return Variables(jnp.int32(self.seed), leaves)

    def with_variables(self, variables: Variables) -> "Experiment":
        """The same with other numbers, which may be traced: they are not checked again."""
        new = object.__new__(Experiment)
        new.__dict__.update(self.__dict__)
        new.__dict__.update(seed=variables.seed, method=variables.method)
        return new

    def same_program(self, other: "Experiment") -> bool:
        """Whether the two differ in numbers only, so that they can be computed together."""
        structures: list[Any] = [jax.tree.structure(e.method) for e in (self, other)]
        rest = [f.name for f in fields(self) if f.name not in ("federation", "method", "seed")]
        return bool(
            structures[0] == structures[1]
            and self.federation is other.federation
            and all(getattr(self, name) == getattr(other, name) for name in rest)
        )

    # The model, and which of it is shared

    @cached_property
    def model_shape(self) -> Params:
        """The shapes of the model's parameters."""
        return jax.eval_shape(self.task.model.init, jax.random.key(0))

    @cached_property
    def review(self) -> Review:
        """What a client does with a batch: which operations are slow, and what they take."""
        size = min(BLOCK, batch_examples(getattr(self.method, "batch", BLOCK), BLOCK))
        shape = (size, *self.federation.example_shape)
        batch = jax.ShapeDtypeStruct(shape, self.federation.example_dtype)
        return self.task.review(self.model_shape, batch)

    @property
    def cautions(self) -> tuple[str, ...]:
        """What one must know of the data and of the model before a run."""
        return tuple(filter(None, (self.federation.caution, self.review.caution)))

    @cached_property
    def is_shared(self) -> tuple[bool, ...]:
        """For each leaf of the model whether the server has it."""
        return shared_leaves(
            self.method, self.model_shape, self.personal, self.task, self.batch_norm
        )

    def divided(self, params: Params) -> tuple[Params, Params | None]:
        """The shared leaves of a model, and the personal ones."""
        return partition(params, self.is_shared)

    def split_state(self, params: Params) -> tuple[Params, Params | None]:
        """The leaves that a method sees, and the model's running statistics; None: it has none."""
        if self.task.is_state is None:
            return params, None
        model_state, weights = split(params, self.task.is_state)
        return weights, model_state

    @property
    def has_global_model(self) -> bool:
        """Whether the server's model means something by itself."""
        return self.method.has_global_model and all(self.is_shared)

    def shared_shape(self) -> Params:
        """The shapes of the shared parameters."""
        return self.divided(self.model_shape)[0]

    # Where it begins

    def init_params(self) -> Params:
        """Fresh parameters, all of them."""
        model = self.task.model
        # Inside another program, it is a part of that.
        traced = isinstance(jnp.zeros(()), jax.core.Tracer)
        return (_init if traced or not _hashable(model) else _jitted_init())(model, self.seed)

    def init_record(self, params: Params) -> ClientRecord:
        """What a client keeps before its first round, given the first model."""
        shared, personal = self.divided(params)
        state = self.method.init_client_state(self.split_state(params)[0])
        residual = self.pipeline.init_residual(self.split_state(shared)[0])
        return ClientRecord(state, personal, residual)

    def init_server(self, params: Params) -> EngineState:
        """The state before the first round, but for what clients keep."""
        shared, _ = self.divided(params)
        server_state = self.method.init_server_state(self.split_state(shared)[0])
        return EngineState(jnp.int32(0), shared, server_state, NO_RECORD)

    def init_state(self) -> EngineState:
        """The state before the first round."""
        params, n = self.init_params(), self.federation.clients
        records = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (n, *leaf.shape)), self.init_record(params)
        )
        return self.init_server(params)._replace(clients=records)

    # Data

    def device_data(self, place: Callable[[np.ndarray], Array] = jnp.asarray) -> DeviceData:
        """The federation as arrays, which `place` puts where they are needed."""
        scaling = None
        if self.federation.scaling is not None:
            shift, scale, clip = map(place, self.federation.scaling.arrays)
            scaling = (shift, scale, clip)

        def rows(flat: FlatExamples) -> DeviceRows:
            x, y, start, size = map(place, (flat.x, flat.y, flat.start, flat.size))
            return DeviceRows(x, y, start, size, scaling)

        number = place(self.first + np.arange(self.federation.clients, dtype=np.int32))
        frozen = jax.tree.map(lambda leaf: place(np.asarray(leaf)), self.task.frozen)
        return DeviceData(rows(self.federation.train), rows(self.federation.test), number, frozen)

    def objective(
        self,
        rows: DeviceRows | None,
        client: IntLike,
        frozen: Params | None = None,
        model_state: Params | None = None,
    ) -> Objective:
        """One client's problem on one side of its data.

        Args:
            rows: that side.
            client: its place in them.
            frozen: what of the model is not trained, where it is on the devices.
            model_state: the model's running statistics.
        """
        assert rows is not None, "these rows were not loaded"
        scaling = None
        if rows.scaling is not None:
            shift, scale, clip = (client_row(part, client) for part in rows.scaling)
            scaling = (shift, scale, clip)
        examples = Examples(rows.x, rows.y, rows.start[client], rows.size[client], scaling)
        return Objective(self.task, examples, self.sampling, model_state, frozen)

    # Randomness

    def sample_cohort(
        self, round: IntLike, slot: Int[Array, " slots"] | None = None
    ) -> Int[Array, " slots"]:
        """A uniform sample of clients without replacement: who is in these slots (None: in all).

        A slot past the cohort is empty; its value is the number of clients.
        """
        slot = jnp.arange(self.cohort) if slot is None else slot
        nobody = self.federation.clients
        picked = permuted(fold(self.seed, Purpose.COHORT, round), slot % nobody, nobody)
        return jnp.where(slot < self.cohort, picked, nobody)

    def context(self, round: IntLike, key: PRNGKeyArray) -> RoundContext:
        """What one who has this key knows of a round."""
        cohort_key = fold(self.seed, Purpose.ROUND, round)
        clients = self.federation.clients
        return RoundContext(jnp.asarray(round), key, cohort_key, self.cohort, clients)

    def client_key(self, purpose: Purpose, round: IntLike, number: IntLike) -> PRNGKeyArray:
        """The randomness of one client in a round."""
        return fold(self.seed, purpose, round, number)

    def uplink_key(self, round: IntLike, number: IntLike, message: int) -> PRNGKeyArray:
        """The randomness of a client's message: 0 for its delta, 1 for what goes beside it."""
        return jax.random.fold_in(self.client_key(Purpose.UPLINK, round, number), message)

    def downlink_key(self, round: IntLike, message: int = 0) -> PRNGKeyArray:
        """The randomness of the server's message: 0 for its model, 1 for what goes beside it."""
        key = fold(self.seed, Purpose.DOWNLINK, round)
        return key if message == 0 else jax.random.fold_in(key, message)

    def received(self, state: EngineState, record: ClientRecord) -> Received:
        """A client's model as the server would have it begin now, without loss on the way."""
        known = state.server_state
        extra = known.extra if isinstance(known, ServerExtra) else self.method.broadcast(known)
        return Received(combine(state.params, record.personal), extra)

    def common_model(self, state: EngineState) -> Params:
        """The whole model that a client begins with which was not there.

        Shared leaves are the server's; personal ones, of which it has none, as they were at first.
        """
        if all(self.is_shared):
            return state.params
        _, personal = self.divided(self.init_params())
        return combine(state.params, personal)

    def diverged(self, round: int, client: int) -> DivergedError:
        """The error for an update that is not finite."""
        return DivergedError(
            f"{self.method.name} diverged: the update of client {self.federation.names[client]} in "
            f"round {round} is not finite. {HINT}; the rounds before are not affected"
        )


def shared_leaves(
    method: Method,
    params: Params,
    personal: tuple[str, ...],
    task: Task,
    batch_norm: BatchNorm = "shared",
) -> tuple[bool, ...]:
    """For each leaf whether the server has it; not if the method or a setting says otherwise."""
    paths, is_state = leaf_paths(params), task.is_state
    kept: set[Path] = set()
    if batch_norm != "shared" and is_state is not None:
        statistics = {path for path in paths if is_state(path)}
        layers = {path[:-1] for path in statistics}
        whole = {path for path in paths if path[:-1] in layers}
        kept = statistics if batch_norm == "personal-statistics" else whole
    return tuple(
        method.is_shared(path) and path not in kept and not is_any_named(path, personal)
        for path in paths
    )


def _check_batches(method: Method) -> None:
    """All batches have a size, as running statistics need."""
    for name, size in batch_settings(method).items():
        allowed = (
            "the model normalizes by the statistics of a batch, and all of a client's data are too "
            f"many for that; give a number, such as {name} = 32"
        )
        require(size != "full", name, size, allowed)


def _check_model(task: Task, federation: Federation) -> None:
    """The model takes these inputs, and gives an output for each class or for the target."""
    model, shape = task.model, federation.example_shape
    example = jax.ShapeDtypeStruct((2, *shape), federation.example_dtype)

    def outputs_of(x: Array) -> Any:
        params = model.init(jax.random.key(0))
        if task.is_random:
            task.outputs(params, x, jax.random.key(0))
        return task.scored(task.outputs(params, x))

    try:
        outputs = jax.eval_shape(outputs_of, example).shape
    except FieldError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:  # the last are PyTorch's
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        allowed = f"cannot take inputs of shape {shape}: {reason}"
        raise FieldError("model", type(model).__name__, allowed) from None
    if task.loss is not None:
        return
    wanted = federation.outputs
    if federation.labels is None:
        fits, what = outputs in ((2,), (2, 1)), "the data are a regression, with one target"
    else:
        fits = len(outputs) == 2 and outputs[1] >= wanted
        what = f"the data have {wanted} classes"
    require(fits, "model", model, f"gives outputs of shape {outputs[1:]}, but {what}")


def _init(model: Model, seed: IntLike) -> Params:
    return model.init(fold(seed, Purpose.INIT))


@cache
def _jitted_init() -> Callable[[Model, int], Params]:
    # One program instead of one for every kind of draw: a second less to compile.
    return jax.jit(_init, static_argnums=0, compiler_options=compiler_options())


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
