"""Where data comes from: generators and the sets that ship with the package."""

from importlib.resources import files
from typing import Literal, get_args

import numpy as np

from perfed.data import partitions
from perfed.data.federation import Federation, FlatExamples
from perfed.errors import DataError, require, require_choice, require_count

SizeLaw = Literal["pfedme", "fedprox"]
Split = Literal["per-fedavg", "dirichlet"]


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
    """Synthetic(alpha, beta) of the papers: each client has a linear model and inputs of its own.

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
    _require_seed(seed)
    require(classes >= 2, "classes", classes, "must be at least 2")
    require(0 <= alpha < np.inf, "alpha", alpha, "must be a number, at least 0")
    require(0 <= beta < np.inf, "beta", beta, "must be a number, at least 0")
    _require_fraction(test_fraction)
    # NumPy's older generator, drawn from in this order: it is what the published sizes come from.
    rng = np.random.RandomState(seed)
    size = (rng.lognormal(4, 2, clients).astype(int) + 50) * (5 if sizes == "pfedme" else 1)
    model_means = rng.normal(0, alpha, clients)
    input_means = rng.normal(0, beta, clients)
    centres = [rng.normal(mean, 1, features) for mean in input_means]
    covariance = np.diag(np.arange(1, features + 1) ** -1.2)
    xs, ys = [], []
    for n, mean, centre in zip(size, model_means, centres, strict=True):
        weights, bias = rng.normal(mean, 1, (features, classes)), rng.normal(mean, 1, classes)
        x = rng.multivariate_normal(centre, covariance, n)
        xs.append(x.astype(np.float32))
        ys.append(np.argmax(x @ weights + bias, axis=1).astype(np.int32))
    x, y = np.concatenate(xs), np.concatenate(ys)
    owner = np.repeat(np.arange(clients), size)
    return _split_within_clients(x, y, owner, classes, test_fraction, np.random.default_rng(seed))


def digits(
    clients: int = 20,
    split: Split = "per-fedavg",
    a: int | None = None,
    diff_hetero: bool = False,
    concentration: float = 0.3,
    test_fraction: float = 0.25,
    seed: int = 0,
) -> Federation:
    """1,797 handwritten digits of 8x8 pixels, which ship with the package.

    Args:
        clients: how many clients.
        split: `per-fedavg` (section 5 of that paper) or `dirichlet` (over labels).
        a: the parameter of the Per-FedAvg split; None: the largest the data allow.
        diff_hetero: that paper's "diff. hetero." variant.
        concentration: the parameter of the Dirichlet split: small is uneven, large is alike.
        test_fraction: the part of the examples that is held out.
        seed: the seed of the split.
    """
    require_choice("split", split, get_args(Split))
    require_count("clients", clients)
    _require_seed(seed)
    even = split != "per-fedavg" or clients % 2 == 0
    require(
        even, "clients", clients, "must be even for the Per-FedAvg split: half are of each kind"
    )
    require(0 < concentration < np.inf, "concentration", concentration, "must be greater than 0")
    require(a is None or (a >= 2 and a % 2 == 0), "a", a, "must be an even number, at least 2")
    _require_fraction(test_fraction)
    with np.load(str(files("perfed.data").joinpath("digits.npz"))) as archive:
        x = archive["images"].astype(np.float32)[..., None] / 16
        y = archive["labels"].astype(np.int32)
    rng = np.random.default_rng(seed)
    if split == "dirichlet":
        rows = partitions.dirichlet(y, clients, 10, concentration, rng)
        order = np.concatenate(rows)
        owner = np.repeat(np.arange(clients), [len(r) for r in rows])
        return _split_within_clients(x[order], y[order], owner, 10, test_fraction, rng)
    # As in the paper, a train set and a test set are each dealt out in the same proportions.
    out = partitions.held_out(y, np.zeros_like(y), test_fraction, rng)
    parts = []
    for mask, wanted in ((~out, a), (out, None)):
        pool = np.flatnonzero(mask)
        room = partitions.per_fedavg_room(y[pool], clients, 10, diff_hetero)
        if room < 2:
            raise DataError(
                f"{len(y)} digits, {test_fraction:g} of them held out, are too few for the "
                f"Per-FedAvg split over {clients} clients; ask for fewer clients"
            )
        rows = partitions.per_fedavg(y[pool], clients, 10, wanted or room, rng, diff_hetero)
        order = pool[np.concatenate(rows)]
        parts.append(FlatExamples.joined(x[order], y[order], [len(r) for r in rows]))
    return Federation.made(parts[0], parts[1], classes=10)


def _require_seed(seed: int) -> None:
    require(0 <= seed < 2**32, "seed", seed, "must be between 0 and 2^32 - 1")


def _require_fraction(test_fraction: float) -> None:
    require(0 < test_fraction < 1, "test_fraction", test_fraction, "must be between 0 and 1")


def _split_within_clients(
    x: np.ndarray,
    y: np.ndarray,
    owner: np.ndarray,
    classes: int,
    test_fraction: float,
    rng: np.random.Generator,
) -> Federation:
    """Hold out the same fraction of each client's rows, so both sides have its distribution."""
    out = partitions.held_out(y, owner, test_fraction, rng)
    train, test = (
        FlatExamples.joined(x[mask], y[mask], np.bincount(owner[mask], minlength=owner.max() + 1))
        for mask in (~out, out)
    )
    return Federation.made(train, test, classes)
