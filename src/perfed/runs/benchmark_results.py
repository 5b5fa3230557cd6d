"""What a benchmark came to: one row per method, and which method to take."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from perfed.core.errors import DataError
from perfed.evaluation import Gain, Values, by_name, gain_over
from perfed.runs import run_dir
from perfed.runs.benchmark import BenchmarkRun
from perfed.runs.files import read_json
from perfed.runs.local_run import LOCAL
from perfed.runs.statistics import over_seeds
from perfed.runs.sweep import GridPoint, Place, Sweep

# The method that stands for one global model.
GLOBAL = "fedavg"
FEDAVG_MODEL = "the global model (fedavg)"


class MethodResult(NamedTuple):
    """One method, with its chosen settings, after the last round; scores are on held-out data.

    Attributes:
        method: its name.
        settings: what was chosen on validation data.
        mean: the mean over clients and seeds; NaN if it failed.
        half: half of its 95 % interval over seeds; NaN: one seed.
        tenth: the 10th percentile of the clients.
        hurt: the share of clients with a worse score by their own model than by the global one;
            None: it has not both models.
        below_local: the share of clients with a worse score than by Local; None: not known.
        uplink: bytes that a client has sent, a mean.
        downlink: bytes that a client has received, a mean.
        simulated_seconds: the time over the network of the configuration, if it has one.
        seconds: the time here.
        validation: the mean over clients on validation data; NaN if it failed.
        failure: why it failed, if it did.
    """

    method: str
    settings: tuple[str, ...] = ()
    mean: float = math.nan
    half: float = math.nan
    tenth: float = math.nan
    hurt: float | None = None
    below_local: float | None = None
    uplink: float = math.nan
    downlink: float = math.nan
    simulated_seconds: float | None = None
    seconds: float = math.nan
    validation: float = math.nan
    failure: str | None = None


class Versus(NamedTuple):
    """A method against another one, client by client, on validation data.

    Attributes:
        other: the other one.
        mean: the mean gain over clients.
        half: half of its paired 95 % interval over clients; NaN: one client.
        gain: who gains and who loses.
    """

    other: str
    mean: float
    half: float
    gain: Gain

    @property
    def told_apart(self) -> bool:
        """Whether the interval leaves out 0."""
        return abs(self.mean) > self.half


class Recommendation(NamedTuple):
    """Which method to take; all by validation data.

    Attributes:
        method: the best by its mean.
        point: its settings.
        values: the configuration to run.
        score: the score's name.
        mean: its mean over clients.
        names: the clients.
        clients: their scores.
        rows: how many validation rows each has.
        local: against Local; None: it is Local, or Local was not compared.
        common: against the global model; None: it is that, or there was none.
        close: methods that the paired interval does not tell apart from it, the best first.
    """

    method: str
    point: GridPoint
    values: dict[str, Any]
    score: str
    mean: float
    names: tuple[str, ...]
    clients: Values
    rows: tuple[int, ...]
    local: Versus | None
    common: Versus | None
    close: tuple[str, ...]


class BenchmarkResults(NamedTuple):
    """All of it.

    Attributes:
        name: of the benchmark.
        what: what it is.
        score: the score's name.
        seeds: how many seeds there are.
        trials: how many settings of each method were tried.
        rounds: how many rounds.
        methods: one for each method.
        recommendation: which to take; None: no method has a score.
        folders: the runs on held-out data.
    """

    name: str
    what: str
    score: str
    seeds: int
    trials: int
    rounds: int
    methods: tuple[MethodResult, ...]
    recommendation: Recommendation | None
    folders: tuple[str, ...]


def benchmark_results(run: BenchmarkRun) -> BenchmarkResults:
    """Read what the runs have recorded."""
    sweep, benchmark = run.sweep, run.benchmark
    chosen = {o.point.method: o.point for o in run.outcomes if o.tested and o.scores}
    alone = _summaries(sweep, chosen[LOCAL], "test") if LOCAL in chosen else None
    methods, score, folders = [], "accuracy", []
    for method in benchmark.methods:
        if method.name not in chosen:
            failures = [o.failure for o in run.outcomes if o.point.method == method.name]
            failure = next((text for text in failures if text is not None), "it has no score")
            methods.append(MethodResult(method.name, failure=failure))
            continue
        point = chosen[method.name]
        summaries = _summaries(sweep, point, "test")
        score = next(iter(summaries[0][point.kind]))
        validation = next(o.mean for o in run.outcomes if o.point is point and not o.tested)
        methods.append(_method_result(point, summaries, alone, validation))
        folders += [str(sweep.folder_of(point, "test", seed)) for seed in range(sweep.seeds)]
    return BenchmarkResults(
        name=benchmark.name,
        what=benchmark.what,
        score=score,
        seeds=sweep.seeds,
        trials=max(len(method.trials(benchmark.trials)) for method in benchmark.methods),
        rounds=int(sweep.points[0].values.get("rounds", 100)),
        methods=tuple(methods),
        recommendation=_recommendation(run, chosen),
        folders=tuple(folders),
    )


def _summaries(sweep: Sweep, point: GridPoint, place: Place) -> list[dict[str, Any]]:
    """The summaries of a point's runs, one per seed."""
    seeds = sweep.seeds if place == "test" else (sweep.tuning_seeds or sweep.seeds)
    return [
        read_json(sweep.folder_of(point, place, seed) / run_dir.SUMMARY) for seed in range(seeds)
    ]


