"""Rounds of methods with state at the client or the server, beside a lean eager PyTorch loop.

FedRep, Ditto and SCAFFOLD on a small network, all in turns in one run: `python -m bench.methods`.
Before anything is timed, rounds on the same batches must end in the same place.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from bench.__main__ import mnist_like, spread, timed
from bench.apart import Apart
from bench.models import measure
from perfed import MLP, Ditto, Experiment, FedRep, Method, Scaffold, Task, Vectorized
from perfed.simulation.experiment import EngineState

if TYPE_CHECKING:
    from bench.eager import Clients, Weights

CLIENTS, SIZE = 20, 400
MODEL = MLP(784, 10, (80, 60), "elu")
LR = 0.05
AGREEMENT = 1e-4  # of what the rounds change
CHECKED_ROUNDS = 3  # more than one, since SCAFFOLD's first round has no corrections


def cases(tau: int, batch: int) -> dict[str, Method]:
    """The methods; FedRep with one step on the representation, and with as many as on the head."""
    return {
        f"FedRep, {tau} + 1 steps": FedRep(lr=LR, head_steps=tau, body_steps=1, batch=batch),
        f"FedRep, {tau} + {tau} steps": FedRep(lr=LR, head_steps=tau, body_steps=tau, batch=batch),
        "Ditto": Ditto(lr=LR, personal_lr=LR, tau=tau, personal_steps=tau, batch=batch),
        "SCAFFOLD": Scaffold(lr=LR, tau=tau, batch=batch),
    }


def perfed_engine(method: Method, size: int, clients: int, cohort: int, exact: bool) -> Vectorized:
    """Perfed's rounds; `exact`: in epochs, so that where all is one batch all batches are alike."""
    sampling: Any = "epochs" if exact else "replacement"
    data = mnist_like(clients, size)
    return Vectorized(Experiment(data, Task(MODEL), method, cohort, sampling=sampling))


def flat(layers: Any) -> list[np.ndarray]:
    """A model's matrices and biases in the order of the eager loop; personal or shared ones."""
    leaves = [layer[name] for layer in layers for name in ("w", "b")]
    return [np.asarray(leaf) for leaf in leaves if leaf is not None]


def reached(method: Method, state: EngineState) -> list[np.ndarray]:
    """Where the server and all clients are."""
    found, clients = flat(state.params), jax.device_get(state.clients)
    match method:
        case FedRep():
            own = clients.personal
        case Ditto():
            own = clients.state.v
        case _:
            own = clients.state
            found += flat(state.server_state)
    return found + flat(own)


class Eager:
    """The same rounds as a loop over clients: plain SGD in place, no data loader, no modules."""

    def __init__(
        self, method: Method, size: int, clients: int, cohort: int, first: list[np.ndarray]
    ) -> None:
        import torch

        from bench import eager

        train = mnist_like(clients, size).train
        parts = [train.client(i) for i in range(clients)]
        self.clients = eager.Clients(
            [torch.from_numpy(np.ascontiguousarray(x)) for x, _ in parts],
            [torch.from_numpy(y.astype(np.int64)) for _, y in parts],
        )
        self.cohort, self.method = cohort, method
        self.first = [torch.from_numpy(np.array(leaf)) for leaf in first]
        self.begin()

    def begin(self) -> None:
        """The model, the server's state, and what each client keeps, before the first round."""
        w, clients = self.first, range(len(self.clients.y))
        self.w, self.c = w, [0 * leaf for leaf in w]
        match self.method:
            case FedRep():
                self.w, self.own = w[:-2], [w[-2:] for _ in clients]
            case Ditto():
                self.own = [w for _ in clients]
            case _:
                self.own = [self.c for _ in clients]

    def take(self, threads: int, rounds: int) -> float:
        """So many rounds: milliseconds each."""
        import torch

        torch.set_num_threads(threads)
        begun = time.perf_counter()
        for _ in range(rounds):
            self.one_round()
        return 1e3 * (time.perf_counter() - begun) / rounds

    def after(self, rounds: int) -> list[np.ndarray]:
        """Where the server and all clients are after so many rounds from the first."""
        import torch

        self.begin()
        for _ in range(rounds):
            self.one_round()
        own = [torch.stack(parts) for parts in zip(*self.own, strict=True)]
        server = [*self.w, *self.c] if isinstance(self.method, Scaffold) else self.w
        return [leaf.numpy() for leaf in [*server, *own]]

    def one_round(self) -> None:
        """A uniformly sampled cohort, one client after another, and means of what they send."""
        from bench import eager

        match self.method:
            case FedRep():
                local = partial(fedrep, self.method)
            case Ditto():
                local = partial(ditto, self.method)
            case Scaffold():
                local = partial(scaffold, self.method, self.c)
            case _:
                raise NotImplementedError(self.method.name)
        sent = []
        for i in map(int, np.random.permutation(len(self.own))[: self.cohort]):
            model, self.own[i] = local(self.clients, i, self.w, self.own[i])
            sent.append(model)
        mean = eager.mean(sent)
        self.w, moved = mean[: len(self.w)], mean[len(self.w) :]
        share = self.cohort / len(self.own)
        self.c = [c.add(m, alpha=share) for c, m in zip(self.c, moved, strict=False)]


Sent = tuple["Weights", "Weights"]  # what a client sends, and what it keeps


