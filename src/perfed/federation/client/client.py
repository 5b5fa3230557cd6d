"""One client: its own data, what it keeps, and its answers to the server's messages."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from perfed.core.trees import Params, combine, row
from perfed.data import Dataset, Federation
from perfed.data.files import client_files
from perfed.data.splits import NaturalSplit
from perfed.evaluation import SimulationEvaluator
from perfed.federation.client.client_dir import ClientDir, RecordPair
from perfed.federation.protocol.errors import UNKNOWN, OwnDataError, RefusalError
from perfed.federation.protocol.messages import (
    ClientInfo,
    EvaluateReply,
    EvaluateRequest,
    JoinRequest,
    TrainReply,
    TrainRequest,
    packed,
    unpacked,
)
from perfed.federation.protocol.rules import check_source
from perfed.methods import Received
from perfed.pipeline.codecs import Codec, Float32
from perfed.runs.config import Config
from perfed.runs.saved_model import saved_model
from perfed.simulation import ClientRecord, EngineState, Experiment, Sequential
from perfed.simulation.experiment import DeviceData, ServerExtra, Variables
from perfed.simulation.round import Trained, train_client

# How a client's file is read; all else of `[data]` is about where a simulation finds its files.
_READING = ("label", "features", "task", "labels", "part")
_PREPARING = ("test_from", "test_fraction", "standardize", "clip", "seed")


@final
class Client:
    """Answers the server, from its own file and its own folder.

    Args:
        client_dir: the client's folder.
        data: the client's file.
        name: what it calls itself where no key says who it is.
    """

    def __init__(self, client_dir: ClientDir, data: Path, name: str = "") -> None:
        self.client_dir, self.data, self.name = client_dir, data, name
        self._known: dict[str, _Training] = {}

    def answer(self, blob: bytes, kind: str) -> bytes:
        """The answer to a message; what is wrong with it is raised."""
        answers = {"join": self.join, "train": self.train, "evaluate": self.evaluate}
        if kind not in answers:
            raise RefusalError(f"a message of kind {kind!r} means nothing to a client")
        return answers[kind](blob)

    def join(self, blob: bytes) -> bytes:
        """Read the data as the experiment asks, and tell what they look like from outside."""
        request, _ = unpacked(blob, JoinRequest)
        facts = {"config": request.config, "name": request.name or self.name}
        training = _Training.of(facts, self.data)
        self.client_dir.begin(request.experiment, facts)
        self._known = {request.experiment: training}
        own = training.experiment.federation
        return packed(
            ClientInfo(
                experiment=request.experiment,
                name=self.name,
                shape=own.example_shape,
                dtype=str(own.train.x.dtype),  # type: ignore[arg-type]
                features=own.features,
                train=int(own.train.size[0]),
                test=int(own.test.size[0]),
            )
        )

    def train(self, blob: bytes) -> bytes:
        """A local update, written by the pipeline. What is kept is on the disk before it goes."""
        request, parts = unpacked(blob, TrainRequest)
        training = self._training(request)
        experiment, round = training.experiment, request.round
        received, record = self._received(training, request, parts, experiment.downlink)
        trained = training.train(received, record, round)
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trained)):
            raise experiment.diverged(round, 0)
        pipeline, messages, residual = experiment.pipeline, [], None
        if jax.tree.leaves(trained.written):
            key = experiment.uplink_key(round, request.number, 0)
            messages.append(pipeline.codec.encode(key, trained.written))
            arrived = pipeline.codec.decode(messages[0], trained.written)
            residual = pipeline.left_out(trained.written, arrived)
        if jax.tree.leaves(trained.extra):
            key = experiment.uplink_key(round, request.number, 1)
            messages.append(pipeline.extra_codec.encode(key, trained.extra))
        after = ClientRecord(trained.state, trained.personal, residual)
        records = RecordPair(request.counted, round, record, after)
        self.client_dir.write_records(request.experiment, records)
        return packed(TrainReply(experiment=request.experiment, round=round), *messages)

    def evaluate(self, blob: bytes) -> bytes:
        """Both models' scores on the data held out; the client's own model goes to its disk."""
        request, parts = unpacked(blob, EvaluateRequest)
        training = self._training(request)
        # Scores are of the model itself, not of what a short downlink message would make of it.
        received, record = self._received(training, request, parts, Float32())
        shared, _ = training.experiment.divided(received.params)
        stacked = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], record)
        state = EngineState(jnp.int32(request.round), shared, ServerExtra(received.extra), stacked)
        evaluation = training.evaluator(state)
        own = row(evaluation.models, 0)
        self.client_dir.write_model(request.experiment, training.model_file(own))
        scores: dict[str, dict[str, float | None]] = {
            kind: {
                name: float(values[0]) if np.isfinite(values[0]) else None
                for name, values in found.values.items()
            }
            for kind, found in evaluation.scores.items()
        }
        reply = EvaluateReply(experiment=request.experiment, round=request.round, scores=scores)
        return packed(reply)

    def _received(
        self,
        training: "_Training",
        request: TrainRequest | EvaluateRequest,
        parts: list[bytes],
        codec: Codec,
    ) -> tuple[Received, ClientRecord]:
        """The model that was sent, joined with personal leaves; and what the client keeps."""
        first = training.first
        likes = (first.params, training.extra_shape)
        due = [like for like in likes if jax.tree.leaves(like)]
        if len(parts) != len(due):
            raise RefusalError(f"{len(parts)} messages came where {len(due)} are due")
        rest = iter(parts)
        shared, extra = (
            codec.decode(next(rest), like) if jax.tree.leaves(like) else like for like in likes
        )
        records = self.client_dir.read_records(request.experiment, row(first.clients, 0))
        record = records.as_of(request.counted)
        return Received(combine(shared, record.personal), extra), record

    def _training(self, request: TrainRequest | EvaluateRequest) -> "_Training":
        training = self._known.get(request.experiment)
        if training is None:
            facts = self.client_dir.facts(request.experiment)
            if facts is None:
                raise RefusalError(
                    f"{UNKNOWN} {request.experiment}: it was never begun in this client's folder, "
                    "or what was there was removed"
                )
            training = _Training.of(facts, self.data)
        if training.experiment.first != request.number:
            experiment = replace(training.experiment, first=request.number)
            training = replace(training, experiment=experiment)
        self._known = {request.experiment: training}
        return training


@final
@dataclass(frozen=True)
class _Training:
    """All that a client needs for an experiment: a federation of one, with its number in it."""

    config: Config
    experiment: Experiment

    @classmethod
    def of(cls, facts: dict[str, Any], data: Path) -> "_Training":
        config = Config.checked(facts["config"])
        check_source(config)
        try:
            federation = config.scored(own_data(config, data, facts["name"]))
        except Exception as error:
            raise OwnDataError(str(error) or type(error).__name__) from error
        return cls(config, config.build_experiment(federation, cohort=1))

    @cached_property
    def first(self) -> EngineState:
        return self.experiment.init_state()

    @cached_property
    def extra_shape(self) -> Any:
        """What the server sends beside the parameters, by its shapes."""
        return jax.eval_shape(self.experiment.method.broadcast, self.first.server_state)

    @cached_property
    def _data(self) -> DeviceData:
        return self.experiment.device_data()

    @cached_property
    def evaluator(self) -> SimulationEvaluator:
        config = self.config
        engine = Sequential(self.experiment)
        return SimulationEvaluator(engine, config.adapt_on, True, config.eval_training)

    @cached_property
    def _compiled(self) -> Any:
        @jax.jit
        def train(
            variables: Variables, data: DeviceData, received: Received, record: ClientRecord, k: Any
        ) -> Trained:
            experiment = self.experiment.with_variables(variables)
            return train_client(experiment, data, received, record, k, 0)

        return train

    def train(self, received: Received, record: ClientRecord, round: int) -> Trained:
        """What comes of a local update."""
        variables = self.experiment.variables()
        trained: Trained = self._compiled(variables, self._data, received, record, jnp.int32(round))
        return trained

    def model_file(self, own: Params) -> bytes:
        """The client's own model, as a file."""
        common = saved_model(own, self.experiment, self.config.resolved())
        return common.with_params(own, self.experiment.federation.scaling).to_bytes()


def own_data(config: Config, file: Path, name: str) -> Federation:
    """A client's own file, read as the configuration says: a federation of one."""
    settings = config.data.settings()
    reading = {key: settings[key] for key in _READING if key in settings}
    preparing = {key: settings[key] for key in _PREPARING if key in settings}
    dataset: Dataset = client_files([file], **reading)
    federation = dataset.federation(NaturalSplit(), **preparing)
    return replace(federation, names=(name or file.stem,))
