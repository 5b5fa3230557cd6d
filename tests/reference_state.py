"""Methods that keep something between rounds, in NumPy and float64; no line shared with perfed.

As `reference.py`, whose network this uses. Each method also has its known mistakes, by name: what
public versions of it compute, or what is easily mistaken in the paper.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from reference import Client, Vector

Kept = dict[str, Any]  # what a client or the server keeps, by the paper's letters


class Sent(NamedTuple):
    """What a client ends a round with: its local model, what it keeps, what it also sends."""

    w: Vector
    kept: Kept
    extra: Any = 0.0


def fedprox(f: Client, w: Vector, server: Kept, kept: Kept, draw: Any, s: Any, wrong: str) -> Sent:
    y = w
    mu = s.mu / 2 if wrong == "mu halved" else s.mu
    for d in draw("steps", s.tau, s.batch):
        held = y if wrong == "held to the moving model" else w
        pull = held - y if wrong == "pushed away" else y - held
        y = y - s.lr * (f.grad(y, d) + mu * pull)
    return Sent(y, kept)


def scaffold(f: Client, w: Vector, server: Kept, kept: Kept, draw: Any, s: Any, wrong: str) -> Sent:
    y, c, c_i = w, server["c"], kept["c_i"]
    for d in draw("steps", s.tau, s.batch):
        correction = c_i - c if wrong == "correction reversed" else c - c_i
        y = y - s.lr * (f.grad(y, d) + correction)
    if s.variate == "gradient":
        new = f.grad(y if wrong == "gradient at y" else w)
    else:
        steps = 1 if wrong == "divided by lr alone" else s.tau
        new = (w - y) / (steps * s.lr) + (0 if wrong == "c_i less nothing" else c_i - c)
    extra = new - (new if wrong == "difference after c_i is replaced" else c_i)
    return Sent(y, {"c_i": c_i if wrong == "c_i not kept" else new}, extra)


def sgd(f: Client, w: Vector, server: Kept, kept: Kept, draw: Any, s: Any, wrong: str) -> Sent:
    for d in draw("steps", s.tau, s.batch):
        w = w - s.lr * f.grad(w, d)
    return Sent(w, kept)


def ditto(f: Client, w: Vector, server: Kept, kept: Kept, draw: Any, s: Any, wrong: str) -> Sent:
    w_k = sgd(f, w, server, kept, draw.part(0, 2), s, wrong).w
    v = w if wrong == "personal steps from w" else kept["v"]
    held = w_k if wrong == "pulled to the local w" else w
    for d in draw.part(1, 2)("steps", s.personal_steps, s.batch):
        v = v - s.personal_lr * (f.grad(v, d) + s.lam * (v - held))
    sent = v if wrong == "v is sent" else w_k
    return Sent(sent, {"v": v, "rounds": kept["rounds"] + 1})


def apfl(f: Client, w: Vector, server: Kept, kept: Kept, draw: Any, s: Any, wrong: str) -> Sent:
    w_i, v, a = w, kept["v"], kept["alpha"]
    for t, d in enumerate(draw("steps", s.tau, s.batch)):
        moved = w_i - s.lr * f.grad(w_i, d)
        mixed = a * v + (1 - a) * (moved if wrong == "mixed with the moved w" else w_i)
        g = f.grad(v if wrong == "gradient of v at v" else mixed, d)
        slope = (v - w_i) @ (f.grad(w_i, d) if wrong == "alpha by the gradient at w" else g)
        if wrong == "alpha by v alone":
            slope = v @ g
        if wrong == "alpha decayed":
            slope += 0.02 * a
        v = v - s.lr * (1 if wrong == "v without the factor alpha" else a) * g
        w_i = moved
        if s.adaptive and (t == 0 or wrong == "alpha at every step"):
            a = min(max(a - s.lr * slope, 0.0), 1.0)
    if wrong == "v replaced by the mixture":
        v = a * v + (1 - a) * w_i
    return Sent(w_i, {"v": v, "alpha": a, "rounds": kept["rounds"] + 1})


Next = tuple[Vector, Kept]  # the server's next model, and what it keeps


def add(
    w: Vector, server: Kept, delta: Vector, extra: Any, share: float, s: Any, wrong: str
) -> Next:
    return w + delta, server


def with_variate(
    w: Vector, server: Kept, delta: Vector, extra: Any, share: float, s: Any, wrong: str
) -> Next:
    share = 1.0 if wrong == "c by the whole mean" else share
    eta = 1.0 if wrong == "no server step size" else s.server_lr
    return w + eta * delta, {"c": server["c"] + share * extra}


def momentum(
    w: Vector, server: Kept, delta: Vector, extra: Any, share: float, s: Any, wrong: str
) -> Next:
    new = (1 - s.momentum) * delta if wrong == "damped" else delta
    v = s.momentum * server["v"] + new
    step = delta + s.momentum * v if wrong == "Nesterov" else v
    return w + s.server_lr * step, {"v": v}


def adaptive(
    w: Vector, server: Kept, delta: Vector, extra: Any, share: float, s: Any, wrong: str
) -> Next:
    b1, b2, tau, t = s.beta_1, s.beta_2, s.adaptivity, server.get("t", 0) + 1
    m = b1 * server["m"] + (1 - b1) * delta
    v = server["v"] * (0 if wrong == "v from zero" and t == 1 else 1)
    square = (m if wrong == "v of the momentum" else delta) ** 2
    if (s.name == "fedyogi" and wrong != "the other's v") or wrong == "Yogi's v":
        sign = -1 if wrong == "sign reversed" else 1
        v = v - sign * (1 - b2) * square * np.sign(v - square)
    else:
        v = b2 * v + (1 - b2) * square
    up, down = m, v
    if wrong == "bias corrected":
        up, down = m / (1 - b1**t), v / (1 - b2**t)
    root = np.sqrt(down + tau**2) if wrong == "tau in the root" else np.sqrt(down) + tau
    step = s.server_lr * up / root
    kept = {"m": m, "v": v} | ({"t": t} if wrong else {})
    return (w - step if wrong == "against the delta" else w + step), kept


def received(f: Client, w: Vector, kept: Kept, draw: Any, s: Any, wrong: str) -> Vector:
    return w


def ditto_personal(f: Client, w: Vector, kept: Kept, draw: Any, s: Any, wrong: str) -> Vector:
    if kept["rounds"] or wrong == "newcomers have the first model":
        return kept["v"]
    v = w
    for d in draw("steps", s.personal_steps, s.batch):
        v = v - s.personal_lr * (f.grad(v, d) + s.lam * (v - w))
    return v


def apfl_personal(f: Client, w: Vector, kept: Kept, draw: Any, s: Any, wrong: str) -> Vector:
    if not kept["rounds"] and wrong != "newcomers mix the first model":
        kept = apfl(f, w, {}, {"v": w, "alpha": s.alpha, "rounds": 0}, draw, s, wrong).kept
    if wrong == "v alone is scored":
        return kept["v"]
    return kept["alpha"] * kept["v"] + (1 - kept["alpha"]) * w


class Method(NamedTuple):
    """What each side does, and what they have before the first round, from the first model."""

    update: Any
    server: Any = add
    personal: Any = received
    client_start: Callable[[Vector, Any], Kept] = lambda w, s: {}
    server_start: Callable[[Vector, Any], Kept] = lambda w, s: {}


def _moments(w: Vector, s: Any) -> Kept:
    return {"m": 0 * w, "v": 0 * w + s.adaptivity**2}


METHODS: dict[str, Method] = {
    "fedprox": Method(fedprox),
    "scaffold": Method(
        scaffold,
        with_variate,
        client_start=lambda w, s: {"c_i": 0 * w},
        server_start=lambda w, s: {"c": 0 * w},
    ),
    "fedavgm": Method(sgd, momentum, server_start=lambda w, s: {"v": 0 * w}),
    "fedadam": Method(sgd, adaptive, server_start=_moments),
    "fedyogi": Method(sgd, adaptive, server_start=_moments),
    "ditto": Method(
        ditto, personal=ditto_personal, client_start=lambda w, s: {"v": w, "rounds": 0}
    ),
    "apfl": Method(
        apfl,
        personal=apfl_personal,
        client_start=lambda w, s: {"v": w, "alpha": s.alpha, "rounds": 0},
    ),
}


def rounds(
    clients: Sequence[Client],
    w: Vector,
    s: Any,
    cohorts: Sequence[Sequence[int]],
    draws: Callable[[int, int], Any],
    by_size: bool,
    wrong: str = "",
) -> tuple[Vector, Kept, list[Kept]]:
    """All rounds: the global model, what the server keeps, and what clients keep."""
    method = METHODS[s.name]
    server, kept = method.server_start(w, s), [method.client_start(w, s) for _ in clients]
    for k, cohort in enumerate(cohorts):
        sent = [
            method.update(clients[i], w, server, kept[i], draws(k, i), s, wrong) for i in cohort
        ]
        weights = [clients[i].size if by_size else 1 for i in cohort]
        delta = np.average([one.w - w for one in sent], axis=0, weights=weights)
        extra = np.average([one.extra for one in sent], axis=0, weights=weights)
        share = len(cohort) / len(clients)
        w, server = method.server(w, server, delta, extra, share, s, wrong)
        for i, one in zip(cohort, sent, strict=True):
            kept[i] = one.kept
    return w, {name: value for name, value in server.items() if name != "t"}, kept
