"""Groups of similar clients, from a matrix of their distances."""

import numpy as np
from jaxtyping import Float, Int
from scipy.cluster import hierarchy
from scipy.spatial import distance

from perfed.core.errors import require, require_count

# Kaufman and Rousseeuw (1990): a mean silhouette up to this shows no substantial structure.
POOR_SILHOUETTE = 0.25
MOST_GROUPS = 10


def groups(
    matrix: Float[np.ndarray, "clients clients"], count: int | None = None
) -> Int[np.ndarray, " clients"]:
    """The group of each client, by average-linkage clustering of a distance matrix.

    Group 0 is the largest; of groups of one size, that of the first client comes first.

    Args:
        matrix: distances, client by client.
        count: how many groups; None: the number of 2..10, less than the number of clients, with the
            best mean silhouette, the smallest if several have it, but one group if that silhouette
            is at most 0.25 or all
            distances are at most 1e-9.
    """
    matrix = np.asarray(matrix, np.float64)
    n = len(matrix) if matrix.ndim else 0
    require(n > 0 and matrix.shape == (n, n), "matrix", matrix.shape, "must be square")
    good = np.isfinite(matrix).all() and matrix.min() >= 0 and not matrix.diagonal().any()
    good = good and np.allclose(matrix, matrix.T, rtol=1e-9, atol=0)
    allowed = "must be finite, not negative, symmetric, and zero from each client to itself"
    require(bool(good), "matrix", matrix.shape, allowed)
    if count is not None:
        require_count("count", count)
        require(count <= n, "count", count, f"must be at most the number of clients, {n}")
    if n == 1:
        return np.zeros(1, int)
    tree = hierarchy.average(distance.squareform(matrix, checks=False))

    def cut(count: int) -> Int[np.ndarray, " clients"]:
        return np.asarray(hierarchy.cut_tree(tree, n_clusters=count)[:, 0], int)

    if count is not None:
        return _numbered(cut(count))
    counts = range(2, min(MOST_GROUPS, n - 1) + 1)
    scores = [_silhouette(matrix, cut(c)) for c in counts]
    if matrix.max() <= 1e-9 or max(scores, default=0.0) <= POOR_SILHOUETTE:
        return np.zeros(n, int)
    # The same score, rounded differently, is the same score: the first of them.
    best = int(np.argmax(np.array(scores) >= max(scores) - 1e-9))
    return _numbered(cut(counts[best]))


def _silhouette(
    matrix: Float[np.ndarray, "clients clients"], group: Int[np.ndarray, " clients"]
) -> float:
    """The mean of (b - a) / max(a, b): a to one's own group, b to the nearest other one.

    Rousseeuw (1987); 0 for a client that is a group of its own.
    """
    member = (group[:, None] == np.arange(group.max() + 1)).astype(float)
    totals, size = matrix @ member, member.sum(axis=0)
    own = size[group]
    a = (totals * member).sum(axis=1) / np.maximum(own - 1, 1)
    b = np.where(member > 0, np.inf, totals / size).min(axis=1)
    larger = np.maximum(a, b)
    score = (b - a) / np.where(larger > 0, larger, 1)
    return float(np.where(own > 1, score, 0).mean())


def _numbered(group: Int[np.ndarray, " clients"]) -> Int[np.ndarray, " clients"]:
    """The same groups, numbered by size and then by their first member."""
    _, first, inverse, size = np.unique(
        group, return_index=True, return_inverse=True, return_counts=True
    )
    number = np.empty(len(first), int)
    number[np.lexsort((first, -size))] = np.arange(len(first))
    return np.asarray(number[inverse])
