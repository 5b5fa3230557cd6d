"""Sources and splits by name, and their settings."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, final, get_type_hints

from perfed.core.errors import FieldError, require_choice
from perfed.data.dataset import Dataset
from perfed.data.federation import Federation
from perfed.data.files import folder, table
from perfed.data.published import (
    available,
    cifar10,
    digits,
    fashion_mnist,
    heart,
    mnist,
    mnist_writers,
    shakespeare,
)
from perfed.data.splits import SPLITS, Split
from perfed.data.stored import stored
from perfed.data.synthetic import synthetic


@final
class Source(NamedTuple):
    """A source of data.

    Attributes:
        make: returns a `Federation`, or a `Dataset` for a split.
        split: the name of the default split; None: `make` returns a `Federation`.
    """

    make: Callable[..., Federation] | Callable[..., Dataset]
    split: str | None = None


SOURCES: dict[str, Source] = {
    "synthetic": Source(synthetic),
    "digits": Source(digits, "per-fedavg"),
    "heart": Source(heart, "natural"),
    "mnist": Source(mnist, "per-fedavg"),
    "fashion-mnist": Source(fashion_mnist, "dirichlet"),
    "cifar10": Source(cifar10, "per-fedavg"),
    "mnist-writers": Source(mnist_writers, "natural"),
    "shakespeare": Source(shakespeare, "natural"),
    "folder": Source(folder, "natural"),
    "table": Source(table, "natural"),
    "stored": Source(stored),
}


class Setting(NamedTuple):
    """One setting: its type, and its default if it has one (`inspect.Parameter.empty` if not)."""

    type: Any
    default: Any


def settings_of(target: Callable[..., Any]) -> dict[str, Setting]:
    """The settings of a function or class, from its signature."""
    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    parameters = inspect.signature(target).parameters.values()
    return {p.name: Setting(hints[p.name], p.default) for p in parameters if p.name != "self"}


_FEDERATION = settings_of(Dataset.federation)
_FEDERATION.pop("split")


def data_settings(source: str, split: str | None) -> dict[str, Setting]:
    """The settings of `[data]` for a source and a split."""
    own = settings_of(SOURCES[source].make)
    return own if split is None else own | settings_of(SPLITS[split]) | _FEDERATION


def prepare(source: str, **settings: Any) -> Callable[[], Federation]:
    """Check the settings of a source and its split now; calling the result reads the data.

    Args:
        source: one of `SOURCES`.
        settings: `split`, and the settings of the source and the split (`data_settings`).
    """
    require_choice("source", source, tuple(SOURCES))
    make, default = SOURCES[source]
    if default is None:
        _require_known(source, settings, data_settings(source, None))
        return lambda: make(**settings)  # type: ignore[return-value]
    name = settings.pop("split", default)
    require_choice("split", name, tuple(SPLITS))
    _require_known(f"{source}, split {name}", settings, data_settings(source, name))

    def select(target: dict[str, Setting]) -> dict[str, Any]:
        return {k: v for k, v in settings.items() if k in target}

    split: Split = SPLITS[name](**select(settings_of(SPLITS[name])))

    def load() -> Federation:
        dataset = make(**select(settings_of(make)))
        assert isinstance(dataset, Dataset)
        return dataset.federation(split, **select(_FEDERATION))

    return load


def load(source: str, **settings: Any) -> Federation:
    """A federation by name.

        >>> import perfed
        >>> perfed.load("digits", split="dirichlet", clients=4, alpha=0.1).clients
        4

    The settings are those of `[data]` in a configuration; `perfed data list` shows the sources and
    splits.
    """
    return prepare(source, **settings)()


def _require_known(what: str, settings: dict[str, Any], known: dict[str, Setting]) -> None:
    for name, value in settings.items():
        if name not in known:
            raise FieldError(
                name, value, f"is not a setting of {what}; there are {', '.join(known)}"
            )


def list_sources() -> list[tuple[str, str, str]]:
    """Name, summary and location of every source."""
    other = {"synthetic": "computed", "folder": "your files", "table": "your file"}
    return [
        (name, summary_of(source.make), available(name) or other.get(name, ""))
        for name, source in SOURCES.items()
    ]


def list_splits() -> list[tuple[str, str, str]]:
    """Name and summary of every split."""
    return [(name, summary_of(split), "") for name, split in SPLITS.items()]


def summary_of(target: Callable[..., Any]) -> str:
    """The first line of its docstring."""
    return (target.__doc__ or "").strip().splitlines()[0].rstrip(".")
