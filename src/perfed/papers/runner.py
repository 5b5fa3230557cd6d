"""Run a reproduction: what is not finished yet, scored in all the ways that are asked for."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perfed.core.errors import ConfigError, DivergedError
from perfed.data import Federation
from perfed.evaluation import SimulationEvaluator
from perfed.papers.reproduction import Protocol, Reproduction
from perfed.papers.results import Results, rescored_name
from perfed.runs.adapt import load_model
from perfed.runs.batch import Data, Entry, data_of, record_batch
from perfed.runs.config import Config
from perfed.runs.files import read_json, write_whole
from perfed.runs.recording import recorded_config
from perfed.runs.run_dir import MODEL, SUMMARY
from perfed.runs.summary import summary_bytes
from perfed.training import Progress

_CHOICE = "reproduction.json"


def reproduce(
    what: Reproduction,
    seeds: int,
    folder: Path,
    on_progress: Callable[[str, Progress], None],
    log: Callable[[str], None],
) -> Results:
    """Run what is not finished yet, and score it in all the ways that are asked for.

    Raises:
        ConfigError: some data are not there, or a finished run is of other settings; nothing has
            been run.
    """
    entries = what.entries(seeds, folder)
    data: Data = {}
    for entry in entries:
        if entry.finished:
            _check_settings(entry)
        else:
            data_of(Config.checked(entry.values), data)
    failures = record_batch(entries, on_progress, log, data)
    for protocol in what.protocols:
        if protocol.adapt_on is not None:
            _rescore(what, seeds, folder, protocol, log, data)
    return Results(what, seeds, folder, failures)


def check_folder(folder: Path, what: Reproduction, seeds: int) -> None:
    """Write what the folder is of; raise if it holds something else."""
    path = folder / _CHOICE
    entries = {entry.name: entry.values for entry in what.entries(seeds, folder)}
    runs = json.loads(json.dumps(entries))
    if path.exists():
        before = read_json(path)
        if any(before.get(name, values) != values for name, values in runs.items()):
            raise ConfigError(f"{folder} holds another reproduction; name another one by --out")
        runs = before | runs
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(runs, indent=1).encode())


def _check_settings(entry: Entry) -> None:
    """A finished run is one of the settings that are asked for now."""
    now = json.loads(summary_bytes(Config.checked(entry.values).resolved()))
    differ = _differences(read_json(entry.folder / SUMMARY)["config"], now)
    if differ:
        raise ConfigError(
            f"{entry.name}: {entry.folder} holds a finished run of other settings "
            f"({'; '.join(differ)}); remove it, or name another folder"
        )


def _differences(before: Any, now: Any, at: str = "") -> list[str]:
    """What differs, by name; settings that an older record does not know yet do not count."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            line
            for key, value in before.items()
            for line in _differences(value, now.get(key), f"{at}.{key}" if at else key)
        ]
    return [] if before == now else [f"{at} was {before!r}, is {now!r} now"]


def _rescore(
    what: Reproduction,
    seeds: int,
    folder: Path,
    protocol: Protocol,
    log: Callable[[str], None],
    data: Data,
) -> None:
    """Score finished runs' models once more, adapted on other data."""
    for row in what.rows:
        for method, values in row.runs.items():
            places = [what.place(folder, row.name, method, seed) for seed in range(seeds)]
            todo = [
                place
                for place in places
                if (place / SUMMARY).exists() and not (place / rescored_name(protocol)).exists()
            ]
            config = Config.checked(values)
            if not todo or config.adapt_on == protocol.adapt_on:
                continue
            assert protocol.adapt_on is not None
            log(f"{row.name}: {method}, adapted on {protocol.adapt_on} data")
            scores = _scores(todo, data_of(config, data), protocol)
            for place, summary in zip(todo, scores, strict=True):
                write_whole(place / rescored_name(protocol), json.dumps(summary).encode())


def _scores(
    places: Sequence[Path], federation: Federation, protocol: Protocol
) -> list[dict[str, Any]]:
    engines, states = [], []
    for place in places:
        config = recorded_config(place)
        engine = config.build(federation)
        start = engine.init()
        round = start.round + config.rounds
        engines.append(engine)
        params, _ = engine.experiment.divided(load_model(place / MODEL).params)
        states.append(start._replace(params=params, round=round))
    assert protocol.adapt_on is not None
    evaluators = [SimulationEvaluator(engine, protocol.adapt_on) for engine in engines]
    found: list[dict[str, Any]] = []
    for evaluation in evaluators[0].evaluate_runs(evaluators, states):
        if isinstance(evaluation, DivergedError):
            raise evaluation
        found.append(
            {
                str(kind): {
                    name: {"mean": s.mean, "weighted": s.weighted, "worst": s.worst}
                    for name, s in scores.summary().items()
                }
                for kind, scores in evaluation.scores.items()
            }
        )
    return found
