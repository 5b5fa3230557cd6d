"""Benchmarks: all methods on the same data, each tuned by the same number of trials.

A named benchmark is a TOML file of the package; a configuration of the user's makes one of its own
data. Either way the methods and their grids are those of `benchmarks/methods.toml`.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Self, final

from perfed.core.errors import ConfigError
from perfed.data import Federation
from perfed.evaluation import ModelKind
from perfed.methods import find_method
from perfed.runs.batch import Data, data_of
from perfed.runs.config import Config, overridden, read_toml
from perfed.runs.presets import PRESETS
from perfed.runs.sweep import GridPoint, Outcome, Sweep
from perfed.training import Progress

_METHODS = "methods"
_ALL = "all"
_VALIDATION = 0.25
_SEEDS = 5

# How `--quick` shortens a run of the user's own data; a named benchmark says so itself.
_QUICK_ROUNDS, _QUICK_SEEDS, _QUICK_TRIALS = 5, 2, 2


class TunedMethod(NamedTuple):
    """One of the methods compared, as in `methods.toml`.

    Attributes:
        name: what it is called in tables.
        settings: those of `[method]` that are fixed.
        grid: values to choose from, by setting.
        steps: which part of the local steps per round some settings are.
        kind: the model that is scored.
        everyone: whether every client trains in every round.
        quick: whether it is one of the few that `--quick` compares.
    """

    name: str
    settings: dict[str, Any]
    grid: dict[str, list[Any]]
    steps: dict[str, float]
    kind: ModelKind
    everyone: bool
    quick: bool

    def trials(self, most: int | None) -> list[tuple[str, ...]]:
        """Combinations of the grid as overrides: all, or so many of them at even distances."""
        axes = [[f"method.{key}={value}" for value in values] for key, values in self.grid.items()]
        every = list(product(*axes))
        if most is None or most >= len(every):
            return every
        return [every[i * len(every) // most] for i in range(most)]

    def section(self, local_steps: int, batch: int | str) -> dict[str, Any]:
        """Its `[method]`, with as many local steps per round as the others."""
        work = {name: max(1, round(part * local_steps)) for name, part in self.steps.items()}
        return self.settings | work | {"batch": batch}


@final
@dataclass(frozen=True)
class Benchmark:
    """What is compared, and how it is tuned.

    Attributes:
        name: what it is called.
        what: what it is, in a sentence.
        values: the configuration that all methods share; it has no `[method]`.
        methods: the methods.
        local_steps: local steps per round.
        batch: examples per step.
        seeds: with how many seeds chosen settings are trained.
        trials: how many combinations of each grid are tried; None: all.
        whole_run: the configuration that methods share in a run that is not quick.
    """

    name: str
    what: str
    values: dict[str, Any]
    methods: tuple[TunedMethod, ...]
    local_steps: int
    batch: int | str
    seeds: int = _SEEDS
    trials: int | None = None
    whole_run: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def named(cls, name: str, quick: bool = False, settings: Sequence[str] = ()) -> Self:
        """One of the package's.

        Args:
            name: one of `benchmark_names`.
            quick: with fewer rounds, seeds, trials and methods.
            settings: `section.key=value` for all methods.
        """
        if name not in benchmark_names():
            known = ", ".join(benchmark_names())
            raise ConfigError(f"{name}: no such benchmark, and no file; there are {known}")
        file = _read(name)
        short, settings = file["quick"] if quick else {}, _checked_settings(settings)
        values = overridden(file["run"], [*short.get("set", []), *settings])
        return cls(
            name=name,
            what=file["what"],
            values=values,
            methods=tuned_methods(quick),
            local_steps=file["local_steps"],
            batch=file["batch"],
            seeds=short.get("seeds", _SEEDS),
            trials=short.get("trials"),
            whole_run=overridden(file["run"], settings),
        )

    @classmethod
    def of_config(cls, path: Path, quick: bool = False, settings: Sequence[str] = ()) -> Self:
        """One of a user's configuration: its data, model, rounds, and its method's local work."""
        values = overridden(read_toml(path), _checked_settings(settings))
        _check_own(values)
        config = Config.checked(values)
        method = config.method.settings()
        is_preset = config.method_name in PRESETS
        kind = find_method("fedavg" if is_preset else config.method_name)
        values = {k: v for k, v in values.items() if k != "method"}
        values["cohort"] = config.build_preset().cohort
        short = {"rounds": max(1, config.rounds // _QUICK_ROUNDS)} if quick else {}
        return cls(
            name=path.stem,
            what=f"The data of {path.name}.",
            values=values | short,
            methods=tuned_methods(quick),
            local_steps=method.get(kind.local_steps, 10),
            batch=method.get("batch", 20),
            seeds=_QUICK_SEEDS if quick else _SEEDS,
            trials=_QUICK_TRIALS if quick else None,
            whole_run=values,
        )

    def only(self, names: Sequence[str]) -> Self:
        """Of these methods; `all` stands for all there are."""
        known = {method.name: method for method in tuned_methods()}
        if list(names) == [_ALL]:
            names = list(known)
        for name in names:
            if name not in known:
                raise ConfigError(f"--methods {name}: there are {', '.join(known)}, or {_ALL}")
        return replace(self, methods=tuple(known[name] for name in dict.fromkeys(names)))

    def points(self, clients: int | None = None) -> list[GridPoint]:
        """All that is tried, checked.

        Args:
            clients: how many clients the data have, if that is known.
        """
        found = []
        for method in self.methods:
            everyone = {"cohort": clients} if method.everyone and clients is not None else {}
            values = self.values | everyone
            # Hundreds of runs' personal models would fill a disk.
            values["output"] = {"personal_models": "none"} | self.values.get("output", {})
            values["method"] = method.section(self.local_steps, self.batch)
            trials = method.trials(self.trials)
            # The others differ from the first in numbers only, and are checked before they run.
            Config.checked(overridden(values, trials[0]))
            for chosen in trials:
                whole = overridden(values, chosen)
                found.append(GridPoint(method.name, chosen, whole, method.kind))
        return found

    def config_of(self, point: GridPoint) -> dict[str, Any]:
        """The configuration of a point as a user would run it: not shortened, with its models."""
        return {**self.whole_run, **{key: point.values[key] for key in ("cohort", "method")}}


class BenchmarkRun(NamedTuple):
    """A benchmark that was run.

    Attributes:
        benchmark: what it is.
        sweep: its runs, and where they are.
        outcomes: what came of every point.
        validation: the data that settings were chosen on.
    """

    benchmark: Benchmark
    sweep: Sweep
    outcomes: tuple[Outcome, ...]
    validation: Federation


def run_benchmark(
    benchmark: Benchmark,
    folder: Path,
    on_progress: Callable[[str, Progress], None],
    log: Callable[[str], None],
) -> BenchmarkRun:
    """Train all that is not finished yet.

    Raises:
        ConfigError: settings are invalid, or the folder holds something else; nothing has been run.
        DataError: the data cannot be read; nothing has been run.
    """
    first, data = benchmark.points()[0].values, Data()
    validation = data_of(Config.checked(first | {"validation": _VALIDATION}), data)
    points = benchmark.points(data_of(Config.checked(first), data).clients)
    # One seed to choose by: the seeds of the table are for what was chosen.
    sweep = Sweep(tuple(points), benchmark.seeds, folder, _VALIDATION, 1, always_validate=True)
    outcomes = sweep.run(on_progress, log, data)
    return BenchmarkRun(benchmark, sweep, tuple(outcomes), validation)


def benchmark_names() -> list[str]:
    """The benchmarks of the package; the one that runs anywhere is the first."""
    found = [path.name for path in files("perfed").joinpath("benchmarks").iterdir()]
    names = {name.removesuffix(".toml") for name in found if name.endswith(".toml")}
    return sorted(names - {_METHODS}, key=lambda name: (name != "digits", name))


def benchmark_summary(name: str) -> str:
    """What a benchmark is, in a sentence."""
    return str(_read(name)["what"])


def tuned_methods(quick: bool = False) -> tuple[TunedMethod, ...]:
    """The methods that benchmarks compare: all, or the few of `--quick`."""
    every = [_tuned_method(name, own) for name, own in _read(_METHODS).items()]
    return tuple(method for method in every if method.quick or not quick)


def _tuned_method(name: str, own: Mapping[str, Any]) -> TunedMethod:
    kind = find_method(own["settings"]["name"])
    return TunedMethod(
        name=name,
        settings=own["settings"],
        grid=own["grid"],
        steps=own.get("steps", {kind.local_steps: 1.0}),
        kind=own.get("model", "personalized"),
        everyone=own.get("everyone", False),
        quick=own.get("quick", False),
    )


def _read(name: str) -> dict[str, Any]:
    text = files("perfed").joinpath("benchmarks", f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _checked_settings(settings: Sequence[str]) -> Sequence[str]:
    """Overrides that do not touch what a benchmark sets itself."""
    for override in settings:
        section = override.partition("=")[0].partition(".")[0].strip()
        if section in ("method", "seed", "validation"):
            raise ConfigError(f"--set {override}: a benchmark sets {section} itself")
    return settings


def _check_own(values: Mapping[str, Any]) -> None:
    """Raise if a configuration says what a benchmark sets itself."""
    for key in ("seed", "validation"):
        if key in values:
            raise ConfigError(f"{key}: a benchmark sets it itself; leave it out")
    if values.get("output", {}).get("local") is not None:
        raise ConfigError("output.local: a benchmark has its own runs of Local; leave it out")
