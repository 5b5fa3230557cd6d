"""The same FedAvg rounds by perfed and by what one would use instead, in turns, as ratios.

Every contestant runs in a process of its own, with Python and packages of its own (`bench/.venvs`,
made when missing), and waits while others are timed. Each has the better of its settings. All do 10
clients of 100 a round, 10 SGD steps of 40 examples each; none evaluates, logs or writes.
"""

import argparse
import json
import os
import platform
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VENVS = HERE.parent / ".venvs"
TORCH = "torch==2.13.0"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# Some compile for minutes on a busy machine; nothing takes longer than that.
PATIENCE = 900
BLOCK_MS = 500
PILOTS = 3

console = Console(width=150)


class PeerError(Exception):
    """A contestant that could not be installed, or did not do its work; says why."""


@dataclass(frozen=True)
class Setting:
    """One way to run a contestant: what it is called, and the environment that says so."""

    name: str
    environment: dict[str, str]


def threads(n: int, name: str = "", **more: str) -> Setting:
    """A setting with so many threads."""
    shown = ", ".join(part for part in (name, f"{n} thread{'s' * (n > 1)}") if part)
    return Setting(shown, {"BENCH_THREADS": str(n)} | more)


def each(*counts: int, name: str = "", **more: str) -> list[Setting]:
    """The same setting with several numbers of threads, which on one core are one."""
    return [threads(n, name, **more) for n in sorted(set(counts))]


@dataclass(frozen=True)
class Peer:
    """A contestant.

    Attributes:
        name: what it is called.
        worker: its module in this package.
        settings: what it may choose from.
        venv: the environment it runs in; none is perfed's own.
        packages: what pip installs there; versions of all else are in `constraints/`.
        bare: what is installed there first, without what it asks for.
        restless: whether it uses the processor while it waits; then it waits beside perfed only.
    """

    name: str
    worker: str
    settings: list[Setting]
    venv: str = ""
    packages: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    restless: bool = False

    @property
    def key(self) -> str:
        """What `--only` calls it."""
        return self.worker.removesuffix("_worker")

    @property
    def python(self) -> Path:
        """The interpreter it runs with."""
        return VENVS / self.venv / "bin" / "python" if self.venv else Path(sys.executable)


# What fluke-fl 0.8.1 asks for, less test tools and torchvision, of which not every build of PyTorch
# has one: the worker has a stand-in.
FLUKE = (
    "cerberus", "clearml", "datasets", "diskcache", "hydra-core", "matplotlib", "numpy",
    "omegaconf", "opacus", "pandas", "psutil", "pyyaml", "requests", "rich", "scikit-learn",
    "seaborn", "tensorboard", TORCH, "torchmetrics", "typer", "wandb",
)  # fmt: skip
PFL = ("pfl[pytorch]==0.6.0", TORCH)
PERFED = Peer("perfed", "perfed_worker", [Setting(f"{CORES} devices", {"PERFED_CACHE": ""})])
PEERS = [
    Peer("eager PyTorch", "eager_worker", each(1, CORES), "torch", (TORCH, "numpy")),
    Peer(
        "torch.func.vmap",
        "vmap_worker",
        [
            *each(1, CORES),
            threads(CORES, "compiled step", BENCH_MODE="step"),
            threads(CORES, "compiled round", BENCH_MODE="round"),
        ],
        "torch",
        (TORCH, "numpy"),
    ),
    Peer(
        "FedJAX",
        "fedjax_worker",
        [*each(1, CORES, name="jit"), threads(CORES, "pmap", BENCH_MODE="pmap")],
        "fedjax",
        ("fedjax==0.0.17", "jax==0.4.38"),
    ),
    Peer("pfl", "pfl_worker", each(1, CORES), "pfl", PFL),
    Peer(
        "pfl, distributed",
        "pfl_worker",
        [Setting(f"{CORES} processes", {"BENCH_THREADS": str(CORES), "BENCH_MODE": "processes"})],
        "pfl",
        PFL,
    ),
    Peer("fluke", "fluke_worker", each(1, CORES), "fluke", FLUKE, ("fluke-fl==0.8.1",)),
    Peer(
        "Flower simulation",
        "flower_worker",
        [Setting(f"{CORES} Ray actors", {"BENCH_THREADS": str(CORES)})],
        "flower",
        ("flwr[simulation]==1.41.0", TORCH),
        restless=True,
    ),
]


