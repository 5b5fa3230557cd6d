"""`perfed join`: a SuperNode with this client's data, kept up, and the answers to its messages."""

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
from perfed.federation.transport.processes import Program, ended_in_order, new_secret
from perfed.simulation.hosts import free_port

Log = Callable[[str], None]

_FLOWER: Final = "flower"
# After a crash a key is in use for a minute: whoever asks less often waits for longer than that.
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 15.0
# What a SuperNode that was let in says.
_LET_IN: Final = "SuperNode ID:"


class GivenUpError(RuntimeError):
    """The server could not be joined for as long as one wanted to wait."""


@final
@dataclass(frozen=True)
class JoinedClient:
    """One client of a federation.

    Attributes:
        server: the server's host and port.
        data: the client's own file.
        client_dir: its own folder.
        keys: its key, and the authority to know the server by; None: in plain.
        name: what it calls itself, where no key says who it is.
        patience: give up if the server has not let it in for so many seconds; None: never.
    """

    server: str
    data: Path
    client_dir: ClientDir
    keys: ClientKeys | None
    name: str = ""
    patience: float | None = None

    def __post_init__(self) -> None:
        host, colon, port = self.server.rpartition(":")
        if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigError(f"--server {self.server}: write it as HOST:PORT")
        if not self.data.is_file():
            raise ConfigError(f"--data {self.data}: there is no such file")

    def run(self, log: Log) -> None:
        """Take part until interrupted: start a SuperNode, and again whenever it ends."""
        flower = self.client_dir.path / _FLOWER
        flower.mkdir(exist_ok=True, mode=0o700)
        with ended_in_order():
            self._stay(flower, log)

    def _stay(self, flower: Path, log: Log) -> NoReturn:
        pause, outside = _FIRST_PAUSE, time.monotonic()
        while True:
            node = self._node(flower)
            let_in = False

            def going(node: Program = node.program, outside: float = outside) -> bool:
                nonlocal let_in, pause
                if not let_in and _LET_IN in node.said():
                    let_in, pause = True, _FIRST_PAUSE
                    log(f"joined {self.server}")
                if not let_in:
                    self._still_patient(outside, node.said())
                return node.ended is None

            try:
                serve_tasks(node.link, client_app, going, log)
            finally:
                node.program.stop()
            if let_in:
                outside = time.monotonic()
            why = _why(node.program.said())
            log(f"{'left' if let_in else 'not let in by'} {self.server}: {why}")
            self._still_patient(outside, node.program.said())
            log(f"trying again in {pause:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _still_patient(self, outside: float, said: str) -> None:
        if self.patience is not None and time.monotonic() - outside > self.patience:
            raise GivenUpError(
                f"{self.server} has not let us in for {self.patience:g} s: {_why(said)}"
            )

    def _node(self, flower: Path) -> "_Node":
        secret, port = new_secret(flower), free_port()
        own = {
            "client_dir": str(self.client_dir.path.absolute()),
            "data": str(self.data.absolute()),
            "name": self.name,
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
    """A SuperNode, and where it is asked for tasks."""

    program: Program
    link: Link


def _why(said: str) -> str:
    """What a SuperNode's last words mean."""
    known = {
        "CERTIFICATE_VERIFY_FAILED": "its certificate is not of the authority in our keys",
        "code: 2004": (
            "it does not know our key, or believes that it is still in use (for up to a minute "
            "after a crash)"
        ),
        "code: 2001": "it asks for a key; give the folder of one by --keys",
        "401 Unauthorized": (
            "it does not know us any more, and may have been begun anew; or our clock and its own "
            "differ (ours may be 5 s ahead)"
        ),
        "WRONG_VERSION_NUMBER": "it is served in plain; --insecure takes part in that",
        "handshake error": "the network, or a proxy on the way, does not let us through to it",
        "Connection refused": "nobody listens there",
        "Connection attempt failed": (
            "nobody answers there, or not in plain: if it has keys, give yours by --keys"
        ),
    }
    for mark, meaning in known.items():
        if mark in said:
            return meaning
    plain = re.sub(r"\x1b\[\d+m", "", said)
    lines = [line.strip() for line in plain.splitlines() if not line.startswith("INFO")]
    return next((line for line in reversed(lines) if line), "its SuperNode ended without a word")
