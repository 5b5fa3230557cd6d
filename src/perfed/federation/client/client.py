"""One client: its data, its folder, and its replies to the server's requests."""

from dataclasses import replace
from pathlib import Path
from typing import final

import jax
import jax.numpy as jnp
import numpy as np

from perfed.core.trees import combine, row
from perfed.federation.client.client_dir import ClientDir, SavedRecords
from perfed.federation.client.local_experiment import LocalExperiment
from perfed.federation.protocol.errors import UNKNOWN_EXPERIMENT, RequestError
from perfed.federation.protocol.framing import pack, unpack
from perfed.federation.protocol.messages import (
    ClientInfo,
    EvaluateReply,
    EvaluateRequest,
    JoinRequest,
    RoundRequest,
    TrainReply,
    TrainRequest,
)
from perfed.federation.protocol.parts import decode_parts, encode_parts
from perfed.methods import Received
from perfed.pipeline.codecs import Codec, Float32
from perfed.simulation import ClientRecord, EngineState
from perfed.simulation.experiment import ServerExtra
from perfed.simulation.round import STATE_CODEC


@final
class Client:
    """Replies to the server, from its own file and its own folder.

    Args:
        client_dir: the client's folder.
        data: the client's file.
        name: its name where there are no keys.
        factories: functions that the server may name as what makes the model; no other is run.
    """

    def __init__(
        self, client_dir: ClientDir, data: Path, name: str = "", factories: tuple[str, ...] = ()
    ) -> None:
        self.client_dir, self.data, self.name = client_dir, data, name
        self.factories = factories
        self._loaded: dict[str, LocalExperiment] = {}  # the last one, whose programs are compiled

    def handle(self, blob: bytes, kind: str) -> bytes:
        """The reply to a request; raises what is wrong with it."""
        handlers = {"join": self.join, "train": self.train, "evaluate": self.evaluate}
        if kind not in handlers:
            raise RequestError(f"unknown kind of request: {kind!r}")
        return handlers[kind](blob)

    def join(self, blob: bytes) -> bytes:
        """Read the data as the experiment asks, and describe them to the server."""
        request, _ = unpack(blob, JoinRequest)
        name, config = request.name or self.name, request.config
        local = LocalExperiment.load(config, self.data, name, self.factories)
        self.client_dir.join(request.experiment, {"config": config, "name": name})
        self._loaded = {request.experiment: local}
        own = local.experiment.federation
        return pack(
            ClientInfo(
                experiment=request.experiment,
                name=self.name,
                shape=own.example_shape,
                dtype=str(own.train.x.dtype),  # type: ignore[arg-type]
                features=own.features,
                train_examples=int(own.train.size[0]),
                test_examples=int(own.test.size[0]),
            )
        )

    def train(self, blob: bytes) -> bytes:
        """Make a local update. What the client keeps is on its disk before the reply is sent."""
        request, parts = unpack(blob, TrainRequest)
        local, round = self._experiment(request), request.round
        experiment, pipeline = local.experiment, local.experiment.pipeline
        received, record = self._received(local, request, parts, experiment.downlink)
        trained = local.train(received, record, round)
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trained)):
            raise experiment.diverged(round, 0)
        trees = (
            (pipeline.codec, trained.written),
            (pipeline.extra_codec, trained.extra),
            (STATE_CODEC, trained.model_state),
        )
        messages = encode_parts(
            *(
                (codec, experiment.uplink_key(round, request.number, message), tree)
                for message, (codec, tree) in enumerate(trees)
            )
        )
        arrived, _, _ = decode_parts(messages, *trees)
        residual = pipeline.left_out(trained.written, arrived)
        after = ClientRecord(trained.state, trained.personal, residual)
        records = SavedRecords(request.last_accepted, round, record, after)
        self.client_dir.write_records(request.experiment, records)
        return pack(TrainReply(experiment=request.experiment, round=round), *messages)

    def evaluate(self, blob: bytes) -> bytes:
        """Score the global model and the client's own, and write the latter to its disk."""
        request, parts = unpack(blob, EvaluateRequest)
        local = self._experiment(request)
        # The model itself is scored, not what a short downlink message would make of it.
        received, record = self._received(local, request, parts, Float32())
        shared, _ = local.experiment.divided(received.params)
        records = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], record)
        state = EngineState(jnp.int32(request.round), shared, ServerExtra(received.extra), records)
        evaluation = local.evaluator(state)
        model = row(evaluation.models, 0)
        self.client_dir.write_model(request.experiment, local.model_file(model))
        scores: dict[str, dict[str, float | None]] = {
            kind: {
                name: float(values[0]) if np.isfinite(values[0]) else None
                for name, values in own.values.items()
            }
            for kind, own in evaluation.scores.items()
        }
        reply = EvaluateReply(experiment=request.experiment, round=request.round, scores=scores)
        return pack(reply)

    def _received(
        self, local: LocalExperiment, request: RoundRequest, parts: list[bytes], codec: Codec
    ) -> tuple[Received, ClientRecord]:
        """The server's model joined with the personal leaves, and what the client keeps."""
        first = local.first_state
        weights, model_state = local.experiment.split_state(first.params)
        weights, extra, model_state = decode_parts(
            parts, (codec, weights), (codec, local.extra_shape), (STATE_CODEC, model_state)
        )
        shared = combine(weights, model_state)
        records = self.client_dir.read_records(request.experiment, row(first.clients, 0))
        record = records.at(request.last_accepted)
        return Received(combine(shared, record.personal), extra), record

    def _experiment(self, request: RoundRequest) -> LocalExperiment:
        """The experiment of a request, with this client's number in it."""
        local = self._loaded.get(request.experiment)
        if local is None:
            joined = self.client_dir.read_config(request.experiment)
            if joined is None:
                raise RequestError(
                    f"{UNKNOWN_EXPERIMENT} {request.experiment}: this client has not joined it, or "
                    "its folder was removed"
                )
            config, name = joined["config"], joined["name"]
            local = LocalExperiment.load(config, self.data, name, self.factories)
        if local.experiment.first != request.number:
            local = replace(local, experiment=replace(local.experiment, first=request.number))
        self._loaded = {request.experiment: local}
        return local
