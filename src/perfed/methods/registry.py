"""Methods by name: this package's, those that were registered, and entry points of others."""

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from perfed.core.errors import ConfigError, require
from perfed.methods.base import Method

# Where a package says which methods it brings: `mr-mtl = "their_package.mr_mtl:MRMTL"`.
GROUP = "perfed.methods"

_BUILT_IN = {
    "fedavg": "perfed.methods.fedavg:FedAvg",
    "per-fedavg": "perfed.methods.per_fedavg:PerFedAvg",
    "pfedme": "perfed.methods.pfedme:PFedMe",
    "local": "perfed.methods.local:Local",
    "fedprox": "perfed.methods.fedprox:FedProx",
    "scaffold": "perfed.methods.scaffold:Scaffold",
    "fedavgm": "perfed.methods.fedopt:FedAvgM",
    "fedadam": "perfed.methods.fedopt:FedAdam",
    "fedyogi": "perfed.methods.fedopt:FedYogi",
    "ditto": "perfed.methods.ditto:Ditto",
    "apfl": "perfed.methods.apfl:APFL",
    "fedper": "perfed.methods.fedper:FedPer",
    "fedrep": "perfed.methods.fedrep:FedRep",
    "fedbabu": "perfed.methods.fedbabu:FedBABU",
    "lg-fedavg": "perfed.methods.lg_fedavg:LGFedAvg",
    "fedrod": "perfed.methods.fedrod:FedRoD",
    "fedala": "perfed.methods.fedala:FedALA",
}
_REGISTERED: dict[str, type[Method]] = {}

_Class = TypeVar("_Class", bound=Method)


def register(cls: type[_Class]) -> type[_Class]:
    """Let a method be found by its name, in this process; usable as a decorator.

    A package whose methods the command line is to know lists them as entry points of the group
    `perfed.methods` instead.

    Example:
        >>> import perfed
        >>> @perfed.register
        ... @perfed.method("nothing")
        ... class Nothing(perfed.Method):
        ...     def local_update(self, objective, received, client_state, context):
        ...         return perfed.LocalUpdate(received.params)
        >>> Nothing()
        Nothing()
    """
    known = _REGISTERED.get(cls.name)
    require(bool(cls.name), "method", cls.__name__, "has no name; decorate it by @method(NAME)")
    taken = cls.name in _BUILT_IN or (known is not None and known.__qualname__ != cls.__qualname__)
    require(not taken, "method", cls.name, "is the name of another method")
    _REGISTERED[cls.name] = cls
    return cls


def method_names() -> list[str]:
    """The names of all methods there are."""
    return list(dict.fromkeys([*_BUILT_IN, *_REGISTERED, *_entry_points()]))


def find_method(name: str) -> type[Method]:
    """The method of a name; an unknown one raises `KeyError`."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        found: type[Method] = getattr(import_module(module), attribute)
        return found
    return _load(_entry_points()[name])


def _entry_points() -> dict[str, EntryPoint]:
    """What other packages bring."""
    return {point.name: point for point in entry_points(group=GROUP)}


def _load(point: EntryPoint) -> type[Method]:
    try:
        found: type[Method] = point.load()
    except Exception as error:
        raise ConfigError(
            f"method {point.name}: {point.value}, an entry point of {GROUP}, cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    known: Any = found
    good = isinstance(known, type) and issubclass(known, Method) and known.name == point.name
    if not good:
        raise ConfigError(
            f"method {point.name}: {point.value} is not a method of that name; decorate a subclass "
            f'of perfed.Method by @method("{point.name}")'
        )
    return found
