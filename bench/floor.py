"""The arithmetic floor of the Per-FedAvg (FO) round: its matrix products alone, by the best BLAS.

No gather, no activation, no loss, no update, and operands that stay in the cache: what nothing that
makes the same products in float32 goes below, unless its products are faster. Run it with
`python -m bench.floor`, which times perfed's whole round in the same run, in turns.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from statistics import median
from typing import IO, Any

import numpy as np
import numpy.typing as npt

SIZES = (784, 80, 60, 10)
CLIENTS, TAU, BATCH = 10, 10, 40
GRADIENTS = 2  # of a first-order step: one at w, one at w tilde
ROUNDS, REPEATS = 20, 7
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

Matrix = npt.NDArray[np.float32]
Product = tuple[Matrix, Matrix, Matrix]


@dataclass(frozen=True)
class Way:
    """How the products are computed.

    Attributes:
        library: whose matrix product.
        processes: clients are shared out over these,
        threads: and then over these of a process,
        blas: and a product over these of a thread.
    """

    library: str
    processes: int
    threads: int
    blas: int

    @property
    def name(self) -> str:
        """What it is called."""
        if self.processes > 1:
            return f"{self.library}, a process a core"
        if self.threads > 1:
            return f"{self.library}, a thread a core"
        return f"{self.library}, {self.blas} thread(s) a product"


def ways() -> list[Way]:
    """All that is worth trying here."""
    libraries = ["numpy", "scipy", *(["torch.mm"] if find_spec("torch") else [])]
    shares = {(1, 1, CORES), (1, CORES, 1), (CORES, 1, 1)}  # on one core they are one
    return [Way(library, *share) for library in libraries for share in sorted(shares)]


def products(rng: np.random.Generator) -> list[Product]:
    """One client's products for one gradient: left, right, and where the result goes."""

    def random(*shape: int) -> Matrix:
        return rng.random(shape, np.float32)

    found: list[Product] = []
    for i, (a, b) in enumerate(pairwise(SIZES)):
        x, w, back = random(BATCH, a), random(b, a), random(BATCH, b)
        found.append((x, w.T, random(BATCH, b)))  # forward
        found.append((back.T, x, random(b, a)))  # back to the weights
        if i:  # nobody asks for the gradient of the first layer's inputs
            found.append((back, w, random(BATCH, a)))
    return found


def flops() -> int:
    """Of a round: two for every multiplication."""
    one: int = sum(2 * a.size * b.shape[1] for a, b, _ in products(_rng(0)))
    return one * CLIENTS * TAU * GRADIENTS


def client_of(library: str, number: int) -> Callable[[], None]:
    """One client's part of a round, with operands of its own."""
    mine = products(_rng(number))
    match library:
        case "numpy":
            call: Callable[..., Any] = np.matmul
            arguments: list[Any] = mine
        case "scipy":
            from scipy.linalg.blas import sgemm

            # BLAS thinks in columns: the transpose of the product is computed, and nothing copied.
            def flagged(m: Matrix) -> tuple[Matrix, int]:
                return (m, 0) if m.flags.f_contiguous else (m.T, 1)

            def call(a: Matrix, b: Matrix, c: Matrix, ta: int, tb: int) -> None:
                sgemm(1.0, a, b, 0.0, c, ta, tb, 1)

            arguments = []
            for a, b, c in mine:
                (left, ta), (right, tb) = flagged(b.T), flagged(a.T)
                arguments.append((left, right, c.T, ta, tb))
                call(*arguments[-1])
                np.testing.assert_allclose(c, a @ b, rtol=1e-4)
        case "torch.mm":
            import torch

            # What NumPy sees as a transpose, PyTorch does too.
            tensors = [tuple(map(torch.from_numpy, product)) for product in mine]

            def call(a: Any, b: Any, c: Any) -> None:
                torch.mm(a, b, out=c)

            arguments = tensors
        case _:
            raise ValueError(library)

    def one_round() -> None:
        for _ in range(TAU * GRADIENTS):
            for given in arguments:
                call(*given)

    return one_round


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def child(library: str, part: int, of: int, threads: int, blas: int) -> None:
    """One process of a way: does as many rounds as it reads; answers with milliseconds a round."""
    if library == "torch.mm":
        import torch

        torch.set_num_threads(blas)
    clients = [client_of(library, i) for i in range(part, CLIENTS, of)]
    shares = [clients[i::threads] for i in range(threads)]

    def share(mine: list[Callable[[], None]]) -> None:
        for one_round in mine:
            one_round()

    with ThreadPoolExecutor(threads) as pool:
        for line in sys.stdin:
            begun = time.perf_counter()
            for _ in range(int(line)):
                if threads == 1:
                    share(clients)
                else:
                    list(pool.map(share, shares))
            print(1e3 * (time.perf_counter() - begun) / int(line), flush=True)


