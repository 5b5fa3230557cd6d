"""Programs as child processes, which end when this process ends, however it ends."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NoReturn, final

# A child runs the program in this wrapper, which ends it when this process has ended, even by
# SIGKILL, because then the pipe that it reads from is closed. It imports nothing of perfed.
_WRAPPER: Final = """
import os, signal, sys, threading, traceback
from importlib.metadata import entry_points

def end_with_parent():
    while os.read(0, 1):  # not by sys.stdin, whose lock blocks the end of Python
        pass
    threading.Timer(10, os._exit, [1]).start()
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
sys.argv = sys.argv[1:]
(program,) = entry_points(group="console_scripts", name=sys.argv[0])
status = 1
try:
    status = program.load()() or 0
except SystemExit as end:
    status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
except BaseException:
    traceback.print_exc()
# Without waiting for other threads: those of a SuperNode that lost its server may never end.
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""

# Flower sends no telemetry and installs nothing.
_FLOWER_ENVIRONMENT: Final = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


class TerminatedError(SystemExit):
    """SIGTERM was received."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)

    def __str__(self) -> str:
        return "SIGTERM"


@contextmanager
def sigterm_as_exception() -> Iterator[None]:
    """Within this, SIGTERM raises an exception, so that programs are stopped before the end.

    They would end by themselves, but only after this process: a restart could meet them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread handles signals
        return

    def end(*_: Any) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise TerminatedError

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@final
class Program:
    """A running program.

    Args:
        name: the name of its console script.
        arguments: its arguments.
        home: Flower's folder (`FLWR_HOME`).
        log: the file for its output.
        environment: variables besides those of this process.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        home: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.log = name, log
        home.mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] = log.open("ab")
        self._log_start = self._log.tell()
        own = _FLOWER_ENVIRONMENT | {"FLWR_HOME": str(home.absolute())}
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-c", _WRAPPER, name, *arguments],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | own | dict(environment or {}),
            # Ctrl-C goes to this process only, which then stops its children.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its process identifier."""
        return self._child.pid

    @property
    def ended(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._child.poll()

    def output(self) -> str:
        """Its output so far."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def wait_for_port(self, port: int, seconds: float = 60.0) -> None:
        """Wait until it listens there; if it does not, an `OSError` with the end of its output.

        Not a `ConfigError`: the machine may be busy, or another program may have the port.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.ended is None:
            with socket.socket() as probe:
                probe.settimeout(1.0)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.1)
        last = "\n".join(self.output().strip().splitlines()[-5:])
        raise OSError(f"{self.name} did not start (its log is {self.log}):\n{last}")

    def terminate(self) -> None:
        """Send it SIGTERM, without waiting for its end."""
        if self.ended is None:
            self._child.send_signal(signal.SIGTERM)

    def stop(self, seconds: float = 15.0) -> None:
        """Terminate it, or kill it if that takes too long."""
        if self.ended is None:
            self.terminate()
            try:
                self._child.wait(seconds)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        if self._child.stdin is not None:
            self._child.stdin.close()
        self._log.close()


def new_secret(folder: Path) -> Path:
    """A new secret in a file that only its owner can read."""
    path = folder / "secret"
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(secrets.token_bytes(32))
    return path
