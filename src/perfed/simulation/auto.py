"""Which engine: all data on the devices, or read as they are needed."""

import os
from pathlib import Path
from typing import Final

import jax

from perfed.core.trees import tree_bytes
from perfed.simulation.devices import device_mesh
from perfed.simulation.engine import Simulator
from perfed.simulation.experiment import Experiment
from perfed.simulation.hosts import is_multihost
from perfed.simulation.streamed import Streamed
from perfed.simulation.vectorized import Vectorized

# All clients' examples and what they keep may take this part of the memory.
_PART_OF_MEMORY: Final = 4
# Where Linux says how much of it a container has, in the two versions of control groups.
_CONTAINER: Final = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def engine_for(
    experiment: Experiment,
    devices: int | None = None,
    chunk: int | None = None,
    store: Path | None = None,
) -> Simulator:
    """The fast engine if all fits into memory, or else the one that reads what it needs.

    On several hosts it is the latter, so that each reads the rows of its own clients only.

    Args:
        experiment: what is trained.
        devices: how many devices; None: all.
        chunk: at most so many clients at once on a device; None: chosen by memory.
        store: the folder for what clients keep, if it is not kept in memory.
    """
    if is_multihost() or resident_bytes(experiment, devices) > memory_limit():
        return Streamed(experiment, devices, chunk, store)
    return Vectorized(experiment, devices, chunk)


def resident_bytes(experiment: Experiment, devices: int | None = None) -> int:
    """What all examples, and what all clients keep, take on the devices of a memory."""
    federation = experiment.federation
    rows = sum(a.nbytes for part in (federation.train, federation.test) for a in (part.x, part.y))
    per_client = tree_bytes(jax.eval_shape(experiment.init_record, experiment.model_shape))
    # A CPU's devices share one memory, and in it the rows; what clients keep each has for itself.
    copies = device_mesh(devices).size if jax.default_backend() == "cpu" else 1
    return int(rows + copies * federation.clients * per_client + tree_bytes(experiment.task.frozen))


def memory_limit() -> int:
    """How much of a device's memory may be taken by what stays there."""
    limits = jax.local_devices()[0].memory_stats() or {}
    total = limits.get("bytes_limit")
    if total is None or jax.default_backend() == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        total = min(total, *(_limit(path) or total for path in _CONTAINER))
    return int(total) // _PART_OF_MEMORY


def _limit(path: str) -> int | None:
    """What a container or a batch job may use of the machine's memory; None: all of it."""
    try:
        said = Path(path).read_text().strip()
    except OSError:
        return None
    return int(said) if said.isdigit() else None
