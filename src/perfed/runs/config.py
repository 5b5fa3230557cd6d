"""The typed configuration of a run: a TOML file, `--set` overrides, errors that name the field."""

import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Annotated, Any, Self, final

import jax
from pydantic import ConfigDict, Field, ValidationError

from perfed.pipeline.codecs import Codec, Float32
from perfed.data import Federation, prepare
from perfed.data.catalog import settings_of
from perfed.core.errors import ConfigError, DataError, FieldError
from perfed.evaluation.evaluator import AdaptOn
from perfed.runs.config_errors import faults
from perfed.runs.presets import FROM_RUN, RECIPES, Recipe, recipe_of
from perfed.runs.sections import (
    EngineSection,
    FederationSection,
    NetworkSection,
    OutputSection,
    Section,
    build_codec,
    choice,
    codec_choice,
    data_choice,
)
from perfed.training.trainer import Progress, Result, run
from perfed.methods import METHODS, Method
from perfed.models import MODELS
from perfed.core.objective import Model, Precision, Sampling, Task, check_precision
from perfed.simulation import Engine, Network, Setup, Weighting

# What a model takes from the data; the rest of its settings are the user's.
_FROM_DATA = ("inputs", "image", "classes", "symbols")

_L2 = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class DataPart(Section):
    """What says where the data come from."""

    data: data_choice()  # type: ignore[valid-type]

    def prepare_data(self) -> Callable[[], Federation]:
        """What reads the data, its settings checked already."""
        with _naming("data"):
            return prepare(**self.data.settings())

    def build_federation(self) -> Federation:
        """The data."""
        read = self.prepare_data()
        with _naming("data"):
            return read()


@final
class DataConfig(DataPart):
    """`[data]` alone, of a file that may hold more: enough to look at the data."""

    model_config = ConfigDict(extra="ignore")

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> Self:
        """Read a TOML file, then apply `section.key=value` overrides."""
        values = overridden(read_toml(path), overrides)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError("\n".join(faults(error, values, cls))) from None