def called(command: list[str], what: str) -> None:
    """Run a command; its last words are the reason if it fails."""
    # The project's own pins are not the peers': FedJAX needs a JAX of two years ago.
    ours = {"PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise PeerError(f"{what}: {last_words(done.stderr)}")


def last_words(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def install(peer: Peer) -> None:
    """Make a peer's environment, unless it is there."""
    done = VENVS / peer.venv / ".installed"
    wanted = "\n".join((*peer.bare, *peer.packages, constraints(peer).read_text()))
    if done.exists() and done.read_text() == wanted:
        return
    VENVS.mkdir(exist_ok=True)
    (VENVS / ".gitignore").write_text("*\n")
    console.print(f"installing {peer.name} into {VENVS / peer.venv}", style="dim")
    # Filled from outside, as the Makefile does: not every Python comes with ensurepip.
    outside = os.environ.get("PYTHON", "python3")
    called([outside, "-m", "venv", "--without-pip", str(VENVS / peer.venv)], "venv")
    pip = [outside, "-m", "pip", "--python", str(peer.python), "install", "--quiet"]
    pip += ["--constraint", str(constraints(peer))]
    if peer.bare:
        called([*pip, "--no-deps", *peer.bare], "pip")
    called([*pip, *peer.packages], "pip")
    done.write_text(wanted)


def constraints(peer: Peer) -> Path:
    """The versions of all that is installed for a peer."""
    return HERE / "constraints" / f"{peer.venv}.txt"


@dataclass
class Worker:
    """A contestant's process: see `common` for what it says.

    Attributes:
        peer: whose it is.
        setting: how it runs.
        version: of what it runs.
        first: seconds of its first round.
        block: rounds that are timed together.
        times: milliseconds a round, turn by turn.
    """

    peer: Peer
    setting: Setting
    version: str = ""
    first: float = 0.0
    block: int = 1
    times: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Start the process, and wait until it is ready."""
        # An empty cache of compiled programs, so that first rounds compile.
        self._cache = TemporaryDirectory()
        fresh = {"TORCHINDUCTOR_CACHE_DIR": self._cache.name, "PYTHONPATH": str(ROOT)}
        self._errors = TemporaryFile("w+")  # noqa: SIM115  # closed by `stop`
        self._process = subprocess.Popen(
            [str(self.peer.python), "-m", f"bench.peers.{self.peer.worker}"],
            cwd=ROOT, env=os.environ | fresh | self.setting.environment, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            start_new_session=True,
        )  # fmt: skip
        ready = self._answer()
        self.version, self.first = ready["version"], ready["first_round_s"]

    def take(self, rounds: int) -> float:
        """Milliseconds a round of so many."""
        assert self._process.stdin is not None
        print(rounds, file=self._process.stdin)
        return float(self._answer()["ms_per_round"])

    def pilot(self, rounds: int | None) -> float:
        """A first measure, and with it how many rounds make a block."""
        self.block = rounds or max(3, round(BLOCK_MS / self.take(3)))
        return median(self.take(self.block) for _ in range(PILOTS))

    def stop(self) -> None:
        """End it, by asking if it listens."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._errors.close()
        self._cache.cleanup()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        # It answers a line at a time, so that none can wait in the buffer.
        heard, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        line = self._process.stdout.readline() if heard else ""
        if not line:
            self._errors.seek(0)
            reason = last_words(self._errors.read()) if heard else f"silent for {PATIENCE} s"
            raise PeerError(f"{self.setting.name}: {reason}")
        return json.loads(line)


def best(peer: Peer, rounds: int | None, stack: ExitStack) -> Worker:
    """The fastest of a peer's settings by a short measure, at work; the others are ended."""
    kept: tuple[float, Worker] | None = None
    failures = []
    for setting in peer.settings:
        worker = Worker(peer, setting)
        try:
            worker.start()
            found = worker.pilot(rounds)
        except PeerError as reason:
            console.print(f"{peer.name}, {reason}", style="dim")
            failures.append(str(reason))
            worker.stop()
            continue
        console.print(
            f"{peer.name}, {setting.name}: about {found:.1f} ms, first round {worker.first:.1f} s",
            style="dim",
        )
        slower = worker if kept and kept[0] <= found else kept[1] if kept else None
        if slower:
            slower.stop()
        if slower is not worker:
            kept = (found, worker)
    if kept is None:
        raise PeerError("; ".join(failures))
    stack.callback(kept[1].stop)
    return kept[1]


def race(perfed: Worker, workers: list[Worker], repeats: int) -> dict[str, str]:
    """Time all in turns, so that whatever the machine does meets all; why some dropped out."""
    failed: dict[str, str] = {}
    for _ in range(repeats):
        for worker in [perfed, *workers]:
            time.sleep(0.1)  # until the threads of the one before have stopped spinning
            try:
                worker.times.append(worker.take(worker.block))
            except PeerError as reason:
                if worker is perfed:
                    raise
                failed[worker.peer.name] = str(reason)
        workers = [worker for worker in workers if worker.peer.name not in failed]
    return failed


def spread(values: Iterable[float], unit: str = "") -> str:
    """Median and range."""
    values = list(values)
    digits = 0 if median(values) >= 100 else 1 if median(values) >= 5 else 2
    low, middle, high = (f"{v:.{digits}f}" for v in (min(values), median(values), max(values)))
    return f"{middle}{unit} ({low}-{high})"


def compete(peers: list[Peer], rounds: int | None, repeats: int) -> Table:
    """Measure all, and say how they compare with perfed."""
    failed: dict[str, str] = {}
    rows: list[tuple[Worker, str, str]] = []
    quiet = [peer for peer in peers if not peer.restless]
    restless = [[peer] for peer in peers if peer.restless]
    with ExitStack() as perfed_alive:
        perfed = best(PERFED, rounds, perfed_alive)
        for group in [quiet, *restless] if quiet or not restless else restless:
            perfed.times.clear()
            with ExitStack() as alive:
                workers = []
                for peer in group:
                    try:
                        install(peer)
                        workers.append(best(peer, rounds, alive))
                    except PeerError as reason:
                        failed[peer.name] = str(reason)
                failed |= race(perfed, workers, repeats)
            # Perfed's own time is the one among quiet neighbors; ratios are those of each race.
            rows = rows or [(perfed, spread(perfed.times), "1")]
            for worker in workers:
                if worker.peer.name not in failed:
                    ratios = [t / p for t, p in zip(worker.times, perfed.times, strict=True)]
                    rows.append((worker, spread(worker.times), spread(ratios, "x")))
    table = Table(box=box.SIMPLE_HEAD, title="FedAvg, 784-80-60-10 ELU, 10 of 100 clients, tau 10")
    table.title_justify = "left"
    for heading in ("contestant", "version", "setting", "first round, s", "ms a round", "ratio"):
        table.add_column(heading, justify="right" if heading[0] in "fmr" else "left")
    for worker, times, ratio in rows:
        setting, first = worker.setting.name, f"{worker.first:.1f}"
        table.add_row(worker.peer.name, worker.version, setting, first, times, ratio)
    for name, why in failed.items():
        table.add_row(name, "", f"failed: {why}", "", "", "")
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--rounds", type=int, help="rounds timed together (half a second's)")
    parser.add_argument("--repeats", type=int, default=7, help="turns each takes (7)")
    parser.add_argument("--only", help=f"some of: {', '.join(dict.fromkeys(p.key for p in PEERS))}")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else [peer.key for peer in PEERS]
    if unknown := set(wanted) - {peer.key for peer in PEERS}:
        parser.error(f"--only: no {', '.join(sorted(unknown))}")
    peers = [peer for peer in PEERS if peer.key in wanted]
    console.print(compete(peers, args.rounds, args.repeats))
    console.print(
        f"{CORES} cores, {platform.machine()}, Python {platform.python_version()}; "
        f"{args.repeats} turns each; no evaluation"
    )


if __name__ == "__main__":
    main()
