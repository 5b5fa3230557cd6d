"""Real federations for tests: processes on loopback, each ended by its pid."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tomli_w
from safetensors.numpy import load_file

from perfed.federation.server.plan import PLAN
from perfed.federation.transport.keys import make_keys
from perfed.runs import Config
from perfed.runs.saved_model import named_leaves
from perfed.simulation.hosts import free_port

NAMES = ("client-0", "client-1", "client-2")


def write_clients(folder: Path, shape: tuple[int, ...] = (6,), examples: int = 30) -> None:
    """Three clients' files, of three classes that each has in another mixture."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    centers = rng.normal(size=(3, *shape))
    for i, name in enumerate(NAMES):
        y = rng.choice(3, size=examples + 10 * i, p=np.roll([0.7, 0.2, 0.1], i))
        x = (centers[y] + rng.normal(size=(len(y), *shape)) + 0.5 * i).astype(np.float32)
        cut = len(y) - 10
        np.savez(folder / f"{name}.npz", x=x[:cut], y=y[:cut], x_test=x[cut:], y_test=y[cut:])


def settings(data: Path, method: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A configuration of a run with all three clients."""
    return {
        "rounds": 3,
        "cohort": 3,
        "eval_every": 3,
        "data": {"source": "folder", "root": str(data), "labels": ["0", "1", "2"]},
        "model": {"name": "mlr"},
        "method": method,
    } | more


@dataclass
class Federation:
    """A federation in a folder: its files, keys and processes."""

    path: Path
    values: dict[str, Any]
    plain: bool = False
    port: int = field(default_factory=free_port)
    server: subprocess.Popen[bytes] | None = None
    members: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.path / "run"

    @property
    def log(self) -> str:
        """What the server's log says."""
        path = self.run / "log.txt"
        return path.read_text() if path.exists() else ""

    def log_of(self, name: str) -> str:
        """What a client says."""
        return (self.path / f"{name}.log").read_text()

    def home(self, name: str) -> Path:
        """A client's folder of this experiment."""
        experiment = json.loads((self.run / PLAN).read_text())["experiment"]
        return self.path / "homes" / name / str(experiment)

    def serve(self, *extra: str, resume: bool = False) -> None:
        """Start the server."""
        (self.path / "config.toml").write_text(tomli_w.dumps(self.values))
        how = ["--resume", str(self.run)] if resume else ["--out", str(self.run)]
        safe = ["--insecure", "--clients", "3"]
        if not self.plain:
            safe = ["--keys", str(self.path / "keys" / "server")]
        config = [] if resume else [str(self.path / "config.toml")]
        self.server = self._started(
            "server", "serve", *config, *how, *safe, "--listen", f"127.0.0.1:{self.port}", *extra
        )

    def join(self, name: str, *extra: str, port: int | None = None) -> None:
        """Start a client."""
        safe = ["--insecure", "--name", name]
        if not self.plain:
            safe = ["--keys", str(self.path / "keys" / "clients" / name)]
        self.members[name] = self._started(
            name, "join", "--server", f"127.0.0.1:{port or self.port}",
            "--data", str(self.path / "data" / f"{name}.npz"),
            "--client-dir", str(self.path / "homes" / name), *safe, *extra,
        )  # fmt: skip

    def _started(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        return started(
            [sys.executable, "-P", "-m", "perfed", *arguments], self.path / f"{name}.log"
        )

    def wait_for(self, said: str, seconds: float = 240.0, who: str | None = None) -> None:
        """Until the server's log (or a client's) says this."""
        path = self.run / "log.txt" if who is None else self.path / f"{who}.log"
        wait(lambda: path.exists() and said in path.read_text(), seconds, f"{path}: {said!r}")

    def finish(self, seconds: float = 400.0) -> None:
        """Until the server is done, successfully."""
        assert self.server is not None
        assert self.server.wait(seconds) == 0, (self.path / "server.log").read_text()[-3000:]

    def model(self) -> dict[str, np.ndarray]:
        """The global model that the run ended with."""
        return params(self.run / "model.safetensors")

    def own_model(self, name: str) -> dict[str, np.ndarray]:
        """A client's own model, from its own disk."""
        return params(self.home(name) / "model.safetensors")

    def summary(self) -> dict[str, Any]:
        """The run's summary."""
        found: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        return found


def started(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A process of its own session, whose words go to a log."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PERFED_DEVICES": "1"},
            start_new_session=True,
        )


@contextmanager
def federation(
    path: Path,
    method: dict[str, Any],
    plain: bool = False,
    shape: tuple[int, ...] = (6,),
    **more: Any,
) -> Iterator[Federation]:
    """Three clients' files and keys; whatever is started is stopped at the end."""
    write_clients(path / "data", shape)
    if not plain:
        make_keys(path / "keys", ["127.0.0.1"], NAMES)
    made = Federation(path, settings(path / "data", method, **more), plain)
    try:
        yield made
    finally:
        for process in [made.server, *made.members.values()]:
            if process is not None:
                stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children."""
    try:
        family = [psutil.Process(process.pid), *children(process.pid)]
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for member in family:
        try:
            member.wait(15)
        except psutil.TimeoutExpired:
            member.kill()


def children(pid: int) -> list[psutil.Process]:
    """All processes that a process has started, and they, and so on."""
    found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    return found


def kill(process: subprocess.Popen[bytes]) -> None:
    """As if the power had failed: the process and all its children, at once."""
    for child in children(process.pid):
        child.send_signal(signal.SIGKILL)
    process.kill()
    process.wait()


def wait(until: Callable[[], bool], seconds: float, what: str) -> None:
    """Until something is so."""
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def params(path: Path) -> dict[str, np.ndarray]:
    """A model file's parameters."""
    return {name: v for name, v in load_file(path).items() if name.startswith("params.")}


def simulated(values: dict[str, Any]) -> Any:
    """The same run, simulated."""
    config = Config.checked(values)
    return config.train(config.build())


def distance(found: dict[str, np.ndarray], due: Any) -> float:
    """How far a model is from what it should be, relative to its length."""
    named = isinstance(due, dict) and all(str(name).startswith("params.") for name in due)
    wanted = due if named else named_leaves(due, "params.")
    assert set(found) == set(wanted)
    off = sum(float(((found[k] - wanted[k]) ** 2).sum()) for k in wanted)
    return float(np.sqrt(off / sum(float((v**2).sum()) for v in wanted.values())))
