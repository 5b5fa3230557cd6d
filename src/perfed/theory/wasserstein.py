"""W1 between two distributions of examples from a cost matrix: exact, or by Sinkhorn."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from jaxtyping import Float, Float32, Int

from perfed.core.errors import require
from perfed.theory.points import Distribution, ExamplePoints, TransportProblem

W1Method = Literal["auto", "exact", "sinkhorn", "sliced"]

# The most entries of one cost matrix: 8 bytes each plus the simplex's own, or two of 4 bytes.
EXACT_ENTRIES = 50_000_000
SINKHORN_ENTRIES = 200_000_000
# The most entries of all cost matrices together for which `auto` chooses it: minutes on two cores.
AUTO_EXACT_ENTRIES = 200_000_000
AUTO_SINKHORN_ENTRIES = 3_000_000_000

# The entropy's weight, relative to the mean cost; bounds are computed from `_BOUNDS_FROM` on.
_EPSILONS = (0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005)
_BOUNDS_FROM = 0.005
# Sinkhorn steps between updates of the potentials, how many updates, and the marginals' tolerated
# error, which rounding removes.
_SCALING_STEPS = 20
_POTENTIAL_UPDATES = 20
_MARGINAL_ERROR = 1e-3


def choose_method(method: W1Method, entries: Int[np.ndarray, " problems"]) -> W1Method:
    """The method for cost matrices of so many entries; refuses those that do not fit in memory."""
    total, largest = int(entries.sum()), int(entries.max())
    if method == "auto":
        if total <= AUTO_EXACT_ENTRIES and largest <= EXACT_ENTRIES:
            return "exact"
        fits = total <= AUTO_SINKHORN_ENTRIES and largest <= SINKHORN_ENTRIES
        return "sinkhorn" if fits else "sliced"
    limit, instead = {
        "exact": (EXACT_ENTRIES, '"sinkhorn", "sliced" or "auto"'),
        "sinkhorn": (SINKHORN_ENTRIES, '"sliced" or "auto"'),
    }[method]
    allowed = (
        f"needs a cost matrix of {largest:,} entries for these clients, more than its limit of "
        f"{limit:,}; use {instead}"
    )
    require(largest <= limit, "method", method, allowed)
    return method


def w1_bounds(
    space: ExamplePoints, method: W1Method, problem: TransportProblem, tolerance: float
) -> tuple[float, float]:
    """Bounds of W1: the mass that is moved, times the normalized problem's W1."""
    source, sink, mass = problem
    if mass == 0 or not len(sink.rows):
        return 0.0, 0.0
    if method == "sinkhorn":
        low, high = _sinkhorn(space, source, sink, tolerance)
        return mass * low, mass * high
    value = mass * _exact(space.costs(source.rows, sink.rows), source.weight, sink.weight)
    return value, value


def _exact(
    costs: Float[np.ndarray, "sources sinks"],
    a: Float[np.ndarray, " sources"],
    b: Float[np.ndarray, " sinks"],
) -> float:
    """The cheapest plan's cost, by network simplex."""
    # Imported here: POT imports every array library that is installed, which takes seconds.
    import ot

    value, log = ot.emd2(a, b, costs, numItermax=10**9, log=True)
    require(not log["warning"], "method", "exact", f"found no solution ({log['warning']})")
    return float(value)


