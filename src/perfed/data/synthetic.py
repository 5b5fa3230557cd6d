"""The papers' synthetic clients."""

from typing import Literal, get_args

import numpy as np
from jaxtyping import Float32, Int, Int32

from perfed.core.errors import require, require_choice, require_count
from perfed.data.examples import FlatExamples
from perfed.data.federation import Federation
from perfed.data.splits import hold_out_mask

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
    """The papers' Synthetic(alpha, beta): each client has its own linear model and inputs.

    With u_i ~ N(0, alpha) and B_i ~ N(0, beta), both standard deviations: W_i, b_i ~ N(u_i, 1),
    v_i ~ N(B_i, 1), x ~ N(v_i, diag(j^-1.2)), y = argmax(W_i^T x + b_i). `alpha` sets how much the
    clients' models differ, `beta` how much their inputs do. The defaults, seed 0 among them, give
    the very sizes of the pFedMe paper's data, 250 to 25810.

    Args:
        clients: number of clients.
        alpha: standard deviation of the clients' mean models.
        beta: standard deviation of the clients' mean inputs.
        sizes: distribution of the clients' sizes: int(lognormal(4, 2)) + 50 (`fedprox`), or five
            times that (`pfedme`).
        features: dimension of x.
        classes: number of classes.
        test_fraction: the part of each client's examples that is held out.
        seed: seed of all random numbers.
    """
    require_choice("sizes", sizes, get_args(SizeLaw))
    require_count("clients", clients)
    require_count("features", features)
    require(0 <= seed < 2**32, "seed", seed, "must be between 0 and 2^32 - 1")
    require(classes >= 2, "classes", classes, "must be at least 2")
    require(0 <= alpha < np.inf, "alpha", alpha, "must be a number, at least 0")
    require(0 <= beta < np.inf, "beta", beta, "must be a number, at least 0")
    require(0 < test_fraction < 1, "test_fraction", test_fraction, "must be between 0 and 1")
    # NumPy's older generator, in this order: the published sizes come from it.
    rng = np.random.RandomState(seed)
    size = (rng.lognormal(4, 2, clients).astype(int) + 50) * (5 if sizes == "pfedme" else 1)
    model_means, input_means = (rng.normal(0, std, clients) for std in (alpha, beta))
    x, y = _examples(size, model_means, input_means, (features, classes), rng)
    owner = np.repeat(np.arange(clients), size)
    out = hold_out_mask(y, owner, test_fraction, np.random.default_rng(seed))
    train, test = (
        FlatExamples.from_rows(x[mask], y[mask], np.bincount(owner[mask], minlength=clients))
        for mask in (~out, out)
    )
    return Federation.from_examples(train, test, classes)


def _examples(
    sizes: Int[np.ndarray, " clients"],
    model_means: np.ndarray,
    input_means: np.ndarray,
    shape: tuple[int, int],
    rng: np.random.RandomState,
) -> tuple[Float32[np.ndarray, "examples features"], Int32[np.ndarray, " examples"]]:
    """Inputs and labels of all clients, with weights of this shape."""
    features, classes = shape
    centers = [rng.normal(mean, 1, features) for mean in input_means]
    covariance = np.diag(np.arange(1, features + 1) ** -1.2)
    xs, ys = [], []
    for n, mean, center in zip(sizes, model_means, centers, strict=True):
        weights, bias = rng.normal(mean, 1, shape), rng.normal(mean, 1, classes)
        x = rng.multivariate_normal(center, covariance, n)
        xs.append(x.astype(np.float32))
        ys.append(np.argmax(x @ weights + bias, axis=1).astype(np.int32))
    return np.concatenate(xs), np.concatenate(ys)