def steps(
    data: Clients,
    client: int,
    w: Weights,
    trained: slice,
    rate: float,
    count: int,
    batch: Any,
    add: Callable[[Weights], Weights] | None = None,
) -> Weights:
    """Steps on a part of a model, the rest held fixed; `add`: to the gradient, given that part."""
    import torch

    from bench import eager

    w = list(w)
    own = [leaf.clone().requires_grad_() for leaf in w[trained]]
    w[trained] = own
    for _ in range(count):
        grads = torch.autograd.grad(eager.loss(w, data.batch(client, batch)), own)
        with torch.no_grad():
            more = add(own) if add else []
            for leaf, grad in zip(own, grads, strict=True):
                leaf.sub_(grad, alpha=rate)
            for leaf, extra in zip(own, more, strict=False):
                leaf.sub_(extra, alpha=rate)
    return [leaf.detach() for leaf in w]


WHOLE, HEAD, BODY = slice(None), slice(-2, None), slice(None, -2)


def fedrep(m: FedRep, data: Clients, client: int, body: Weights, head: Weights) -> Sent:
    """Steps on the head, then on the body."""
    w = steps(data, client, [*body, *head], HEAD, m.lr, m.head_steps, m.batch)
    w = steps(data, client, w, BODY, m.lr, m.body_steps, m.batch)
    return w[BODY], w[HEAD]


def ditto(m: Ditto, data: Clients, client: int, w: Weights, v: Weights) -> Sent:
    """FedAvg's steps, and those of the personal model, which is held to what was received."""

    def hold(own: Weights) -> Weights:
        return [m.lam * (a - b) for a, b in zip(own, w, strict=True)]

    model = steps(data, client, w, WHOLE, m.lr, m.tau, m.batch)
    return model, steps(data, client, v, WHOLE, m.personal_lr, m.personal_steps, m.batch, hold)


def scaffold(m: Scaffold, c: Weights, data: Clients, client: int, x: Weights, c_i: Weights) -> Sent:
    """Corrected steps; the change of the variate is sent after the model."""
    correction = [a - b for a, b in zip(c, c_i, strict=True)]
    y = steps(data, client, x, WHOLE, m.lr, m.tau, m.batch, lambda _: correction)
    scale = 1 / (m.tau * m.lr)
    moved = [scale * (a - b) - d for a, b, d in zip(x, y, c, strict=True)]
    return [*y, *moved], [a + b for a, b in zip(c_i, moved, strict=True)]


def disagreement(method: Method, batch: int, cohort: int) -> float:
    """What some rounds on the same batches differ by, relative to what they change.

    All clients take part, and a batch is all that a client has.
    """
    engine = perfed_engine(method, batch, cohort, cohort, exact=True)
    start = engine.init()
    found = reached(method, engine.advance(start, CHECKED_ROUNDS))
    first = flat(engine.experiment.init_params())
    whole: Any = replace(method, batch="full")  # type: ignore[type-var]
    expected = Eager(whole, batch, cohort, cohort, first).after(CHECKED_ROUNDS)

    def distance(some: list[np.ndarray], others: list[np.ndarray]) -> float:
        return float(np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(some, others, strict=True))))

    return distance(found, expected) / distance(expected, reached(method, start))


def perfed_rounds(method: Method, cohort: int) -> Callable[[int], float]:
    """What does so many rounds and returns milliseconds per round."""
    engine = perfed_engine(method, SIZE, CLIENTS, cohort, exact=False)
    state = engine.advance(engine.init(), 1)

    def take(rounds: int) -> float:
        return timed(lambda: jax.block_until_ready(engine.advance(state, rounds))) / rounds

    take(1)
    return take


def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.methods", description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=10, help="of a turn")
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--tau", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, nargs="+", help="of the eager loop; all are tried")
    parser.add_argument("--only", default="", help="methods whose names have this in them")
    given = parser.parse_args()
    console = Console(width=120, highlight=False)
    threads = given.threads or sorted({1, os.cpu_count() or 1})
    table = Table(box=box.SIMPLE_HEAD, title="ms per round: median (range)", title_justify="left")
    for heading in ("method", "perfed", "eager PyTorch, best threads", "ratio", "differ by"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for name, method in cases(given.tau, given.batch).items():
        if given.only.lower() not in name.lower():
            continue
        off = disagreement(method, given.batch, given.cohort)
        if not off < AGREEMENT:
            raise SystemExit(f"{name}: {CHECKED_ROUNDS} rounds differ by {off:.1e} of their change")
        engine = perfed_engine(method, SIZE, CLIENTS, given.cohort, exact=False)
        first = flat(engine.experiment.init_params())
        eager = Apart(Eager, method, SIZE, CLIENTS, given.cohort, first)
        takes: dict[str, Callable[[int], float]] = {"perfed": perfed_rounds(method, given.cohort)}
        takes |= {f"eager, {n} thread(s)": partial(eager.call, "take", n) for n in threads}
        for take in takes.values():
            take(1)
        times = measure(takes, given.rounds, given.repeats)
        shown = ", ".join(f"{who} {spread(values)}" for who, values in times.items())
        console.print(f"{name}: {shown}", style="dim")
        own = times.pop("perfed")
        best = min(times.values(), key=median)
        ratio = f"{median(best) / median(own):.1f}x"
        table.add_row(name, spread(own), spread(best), ratio, f"{off:.0e}")
    console.print(
        f"784-80-60-10, {given.cohort} of {CLIENTS} clients, {given.tau} steps of batch "
        f"{given.batch}; {CHECKED_ROUNDS} rounds on the same batches differ by so much of what "
        "they change"
    )
    console.print(table)
    console.print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, JAX "
        f"{jax.__version__} on {jax.device_count()} x {jax.devices()[0].device_kind}; no evaluation"
    )


if __name__ == "__main__":
    main()
