"""The methods once more, in NumPy and float64, sharing no line with the package.

A network of two layers with tanh and cross-entropy, its gradient written by hand; clients one after
another. Gradients are analytic functions, so a Hessian times a vector is the imaginary part of the
gradient a tiny step into the complex plane (no difference is taken, and nothing is lost to
rounding). What is random is handed in: who takes part, and the positions of every batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Vector = Any  # all parameters, one after another
Batch = Any  # positions of examples, or None for all of them


@dataclass(frozen=True)
class Client:
    """Its examples, and what the loss of a network is on them."""

    x: np.ndarray
    y: np.ndarray
    hidden: int
    classes: int
    l2: float

    @property
    def size(self) -> int:
        return len(self.y)

    def parts(self, w: Vector) -> tuple[np.ndarray, ...]:
        shapes = [(self.x.shape[1], self.hidden), (self.hidden,), (self.hidden, self.classes),
                  (self.classes,)]  # fmt: skip
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        parts = zip(np.split(w, ends[:-1]), shapes, strict=True)
        return tuple(part.reshape(shape) for part, shape in parts)

    def outputs(self, w: Vector, x: np.ndarray) -> np.ndarray:
        W, b, V, c = self.parts(w)
        return np.asarray(np.tanh(x @ W + b) @ V + c)

    def grad(self, w: Vector, batch: Batch = None, offset: Any = 0.0) -> Vector:
        """The gradient; an offset is added to the logits."""
        x, y = (self.x, self.y) if batch is None else (self.x[batch], self.y[batch])
        W, b, V, c = self.parts(w)
        h = np.tanh(x @ W + b)
        z = h @ V + c + offset
        p = np.exp(z - z.real.max(axis=1, keepdims=True))
        p = p / p.sum(axis=1, keepdims=True)
        dz = (p - np.eye(self.classes)[y]) / len(y)
        dh = (dz @ V.T) * (1 - h * h)
        return np.concatenate([(x.T @ dh).ravel(), dh.sum(0), (h.T @ dz).ravel(), dz.sum(0)]) + (
            self.l2 * w
        )

    def hessian(self, w: Vector, v: Vector, batch: Batch = None) -> Vector:
        """H(w) v."""
        return np.imag(self.grad(w + 1e-40j * v, batch)) / 1e-40


Update = tuple[Vector, Any]  # the local model, and what the client keeps


def fedavg(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any) -> Update:
    rate = s.lr / (k * s.tau + 1) if s.schedule.name == "harmonic" else s.lr
    for d in draw("steps", s.tau, s.batch):
        w = w - rate * f.grad(w, d)
    return w, kept


def fedavg_personal(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any) -> Vector:
    rate = s.lr / (k * s.tau + 1) if s.schedule.name == "harmonic" else s.lr
    for d in draw("steps", s.adapt_steps, s.adapt_batch):
        w = w - (rate if s.alpha is None else s.alpha) * f.grad(w, d)
    return w


def local(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any) -> Update:
    own = kept
    for d in draw("steps", s.tau, s.batch):
        own = own - s.lr * f.grad(own, d)
    return w, own


def per_fedavg(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any) -> Update:
    first, outer, hessian = draw.three(s)
    power = s.schedule.power if s.schedule.name == "polynomial" else 0
    for t in range(s.tau):
        at = w
        path = [at]
        for j in range(s.adapt_steps):
            at = at - s.alpha * f.grad(at, first[t][j])
            path.append(at)
        v = f.grad(at, outer[t])
        for j in range(s.adapt_steps - 1, -1, -1):
            here, d2 = path[j], hessian[t][j]
            if s.variant == "exact":
                v = v - s.alpha * f.hessian(here, v, d2)
            elif s.variant == "hf":
                ahead, behind = (f.grad(here + sign * s.delta * v, d2) for sign in (1, -1))
                v = v - s.alpha * (ahead - behind) / (2 * s.delta)
        w = w - s.beta / (k + 1) ** power * v
    return w, kept


def per_fedavg_personal(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any) -> Vector:
    for d in draw("steps", s.adapt_steps, s.adapt_batch):
        w = w - s.alpha * f.grad(w, d)
    return w


def pfedme(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any) -> Update:
    theta = kept if s.inner_start == "kept" else w
    w_i = w
    q = min(s.inner_lr * s.lam, 1.0) ** 0.5
    momentum = (1 - q) / (1 + q) if s.inner_solver == "nesterov" else 0.0
    for d in draw("steps", s.local_rounds, s.batch):
        if s.inner_start == "local":
            theta = w_i

        def h(at: Vector, w_i: Vector = w_i, d: Any = d) -> Vector:
            return f.grad(at, d) + s.lam * (at - w_i)

        ahead = theta
        for _ in range(s.inner_steps):
            if s.nu is not None and h(theta) @ h(theta) <= s.nu:
                break
            new = ahead - s.inner_lr * h(ahead)
            theta, ahead = new, new + momentum * (new - theta)
        w_i = w_i - s.eta * s.lam * (w_i - theta)
    return w_i, theta


def pfedme_personal(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any) -> Vector:
    return pfedme(f, w, kept, k, draw, s)[1]


def local_personal(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any) -> Vector:
    return kept


METHODS: dict[str, tuple[Any, Any]] = {
    "fedavg": (fedavg, fedavg_personal),
    "per-fedavg": (per_fedavg, per_fedavg_personal),
    "pfedme": (pfedme, pfedme_personal),
    "local": (local, local_personal),
}


def rounds(
    clients: Sequence[Client],
    w: Vector,
    s: Any,
    cohorts: Sequence[Sequence[int]],
    draws: Callable[[int, int], Any],
    by_size: bool,
    update: Any = None,
    first_kept: Any = None,
) -> tuple[Vector, list[Any]]:
    """All rounds: the global model, and what clients keep."""
    # Those who never had a turn have the first model.
    kept: list[Any] = [w if first_kept is None else first_kept for _ in clients]
    update = update or METHODS[s.name][0]
    for k, cohort in enumerate(cohorts):
        deltas, weights = [], []
        for i in cohort:
            w_i, kept[i] = update(clients[i], w, kept[i], k, draws(k, i), s)
            deltas.append(w_i - w)
            weights.append(clients[i].size if by_size else 1)
        mean = np.average(deltas, axis=0, weights=weights)
        w = w + (s.beta if s.name == "pfedme" else 1) * mean
    return w, kept
