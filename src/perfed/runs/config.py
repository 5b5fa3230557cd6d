"""The typed configuration of a run: a TOML file, `--set` overrides, errors that name the field."""

import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Annotated, Any, Self, final

from pydantic import Field, SerializeAsAny, Strict

from perfed.core.errors import ConfigError, DataError, FieldError
from perfed.core.objective import Sampling
from perfed.core.task import Model, Precision, Task, check_precision
from perfed.core.trees import tree_size
from perfed.data import Federation, prepare
from perfed.data.catalog import settings_of
from perfed.evaluation import check_adapt_on
from perfed.methods import Method
from perfed.models import MODELS, PYTHON, python_model
from perfed.pipeline import Pipeline
from perfed.pipeline.codecs import Codec, Float32
from perfed.runs.config_errors import Errors, read_data, read_kind, read_section
from perfed.runs.presets import PRESETS, Preset, preset_of
from perfed.runs.sections import (
    CODEC,
    FROM_DATA,
    METHOD,
    MODEL,
    STAGE,
    WHOLE_CODEC,
    EngineSection,
    FederationSection,
    NetworkSection,
    OutputSection,
    Section,
    build_codec,
)
from perfed.simulation import Experiment, Network, Simulator, Weighting
from perfed.simulation.experiment import BatchNorm
from perfed.training import OnProgress, Result, Run, Trainer, TrainOptions

_FLOAT32 = {"name": "float32"}


class DataPart(Section):
    """The sections about data."""

    data: SerializeAsAny[Section]

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

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> Self:
        """Read a TOML file, then apply `section.key=value` overrides."""
        errors: Errors = []
        data = read_data(overridden(read_toml(path), overrides).get("data"), errors)
        if data is None:
            raise ConfigError("\n".join(errors))
        return cls(data=data)


