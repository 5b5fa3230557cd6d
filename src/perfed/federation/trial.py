"""`perfed federate`: a whole federation on this machine, with the commands of production."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import tomli_w

from perfed.core.errors import ConfigError
from perfed.data import SOURCES, Federation, data_settings
from perfed.federation.protocol.config_checks import check_config
from perfed.federation.server.clients import ClientManager, Log
from perfed.federation.server.plan import PLAN, FederationPlan
from perfed.federation.server.serve import Server
from perfed.federation.transport.keys import ServerKeys, make_keys
from perfed.federation.transport.processes import Program
from perfed.runs.config import Config, overridden, read_toml, without_none
from perfed.runs.factories import factories_of
from perfed.runs.files import write_whole
from perfed.simulation.hosts import free_port
from perfed.training import Progress, Result

TRIAL: Final = "trial"


@final
@dataclass(frozen=True)
class Trial:
    """A federation of processes on this machine, each client with a file and a key of its own.

    Attributes:
        folder: the run's; its `trial/` has the clients' files, keys, folders and logs.
        config: the configuration.
        names: the clients.
    """

    folder: Path
    config: Config
    names: tuple[str, ...]

    @classmethod
    def create(cls, config: Config, folder: Path) -> "Trial":
        """Write a file and a key for every client of a configuration's data."""
        federation = config.build_federation()
        names = tuple(f"client-{i}" for i in range(federation.clients))
        place = folder / TRIAL
        data = place / "data"
        settings = _with_files(config, federation, data)
        derived = Config.checked(settings)
        check_config(derived, federation.clients)
        if (folder / PLAN).exists() and place.is_dir():
            shutil.rmtree(place)  # of an earlier trial, with other clients
        data.mkdir(parents=True, exist_ok=True)
        for i, name in enumerate(names):
            _write_client(federation, i, data / f"{name}.npz")
        write_whole(place / "config.toml", tomli_w.dumps(settings).encode())
        make_keys(place / "keys", ["127.0.0.1"], names)
        return cls(folder, derived, names)

    def run(
        self,
        log: Log,
        on_progress: Callable[[Progress], None] | None = None,
        on_clients: Callable[[ClientManager], None] = lambda _: None,
    ) -> Result:
        """Start the clients, serve, and stop them."""
        keys = ServerKeys.read(self.folder / TRIAL / "keys" / "server")
        port = free_port()
        FederationPlan.create(self.config, self.folder, len(self.names), tuple(keys.clients))
        with self._clients(port):
            server = Server(self.folder, "127.0.0.1", port, keys, trial=True)
            return server.run(log, on_progress, on_clients)

    @contextmanager
    def _clients(self, port: int) -> Iterator[list[Program]]:
        """A `perfed join` process for each client."""
        place = self.folder / TRIAL
        # One device each: the clients share the cores of this machine.
        environment = {"PERFED_DEVICES": os.environ.get("PERFED_DEVICES", "1")}
        allowed = [f"--allow-factory={name}" for name in factories_of(self.config.model.settings())]
        programs: list[Program] = []
        try:
            for name in self.names:
                arguments = [
                    "join", "--server", f"127.0.0.1:{port}",
                    "--data", str(place / "data" / f"{name}.npz"),
                    "--client-dir", str(place / "clients" / name),
                    "--keys", str(place / "keys" / "clients" / name),
                    *allowed,
                ]  # fmt: skip
                log = place / f"{name}.log"
                programs.append(Program("perfed", arguments, place / "flower", log, environment))
            yield programs
        finally:
            for program in programs:
                program.terminate()
            for program in programs:
                program.stop(20)


def _with_files(config: Config, federation: Federation, data: Path) -> dict[str, Any]:
    """The configuration, with the clients' files as its data."""
    if federation.vocabulary is not None:
        raise ConfigError("data: clients' files cannot hold texts; choose numerical data")
    settings: dict[str, Any] = without_none(config.model_dump(mode="json"))
    regression = federation.labels is None
    settings["data"] = {"source": "folder", "root": str(data.absolute())} | (
        {"task": "regression"} if regression else {"labels": list(federation.labels or ())}
    )
    settings.pop("network", None)
    return settings


def _write_client(federation: Federation, i: int, path: Path) -> None:
    """Write a client's file, scaled as in a simulation."""
    arrays: dict[str, np.ndarray] = {}
    for part, ending in ((federation.train, ""), (federation.test, "_test")):
        x, y = part.client(i)
        if federation.scaling is not None:
            x = federation.scaling(x, i)
        if federation.labels is not None:
            y = np.array(federation.labels)[y]
        arrays |= {f"x{ending}": np.asarray(x), f"y{ending}": np.asarray(y)}
    np.savez(path, **arrays)  # type: ignore[arg-type]


# A small run, for a first look.
_DEFAULT: Final[dict[str, Any]] = {
    "rounds": 3,
    "eval_every": 1,
    "data": {"source": "digits", "split": "dirichlet", "alpha": 0.5},
    "model": {"name": "mlr"},
    "method": {
        "name": "pfedme", "lam": 2.0, "eta": 0.2, "local_rounds": 40, "inner_lr": 0.2,
        "inner_steps": 10,
    },
}  # fmt: skip


def trial_config(path: Path | None, clients: int, overrides: Sequence[str]) -> Config:
    """The configuration of a trial with so many clients."""
    values = overridden(_DEFAULT if path is None else read_toml(path), overrides)
    data = values.get("data")
    if not isinstance(data, dict):
        return Config.checked(values)
    known = {k for k, v in _settings(data).items() if v is not None}
    if "clients" in known:
        values["data"] = data | {"clients": clients}
    if "cohort" not in values and values.get("method", {}).get("r") is None:
        values["cohort"] = min(clients, 10)
    return Config.checked(values)


def _settings(data: dict[str, Any]) -> dict[str, Any]:
    try:
        source = data.get("source", "")
        split = data.get("split") or SOURCES[source].split
        return dict(data_settings(source, split))
    except KeyError:
        return {}
