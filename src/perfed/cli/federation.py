"""`perfed keys`, `serve`, `join` and `federate`: training between real machines."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from perfed.cli.arguments import AllowFactory, OptionalConfigFile, Overwrite, Settings
from perfed.cli.console import err, errors_shown, out, show_result, show_written
from perfed.core.errors import ConfigError

if TYPE_CHECKING:
    from perfed.federation.transport.keys import ServerKeys

ServerKeysDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The server's folder of `perfed keys`.")
]
ClientKeysDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="This client's folder of `perfed keys`.")
]
Listen = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="The address that clients connect to.")
]
OutDir = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="The folder of the run.")]
ResumeDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Resume the run in this folder, or start it there."),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Without encryption and keys, for tests only.")
]
ClientCount = Annotated[
    int | None, typer.Option(min=1, help="The number of clients; with --insecure only.")
]
_INSECURE = "[bold yellow]without encryption[/]"


def keys_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder for all keys.")],
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="HOST", help="A host name of the server; repeatable."),
    ] = None,
    clients: Annotated[
        list[str] | None,
        typer.Option("--client", metavar="NAME", help="A client that needs a key; repeatable."),
    ] = None,
) -> None:
    """Create the keys of a federation: an authority, the server's certificate, a key per client.

    Copy DIR/server to the server's machine and DIR/clients/NAME to that client's; keep ca.key.
    Run it again with other names to add them.
    """
    with errors_shown(), _flower_needed():
        from perfed.federation.transport.keys import make_keys

        for path in make_keys(folder, hosts or [], clients or []):
            out.print(f"written to {escape(str(path))}", soft_wrap=True)


def serve_command(
    config: OptionalConfigFile = None,
    keys: ServerKeysDir = None,
    listen: Listen = "0.0.0.0:9443",
    out_dir: OutDir = None,
    resume: ResumeDir = None,
    insecure: Insecure = False,
    clients: ClientCount = None,
    settings: Settings = None,
    overwrite: Overwrite = False,
) -> None:
    """Serve a federation: wait for its clients, train with them, and record the run.

    After an interruption, `--resume DIR` continues from the last round; CONFIG and --set can then
    change [federation] and [output].
    """
    with errors_shown(), _flower_needed():
        from perfed.federation.server.plan import PLAN
        from perfed.federation.server.serve import Server
        from perfed.federation.transport.keys import ServerKeys

        host, port = _address("--listen", listen)
        folder = resume or out_dir
        if folder is None or (resume is not None and out_dir is not None):
            raise ConfigError("give --out DIR for a new run, or --resume DIR to continue one")
        if insecure != (keys is None) or insecure != (clients is not None):
            raise ConfigError(
                "give --keys DIR (created with perfed keys), or --insecure and --clients N"
            )
        own = None if keys is None else ServerKeys.read(keys)
        if resume is not None and (resume / PLAN).exists():
            _change_plan(resume, config, settings or [])
        else:
            _create_plan(folder, config, settings or [], own, clients, overwrite)
        if insecure:
            err.print(f"{_INSECURE}, any client that reaches {escape(listen)} can join")
        _federate(Server(folder, host, port, own), folder)


def _create_plan(
    folder: Path,
    config: Path | None,
    settings: list[str],
    keys: "ServerKeys | None",
    clients: int | None,
    overwrite: bool,
) -> None:
    """Write the plan of a new run."""
    from perfed.federation.server.plan import FederationPlan
    from perfed.runs import run_dir
    from perfed.runs.config import Config

    if config is None:
        raise ConfigError("CONFIG: give the TOML file of the run")
    run_dir.check_vacant(folder, overwrite)
    names = None if keys is None else tuple(keys.clients)
    checked = Config.load(config, settings)
    FederationPlan.create(checked, folder, clients or len(names or ()), names)


def _change_plan(folder: Path, config: Path | None, settings: list[str]) -> None:
    """Apply the settings that can change when a run is resumed."""
    from perfed.federation.server.plan import FederationPlan

    if config is not None or settings:
        FederationPlan.read(folder).with_settings(config, settings).write(folder)


def join_command(
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="The server.")],
    data: Annotated[
        Path, typer.Option(metavar="FILE", help="This client's .csv, .parquet or .npz file.")
    ],
    client_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder for this client's state and model.")
    ],
    keys: ClientKeysDir = None,
    insecure: Insecure = False,
    name: Annotated[str, typer.Option(help="This client's name; with --insecure only.")] = "",
    patience: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0, help="Give up after this time without a connection."
        ),
    ] = None,
    allow_factory: AllowFactory = None,
) -> None:
    """Take part in a federation with your own data, which stay here.

    Runs until it is interrupted, and reconnects after failures.
    """
    with errors_shown(), _flower_needed():
        from perfed.federation.client.client_dir import ClientDir
        from perfed.federation.client.join import JoinedClient, JoinTimeoutError
        from perfed.federation.transport.keys import ClientKeys

        if insecure != (keys is None):
            raise ConfigError("give --keys DIR (from the server's operator), or --insecure")
        if insecure != bool(name):
            raise ConfigError("give --name with --insecure, and only then: a key has a name")
        own = None if keys is None else ClientKeys.read(keys)
        if insecure:
            err.print(f"{_INSECURE}, others can read what is sent to the server")
        factories = tuple(allow_factory or ())
        folder = ClientDir(client_dir)
        client = JoinedClient(server, data, folder, own, name, patience, factories)
        try:
            client.run(_log_with_time)
        except JoinTimeoutError as error:
            raise OSError(str(error)) from None


def federate_command(
    config: OptionalConfigFile = None,
    clients: Annotated[int, typer.Option(min=1, help="The number of clients.")] = 3,
    out_dir: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The folder of the run.")
    ] = Path("federated"),
    settings: Settings = None,
    overwrite: Overwrite = False,
) -> None:
    """Try a whole federation on this machine: real processes, keys and encryption, on loopback.

    Splits CONFIG's data among the clients, with a file for each; without CONFIG, a small run on the
    digits data.
    """
    with errors_shown(), _flower_needed():
        from perfed.federation.trial import Trial, trial_config
        from perfed.runs import run_dir

        run_dir.check_vacant(out_dir, overwrite)
        with err.status("splitting the data"):
            trial = Trial.create(trial_config(config, clients, settings or []), out_dir)
        _federate(trial, out_dir)


def _federate(federation: Any, folder: Path) -> None:
    """Run a federation; show its clients, and then the result."""
    from perfed.report.live_table import LiveTable

    with LiveTable(err, folder / "log.txt") as table:
        result = federation.run(table.log, table.progress, table.watch)
    show_result(result)
    show_written(folder)


# The packages of the extra.
_FLOWER_PACKAGES = ("flwr", "cryptography", "httpx", "starlette", "uvicorn")


@contextmanager
def _flower_needed() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _FLOWER_PACKAGES:
            raise
        raise ConfigError(
            'this needs Flower, which is not installed; pip install "perfed[flower]"'
        ) from None


def _address(option: str, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"{option} {text}: write it as HOST:PORT")
    return host.strip("[]"), int(port)


def _log_with_time(line: str) -> None:
    err.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {escape(line)}", soft_wrap=True)
