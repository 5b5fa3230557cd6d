"""The same rounds as a lean eager PyTorch loop over clients: no data loader, no modules, plain SGD.

It draws the same kind of batches and takes the same steps as perfed's methods, one client after
another, which is how the published code of these methods works, less its overheads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch.nn import functional

Weights = list[torch.Tensor]


@dataclass(frozen=True)
class Clients:
    """All clients' examples, each client's in tensors of its own."""

    x: list[torch.Tensor]
    y: list[torch.Tensor]

    def batch(self, client: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Examples of one client, uniformly with replacement."""
        rows = torch.randint(len(self.y[client]), (size,))
        return self.x[client][rows], self.y[client][rows]


def first_weights(sizes: tuple[int, ...]) -> Weights:
    """Uniform in +-1/sqrt(fan-in)."""
    weights = []
    for a, b in pairwise(sizes):
        weights += [torch.empty(b, a).uniform_(-(a**-0.5), a**-0.5), torch.zeros(b)]
    return weights


def loss(leaves: Weights, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The cross-entropy of an ELU network."""
    x, y = batch
    for i in range(0, len(leaves) - 2, 2):
        x = functional.elu(functional.linear(x, leaves[i], leaves[i + 1]))
    return functional.cross_entropy(functional.linear(x, leaves[-2], leaves[-1]), y)


def gradient(w: Weights, batch: tuple[torch.Tensor, torch.Tensor]) -> Weights:
    """Of the loss."""
    leaves = [p.detach().requires_grad_() for p in w]
    return list(torch.autograd.grad(loss(leaves, batch), leaves))


def hessian_product(w: Weights, v: Weights, batch: tuple[torch.Tensor, torch.Tensor]) -> Weights:
    """Of the loss, with v: the derivative of the gradient along it."""
    leaves = [p.detach().requires_grad_() for p in w]
    first = torch.autograd.grad(loss(leaves, batch), leaves, create_graph=True)
    along = sum((g * d).sum() for g, d in zip(first, v, strict=True))
    return list(torch.autograd.grad(along, leaves))


def descend(w: Weights, rate: float, direction: Weights) -> Weights:
    """W - rate * direction."""
    return [p - rate * d for p, d in zip(w, direction, strict=True)]


def mean(models: list[Weights]) -> Weights:
    """Of several models."""
    return [torch.stack(parts).mean(0) for parts in zip(*models, strict=True)]


def fedavg(lr: float, tau: int, batch: int) -> Callable[[Clients, int, Weights], Weights]:
    """Tau local steps."""

    def local(data: Clients, client: int, w: Weights) -> Weights:
        for _ in range(tau):
            w = descend(w, lr, gradient(w, data.batch(client, batch)))
        return w

    return local


def per_fedavg(
    variant: str, alpha: float, beta: float, tau: int, batch: int, delta: float
) -> Callable[[Clients, int, Weights], Weights]:
    """Tau meta-steps."""

    def local(data: Clients, client: int, w: Weights) -> Weights:
        for _ in range(tau):
            w_tilde = descend(w, alpha, gradient(w, data.batch(client, batch)))
            v = gradient(w_tilde, data.batch(client, batch))
            if variant == "hf":
                same = data.batch(client, batch)
                ahead, behind = (gradient(descend(w, d, v), same) for d in (-delta, delta))
                v = [
                    p - alpha * (a - b) / (2 * delta)
                    for p, a, b in zip(v, ahead, behind, strict=True)
                ]
            elif variant == "exact":
                v = descend(v, alpha, hessian_product(w, v, data.batch(client, batch)))
            w = descend(w, beta, v)
        return w

    return local


def pfedme(
    lam: float, eta: float, local_rounds: int, inner_steps: int, inner_lr: float, batch: int
) -> Callable[[Clients, int, Weights], Weights]:
    """R local rounds of K inner steps."""

    def local(data: Clients, client: int, w: Weights) -> Weights:
        theta = w
        for _ in range(local_rounds):
            same = data.batch(client, batch)
            for _ in range(inner_steps):
                g = gradient(theta, same)
                theta = [
                    t - inner_lr * (d + lam * (t - p)) for t, d, p in zip(theta, g, w, strict=True)
                ]
            w = [p - eta * lam * (p - t) for p, t in zip(w, theta, strict=True)]
        return w

    return local


def rounds(
    local: Callable[[Clients, int, Weights], Weights],
    data: Clients,
    w: Weights,
    cohort: int,
    count: int,
) -> Weights:
    """So many rounds of uniformly sampled cohorts."""
    for _ in range(count):
        chosen = np.random.permutation(len(data.y))[:cohort]
        w = mean([local(data, int(client), w) for client in chosen])
    return w
