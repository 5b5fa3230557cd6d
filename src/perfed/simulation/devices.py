"""Devices: the accelerators, or one per CPU core."""

import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from perfed.core.errors import FieldError, require, require_count
from perfed.core.jax_setup import requested_devices

AXIS = "clients"
_BARRIERS_DROPPED = "cse_barrier_expander"


def compiler_options() -> dict[str, Any]:
    """How programs are compiled for the devices there are.

    What LLVM does beyond its first level takes a quarter of the time of compiling for a CPU, and
    made none of eight kinds of rounds faster: some are even a tenth slower. Barriers stay until
    operations have been fused: XLA drops them before, and then computes patches of images again for
    each who reads them (see `core/rewriting`). What `XLA_FLAGS` says of either is left as it is.
    """
    if jax.default_backend() != "cpu":
        return {}
    options = {"xla_backend_optimization_level": 1, "xla_disable_hlo_passes": _BARRIERS_DROPPED}
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in flags}


def device_mesh(devices: int | None = None) -> Mesh:
    """A mesh of so many devices (None: all) with one axis, along which clients are divided."""
    _check_environment()
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


def _check_environment() -> None:
    """Raise unless `PERFED_DEVICES` is a number, if it is set."""
    try:
        requested_devices()
    except ValueError as error:
        allowed = "must be a whole number, at least 1"
        raise FieldError("PERFED_DEVICES", str(error), allowed) from None
