"""Engine on an accelerator: cohorts, precisions, what they cost in accuracy, and an eager loop."""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import jax
import numpy as np
from rich.console import Console

from bench.__main__ import Case, engine_of, mnist_like, spread, timed
from perfed import Experiment, FedAvg, Method, PerFedAvg, PFedMe, Task, Vectorized, load
from perfed.core.task import Precision
from perfed.evaluation.evaluator import SimulationEvaluator

PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bf16")
LAYERS = (784, 80, 60, 10)
META = PerFedAvg("fo", alpha=0.01, beta=0.001, tau=10, batch=40)


def in_precision(engine: Vectorized, precision: Precision) -> Vectorized:
    """The same engine, with products of this precision."""
    setup = engine.experiment
    return Vectorized(replace(setup, task=replace(setup.task, precision=precision)))


def rounds_of(engine: Vectorized, count: int, repeats: int = 5) -> tuple[float, list[float]]:
    """Seconds of the first round, and milliseconds a round after it."""
    first = timed(lambda: jax.block_until_ready(engine.advance(engine.init(), 1))) / 1e3
    state = engine.init()
    jax.block_until_ready(engine.advance(state, count))

    def once() -> float:
        return timed(lambda: jax.block_until_ready(engine.advance(state, count))) / count

    return first, [once() for _ in range(repeats)]


def eager_round(case: Case, cohort: int) -> Callable[[], Any]:
    """One round of the eager PyTorch loop, on the GPU."""
    import torch

    from bench import eager

    gpu = torch.device("cuda")
    parts = [case.federation.train.client(i) for i in range(case.federation.clients)]
    data = eager.Clients(
        [torch.from_numpy(np.ascontiguousarray(x)).to(gpu) for x, _ in parts],
        [torch.from_numpy(y.astype(np.int64)).to(gpu) for _, y in parts],
    )
    weights = [leaf.to(gpu) for leaf in eager.first_weights(case.layers)]
    local = eager.client_of(case.method)

    def work() -> None:
        eager.one_round(local, data, weights, cohort)
        torch.cuda.synchronize()

    return work


def speed(console: Console, eager: bool) -> None:
    """Round times by cohort and precision."""
    data = mnist_like(1000, 200)
    for cohort in (10, 100, 1000):
        case = Case("Per-FedAvg (fo)", META, data, LAYERS, (cohort,))
        base = engine_of(case, cohort)
        for precision in PRECISIONS:
            first, times = rounds_of(in_precision(base, precision), 200 if cohort < 1000 else 40)
            console.print(
                f"{case.name}, {cohort} clients, {precision}: {spread(times)} ms, "
                f"first {first:.1f} s"
            )
            if precision == "float32":
                plain = median(times)
        if eager and cohort < 1000:
            work = eager_round(case, cohort)
            work()
            slow = [timed(work) for _ in range(5 if cohort == 10 else 2)]
            console.print(
                f"  eager PyTorch, {cohort} clients: {spread(slow)} ms, {median(slow) / plain:.0f}x"
            )


def others(console: Console) -> None:
    """The other methods' rounds in float32."""
    data = mnist_like()
    for method in (
        FedAvg(lr=0.01, tau=10, batch=40),
        replace(META, variant="hf"),
        replace(META, variant="exact"),
    ):
        for cohort in (10, 100):
            engine = engine_of(Case(method.name, method, data, LAYERS, (cohort,)), cohort)
            first, times = rounds_of(engine, 200)
            name = f"{method.name} {getattr(method, 'variant', '')}".strip()
            console.print(f"{name}, {cohort} clients: {spread(times)} ms, first {first:.1f} s")
    prox = PFedMe(lam=20, eta=0.01, local_rounds=20, inner_steps=5, inner_lr=0.01, batch=20)
    synthetic = load("synthetic", alpha=0.5, beta=0.5)
    engine = engine_of(Case("pFedMe", prox, synthetic, (60, 10), (100,)), 100)
    first, times = rounds_of(engine, 100)
    console.print(f"pfedme, 100 clients: {spread(times)} ms, first {first:.1f} s")


def accuracy(console: Console, rounds: int) -> None:
    """What a run comes to in each precision: personalized accuracy, three seeds."""
    from perfed import MLP

    federation = load("mnist", clients=50)
    methods: dict[str, Method] = {
        "fedavg": FedAvg(lr=0.05, tau=10, batch=40),
        "per-fedavg fo": PerFedAvg("fo", alpha=0.01, beta=0.05, tau=10, batch=40),
        "per-fedavg hf": PerFedAvg("hf", alpha=0.01, beta=0.05, tau=10, batch=40),
        "pfedme": PFedMe(lam=15, eta=0.05, local_rounds=10, inner_steps=5, inner_lr=0.05, batch=40),
    }
    for name, method in methods.items():
        found = []
        for precision in PRECISIONS:
            scores = []
            for seed in range(3):
                task = Task(MLP(784, 10, (80, 60), "elu"), precision=precision)
                engine = Vectorized(Experiment(federation, task, method, 10, seed))
                state = engine.advance(engine.init(), rounds)
                own = SimulationEvaluator(engine)(state).scores["personalized"].accuracy
                scores.append(100 * float(own.mean()))
            found.append(f"{precision} {np.mean(scores):.2f} ± {np.std(scores, ddof=1):.2f}")
        console.print(f"MNIST, {rounds} rounds, {name}: {', '.join(found)}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.accelerator", description=__doc__)
    parser.add_argument("--eager", action="store_true", help="also an eager PyTorch loop")
    parser.add_argument("--accuracy", type=int, default=0, metavar="ROUNDS", help="also on MNIST")
    given = parser.parse_args()
    console = Console(width=140, highlight=False)
    begun = time.perf_counter()
    speed(console, given.eager)
    others(console)
    if given.accuracy:
        accuracy(console, given.accuracy)
    device = jax.devices()[0]
    console.print(
        f"JAX {jax.__version__} on {device.device_kind}; {time.perf_counter() - begun:.0f} s in all"
    )


if __name__ == "__main__":
    main()
