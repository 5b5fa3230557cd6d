"""What JAX must know before it starts. This file imports nothing of it."""

import os
import sys
from contextlib import suppress
from pathlib import Path

# What perfed has set itself, for a child process, which decides anew: `NAME=VALUE`, by lines.
_SET_BY_PERFED = "PERFED_JAX_ENVIRONMENT"


def prepare() -> None:
    """Settle how JAX will start; called when perfed is imported.

    On the CPU clients are divided over host devices, one per core: a core each is what makes small
    models fast there. What the user has set already is left alone, and so is a JAX that has
    already started. `PERFED_DEVICES` asks for another number of host devices, `PERFED_CACHE` for
    another folder of compiled programs (empty: none).
    """
    _clear_inherited()
    settings: dict[str, str] = {}
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # An invalid number raises an error where devices are first used, not at import.
        with suppress(ValueError):
            settings["jax_num_cpu_devices"] = str(requested_devices() or _cores())
    cache = os.environ.get("PERFED_CACHE", str(_cache_home() / "perfed" / "compiled"))
    if cache:
        settings["jax_compilation_cache_dir"] = cache
    if "jax" in sys.modules:
        _update(settings)
    else:
        _set_environment(settings)


def requested_devices() -> int | None:
    """What `PERFED_DEVICES` asks for; `ValueError` if that is not a whole number of at least 1."""
    wanted = os.environ.get("PERFED_DEVICES", "")
    if not wanted:
        return None
    if not wanted.isdigit() or int(wanted) < 1:
        raise ValueError(wanted)
    return int(wanted)


def _set_environment(settings: dict[str, str]) -> None:
    """For a JAX that is imported later: by the environment, where nothing is set there."""
    fresh = {k.upper(): v for k, v in settings.items() if k.upper() not in os.environ}
    if "JAX_COMPILATION_CACHE_DIR" in fresh:
        fresh.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.01")
    os.environ.update(fresh)
    os.environ[_SET_BY_PERFED] = "\n".join(f"{name}={value}" for name, value in fresh.items())


def _clear_inherited() -> None:
    """What a parent process's perfed has set is not the user's."""
    for line in os.environ.pop(_SET_BY_PERFED, "").splitlines():
        name, _, value = line.partition("=")
        if os.environ.get(name) == value:
            del os.environ[name]


def _update(settings: dict[str, str]) -> None:
    """Of a JAX that is imported already: what is not set there."""
    import jax

    devices = settings.get("jax_num_cpu_devices")
    if devices is not None and jax.config.values["jax_num_cpu_devices"] in (None, -1):
        with suppress(RuntimeError):  # it has started: its devices are what they are
            jax.config.update("jax_num_cpu_devices", int(devices))
    cache = settings.get("jax_compilation_cache_dir")
    if cache is not None and jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.01)


def _cores() -> int:
    """The cores this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
