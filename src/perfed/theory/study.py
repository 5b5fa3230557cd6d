"""A study of a federation: its constants, how its clients differ, and what the theorems say."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any, final

import numpy as np
from jaxtyping import Float, Int

from perfed.objective import Params
from perfed.simulation import Engine
from perfed.theory.conditions import Diagnosis, diagnose
from perfed.theory.constants import USUAL, Constants, Effort, measure
from perfed.theory.distances import distance_matrix, groups, label_distances

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


@final
@dataclass(frozen=True)
class Study:
    """What is known of a federation and a run on it.

    Attributes:
        at: the models it was measured at, in words.
        constants: of the papers' assumptions.
        diagnosis: the theorems' conditions and bounds.
        distance: of each client's labels from the average (Per-FedAvg, 4.1): total variation, or
            W_1 in a regression.
        group: groups of clients with similar labels.
    """

    at: str
    constants: Constants
    diagnosis: Diagnosis
    distance: Float[np.ndarray, " clients"]
    group: Int[np.ndarray, " clients"]

    def as_json(self) -> dict[str, Any]:
        """For a file, a page or a table: numbers that are not finite are None."""
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
                "theorem": d.theorem,
                "terms": d.terms,
                "terms_hide_a_factor": d.hidden,
                "label_distance": self.distance.tolist(),
                "group": self.group.tolist(),
                "client_L": c.client_L.tolist(),
                "client_B": c.client_B.tolist(),
            }
        )
        return plain


def study(
    engine: Engine,
    rounds: int,
    w: Params | None = None,
    at: str = "the first model",
    effort: Effort = USUAL,
    say: Callable[[str], None] = lambda line: None,
) -> Study:
    """Measure a federation at a model (None: the first), and check a run of so many rounds."""
    constants = measure(engine, w, effort, say)
    return of_constants(engine, rounds, constants, at)


def of_constants(engine: Engine, rounds: int, constants: Constants, at: str) -> Study:
    """A study from constants that are measured already."""
    federation = engine.setup.federation
    return Study(
        at,
        constants,
        diagnose(engine.setup, constants, rounds),
        label_distances(federation),
        groups(distance_matrix(federation, on="labels")),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if isfinite(value) else None
    return value
