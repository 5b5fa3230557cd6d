"""Reads the rows of some clients out of all, which may lie in files, for the devices they are on.

Each process reads the rows of the clients on its own devices, and no others.
"""

import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import ceil, log, prod
from typing import Any, Final, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Int

from perfed.core.errors import DataError
from perfed.core.objective import BLOCK
from perfed.simulation.device_round import REPLICATED, SHARDED
from perfed.simulation.experiment import DeviceData, DeviceRows, Experiment

_Scaling = tuple[jax.Array, jax.Array, jax.Array]

# A program is compiled for so many rows; for more, it is compiled again for this much more.
_GROWTH: Final = 1.25
# XLA copies what does not begin at such an address; rows are as many as that, whatever their size.
_ALIGN: Final = 64
# So many reads are under way at once: a disk takes as long for one as for a few.
_READERS: Final = 8


@final
class CohortReader:
    """Makes device data of some clients.

    Rows lie one client after another, without padding but for the end, where there is room for what
    other clients may need, so that all of them have one shape. That room only ever grows.
    """

    def __init__(self, experiment: Experiment, mesh: Mesh) -> None:
        self._experiment, self._mesh = experiment, mesh
        self._sides = {"train": experiment.federation.train, "test": experiment.federation.test}
        self._sizes = {side: np.asarray(flat.size) for side, flat in self._sides.items()}
        self._starts = {side: np.asarray(flat.start) for side, flat in self._sides.items()}
        self._sources = {
            side: (_Source(flat.x), _Source(flat.y)) for side, flat in self._sides.items()
        }
        self._room = dict.fromkeys(self._sides, 0)
        here = jax.process_index()
        self._mine = [i for i, d in enumerate(mesh.devices.ravel()) if d.process_index == here]
        self._devices = [mesh.devices.ravel()[i] for i in self._mine]
        scaling = experiment.federation.scaling
        self._frozen = replicated(experiment.task.frozen, mesh)
        self._scaled_alike = scaling is not None and scaling.shared
        self._scaling = scaling
        if scaling is not None and self._scaled_alike:
            everywhere = NamedSharding(mesh, REPLICATED)
            shift, scale, clip = map(np.asarray, scaling.arrays)
            self._for_all: _Scaling = jax.device_put((shift, scale, clip), everywhere)

    def device_data(self, numbers: Int[np.ndarray, "devices slots"], test: bool) -> DeviceData:
        """The data of these clients.

        Args:
            numbers: the clients on each device, by number; that of all clients: an empty slot.
            test: whether what they are scored on is read too.
        """
        scaling = self._own_scaling(numbers)
        return DeviceData(
            self._rows("train", numbers, scaling),
            self._rows("test", numbers, scaling) if test else None,
            self.placed(self.mine(numbers.astype(np.int32))),
            self._frozen,
        )

    def specs(self, test: bool) -> DeviceData:
        """Where the parts of such data lie."""
        side = REPLICATED if self._scaled_alike else SHARDED
        scaling: Any = None if self._scaling is None else (side, side, side)
        rows: Any = DeviceRows(SHARDED, SHARDED, SHARDED, SHARDED, scaling)  # type: ignore[arg-type]
        own = None if self._frozen is None else REPLICATED
        return DeviceData(rows, rows if test else None, SHARDED, own)  # type: ignore[arg-type]

    def mine(self, everyones: np.ndarray) -> np.ndarray:
        """The part of this process's devices in an array over all devices."""
        return everyones[self._mine]

    def placed(self, own: np.ndarray) -> jax.Array:
        """An array of this process's devices and their slots, as one over all devices."""
        parts = [jax.device_put(part, d) for part, d in zip(own, self._devices, strict=True)]
        shape = (self._mesh.size * own.shape[1], *own.shape[2:])
        sharding = NamedSharding(self._mesh, SHARDED)
        placed: jax.Array = jax.make_array_from_single_device_arrays(shape, sharding, parts)
        return placed

    def _own_scaling(self, numbers: Int[np.ndarray, "devices slots"]) -> _Scaling | None:
        if self._scaling is None:
            return None
        if self._scaled_alike:
            return self._for_all
        some = np.minimum(self.mine(numbers), self._experiment.federation.clients - 1)
        scaling = self._scaling
        shift, scale, clip = (self.placed(part[some]) for part in scaling.arrays)
        return shift, scale, clip

    def _rows(
        self,
        side: str,
        numbers: Int[np.ndarray, "devices slots"],
        scaling: _Scaling | None,
    ) -> DeviceRows:
        flat, sizes = self._sides[side], self._sizes[side]
        taken = numbers < len(sizes)
        size = np.where(taken, sizes[np.minimum(numbers, len(sizes) - 1)], 0)
        room = self._room_for(side, int(size.sum(axis=1).max()))
        x, y = (
            _align((len(self._mine), room, *rows.shape[1:]), rows.dtype)
            for rows in (flat.x, flat.y)
        )
        for d, device in enumerate(self._mine):
            clients = numbers[device][taken[device]]
            starts, counts = (part[clients].tolist() for part in (self._starts[side], sizes))
            for source, to in zip(self._sources[side], (x[d], y[d]), strict=True):
                source.copy(starts, counts, to)
            # What an empty slot works on.
            x[d, sum(counts) :][:1], y[d, sum(counts) :][:1] = 0, 0
        start = np.cumsum(size, axis=1) - size
        # An empty slot works on one row, whichever; its result is ignored.
        start, size = np.minimum(start, room - 1), np.maximum(size, 1)
        parts = (x, y, *(self.mine(part.astype(np.int32)) for part in (start, size)))
        placed = [self.placed(part) for part in parts]
        return DeviceRows(placed[0], placed[1], placed[2], placed[3], scaling)

    def _room_for(self, side: str, rows: int) -> int:
        """How many rows a device's part of the data has room for."""
        if rows > self._room[side]:
            # A tenth more than the first cohort has, since the next may have more.
            steps = log(max(BLOCK, 1.1 * rows) / BLOCK, _GROWTH)
            self._room[side] = ceil(BLOCK * _GROWTH ** ceil(steps) / _ALIGN) * _ALIGN
        return self._room[side]


