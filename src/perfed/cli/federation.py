"""`perfed keys`, `serve`, `join` and `federate`: training between real machines."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from perfed.cli.arguments import OptionalConfigFile, Overwrite, Settings
from perfed.cli.console import err, errors_shown, out, show_result, show_written
from perfed.core.errors import ConfigError


def keys_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where all keys go.")],
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="HOST", help="What clients call the server; repeatable."),
    ] = None,
    clients: Annotated[
        list[str] | None,
        typer.Option("--client", metavar="NAME", help="A client to make a key for; repeatable."),
    ] = None,
) -> None:
    """Make the keys of a federation: an authority, the server's certificate, a key a client.

    DIR/server goes to the server's machine, DIR/clients/NAME to that client's; ca.key goes nowhere.
    Called again with other names, it adds them.
    """
    with errors_shown(), _flower_needed():
        from perfed.federation.transport.keys import make_keys

        for path in make_keys(folder, hosts or [], clients or []):
            out.print(f"written to {escape(str(path))}", soft_wrap=True)


def serve_command(
    config: OptionalConfigFile = None,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The server's folder of what `perfed keys` made."),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where clients reach this machine.")
    ] = "0.0.0.0:9443",
    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The folder to record the run in.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Go on with the run in this folder, or begin it there."),
    ] = None,
    plain: Annotated[
        bool,
        typer.Option("--insecure", help="Without encryption and keys: for trials in a safe place."),
    ] = False,
    clients: Annotated[
        int | None, typer.Option(min=1, help="How many clients there are; with --insecure only.")
    ] = None,
    settings: Settings = None,
    overwrite: Overwrite = False,
) -> None:
    """Serve a federation: wait for its clients, train with them, and record the run.

    After a crash of any kind, `--resume DIR` goes on from the last round; with CONFIG or --set, on
    the terms of their [federation] and [output].
    """
    with errors_shown(), _flower_needed():
        from perfed.federation.server.plan import PLAN, FederationPlan
        from perfed.federation.server.serve import Server
        from perfed.federation.transport.keys import ServerKeys
        from perfed.runs import run_dir
        from perfed.runs.config import Config

        host, port = _address("--listen", listen)
        folder = resume or out_dir
        if folder is None or (resume is not None and out_dir is not None):
            raise ConfigError("give --out DIR for a new run, or --resume DIR to go on with one")
        if plain != (keys is None) or plain != (clients is not None):
            raise ConfigError(
                "give --keys DIR (perfed keys makes them), or --insecure and --clients N"
            )
        own = None if keys is None else ServerKeys.read(keys)
        if resume is None or not (resume / PLAN).exists():
            if config is None:
                raise ConfigError("CONFIG: name the TOML file of the run")
            run_dir.check_vacant(folder, overwrite)
            read = Config.load(config, settings or [])
            names = None if own is None else tuple(own.clients)
            FederationPlan.begun(read, folder, clients or len(names or ()), names)
        elif config is not None or settings:
            FederationPlan.read(folder).on_terms(config, settings or []).write(folder)
        if plain:
            err.print(
                "[bold yellow]in plain[/] messages are not encrypted, and anybody who reaches "
                f"{escape(listen)} can take part",
                soft_wrap=True,
            )
        _federate(Server(folder, host, port, own), folder)


def join_command(
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="The server.")],
    data: Annotated[
        Path, typer.Option(metavar="FILE", help="This client's .csv, .parquet or .npz file.")
    ],
    client_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="What this client keeps, and its own model.")
    ],
    keys: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="This client's folder of what `perfed keys` made."),
    ] = None,
    plain: Annotated[bool, typer.Option("--insecure", help="Without encryption and key.")] = False,
    name: Annotated[
        str, typer.Option(help="What this client is called; with --insecure only.")
    ] = "",
    patience: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Give up if not let in; default: never."),
    ] = None,
) -> None:
    """Take part in a federation with one's own data, which stay here.

    Stays until it is interrupted: it reconnects, and starts anew what ends.
    """
    with errors_shown(), _flower_needed():
        from perfed.federation.client.client_dir import ClientDir
        from perfed.federation.client.join import GivenUpError, JoinedClient
        from perfed.federation.transport.keys import ClientKeys

        if plain != (keys is None):
            raise ConfigError("give --keys DIR (the server's operator has them), or --insecure")
        if plain != bool(name):
            raise ConfigError("--name goes with --insecure: otherwise the key says who this is")
        own = None if keys is None else ClientKeys.read(keys)
        if plain:
            err.print("[bold yellow]in plain[/] what is sent to the server is not encrypted")
        try:
            JoinedClient(server, data, ClientDir(client_dir), own, name, patience).run(
                _log_with_time
            )
        except GivenUpError as error:
            raise OSError(str(error)) from None


def federate_command(
    config: OptionalConfigFile = None,
    clients: Annotated[int, typer.Option(min=1, help="How many clients.")] = 3,
    out_dir: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The folder to record the run in.")
    ] = Path("federated"),
    settings: Settings = None,
    overwrite: Overwrite = False,
) -> None:
    """Try a whole federation on this machine: real processes, keys and encryption, on loopback.

    Deals CONFIG's data out to so many clients, each with a file of its own; without CONFIG, a small
    run on the embedded digits.
    """
    with errors_shown(), _flower_needed():
        from perfed.federation.trial import Trial, trial_config
        from perfed.runs import run_dir

        run_dir.check_vacant(out_dir, overwrite)
        with err.status("dealing out the data"):
            trial = Trial.prepared(trial_config(config, clients, settings or []), out_dir)
        _federate(trial, out_dir)


def _federate(federation: Any, folder: Path) -> None:
    """Run a federation, show who does what, and then what came of it."""
    from perfed.report.live_table import LiveTable

    with LiveTable(err, folder / "log.txt") as table:
        result = federation.run(table.log, table.progress, table.watch)
    show_result(result)
    show_written(folder)


# The extra's packages.
_OF_FLOWER = ("flwr", "cryptography", "httpx", "starlette", "uvicorn")


@contextmanager
def _flower_needed() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _OF_FLOWER:
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
