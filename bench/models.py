"""Rounds of models of all libraries, beside eager PyTorch and the arithmetic floor.

All take turns in one run: `python -m bench.models`. It needs "perfed[torch,keras,nnx]".
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, get_args

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from bench.__main__ import spread, timed
from bench.apart import Apart
from bench.networks import SYMBOLS, Network, networks
from perfed import Experiment, FedAvg, Federation, Task, Vectorized
from perfed.core.task import PRECISIONS, Model, Precision
from perfed.data.examples import FlatExamples

if TYPE_CHECKING:
    import torch

    from bench import eager

BATCH = 32
LR = 0.05


def data_for(network: Network, clients: int = 20, size: int = 400) -> Federation:
    """Random images or texts: what they are does not matter for time."""
    rng = np.random.default_rng(0)

    def side(n: int) -> FlatExamples:
        if network.classes == SYMBOLS:
            x: np.ndarray = rng.integers(0, SYMBOLS, (clients * n, *network.shape), np.int32)
        else:
            x = rng.random((clients * n, *network.shape), np.float32)
        y = rng.integers(0, network.classes, clients * n)
        return FlatExamples.from_rows(x, y, [n] * clients)

    return Federation.from_examples(side(size), side(10), classes=network.classes)


def perfed_rounds(
    network: Network, model: Model, data: Federation, given: argparse.Namespace
) -> Callable[[int], float]:
    """Perfed's rounds: what it gives does so many and returns milliseconds per round."""
    method = FedAvg(lr=LR, tau=network.tau, batch=BATCH)
    task = Task(model, precision=given.precision)
    engine = Vectorized(Experiment(data, task, method, network.cohort), chunk=given.chunk)
    state = engine.advance(engine.init(), 1)

    def take(rounds: int) -> float:
        return timed(lambda: jax.block_until_ready(engine.advance(state, rounds))) / rounds

    take(1)
    return take


class Eager:
    """The same rounds as a lean eager loop: one client after another, plain SGD, no data loader."""

    def __init__(self, name: str, device: str, precision: Precision) -> None:
        import torch

        from bench import eager

        allow_tf32(precision)
        self.network = network = next(one for one in networks() if one.name == name)
        data = data_for(network)

        def inputs(x: np.ndarray) -> torch.Tensor:
            x = np.moveaxis(x, -1, 1) if x.ndim == 4 else x
            return torch.from_numpy(np.ascontiguousarray(x)).to(device)

        parts = [data.train.client(i) for i in range(data.clients)]
        self.clients = eager.Clients(
            [inputs(np.asarray(x)) for x, _ in parts],
            [torch.from_numpy(y.astype(np.int64)).to(device) for _, y in parts],
        )
        self.module = network.torch().to(device)
        self.leaves = list(self.module.parameters())
        self.start = [leaf.detach().clone() for leaf in self.leaves]

    def take(self, threads: int, rounds: int) -> float:
        """So many rounds: milliseconds each."""
        import torch

        from bench import eager

        torch.set_num_threads(threads)
        begun = time.perf_counter()
        for _ in range(rounds):
            eager.one_round(self._local, self.clients, self.start, self.network.cohort)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begun) / rounds

    def _local(self, clients: eager.Clients, client: int, w: eager.Weights) -> eager.Weights:
        import torch

        with torch.no_grad():
            for leaf, value in zip(self.leaves, w, strict=True):
                leaf.copy_(value)
        for _ in range(self.network.tau):
            x, y = clients.batch(client, BATCH)
            loss = torch.nn.functional.cross_entropy(self.module(x), y)
            grads = torch.autograd.grad(loss, self.leaves)
            with torch.no_grad():
                for leaf, grad in zip(self.leaves, grads, strict=True):
                    leaf.sub_(grad, alpha=LR)
        return [leaf.detach().clone() for leaf in self.leaves]


