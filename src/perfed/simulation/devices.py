"""Devices: the accelerators, or one a CPU core; and a cache of compiled programs."""

import os
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from perfed.errors import require

AXIS = "clients"


def prepare() -> None:
    """Settle what JAX must know before it starts; called when perfed is imported.

    On the CPU clients are shared out over host devices, one a core: a core each is what makes small
    models fast there. What the user has set already is left alone, and so is a JAX that has
    already started. `PERFED_DEVICES` asks for another number of host devices, `PERFED_CACHE` for
    another folder of compiled programs (empty: none).
    """
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        wanted = os.environ.get("PERFED_DEVICES", "")
        valid = not wanted or (wanted.isdigit() and int(wanted) >= 1)
        require(valid, "PERFED_DEVICES", wanted, "must be a whole number, at least 1")
        if jax.config.values["jax_num_cpu_devices"] in (None, -1):
            # A JAX that has started refuses: its devices are what they are.
            with suppress(RuntimeError):
                jax.config.update("jax_num_cpu_devices", int(wanted) if wanted else _cores())
    if jax.config.values["jax_compilation_cache_dir"] is None:
        cache = os.environ.get("PERFED_CACHE", str(_cache_home() / "perfed" / "compiled"))
        if cache:
            jax.config.update("jax_compilation_cache_dir", cache)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def mesh(devices: int | None = None) -> Mesh:
    """A mesh of so many devices (None: all) with one axis, along which clients are shared out."""
    found = jax.devices()
    allowed = (
        f"this process has {len(found)} {found[0].platform} device(s); ask for 1 to {len(found)}, "
        "or set PERFED_DEVICES before the start"
    )
    require(devices is None or 1 <= devices <= len(found), "devices", devices, allowed)
    return Mesh(np.array(found[:devices]), (AXIS,))


def _cores() -> int:
    """The cores this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
