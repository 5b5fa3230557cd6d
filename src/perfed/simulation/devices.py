"""Devices: the accelerators, or one a CPU core; and a cache of compiled programs."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from perfed.core.errors import FieldError, require, require_count

AXIS = "clients"


def prepare() -> None:
    """Settle what JAX must know before it starts; called when perfed is imported.

    On the CPU clients are shared out over host devices, one a core: a core each is what makes small
    models fast there. What the user has set already is left alone, and so is a JAX that has
    already started. `PERFED_DEVICES` asks for another number of host devices, `PERFED_CACHE` for
    another folder of compiled programs (empty: none).
    """
    flagged = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not flagged and jax.config.values["jax_num_cpu_devices"] in (None, -1):
        # A JAX that has started refuses: its devices are what they are. A PERFED_DEVICES that is no
        # number is complained about when devices are asked for: an import is no place for it.
        with suppress(RuntimeError, FieldError):
            jax.config.update("jax_num_cpu_devices", _wanted() or _cores())
    if jax.config.values["jax_compilation_cache_dir"] is None:
        cache = os.environ.get("PERFED_CACHE", str(_cache_home() / "perfed" / "compiled"))
        if cache:
            jax.config.update("jax_compilation_cache_dir", cache)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.01)


def compiler_options() -> dict[str, Any]:
    """How programs are compiled for the devices there are.

    What LLVM does beyond its first level takes a quarter of the time of compiling for a CPU, and
    made none of eight kinds of rounds faster: some are even a tenth slower.
    """
    flagged = "xla_backend_optimization_level" in os.environ.get("XLA_FLAGS", "")
    if flagged or jax.default_backend() != "cpu":
        return {}
    return {"xla_backend_optimization_level": 1}


def mesh(devices: int | None = None) -> Mesh:
    """A mesh of so many devices (None: all) with one axis, along which clients are shared out."""
    _wanted()
    found = jax.devices()
    allowed = (
        f"this process has {len(found)} {found[0].platform} device(s); ask for 1 to {len(found)}, "
        "or set PERFED_DEVICES before the start"
    )
    if devices is not None:
        require_count("devices", devices)
        alone = jax.process_count() == 1
        require(alone, "devices", devices, "of several hosts all devices are used; leave it out")
    require(devices is None or 1 <= devices <= len(found), "devices", devices, allowed)
    return Mesh(np.array(found[:devices]), (AXIS,))


def _wanted() -> int | None:
    """What `PERFED_DEVICES` asks for."""
    wanted = os.environ.get("PERFED_DEVICES", "")
    valid = not wanted or (wanted.isdigit() and int(wanted) >= 1)
    require(valid, "PERFED_DEVICES", wanted, "must be a whole number, at least 1")
    return int(wanted) if wanted else None


def _cores() -> int:
    """The cores this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