def products(precision: Precision) -> Callable[[int], float]:
    """GFLOP/s of large products: by the BLAS that NumPy has on a CPU, or else by JAX."""
    on_cpu = jax.default_backend() == "cpu"
    side = 1024 if on_cpu else 8192
    a, b = np.random.default_rng(0).random((2, side, side), np.float32)
    product: Callable[[], Any] = lambda: a @ b  # noqa: E731
    if not on_cpu:
        x, y = jax.device_put((a, b))
        with jax.default_matmul_precision(PRECISIONS[precision]):
            compiled = jax.jit(jax.numpy.matmul).lower(x, y).compile()
        product = partial(compiled, x, y)

    def take(times: int) -> float:
        spent = timed(lambda: jax.block_until_ready([product() for _ in range(10 * times)]))
        return 10 * times * 2 * side**3 / spent / 1e6

    return take


def allow_tf32(precision: Precision) -> None:
    """The same products in eager PyTorch as in perfed, on a GPU."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"


def contestants(
    network: Network, given: argparse.Namespace, console: Console
) -> dict[str, Callable[[int], float]]:
    """All that take part, ready to be timed."""
    data = data_for(network)
    found = {}
    for name, build in (network.ours | {"PyTorch": network.converted}).items():
        try:
            model = build()
        except ImportError as error:
            console.print(f"{network.name} as {name} is left out: {error}")
            continue
        found[name] = perfed_rounds(network, model, data, given)
    device = "cpu" if jax.default_backend() == "cpu" else "cuda"
    eager = Apart(Eager, network.name, device, given.precision)
    for threads in sorted({1, min(os.cpu_count() or 1, given.threads)}):
        found[f"eager PyTorch, {threads} thread(s)"] = partial(eager.call, "take", threads)
        eager.call("take", threads, 1)
    return found


def measure(
    takes: dict[str, Callable[[int], float]], rounds: int, repeats: int
) -> dict[str, list[float]]:
    """Milliseconds per round, in turns."""
    times: dict[str, list[float]] = {name: [] for name in takes}
    for _ in range(repeats):
        for name, take in takes.items():
            time.sleep(0.3)  # until the threads of the one before have stopped spinning
            times[name].append(take(rounds))
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.models", description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=2, help="of a turn")
    parser.add_argument("--chunk", type=int, help="clients at once on a core")
    parser.add_argument("--only", default="", help="networks whose names have this in them")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of eager PyTorch")
    parser.add_argument("--precision", choices=get_args(Precision), default="float32")
    given = parser.parse_args()
    console = Console(width=120)
    for network in networks():
        if given.only.lower() not in network.name.lower():
            continue
        takes = {"GFLOP/s": products(given.precision)} | contestants(network, given, console)
        times = measure(takes, given.rounds, given.repeats)
        rate = median(times.pop("GFLOP/s"))
        # Back to the weights and back to the inputs take as many products as the outputs.
        work = 3 * network.flops * BATCH * network.tau * network.cohort
        floor = work / rate / 1e6
        best = min((t for name, t in times.items() if name.startswith("eager")), key=median)
        table = Table(box=box.SIMPLE_HEAD, title="ms per round: median (range)")
        for heading in ("network", "as", "a round", "of eager", "of built in", "of the floor"):
            table.add_column(heading, justify="left" if heading in ("network", "as") else "right")
        for name, own in times.items():
            ratio = f"{median(best) / median(own):.2f}x"
            to_ours = f"{median(own) / median(times['built in']):.2f}x"
            share = f"{100 * floor / median(own):.0f} %"
            table.add_row(network.name, name, spread(own), ratio, to_ours, share)
        console.print(
            f"{network.name}: {network.cohort} clients, {network.tau} steps of batch {BATCH}, "
            f"{work / 1e9:.0f} GFLOP per round; large products {rate:.0f} GFLOP/s, so the floor is "
            f"{floor:.0f} ms"
        )
        console.print(table)
    console.print(
        f"{os.cpu_count()} cores, {platform.machine()}, JAX {jax.__version__} on "
        f"{jax.devices()[0].device_kind}, {given.precision}"
    )


if __name__ == "__main__":
    main()
