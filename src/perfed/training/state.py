"""Where a training run stands, and what it has cost."""

from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
from jaxtyping import Float, Int

from perfed.evaluation import Evaluation
from perfed.simulation import EngineState, Experiment, Network, Traffic


class Costs(NamedTuple):
    """What a run has cost after 0, 1, 2, ... rounds.

    Attributes:
        uplink_bytes: all that clients have sent.
        downlink_bytes: all that the server has sent, one message to each client of a cohort.
        seconds: the time it would have taken over the network; None: none was given.
    """

    uplink_bytes: Int[np.ndarray, " rounds+1"]
    downlink_bytes: Int[np.ndarray, " rounds+1"]
    seconds: Float[np.ndarray, " rounds+1"] | None

    @classmethod
    def of(cls, traffic: Traffic, round_seconds: Float[np.ndarray, " rounds"] | None) -> "Costs":
        """Running sums."""

        def summed(values: np.ndarray) -> np.ndarray:
            return np.concatenate([[0], np.cumsum(values)])

        taken = (traffic.cohort >= 0).sum(axis=1)
        return cls(
            summed(traffic.uplink.sum(axis=1, dtype=np.int64)),
            summed(traffic.downlink.astype(np.int64) * taken),
            None if round_seconds is None else summed(round_seconds),
        )


@final
@dataclass(frozen=True)
class TrainState:
    """Where a run stands, and all it has come by on the way: what it takes to go on.

    Attributes:
        engine: the engine's state.
        history: the scores so far.
        messages: the messages so far, in parts.
        marks: how many seconds into the run each of the scores was taken.
        timing: what the time was spent on.
    """

    engine: EngineState
    history: tuple[Evaluation, ...]
    messages: tuple[Traffic, ...]
    marks: tuple[float, ...]
    timing: dict[str, float]

    @property
    def traffic(self) -> Traffic:
        """The messages so far."""
        return Traffic.concatenate(self.messages)

    @property
    def round(self) -> int:
        """How many rounds are done."""
        return int(self.engine.round)


def round_seconds(
    network: Network, experiment: Experiment, traffic: Traffic
) -> Float[np.ndarray, " rounds"]:
    """How long each round would have taken over a network."""
    sizes = np.asarray(experiment.federation.train.size)
    different, which = np.unique(sizes, return_inverse=True)
    gradients = np.array([experiment.method.gradient_count(int(size)) for size in different])[which]
    return network.seconds(traffic, gradients, experiment.seed, first_round=0)
