"""Round times of perfed and of an eager PyTorch loop, interleaved in one run, as ratios."""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

import jax
import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from bench import eager
from perfed import (
    MLP,
    MLR,
    FedAvg,
    Federation,
    PerFedAvg,
    PFedMe,
    Setup,
    Task,
    Vectorised,
    synthetic,
)
from perfed.data import FlatExamples

REPEATS = 7


@dataclass(frozen=True)
class Case:
    """The same work for both.

    Attributes:
        name: what it is.
        method: perfed's method.
        local: the eager loop's client.
        federation: the data of both.
        layers: the network of both.
        cohort: clients a round.
        rounds: rounds perfed is timed over at once; the eager loop is timed over one.
    """

    name: str
    method: Any
    local: Callable[..., eager.Weights]
    federation: Federation
    layers: tuple[int, ...]
    cohort: int
    rounds: int


def settings(method: Any, *wanted: str) -> dict[str, Any]:
    """Some of a method's hyper-parameters."""
    return {f.name: getattr(method, f.name) for f in fields(method) if f.name in wanted}


def mnist_like(clients: int = 50, size: int = 980) -> Federation:
    """Random images of MNIST's shape, as many a client as in Per-FedAvg."""
    rng = np.random.default_rng(0)

    def side(n: int) -> FlatExamples:
        x = rng.random((clients * n, 784), np.float32)
        return FlatExamples.joined(x, rng.integers(0, 10, clients * n), [n] * clients)

    return Federation.made(side(size), side(10), classes=10)


def cases() -> list[Case]:
    """The papers' rounds."""
    mnist, layers = mnist_like(), (784, 80, 60, 10)
    found = []
    sgd = FedAvg(lr=0.01, tau=10, batch=40)
    local = eager.fedavg(**settings(sgd, "lr", "tau", "batch"))
    found.append(Case("FedAvg, MNIST network", sgd, local, mnist, layers, 10, 20))
    for variant in ("fo", "hf", "exact"):
        meta = PerFedAvg(variant, alpha=0.01, beta=0.001, tau=10, batch=40)
        names = ("variant", "alpha", "beta", "tau", "batch", "delta")
        local = eager.per_fedavg(**settings(meta, *names))
        label = f"Per-FedAvg ({variant}), MNIST network"
        found.append(Case(label, meta, local, mnist, layers, 10, 10))
    prox = PFedMe(lam=20, eta=0.01, local_rounds=20, inner_steps=5, inner_lr=0.01, batch=20)
    names = ("lam", "eta", "local_rounds", "inner_steps", "inner_lr", "batch")
    local = eager.pfedme(**settings(prox, *names))
    label = "pFedMe, MLR, 100 clients"
    found.append(Case(label, prox, local, synthetic(), (60, 10), 100, 10))
    return found


def timed(work: Callable[[], Any]) -> float:
    """Seconds of one call."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measure(case: Case, threads: list[int]) -> dict[str, list[float]]:
    """Milliseconds a round of every contestant in turn; perfed's first round apart."""
    first, *rest = case.layers
    model = MLP(first, rest[-1], tuple(rest[:-1]), "elu") if rest[:-1] else MLR(first, rest[-1])
    engine = Vectorised(Setup(case.federation, Task(model), case.method, case.cohort))

    def perfed(count: int) -> Any:
        return jax.block_until_ready(engine.advance(state, count))

    times: dict[str, list[float]] = {"first round": []}
    begun = time.perf_counter()
    state = engine.start()
    perfed(1)
    times["first round"].append(1e3 * (time.perf_counter() - begun))

    train = case.federation.train
    parts = [train.client(i) for i in range(case.federation.clients)]
    data = eager.Clients(
        [torch.from_numpy(np.ascontiguousarray(x)) for x, _ in parts],
        [torch.from_numpy(y.astype(np.int64)) for _, y in parts],
    )
    weights = eager.first_weights(case.layers)
    for _ in range(REPEATS):
        times.setdefault("perfed", []).append(
            1e3 * timed(lambda: perfed(case.rounds)) / case.rounds
        )
        for n in threads:
            torch.set_num_threads(n)
            times.setdefault(f"eager, {n} threads", []).append(
                1e3 * timed(lambda: eager.rounds(case.local, data, weights, case.cohort, 1))
            )
    return times


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def main() -> None:
    """Measure and print."""
    console = Console(width=120)
    threads = sorted({1, os.cpu_count() or 1})
    table = Table(
        box=box.SIMPLE_HEAD, title="Milliseconds a round: median (range)", title_justify="left"
    )
    for heading in (
        "round",
        "perfed",
        "eager PyTorch, best threads",
        "ratio",
        "perfed's first round, s",
    ):
        table.add_column(heading, justify="left" if heading == "round" else "right")
    for case in cases():
        times = measure(case, threads)
        best = min((v for k, v in times.items() if k.startswith("eager")), key=median)
        table.add_row(
            case.name,
            spread(times["perfed"]),
            spread(best),
            f"{median(best) / median(times['perfed']):.1f}x",
            f"{times['first round'][0] / 1e3:.1f}",
        )
        shown = ", ".join(f"{name} {spread(values)}" for name, values in times.items())
        console.print(f"{case.name}: {shown}", style="dim")
    console.print(table)
    console.print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, JAX "
        f"{jax.__version__} on {jax.device_count()} {jax.default_backend()} device(s), PyTorch "
        f"{torch.__version__}; best of {threads} PyTorch threads; no evaluation in either"
    )


if __name__ == "__main__":
    main()
