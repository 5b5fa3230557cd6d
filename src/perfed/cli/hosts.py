"""Commands that several processes run together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from perfed.cli.console import arguments, err, errors_shown, out
from perfed.core.errors import ConfigError


@contextmanager
def on_hosts(names: str | None, rank: int | None, check: Callable[[], None]) -> Iterator[None]:
    """Be one of the processes that compute a run, or start as many of them here.

    Args:
        names: the value of --hosts.
        rank: the value of --rank.
        check: raises for what would fail in all of them, before they are started.
    """
    if names is None:
        if rank is not None:
            raise ConfigError("--rank: is one of --hosts, which are not given")
        yield
        return
    import jax

    from perfed.simulation import hosts

    if names.isdigit():
        check()
        raise typer.Exit(hosts.start_processes(int(names), arguments()))
    hosts.exit_with_parent()
    hosts.Hosts.read(names, rank).connect()
    # One of them speaks for all.
    out.quiet = err.quiet = not hosts.is_first()
    with hosts.exit_together(), errors_shown():
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ConnectionError(
                f"the processes have lost each other, or one has failed: {reason}"
            ) from None