def _method_result(
    point: GridPoint,
    summaries: Sequence[dict[str, Any]],
    alone: Sequence[dict[str, Any]] | None,
    validation: float,
) -> MethodResult:
    kind = point.kind
    score = next(iter(summaries[0][kind]))
    spread = over_seeds(np.array([s[kind][score]["mean"] for s in summaries], float))
    hurt = below = None
    if kind == "personalized" and "global" in summaries[0]:
        hurt = _mean([s["worse_off"]["than_global"]["share"] for s in summaries])
    if alone is not None and point.method != LOCAL:
        # By every seed of Local in turn: the same seed is the same first model.
        pairs = zip(summaries, alone, strict=True)
        below = _mean([_share_below(own, kind, local, score) for own, local in pairs])
    simulated = [s["simulated_seconds"] for s in summaries]
    return MethodResult(
        method=point.method,
        settings=point.settings,
        mean=float(spread.mean),
        half=float(spread.half),
        tenth=_mean([s[kind][score]["p10"] for s in summaries]),
        hurt=hurt,
        below_local=below,
        uplink=_mean([_mean(s["traffic"]["client_uplink_bytes"]) for s in summaries]),
        downlink=_mean([_mean(s["traffic"]["client_downlink_bytes"]) for s in summaries]),
        simulated_seconds=None if None in simulated else _mean(simulated),
        seconds=_mean([s["seconds"] for s in summaries]),
        validation=validation,
    )


def _share_below(own: dict[str, Any], kind: str, local: dict[str, Any], score: str) -> float:
    alone = by_name(local["personalized"][score]["clients"], local["names"], own["names"])
    mine = by_name(own[kind][score]["clients"], own["names"], own["names"])
    return gain_over(mine, alone, score).share_worse


def _mean(values: Sequence[float | None]) -> float:
    return float(np.mean([math.nan if value is None else value for value in values]))


def _recommendation(run: BenchmarkRun, chosen: dict[str, GridPoint]) -> Recommendation | None:
    """The best on validation data, and how it stands to the others there."""
    means = {
        o.point.method: o.mean
        for o in run.outcomes
        if not o.tested and chosen.get(o.point.method) is o.point and o.scores
    }
    if not means:
        return None
    # The headline, accuracy or R2, is better when larger.
    ranked = sorted(means, key=lambda name: -means[name])
    names = tuple(run.validation.names)
    scores = {name: _validation_scores(run.sweep, chosen[name], names) for name in ranked}
    first = _summaries(run.sweep, chosen[ranked[0]], "validation")[0]
    best, score = ranked[0], next(iter(first["personalized"]))
    local = common = None
    if LOCAL in scores and best != LOCAL:
        local = versus(scores[best], scores[LOCAL], LOCAL, score)
    if GLOBAL in scores and best != GLOBAL:
        common = versus(scores[best], scores[GLOBAL], FEDAVG_MODEL, score)
    elif GLOBAL not in scores and "global" in first:
        own = by_name(first["global"][score]["clients"], first["names"], names)
        common = versus(scores[best], own, "its own global model", score)
    against = [versus(scores[best], scores[name], name, score) for name in ranked[1:]]
    return Recommendation(
        method=best,
        point=chosen[best],
        values=run.benchmark.config_of(chosen[best]),
        score=score,
        mean=means[best],
        names=names,
        clients=scores[best],
        rows=tuple(run.validation.test.size.tolist()),
        local=local,
        common=common,
        close=tuple(one.other for one in against if not one.told_apart),
    )


def _validation_scores(sweep: Sweep, point: GridPoint, names: Sequence[str]) -> Values:
    """Every client's score on validation data, a mean over seeds."""
    found = []
    for summary in _summaries(sweep, point, "validation"):
        scores = summary[point.kind]
        values = scores[next(iter(scores))]["clients"]
        found.append(by_name(values, summary["names"], names))
    return np.asarray(np.mean(found, axis=0))


def versus(
    own: Float[np.ndarray, " clients"], other: Float[np.ndarray, " clients"], name: str, score: str
) -> Versus:
    """One method's clients against another's: the paired interval over clients."""
    gain = gain_over(own, other, score)
    known = gain.clients[np.isfinite(gain.clients)]
    if not len(known):
        raise DataError(f"no client has a score on validation data with which to compare {name}")
    spread = over_seeds(known)
    return Versus(name, float(spread.mean), float(spread.half), gain)
