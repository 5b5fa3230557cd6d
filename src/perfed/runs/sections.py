"""The sections of a configuration, made from the signatures of what they configure.

Settings are declared once, where they are used: in a method's, a model's, a codec's or a source's
own signature. So a new one of these needs no change here. In some sections one key (`name`,
`source`, `stage`) decides what the other keys are: such a section has a `Kind`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, final, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, Strict, create_model

from perfed.core.errors import FieldError, require
from perfed.data.catalog import SOURCES, Setting, data_settings, settings_of
from perfed.methods.optimizers import OPTIMIZERS, Optimizer
from perfed.methods.registry import find_method, method_names
from perfed.methods.schedules import SCHEDULES, Schedule
from perfed.models import MODELS, PYTHON
from perfed.pipeline import STAGES
from perfed.pipeline.codecs import CODECS, Codec
from perfed.runs.presets import FROM_RUN, PRESETS
from perfed.runs.run_dir import PersonalModels
from perfed.runs.trackers import Tracker
from perfed.simulation import (
    Experiment,
    Network,
    Sequential,
    Simulator,
    Streamed,
    Vectorized,
    engine_for,
    hosts,
)

# What a model takes from the data; the rest of its settings are the user's.
FROM_DATA = ("inputs", "image", "classes", "symbols")


class Section(BaseModel):
    """Some settings, none of which is unknown or of another type than it should be."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def settings(self) -> dict[str, Any]:
        """Those that are given, or have a default other than None."""
        return {k: v for k in type(self).model_fields if (v := getattr(self, k)) is not None}


@final
@dataclass(frozen=True, eq=False)
class Kind:
    """A section in which one key decides what the others are.

    Attributes:
        tag: that key.
        names: what it may be.
        find: what is configured by a name; its signature has the settings.
        skip: settings that are not the user's.
        fixed: further fields, as pydantic has them.
        nested: settings that are sections of a kind themselves, by name.
        own: sections that are not made from signatures, by name.
    """

    tag: str
    names: Callable[[], Sequence[str]]
    find: Callable[[str], Callable[..., Any]]
    skip: tuple[str, ...] = ()
    fixed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    nested: Mapping[str, "Kind"] = field(default_factory=dict)
    own: Mapping[str, type[Section]] = field(default_factory=dict)

    def section(self, name: str) -> type[Section]:
        """The section for a name."""
        return self.own.get(name) or _section_for(self, name)

    def build(self, section: Section) -> Any:
        """What a section describes."""
        settings = section.settings()
        name = settings.pop(self.tag)
        for key in self.fixed:
            settings.pop(key, None)
        for key, value in settings.items():
            if isinstance(value, Section):
                try:
                    settings[key] = self.kind_of(name, key).build(value)
                except FieldError as error:
                    place = f"{key}.{error.field}"
                    raise FieldError(place, error.value, error.allowed) from None
        return self.find(name)(**settings)

    def kind_of(self, name: str, key: str) -> "Kind":
        """The kind of a nested section."""
        if key in self.nested:
            return self.nested[key]
        return _TREES[settings_of(self.find(name))[key].type]


@cache
def _section_for(kind: Kind, name: str) -> type[Section]:
    settings = {k: v for k, v in settings_of(kind.find(name)).items() if k not in kind.skip}
    return _section_class(name, kind.tag, settings, dict(kind.fixed), kind)


def _section_class(
    name: str,
    tag: str,
    settings: Mapping[str, Setting],
    fixed: Mapping[str, Any],
    kind: Kind | None = None,
) -> type[Section]:
    """A section whose keys are a tag, some fixed fields, and these settings."""
    fields: dict[str, Any] = {tag: (Literal[name], ...), **fixed}
    for key, (hint, default) in settings.items():
        if kind is not None and (key in kind.nested or hint in _TREES):
            nested = kind.kind_of(name, key)
            # A default that is made anew each time is its class's own business.
            known = hasattr(default, "name") and key not in kind.nested
            inner = _section_of(nested, default) if known else None
            fields[key] = (SerializeAsAny[Section] | None, inner)
        else:
            usual = ... if default is inspect.Parameter.empty else default
            fields[key] = (_from_toml(hint), usual)
    made: type[Section] = create_model(name, __base__=Section, **fields)
    return made


