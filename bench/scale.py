"""Time and memory of a round against the federation, the cohort and the model; and two processes.

Every case is a process of its own that streams a stored federation; cases that are compared take
turns. Memory is what a process holds itself (`RssAnon`): pages of files that the system may drop
at any time are not in it. Needs Linux, and 4 GB of disk for a million clients.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from perfed.simulation.hosts import free_port

FEATURES, CLASSES = 60, 10
TURNS = 5
BLOCK_S = 1.0  # rounds are timed together for about so long
console = Console(width=120, highlight=False)


@dataclass(frozen=True)
class Case:
    """What is run.

    Attributes:
        clients: how many there are.
        cohort: how many of them take part in a round.
        hidden: the hidden layers of the network; none: logistic regression.
        method: `fedavg`, or `pfedme`, whose clients keep a model each.
        tau: local steps (rounds of pFedMe).
    """

    clients: int
    cohort: int
    hidden: tuple[int, ...] = (80,)
    method: str = "fedavg"
    tau: int = 10

    @property
    def parameters(self) -> int:
        """Of the model."""
        sizes = (FEATURES, *self.hidden, CLASSES)
        return sum((a + 1) * b for a, b in pairwise(sizes))


def write(root: Path, clients: int) -> float:
    """A federation of uneven clients, 4 to 16 rows each; the seconds it took."""
    from perfed.data import FederationWriter

    rng, begun = np.random.default_rng(0), time.perf_counter()
    with FederationWriter(root, labels=[str(i) for i in range(CLASSES)]) as writer:
        for first in range(0, clients, 10_000):
            sizes = rng.integers(4, 17, min(10_000, clients - first))
            x = rng.standard_normal((int(sizes.sum()), FEATURES), np.float32)
            y = x[:, :CLASSES].argmax(1).astype(np.int32)
            for end, size in zip(np.cumsum(sizes), sizes, strict=True):
                held_out, rest = slice(end - size, end - size + 2), slice(end - size + 2, end)
                writer.add((x[rest], y[rest]), (x[held_out], y[held_out]))
    return time.perf_counter() - begun


# One case, in a process of its own.


def work(root: Path, case: Case, port: str = "", rank: str = "") -> None:
    """Says when the first round is done, and then how long so many rounds took as it is asked."""
    begun = time.perf_counter()
    import jax

    from perfed import MLP, MLR, Experiment, FedAvg, Method, PFedMe, Task, load
    from perfed.simulation import Streamed
    from perfed.simulation.hosts import Hosts

    if port:
        Hosts(("127.0.0.1", "127.0.0.1"), int(port), int(rank)).connect()
    held = _Held()
    data = load("stored", root=str(root))
    model = MLP(FEATURES, CLASSES, case.hidden, "elu") if case.hidden else MLR(FEATURES, CLASSES)
    method: Method = FedAvg(lr=0.01, tau=case.tau, batch=10)
    if case.method == "pfedme":
        method = PFedMe(eta=0.01, local_rounds=case.tau, inner_steps=5, inner_lr=0.01, batch=10)
    engine = Streamed(Experiment(data, Task(model), method, case.cohort))
    state = jax.block_until_ready(engine.advance(engine.init(), 1))
    print(json.dumps({"start_s": time.perf_counter() - begun}), flush=True)
    for line in sys.stdin:
        count = int(line)
        begun = time.perf_counter()
        state = jax.block_until_ready(engine.advance(state, count))
        spent = 1e3 * (time.perf_counter() - begun) / count
        print(json.dumps({"ms": spent, "mib": held.most / 1024}), flush=True)
    if port:
        os._exit(0)  # the usual end would wait for the other one


class _Held:
    """The most memory that this process has held so far, in KiB."""

    def __init__(self) -> None:
        self.most = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            self.most = max(self.most, int(status.split("RssAnon:")[1].split()[0]))
            time.sleep(0.02)


@dataclass
class Worker:
    """A case at work.

    Attributes:
        case: which.
        start_s: from the start of the program to the end of the first round.
        times: milliseconds a round, turn by turn.
        mib: the most memory it has held.
    """

    case: Case
    start_s: float
    times: list[float]
    mib: float
    process: "subprocess.Popen[str]"
    block: int = 1

    def take(self, rounds: int) -> float:
        """Milliseconds a round of so many."""
        told(self.process, rounds)
        answer = heard(self.process)
        self.mib = answer["mib"]
        return float(answer["ms"])


def heard(process: "subprocess.Popen[str]") -> Any:
    """What a worker says next."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a worker has ended; what it said is above")
    return json.loads(line)


def told(process: "subprocess.Popen[str]", rounds: int) -> None:
    """Ask a worker for so many rounds."""
    assert process.stdin is not None
    print(rounds, file=process.stdin, flush=True)


@contextmanager
def started(
    root: Path, case: Case, cores: Sequence[int] | None = None, place: Sequence[str] = ()
) -> Iterator["subprocess.Popen[str]"]:
    """A worker's process, on some cores; `place` is a port and a rank, if it is one of two."""
    arguments = ["--work", str(root), json.dumps(asdict(case)), *place]
    command = [sys.executable, "-m", "bench.scale", *arguments]
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)  # the child inherits it
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(0, before)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


