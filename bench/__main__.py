"""Round times of perfed and of an eager PyTorch loop, interleaved in one run, as ratios."""

import argparse
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from bench import messages
from perfed import (
    MLP,
    MLR,
    Codec,
    Experiment,
    FedAvg,
    Federation,
    Float32,
    LowPrecision,
    Method,
    PerFedAvg,
    PFedMe,
    Pipeline,
    Task,
    Vectorized,
    synthetic,
)
from perfed.data import FlatExamples
from perfed.methods.per_fedavg import Variant

REPEATS = 7
AS_IT_IS = Float32()


@dataclass(frozen=True)
class Case:
    """The same work for all contestants.

    Attributes:
        name: what it is.
        method: the method, with its hyperparameters.
        federation: the data.
        layers: the sizes of the network's layers.
        cohorts: clients per round; the first is compared with others.
        codec: how changes are sent.
    """

    name: str
    method: Method
    federation: Federation
    layers: tuple[int, ...]
    cohorts: tuple[int, ...]
    codec: Codec = AS_IT_IS


def mnist_like(clients: int = 100, size: int = 980) -> Federation:
    """Random images of MNIST's shape, as many a client as in Per-FedAvg."""
    rng = np.random.default_rng(0)

    def side(n: int) -> FlatExamples:
        x = rng.random((clients * n, 784), np.float32)
        return FlatExamples.from_rows(x, rng.integers(0, 10, clients * n), [n] * clients)

    return Federation.from_examples(side(size), side(10), classes=10)


def cases() -> list[Case]:
    """The papers' rounds."""
    mnist, layers = mnist_like(), (784, 80, 60, 10)
    sgd = FedAvg(lr=0.01, tau=10, batch=40)
    variants: tuple[Variant, ...] = ("fo", "hf", "exact")
    metas = [PerFedAvg(v, alpha=0.01, beta=0.001, tau=10, batch=40) for v in variants]
    prox = PFedMe(lam=20, eta=0.01, local_rounds=20, inner_steps=5, inner_lr=0.01, batch=20)
    return [
        Case("FedAvg", sgd, mnist, layers, (10, 100)),
        *(Case(f"Per-FedAvg ({m.variant})", m, mnist, layers, (10, 100)) for m in metas),
        Case("pFedMe, MLR", prox, synthetic(), (60, 10), (100,)),
    ]


def timed(work: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    begun = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begun)


def engine_of(case: Case, cohort: int) -> Vectorized:
    """Perfed's engine for a case."""
    first, *rest = case.layers
    model = MLP(first, rest[-1], tuple(rest[:-1]), "elu") if rest[:-1] else MLR(first, rest[-1])
    return Vectorized(
        Experiment(
            case.federation, Task(model), case.method, cohort, pipeline=Pipeline.of(case.codec)
        )
    )


def quantization(console: Console) -> None:
    """What quantizing adds to a Per-FedAvg (FO) round, in turns with the plain one."""
    meta = PerFedAvg("fo", alpha=0.01, beta=0.001, tau=10, batch=40)
    data = mnist_like()
    codecs = {"float32": AS_IT_IS} | {f"s = {s}": LowPrecision(s) for s in (1, 15, 1023)}
    engines = {
        name: engine_of(Case(name, meta, data, (784, 80, 60, 10), (10,), codec), 10)
        for name, codec in codecs.items()
    }
    states = {name: engine.advance(engine.init(), 3) for name, engine in engines.items()}
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(REPEATS):
        for name, engine in engines.items():
            work = partial(engine.advance, states[name], 15)
            times[name].append(timed(lambda work=work: jax.block_until_ready(work())) / 15)  # type: ignore[misc]
    plain = median(times.pop("float32"))
    more = ", ".join(f"{name} {100 * (median(t) / plain - 1):+.1f} %" for name, t in times.items())
    console.print(f"Per-FedAvg (fo) with quantized changes, against float32: {more}")


def measure(case: Case, cohort: int, threads: list[int]) -> dict[str, list[float]]:
    """Milliseconds a round of every contestant in turn; perfed's first round apart."""
    engine = engine_of(case, cohort)
    times: dict[str, list[float]] = {}
    times["first round"] = [timed(lambda: engine.advance(engine.init(), 1))]
    state = engine.init()
    others = eager_rounds(case, cohort, threads) if threads else {}
    pace = timed(lambda: jax.block_until_ready(engine.advance(state, 3))) / 3
    block = max(3, int(300 / pace))
    for _ in range(REPEATS):
        spent = timed(lambda: jax.block_until_ready(engine.advance(state, block)))
        times.setdefault("perfed", []).append(spent / block)
        for name, work in others.items():
            times.setdefault(name, []).append(timed(work))
    return times


def eager_rounds(case: Case, cohort: int, threads: list[int]) -> dict[str, Callable[[], Any]]:
    """One round of the eager loop, for each number of threads."""
    import torch

    from bench import eager

    parts = [case.federation.train.client(i) for i in range(case.federation.clients)]
    data = eager.Clients(
        [torch.from_numpy(np.ascontiguousarray(x)) for x, _ in parts],
        [torch.from_numpy(y.astype(np.int64)) for _, y in parts],
    )
    weights, local = eager.first_weights(case.layers), eager.client_of(case.method)

    def work(n: int) -> Callable[[], Any]:
        def one_round() -> None:
            torch.set_num_threads(n)
            eager.one_round(local, data, weights, cohort)

        return one_round

    return {f"eager, {n} thread(s)": work(n) for n in threads}


def spread(values: list[float]) -> str:
    """Median and range."""
    digits = 1 if median(values) >= 5 else 2
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--alone", action="store_true", help="perfed only, larger cohorts too")
    alone = parser.parse_args().alone
    threads = [] if alone else sorted({1, os.cpu_count() or 1})
    console = Console(width=120)
    table = Table(box=box.SIMPLE_HEAD, title="Milliseconds a round: median (range)")
    table.title_justify = "left"
    headings = [
        "round",
        "clients",
        "perfed",
        "eager PyTorch, best threads",
        "ratio",
        "first round, s",
    ]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "round" else "right")
    for case in cases():
        for cohort in case.cohorts if alone else case.cohorts[:1]:
            times = measure(case, cohort, threads)
            others = [values for name, values in times.items() if name.startswith("eager")]
            best = min(others, key=median) if others else None
            table.add_row(
                case.name,
                str(cohort),
                spread(times["perfed"]),
                spread(best) if best else "",
                f"{median(best) / median(times['perfed']):.1f}x" if best else "",
                f"{times['first round'][0] / 1e3:.1f}",
            )
            shown = ", ".join(f"{name} {spread(values)}" for name, values in times.items())
            console.print(f"{case.name}, {cohort} clients: {shown}", style="dim")
    console.print(table)
    quantization(console)
    if not alone:
        messages.main()
    device = jax.devices()[0]
    console.print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, JAX "
        f"{jax.__version__} on {jax.device_count()} x {device.device_kind}; no evaluation"
    )


if __name__ == "__main__":
    main()
