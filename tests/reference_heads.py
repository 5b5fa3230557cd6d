"""Methods that treat the head and the body of a model differently, in NumPy and float64.

As `reference.py`, which has the network: its last two leaves are the head. A method here gives the
client's model, whose personal entries the server is not to have moved, and what the client keeps.
`wrong` is a mistake to make on purpose, as public versions do: what the comparison must notice.
"""

from typing import Any, NamedTuple

import numpy as np

from reference import Client, Vector


class Kept(NamedTuple):
    """What a client keeps under FedALA."""

    theta: Vector
    weights: Vector
    learned: bool


def is_head(f: Client) -> np.ndarray:
    """Which entries are the head's."""
    body = f.x.shape[1] * f.hidden + f.hidden
    return np.asarray(np.arange(body + f.hidden * f.classes + f.classes) >= body)


def joined(chosen: np.ndarray, a: Vector, b: Vector) -> Vector:
    """A where an entry is chosen, and b elsewhere."""
    return np.where(chosen, a, b)


def descend(f: Client, w: Vector, batches: Any, lr: float, mask: Any = True) -> Vector:
    """Gradient steps on the entries of the mask alone."""
    for d in batches:
        w = w - lr * np.where(mask, f.grad(w, d), 0.0)
    return w


def fedper(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any, wrong: str = "") -> Any:
    personal = is_head(f)
    # Nobody's head moves at the server: taking it from there is to begin anew.
    begins = w if wrong in ("the head is averaged", "the head is drawn anew") else kept
    own = descend(f, joined(personal, begins, w), draw("steps", s.tau, s.batch), s.lr)
    if wrong == "the head is averaged":
        return own, own
    return joined(personal, w, own), own


def lg_fedavg(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any, wrong: str = "") -> Any:
    if wrong == "shares the representation":
        return fedper(f, w, kept, k, draw, s)
    personal, batches = ~is_head(f), draw("steps", s.tau, s.batch)
    mask = personal if wrong == "the shared part is not trained" else True
    own = descend(f, joined(personal, kept, w), batches, s.lr, mask)
    return joined(personal, w, own), own


def fedrep(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any, wrong: str = "") -> Any:
    head = is_head(f)
    own = joined(head, w if wrong == "the head is drawn anew" else kept, w)
    first = draw.part(0, 2)("steps", s.head_steps, s.batch)
    second = draw.part(1, 2)("steps", s.body_steps, s.batch)
    if wrong == "the same batches for both":
        second = first[: s.body_steps]
    if wrong == "the body first":
        own = descend(f, own, second, s.lr, ~head)
        own = descend(f, own, first, s.lr, head)
    else:
        own = descend(f, own, first, s.lr, True if wrong == "the body with the head" else head)
        own = descend(f, own, second, s.lr, True if wrong == "the head with the body" else ~head)
    return joined(head, w, own), own


def fedbabu(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any, wrong: str = "") -> Any:
    if wrong == "the head is trained":
        return fedper(f, w, kept, k, draw, s)
    if wrong == "the head is trained and sent":
        return fedper(f, w, kept, k, draw, s, "the head is averaged")
    if wrong == "each client has a head of its own":
        other = np.random.default_rng(f.size).normal(size=len(w))
        own = joined(is_head(f), other, w)
        own = descend(f, own, draw("steps", s.tau, s.batch), s.lr, ~is_head(f))
        return joined(is_head(f), w, own), w
    own = descend(f, w, draw("steps", s.tau, s.batch), s.lr, ~is_head(f))
    return own, own


def fedbabu_personal(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any) -> Vector:
    mask = {"all": np.full(len(w), True), "body": ~is_head(f), "head": is_head(f)}[s.adapt_part]
    lr = s.lr if s.alpha is None else s.alpha
    return descend(f, w, draw("steps", s.adapt_steps, s.adapt_batch), lr, mask)


