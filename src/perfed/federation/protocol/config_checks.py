"""Which configurations a federation can run."""

from perfed.core.errors import ConfigError
from perfed.runs.config import Config

# Scalings that need all clients' data in one place.
_POOLED = ("feature", "unit", "whole-set")


def check_data(config: Config) -> None:
    """Raise unless each client can read its own file by this configuration."""
    data = config.data.settings()
    if data["source"] != "folder":
        raise ConfigError(
            f'data.source = "{data["source"]}": clients of a federation bring a file each; use '
            '"folder" (perfed federate makes such files for a trial)'
        )
    if data.get("task", "classification") == "classification" and data.get("labels") is None:
        raise ConfigError(
            "data.labels: list all labels; no client of a federation sees those of the others"
        )
    if data.get("standardize") in _POOLED:
        raise ConfigError(
            f'data.standardize = "{data["standardize"]}": needs all clients\' data in one place; '
            'use "client", which scales by each client\'s own data, or "none"'
        )
    if data.get("standardize_target"):
        raise ConfigError(
            "data.standardize_target: needs all clients' data in one place; remove it"
        )
    if data.get("split", "natural") != "natural":
        raise ConfigError("data.split: in a federation each client has its own file; remove it")


def check_config(config: Config, clients: int) -> None:
    """Raise unless a federation of so many clients can run this."""
    check_data(config)
    if config.network is not None:
        raise ConfigError("network: is for simulations only; remove it")
    if config.eval_clients is not None:
        raise ConfigError("eval_clients: is for simulations only; a federation scores all clients")
    if config.output.local is not None:
        raise ConfigError("output.local: is for simulations only; give both runs to perfed report")
    cohort = config.build_preset().cohort
    if cohort > clients:
        raise ConfigError(
            f"cohort = {cohort}: must be between 1 and the number of clients, {clients}"
        )