@contextmanager
def running(way: Way) -> Iterator[Callable[[int], float]]:
    """A way's processes; what it gives does so many rounds and returns milliseconds a round."""
    limits = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = os.environ | dict.fromkeys(limits, str(way.blas))
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "bench.floor", "--child", way.library]
                    + [str(n) for n in (part, way.processes, way.threads, way.blas)],
                    env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )
            )
            for part in range(way.processes)
        ]  # fmt: skip
        pipes = [(_open(c.stdin), _open(c.stdout)) for c in children]

        def take(rounds: int) -> float:
            for asked, _ in pipes:
                print(rounds, file=asked, flush=True)
            # The round is over when the last of them is.
            return max(float(answer.readline()) for _, answer in pipes)

        take(1)
        yield take
        for asked, _ in pipes:
            asked.close()


def _open(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def floor_ms() -> dict[str, float]:
    """Milliseconds of a round's products, way by way, medians of several turns: the least is it."""
    return {name: median(times) for name, times in _in_turns({}).items()}


def _in_turns(others: dict[str, Callable[[int], float]]) -> dict[str, list[float]]:
    with ExitStack() as stack:
        takes = others | {way.name: stack.enter_context(running(way)) for way in ways()}
        times: dict[str, list[float]] = {name: [] for name in takes}
        for _ in range(REPEATS):
            for name, take in takes.items():
                time.sleep(0.05)  # until the threads of the one before have stopped spinning
                times[name].append(take(ROUNDS))
    return times


def perfed_round() -> Callable[[int], float]:
    """Perfed's whole round, ready to be timed."""
    import jax

    from bench.__main__ import Case, engine_of, mnist_like
    from perfed import PerFedAvg

    method = PerFedAvg("fo", alpha=0.01, beta=0.001, tau=TAU, batch=BATCH)
    engine = engine_of(Case("", method, mnist_like(), SIZES, (CLIENTS,)), CLIENTS)
    state = engine.advance(engine.init(), 3)

    def take(rounds: int) -> float:
        begun = time.perf_counter()
        jax.block_until_ready(engine.advance(state, rounds))
        return 1e3 * (time.perf_counter() - begun) / rounds

    take(1)
    return take


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.floor", description=__doc__)
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    wanted = parser.parse_args().child
    if wanted:
        library, *numbers = wanted
        child(library, *map(int, numbers))
        return
    times = _in_turns({"perfed, the whole round": perfed_round()})
    whole = times.pop("perfed, the whole round")
    best = min(times, key=lambda name: median(times[name]))
    work = flops() / 1e9
    print(f"Per-FedAvg (FO), {'-'.join(map(str, SIZES))}, {CLIENTS} clients, tau {TAU}, ", end="")
    print(f"batch {BATCH}: {work:.2f} GFLOP of matrix products a round, {CORES} core(s)")
    for name, found in sorted(times.items(), key=lambda item: median(item[1])):
        print(f"{name:34} {_spread(found)} ms, {1e3 * work / median(found):5.0f} GFLOP/s")
    print(f"{'perfed, the whole round':34} {_spread(whole)} ms")
    ratios = [a / b for a, b in zip(whole, times[best], strict=True)]
    print(f"perfed takes {_spread(ratios)} times the products alone ({best})")


def _spread(values: list[float]) -> str:
    return f"{median(values):6.2f} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    main()