@final
class _Source:
    """An array's rows, from memory or from the file that it lies in.

    From a file they are read, not mapped: a mapped page costs more than the few rows of a client
    that are on it, and what was read once is of no use again among a million clients.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows
        self._file: int | None = None
        self._stride = rows[:0].nbytes if not len(rows) else rows.nbytes // len(rows)
        if isinstance(rows, np.memmap) and rows.flags.c_contiguous and hasattr(os, "preadv"):
            base = rows.__array_interface__["data"][0]
            whole = rows._mmap  # type: ignore[attr-defined]
            first = np.frombuffer(whole, np.uint8, 1).__array_interface__["data"][0]
            # A mapping begins at a whole page before the array's own beginning in the file.
            begins = rows.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            self._first = begins + base - first
            self._file = os.open(str(rows.filename), os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)

    def copy(self, starts: list[int], sizes: list[int], to: np.ndarray) -> None:
        """So many rows from each of these on, one after another."""
        if self._file is None:
            at = 0
            for start, size in zip(starts, sizes, strict=True):
                to[at : at + size] = self._rows[start : start + size]
                at += size
            return
        each = max(1, -(-len(starts) // _READERS))
        parts = [slice(i, i + each) for i in range(0, len(starts), each)]
        befores = [sum(sizes[: part.start]) * self._stride for part in parts]
        room = memoryview(to.reshape(-1).view(np.uint8).data)
        work = [
            _readers().submit(self._read, starts[part], sizes[part], room[before:])
            for part, before in zip(parts, befores, strict=True)
        ]
        for done in work:
            done.result()

    def _read(self, starts: list[int], sizes: list[int], room: memoryview) -> None:
        assert self._file is not None
        at, stride, file, first = 0, self._stride, self._file, self._first
        for start, size in zip(starts, sizes, strict=True):
            length, offset = size * stride, first + start * stride
            while length:
                read = os.preadv(file, [room[at : at + length]], offset)
                if read == 0:
                    raise DataError(f"{self._rows.filename} has become shorter")  # type: ignore[attr-defined]
                at, length, offset = at + read, length - read, offset + read


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_READERS, "rows")


def _align(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array whose parts along the first axis a CPU's devices can use where they are."""
    length = prod(shape) * dtype.itemsize
    raw = np.empty(length + _ALIGN, np.uint8)
    first = -raw.__array_interface__["data"][0] % _ALIGN
    return raw[first : first + length].view(dtype).reshape(shape)


def replicated_array(value: np.ndarray, mesh: Mesh) -> jax.Array:
    """One array on all devices of this process; a CPU's share one copy of it."""
    if mesh.devices.ravel()[0].platform == "cpu":
        aligned = _align(value.shape, np.dtype(jax.dtypes.canonicalize_dtype(value.dtype)))
        aligned[...] = value
        value = aligned
    placed: jax.Array = jax.device_put(value, NamedSharding(mesh, REPLICATED))
    return placed


def on_host(tree: Any) -> Any:
    """Arrays that every process has, or that one process has all of, for NumPy."""
    return jax.tree.map(np.asarray, jax.device_get(tree))


def replicated(tree: Any, mesh: Mesh) -> Any:
    """Values that all processes have alike, on all devices."""
    sharding = NamedSharding(mesh, REPLICATED)

    def placed(leaf: Any) -> jax.Array:
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, sharding, lambda _: value)

    return jax.tree.map(placed, tree)