@contextmanager
def at_work(root: Path, case: Case, cores: Sequence[int] | None = None) -> Iterator[Worker]:
    """Start a case; it is ready when its first round is done."""
    with started(root, case, cores) as process:
        worker = Worker(case, heard(process)["start_s"], [], 0.0, process)
        worker.block = max(2, round(1e3 * BLOCK_S / worker.take(2)))
        yield worker


def in_turns(roots: dict[int, Path], cases: Sequence[Case]) -> list[Worker]:
    """All cases, timed one after another, again and again."""
    with ExitStack() as stack:
        workers = [stack.enter_context(at_work(roots[case.clients], case)) for case in cases]
        for _ in range(TURNS):
            for worker in workers:
                worker.times.append(worker.take(worker.block))
    return workers


# Two processes.


def processes(root: Path, case: Case) -> tuple[list[float], list[float]]:
    """Milliseconds a round of one process with one core, and of two with one core each."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    with ExitStack() as stack:
        alone = stack.enter_context(at_work(root, case, [cores[0]]))
        port, both = free_port(), []
        for rank, core in enumerate(cores):
            place = [str(port), str(rank)]
            both.append(stack.enter_context(started(root, case, [core], place)))
        for process in both:
            heard(process)
        times: tuple[list[float], list[float]] = [], []
        for turn in range(TURNS + 1):
            one = alone.take(alone.block)
            for process in both:
                told(process, 2 * alone.block)
            two = max(heard(process)["ms"] for process in both)
            if turn:  # the first one warms up
                times[0].append(one)
                times[1].append(two)
    return times


# What comes of it.


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The power of x that y grows like, by least squares of the logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    digits = 0 if median(values) >= 100 else 1
    low, middle, high = (f"{v:.{digits}f}" for v in (min(values), median(values), max(values)))
    return f"{middle} ({low}-{high})"


def show(title: str, name: str, workers: Sequence[Worker], grown: Sequence[float]) -> None:
    """A table of cases, and how they grow."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for heading in (name, "start, s", "ms a round", "memory, MiB"):
        table.add_column(heading, justify="right")
    for worker, value in zip(workers, grown, strict=True):
        row = (f"{value:,}", f"{worker.start_s:.1f}", spread(worker.times), f"{worker.mib:.0f}")
        table.add_row(*row)
    console.print(table)
    if len(workers) == 1:
        return
    times, memory = [median(w.times) for w in workers], [w.mib for w in workers]
    console.print(
        f"time grows like {name}^{exponent(grown, times):.2f}, memory like "
        f"{name}^{exponent(grown, memory):.2f}; last to first: time {times[-1] / times[0]:.2f}x, "
        f"memory {memory[-1] / memory[0]:.2f}x"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--most", type=int, default=1_000_000, help="clients, at most (a million)")
    parser.add_argument("--only", choices=("federation", "cohort", "model", "processes"))
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        fields = json.loads(given.work[1])
        case = Case(**fields | {"hidden": tuple(fields["hidden"])})
        work(Path(given.work[0]), case, *given.work[2:])
        return
    wanted = [given.only] if given.only else ["federation", "cohort", "model", "processes"]
    sizes = [n for n in (10_000, 100_000, 1_000_000) if n <= given.most]
    if "federation" not in wanted:
        sizes = [n for n in sizes if n <= 100_000]
    with TemporaryDirectory(prefix="perfed-scale-") as folder:
        roots = {n: Path(folder) / str(n) for n in sizes}
        for n, root in roots.items():
            console.print(f"{n:,} clients written in {write(root, n):.0f} s", style="dim")
        measure(wanted, roots)
    console.print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}; "
        f"{TURNS} turns each; no evaluation"
    )


def measure(wanted: Sequence[str], roots: dict[int, Path]) -> None:
    """The tables that are wanted."""
    sizes = list(roots)
    base = Case(sizes[0], 1000)
    if "federation" in wanted:
        for kind in (base, replace(base, method="pfedme", hidden=())):
            cases = [replace(kind, clients=n) for n in sizes]
            title = f"{kind.method}, cohort 1,000, {cases[0].parameters:,} parameters"
            show(title, "clients", in_turns(roots, cases), sizes)
    if "cohort" in wanted:
        cohorts = [10, 100, 1000, 10_000]
        cases = [Case(sizes[-1], n) for n in cohorts]
        title = f"fedavg, {sizes[-1]:,} clients, {cases[0].parameters:,} parameters"
        show(title, "cohort", in_turns(roots, cases), cohorts)
    if "model" in wanted:
        layers = [(140,), (300, 260), (960, 960), (3100, 3100)]
        cases = [Case(sizes[0], 100, hidden, tau=1) for hidden in layers]
        title = f"fedavg, cohort 100 of {sizes[0]:,}, one local step"
        workers = [worker for case in cases for worker in in_turns(roots, [case])]
        show(title, "parameters", workers, [case.parameters for case in cases])
    if "processes" in wanted:
        for cohort in (200, 1000):
            alone, both = processes(roots[sizes[0]], Case(sizes[0], cohort, (80, 60), tau=20))
            ratios = [a / b for a, b in zip(alone, both, strict=True)]
            console.print(
                f"fedavg, 60-80-60-10, cohort {cohort:,}, tau 20, batch 10: one process with one "
                f"core {spread(alone)} ms a round, two with one core each {spread(both)} ms: "
                f"{median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
