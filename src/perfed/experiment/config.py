"""The typed configuration of a run: a TOML file, `--set` overrides, and errors that name the field.

Settings are declared once, where they are used: in a method's, a model's or a data source's own
signature. Their sections here are made from those, so a new method needs no change in this file.
"""

import inspect
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from math import prod
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, final, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Strict,
    Tag,
    ValidationError,
    create_model,
)

from perfed.data import SOURCES, SPLITS, Federation, data_settings, prepare
from perfed.data.catalogue import Setting, settings_of
from perfed.errors import ConfigError, DataError, FieldError, require
from perfed.evaluation import AdaptOn
from perfed.experiment.simulate import Progress, Result, run
from perfed.methods import METHODS, Method
from perfed.models import MODELS
from perfed.objective import Model, Sampling, Task
from perfed.simulation import Engine, Sequential, Setup, Vectorised, Weighting

# What a model takes from the data; the rest of its settings are the user's.
_FROM_DATA = ("inputs", "image", "classes", "symbols")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def settings(self) -> dict[str, Any]:
        return {k: v for k in type(self).model_fields if (v := getattr(self, k)) is not None}


def _section(
    title: str, settings: Mapping[str, Setting], fixed: Mapping[str, Any]
) -> type[_Section]:
    """A section whose keys are these settings, and some fixed fields."""
    fields = dict(fixed)
    for key, (hint, default) in settings.items():
        fields[key] = (_from_toml(hint), ... if default is inspect.Parameter.empty else default)
    section: type[_Section] = create_model(title, __base__=_Section, **fields)
    return section


def _from_toml(hint: Any) -> Any:
    """TOML has arrays only, which a strict tuple would refuse."""
    if get_origin(hint) is tuple:
        return Annotated[hint, Strict(False)]
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(_from_toml(option) for option in get_args(hint))]  # noqa: UP007
    return hint


def _choice(
    tag: str, options: Mapping[str, Callable[..., Any]], skip: Sequence[str] = (), **common: Any
) -> Any:
    """A section whose `tag` names one of the options, and whose other keys are its parameters."""
    sections = []
    for name, target in options.items():
        settings = {k: v for k, v in settings_of(target).items() if k not in skip}
        sections.append(_section(name, settings, {tag: (Literal[name], ...), **common}))
    return Annotated[Union[tuple(sections)], Field(discriminator=tag)]  # noqa: UP007


def _data_choice() -> Any:
    """`[data]`: a section for every source and every split of it, with the settings of both."""
    sections = []
    for source, (_, usual) in SOURCES.items():
        for split in (None,) if usual is None else SPLITS:
            fixed: dict[str, Any] = {"source": (Literal[source], ...)}
            if usual is not None:
                fixed["split"] = (Literal[split], ... if split != usual else usual)
            tag = _data_tag(source, split)
            section = _section(tag, data_settings(source, split), fixed)
            sections.append(Annotated[section, Tag(tag)])
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
class EngineSection(_Section):
    """`[engine]`: how a run is computed; its results do not depend on it."""

    name: Literal["vectorised", "sequential"] = "vectorised"
    devices: int | None = None
    chunk: int | None = None

    def build(self, setup: Setup) -> Engine:
        """The engine that will run the setup."""
        if self.name == "sequential":
            for field in ("devices", "chunk"):
                value = getattr(self, field)
                require(value is None, field, value, "is for the vectorised engine only")
            return Sequential(setup)
        return Vectorised(setup, self.devices, self.chunk)


