"""The eager loop of bench/eager.py: a round is 10 clients one after another, and their mean."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench import eager
from bench.peers import common


def build(x: common.Floats, y: common.Labels) -> common.Contestant:
    """Tensors of each client; functional SGD; batches drawn with replacement."""
    data = eager.Clients([torch.from_numpy(a) for a in x], [torch.from_numpy(a) for a in y])
    method: Any = SimpleNamespace(tau=common.TAU, lr=common.RATE, batch=common.BATCH)
    w = [torch.from_numpy(a) for a in common.first_weights()]
    done = 0

    def local(data: eager.Clients, client: int, w: eager.Weights) -> eager.Weights:
        nonlocal done
        done += method.tau
        return eager.fedavg(method, data, client, w)

    def rounds(n: int) -> None:
        nonlocal w
        for _ in range(n):
            w = eager.one_round(local, data, w, common.COHORT)

    def weights() -> common.Weights:
        return [np.asarray(a) for a in w]

    return common.Contestant(torch.__version__, rounds, weights, lambda: done)


if __name__ == "__main__":
    torch.set_num_threads(common.threads())
    common.serve("eager", build, torch.get_num_threads())