@final
class Config(DataPart):
    """A run, as its TOML file says it."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    rounds: int = Field(default=100, ge=1)
    cohort: int = Field(default=10, ge=1)
    eval_every: int | None = Field(default=None, ge=1)
    eval_clients: int | None = Field(default=None, ge=1)
    score_training: bool = False
    adapt_on: AdaptOn = "train"
    weighting: Weighting = "uniform"
    sampling: Sampling = "replacement"
    precision: Precision = "float32"
    validation: float | None = Field(default=None, gt=0, lt=1)
    model: choice("name", MODELS, skip=_FROM_DATA, l2=(_L2, 0.0))  # type: ignore[valid-type]
    method: choice("name", METHODS | RECIPES, skip=FROM_RUN)  # type: ignore[valid-type]
    codec: codec_choice() = Field({"name": "float32"}, validate_default=True)  # type: ignore[valid-type]
    network: NetworkSection | None = None
    output: OutputSection = OutputSection()
    engine: EngineSection = EngineSection()
    federation: FederationSection = FederationSection()

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = (), **fixed: Any) -> Self:
        """Read a TOML file, then apply `section.key=value` overrides, then fixed values."""
        return cls.checked(overridden(read_toml(path), overrides) | fixed)

    @classmethod
    def checked(cls, values: dict[str, Any]) -> Self:
        """A valid configuration, or a `ConfigError` that lists every fault."""
        if isinstance(codec := values.get("codec"), dict) and "name" not in codec:
            values = values | {"codec": {"name": "float32"} | codec}  # a downlink alone
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError("\n".join(faults(error, values, cls))) from None
        cohort = config.build_recipe().cohort
        with _naming():
            check_precision(config.precision)
        config.build_downlink()
        config.prepare_data()
        network = config.build_network(1)
        clients = config.data.clients if "clients" in type(config.data).model_fields else None
        if network is not None and clients is not None:
            with _naming("network"):
                network.check(clients)
        least = config.federation.minimum
        if least is not None and least > cohort:
            raise ConfigError(
                f"federation.minimum = {least}: must be between 1 and the cohort, {cohort}"
            )
        if clients is not None and cohort > clients:
            field = "cohort" if cohort == config.cohort else "method.r"
            raise ConfigError(
                f"{field} = {cohort}: must be between 1 and the number of clients, {clients}"
            )
        return config

    def build_recipe(self) -> Recipe:
        """The method, how its changes are sent, and the cohort."""
        settings = self.method.settings()
        name = settings.pop("name")
        if name in METHODS:
            with _naming("method"):
                method = METHODS[name](**settings)
            with _naming("codec"):
                return Recipe(method, build_codec(self.codec), self.cohort)
        with _naming("method"):
            recipe = recipe_of(name, self.rounds, settings)
        if build_codec(self.codec) not in (Float32(), recipe.codec):
            raise ConfigError(
                f"codec: {name} brings its own, with method.s levels; for another one use "
                'method.name = "fedavg"'
            )
        cohort = recipe.cohort or self.cohort
        if "cohort" in self.model_fields_set and cohort != self.cohort:
            raise ConfigError(
                f"method.r = {cohort}: cohort says {self.cohort}; give one of the two"
            )
        return recipe._replace(cohort=cohort)

    def build_downlink(self) -> Codec:
        """How the server's model is sent."""
        with _naming("codec", "downlink"):
            return Float32() if self.codec.downlink is None else build_codec(self.codec.downlink)

    def build_network(self, parameters: int) -> Network | None:
        """What the run costs in time, for a model of so many parameters."""
        with _naming("network"):
            return None if self.network is None else self.network.build(parameters)

    def build_model(self, federation: Federation) -> Model:
        """The model, fitted to the data's shape and classes."""
        with _naming("model"):
            return built_model(
                self.model.settings(),
                federation.example_shape,
                federation.outputs,
                federation.vocabulary,
            )

    def scored(self, federation: Federation) -> Federation:
        """The data as this run uses them: scored on a validation part, if it says so."""
        # By no seed of the run's: like the held-out data, the part is the same for all seeds.
        return federation if self.validation is None else federation.validation(self.validation)

    def build(self, federation: Federation | None = None, store: Path | None = None) -> Engine:
        """The engine, ready to run.

        Args:
            federation: the data, if they are at hand already (`scored`).
            store: the folder for what clients keep, if it is not kept in memory.
        """
        setup = self.build_setup(federation or self.scored(self.build_federation()))
        with _naming("engine"):
            return self.engine.build(setup, store)

    def build_setup(self, federation: Federation, cohort: int | None = None) -> Setup:
        """What is run on these data; by another cohort where they are only some clients'."""
        model, recipe = self.build_model(federation), self.build_recipe()
        with _naming():
            return Setup(
                federation,
                Task(model, self.model.l2, precision=self.precision),
                recipe.method,
                cohort or recipe.cohort,
                self.seed,
                self.weighting,
                self.sampling,
                recipe.codec,
                self.build_downlink(),
            )

    @property
    def scored_every(self) -> int:
        """Clients are scored every so many rounds; unless it is said, about ten times."""
        return self.eval_every or max(1, self.rounds // 10)

    def network_of(self, engine: Engine) -> Network | None:
        """What the run costs in time on its engine."""
        leaves = jax.tree.leaves(engine.setup.model_shape())
        network = self.build_network(sum(leaf.size for leaf in leaves))
        if network is not None:
            with _naming("network"):
                network.check(engine.setup.federation.clients)
        return network

    def run(self, engine: Engine, on_progress: Callable[[Progress], None] | None = None) -> Result:
        """The whole run on its engine."""
        network = self.network_of(engine)
        return run(
            engine, self.rounds, self.scored_every, self.adapt_on, on_progress, network,
            score_training=self.score_training, eval_clients=self.eval_clients,
        )  # fmt: skip

    def resolved(self) -> dict[str, Any]:
        """Every setting, defaults included, and what a recipe stands for."""
        recipe, values = self.build_recipe(), self.model_dump(mode="json")
        values["cohort"] = recipe.cohort
        if self.method.name in RECIPES:
            settings = {k: v for k, v in vars(recipe.codec).items() if v is not None}
            values["codec"] |= {"name": recipe.codec.name} | settings
        return values


def built_model(
    settings: dict[str, Any],
    shape: tuple[int, ...],
    outputs: int,
    vocabulary: tuple[str, ...] | None,
) -> Model:
    """The model of a `[model]` section, for inputs of this shape and so many outputs."""
    name = settings["name"]
    kind = MODELS[name]
    from_data: dict[str, Any] = {
        "inputs": prod(shape),
        "image": shape,
        "classes": outputs,
        "symbols": 0 if vocabulary is None else len(vocabulary),
    }
    wanted = settings_of(kind)
    reading = "symbols" in wanted
    if reading != (vocabulary is not None):
        reads = "reads symbols of a text" if reading else "reads numbers"
        others = [n for n, m in MODELS.items() if ("symbols" in settings_of(m)) != reading]
        allowed = f"{reads}, which these data are not; use {' or '.join(others)}"
        raise FieldError("name", name, allowed)
    if "image" in wanted and len(shape) != 3:
        allowed = f"needs images, but an input of these data has shape {shape}"
        raise FieldError("name", name, allowed)
    given: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v
        for k, v in (from_data | settings).items()
        if k in wanted
    }
    return kind(**given)


def built_method(settings: dict[str, Any], rounds: int) -> Method:
    """The method of a `[method]` section."""
    settings = {k: v for k, v in settings.items() if v is not None}
    name = settings.pop("name")
    return (
        METHODS[name](**settings) if name in METHODS else recipe_of(name, rounds, settings).method
    )


def overridden(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply overrides of the form `section.key=value`, the value written as in TOML."""
    values = deepcopy(values)
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys) or len(keys) > 3:
            raise ConfigError(f"--set {override}: write it as section.key=value, or key=value")
        place = values
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {override}: {key} is not a section")
        place[keys[-1]] = _toml_value(text.strip())
    return values


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds."""
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
