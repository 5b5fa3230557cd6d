"""The same rounds as a lean eager PyTorch loop over clients: no data loader, no modules, plain SGD.

It draws the same kind of batches and takes the same steps as perfed's methods, one client after
another, which is how the published code of these methods works, less its overheads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

if TYPE_CHECKING:  # bench/peers runs this where perfed is not installed
    from perfed import FedAvg, Method, PerFedAvg, PFedMe
    from perfed.core.objective import BatchSize

Weights = list[torch.Tensor]
Client = Callable[["Clients", int, Weights], Weights]


@dataclass(frozen=True)
class Clients:
    """All clients' examples, each client's in tensors of its own."""

    x: list[torch.Tensor]
    y: list[torch.Tensor]

    def batch(self, client: int, size: BatchSize) -> tuple[torch.Tensor, torch.Tensor]:
        """Examples of one client, uniformly with replacement; or all of them."""
        if size == "full":
            return self.x[client], self.y[client]
        rows = torch.randint(len(self.y[client]), (size,), device=self.y[client].device)
        return self.x[client][rows], self.y[client][rows]


def first_weights(sizes: tuple[int, ...]) -> Weights:
    """Uniform in +-1/sqrt(fan-in), biases zero."""
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


def sgd_step(w: Weights, rate: float, direction: Weights) -> Weights:
    """W - rate * direction."""
    return [p - rate * d for p, d in zip(w, direction, strict=True)]


def mean(models: list[Weights]) -> Weights:
    """Of several models."""
    return [torch.stack(parts).mean(0) for parts in zip(*models, strict=True)]


def client_of(method: Method) -> Client:
    """One client's turn, as the method says."""
    from perfed import FedAvg, PerFedAvg, PFedMe

    match method:
        case FedAvg():
            return lambda data, i, w: fedavg(method, data, i, w)
        case PerFedAvg():
            return lambda data, i, w: per_fedavg(method, data, i, w)
        case PFedMe():
            return lambda data, i, w: pfedme(method, data, i, w)
    raise NotImplementedError(method.name)


def fedavg(m: FedAvg, data: Clients, client: int, w: Weights) -> Weights:
    """Tau local steps."""
    for _ in range(m.tau):
        w = sgd_step(w, m.lr, gradient(w, data.batch(client, m.batch)))
    return w


def per_fedavg(m: PerFedAvg, data: Clients, client: int, w: Weights) -> Weights:
    """Tau meta-steps."""
    for _ in range(m.tau):
        w_tilde = sgd_step(w, m.alpha, gradient(w, data.batch(client, m.batch)))
        v = gradient(w_tilde, data.batch(client, m.batch))
        if m.variant == "exact":
            v = sgd_step(v, m.alpha, hessian_product(w, v, data.batch(client, m.batch)))
        elif m.variant == "hf":
            same = data.batch(client, m.batch)
            ahead, behind = (gradient(sgd_step(w, d, v), same) for d in (-m.delta, m.delta))
            v = [
                p - m.alpha * (a - b) / (2 * m.delta)
                for p, a, b in zip(v, ahead, behind, strict=True)
            ]
        w = sgd_step(w, m.beta, v)
    return w


def pfedme(m: PFedMe, data: Clients, client: int, w: Weights) -> Weights:
    """R local rounds of K inner steps."""
    theta = w
    for _ in range(m.local_rounds):
        same = data.batch(client, m.batch)
        for _ in range(m.inner_steps):
            g = gradient(theta, same)
            theta = [
                t - m.inner_lr * (d + m.lam * (t - p)) for t, d, p in zip(theta, g, w, strict=True)
            ]
        w = [p - m.eta * m.lam * (p - t) for p, t in zip(w, theta, strict=True)]
    return w


def one_round(local: Client, data: Clients, w: Weights, cohort: int) -> Weights:
    """A uniformly sampled cohort, one client after another, and the mean of what they give."""
    chosen = np.random.permutation(len(data.y))[:cohort]
    return mean([local(data, int(client), w) for client in chosen])