@final
class Config(DataPart):
    """The configuration of a run, as in its TOML file.

    Example:
        >>> import perfed
        >>> config = perfed.Config.checked(
        ...     {
        ...         "rounds": 2,
        ...         "cohort": 3,
        ...         "data": {"source": "digits", "clients": 6},
        ...         "model": {"name": "mlr"},
        ...         "method": {"name": "pfedme", "lam": 15.0},
        ...     }
        ... )
        >>> engine = config.build()
        >>> engine.experiment.method.lam
        15.0
    """

    seed: int = Field(default=0, ge=0, lt=2**31)
    rounds: int = Field(default=100, ge=1)
    cohort: int = Field(default=10, ge=1)
    eval_every: int | None = Field(default=None, ge=1)
    eval_clients: int | None = Field(default=None, ge=1)
    eval_training: bool = False
    adapt_on: str = "train"
    weighting: Weighting = "uniform"
    sampling: Sampling = "replacement"
    precision: Precision = "float32"
    personal: Annotated[tuple[str, ...], Strict(False)] = ()
    batch_norm: BatchNorm = "shared"
    validation: float | None = Field(default=None, gt=0, lt=1)
    model: SerializeAsAny[Section]
    method: SerializeAsAny[Section]
    codec: SerializeAsAny[Section]
    pipeline: tuple[SerializeAsAny[Section], ...] | None = None
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
        """A valid configuration, or a `ConfigError` that lists every invalid setting."""
        errors: Errors = []
        codec = values.get("codec", _FLOAT32)
        if isinstance(codec, dict) and "name" not in codec:
            codec = _FLOAT32 | codec  # a downlink alone
        read = {"data": read_data(values.get("data"), errors)}
        rest_errors: Errors = []
        read["model"] = read_kind(MODEL, values.get("model"), ["model"], rest_errors)
        read["method"] = read_kind(METHOD, values.get("method"), ["method"], rest_errors)
        read["codec"] = read_kind(CODEC, codec, ["codec"], rest_errors)
        stages = _read_stages(values.get("pipeline"), rest_errors)
        plain = {k: v for k, v in values.items() if k not in (*read, "pipeline")}
        config: Self | None = read_section(
            cls, plain | {k: v or Section() for k, v in read.items()} | stages, [], errors
        )
        if errors or rest_errors or config is None:
            raise ConfigError("\n".join([*errors, *rest_errors]))
        config._check_together()
        return config

    def _check_together(self) -> None:
        """Raise unless settings fit each other, and the data can be read."""
        cohort = self.build_preset().cohort
        with _naming():
            check_precision(self.precision)
            check_adapt_on(self.adapt_on)
        self.build_downlink()
        self.prepare_data()
        network = self.build_network(1)
        clients = self.data.settings().get("clients")
        if network is not None and clients is not None:
            with _naming("network"):
                network.check(clients)
        least = self.federation.minimum
        if least is not None and least > cohort:
            raise ConfigError(
                f"federation.minimum = {least}: must be between 1 and the cohort, {cohort}"
            )
        if clients is not None and cohort > clients:
            field = "cohort" if cohort == self.cohort else "method.r"
            raise ConfigError(
                f"{field} = {cohort}: must be between 1 and the number of clients, {clients}"
            )

    @property
    def method_name(self) -> str:
        """The name of the method, or of the preset."""
        return str(self.method.settings()["name"])

    def build_preset(self) -> Preset:
        """The method, how its deltas travel, and the cohort."""
        name = self.method_name
        if name not in PRESETS:
            with _naming("method"):
                method = METHOD.build(self.method)
            return Preset(method, self._build_pipeline(), self.cohort)
        with _naming("method"):
            preset = preset_of(name, self.rounds, self.method.settings())
        plain = self.pipeline is None and not self.codec.settings()["error_feedback"]
        with _naming("codec"):
            own = build_codec(self.codec)
        if not plain or own not in (Float32(), preset.pipeline.codec):
            raise ConfigError(
                f"codec: {name} brings its own, with method.s levels; for another one use "
                'method.name = "fedavg"'
            )
        cohort = preset.cohort or self.cohort
        if "cohort" in self.model_fields_set and cohort != self.cohort:
            raise ConfigError(f"method.r = {cohort}: cohort is {self.cohort}; give one of the two")
        return preset._replace(cohort=cohort)

    def _build_pipeline(self) -> Pipeline:
        with _naming("codec"):
            codec, feedback = build_codec(self.codec), self.codec.settings()["error_feedback"]
        if self.pipeline is None:
            return Pipeline.of(codec, feedback)
        if feedback or codec != Float32():
            raise ConfigError("codec: [[pipeline]] defines the stages; give one of the two")
        with _naming("pipeline"):
            return Pipeline(tuple(STAGE.build(stage) for stage in self.pipeline))

    def build_downlink(self) -> Codec:
        """How the server's model is sent."""
        section = self.codec.settings().get("downlink")
        with _naming("codec", "downlink"):
            codec: Codec = Float32() if section is None else WHOLE_CODEC.build(section)
            return codec

    def build_network(self, parameters: int) -> Network | None:
        """What the run costs in time, for a model of so many parameters."""
        with _naming("network"):
            return None if self.network is None else self.network.build(parameters)

    def build_model(self, federation: Federation) -> Model:
        """The model, fitted to the data's shape and classes."""
        with _naming("model"):
            return build_model(
                self.model.settings(),
                federation.example_shape,
                federation.outputs,
                federation.vocabulary,
            )

    def scored(self, federation: Federation) -> Federation:
        """The data as this run uses them: scored on a validation part, if `validation` is set."""
        # By no seed of the run's: like the held-out data, the part is the same for all seeds.
        return federation if self.validation is None else federation.validation(self.validation)

    def build(self, federation: Federation | None = None, store: Path | None = None) -> Simulator:
        """The engine, ready to run.

        Args:
            federation: the data, if they are at hand already (`scored`).
            store: the folder for what clients keep, if it is not kept in memory.
        """
        experiment = self.build_experiment(federation or self.scored(self.build_federation()))
        with _naming("engine"):
            return self.engine.build(experiment, store)

    def build_experiment(self, federation: Federation, cohort: int | None = None) -> Experiment:
        """What is trained on these data; by another cohort where they are only some clients'."""
        model, preset = self.build_model(federation), self.build_preset()
        l2 = self.model.settings()["l2"]
        with _naming():
            return Experiment(
                federation,
                Task(model, l2, precision=self.precision),
                preset.method,
                cohort or preset.cohort,
                self.seed,
                self.weighting,
                self.sampling,
                preset.pipeline,
                self.build_downlink(),
                self.personal,
                self.batch_norm,
            )

    def train_options(self, keep_models: bool = False) -> TrainOptions:
        """How long to train, and how to score on the way; about ten times by default."""
        return TrainOptions(
            self.rounds,
            self.eval_every or max(1, self.rounds // 10),
            self.eval_clients,
            self.eval_training,
            self.adapt_on,
            keep_models and self.output.personal_models != "none",
        )

    def network_of(self, experiment: Experiment) -> Network | None:
        """What the run costs in time for its model."""
        network = self.build_network(tree_size(experiment.model_shape))
        if network is not None:
            with _naming("network"):
                network.check(experiment.federation.clients)
        return network

    def train(self, engine: Simulator, on_progress: OnProgress | None = None) -> Result:
        """The whole run on its engine, without a folder."""
        network = self.network_of(engine.experiment)
        return Trainer(self.train_options(), on_progress).train(Run(engine, network=network))

    def resolved(self) -> dict[str, Any]:
        """Every setting, defaults included, and what a preset stands for."""
        preset, values = self.build_preset(), self.model_dump(mode="json")
        values["cohort"] = preset.cohort
        if self.method_name in PRESETS:
            codec = preset.pipeline.codec
            settings = {k: v for k, v in vars(codec).items() if v is not None}
            values["codec"] |= {"name": codec.name} | settings
        return values


def _read_stages(values: Any, errors: Errors) -> dict[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, list):
        errors.append("pipeline: must be a list of stages, each a [[pipeline]] section")
        return {}
    stages = [read_kind(STAGE, own, ["pipeline", str(i)], errors) for i, own in enumerate(values)]
    return {"pipeline": tuple(stage for stage in stages if stage is not None)}


def build_model(
    settings: dict[str, Any],
    shape: tuple[int, ...],
    outputs: int,
    vocabulary: tuple[str, ...] | None,
) -> Model:
    """The model of a `[model]` section, for inputs of this shape and so many outputs."""
    name = settings["name"]
    if name == PYTHON:
        return python_model(settings, shape, outputs, len(vocabulary or ()))
    kind = MODELS[name]
    from_data = dict(
        zip(FROM_DATA, (prod(shape), shape, outputs, len(vocabulary or ())), strict=True)
    )
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


def build_method(settings: dict[str, Any], rounds: int) -> Method:
    """The method of a `[method]` section."""
    errors: Errors = []
    section = read_kind(METHOD, without_none(settings), ["method"], errors)
    if section is None:
        raise ConfigError("\n".join(errors))
    name = section.settings()["name"]
    if name in PRESETS:
        return preset_of(name, rounds, section.settings()).method
    method: Method = METHOD.build(section)
    return method


def without_none(value: Any) -> Any:
    """A resolved configuration as in a file, without what is None."""
    if isinstance(value, dict):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_none(v) for v in value]
    return value


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
        return text  # a bare word is a string: no need to quote twice in a shell


@contextmanager
def _naming(*section: str) -> Iterator[None]:
    """Add the section to an error about a setting."""
    try:
        yield
    except FieldError as error:
        raise ConfigError(f"{'.'.join([*section, str(error)])}") from None
    except DataError as error:
        raise ConfigError(f"{'.'.join(section)}: {error}") from None
