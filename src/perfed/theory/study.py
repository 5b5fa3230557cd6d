"""A study of a federation: its constants, how its clients differ, and what the theorems say."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple, final

import numpy as np
from jaxtyping import Float, Int

from perfed.core.trees import Params
from perfed.data import Federation
from perfed.simulation import Simulator
from perfed.theory.conditions import Diagnosis
from perfed.theory.constants import USUAL, Constants, Effort, measure
from perfed.theory.diagnosis import diagnose
from perfed.theory.distances import (
    On,
    distance_matrix,
    feature_distances,
    label_distances,
)
from perfed.theory.groups import groups

# What each constant is, in a few words.
MEANINGS = {
    "B": "largest gradient of a client",
    "L": "largest curvature of a client (smoothness)",
    "mu": "smallest curvature of a client (convexity)",
    "rho": "how fast curvature changes (at least)",
    "sigma_G": "spread of a client's gradients over its examples",
    "sigma_H": "spread of a client's Hessians over its examples",
    "gamma_G": "spread of gradients over clients",
    "gamma_H": "spread of Hessians over clients",
}


class Differences(NamedTuple):
    """How much clients' data differ (Per-FedAvg, 4.1).

    Attributes:
        on: labels alone, or features with labels.
        method: total variation, or how W_1 was computed.
        value: each client's distance from the average.
        low: a lower bound.
        high: an upper bound.
        matrix: between each two clients.
        group: groups of similar clients.
    """

    on: On
    method: str
    value: Float[np.ndarray, " clients"]
    low: Float[np.ndarray, " clients"]
    high: Float[np.ndarray, " clients"]
    matrix: Float[np.ndarray, "clients clients"]
    group: Int[np.ndarray, " clients"]

    @classmethod
    def of(cls, federation: Federation, on: On = "labels") -> "Differences":
        """Measure them; features take minutes if clients have many examples."""
        matrix = distance_matrix(federation, on=on)
        group = groups(matrix)
        if on == "labels":
            value = label_distances(federation)
            method = "total variation" if federation.labels is not None else "W_1"
            return cls(on, method, value, value, value, matrix, group)
        result = feature_distances(federation)
        return cls(
            on, f"W_1, {result.method}", result.value, result.low, result.high, matrix, group
        )


@final
@dataclass(frozen=True)
class Study:
    """What was measured of a federation, and what the theorems say about a run on it.

    Attributes:
        at: the models it was measured at, in words.
        constants: of the papers' assumptions.
        diagnosis: the theorems' conditions and bounds.
        differences: between clients' data.
    """

    at: str
    constants: Constants
    diagnosis: Diagnosis
    differences: Differences

    def as_json(self) -> dict[str, Any]:
        """As JSON; numbers that are not finite are None."""
        c, d = self.constants, self.diagnosis
        constants = [
            {"name": name, "meaning": meaning} | getattr(c, name)._asdict()
            for name, meaning in MEANINGS.items()
        ]
        conditions = [
            condition._asdict() | {"factor": condition.factor, "holds": condition.holds}
            for condition in d.conditions
        ]
        plain: dict[str, Any] = _plain(
            {
                "at": self.at,
                "method": d.method,
                "clients": c.clients,
                "parameters": c.parameters,
                "loss": c.loss,
                "constants": constants,
                "q": c.q,
                "derived": d.derived,
                "conditions": conditions,
                "bounds": [bound._asdict() for bound in d.bounds],
                "note": d.note,
                "distance": {
                    "on": self.differences.on,
                    "method": self.differences.method,
                    "value": self.differences.value.tolist(),
                    "low": self.differences.low.tolist(),
                    "high": self.differences.high.tolist(),
                },
                "group": self.differences.group.tolist(),
                "client_L": c.client_L.tolist(),
                "client_B": c.client_B.tolist(),
            }
        )
        return plain


def study(
    engine: Simulator,
    rounds: int,
    models: Sequence[tuple[str, Params | None]] = (("the first model", None),),
    on: On = "labels",
    effort: Effort = USUAL,
    log: Callable[[str], None] = lambda line: None,
) -> Study:
    """Measure a federation, and check a run of so many rounds on it.

    Args:
        engine: the run's.
        rounds: how many.
        models: where constants are measured, each with its name (None: the first model); the
            result has the larger constants.
        on: what distances between clients compare.
        effort: how many examples, clients and steps the constants take.
        log: called with a line for each stage.
    """
    measured = [measure(engine, w, effort, log) for _, w in models]
    constants = measured[0]
    for other in measured[1:]:
        constants = constants.joined(other)
    log(f"distances between {constants.clients} clients, on {on}")
    return Study(
        " and ".join(name for name, _ in models),
        constants,
        diagnose(engine.experiment, constants, rounds),
        Differences.of(engine.experiment.federation, on),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if isfinite(value) else None
    return value
