"""What bounds a round on an accelerator: its kernels, and how long it waits between them."""

import argparse
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
from jax.profiler import ProfileData
from rich.console import Console

from bench.__main__ import Case, engine_of, mnist_like, timed
from bench.accelerator import LAYERS, META, in_precision
from perfed.core.task import Precision

ROUNDS = 20
# Matrix products, by the names that cuBLAS, CUTLASS and XLA's own kernels have.
PRODUCT = re.compile(r"gemm|cutlass|sm\d\d_|dot|matmul", re.IGNORECASE)


@dataclass(frozen=True)
class Kernel:
    """One kernel's run on the device, in nanoseconds."""

    name: str
    start: float
    end: float


def kernels(trace: Path) -> list[Kernel]:
    """All that ran on the first accelerator, in order."""
    (file,) = trace.rglob("*.xplane.pb")
    found = []
    for plane in ProfileData.from_file(str(file)).planes:
        if plane.name.startswith("/device:GPU:0"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    found += [
                        Kernel(event.name, event.start_ns, event.start_ns + event.duration_ns)
                        for event in line.events
                    ]
    return sorted(found, key=lambda kernel: kernel.start)


def busy(ran: Iterable[Kernel]) -> float:
    """How long at least one kernel ran, in nanoseconds."""
    total, until = 0.0, 0.0
    for kernel in ran:
        total += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return total


def profile(console: Console, cohort: int, precision: Precision) -> None:
    """Some rounds, kernel by kernel."""
    case = Case("Per-FedAvg (fo)", META, mnist_like(max(100, cohort), 200), LAYERS, (cohort,))
    engine = in_precision(engine_of(case, cohort), precision)
    state = engine.advance(engine.init(), ROUNDS)
    plain = min(
        timed(lambda: jax.block_until_ready(engine.advance(state, ROUNDS))) for _ in range(5)
    )
    with TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(engine.advance(state, ROUNDS))
        ran = kernels(Path(folder))
    span = ran[-1].end - ran[0].start
    at_work = busy(ran) / 1e6 / ROUNDS
    console.print(
        f"{case.name}, {cohort} clients, {precision}: {plain / ROUNDS:.2f} ms a round; "
        f"{len(ran) / ROUNDS:.0f} kernels a round, at work for {at_work:.2f} ms of "
        f"{span / 1e6 / ROUNDS:.2f} ms while traced"
    )
    spent, count = Counter[str](), Counter[str]()
    for kernel in ran:
        spent[kernel.name] += kernel.end - kernel.start  # type: ignore[assignment]
        count[kernel.name] += 1
    products = sum(t for name, t in spent.items() if PRODUCT.search(name))
    console.print(f"  of it {products / 1e6 / ROUNDS:.2f} ms in matrix products")
    for name, nanoseconds in spent.most_common(12):
        console.print(
            f"  {nanoseconds / 1e3 / ROUNDS:7.1f} µs a round, {count[name] / ROUNDS:5.1f} times "
            f"{nanoseconds / 1e3 / count[name]:6.2f} µs  {name[:90]}"
        )


def main() -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description=__doc__)
    parser.add_argument("--cohort", type=int, action="append", help="clients per round; repeatable")
    parser.add_argument("--precision", choices=("float32", "tf32", "bf16"), action="append")
    given = parser.parse_args()
    console = Console(width=160, highlight=False)
    for cohort in given.cohort or (10, 100, 1000):
        for precision in given.precision or ("float32", "tf32"):
            profile(console, cohort, precision)
    console.print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