def _section_of(kind: Kind, value: Any) -> Section:
    """The section that describes an object."""
    section = kind.section(value.name)
    settings = {k: getattr(value, k) for k in settings_of(type(value)) if k not in kind.skip}
    given = {
        k: _section_of(kind.kind_of(value.name, k), v)
        if k in kind.nested or settings_of(type(value))[k].type in _TREES
        else v
        for k, v in settings.items()
        if v is not None
    }
    return section(**{kind.tag: value.name}, **given)


def _from_toml(hint: Any) -> Any:
    """TOML has arrays only, which a strict tuple would refuse."""
    if get_origin(hint) is tuple:
        return Annotated[hint, Strict(False)]
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(_from_toml(option) for option in get_args(hint))]  # noqa: UP007
    return hint


_L2 = (Annotated[float, Field(ge=0, allow_inf_nan=False)], 0.0)
OPTIMIZER = Kind("name", lambda: list(OPTIMIZERS), OPTIMIZERS.__getitem__)
SCHEDULE = Kind("name", lambda: list(SCHEDULES), SCHEDULES.__getitem__)
_TREES: dict[Any, Kind] = {Optimizer: OPTIMIZER, Schedule: SCHEDULE}


def _method(name: str) -> Callable[..., Any]:
    return PRESETS[name] if name in PRESETS else find_method(name)


METHOD = Kind("name", lambda: [*method_names(), *PRESETS], _method, skip=FROM_RUN)


@final
class PythonModelSection(Section):
    """`[model]` for a function of the user's own, whose arguments are the further settings."""

    model_config = ConfigDict(extra="allow")

    name: Literal["python"]
    factory: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    l2: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    def settings(self) -> dict[str, Any]:
        """All of them."""
        return super().settings() | (self.model_extra or {})


MODEL = Kind(
    "name",
    lambda: [*MODELS, PYTHON],
    MODELS.__getitem__,
    skip=FROM_DATA,
    fixed={"l2": _L2},
    own={PYTHON: PythonModelSection},
)


def _is_sparse(codec: Callable[..., Any]) -> bool:
    return "inner" in settings_of(codec)


# A part of a message, and a whole model, go by codecs that write every entry.
WHOLE_CODEC = Kind(
    "name", lambda: [n for n, c in CODECS.items() if not _is_sparse(c)], CODECS.__getitem__
)
CODEC = Kind(
    "name",
    lambda: list(CODECS),
    CODECS.__getitem__,
    skip=("scaled",),  # follows from error feedback
    fixed={
        "error_feedback": (bool, False),
        "downlink": (SerializeAsAny[Section] | None, None),
    },
    nested={"inner": WHOLE_CODEC, "downlink": WHOLE_CODEC},
)
STAGE = Kind(
    "stage",
    lambda: list(STAGES),
    STAGES.__getitem__,
    nested={"codec": replace(CODEC, fixed={}, nested={"inner": WHOLE_CODEC})},
)


@cache
def data_section(source: str, split: str | None) -> type[Section]:
    """`[data]` for a source and a split, with the settings of both."""
    usual = SOURCES[source].split
    fixed: dict[str, Any] = {}
    if usual is not None:
        fixed["split"] = (Literal[split], ... if split != usual else usual)
    return _section_class(source, "source", data_settings(source, split), fixed)


def data_split(source: str, values: Mapping[str, Any]) -> Any:
    """The split that is named, or the usual one of a source; None: the source has none."""
    usual = SOURCES[source].split
    return usual and (values.get("split") or usual)


def build_codec(section: Section) -> Codec:
    """The codec that `[codec]` describes."""
    codec: Codec = CODEC.build(section)
    return codec


