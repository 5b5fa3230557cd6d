"""How long a round would take over a real network: the cost model of FedPAQ, section 5."""

from dataclasses import dataclass
from typing import Self, final

import numpy as np
from jaxtyping import Float, Int

from perfed.core.errors import FieldError, require
from perfed.simulation.engine import Traffic

# The bits of an entry that is not quantized: F in the paper.
FLOAT_BITS = 32


@final
@dataclass(frozen=True)
class Network:
    """Bandwidths and speeds.

    A round takes as long as all its uploads over the shared link, total bits / `bandwidth`, plus
    the slowest client's computation. A client that takes g gradients needs g * `shift` seconds, and
    a random time more, exponential with mean g / `scale`.

    Attributes:
        bandwidth: of the shared link to the server, in bits per second.
        shift: seconds that a gradient of one example takes at least.
        scale: gradients a second that the random part of a computation takes.
        down_bandwidth: of the link from the server, which sends the cohort one message; None: it
            takes no time, as in the paper.
        client_bandwidth: of each client's own link, in bits per second; None: only the shared one
            counts.
        client_speed: how many times as fast as said above each client computes; None: 1.
    """

    bandwidth: float
    shift: float = 1e-4
    scale: float = 1e4
    down_bandwidth: float | None = None
    client_bandwidth: tuple[float, ...] | None = None
    client_speed: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "bandwidth", "scale", "down_bandwidth")
        require(0 <= self.shift < np.inf, "shift", self.shift, "must be a number, at least 0")
        for field in ("client_bandwidth", "client_speed"):
            values = getattr(self, field)
            good = values is None or (len(values) > 0 and all(0 < v < np.inf for v in values))
            require(good, field, values, "must be numbers greater than 0, one a client")

    @classmethod
    def of_ratio(cls, ratio: float, parameters: int, shift: float, scale: float) -> Self:
        """From C_comm/C_comp = (p F / bandwidth) / (shift + 1/scale), for p parameters."""
        require(0 < ratio < np.inf, "ratio", ratio, "must be a number greater than 0")
        cls(1.0, shift, scale)  # so that a fault is named by its own name
        gradient = shift + 1 / scale
        return cls(parameters * FLOAT_BITS / (ratio * gradient), shift, scale)

    def check(self, clients: int) -> None:
        """Refuse lists of another length than there are clients."""
        for field in ("client_bandwidth", "client_speed"):
            values = getattr(self, field)
            if values is not None and len(values) != clients:
                raise FieldError(
                    field, values, f"must have one number for each of {clients} clients"
                )

    def seconds(
        self, traffic: Traffic, gradients: Int[np.ndarray, " clients"], seed: int, first_round: int
    ) -> Float[np.ndarray, " rounds"]:
        """How long each round takes.

        Args:
            traffic: the messages.
            gradients: how many gradients of one example each client takes in a turn.
            seed: of the random part of the computations.
            first_round: the number of the first round in `traffic`.
        """
        cohort, bits = traffic.cohort, 8.0 * traffic.uplink
        luck = np.empty(cohort.shape)
        for i in range(len(cohort)):
            draw = np.random.default_rng([seed, first_round + i])
            luck[i] = draw.exponential(size=cohort.shape[1])
        compute = gradients[cohort] * (self.shift + luck / self.scale)
        if self.client_speed is not None:
            compute = compute / np.array(self.client_speed)[cohort]
        if self.client_bandwidth is not None:
            compute = compute + bits / np.array(self.client_bandwidth)[cohort]
        down = 8.0 * traffic.downlink / (self.down_bandwidth or np.inf)
        seconds: np.ndarray = down + compute.max(axis=1) + bits.sum(axis=1) / self.bandwidth
        return seconds


def _require_positive(network: Network, *fields: str) -> None:
    for field in fields:
        value = getattr(network, field)
        good = value is None or 0 < value < np.inf
        require(good, field, value, "must be a number greater than 0")
