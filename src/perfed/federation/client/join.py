"""`perfed join`: a SuperNode with this client's data, restarted when it ends."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, final

from perfed.core.errors import ConfigError
from perfed.federation.client.client_dir import ClientDir
from perfed.federation.client.flower_app import client_app
from perfed.federation.transport.flower_runtime import Link, serve_tasks
from perfed.federation.transport.keys import ClientKeys
from perfed.federation.transport.processes import Program, new_secret, sigterm_as_exception
from perfed.simulation.hosts import free_port

Log = Callable[[str], None]

_FLOWER: Final = "flower"
# Seconds before a retry. After a crash Flower regards a key as in use for a minute.
_FIRST_PAUSE, _MAX_PAUSE = 5.0, 15.0
# A SuperNode prints this when it has joined.
_JOINED: Final = "SuperNode ID:"


class JoinTimeoutError(RuntimeError):
    """The server could not be joined in time."""


@final
@dataclass(frozen=True)
class JoinedClient:
    """One client of a federation.

    Attributes:
        server: the server's host and port.
        data: the client's own file.
        client_dir: its own folder.
        keys: its key, and the certificate to verify the server; None: no encryption.
        name: its name where there are no keys.
        patience: give up after so many seconds without a connection; None: never.
        factories: functions that the server may name as what makes the model; no other is run.
    """

    server: str
    data: Path
    client_dir: ClientDir
    keys: ClientKeys | None
    name: str = ""
    patience: float | None = None
    factories: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        host, colon, port = self.server.rpartition(":")
        if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigError(f"--server {self.server}: write it as HOST:PORT")
        if not self.data.is_file():
            raise ConfigError(f"--data {self.data}: there is no such file")

    def run(self, log: Log) -> None:
        """Take part until interrupted: start a SuperNode, and restart it when it ends."""
        flower = self.client_dir.path / _FLOWER
        flower.mkdir(exist_ok=True, mode=0o700)
        with sigterm_as_exception():
            self._keep_joined(flower, log)

    def _keep_joined(self, flower: Path, log: Log) -> NoReturn:
        pause, lost = _FIRST_PAUSE, time.monotonic()
        while True:
            node = self._node(flower)
            joined = False

            def running(node: Program = node.program, lost: float = lost) -> bool:
                nonlocal joined, pause
                if not joined and _JOINED in node.output():
                    joined, pause = True, _FIRST_PAUSE
                    log(f"joined {self.server}")
                if not joined:
                    self._check_patience(lost, node.output())
                return node.ended is None

            try:
                serve_tasks(node.link, client_app, running, log)
            finally:
                node.program.stop()
            if joined:
                lost = time.monotonic()
            output = node.program.output()
            event = "disconnected from" if joined else "cannot join"
            log(f"{event} {self.server}: {_cause(output)}")
            self._check_patience(lost, output)
            log(f"retrying in {pause:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)

    def _check_patience(self, lost: float, output: str) -> None:
        if self.patience is not None and time.monotonic() - lost > self.patience:
            raise JoinTimeoutError(
                f"cannot join {self.server} for {self.patience:g} s: {_cause(output)}"
            )

    def _node(self, flower: Path) -> "_Node":
        secret, port = new_secret(flower), free_port()
        own = {
            "client_dir": str(self.client_dir.path.absolute()),
            "data": str(self.data.absolute()),
            "name": self.name,
            "factories": " ".join(self.factories),
        }
        arguments = [
            "--superlink", self.server, "--host", "127.0.0.1", "--port", str(port),
            "--isolation", "process", "--superexec-auth-secret-file", str(secret.absolute()),
            "--node-config", " ".join(f"{key}={json.dumps(value)}" for key, value in own.items()),
        ]  # fmt: skip
        if self.keys is None:
            arguments.append("--insecure")
        else:
            arguments += [
                "--root-certificates", str(self.keys.authority),
                "--auth-supernode-private-key", str(self.keys.key),
            ]  # fmt: skip
        program = Program("flower-supernode", arguments, flower / "home", flower / "log.txt")
        return _Node(program, Link(port, None, secret.read_bytes()))


@final
@dataclass(frozen=True)
class _Node:
    """A SuperNode, and where to acquire its tasks."""

    program: Program
    link: Link


def _cause(output: str) -> str:
    """Why a SuperNode ended, from its output."""
    known = {
        "CERTIFICATE_VERIFY_FAILED": "its certificate is not of the authority in --keys",
        "code: 2004": (
            "it does not know this client's key, or regards it as still in use (for up to a minute "
            "after a crash)"
        ),
        "code: 2001": "it requires a key; give its folder with --keys",
        "401 Unauthorized": (
            "it no longer knows this client, because it was started anew; or this machine's clock "
            "is more than 5 s ahead of its own"
        ),
        "WRONG_VERSION_NUMBER": "it runs without encryption; join it with --insecure",
        "handshake error": "the network or a proxy blocks the connection",
        "Connection refused": "no server listens there",
        "Connection attempt failed": (
            "no server responds there, or it requires encryption: then give --keys"
        ),
    }
    for mark, meaning in known.items():
        if mark in output:
            return meaning
    plain = re.sub(r"\x1b\[\d+m", "", output)
    lines = [line.strip() for line in plain.splitlines() if not line.startswith("INFO")]
    return next((line for line in reversed(lines) if line), "its SuperNode ended without a message")
