"""PyTorch vectorized over clients with `torch.func`: a round is 10 steps of all 10 clients at once.

Stacked parameters, one vmapped gradient a step, batches drawn for all clients together. BENCH_MODE
says what `torch.compile` gets: nothing, a "step", or all ten of a "round".
"""

# mypy: ignore-errors

import os
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from bench.peers import common


class Network(nn.Sequential):
    """784-80-60-10 with ELU."""

    def __init__(self) -> None:
        a, b, c, d = common.SIZES
        super().__init__(
            nn.Linear(a, b), nn.ELU(), nn.Linear(b, c), nn.ELU(), nn.Linear(c, d)
        )  # fmt: skip


def build(x: common.Floats, y: common.Labels) -> common.Contestant:
    """All clients' data in one tensor, (clients, examples, features)."""
    images, labels = torch.from_numpy(x), torch.from_numpy(y)
    model = Network()
    names = [name for name, _ in model.named_parameters()]
    w = dict(zip(names, map(torch.from_numpy, common.first_weights()), strict=True))

    def loss(w: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, w, (x,)), y)

    gradients = vmap(grad(loss))

    def step(stacked: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        found = gradients(stacked, x, y)
        return {name: stacked[name] - common.RATE * found[name] for name in names}

    def descend(w: Any, x: torch.Tensor, y: torch.Tensor, cohort: Any, rows: Any) -> Any:
        stacked = {n: a.expand(common.COHORT, *a.shape).contiguous() for n, a in w.items()}
        for t in range(common.TAU):
            stacked = step(stacked, x[cohort, rows[t]], y[cohort, rows[t]])
        return {n: a.mean(0) for n, a in stacked.items()}

    match os.environ.get("BENCH_MODE"):
        case "step":
            step = torch.compile(step, fullgraph=True)
        case "round":
            descend = torch.compile(descend, fullgraph=True)

    def one_round(w: Any) -> Any:
        cohort = torch.randperm(common.CLIENTS)[: common.COHORT, None]
        rows = torch.randint(common.SIZE, (common.TAU, common.COHORT, common.BATCH))
        return descend(w, images, labels, cohort, rows)

    def rounds(n: int) -> None:
        nonlocal w
        # No graph is wanted but that of `grad` itself.
        with torch.no_grad():
            for _ in range(n):
                w = one_round(w)

    def weights() -> common.Weights:
        return [w[name].numpy() for name in names]

    return common.Contestant(torch.__version__, rounds, weights)


if __name__ == "__main__":
    torch.set_num_threads(common.threads())
    common.serve("vmap", build, torch.get_num_threads())
