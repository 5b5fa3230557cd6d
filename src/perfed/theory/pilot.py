"""A pilot: candidates trained for some rounds and scored on a part of the training data."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from math import inf
from typing import Any, NamedTuple

from perfed.core.errors import DivergedError
from perfed.data import Federation
from perfed.runs.config import Config
from perfed.simulation import Simulator
from perfed.training import Result, Run, Trainer, TrainOptions, TrainState

# The part of each client's training data that the pilot is scored on.
VALIDATION = 0.2

# How many candidates the second part of the pilot trains.
_FINALISTS = 4

Log = Callable[[str], None]


class PilotTrial(NamedTuple):
    """A candidate in the pilot.

    Attributes:
        settings: what it changes; empty: the settings as given.
        rounds: how many it was trained.
        loss: the validation loss; inf: it diverged.
        uplink: bytes that clients sent per round.
    """

    settings: dict[str, Any]
    rounds: int
    loss: float
    uplink: float


def pilot_engine(values: dict[str, Any], part: Federation) -> Simulator:
    """An engine on the pilot's data, which may have fewer clients, without a network."""
    own = {key: value for key, value in values.items() if key not in ("network", "validation")}
    cohort = Config.checked(values).build_preset().cohort
    return Config.checked(own | {"cohort": min(cohort, part.clients)}).build(part)


def run_pilot(
    given: dict[str, Any],
    base: dict[str, Any],
    candidates: Sequence[dict[str, float]],
    part: Federation,
    log: Log,
) -> list[PilotTrial]:
    """All candidates and the settings as given for some rounds, the best of them for more."""
    trials: list[dict[str, float]] = [{}, *candidates]
    engines = []
    for settings in trials:
        own = deepcopy(base if settings else given)
        own["method"] |= settings
        engines.append(pilot_engine(own, part))
    adapt_on = Config.checked(given).adapt_on
    rounds = int(base.get("rounds", 100))
    first = min(rounds, max(20, rounds // 10))
    more = min(rounds, 4 * first)
    log(f"pilot: {len(trials)} candidates, {first} rounds")
    results = _trained(engines, TrainOptions(first, adapt_on=adapt_on), [None] * len(engines))
    order = sorted(range(len(results)), key=lambda i: _loss(results[i]))
    # The settings as given stay, for comparison.
    finalists = sorted(i for i in {*order[:_FINALISTS], 0} if _loss(results[i]) < inf)
    others = [_trial(trials[i], first, results[i]) for i in order if i not in finalists]
    if more > first and finalists:
        log(f"pilot: {len(finalists)} candidates, {more} rounds")
        states = [results[i].train_state for i in finalists]  # type: ignore[union-attr]
        options = TrainOptions(more, adapt_on=adapt_on)
        longer = _trained([engines[i] for i in finalists], options, states)
        for i, result in zip(finalists, longer, strict=True):
            results[i] = result
    last = [_trial(trials[i], more, results[i]) for i in finalists]
    return sorted(last, key=lambda t: t.loss) + sorted(others, key=lambda t: t.loss)


def _trained(
    engines: Sequence[Simulator], options: TrainOptions, states: Sequence[TrainState | None]
) -> list[Result | DivergedError]:
    """Train all; runs that are the same program are computed together."""
    outcomes: dict[int, Result | DivergedError] = {}
    rest = list(range(len(engines)))
    while rest:
        first = engines[rest[0]].experiment
        same = [i for i in rest if first.same_program(engines[i].experiment)]
        rest = [i for i in rest if i not in same]
        runs = [Run(engines[i], state=states[i]) for i in same]
        outcomes |= dict(zip(same, Trainer(options).train_all(runs), strict=True))
    return [outcomes[i] for i in range(len(engines))]


def _trial(settings: dict[str, float], rounds: int, result: Result | DivergedError) -> PilotTrial:
    sent = inf if isinstance(result, DivergedError) else float(result.traffic.uplink.sum() / rounds)
    return PilotTrial(settings, rounds, _loss(result), sent)


def _loss(result: Result | DivergedError) -> float:
    if isinstance(result, DivergedError):
        return inf
    return float(result.scores["personalized"].loss.mean())
