"""The papers' synthetic clients."""

from typing import Literal, get_args

import numpy as np

from perfed.core.errors import require, require_choice, require_count
from perfed.data.federation import Federation, FlatExamples
from perfed.data.splits import held_out

SizeLaw = Literal["pfedme", "fedprox"]


def synthetic(
    clients: int = 100,
    alpha: float = 0.5,
    beta: float = 0.5,
    sizes: SizeLaw = "pfedme",
    features: int = 60,
    classes: int = 10,
    test_fraction: float = 0.25,
    seed: int = 0,
) -> Federation:
    """The papers' Synthetic(alpha, beta): each client has a linear model and inputs of its own.

    With u_i ~ N(0, alpha) and B_i ~ N(0, beta), both standard deviations: W_i, b_i ~ N(u_i, 1),
    v_i ~ N(B_i, 1), x ~ N(v_i, diag(j^-1.2)), y = argmax(W_i^T x + b_i). `alpha` sets how much the
    clients' models differ, `beta` how much their inputs do. The defaults, seed 0 among them, make
    the very sizes of the pFedMe paper's set, 250 to 25810.

    Args:
        clients: how many clients.
        alpha: the standard deviation of the clients' mean models.
        beta: the standard deviation of the clients' mean inputs.
        sizes: the law of the clients' sizes: int(lognormal(4, 2)) + 50 (`fedprox`), or five times
            that (`pfedme`).
        features: the dimension of x.
        classes: the number of labels.
        test_fraction: the part of each client's examples that is held out.
        seed: the seed of everything above.
    """
    require_choice("sizes", sizes, get_args(SizeLaw))
    require_count("clients", clients)
    require_count("features", features)
    require(0 <= seed < 2**32, "seed", seed, "must be between 0 and 2^32 - 1")
    require(classes >= 2, "classes", classes, "must be at least 2")
    require(0 <= alpha < np.inf, "alpha", alpha, "must be a number, at least 0")
    require(0 <= beta < np.inf, "beta", beta, "must be a number, at least 0")
    require(0 < test_fraction < 1, "test_fraction", test_fraction, "must be between 0 and 1")
    # NumPy's older generator, drawn from in this order: it is what the published sizes come from.
    rng = np.random.RandomState(seed)
    size = (rng.lognormal(4, 2, clients).astype(int) + 50) * (5 if sizes == "pfedme" else 1)
    model_means = rng.normal(0, alpha, clients)
    input_means = rng.normal(0, beta, clients)
    centers = [rng.normal(mean, 1, features) for mean in input_means]
    covariance = np.diag(np.arange(1, features + 1) ** -1.2)
    xs, ys = [], []
    for n, mean, center in zip(size, model_means, centers, strict=True):
        weights, bias = rng.normal(mean, 1, (features, classes)), rng.normal(mean, 1, classes)
        x = rng.multivariate_normal(center, covariance, n)
        xs.append(x.astype(np.float32))
        ys.append(np.argmax(x @ weights + bias, axis=1).astype(np.int32))
    x, y = np.concatenate(xs), np.concatenate(ys)
    owner = np.repeat(np.arange(clients), size)
    out = held_out(y, owner, test_fraction, np.random.default_rng(seed))
    train, test = (
        FlatExamples.joined(x[mask], y[mask], np.bincount(owner[mask], minlength=clients))
        for mask in (~out, out)
    )
    return Federation.made(train, test, classes)
