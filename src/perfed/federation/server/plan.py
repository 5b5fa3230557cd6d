"""What a federated run is, in its folder from before the first client comes: `federation.json`."""

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
        settings: its configuration; clients are told of it `client_config`.
        experiment: its name, which clients keep what they keep under.
        clients: how many there are.
        names: who they are, in the order of their numbers; None: not known yet.
        infos: what they have told of their data; empty before the run has begun.
        wire: the bytes that were received and sent on the clients' port, for whatever reason.
    """

    settings: dict[str, Any]
    experiment: str
    clients: int
    names: tuple[str, ...] | None
    infos: dict[str, ClientInfo]
    wire: tuple[int, int] = (0, 0)

    @classmethod
    def begun(
        cls, config: Config, folder: Path, clients: int, names: tuple[str, ...] | None
    ) -> "FederationPlan":
        """A new one, in a folder of its own."""
        check_config(config, clients)
        words = re.sub(r"[^A-Za-z0-9]+", "-", folder.absolute().name).strip("-") or "run"
        experiment = f"{words[:80]}-{secrets.token_hex(4)}"
        plan = cls(federated(config), experiment, clients, names, {})
        folder.mkdir(parents=True, exist_ok=True)
        for name in (run_dir.CONFIG, run_dir.SUMMARY):
            (folder / name).unlink(missing_ok=True)
        plan.write(folder)
        return plan

    @classmethod
    def read(cls, folder: Path) -> "FederationPlan":
        """That of a run which was begun."""
        if not (folder / PLAN).is_file():
            raise ConfigError(f"--resume {folder}: no federated run was begun there")
        facts = read_json(folder / PLAN)
        infos = {n: ClientInfo.model_validate(own) for n, own in facts["infos"].items()}
        names = None if facts["names"] is None else tuple(facts["names"])
        return cls(
            facts["settings"],
            facts["experiment"],
            facts["clients"],
            names,
            infos,
            tuple(facts["wire"]),
        )

    def write(self, folder: Path) -> None:
        """Into its folder."""
        infos = {name: own.model_dump(mode="json") for name, own in self.infos.items()}
        facts = vars(self) | {"infos": infos}
        write_whole(folder / PLAN, (json.dumps(facts, indent=1) + "\n").encode())

    def settled(self, names: tuple[str, ...], infos: dict[str, ClientInfo]) -> "FederationPlan":
        """With everyone known."""
        return replace(self, names=names, infos=dict(infos))

    def with_wire(self, received: int, sent: int) -> "FederationPlan":
        """With so many bytes more on the clients' port."""
        return replace(self, wire=(self.wire[0] + received, self.wire[1] + sent))

    def on_terms(self, path: Path | None, overrides: Sequence[str]) -> "FederationPlan":
        """On the terms that a file and overrides say now; all else must be what it was."""
        values = self.settings if path is None else read_toml(path)
        config = Config.checked(overridden(values, overrides))
        check_config(config, self.clients)
        settings = federated(config)
        differing = _differences(client_config(self.settings), client_config(settings))
        if differing:
            free = " and ".join(f"[{section}]" for section in SERVER_SECTIONS)
            differing.append(f"{free} alone may change while a run goes on; begin another one")
            raise ConfigError("\n".join(differing))
        return replace(self, settings=settings)

    def config(self) -> Config:
        """Its configuration."""
        return Config.checked(self.settings)


def federated(config: Config) -> dict[str, Any]:
    """A configuration as a federation runs it: personal models stay where they are made."""
    settings: dict[str, Any] = without_none(config.resolved())
    settings["output"] |= {"personal_models": "none", "checkpoint_rounds": 1}
    settings["data"] |= {"root": "."}  # nobody else's paths are anybody's business
    for alone in ("engine", "network"):
        settings.pop(alone, None)
    return settings


def _differences(old: Any, new: Any, place: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        parts = [_differences(old.get(k), new.get(k), f"{place}.{k}") for k in {**old, **new}]
        return [difference for part in parts for difference in part]
    if old == new:
        return []
    return [f"{place.lstrip('.')} = {new!r}: the run was begun with {old!r}"]
