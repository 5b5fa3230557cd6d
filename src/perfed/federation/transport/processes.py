"""Programs, Flower's and ours, as children that end when this process ends, however it ends."""

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

# What runs in a child around the program itself: it ends when this process has ended, even by
# SIGKILL, because the pipe that it reads from is closed then. It must import nothing of ours.
_KEEPER: Final = """
import os, signal, sys, threading, traceback
from importlib.metadata import entry_points

def end_with_parent():
    while os.read(0, 1):  # not by sys.stdin, whose lock would be in the way when Python ends
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
# Now, and not when all threads have ended: a SuperNode that has lost its server for good, as after
# a handshake without an answer, would stay for ever because of its own port.
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""

# Nothing is told to anybody, and nothing is installed while a federation runs.
_QUIET: Final = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


class TerminatedError(SystemExit):
    """SIGTERM has come."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)

    def __str__(self) -> str:
        return "by SIGTERM"


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Within this, SIGTERM is raised as an exception, so that programs are stopped on the way out.

    They would end by themselves, but later than this process: whoever starts it anew at once would
    still find them there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are none of its business
        return

    def end(*_: Any) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        raise TerminatedError

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@final
class Program:
    """A program, running.

    Args:
        name: the program, as its package calls it.
        arguments: what it is given.
        home: the folder that Flower may call its own.
        log: where all it says goes.
        environment: what it finds there beside what this process has.
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
        self._from = self._log.tell()
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-c", _KEEPER, name, *arguments],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | _QUIET | {"FLWR_HOME": str(home.absolute())} | dict(environment or {}),
            # Ctrl-C is for this process, which then ends its children in good order.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._child.pid

    @property
    def ended(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._child.poll()

    def said(self) -> str:
        """What it has said, as far as it is in its log."""
        with self.log.open("rb") as file:
            file.seek(self._from)
            return file.read().decode(errors="replace")

    def wait_for_port(self, port: int, seconds: float = 60.0) -> None:
        """Until it listens there; an `OSError` with its last words if it does not.

        No error of a setting: this machine may be busy, or somebody else may have taken the port.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.ended is None:
            with socket.socket() as probe:
                probe.settimeout(1.0)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.1)
        last = "\n".join(self.said().strip().splitlines()[-5:])
        raise OSError(f"{self.name} did not start (its log is {self.log}):\n{last}")

    def end(self) -> None:
        """Tell it to end, without waiting for that."""
        if self.ended is None:
            self._child.send_signal(signal.SIGTERM)

    def stop(self, seconds: float = 15.0) -> None:
        """End it in good order, or else at once."""
        if self.ended is None:
            self.end()
            try:
                self._child.wait(seconds)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        if self._child.stdin is not None:
            self._child.stdin.close()
        self._log.close()


def new_secret(folder: Path) -> Path:
    """A fresh secret in a file that nobody else can read."""
    path = folder / "secret"
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(secrets.token_bytes(32))
    return path
