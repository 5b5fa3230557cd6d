"""The built-in comparison of all methods: `comparison.toml`, run and laid side by side."""

import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from perfed.core.errors import ConfigError
from perfed.evaluation import ModelKind, Scores
from perfed.runs.config import Config, overridden
from perfed.simulation import Simulator
from perfed.training import Progress, Result


class Compared(NamedTuple):
    """One run of the comparison, ready to start, and the rows of the table it gives."""

    rows: dict[str, ModelKind]
    config: Config
    engine: Simulator


class ComparisonRow(NamedTuple):
    """One line of the comparison."""

    label: str
    scores: Scores
    seconds: float


def comparison(overrides: Sequence[str] = (), **fixed: Any) -> list[Compared]:
    """The runs, on the same data, with overrides of the sections they share."""
    for override in overrides:
        if override.split("=")[0].split(".")[0].strip() == "method":
            raise ConfigError(
                f"--set {override}: the built-in comparison sets each method itself; give a CONFIG "
                "to run one method with settings of your own"
            )
    text = files("perfed.runs").joinpath("comparison.toml").read_text(encoding="utf-8")
    values = tomllib.loads(text)
    runs = values.pop("run")
    shared = overridden(values, overrides) | fixed
    configs = []
    for entry in runs:
        config = Config.checked(shared | {"method": entry["method"]})
        everyone = {"cohort": config.data.settings()["clients"]} if entry.get("everyone") else {}
        configs.append(config.model_copy(update=everyone))
    federation = configs[0].scored(configs[0].build_federation())
    return [
        Compared(entry["rows"], config, config.build(federation))
        for entry, config in zip(runs, configs, strict=True)
    ]


def compare(
    entries: Sequence[Compared], on_progress: Callable[[str, Progress], None] | None = None
) -> Iterator[tuple[Compared, Result]]:
    """Run the entries one after another."""
    for entry in entries:
        label = " / ".join(entry.rows)

        def report(progress: Progress, label: str = label) -> None:
            if on_progress is not None:
                on_progress(label, progress)

        yield entry, entry.config.train(entry.engine, report)


def rows_of(entry: Compared, result: Result) -> list[ComparisonRow]:
    """The lines one run gives."""
    return [
        ComparisonRow(label, result.scores[kind], result.seconds)
        for label, kind in entry.rows.items()
    ]
