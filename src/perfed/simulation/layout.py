"""How clients are laid out over devices: how many at once, and in how many parts."""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import final

from jax.sharding import Mesh

from perfed.core.objective import BLOCK
from perfed.core.trees import tree_bytes
from perfed.simulation.experiment import Experiment

# A client at work holds several copies of the model (iterates, gradients) and a block of examples;
# all the clients that a device vectorizes at once should stay below this many bytes of them.
_COPIES = 8
_BYTES_AT_ONCE = 512 * 2**20
# What a core works on should stay in its caches: 100 clients of the papers' network take 320 ms in
# two parts, 200 ms in twenty.
_BYTES_IN_CACHE = 12 * 2**20
# An accelerator is faster the more it is given at once (1,000 clients of a Per-FedAvg round on an
# H200: 26 ms in eight parts, 19 ms in one), so it may use this part of its memory.
_PART_OF_MEMORY = 8


@final
@dataclass(frozen=True)
class Layout:
    """Where clients go.

    Attributes:
        experiment: what is trained.
        mesh: the devices.
        chunk: at most so many clients at once on a device; None: as many as fit in memory well.
    """

    experiment: Experiment
    mesh: Mesh
    chunk: int | None

    def slots(self, clients: int, runs: int = 1) -> tuple[int, int]:
        """How many of so many clients a device takes at once, and how many slots it has in all."""
        share = ceil(clients / self.mesh.size)
        limit = max(1, self.at_once // runs)
        chunks = ceil(share / limit)
        chunk = ceil(share / chunks)
        return chunk, chunk * chunks

    @cached_property
    def at_once(self) -> int:
        """How many clients a device takes at once, of all runs together."""
        block = BLOCK * 4 * prod(self.experiment.federation.example_shape)
        fitting = self._bytes_at_once // (_COPIES * self.model_bytes + 2 * block)
        if self.on_cpu:
            busiest = max(_COPIES * self.model_bytes, self.experiment.review.bytes)
            fitting = min(fitting, _BYTES_IN_CACHE // busiest)
        return self.chunk or max(1, fitting)

    @cached_property
    def model_bytes(self) -> int:
        """The size of the model."""
        return tree_bytes(self.experiment.model_shape)

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are a CPU's cores."""
        return bool(self.mesh.devices.ravel()[0].platform == "cpu")

    @cached_property
    def _bytes_at_once(self) -> int:
        memory = None if self.on_cpu else self.mesh.local_devices[0].memory_stats()
        limit = 0 if memory is None else int(memory.get("bytes_limit", 0))
        return max(_BYTES_AT_ONCE, limit // _PART_OF_MEMORY)
