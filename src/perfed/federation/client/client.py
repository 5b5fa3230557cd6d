"""One client: its own data, what it keeps, and its answers to the server's messages."""

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from perfed.core.errors import CodecError, ConfigError, DataError, DivergedError
from perfed.core.objective import Params
from perfed.data import Federation
from perfed.data.dataset import Dataset
from perfed.data.files import client_files
from perfed.data.splits import Natural
from perfed.evaluation.evaluator import Evaluator
from perfed.federation.client.client_dir import Home, Memory, RefusalError
from perfed.federation.protocol.messages import (
    Change,
    Hello,
    Introduction,
    Scored,
    Scoring,
    Turn,
    packed,
    unpacked,
)
from perfed.methods.base import change
from perfed.pipeline.codecs import Codec, Float32
from perfed.runs.config import Config
from perfed.runs.saved_model import saved_model
from perfed.simulation import Kept, Sequential, Setup, State
from perfed.simulation.experiment import DeviceData, Due, Numbers

# What a client says of an experiment that it has to be told of first.
UNKNOWN = "no such experiment here:"

# How a client's file is read; all else of `[data]` is about where a simulation finds its files.
_READING = ("label", "features", "task", "labels", "part")
_DEALING = ("test_from", "test_fraction", "standardize", "clip", "seed")
# What takes all clients' data in one place.
_TOGETHER = ("feature", "unit", "whole-set")


# What these say is ours, and is about messages, settings and rounds.
_OPEN = (RefusalError, CodecError, ConfigError, DivergedError)


@final
class OwnDataError(DataError):
    """The client's own file cannot be used; the text may quote it."""


def told(error: Exception) -> str:
    """What the server is told of an error: nothing that may quote a row, or name a file."""
    if isinstance(error, OwnDataError):
        return "its data cannot be read as the configuration says; its own log says why"
    said = "its own log says why"
    if isinstance(error, _OPEN):
        said = " ".join(str(error).split())
    elif isinstance(error, OSError) and error.errno:
        said = f"[Errno {error.errno}] {os.strerror(error.errno)}"
    return f"{type(error).__name__}: {said}"


@final
class Client:
    """Answers the server, from its own file and its own folder.

    Args:
        home: the client's folder.
        data: the client's file.
        name: what it calls itself where no key says who it is.
    """

    def __init__(self, home: Home, data: Path, name: str = "") -> None:
        self.home, self.data, self.name = home, data, name
        self._known: dict[str, _Work] = {}

    def answer(self, blob: bytes, kind: str) -> bytes:
        """The answer to a message; what is wrong with it is raised."""
        answers = {"hello": self.introduce, "turn": self.take_turn, "scoring": self.score}
        if kind not in answers:
            raise RefusalError(f"a message of kind {kind!r} means nothing to a client")
        return answers[kind](blob)

    def introduce(self, blob: bytes) -> bytes:
        """Read the data as the experiment asks, and tell what they look like from outside."""
        hello, _ = unpacked(blob, Hello)
        facts = {"config": hello.config, "name": hello.name or self.name}
        work = _Work.of(facts, self.data)
        self.home.begin(hello.experiment, facts)
        self._known = {hello.experiment: work}
        own = work.setup.federation
        return packed(
            Introduction(
                experiment=hello.experiment,
                name=self.name,
                shape=own.example_shape,
                dtype=str(own.train.x.dtype),  # type: ignore[arg-type]
                features=own.features,
                train=int(own.train.size[0]),
                test=int(own.test.size[0]),
            )
        )

    def take_turn(self, blob: bytes) -> bytes:
        """A turn: the change, written by the codec. What is kept is on the disk before it goes."""
        turn, parts = unpacked(blob, Turn)
        work = self._work(turn)
        setup = work.setup
        w, kept = self._received(work, turn, parts, setup.downlink)
        due = work.due(w, kept, turn.round)
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(due)):
            raise setup.diverged(turn.round, 0)
        messages = [setup.codec.encode(setup.uplink_key(turn.round, turn.number, 0), due.change)]
        residual = None
        if kept.residual is not None:
            residual = change(due.change, setup.codec.decode(messages[0], due.change))
        if due.iterate is not None:
            key = setup.uplink_key(turn.round, turn.number, 1)
            messages.append(setup.iterate_codec.encode(key, due.iterate))
        memory = Memory(turn.counted, turn.round, kept, Kept(due.memory, residual))
        self.home.keep(turn.experiment, memory)
        answer = Change(experiment=turn.experiment, round=turn.round)
        return packed(answer, *(messages if setup.method.sends else ()))

    def score(self, blob: bytes) -> bytes:
        """Both models' scores on the data held out; the client's own model goes to its disk."""
        scoring, parts = unpacked(blob, Scoring)
        work = self._work(scoring)
        # Scores are of the model itself, not of what a short downlink message would make of it.
        w, kept = self._received(work, scoring, parts, Float32())
        stacked = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], kept)
        evaluation = work.evaluator(State(jnp.int32(scoring.round), w, stacked, None))
        own = jax.tree.map(lambda leaf: leaf[0], evaluation.models)
        self.home.write_model(scoring.experiment, work.model_file(own))
        scores: dict[str, dict[str, float | None]] = {
            kind: {
                name: float(values[0]) if np.isfinite(values[0]) else None
                for name, values in found.values.items()
            }
            for kind, found in evaluation.scores.items()
        }
        return packed(Scored(experiment=scoring.experiment, round=scoring.round, scores=scores))

    def _received(
        self, work: "_Work", asked: Turn | Scoring, parts: list[bytes], codec: Codec
    ) -> tuple[Params, Kept]:
        """The model that was sent, and what the client keeps."""
        first = work.first
        if len(parts) > 1:
            raise RefusalError(f"{len(parts)} models came where one is due")
        # A method that sends nothing leaves everyone with the first model.
        w = codec.decode(parts[0], first.w) if parts else first.w
        kept = jax.tree.map(lambda leaf: leaf[0], first.kept)
        return w, self.home.recall(asked.experiment, kept).as_of(asked.counted)

    def _work(self, asked: Turn | Scoring) -> "_Work":
        work = self._known.get(asked.experiment)
        if work is None:
            facts = self.home.facts(asked.experiment)
            if facts is None:
                raise RefusalError(
                    f"{UNKNOWN} {asked.experiment}: it was never begun in this client's home, or "
                    "its folder there was removed"
                )
            work = _Work.of(facts, self.data)
        if work.setup.first != asked.number:
            work = replace(work, setup=replace(work.setup, first=asked.number))
        self._known = {asked.experiment: work}
        return work


