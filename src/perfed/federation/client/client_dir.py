"""A client's own folder: its state between rounds, and its own model. None of it is ever sent.

`DIR/EXPERIMENT/` holds `config.json`, what is trained; `client.state`, what the client keeps
between rounds; and `model.safetensors`, its own model, ready for `perfed predict`. Files are
written completely or not at all, and `client.state` begins with a checksum.
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
from perfed.federation.protocol.errors import RequestError
from perfed.federation.protocol.messages import client_config
from perfed.runs.files import read_json, write_whole
from perfed.simulation import ClientRecord

CONFIG: Final = "config.json"
STATE: Final = "client.state"
MODEL: Final = "model.safetensors"
_MAGIC: Final = b"perfed-client-state-1 "
# A client's state says something about its rows: nobody else on its machine may read it.
_OWNER_ONLY: Final = 0o700
# Names come over the network and become folders: none may lead out of the client's own.
_EXPERIMENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,119}")


class SavedRecords(NamedTuple):
    """What a client kept before and after its last round: the server may not have got its update.

    Attributes:
        previous_round: the round after which `before` was kept; -1: the client's first.
        round: its last round; -1: there is none.
        before: what it kept before.
        after: what it keeps if its update was accepted.
    """

    previous_round: int
    round: int
    before: ClientRecord
    after: ClientRecord

    def at(self, last_accepted: int) -> ClientRecord:
        """What the client keeps, given the last round in which its update was accepted."""
        if self.round >= 0 and last_accepted not in (self.previous_round, self.round):
            raise RequestError(
                f"the server asks for this client's state after round {last_accepted}, but the "
                f"client has only those after rounds {self.previous_round} and {self.round}; "
                f"remove the file {STATE} to start over as a new client"
            )
        return self.after if last_accepted == self.round else self.before


@final
@dataclass(frozen=True)
class ClientDir:
    """A client's folder."""

    path: Path

    def __post_init__(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=_OWNER_ONLY)
            write_whole(self.path / ".writable", b"")
            (self.path / ".writable").unlink()
        except OSError as error:
            raise ConfigError(
                f"--client-dir {self.path}: cannot write there: {error.strerror}"
            ) from None

    def experiment_dir(self, experiment: str) -> Path:
        """An experiment's folder, which may not exist yet."""
        if not _EXPERIMENT.fullmatch(experiment):
            raise RequestError(f"{experiment!r} is not a valid name of an experiment")
        return self.path / experiment

    def join(self, experiment: str, config: dict[str, Any]) -> None:
        """Note what will be trained; an experiment that is known already must be the same."""
        folder = self.experiment_dir(experiment)
        if (folder / CONFIG).exists():
            if _trained(read_json(folder / CONFIG)) != _trained(config):
                raise RequestError(
                    f"{experiment}: this client joined this experiment before with other settings "
                    "or under another name; the server has to start a new one"
                )
            return
        folder.mkdir(parents=True, exist_ok=True, mode=_OWNER_ONLY)
        write_whole(folder / CONFIG, json.dumps(config, indent=1).encode())

    def read_config(self, experiment: str) -> dict[str, Any] | None:
        """What will be trained; None if the client has not joined."""
        path = self.experiment_dir(experiment) / CONFIG
        config: dict[str, Any] | None = read_json(path) if path.exists() else None
        return config

    def write_records(self, experiment: str, records: SavedRecords) -> None:
        """Write what the client keeps; on any failure the old file stays."""
        tensors = {
            f"{part}.{i}": np.asarray(leaf)
            for part, record in (("before", records.before), ("after", records.after))
            for i, leaf in enumerate(jax.tree.leaves(record))
        }
        rounds = {"previous_round": str(records.previous_round), "round": str(records.round)}
        payload = save(tensors, {"experiment": experiment} | rounds)
        path = self.experiment_dir(experiment) / STATE
        write_whole(path, _checksum_line(payload) + b"\n" + payload)

    def read_records(self, experiment: str, first: ClientRecord) -> SavedRecords:
        """What the client keeps, in the structure of its first record, which is the default."""
        path = self.experiment_dir(experiment) / STATE
        if not path.exists():
            return SavedRecords(-1, -1, first, first)
        line, _, payload = path.read_bytes().partition(b"\n")
        if line != _checksum_line(payload):
            raise DataError(
                f"{path} is damaged: its checksum is wrong; remove it to start over as a new client"
            )
        try:
            tensors = load(payload)
            header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
            metadata = header["__metadata__"]
            previous_round, round = (int(metadata[key]) for key in ("previous_round", "round"))
        except (SafetensorError, KeyError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {error}") from None
        if metadata.get("experiment") != experiment:
            raise DataError(
                f"{path} belongs to another experiment; restore this one's file, or remove it to "
                "start over as a new client"
            )
        leaves, structure = jax.tree.flatten(first)

        def record(part: str) -> ClientRecord:
            found = [tensors.get(f"{part}.{i}") for i in range(len(leaves))]
            for leaf, own in zip(leaves, found, strict=True):
                if own is None or own.shape != leaf.shape or own.dtype != leaf.dtype:
                    raise DataError(f"{path} belongs to another model than this experiment's")
            read: ClientRecord = jax.tree.unflatten(structure, found)
            return read

        return SavedRecords(previous_round, round, record("before"), record("after"))

    def write_model(self, experiment: str, contents: bytes) -> None:
        """Write the client's own model."""
        write_whole(self.experiment_dir(experiment) / MODEL, contents)


def _checksum_line(payload: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(payload).hexdigest().encode()


def _trained(config: dict[str, Any]) -> dict[str, Any]:
    """What the client noted, without the sections that a server may change."""
    return config | {"config": client_config(config["config"])}
