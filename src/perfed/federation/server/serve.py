"""`perfed serve`: a SuperLink, the clients' port before it, and the run."""

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
from perfed.federation.transport.processes import Program, ended_in_order, new_secret
from perfed.runs import run_dir
from perfed.simulation.hosts import free_port
from perfed.training import Progress, Result

_FLOWER: Final = "flower"


@final
@dataclass(frozen=True)
class Server:
    """Where a federation is served.

    Attributes:
        folder: the run's.
        host: the address that clients reach.
        port: its port.
        keys: the server's, and everyone's public ones; None: in plain, and anybody may take part.
        trial: whether its clients are children of this process, and end with it.
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
        """Serve until the run is over."""
        if (self.folder / run_dir.SUMMARY).exists():
            raise ConfigError(f"{self.folder}: this run is finished; its results are all there")
        known = None if self.keys is None else self.keys.clients
        with ended_in_order(), self._link() as (link, program, port):
            try:
                if known is not None:
                    register(link, known)
                with server_grid(link, lambda: program.ended is None) as grid:
                    return run_federation(grid, self.folder, known, log, on_progress, on_clients)
            except (LinkLostError, httpx.HTTPError) as error:
                log(self._how_to_go_on)
                raise LinkLostError(_why(program, error)) from None
            except (KeyboardInterrupt, SystemExit, OSError):
                log(self._how_to_go_on)
                raise
            finally:
                plan = FederationPlan.read(self.folder).with_wire(port.received, port.sent)
                plan.write(self.folder)

    @property
    def _how_to_go_on(self) -> str:
        if self.trial:
            return "begin again with: perfed federate --overwrite, and what else you gave it"
        same = "--listen and --keys" if self.keys else "--listen, --insecure and --clients"
        return f"go on with: perfed serve --resume {self.folder}, and the same {same}"

    @contextmanager
    def _link(self) -> Iterator[tuple[Link, Program, ClientGateway]]:
        """A SuperLink on this machine only, and the port that lets clients, and nothing else, in.

        The SuperLink's own port takes orders from whoever reaches it: to register keys, and to run
        code on all clients. So it is on the loopback interface.
        """
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
            clients_port = ClientGateway(
                self.host, self.port, upstream,
                certificate=None if keys is None else keys.certificate,
                key=None if keys is None else keys.key,
                authority=None if keys is None else keys.authority,
                admitted=() if keys is None else keys.clients.values(),
                limit=FederationPlan.read(self.folder).config().federation.message_limit,
            )  # fmt: skip
            stack.enter_context(clients_port)
            yield link, program, clients_port


def _why(program: Program, error: Exception) -> str:
    """What has become of a SuperLink that does not answer."""
    if program.ended is not None:
        why = f"the SuperLink has ended, by status {program.ended}"
    elif "401 Unauthorized" in str(error):
        why = "Flower has given the run up: this machine slept, or was too busy, for a minute"
    else:
        why = str(error).splitlines()[0]
    return f"{why} (the log of the SuperLink is {program.log})"