_L2 = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@final
class Config(_Section):
    """A run, as its TOML file says it."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    rounds: int = Field(default=100, ge=1)
    cohort: int = Field(default=10, ge=1)
    eval_every: int | None = Field(default=None, ge=1)
    adapt_on: AdaptOn = "train"
    weighting: Weighting = "uniform"
    sampling: Sampling = "replacement"
    data: _data_choice()  # type: ignore[valid-type]
    model: _choice("name", MODELS, skip=_FROM_DATA, l2=(_L2, 0.0))  # type: ignore[valid-type]
    method: _choice("name", METHODS)  # type: ignore[valid-type]
    engine: EngineSection = EngineSection()

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = (), **fixed: Any) -> Self:
        """Read a TOML file, then apply `section.key=value` overrides, then fixed values."""
        return cls.checked(overridden(_read(path), overrides) | fixed)

    @classmethod
    def checked(cls, values: dict[str, Any]) -> Self:
        """A valid configuration, or a `ConfigError` that lists every fault."""
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError("\n".join(_faults(error, values))) from None
        config.build_method()
        config.prepare_data()
        clients = config.data.clients if "clients" in type(config.data).model_fields else None
        if clients is not None and config.cohort > clients:
            raise ConfigError(
                f"cohort = {config.cohort}: must be between 1 and the number of clients, {clients}"
            )
        return config

    def build_method(self) -> Method:
        """The method."""
        settings = self.method.settings()
        with _naming("method"):
            return METHODS[settings.pop("name")](**settings)

    def prepare_data(self) -> Callable[[], Federation]:
        """What reads the data, its settings checked already."""
        with _naming("data"):
            return prepare(**self.data.settings())

    def build_federation(self) -> Federation:
        """The data."""
        read = self.prepare_data()
        with _naming("data"):
            return read()

    def build_model(self, federation: Federation) -> Model:
        """The model, fitted to the data's shape and classes."""
        settings, shape = self.model.settings(), federation.example_shape
        kind = MODELS[settings.pop("name")]
        vocabulary = federation.vocabulary
        from_data = {
            "inputs": prod(shape),
            "image": shape,
            "classes": federation.outputs,
            "symbols": 0 if vocabulary is None else len(vocabulary),
        }
        wanted = inspect.signature(kind).parameters
        with _naming("model"):
            reading = "symbols" in wanted
            if reading != (vocabulary is not None):
                reads = "reads symbols of a text" if reading else "reads numbers"
                others = [n for n, m in MODELS.items() if ("symbols" in settings_of(m)) != reading]
                allowed = f"{reads}, which these data are not; use {' or '.join(others)}"
                raise FieldError("name", self.model.name, allowed)
            if "image" in wanted and len(shape) != 3:
                allowed = f"needs images, but an input of these data has shape {shape}"
                raise FieldError("name", self.model.name, allowed)
            given = {k: v for k, v in (from_data | settings).items() if k in wanted}
            return kind(**given)

    def build(self, federation: Federation | None = None) -> Engine:
        """The engine, ready to run; data that are at hand already can be given."""
        federation = federation or self.build_federation()
        task = Task(self.build_model(federation), self.model.l2)
        with _naming():
            setup = Setup(
                federation,
                task,
                self.build_method(),
                self.cohort,
                self.seed,
                self.weighting,
                self.sampling,
            )
        with _naming("engine"):
            return self.engine.build(setup)

    def run(self, engine: Engine, on_progress: Callable[[Progress], None] | None = None) -> Result:
        """The whole run on its engine; without `eval_every`, scored about ten times."""
        eval_every = self.eval_every or max(1, self.rounds // 10)
        return run(engine, self.rounds, eval_every, self.adapt_on, on_progress)

    def resolved(self) -> dict[str, Any]:
        """Every setting, defaults included."""
        return self.model_dump(mode="json")


def overridden(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply overrides of the form `section.key=value`, the value written as in TOML."""
    values = {k: dict(v) if isinstance(v, dict) else v for k, v in values.items()}
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys) or len(keys) > 2:
            raise ConfigError(f"--set {override}: write it as section.key=value, or key=value")
        place = values
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {override}: {key} is not a section")
        place[keys[-1]] = _toml_value(text.strip())
    return values


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string: nobody wants to quote twice in a shell


@contextmanager
def _naming(*section: str) -> Iterator[None]:
    """Turn an error about a setting into one that says which section it is in."""
    try:
        yield
    except FieldError as error:
        raise ConfigError(f"{'.'.join([*section, str(error)])}") from None
    except DataError as error:
        raise ConfigError(f"{'.'.join(section)}: {error}") from None


def _faults(error: ValidationError, values: dict[str, Any]) -> list[str]:
    """One line for each setting at fault: its name, its value, and what is allowed."""
    reasons: dict[str, list[str]] = {}
    for fault in error.errors():
        path, keys = _place(fault, values)
        value: Any = values
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        name = ".".join(path)
        said = fault["type"] not in ("extra_forbidden", "missing", "union_tag_not_found")
        subject = f"{name} = {value!r}" if said else name
        reasons.setdefault(subject, []).append(_reason(fault, path[-1], keys))
    return [f"{subject}: {', or '.join(dict.fromkeys(r))}" for subject, r in reasons.items()]


def _place(fault: Any, values: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Where a fault is, as the user writes it, and the settings there are in that place."""
    path = [str(part) for part in fault["loc"]]
    if fault["type"] == "union_tag_invalid":
        if path == ["data"]:
            known = values["data"]["source"] in SOURCES
            return ["data", "split" if known else "source"], list(SPLITS if known else SOURCES)
        return [*path, fault["ctx"]["discriminator"].strip("'")], []
    section, choice = path[0], None
    if len(path) > 1 and section in ("data", "model", "method"):
        choice = path.pop(1)  # in a section with a choice this is the choice made, not a key
    keys = _keys_of(section, choice) if len(path) > 1 else _keys_of()
    return path[:2], keys


def _reason(fault: Any, key: str, keys: Sequence[str]) -> str:
    match fault["type"]:
        case "extra_forbidden":
            near = get_close_matches(key, keys, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return f"no such setting{hint} (there are: {', '.join(keys)})"
        case "missing":
            return "is missing"
        case "union_tag_not_found":
            tag = "source" if key == "data" else fault["ctx"]["discriminator"].strip("'")
            return f"must say its {tag}"
        case "union_tag_invalid":
            choices = ", ".join(f"'{choice}'" for choice in keys)
            return f"must be one of {choices or fault['ctx']['expected_tags']}"
        case "model_attributes_type":
            return "must be a section"
        case _:
            return str(fault["msg"]).replace("Input should", "must")


def _keys_of(section: str | None = None, choice: str | None = None) -> list[str]:
    """The settings there are: of the whole, of a section, or of one choice in it."""
    if section is None or section not in Config.model_fields:
        return list(Config.model_fields)
    annotation = Config.model_fields[section].annotation
    # A section with a choice is a union; one of data's is annotated with its tag, too.
    options = [get_args(o)[0] if get_args(o) else o for o in get_args(annotation) or (annotation,)]
    chosen = [option for option in options if choice in (None, option.__name__)]
    return list(chosen[0].model_fields) if chosen else []
