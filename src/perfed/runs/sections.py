"""The sections of a configuration, made from the signatures of what they configure.

Settings are declared once, where they are used: in a method's, a model's, a codec's or a source's
own signature. So a new one of these needs no change here.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, final, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Strict, Tag, create_model

from perfed.pipeline.codecs import CODECS, Codec
from perfed.data import SOURCES, SPLITS, data_settings
from perfed.data.catalog import Setting, settings_of
from perfed.core.errors import FieldError, require
from perfed.runs.trackers import Tracker
from perfed.runs.run_dir import PersonalModels
from perfed.simulation import (
    Engine,
    Network,
    Sequential,
    Setup,
    Streamed,
    Vectorized,
    engine_for,
    hosts,
)


class Section(BaseModel):
    """Some settings, none of which is unknown or of another type than it should be."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def settings(self) -> dict[str, Any]:
        """Those that are given, or have a default other than None."""
        return {k: v for k in type(self).model_fields if (v := getattr(self, k)) is not None}


def section(title: str, settings: Mapping[str, Setting], fixed: Mapping[str, Any]) -> type[Section]:
    """A section whose keys are these settings, and some fixed fields."""
    fields = dict(fixed)
    for key, (hint, default) in settings.items():
        fields[key] = (_from_toml(hint), ... if default is inspect.Parameter.empty else default)
    made: type[Section] = create_model(title, __base__=Section, **fields)
    return made


def _from_toml(hint: Any) -> Any:
    """TOML has arrays only, which a strict tuple would refuse."""
    if get_origin(hint) is tuple:
        return Annotated[hint, Strict(False)]
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(_from_toml(option) for option in get_args(hint))]  # noqa: UP007
    return hint


def choice(
    tag: str, options: Mapping[str, Callable[..., Any]], skip: Sequence[str] = (), **common: Any
) -> Any:
    """A section whose `tag` names one of the options, and whose other keys are its parameters."""
    sections = []
    for name, target in options.items():
        settings = {k: v for k, v in settings_of(target).items() if k not in skip}
        sections.append(section(name, settings, {tag: (Literal[name], ...), **common}))
    return Annotated[Union[tuple(sections)], Field(discriminator=tag)]  # noqa: UP007


def data_choice() -> Any:
    """`[data]`: a section for every source and every split of it, with the settings of both."""
    sections = []
    for source, (_, usual) in SOURCES.items():
        for split in (None,) if usual is None else SPLITS:
            fixed: dict[str, Any] = {"source": (Literal[source], ...)}
            if usual is not None:
                fixed["split"] = (Literal[split], ... if split != usual else usual)
            tag = _data_tag(source, split)
            sections.append(Annotated[section(tag, data_settings(source, split), fixed), Tag(tag)])
    return Annotated[Union[tuple(sections)], Discriminator(_chosen_data)]  # noqa: UP007


def _data_tag(source: Any, split: Any) -> str:
    return f"{source}" if split is None else f"{source}/{split}"


def _chosen_data(values: Any) -> str | None:
    """Which of the sections of `[data]` these values are for."""

    def value(key: str) -> Any:
        return values.get(key) if isinstance(values, dict) else getattr(values, key, None)

    source = value("source")
    if source is None:
        return None
    usual = SOURCES[source].split if isinstance(source, str) and source in SOURCES else None
    return _data_tag(source, usual and (value("split") or usual))


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
        """How many clients must answer for a round to count; unless it is said, more than half."""
        return self.minimum or cohort // 2 + 1


@final
class EngineSection(Section):
    """`[engine]`: how a run is computed; its results do not depend on it."""

    name: Literal["auto", "vectorized", "streamed", "sequential"] = "auto"
    devices: int | None = None
    chunk: int | None = None

    def build(self, setup: Setup, store: Path | None = None) -> Engine:
        """The engine that will run the setup; `store` is the folder for what clients keep."""
        fits = self.name in ("auto", "streamed") or not hosts.several()
        require(fits, "name", self.name, 'must be "auto" or "streamed" on several hosts')
        match self.name:
            case "sequential":
                for field in ("devices", "chunk"):
                    value = getattr(self, field)
                    require(value is None, field, value, "is for the other engines only")
                return Sequential(setup)
            case "vectorized":
                return Vectorized(setup, self.devices, self.chunk)
            case "streamed":
                return Streamed(setup, self.devices, self.chunk, store)
        return engine_for(setup, self.devices, self.chunk, store)


def codec_choice() -> Any:
    """`[codec]`: a codec, how the server's model is sent, and how a few chosen values are."""
    # A part of a message, and a whole model, go by codecs that write every entry.
    nested = {name: codec for name, codec in CODECS.items() if not _is_sparse(codec)}
    plain = choice("name", nested, skip=("error_feedback",))
    sections = []
    for name, codec in CODECS.items():
        fixed: dict[str, Any] = {"name": (Literal[name], ...), "downlink": (plain | None, None)}
        if _is_sparse(codec):
            fixed["inner"] = (plain | None, None)
        settings = {k: v for k, v in settings_of(codec).items() if k != "inner"}
        sections.append(section(name, settings, fixed))
    return Annotated[Union[tuple(sections)], Field(discriminator="name")]  # noqa: UP007


def build_codec(chosen: Any) -> Codec:
    """The codec a section describes."""
    settings = chosen.settings()
    settings.pop("downlink", None)
    if (inner := settings.pop("inner", None)) is not None:
        try:
            settings["inner"] = build_codec(inner)
        except FieldError as error:
            raise FieldError(f"inner.{error.field}", error.value, error.allowed) from None
    return CODECS[settings.pop("name")](**settings)


def _is_sparse(codec: type[Codec]) -> bool:
    return "inner" in settings_of(codec)


@final
class OutputSection(Section):
    """`[output]`: what is written into a run's folder, and how often.

    Attributes:
        checkpoint_rounds: keep where the run stands after so many rounds; None: by time only.
        checkpoint_minutes: and after so many minutes; None: by rounds only.
        keep: how many checkpoints to keep.
        personal_models: `stacked` in one file, `files` one a client, or `none`.
        trackers: who is told of the run while it goes on.
        experiment: the run's experiment in MLflow; None: MLFLOW_EXPERIMENT_NAME, or `perfed`.
    """

    checkpoint_rounds: int | None = Field(default=None, ge=1)
    checkpoint_minutes: float | None = Field(default=5.0, gt=0, allow_inf_nan=False)
    keep: int = Field(default=3, ge=1)
    personal_models: PersonalModels = "stacked"
    trackers: Annotated[tuple[Tracker, ...], Strict(False)] = ()
    experiment: str | None = Field(default=None, min_length=1, max_length=500)


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
            said = None if self.ratio is None else (self.ratio, self.bandwidth)
            raise FieldError(
                "ratio", said, "give either ratio (C_comm/C_comp) or bandwidth (bits/s)"
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