def fedrod(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any, wrong: str = "") -> Any:
    head, p = is_head(f), kept
    counts = np.array([np.sum(f.y == c) for c in range(f.classes)], float)
    with np.errstate(divide="ignore"):
        prior = np.log(counts)
    if wrong == "the prior has the wrong sign":
        prior = np.where(counts > 0, -np.log(np.maximum(counts, 1.0)), -np.inf)
    if wrong == "no prior":
        prior = np.zeros(f.classes)
    head_lr = s.lr if s.head_lr is None else s.head_lr
    for d in draw("steps", s.tau, s.batch):
        generic, personal = f.grad(w, d, prior), f.grad(w + p, d)
        if wrong == "the personal loss without the generic logits":
            personal = f.grad(joined(head, p, w), d)
        if wrong == "the personal loss reaches the body":
            generic = generic + np.where(head, 0.0, personal)
        if wrong == "the personal loss reaches the generic head":
            generic = generic + np.where(head, personal, 0.0)
        w = w - s.lr * generic
        if wrong == "the personal gradient after the generic step":
            personal = f.grad(w + p, d)
        p = p - head_lr * np.where(head, personal, 0.0)
    return w, p


def fedrod_personal(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any) -> Vector:
    model = w + kept
    if s.adapt_steps is None:
        return model
    return descend(f, model, draw("steps", s.adapt_steps, s.batch), s.head_lr, is_head(f))


def loss(f: Client, w: Vector, batch: Any) -> float:
    z = f.outputs(w, f.x[batch])
    top = z.max(1)
    fit = np.log(np.exp(z - top[:, None]).sum(1)) + top - z[np.arange(len(batch)), f.y[batch]]
    return float(np.mean(fit) + 0.5 * f.l2 * (w @ w))


def ala(f: Client, w: Vector, kept: Kept, draw: Any, s: Any, wrong: str = "") -> Kept:
    """Theta_hat, and the weights that it is made with."""
    higher = is_head(f) if wrong != "lower layers are mixed too" else np.full(len(w), True)
    old, weights, learned = kept
    if wrong == "weights on the new model":
        old, w = w, old
    way = np.where(higher, w - old, 0.0)

    def blend(weights: Vector) -> Vector:
        return joined(higher, old + way * weights, w)

    if not np.any(way[is_head(f)]):
        return Kept(blend(weights), weights, learned)
    data, within = draw.sample(s.fraction)
    batches = within("weights", max(s.weight_steps, s.first_weight_steps), s.weight_batch)
    if wrong == "all of the data":
        data = np.arange(f.size)
    losses: list[float] = []
    for d in batches[: s.weight_steps if learned else s.first_weight_steps]:
        theta, rows = blend(weights), data if d is None else data[d]
        losses.append(loss(f, theta, rows))
        weights = weights - s.weight_lr * f.grad(theta, rows) * way
        if wrong != "weights are not clipped":
            weights = np.clip(weights, 0.0, 1.0)
        converged = len(losses) > 10 and np.std(losses[-10:]) < s.threshold
        if converged and not learned and wrong != "never converges":
            break
    return Kept(blend(weights), weights, wrong != "until convergence in every round")


def fedala(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any, wrong: str = "") -> Any:
    start, weights, learned = ala(f, w, kept, draw.part(0, 2), s, wrong)
    theta = descend(f, start, draw.part(1, 2)("steps", s.tau, s.batch), s.lr)
    return theta, Kept(start if wrong == "keeps the start" else theta, weights, learned)


def fedala_personal(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any) -> Vector:
    start = ala(f, w, kept, draw.part(0, 2), s).theta
    return descend(f, start, draw.part(1, 2)("steps", s.adapt_steps or 0, s.batch), s.lr)


def head_with(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any) -> Vector:
    return joined(is_head(f), kept, w)


def body_with(f: Client, w: Vector, kept: Any, k: int, draw: Any, s: Any) -> Vector:
    return joined(is_head(f), w, kept)


def first_kept(name: str, w: Vector) -> Any:
    """What a client keeps before its first round."""
    if name == "fedala":
        return Kept(w, np.ones(len(w)), False)
    return np.zeros(len(w)) if name == "fedrod" else w


METHODS: dict[str, tuple[Any, Any]] = {
    "fedper": (fedper, head_with),
    "fedrep": (fedrep, head_with),
    "fedbabu": (fedbabu, fedbabu_personal),
    "lg-fedavg": (lg_fedavg, body_with),
    "fedrod": (fedrod, fedrod_personal),
    "fedala": (fedala, fedala_personal),
}
