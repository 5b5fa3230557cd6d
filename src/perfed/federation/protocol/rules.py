"""Which configurations a federation can run."""

from perfed.core.errors import ConfigError
from perfed.runs.config import Config

# What takes all clients' data in one place.
_TOGETHER = ("feature", "unit", "whole-set")


def check_source(config: Config) -> None:
    """Raise unless clients can read their own files by this configuration, each on its own."""
    data = config.data.settings()
    if data["source"] != "folder":
        raise ConfigError(
            f'data.source = "{data["source"]}": clients of a federation bring a file each; use '
            '"folder", whose files have the same form (perfed federate makes them for a trial)'
        )
    if data.get("task", "classification") == "classification" and data.get("labels") is None:
        raise ConfigError(
            "data.labels: list all labels there are; no client of a federation sees the others'"
        )
    if data.get("standardize") in _TOGETHER:
        raise ConfigError(
            f'data.standardize = "{data["standardize"]}": takes all clients\' data in one place; '
            'use "client", each by its own data, or "none"'
        )
    if data.get("standardize_target"):
        raise ConfigError(
            "data.standardize_target: takes all clients' data in one place; leave it out"
        )
    if data.get("split", "natural") != "natural":
        raise ConfigError("data.split: clients of a federation have what they have; leave it out")


def check_federated(config: Config, clients: int) -> None:
    """Raise unless a federation of so many clients can run this."""
    check_source(config)
    if config.network is not None:
        raise ConfigError("network: is for simulations; a federation has a network of its own")
    if config.eval_clients is not None:
        raise ConfigError("eval_clients: is for simulations; in a federation all are scored")
    cohort = config.build_preset().cohort
    if cohort > clients:
        raise ConfigError(
            f"cohort = {cohort}: must be between 1 and the number of clients, {clients}"
        )
