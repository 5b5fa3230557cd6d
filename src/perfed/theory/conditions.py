"""Conditions of the theorems, and the bounds that hold where they are met."""

from math import inf
from typing import Literal, NamedTuple

from perfed.core.objective import BatchSize
from perfed.methods import FedAvg
from perfed.methods.optimizers import SGD
from perfed.pipeline.codecs import Float32
from perfed.simulation import Experiment
from perfed.theory.constants import Constants

# Limits are known to about this relative accuracy: eigenvalues are computed in float32.
ROUNDING = 1e-4

Sense = Literal["at most", "at least"]

_QUANTIZER_NOISE = "the quantizer's noise is not in the bound"

# What stands for an unknown in a bound.
GAP_NOTE = "the loss of the measured model stands for its gap to the smallest"


class Condition(NamedTuple):
    """A condition of a theorem, and the value that a run has.

    Attributes:
        text: as the paper writes it.
        source: the theorem; "practice": no theorem's, but what such steps need in any case.
        value: the run's.
        sense: whether the value must be at most or at least the limit.
        limit: what the measured constants allow.
        risk: what a run risks that does not meet it.
    """

    text: str
    source: str
    value: float
    sense: Sense
    limit: float
    risk: str

    @property
    def factor(self) -> float:
        """The value relative to the limit: 1 is at the limit, above 1 is broken."""
        larger, smaller = self.value, self.limit
        if self.sense == "at least":
            larger, smaller = smaller, larger
        if smaller > 0:
            return larger / smaller
        return inf if larger > 0 else 1.0

    @property
    def holds(self) -> bool:
        """Whether the run meets it, up to the rounding of constants measured in float32."""
        return self.factor <= 1 + ROUNDING


class Bound(NamedTuple):
    """The right-hand side of a theorem's bound, for one run.

    Attributes:
        source: which theorem.
        bounded: what it bounds, in words.
        terms: of its right-hand side, by name.
        hidden: whether each term lacks a factor O(1).
        note: what stands for a quantity that is not known; "" if there is none.
    """

    source: str
    bounded: str
    terms: dict[str, float]
    hidden: bool
    note: str = ""


class Diagnosis(NamedTuple):
    """What the theory says about a run.

    Attributes:
        method: the run's method.
        derived: what follows from the constants, by the papers' names.
        conditions: of the theorems.
        bounds: of the theorems; they hold where the conditions do.
        note: what cannot be said about this method; "" if the theorems cover it.
    """

    method: str
    derived: dict[str, float]
    conditions: list[Condition]
    bounds: list[Bound]
    note: str = ""

    @property
    def broken(self) -> list[Condition]:
        """The conditions that are not met."""
        return [condition for condition in self.conditions if not condition.holds]


def at_most(text: str, source: str, value: float, limit: float, risk: str) -> Condition:
    """A condition value <= limit."""
    return Condition(text, source, float(value), "at most", float(limit), risk)


def at_least(text: str, source: str, value: float, limit: float, risk: str) -> Condition:
    """A condition value >= limit."""
    return Condition(text, source, float(value), "at least", float(limit), risk)


def unmet(text: str, source: str, risk: str) -> Condition:
    """A condition that the run does not meet, and that has no size."""
    return at_most(text, source, 1, 0, risk)


def descent(
    name: str, rate: float, L: float, penalty: str | None = None, weight: float = 0.0
) -> Condition:
    """A step size below 2/L; where a penalty (weight/2) |w - a|^2 is named, 2/(L + weight)."""
    risk = "steps along the sharpest client's sharpest direction overshoot, and losses may grow"
    limit = "2/L" if penalty is None else f"2/(L + {penalty})"
    return at_most(f"{name} < {limit}", "practice", rate, 2 / (L + weight), risk)


def common_conditions(experiment: Experiment) -> list[Condition]:
    """What all the theorems take for granted, where the run has something else."""
    conditions = []
    if experiment.weighting == "size":
        risk = "the problem is then the mean weighted by size, not the papers'"
        conditions.append(unmet("uniform averages", "all theorems", risk))
    if experiment.sampling == "epochs":
        risk = "batches are not independent; usually they are better, but no bound says so"
        conditions.append(unmet("independent batches", "all theorems", risk))
    optimizer = getattr(experiment.method, "optimizer", SGD())
    if optimizer != SGD():
        risk = "the theorems are of plain steps along the gradient"
        conditions.append(unmet("plain SGD", "all theorems", risk))
    if experiment.pipeline.clip is not None:
        risk = "clipped deltas are biased, and no bound says by how much"
        conditions.append(unmet("deltas as they are", "all theorems", risk))
    if experiment.task.is_random:
        risk = "the constants are of the model without its randomness, as it is in evaluation"
        conditions.append(unmet("no dropout", "all theorems", risk))
    if not all(experiment.is_shared):
        risk = "the theorems are of models that all clients share"
        conditions.append(unmet("no personal leaves", "all theorems", risk))
    if not isinstance(experiment.downlink, Float32):
        conditions.append(
            unmet("the server's model arrives as it is", "all theorems", _QUANTIZER_NOISE)
        )
    counted = isinstance(experiment.method, FedAvg)
    if not isinstance(experiment.pipeline.codec, Float32) and not counted:
        conditions.append(
            unmet("messages without loss", "this method's theorems", _QUANTIZER_NOISE)
        )
    return conditions


def smoothness(c: Constants) -> float:
    """L; where the loss is flat, a number so small that any step is allowed."""
    return max(c.L.value, 1e-30)


def convexity(experiment: Experiment, c: Constants) -> float:
    """A lower estimate of mu, as if f_i were as convex everywhere; at most 0: it is not convex.

    Lanczos approaches the smallest eigenvalue last and from above; the l2 penalty bounds it below.
    """
    l2 = experiment.task.l2
    return max(c.mu.low, l2) if 0 < 0.99 * l2 <= c.mu.value else c.mu.low


def batch_size(batch: BatchSize) -> float:
    """The size of a batch; infinite for all data, which have no noise."""
    return inf if isinstance(batch, str) else float(batch)
