"""W1 on a line, and bounds of W1 from projections to random lines, without a cost matrix."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Float, Int
from scipy.spatial import distance

from perfed.data import Federation
from perfed.theory.points import ExamplePoints


@final
@dataclass(frozen=True)
class ClientNumbers:
    """Numbers of all clients, sorted within each client; those of one client have equal weights.

    Attributes:
        values: the numbers.
        start: the first of each client.
        size: how many each client has.
        level: the share of its client's numbers up to and including each number.
        weight: the weight of each in p.
    """

    values: Float[np.ndarray, " total"]
    start: Int[np.ndarray, " clients"]
    size: Int[np.ndarray, " clients"]
    level: Float[np.ndarray, " total"]
    weight: Float[np.ndarray, " total"]

    @classmethod
    def of(cls, values: Float[np.ndarray, " total"], federation: Federation) -> "ClientNumbers":
        """From one number for each training example."""
        start, size = (np.asarray(part) for part in (federation.train.start, federation.train.size))
        owner = np.repeat(np.arange(len(size)), size)
        level = (np.arange(len(owner)) - start[owner] + 1) / size[owner]
        weight = 1.0 / (len(size) * size[owner])
        return cls(values[np.lexsort((values, owner))], start, size, level, weight)

    def from_average(self) -> Float[np.ndarray, " clients"]:
        """W1(p_i, p)."""
        return self._from(self.values, self.weight)

    def from_each_other(self) -> Float[np.ndarray, "clients clients"]:
        """W1(p_i, p_j)."""
        rows = [slice(k, k + m) for k, m in zip(self.start, self.size, strict=True)]
        matrix = np.array(
            [self._from(self.values[own], np.ones(len(self.values[own]))) for own in rows]
        )
        # The two ways to work out a distance differ in rounding.
        upper = np.triu(matrix, 1)
        return np.asarray(upper + upper.T)

    def _from(
        self, values: Float[np.ndarray, " some"], weight: Float[np.ndarray, " some"]
    ) -> Float[np.ndarray, " clients"]:
        """The integral of |F_i - F| for each client, F being of these values with these weights.

        Between two of its numbers F_i is constant, F rises, and they cross at most once; so the
        integral end is that of F up to both ends and to where they cross.
        """
        order = np.argsort(values, kind="stable")
        t, F = values[order], np.cumsum(weight[order])
        F /= F[-1]
        area = np.concatenate([[0.0], np.cumsum(F[:-1] * np.diff(t))])

        def integral(upto: Float[np.ndarray, " any"]) -> Float[np.ndarray, " any"]:
            k = np.maximum(np.searchsorted(t, upto, side="right") - 1, 0)
            return np.asarray(area[k] + F[k] * np.maximum(upto - t[k], 0))

        last = self.start + self.size - 1
        begin, end = self.values, np.append(self.values[1:], 0.0)
        # After its last number F_i is 1, and F is 1 after the last of all.
        end[last] = np.maximum(begin[last], t[-1])
        to_begin = integral(begin)
        to_end = np.append(to_begin[1:], 0.0)
        to_end[last] = integral(end[last])
        crossing = np.clip(t[np.minimum(np.searchsorted(F, self.level), len(t) - 1)], begin, end)
        pieces = self.level * (2 * crossing - begin - end)
        pieces += to_begin + to_end - 2 * integral(crossing)
        before = to_begin[self.start]
        return np.asarray(np.maximum(before + np.add.reduceat(pieces, self.start), 0.0))


def _sliced_table(
    space: ExamplePoints,
    directions: int,
    seed: int,
    distances: Callable[[ClientNumbers], np.ndarray],
) -> Float[np.ndarray, "directions ..."]:
    """The distances on a line, for each of some random directions."""
    dimensions = space.points(np.arange(1)).shape[1]
    normal = np.random.default_rng(seed).normal(size=(directions, dimensions))
    units = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    table = []
    # A few at a time, to limit the memory of all examples' projections.
    for k in range(0, directions, 16):
        some = units[k : k + 16].T
        projected = np.concatenate([space.points(rows) @ some for rows in space.blocks()])
        table += [distances(ClientNumbers.of(values, space.federation)) for values in projected.T]
    return np.array(table)


def _moments(
    space: ExamplePoints,
) -> tuple[Float[np.ndarray, "clients dimensions"], Float[np.ndarray, " clients"]]:
    """The mean of each client's points, and the mean of their squares."""
    n = space.federation.clients
    own = n * space.weight
    means = np.zeros((n, space.points(np.arange(1)).shape[1]))
    squares = np.zeros(n)
    for rows in space.blocks():
        points, owner = space.points(rows) * own[rows, None], space.owner[rows]
        clients, first = np.unique(owner, return_index=True)
        means[clients] += np.add.reduceat(points, first)
        norms = (points**2).sum(axis=1) / own[rows]
        squares[clients] += np.add.reduceat(norms, first)
    return means, squares


def sliced_bounds(
    space: ExamplePoints, directions: int, seed: int
) -> tuple[Float[np.ndarray, " clients"], Float[np.ndarray, " clients"]]:
    """Lower and upper bounds of W1(p_i, p) without a cost matrix."""
    n = space.federation.clients
    means, squares = _moments(space)
    low = _sliced_table(space, directions, seed, ClientNumbers.from_average).max(axis=0)
    low = np.maximum(low, np.linalg.norm(means - means.mean(axis=0), axis=1))
    # p contains p_i with weight 1/n; p_i only has to be moved to the rest of p.
    others = max(n - 1, 1)
    rest, rest_squares = ((m.sum(axis=0) - m) / others for m in (means, squares))
    apart = squares + rest_squares - 2 * (means * rest).sum(axis=1)
    high = (1 - 1 / n) * np.sqrt(np.maximum(apart, 0))
    return low, np.maximum(low, high)


def sliced_matrix(
    space: ExamplePoints, directions: int, seed: int
) -> Float[np.ndarray, "clients clients"]:
    """A lower bound of W1(p_i, p_j), which is a distance itself, as the largest of some are."""
    means, _ = _moments(space)
    sliced = _sliced_table(space, directions, seed, ClientNumbers.from_each_other).max(axis=0)
    return np.asarray(np.maximum(sliced, distance.squareform(distance.pdist(means))))
