"""Settings that keep a run within a target of bytes or time."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import ceil
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from perfed.core.errors import ConfigError
from perfed.core.random import Purpose, fold
from perfed.core.trees import Params, row
from perfed.pipeline import Pipeline
from perfed.pipeline.codecs import Codec, Float32, LowPrecision
from perfed.runs.config import Config
from perfed.simulation import EngineState, Experiment, Simulator, Traffic
from perfed.simulation.experiment import ClientRecord, DeviceData
from perfed.simulation.round import broadcast, client_update
from perfed.theory import bounds

# How many clients' messages, and how many rounds, are examined for a target.
_SENDERS = 8
_TIMED = 40

# Codecs from the finest to the coarsest; 0 levels: float32.
_LEVELS = (0, 127, 15, 4, 1)
_PERIODS = (1, 2, 5, 10, 20, 50)


class Reason(NamedTuple):
    """A setting, its value, and why."""

    setting: str
    value: Any
    why: str


class SentExample(NamedTuple):
    """What a client would send after one local update: its delta, and what goes beside it."""

    delta: Params
    extra: Params | None


def sent_examples(engine: Simulator) -> list[SentExample]:
    """What some clients would send after one local update, without loss."""
    plain = replace(engine.experiment, pipeline=Pipeline())

    def sent(
        _: Experiment, data: DeviceData, state: EngineState, record: ClientRecord, client: Array
    ) -> SentExample:
        record = record._replace(residual=None)
        update = client_update(plain, data, broadcast(plain, state), record, state.round, client)
        return SentExample(update.delta, update.extra)

    some = list(range(min(_SENDERS, plain.federation.clients)))
    updates = engine.map_clients(sent)(engine.init(), some)
    return [row(updates, i) for i in some]


def message_bytes(levels: int, examples: Sequence[SentExample]) -> int:
    """How many bytes a client sends per round: the longest of the examples, and a tenth more."""
    longest = max(
        sum(
            _codec(levels).bits(fold(0, Purpose.UPLINK, 0, i), tree) // 8
            for tree in example
            if jax.tree.leaves(tree)
        )
        for i, example in enumerate(examples)
    )
    return ceil((1.1 if levels else 1.0) * longest)


def within_bytes(
    config: Config, engine: Simulator, examples: Sequence[SentExample], budget: float
) -> list[Reason]:
    """The finest messages that the budget allows for all rounds; fewer rounds if none does."""
    experiment = engine.experiment
    rounds, r, n = config.rounds, experiment.cohort, experiment.federation.clients
    lengths = {levels: message_bytes(levels, examples) for levels in _LEVELS}
    delta = examples[0].delta
    for levels, length in lengths.items():
        if rounds * r * length <= budget:
            why = f"the finest with which {rounds} rounds of {r} fit into {budget:,.0f} bytes"
            reasons = _codec_reasons(levels, length, delta, why)
            larger = min(n, int(budget // (rounds * length)))
            if larger > r:
                why = f"the budget has room for {larger} messages per round"
                reasons.append(Reason("cohort", larger, why))
            else:
                reasons.append(Reason("cohort", r, "unchanged: the budget has no room for more"))
            return reasons
    length = lengths[1]
    fewer = int(budget // (r * length))
    if fewer < 1:
        raise ConfigError(
            f"--target-bytes {budget:,.0f}: one round of {r} messages takes {r * length:,} bytes "
            "even with one level; use a smaller cohort"
        )
    reasons = _codec_reasons(1, length, delta, "the coarsest codec")
    return [*reasons, Reason("rounds", fewer, f"as many as {budget:,.0f} bytes allow")]


def within_seconds(
    config: Config, engine: Simulator, examples: Sequence[SentExample], budget: float
) -> list[Reason]:
    """Messages and periods with which most steps, less what quantizing costs, fit in the time."""
    experiment = engine.experiment
    network = config.network_of(experiment)
    assert network is not None
    name = experiment.method.local_steps
    r, n = experiment.cohort, experiment.federation.clients
    delta = examples[0].delta
    sizes = tuple(leaf.size for leaf in jax.tree.leaves(delta))
    down = experiment.downlink.bits(fold(0, Purpose.DOWNLINK, 0), delta) // 8
    train = np.asarray(experiment.federation.train.size)
    cohorts = np.array([np.asarray(experiment.sample_cohort(k)) for k in range(_TIMED)], np.int32)
    best: tuple[float, int, int, float, int] | None = None
    for levels, tau in product(_LEVELS, _PERIODS):
        length = message_bytes(levels, examples)
        method = replace(experiment.method, **{name: tau})  # type: ignore[type-var]
        gradients = np.array([method.gradient_count(int(size)) for size in train])
        traffic = Traffic(cohorts, np.full((_TIMED, r), length), np.full(_TIMED, down))
        seconds = float(network.seconds(traffic, gradients, config.seed, 0).mean())
        rounds = int(budget // seconds)
        q = _codec(levels).variance(sizes) or 0.0
        run = bounds.RunSize(rounds, tau, r, n)
        if rounds < 1 or 1 < tau > bounds.longest_period(q, run):
            continue
        weight = rounds * tau / (1 + q / r)
        if best is None or weight > best[0]:
            best = (weight, levels, tau, seconds, rounds)
    if best is None:
        raise ConfigError(f"--target-time {budget:g}: a single round takes longer")
    _, levels, tau, seconds, rounds = best
    why = f"with periods of {tau} the most steps, weighted by 1/(1 + q/r), fit into {budget:g} s"
    return [
        *_codec_reasons(levels, message_bytes(levels, examples), delta, why),
        Reason(
            f"method.{name}",
            tau,
            "the best period: FedPAQ's (16) limits it to a multiple of sqrt(T)",
        ),
        Reason("rounds", rounds, f"a round takes {seconds:.3g} s over this network"),
        Reason("cohort", r, "unchanged"),
    ]


def _codec(levels: int) -> Codec:
    return LowPrecision(levels) if levels else Float32()


def _codec_reasons(levels: int, length: int, delta: Params, why: str) -> list[Reason]:
    sizes = tuple(leaf.size for leaf in jax.tree.leaves(delta))
    q = _codec(levels).variance(sizes) or 0.0
    if not levels:
        return [Reason("codec.name", "float32", f"{why}: {length:,} bytes per client and round")]
    why_codec = f"FedPAQ's quantizer: up to {length:,} bytes per client and round"
    return [
        Reason("codec.name", "low-precision", why_codec),
        Reason("codec.levels", levels, f"{why}; its variance constant q is {q:.3g}"),
    ]