@final
@dataclass(frozen=True)
class EntropicTransport:
    """Transport with an entropy term: the plan is v_j K_ji u_i, for sources i and sinks j.

    Sinks are the rows, in blocks that fit in a core's cache, so that a step reads memory once.
    """

    costs: Float32[np.ndarray, "sinks sources"]
    a: Float[np.ndarray, " sources"]
    b: Float[np.ndarray, " sinks"]

    def blocks(self) -> Iterator[slice]:
        """The sinks, block by block."""
        step = max(1, 2**18 // len(self.a))
        return (slice(k, k + step) for k in range(0, len(self.b), step))

    def kernel(
        self, f: Float[np.ndarray, " sources"], epsilon: float
    ) -> Float32[np.ndarray, "sinks sources"]:
        """K = exp((f_i - C_ji) / epsilon), each row normalized to add up to b_j."""
        kernel = np.empty_like(self.costs)
        for at in self.blocks():
            part = kernel[at]
            np.subtract(f.astype(np.float32), self.costs[at], out=part)
            part /= np.float32(epsilon)
            part -= part.max(axis=1, keepdims=True)
            np.exp(part, out=part)
            part *= (self.b[at] / part.sum(axis=1)).astype(np.float32)[:, None]
        return kernel

    def scaling(
        self, kernel: Float32[np.ndarray, "sinks sources"]
    ) -> tuple[Float[np.ndarray, " sources"], float]:
        """The u of some Sinkhorn steps, and the sources' marginal error at the last."""
        u = np.ones(len(self.a), np.float32)
        for _ in range(_SCALING_STEPS):
            marginal = np.zeros(len(self.a))
            for at in self.blocks():
                v = self.b[at] / np.maximum(kernel[at] @ u, 1e-37)
                marginal += v.astype(np.float32) @ kernel[at]
            error = float(np.abs(u * marginal - self.a).sum())
            u = np.clip(self.a / np.maximum(marginal, 1e-37), 1e-25, 1e25).astype(np.float32)
            if error <= _MARGINAL_ERROR:
                break
        return u.astype(np.float64), error

    def dual_value(self, f: Float[np.ndarray, " sources"]) -> float:
        """The dual value of f with the best feasible g: g_j = min_i C_ji - f_i."""
        value = float(self.a @ f)
        for at in self.blocks():
            value += float(self.b[at] @ (self.costs[at].astype(np.float64) - f).min(axis=1))
        return value

    def plan_cost(
        self,
        kernel: Float32[np.ndarray, "sinks sources"],
        u: Float[np.ndarray, " sources"],
    ) -> float:
        """The cost of the plan, rounded to its marginals.

        Altschuler et al. (2017), Algorithm 2: the plan is scaled down to at most its marginals, and
        the missing mass is added as a product.
        """

        def plan(at: slice) -> Float[np.ndarray, "some sources"]:
            part = kernel[at] * u
            part *= (self.b[at] / np.maximum(part.sum(axis=1), 1e-300))[:, None]
            return np.asarray(part)

        marginal = sum(plan(at).sum(axis=0) for at in self.blocks())
        fit = np.minimum(1.0, self.a / np.maximum(marginal, 1e-300))
        missing_a, cost = self.a - fit * marginal, 0.0
        short = np.zeros(len(self.b))
        product = np.zeros(len(self.a))
        for at in self.blocks():
            part, costs = plan(at) * fit, self.costs[at].astype(np.float64)
            cost += float((part * costs).sum())
            short[at] = np.maximum(self.b[at] - part.sum(axis=1), 0)
            product += short[at] @ costs
        missing = short.sum()
        return cost + float(product @ missing_a / missing) if missing > 0 else cost


def _sinkhorn(
    space: ExamplePoints, source: Distribution, sink: Distribution, tolerance: float
) -> tuple[float, float]:
    """Bounds of W1 between two distributions, by entropic transport."""
    costs = np.empty((len(sink.rows), len(source.rows)), np.float32)
    problem = EntropicTransport(costs, source.weight, sink.weight)
    step = max(1, 2**22 // max(len(source.rows), len(space.center)))
    for k in range(0, len(costs), step):
        costs[k : k + step] = space.costs(source.rows, sink.rows[k : k + step]).T
    # Costs are stored in single precision; the bounds are widened by that rounding.
    mean, rounding = float(costs.mean(dtype=np.float64)), 2.0**-24 * float(costs.max())
    if mean == 0:
        return 0.0, 0.0
    low, high = 0.0, np.inf
    # With this start every source is the best one for some sink, so that none underflows.
    f = costs.min(axis=0).astype(np.float64)
    for epsilon in _EPSILONS:
        # Large scalings are moved into f, where they cannot overflow.
        for _ in range(_POTENTIAL_UPDATES):
            kernel = problem.kernel(f, epsilon * mean)
            u, error = problem.scaling(kernel)
            f = f + epsilon * mean * np.log(u)
            if error <= _MARGINAL_ERROR:
                break
        if epsilon > _BOUNDS_FROM:
            continue
        low = max(low, problem.dual_value(f) - rounding)
        high = min(high, problem.plan_cost(kernel, u) + rounding)
        if high - low <= tolerance * high:
            break
    return low, high
