"""What clients keep between their rounds, on disk: a row per client, whatever their number.

`rows` has a row of bytes for each client that has taken part, in the order of their first rounds
(so rounds of a large federation write to the end of it, not all over the disk); `places` tells
where each client's is. `undo` holds what rounds have overwritten since the last checkpoint, so
that the store can go back to any round from there on, wherever a run was ended.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple, final

import jax
import numpy as np
from jaxtyping import Int

from perfed.core.errors import DataError
from perfed.simulation import hosts
from perfed.simulation.experiment import ClientRecord

ROWS: Final = "rows"
PLACES: Final = "places"
UNDO: Final = "undo"

# A checkpoint is needed when the undo log is larger than this.
_UNDO_BYTES: Final = 2**30
# Processes tell each other so many bytes at a time.
_SHARED_AT_ONCE: Final = 2**26

# The round that a store with nothing to undo is at, the number of clients, the bytes of a row.
_HEAD: Final = struct.Struct("<16sqqq")
_MARK: Final = b"perfed-undo-2\0\0\0"
# Of a round: its number, how many clients, the length of what follows, and its checksum.
_ROUND: Final = struct.Struct("<qqqI")


class _Undo(NamedTuple):
    """What a round has overwritten, and where it is noted."""

    at: int
    round: int
    client: Int[np.ndarray, " cohort"]
    known: np.ndarray
    rows: np.ndarray  # of those that were known


@final
class ClientStore:
    """What clients keep, by their numbers."""

    def __init__(self, folder: Path | None, clients: int, first: ClientRecord) -> None:
        """Open a store, or make one.

        Args:
            folder: where it is; None: in a folder that is removed at the end.
            clients: how many there are.
            first: what a client keeps before its first round.
        """
        self._temporary = TemporaryDirectory(prefix="perfed-") if folder is None else None
        self._folder = Path(self._temporary.name) if self._temporary else folder or Path()
        self._leaves, self._structure = jax.tree.flatten(jax.tree.map(np.asarray, first))
        self._first = np.concatenate([leaf.reshape(-1).view(np.uint8) for leaf in self._leaves])
        self._clients = clients
        self._folder.mkdir(parents=True, exist_ok=True)
        if not (self._folder / UNDO).exists():
            self._make()
        with (self._folder / UNDO).open("rb") as file:
            head = file.read(_HEAD.size)
        mark, _, count, width = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0, 0)
        if (mark, count, width) != (_MARK, clients, len(self._first)):
            raise DataError(
                f"{self._folder}: what clients keep there is of another run, or of an older "
                "version of perfed; such a run has to begin anew, in another folder"
            )
        shape = (clients, len(self._first))
        self._rows = np.memmap(self._folder / ROWS, np.uint8, "r+", shape=shape)
        # 0: none yet; else the number of the row, from 1.
        self._places = np.memmap(self._folder / PLACES, np.int32, "r+", shape=(clients,))
        self._taken = int(self._places.max())

    def _make(self) -> None:
        for name, size in ((ROWS, self._clients * len(self._first)), (PLACES, 4 * self._clients)):
            with (self._folder / name).open("wb") as file:
                file.truncate(max(1, size))
        self._begin_undo(0)

    def _begin_undo(self, round: int) -> None:
        path = self._folder / f"{UNDO}.partial"
        with path.open("wb") as file:
            file.write(_HEAD.pack(_MARK, round, self._clients, len(self._first)))
            file.flush()
            os.fsync(file.fileno())
        path.replace(self._folder / UNDO)
        # The new notes are not to be lost, and the old ones found, after a power failure.
        if os.name != "nt":  # where a folder cannot be opened
            folder = os.open(self._folder, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)

    def read(self, clients: Int[np.ndarray, " some"]) -> ClientRecord:
        """What these clients keep, stacked."""
        rows = np.tile(self._first, (len(clients), 1))
        known = self._places[clients] > 0
        rows[known] = self._rows[self._places[clients[known]] - 1]
        return self._reshape(rows)

    def write(self, round: int, clients: Int[np.ndarray, " some"], kept: ClientRecord) -> None:
        """What these clients keep after a round."""
        if self._temporary is None:
            known = self._places[clients] > 0
            old = self._rows[self._places[clients[known]] - 1]
            self._note(round, clients, known.astype(np.uint8), old)
        leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(kept)]
        flat = [leaf.reshape(len(clients), -1).view(np.uint8) for leaf in leaves]
        self._put(clients, np.concatenate(flat, axis=1))

    def _put(self, clients: Int[np.ndarray, " some"], rows: np.ndarray) -> None:
        new = clients[self._places[clients] == 0]
        # First, so that an interruption here leaves unused rows, and none that two clients share.
        self._taken += len(new)
        self._places[new] = self._taken - np.arange(len(new))[::-1]
        self._rows[self._places[clients] - 1] = rows

    def share(self) -> None:
        """Of several processes: what the first one's clients keep, in all of them."""
        own = np.flatnonzero(self._places) if hosts.is_first() else np.zeros(0, np.int64)
        known = np.frombuffer(hosts.broadcast(own.tobytes()) or b"", np.int64)
        at_once = max(1, _SHARED_AT_ONCE // len(self._first))
        for i in range(0, len(known), at_once):
            some = known[i : i + at_once]
            contents = hosts.broadcast(
                self._rows[self._places[some] - 1].tobytes() if hosts.is_first() else b""
            )
            if not hosts.is_first():
                self._put(some, np.frombuffer(contents or b"", np.uint8).reshape(len(some), -1))

    @property
    def undo_bytes(self) -> int:
        """How much it takes to go back to the last checkpoint."""
        return 0 if self._temporary else (self._folder / UNDO).stat().st_size

    def flush(self) -> None:
        """Flush to the disk, before a checkpoint refers to it."""
        self._rows.flush()
        self._places.flush()

    def settle(self, round: int) -> None:
        """A checkpoint of this round is written: what leads back further is deleted."""
        if self._temporary is None:
            self._begin_undo(round)

    def rewind(self, round: int) -> None:
        """Make it what it was after so many rounds."""
        if self._temporary is not None and round == 0:
            self._places[:] = self._taken = 0
            return
        base, undone, end = self._history()
        if not base <= round <= base + len(undone):
            raise DataError(
                f"{self._folder}: what clients keep is there as of rounds {base} to "
                f"{base + len(undone)}, but the run stands at round {round}; begin anew"
            )
        for undo in reversed(undone[round - base :]):
            place = self._places[undo.client[undo.known == 1]]
            # A place may be missing after a power failure, of a client whose first round an earlier
            # one of these rounds was: that one is undone as well.
            there = place > 0
            self._rows[place[there] - 1] = undo.rows[there]
            self._places[undo.client[undo.known == 0]] = 0
        self._taken = int(self._places.max())
        self.flush()
        os.truncate(self._folder / UNDO, undone[round - base].at if undone[round - base :] else end)

    def _history(self) -> tuple[int, list[_Undo], int]:
        """The round of the last checkpoint; what was overwritten since; where the notes end."""
        path = self._folder / UNDO
        size, at = path.stat().st_size, _HEAD.size
        with path.open("rb") as file:
            _, base, _, width = _HEAD.unpack(file.read(_HEAD.size))
            found: list[_Undo] = []
            while at + _ROUND.size <= size:
                round, count, length, checksum = _ROUND.unpack(file.read(_ROUND.size))
                whole = round == base + len(found) and 0 <= length <= size - at - _ROUND.size
                body = file.read(length) if whole else b""
                if not whole or zlib.crc32(body) != checksum:
                    break  # the round has overwritten nothing: this comes first
                client = np.frombuffer(body, np.int64, count)
                known = np.frombuffer(body, np.uint8, count, 8 * count)
                rows = np.frombuffer(body, np.uint8, offset=9 * count).reshape(-1, width)
                found.append(_Undo(at, round, client, known, rows))
                at += _ROUND.size + length
        return base, found, at

    def _note(
        self, round: int, client: Int[np.ndarray, " some"], known: np.ndarray, rows: np.ndarray
    ) -> None:
        body = b"".join((client.astype(np.int64).tobytes(), known.tobytes(), rows.tobytes()))
        head = _ROUND.pack(round, len(client), len(body), zlib.crc32(body))
        with (self._folder / UNDO).open("ab") as file:
            file.write(head + body)
            file.flush()
            # Before what it undoes: the system may write that to the disk at any time.
            os.fdatasync(file.fileno())

    def _reshape(self, rows: np.ndarray) -> ClientRecord:
        parts: Iterator[np.ndarray] = iter(
            np.split(rows, np.cumsum([leaf.nbytes for leaf in self._leaves])[:-1], axis=1)
        )
        leaves = [
            np.ascontiguousarray(next(parts)).view(leaf.dtype).reshape(len(rows), *leaf.shape)
            for leaf in self._leaves
        ]
        kept: ClientRecord = jax.tree.unflatten(self._structure, leaves)
        return kept

    def remove(self) -> None:
        """It is not needed any more."""
        if self._temporary is not None:
            self._temporary.cleanup()
            return
        for name in (ROWS, PLACES, UNDO):
            (self._folder / name).unlink(missing_ok=True)
        with suppress(OSError):
            self._folder.rmdir()


@final
class RunStore:
    """What a run keeps in a store beside its state, and the round that the store stands at."""

    def __init__(self, store: ClientStore) -> None:
        self.store = store
        self._round: int | None = None

    def go_to(self, round: int) -> None:
        """Make it what it was after so many rounds, if it is not."""
        if self._round != round:
            self.store.rewind(round)
            self._round = round

    def resume_at(self, round: int) -> None:
        """The same when a run goes on; of several processes only the first has kept anything."""
        if hosts.is_first():
            self.go_to(round)
        if hosts.is_multihost():
            self.store.share()
        self._round = round

    def write(self, round: int, clients: Int[np.ndarray, " some"], kept: ClientRecord) -> None:
        """What clients keep after a round."""
        self.store.write(round, clients, kept)
        self._round = round + 1

    def checkpoint_due(self) -> bool:
        """Whether it takes so much to go back to the last one that there should be another."""
        return self.store.undo_bytes > _UNDO_BYTES

    def before_checkpoint(self) -> None:
        """Before a checkpoint is written: flush to the disk."""
        self.store.flush()

    def after_checkpoint(self, round: int) -> None:
        """After a checkpoint of this round: what leads back further is deleted."""
        self.go_to(round)
        self.store.settle(round)

    def clear(self) -> None:
        """The run is finished: nothing of this is needed any more."""
        self.store.remove()
