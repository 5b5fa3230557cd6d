"""The plan of a federated run, in its folder before the first client joins: `federation.json`."""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

from perfed.core.errors import ConfigError
from perfed.federation.protocol.config_checks import check_config
from perfed.federation.protocol.messages import SERVER_SECTIONS, ClientInfo, client_config
from perfed.runs import run_dir
from perfed.runs.config import Config, overridden, read_toml, without_none
from perfed.runs.files import read_json, write_whole

PLAN: Final = run_dir.FEDERATION


@final
@dataclass(frozen=True)
class FederationPlan:
    """A federated run.

    Attributes:
        settings: its configuration, of which clients get `client_config`.
        experiment: its name, which is also that of the clients' folders.
        clients: the number of clients.
        names: the clients, in the order of their numbers; None: not known yet.
        infos: the clients' data; empty before the run has started.
        wire: all bytes received and sent on the clients' port.
    """

    settings: dict[str, Any]
    experiment: str
    clients: int
    names: tuple[str, ...] | None
    infos: dict[str, ClientInfo]
    wire: tuple[int, int] = (0, 0)

    @classmethod
    def create(
        cls, config: Config, folder: Path, clients: int, names: tuple[str, ...] | None
    ) -> "FederationPlan":
        """A new plan, written to its folder."""
        check_config(config, clients)
        slug = re.sub(r"[^A-Za-z0-9]+", "-", folder.absolute().name).strip("-") or "run"
        experiment = f"{slug[:80]}-{secrets.token_hex(4)}"
        plan = cls(federated_settings(config), experiment, clients, names, {})
        folder.mkdir(parents=True, exist_ok=True)
        for name in (run_dir.CONFIG, run_dir.SUMMARY):
            (folder / name).unlink(missing_ok=True)
        plan.write(folder)
        return plan

    @classmethod
    def read(cls, folder: Path) -> "FederationPlan":
        """The plan in a folder."""
        if not (folder / PLAN).is_file():
            raise ConfigError(f"--resume {folder}: there is no federated run")
        values = read_json(folder / PLAN)
        infos = {n: ClientInfo.model_validate(own) for n, own in values["infos"].items()}
        names = None if values["names"] is None else tuple(values["names"])
        return cls(
            values["settings"],
            values["experiment"],
            values["clients"],
            names,
            infos,
            tuple(values["wire"]),
        )

    def write(self, folder: Path) -> None:
        """Write it to its folder."""
        infos = {name: own.model_dump(mode="json") for name, own in self.infos.items()}
        values = vars(self) | {"infos": infos}
        write_whole(folder / PLAN, (json.dumps(values, indent=1) + "\n").encode())

    def with_clients(
        self, names: tuple[str, ...], infos: dict[str, ClientInfo]
    ) -> "FederationPlan":
        """The same, with the clients known."""
        return replace(self, names=names, infos=dict(infos))

    def with_wire(self, received: int, sent: int) -> "FederationPlan":
        """The same, with so many more bytes on the clients' port."""
        return replace(self, wire=(self.wire[0] + received, self.wire[1] + sent))

    def with_settings(self, path: Path | None, overrides: Sequence[str]) -> "FederationPlan":
        """The same, with other `SERVER_SECTIONS`; all other settings must be unchanged."""
        values = self.settings if path is None else read_toml(path)
        config = Config.checked(overridden(values, overrides))
        check_config(config, self.clients)
        settings = federated_settings(config)
        differing = _differences(client_config(self.settings), client_config(settings))
        if differing:
            sections = " and ".join(f"[{section}]" for section in SERVER_SECTIONS)
            differing.append(f"only {sections} can change when a run is resumed; start a new run")
            raise ConfigError("\n".join(differing))
        return replace(self, settings=settings)

    def config(self) -> Config:
        """The configuration."""
        return Config.checked(self.settings)


def federated_settings(config: Config) -> dict[str, Any]:
    """A configuration as the server runs it: personal models stay at the clients."""
    settings: dict[str, Any] = without_none(config.resolved())
    settings["output"] |= {"personal_models": "none", "checkpoint_rounds": 1}
    settings["data"] |= {"root": "."}  # paths are private
    for alone in ("engine", "network"):
        settings.pop(alone, None)
    return settings


def _differences(old: Any, new: Any, place: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        parts = [_differences(old.get(k), new.get(k), f"{place}.{k}") for k in {**old, **new}]
        return [difference for part in parts for difference in part]
    if old == new:
        return []
    return [f"{place.lstrip('.')} = {new!r}: the run was started with {old!r}"]
