"""`perfed serve`: a SuperLink, the gateway in front of it, and the run."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import httpx

from perfed.core.errors import ConfigError
from perfed.federation.server.clients import ClientManager, Log
from perfed.federation.server.plan import FederationPlan
from perfed.federation.server.session import run_federation
from perfed.federation.transport.flower_runtime import Link, register, server_grid
from perfed.federation.transport.gateway import ClientGateway
from perfed.federation.transport.keys import ServerKeys
from perfed.federation.transport.messenger import LinkLostError
from perfed.federation.transport.processes import Program, new_secret, sigterm_as_exception
from perfed.runs import run_dir
from perfed.simulation.hosts import free_port
from perfed.training import Progress, Result

_FLOWER: Final = "flower"


@final
@dataclass(frozen=True)
class Server:
    """The server of a federation.

    Attributes:
        folder: the run's.
        host: the address that clients connect to.
        port: its port.
        keys: the server's, and the clients' public ones; None: no encryption, and any client may
            join.
        trial: whether its clients are child processes, which end with it.
    """

    folder: Path
    host: str
    port: int
    keys: ServerKeys | None
    trial: bool = False

    def run(
        self,
        log: Log,
        on_progress: Callable[[Progress], None] | None = None,
        on_clients: Callable[[ClientManager], None] = lambda _: None,
    ) -> Result:
        """Serve until the run is finished."""
        if (self.folder / run_dir.SUMMARY).exists():
            raise ConfigError(f"{self.folder}: this run is already finished")
        known = None if self.keys is None else self.keys.clients
        with sigterm_as_exception(), self._superlink() as (link, program, gateway):
            try:
                if known is not None:
                    register(link, known)
                with server_grid(link, lambda: program.ended is None) as grid:
                    return run_federation(grid, self.folder, known, log, on_progress, on_clients)
            except (LinkLostError, httpx.HTTPError) as error:
                log(self._resume_hint)
                raise LinkLostError(_cause(program, error)) from None
            except (KeyboardInterrupt, SystemExit, OSError):
                log(self._resume_hint)
                raise
            finally:
                plan = FederationPlan.read(self.folder).with_wire(gateway.received, gateway.sent)
                plan.write(self.folder)

    @property
    def _resume_hint(self) -> str:
        if self.trial:
            return "start again with: perfed federate --overwrite, and the same other options"
        same = "--listen and --keys" if self.keys else "--listen, --insecure and --clients"
        return f"go on with: perfed serve --resume {self.folder}, and the same {same}"

    @contextmanager
    def _superlink(self) -> Iterator[tuple[Link, Program, ClientGateway]]:
        """A SuperLink on the loopback interface, and the gateway that clients connect to."""
        flower = self.folder / _FLOWER
        flower.mkdir(parents=True, exist_ok=True, mode=0o700)
        secret = new_secret(flower)
        keys, port = self.keys, free_port()
        arguments = [
            "--host", "127.0.0.1", "--port", str(port), "--isolation", "process",
            "--database", str((flower / "state.db").absolute()),
            "--superexec-auth-secret-file", str(secret.absolute()),
            "--disable-runtime-dependency-installation",
        ]  # fmt: skip
        if keys is None:
            arguments.append("--insecure")
        else:
            arguments += [
                "--enable-supernode-auth",
                "--ssl-certfile", str(keys.certificate), "--ssl-keyfile", str(keys.key),
                "--ssl-ca-certfile", str(keys.authority),
            ]  # fmt: skip
        with ExitStack() as stack:
            program = Program("flower-superlink", arguments, flower / "home", flower / "log.txt")
            stack.callback(program.stop)
            program.wait_for_port(port)
            link = Link(port, None if keys is None else keys.authority, secret.read_bytes())
            upstream = f"{'http' if keys is None else 'https'}://127.0.0.1:{port}"
            limit = FederationPlan.read(self.folder).config().federation.message_limit
            gateway = ClientGateway(self.host, self.port, upstream, keys, limit)
            yield link, program, stack.enter_context(gateway)


def _cause(program: Program, error: Exception) -> str:
    """Why a SuperLink does not respond."""
    if program.ended is not None:
        cause = f"the SuperLink has ended with status {program.ended}"
    elif "401 Unauthorized" in str(error):
        cause = "Flower has ended the run: this machine slept, or was too busy, for a minute"
    else:
        cause = str(error).splitlines()[0]
    return f"{cause} (the log of the SuperLink is {program.log})"
