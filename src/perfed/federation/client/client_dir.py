"""A client's own folder: what it keeps between rounds, and its own model. None of it is ever sent.

`DIR/EXPERIMENT/` holds `config.json`, what is trained; `kept`, what the client keeps; and
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
from perfed.federation.protocol.errors import RefusalError
from perfed.federation.protocol.messages import without_terms
from perfed.runs.files import read_json, write_whole
from perfed.simulation import ClientRecord

CONFIG: Final = "config.json"
KEPT: Final = "kept"
MODEL: Final = "model.safetensors"
_MARK: Final = b"perfed-kept-1 "
# What a client keeps says something about its rows, which are no other user's business.
_OWN: Final = 0o700
# Names come over the network and become folders: nothing that could lead out of it.
_EXPERIMENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,119}")


class RecordPair(NamedTuple):
    """What a client kept before and after its last round: the server may or may not have heard.

    Attributes:
        base: the round after which `before` was kept; -1: the client's first.
        round: that round; -1: there was none.
        before: what it kept before.
        after: what it keeps if its answer counted.
    """

    base: int
    round: int
    before: ClientRecord
    after: ClientRecord

    def as_of(self, counted: int) -> ClientRecord:
        """What is kept, given the last round in which the client's answer counted."""
        if self.round >= 0 and counted not in (self.base, self.round):
            raise RefusalError(
                f"the server went back to what this client kept after round {counted}, but only "
                f"what it kept after rounds {self.base} and {self.round} is there; remove the file "
                f"{KEPT} to go on as a client that has not taken part"
            )
        return self.after if counted == self.round else self.before


@final
@dataclass(frozen=True)
class ClientDir:
    """A client's folder."""

    path: Path

    def __post_init__(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=_OWN)
            write_whole(self.path / ".writable", b"")
            (self.path / ".writable").unlink()
        except OSError as error:
            raise ConfigError(
                f"--client-dir {self.path}: cannot write there: {error.strerror}"
            ) from None

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

    def write_records(self, experiment: str, records: RecordPair) -> None:
        """Write what the client keeps; on any failure, what was kept is still there."""
        tensors = {
            f"{part}.{i}": np.asarray(leaf)
            for part, kept in (("before", records.before), ("after", records.after))
            for i, leaf in enumerate(jax.tree.leaves(kept))
        }
        about = {"experiment": experiment, "base": str(records.base), "round": str(records.round)}
        payload = save(tensors, about)
        digest = hashlib.sha256(payload).hexdigest().encode()
        write_whole(self.of(experiment) / KEPT, _MARK + digest + b"\n" + payload)

    def read_records(self, experiment: str, first: ClientRecord) -> RecordPair:
        """What the client keeps, shaped like what it had at first; that, if it never took part."""
        path = self.of(experiment) / KEPT
        if not path.exists():
            return RecordPair(-1, -1, first, first)
        head, _, payload = path.read_bytes().partition(b"\n")
        digest = hashlib.sha256(payload).hexdigest().encode()
        if head != _MARK + digest:
            raise DataError(
                f"{path} is damaged (its checksum differs); remove it to go on as a client that "
                "has not taken part"
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

        def part(name: str) -> ClientRecord:
            found = [tensors.get(f"{name}.{i}") for i in range(len(leaves))]
            for leaf, own in zip(leaves, found, strict=True):
                if own is None or own.shape != leaf.shape or own.dtype != leaf.dtype:
                    raise DataError(f"{path} is of another model than this experiment's")
            kept: ClientRecord = jax.tree.unflatten(structure, found)
            return kept

        return RecordPair(base, round, part("before"), part("after"))

    def write_model(self, experiment: str, contents: bytes) -> Path:
        """The client's own model."""
        path = self.of(experiment) / MODEL
        write_whole(path, contents)
        return path


def _trained(facts: dict[str, Any]) -> dict[str, Any]:
    """What was noted, without the terms that a server may change while a run goes on."""
    return facts | {"config": without_terms(facts["config"])}