@final
@dataclass(frozen=True)
class _Work:
    """All that a client needs for an experiment: a federation of one, with its number in it."""

    config: Config
    setup: Setup

    @classmethod
    def of(cls, facts: dict[str, Any], data: Path) -> "_Work":
        config = Config.checked(facts["config"])
        check_source(config)
        try:
            federation = config.scored(own_data(config, data, facts["name"]))
        except Exception as error:
            raise OwnDataError(str(error) or type(error).__name__) from error
        return cls(config, config.build_setup(federation, cohort=1))

    @cached_property
    def first(self) -> State:
        return self.setup.first_state()

    @cached_property
    def _engine(self) -> Sequential:
        return Sequential(self.setup)

    @cached_property
    def _world(self) -> DeviceData:
        return self.setup.world()

    @cached_property
    def evaluator(self) -> Evaluator:
        config = self.config
        return Evaluator(self._engine, config.adapt_on, True, config.score_training)

    @cached_property
    def _compiled(self) -> Any:
        @jax.jit
        def work(numbers: Numbers, world: DeviceData, w: Params, kept: Kept, round: Any) -> Due:
            return self.setup.with_numbers(numbers).work(world, w, kept, round, 0)

        return work

    def due(self, w: Params, kept: Kept, round: int) -> Due:
        """What comes of a turn."""
        numbers = self.setup.numbers()
        due: Due = self._compiled(numbers, self._world, w, kept, jnp.int32(round))
        return due

    def model_file(self, own: Params) -> bytes:
        """The client's own model, as a file."""
        federation = self.setup.federation
        common = saved_model(own, self.setup.task.model, federation, self.config.resolved())
        return common.with_params(own, federation.scaling).to_bytes()


def own_data(config: Config, file: Path, name: str) -> Federation:
    """A client's own file, read as the configuration says: a federation of one."""
    settings = config.data.settings()
    reading = {key: settings[key] for key in _READING if key in settings}
    dealing = {key: settings[key] for key in _DEALING if key in settings}
    pool: Dataset = client_files([file], **reading)
    federation = pool.federation(Natural(), **dealing)
    return replace(federation, names=(name or file.stem,))


def check_source(config: Config) -> None:
    """Raise unless clients can read their own files by this configuration, each on its own."""
    data = config.data.settings()
    if data["source"] != "folder":
        raise ConfigError(
            f'data.source = "{data["source"]}": clients of a federation bring a file each; use '
            '"folder", whose files have the same form (perfed federate makes them for a trial)'
        )
    if data.get("task", "classification") == "classification" and data.get("labels") is None:
        raise ConfigError(
            "data.labels: list all labels there are; no client of a federation sees the others'"
        )
    if data.get("standardize") in _TOGETHER:
        raise ConfigError(
            f'data.standardize = "{data["standardize"]}": takes all clients\' data in one place; '
            'use "client", each by its own data, or "none"'
        )
    if data.get("standardize_target"):
        raise ConfigError(
            "data.standardize_target: takes all clients' data in one place; leave it out"
        )
    if data.get("split", "natural") != "natural":
        raise ConfigError("data.split: clients of a federation have what they have; leave it out")
