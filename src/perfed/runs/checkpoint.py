"""Checkpoints: the state of a run, in files with a checksum.

A file holds one line with a mark and the SHA-256 of the rest; the rest is a safetensors file with
the leaves of the state, the scores and traffic so far, and the configuration they belong to.
"""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load, save

from perfed.core.errors import ConfigError, require, require_count
from perfed.evaluation import Evaluation, Scores
from perfed.evaluation.metrics import score_order
from perfed.runs.files import write_whole
from perfed.simulation import EngineState, Traffic
from perfed.training import TrainState

_MARK = b"perfed-checkpoint-1 "
_ENDING = ".checkpoint"
# Settings that may change from one part of a run to the next: results do not depend on them.
_FREE = ("engine", "output", "federation")
# Where data are, too: their checksum says whether they are the same.
_PLACES = ("data.root", "data.path")


@final
@dataclass
class Checkpoints:
    """Writes checkpoints of a run every so often, and finds the last good one.

    Attributes:
        folder: where they are.
        config: the run's resolved configuration.
        every: write one after so many rounds; None: by time only.
        minutes: write one after so many minutes; None: by rounds only.
        keep: how many to keep.
    """

    folder: Path
    config: dict[str, Any]
    every: int | None = None
    minutes: float | None = 5.0
    keep: int = 3
    _last_round: int = field(default=0, init=False)
    _last_time: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self) -> None:
        if self.every is not None:
            require_count("checkpoint_rounds", self.every)
        good = self.minutes is None or 0 < self.minutes < float("inf")
        require(good, "checkpoint_minutes", self.minutes, "must be a number greater than 0")
        require_count("keep", self.keep)

    def begin(self) -> None:
        """The run begins, or goes on: minutes count from now."""
        self._last_time = time.monotonic()

    def due(self, done: int) -> bool:
        """Whether it is time to write one, after so many rounds."""
        if done == self._last_round:
            return False
        by_rounds = self.every is not None and done - self._last_round >= self.every
        waited = time.monotonic() - self._last_time
        return by_rounds or (self.minutes is not None and waited >= 60 * self.minutes)

    def write(self, state: TrainState, is_first: bool = True) -> Path:
        """Write one now, and remove those that are too many; or note that another process does."""
        path = self.folder / f"round-{state.round:09d}{_ENDING}"
        self._last_round, self._last_time = state.round, time.monotonic()
        if is_first:
            self._write(path, state)
        return path

    def _write(self, path: Path, state: TrainState) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        payload = _pack(state, self.config)
        digest = hashlib.sha256(payload).hexdigest().encode()
        write_whole(path, _MARK + digest + b"\n" + payload)
        for old in self._files()[self.keep :]:
            old.unlink()
        for partial in self.folder.glob("*.partial"):
            partial.unlink()

    def rounds(self) -> list[int]:
        """The rounds there are checkpoints of."""
        return [_round_of(path) for path in self._files()]

    def latest(self, log: Callable[[str], None], at_most: int | None = None) -> bytes | None:
        """The contents of the last whole one; None if there is none.

        Args:
            log: called with a message about every damaged file.
            at_most: those of later rounds are passed over.
        """
        for path in self._files():
            if at_most is not None and _round_of(path) > at_most:
                continue
            head, _, payload = path.read_bytes().partition(b"\n")
            if head == _MARK + hashlib.sha256(payload).hexdigest().encode():
                return payload
            log(f"{path.name} is damaged: its checksum does not fit; using the one before")
        return None

    def read(self, contents: bytes, start: EngineState) -> TrainState:
        """Where the run stood, from the contents of a checkpoint.

        Args:
            contents: those of a whole one (`latest`).
            start: the run's first state, for its structure.
        """
        state = _unpack(contents, start, self.config)
        self._last_round, self._last_time = state.round, time.monotonic()
        return state

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"round-*{_ENDING}"), reverse=True)


def _round_of(path: Path) -> int:
    number = path.name.removeprefix("round-").removesuffix(_ENDING)
    return int(number) if number.isdigit() else -1


def _pack(state: TrainState, config: dict[str, Any]) -> bytes:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state.engine)]
    # Bytes and a list of types, for types of float that a file format may not know.
    tensors = {f"state.{i}": np.frombuffer(a.tobytes(), np.uint8) for i, a in enumerate(leaves)}
    tensors |= {f"traffic.{k}": v for k, v in state.traffic._asdict().items()}
    tensors["history.round"] = np.array([e.round for e in state.history])
    for kind, scores in state.history[0].scores.items():
        tensors["history.sizes"] = scores.sizes
        for name in scores.values:
            tensors[f"history.{kind}.{name}"] = np.stack(
                [e.scores[kind].values[name] for e in state.history]
            )
    facts = {
        "types": [str(a.dtype) for a in leaves],
        "shapes": [list(a.shape) for a in leaves],
        "config": config,
        "marks": list(state.marks),
        "timing": state.timing,
    }
    return save(
        {k: np.ascontiguousarray(v) for k, v in tensors.items()}, {"facts": json.dumps(facts)}
    )


def _unpack(payload: bytes, like: EngineState, config: dict[str, Any]) -> TrainState:
    tensors = load(payload)
    size = int.from_bytes(payload[:8], "little")
    facts = json.loads(json.loads(payload[8 : 8 + size])["__metadata__"]["facts"])
    differing = _differences(facts["config"], config)
    if differing:
        raise ConfigError(
            "\n".join(f"{d}: the run cannot be resumed with another setting" for d in differing)
        )
    if len(facts["types"]) != len(jax.tree.leaves(like)):
        stored = len(facts["types"]) < len(jax.tree.leaves(like))
        name, place = ("streamed", "on disk") if stored else ("vectorized", "in memory")
        raise ConfigError(
            f"engine.name: what clients keep is {place} in this run, so it goes on with the engine "
            f'"{name}" only'
        )
    leaves = [
        jnp.asarray(tensors[f"state.{i}"].view(jnp.dtype(kind)).reshape(shape))
        for i, (kind, shape) in enumerate(zip(facts["types"], facts["shapes"], strict=True))
    ]
    kinds = dict.fromkeys(
        key.split(".")[1] for key in tensors if key.startswith("history.") and key.count(".") == 2
    )
    history = tuple(
        Evaluation(
            int(round),
            {
                kind: Scores(  # type: ignore[misc]
                    {
                        key.split(".")[2]: values[i]
                        for key, values in sorted(tensors.items(), key=_headline_first)
                        if key.startswith(f"history.{kind}.")
                    },
                    tensors["history.sizes"],
                )
                for kind in sorted(kinds)
            },
        )
        for i, round in enumerate(tensors["history.round"])
    )
    traffic = Traffic(*(tensors[f"traffic.{name}"] for name in Traffic._fields))
    engine: EngineState = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return TrainState(engine, history, (traffic,), tuple(facts["marks"]), facts["timing"])


def _headline_first(item: tuple[str, Any]) -> tuple[bool, bool, str]:
    """Names of scores in the order in which they are shown (`score_order`)."""
    return score_order(item[0].rsplit(".", 1)[-1])


def _differences(old: Any, new: Any, place: str = "") -> list[str]:
    """Settings that differ, as `method.lam = 30.0 (15.0 in the checkpoint)`."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [k for k in {**old, **new} if place or k not in _FREE]
        parts = [_differences(old.get(k), new.get(k), f"{place}.{k}".lstrip(".")) for k in keys]
        return [difference for part in parts for difference in part]
    if old == new or place in _PLACES:
        return []
    return [f"{place} = {new!r} ({old!r} in the checkpoint)"]
