"""Extreme eigenvalues of Hessians from products with vectors (Lanczos), with their residuals."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.linalg import eigh_tridiagonal

from perfed.theory.estimates import Estimate

# What float32 products leave of an eigenvalue, relative to the largest.
_ROUNDING = 2e-6

Matvec = Callable[[Float[Array, " p"]], Float[Array, " p"]]


def lanczos(
    matvec: Matvec, start: Float[Array, " p"], steps: int
) -> tuple[Float[Array, " steps"], Float[Array, " steps"]]:
    """The diagonal and the off-diagonal of a symmetric operator's tridiagonal matrix.

    Three vectors are stored, whatever the number of steps. Without reorthogonalization eigenvalues
    may repeat, which does not matter for the extreme ones.
    """

    def step(
        carry: tuple[Array, Array, Array], _: None
    ) -> tuple[tuple[Array, Array, Array], tuple[Array, Array]]:
        before, v, beta = carry
        u = matvec(v) - beta * before
        alpha = jnp.vdot(u, v)
        u = u - alpha * v
        beta = jnp.linalg.norm(u)
        return (v, u / jnp.where(beta > 0, beta, 1.0), beta), (alpha, beta)

    first = (jnp.zeros_like(start), unit(start), jnp.zeros(()))
    _, (alpha, beta) = jax.lax.scan(step, first, length=steps)
    return alpha, beta


def lanczos_of_many(
    matvec: Callable[[np.ndarray], np.ndarray],
    start: Float[np.ndarray, "vectors p"],
    steps: int,
) -> tuple[Float[np.ndarray, "vectors steps"], Float[np.ndarray, "vectors steps"]]:
    """`lanczos` for several operators that one function applies, over all clients."""
    v = start / np.linalg.norm(start, axis=1, keepdims=True)
    before, beta = np.zeros_like(v), np.zeros((len(v), 1), v.dtype)
    alphas, betas = [], []
    for _ in range(steps):
        u = matvec(v) - beta * before
        alpha = np.sum(u * v, axis=1, keepdims=True)
        u = u - alpha * v
        beta = np.linalg.norm(u, axis=1, keepdims=True)
        before, v = v, u / np.where(beta > 0, beta, 1.0)
        alphas.append(alpha[:, 0])
        betas.append(beta[:, 0])
    return np.stack(alphas, axis=1), np.stack(betas, axis=1)


class Extremes(NamedTuple):
    """The outermost eigenvalues of a tridiagonal matrix, with the Lanczos residuals."""

    lowest: float
    highest: float
    low_residual: float
    high_residual: float


def extremes(alpha: Float[np.ndarray, " steps"], beta: Float[np.ndarray, " steps"]) -> Extremes:
    """The outermost eigenvalues of a tridiagonal matrix."""
    alpha, beta = np.asarray(alpha, np.float64), np.asarray(beta, np.float64)
    scale = max(np.abs(alpha).max(), beta.max())
    # Where beta vanishes, the Krylov space of the start is complete.
    ends = np.flatnonzero(beta <= 1e-6 * scale)
    size = int(ends[0]) + 1 if len(ends) else len(alpha)
    values, vectors = eigh_tridiagonal(alpha[:size], beta[: size - 1])
    residual = beta[size - 1] * np.abs(vectors[-1]) + _ROUNDING * scale
    return Extremes(*(float(x) for x in (values[0], values[-1], residual[0], residual[-1])))


def curvature(
    alpha: Float[np.ndarray, "clients steps"], beta: Float[np.ndarray, "clients steps"]
) -> tuple[list[Estimate], list[Estimate]]:
    """Each client's L_i and smallest eigenvalue."""
    L, mu = [], []
    for own in map(extremes, np.asarray(alpha), np.asarray(beta)):
        rounding = _ROUNDING * max(abs(own.lowest), abs(own.highest))
        above, below = own.highest + own.high_residual, -own.lowest + own.low_residual
        value = max(own.highest, -own.lowest)
        L.append(Estimate(value, value - rounding, max(above, below)))
        mu.append(Estimate(own.lowest, own.lowest - own.low_residual, own.lowest + rounding))
    return L, mu


def spectral_norms(
    alpha: Float[np.ndarray, "*many steps"], beta: Float[np.ndarray, "*many steps"]
) -> tuple[Float[np.ndarray, "*many"], Float[np.ndarray, "*many"]]:
    """The spectral norms as approached from inside the spectrum, and their upper bounds."""
    alpha, beta = np.asarray(alpha), np.asarray(beta)
    flat = zip(alpha.reshape(-1, alpha.shape[-1]), beta.reshape(-1, beta.shape[-1]), strict=True)
    ends = [extremes(a, b) for a, b in flat]
    norms = [max(own.highest, -own.lowest) for own in ends]
    upper = [max(own.highest + own.high_residual, -own.lowest + own.low_residual) for own in ends]
    shape = alpha.shape[:-1]
    return np.array(norms).reshape(shape), np.array(upper).reshape(shape)


def unit(v: Float[Array, " p"]) -> Float[Array, " p"]:
    """A vector of length 1 in the same direction; 0 for 0."""
    norm = jnp.linalg.norm(v)
    return v / jnp.where(norm > 0, norm, 1.0)
