"""A client's own folder: what it keeps between turns, and its own model. None of it is ever sent.

`HOME/EXPERIMENT/` holds `config.json`, what is trained; `kept`, what the client keeps; and
`model.safetensors`, its own model, ready for `perfed predict`. Files are written whole or not at
all, and `kept` begins with its own checksum.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from perfed.core.errors import ConfigError, DataError
from perfed.federation.protocol.messages import without_terms
from perfed.runs.files import read_json, write_whole
from perfed.simulation import Kept

CONFIG: Final = "config.json"
KEPT: Final = "kept"
MODEL: Final = "model.safetensors"
_MARK: Final = b"perfed-kept-1 "
# What a client keeps says something about its rows, which are no other user's business.
_OWN: Final = 0o700
# Names come over the network and become folders: nothing that could lead out of the home.
_EXPERIMENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,119}")


@final
class RefusalError(DataError):
    """Why a client gives no answer, in words for the server too: no row, and no path."""


class Memory(NamedTuple):
    """What a client kept before and after its last turn: the server may or may not have heard it.

    Attributes:
        base: the round after which `before` was kept; -1: the client's first.
        round: the round of that turn; -1: there was none.
        before: what it kept before.
        after: what it keeps if its answer counted.
    """

    base: int
    round: int
    before: Kept
    after: Kept

    def as_of(self, counted: int) -> Kept:
        """What is kept, given the last round in which the client's answer counted."""
        if self.round >= 0 and counted not in (self.base, self.round):
            raise RefusalError(
                f"the server went back to what this client kept after round {counted}, but only "
                f"what it kept after rounds {self.base} and {self.round} is there; remove the file "
                f"{KEPT} to go on as a client that has not had a turn"
            )
        return self.after if counted == self.round else self.before


@final
@dataclass(frozen=True)
class Home:
    """A client's folder."""

    path: Path

    def __post_init__(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=_OWN)
            write_whole(self.path / ".writable", b"")
            (self.path / ".writable").unlink()
        except OSError as error:
            raise ConfigError(f"--home {self.path}: cannot write there: {error.strerror}") from None

    def of(self, experiment: str) -> Path:
        """The folder of an experiment."""
        if not _EXPERIMENT.fullmatch(experiment):
            raise RefusalError(f"{experiment!r} cannot be an experiment's name")
        return self.path / experiment

    def begin(self, experiment: str, facts: dict[str, Any]) -> None:
        """Note what is trained; an experiment that is known already must be the same."""
        folder = self.of(experiment)
        if (folder / CONFIG).exists():
            if _trained(read_json(folder / CONFIG)) != _trained(facts):
                raise RefusalError(
                    f"{experiment}: this experiment was begun here with other settings, or by "
                    "another client; the server must begin a new one"
                )
            return
        folder.mkdir(parents=True, exist_ok=True, mode=_OWN)
        write_whole(folder / CONFIG, json.dumps(facts, indent=1).encode())

    def facts(self, experiment: str) -> dict[str, Any] | None:
        """What was noted of an experiment; None: it is not known here."""
        path = self.of(experiment) / CONFIG
        facts: dict[str, Any] | None = read_json(path) if path.exists() else None
        return facts

    def keep(self, experiment: str, memory: Memory) -> None:
        """Write what the client keeps; on any failure, what was kept is still there."""
        tensors = {
            f"{part}.{i}": np.asarray(leaf)
            for part, kept in (("before", memory.before), ("after", memory.after))
            for i, leaf in enumerate(jax.tree.leaves(kept))
        }
        about = {"experiment": experiment, "base": str(memory.base), "round": str(memory.round)}
        payload = save(tensors, about)
        digest = hashlib.sha256(payload).hexdigest().encode()
        write_whole(self.of(experiment) / KEPT, _MARK + digest + b"\n" + payload)

    def recall(self, experiment: str, first: Kept) -> Memory:
        """What the client keeps, shaped like what it had at first; that, if it never had a turn."""
        path = self.of(experiment) / KEPT
        if not path.exists():
            return Memory(-1, -1, first, first)
        head, _, payload = path.read_bytes().partition(b"\n")
        digest = hashlib.sha256(payload).hexdigest().encode()
        if head != _MARK + digest:
            raise DataError(
                f"{path} is damaged (its checksum differs); remove it to go on as a client that "
                "has not had a turn"
            )
        try:
            tensors = load(payload)
            header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
            about = header["__metadata__"]
            base, round = (int(about[key]) for key in ("base", "round"))
        except (SafetensorError, KeyError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {error}") from None
        if about.get("experiment") != experiment:
            raise DataError(
                f"{path} is of another experiment; put back this one's, or remove it to go on as a "
                "client that has not had a turn"
            )
        leaves, structure = jax.tree.flatten(first)

        def part(name: str) -> Kept:
            found = [tensors.get(f"{name}.{i}") for i in range(len(leaves))]
            for leaf, own in zip(leaves, found, strict=True):
                if own is None or own.shape != leaf.shape or own.dtype != leaf.dtype:
                    raise DataError(f"{path} is of another model than this experiment's")
            kept: Kept = jax.tree.unflatten(structure, found)
            return kept

        return Memory(base, round, part("before"), part("after"))

    def write_model(self, experiment: str, contents: bytes) -> Path:
        """The client's own model."""
        path = self.of(experiment) / MODEL
        write_whole(path, contents)
        return path


def _trained(facts: dict[str, Any]) -> dict[str, Any]:
    """What was noted, without the terms that a server may change while a run goes on."""
    return facts | {"config": without_terms(facts["config"])}