@final
class FederationSection(Section):
    """`[federation]`: the terms of a run between real clients; a simulation has no use for it."""

    minimum: int | None = Field(default=None, ge=1)
    timeout: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    attempts: int = Field(default=3, ge=1)
    norm_factor: float = Field(default=100.0, gt=1, allow_inf_nan=False)
    max_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    message_limit: int = Field(default=2**28, ge=2**16, lt=2**31)

    def least(self, cohort: int) -> int:
        """How many clients must answer for a round to count; by default more than half."""
        return self.minimum or cohort // 2 + 1


@final
class EngineSection(Section):
    """`[engine]`: how a run is computed; its results do not depend on it."""

    name: Literal["auto", "vectorized", "streamed", "sequential"] = "auto"
    devices: int | None = None
    chunk: int | None = None

    def build(self, experiment: Experiment, store: Path | None = None) -> Simulator:
        """The engine that will run an experiment; `store` is the folder for what clients keep."""
        fits = self.name in ("auto", "streamed") or not hosts.is_multihost()
        require(fits, "name", self.name, 'must be "auto" or "streamed" on several hosts')
        match self.name:
            case "sequential":
                for setting in ("devices", "chunk"):
                    value = getattr(self, setting)
                    require(value is None, setting, value, "is for the other engines only")
                return Sequential(experiment)
            case "vectorized":
                return Vectorized(experiment, self.devices, self.chunk)
            case "streamed":
                return Streamed(experiment, self.devices, self.chunk, store)
        return engine_for(experiment, self.devices, self.chunk, store)


@final
class OutputSection(Section):
    """`[output]`: what is written into a run's folder, and how often.

    Attributes:
        checkpoint_rounds: keep where the run stands after so many rounds; None: by time only.
        checkpoint_minutes: and after so many minutes; None: by rounds only.
        keep: how many checkpoints to keep.
        personal_models: `stacked` in one file, `files` one a client, or `none`.
        trackers: where the run is tracked while it goes on.
        experiment: the run's experiment in MLflow; None: MLFLOW_EXPERIMENT_NAME, or `perfed`.
        local: the folder of a Local run on the same data: how many clients are worse off than alone
            is told in the summary and the report; None: that is not known.
    """

    checkpoint_rounds: int | None = Field(default=None, ge=1)
    checkpoint_minutes: float | None = Field(default=5.0, gt=0, allow_inf_nan=False)
    keep: int = Field(default=3, ge=1)
    personal_models: PersonalModels = "stacked"
    trackers: Annotated[tuple[Tracker, ...], Strict(False)] = ()
    experiment: str | None = Field(default=None, min_length=1, max_length=500)
    local: str | None = Field(default=None, min_length=1)


@final
class NetworkSection(Section):
    """`[network]`: what messages and computations cost in time (`Network`)."""

    ratio: float | None = None
    bandwidth: float | None = None
    shift: float = 1e-4
    scale: float = 1e4
    down_bandwidth: float | None = None
    client_bandwidth: Annotated[tuple[float, ...], Strict(False)] | None = None
    client_speed: Annotated[tuple[float, ...], Strict(False)] | None = None

    def build(self, parameters: int) -> Network:
        """The network, for a model of so many parameters."""
        if (self.ratio is None) == (self.bandwidth is None):
            given = None if self.ratio is None else (self.ratio, self.bandwidth)
            raise FieldError(
                "ratio", given, "give either ratio (C_comm/C_comp) or bandwidth (bits/s)"
            )
        if self.bandwidth is not None:
            network = Network(self.bandwidth, self.shift, self.scale)
        else:
            assert self.ratio is not None
            network = Network.of_ratio(self.ratio, parameters, self.shift, self.scale)
        return replace(
            network,
            down_bandwidth=self.down_bandwidth,
            client_bandwidth=self.client_bandwidth,
            client_speed=self.client_speed,
        )
