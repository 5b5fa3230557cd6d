"""Settings for a federation: from its measured constants, and a short pilot on training data.

The theorems' own step sizes hold for the worst case, and are far below what works; but their
constants say where to look. Candidates lie around 1/L_i, the scale on which steps become unstable,
and a pilot, scored on a part of the clients' training data, decides between them.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf, log10
from typing import Any, NamedTuple, final

import jax
import numpy as np
from jaxtyping import Array

from perfed.core.errors import ConfigError, DivergedError
from perfed.core.objective import BatchSize, Params
from perfed.core.random import Purpose, fold
from perfed.data import Federation
from perfed.evaluation.evaluator import AdaptOn
from perfed.methods import METHODS
from perfed.pipeline.codecs import Codec, Float32, LowPrecision
from perfed.runs.config import Config
from perfed.simulation import Engine, Setup, Traffic
from perfed.simulation.experiment import DeviceData, Kept
from perfed.theory import bounds
from perfed.theory.conditions import inner_steps
from perfed.theory.constants import Constants, Effort, measure
from perfed.training.trainer import Result, run_together

# The constants that matter here are L, mu and the spreads of gradients.
_EFFORT = Effort(steps=20, examples=64, hessian_examples=1, hessian_clients=2, hessian_steps=4,
                 tensor_starts=1, tensor_steps=2)  # fmt: skip

# Of the clients' training data, the part that the pilot is scored on.
_VALIDATION = 0.2

# So many candidates go on after the first part of the pilot.
_FINALISTS = 4

# So many clients' messages, and so many rounds, are looked at to keep a target.
_SENDERS = 8
_TIMED = 40

# Codecs from the finest to the coarsest; 0 levels: float32.
_LEVELS = (0, 127, 15, 4, 1)
_PERIODS = (1, 2, 5, 10, 20, 50)

# Inner steps of pFedMe cost as much as all else of a round.
_MOST_INNER = 20

# What a method calls its local steps.
_STEPS = {"fedavg": "tau", "per-fedavg": "tau", "local": "tau", "pfedme": "local_rounds"}


class Reason(NamedTuple):
    """A setting, its value, and why."""

    setting: str
    value: Any
    why: str


class Trial(NamedTuple):
    """A candidate in the pilot.

    Attributes:
        settings: what it changes; nothing: as given.
        rounds: how long it ran.
        loss: what it came to; inf: it diverged.
        uplink: bytes that clients sent a round.
    """

    settings: dict[str, Any]
    rounds: int
    loss: float
    uplink: float


@final
@dataclass(frozen=True)
class Advice:
    """What is advised.

    Attributes:
        values: a whole configuration, as a file would say it.
        reasons: what is advised, line by line; also what was measured for it.
        trials: the pilot, best first.
        constants: what was measured.
    """

    values: dict[str, Any]
    reasons: list[Reason]
    trials: list[Trial]
    constants: Constants

    @property
    def given(self) -> Trial:
        """How the settings as they were given did."""
        return next(trial for trial in self.trials if not trial.settings)


def advise(
    values: dict[str, Any],
    target_bytes: float | None = None,
    target_seconds: float | None = None,
    say: Callable[[str], None] = lambda line: None,
    federation: Federation | None = None,
) -> Advice:
    """Advice for a configuration.

    Args:
        values: the configuration, as a file says it.
        target_bytes: what all uplink messages of the run may take.
        target_seconds: what the run may take over its `[network]`.
        say: told what is being done.
        federation: the data, if they are at hand.
    """
    given = _plain_method(deepcopy(values))
    config = Config.checked(given)
    _check_targets(config, target_bytes, target_seconds)
    federation = federation or config.build_federation()
    # What a run with `validation` is scored on takes no part in choosing for it, either.
    part = config.scored(federation).validation(_VALIDATION)
    constants = measure(_pilot_engine(given, part), effort=_EFFORT, say=say)
    if not 0 < constants.L.value < inf:
        raise ConfigError(
            f"the first model's curvature is {constants.L.value:g}, which says nothing of "
            'step sizes; are inputs far too large? (data.standardize = "feature" makes them alike)'
        )
    fixed, rates = _candidates(config, constants)
    settled, reasons = deepcopy(given), _measured(constants, part)
    reasons += _put(settled, [_batch(config, constants), *fixed])
    aimed = target_bytes is not None or target_seconds is not None
    if aimed:
        say("one turn, to see how long messages are")
        within = Config.checked(settled)
        engine = within.build(config.scored(federation))
        changes = _changes(engine)
        reasons += _put(
            settled,
            _within_bytes(within, engine, changes, target_bytes)
            if target_bytes is not None
            else _within_seconds(within, engine, changes, target_seconds or inf),
        )
    else:
        reasons += _kept(config, constants)

    # Within a target, settings as given are those that keep to it.
    trials = _pilot(settled if aimed else given, settled, rates, part, say)
    best = trials[0]
    if best.loss == inf:
        raise DivergedError(
            "every candidate of the pilot diverged; inputs of a common scale usually help "
            '(data.standardize = "feature")'
        )
    advised = settled if aimed or best.settings else given
    if advised is given:
        reasons = []  # what they would change does not pay
    reasons += _put(advised, _chosen(config, constants, trials))
    if target_bytes is not None:
        reasons += _put(advised, _fewer_rounds(advised, best, target_bytes))
    Config.checked(advised)
    return Advice(advised, reasons, trials, constants)


def _chosen(config: Config, c: Constants, trials: Sequence[Trial]) -> list[Reason]:
    """What the pilot decides."""
    best, name = trials[0], config.method.name
    if not best.settings:
        why = f"as given: none of {len(trials)} candidates does better ({best.loss:.4g})"
        return [Reason("method.name", name, why)]
    given = next(trial for trial in trials if not trial.settings)
    why = (
        f"best of {len(trials)} candidates in a pilot of {best.rounds} rounds: validation loss "
        f"{best.loss:.4g}, {given.loss:.4g} as given"
    )
    reasons = []
    for setting, value in best.settings.items():
        told = f"{_scale(name, setting, value, c)}; {why}"
        reasons.append(Reason(f"method.{setting}", value, told))
        why = "chosen with it"
    return reasons


def _fewer_rounds(values: dict[str, Any], best: Trial, budget: float) -> list[Reason]:
    """Fewer rounds, if messages of the pilot were longer than those that were looked at first."""
    if best.uplink * values.get("rounds", 100) <= budget:
        return []
    why = f"messages of the pilot took {best.uplink:,.0f} bytes a round"
    return [Reason("rounds", max(1, int(budget // best.uplink)), why)]


def _check_targets(
    config: Config, target_bytes: float | None, target_seconds: float | None
) -> None:
    if target_bytes is None and target_seconds is None:
        return
    if target_bytes is not None and target_seconds is not None:
        raise ConfigError("give one of --target-bytes and --target-time")
    name, value = "--target-bytes", target_bytes
    if value is None:
        name, value = "--target-time", target_seconds
        if config.network is None:
            raise ConfigError("--target-time needs a [network]: how fast links and clients are")
    if value is None or not 0 < value < inf:
        raise ConfigError(f"{name} {value}: must be a number greater than 0")
    if not config.build_recipe().method.sends:
        raise ConfigError(
            f"{name}: {config.method.name} sends nothing, so it has no target to keep"
        )


def _pilot_engine(values: dict[str, Any], part: Federation) -> Engine:
    """An engine on the pilot's data, which may lack a few clients, and without a network."""
    own = {key: value for key, value in values.items() if key not in ("network", "validation")}
    cohort = Config.checked(values).build_recipe().cohort
    return Config.checked(own | {"cohort": min(cohort, part.clients)}).build(part)


def _plain_method(values: dict[str, Any]) -> dict[str, Any]:
    """FedPAQ and QSGD as what they are: FedAvg and a quantizer."""
    config = Config.checked(values)
    if config.method.name in METHODS:
        values["method"] = {"name": config.method.name} | values["method"]
        return values
    recipe = config.build_recipe()
    known = {k: v for k, v in vars(recipe.method).items() if v is not None}
    codec = {k: v for k, v in vars(recipe.codec).items() if v is not None}
    downlink = values.get("codec", {}).get("downlink")
    return values | {
        "method": {"name": recipe.method.name} | known,
        "codec": {"name": recipe.codec.name} | codec | ({"downlink": downlink} if downlink else {}),
        "cohort": recipe.cohort,
    }


def _measured(c: Constants, federation: Federation) -> list[Reason]:
    sharpest = federation.names[int(np.argmax(c.client_L))]
    return [
        Reason(
            "L",
            _rounded(c.L.value),
            f"the largest curvature, client {sharpest}'s; steps above 2/L = {2 / c.L.value:.3g} "
            f"overshoot there, half of the clients allow {2 / np.median(c.client_L):.3g}",
        ),
        Reason(
            "gamma_G",
            _rounded(c.gamma_G.value),
            f"gradients differ this much between clients, and sigma_G = {c.sigma_G.value:.3g} "
            "between examples of one",
        ),
    ]


def _batch(config: Config, c: Constants) -> Reason:
    """Enough examples that a batch is no noisier than clients differ."""
    given: BatchSize = getattr(config.method, "batch", "full")
    if isinstance(given, str):
        return Reason("method.batch", given, "all data: no noise")
    noise = (c.sigma_G.value / c.gamma_G.value) ** 2 if c.gamma_G.value > 0 else inf
    wanted = int(min(100, 10 * ceil(min(noise, 1e6) / 10)))
    if wanted <= given:
        why = f"enough: from (sigma_G/gamma_G)^2 = {noise:.2g} examples on, batches are less noisy "
        return Reason("method.batch", given, why + "than clients are different")
    why = f"(sigma_G/gamma_G)^2 = {noise:.2g} examples make batches as noisy as clients differ"
    return Reason("method.batch", wanted, why)


def _kept(config: Config, c: Constants) -> list[Reason]:
    """What only a target of bytes or time would change."""
    r, n = config.build_recipe().cohort, c.clients
    steps = _STEPS[config.method.name]
    lost = 0.0 if n == 1 else (n - r) / (r * (n - 1)) * c.gamma_G.value**2
    why = (
        f"kept: sampling {r} of {n} clients adds (n - r)/(r (n - 1)) gamma_G^2 = {lost:.2g} to the "
        "gradient's variance"
    )
    no_target = "kept: without --target-bytes or --target-time nothing speaks for"
    return [
        Reason("cohort", r, why),
        Reason(
            f"method.{steps}", getattr(config.method, steps), f"{no_target} longer or shorter turns"
        ),
        Reason("codec", config.codec.name, f"{no_target} shorter messages"),
    ]


def _changes(engine: Engine) -> list[Params]:
    """What some clients would send after one turn, without loss: examples of what is sent."""
    setup = replace(engine.setup, codec=Float32())

    def turn(
        _: Setup, world: DeviceData, w: Params, kept: Kept, round: Array, client: Array
    ) -> Params:
        return setup.take_turn(world, w, Kept(kept.memory, None), round, client).change

    some = list(range(min(_SENDERS, setup.federation.clients)))
    state = engine.start()
    state = state._replace(kept=Kept(state.kept.memory, None))
    found = engine.each_client(turn)(state, some)
    return [jax.tree.map(lambda leaf, i=i: leaf[i], found) for i in some]


def _codec(levels: int) -> Codec:
    return LowPrecision(levels) if levels else Float32()


def _message(levels: int, engine: Engine, changes: Sequence[Params]) -> int:
    """How many bytes a client sends in a turn: the longest of the examples, and a tenth more."""
    codec = _codec(levels)
    longest = max(
        codec.bits(fold(0, Purpose.UPLINK, 0, i), change) // 8 for i, change in enumerate(changes)
    )
    margin = 1.1 if levels else 1.0
    messages = 2 if engine.setup.method.send_iterate else 1
    return ceil(margin * longest * messages)


def _codec_lines(levels: int, length: int, change: Params, why: str) -> list[Reason]:
    sizes = tuple(leaf.size for leaf in jax.tree.leaves(change))
    q = _codec(levels).variance(sizes) or 0.0
    if not levels:
        return [Reason("codec.name", "float32", f"{why}: {length:,} bytes a turn")]
    return [
        Reason("codec.name", "low-precision", f"FedPAQ's quantizer: up to {length:,} bytes a turn"),
        Reason("codec.levels", levels, f"{why}; its variance constant q is {q:.3g}"),
    ]


def _within_bytes(
    config: Config, engine: Engine, changes: Sequence[Params], budget: float
) -> list[Reason]:
    """The finest messages that the budget allows for all rounds; fewer rounds if none does."""
    rounds, r, n = config.rounds, engine.setup.cohort, engine.setup.federation.clients
    lengths = {levels: _message(levels, engine, changes) for levels in _LEVELS}
    change = changes[0]
    for levels, length in lengths.items():
        if rounds * r * length <= budget:
            why = f"the finest of which {rounds} rounds of {r} messages stay within {budget:,.0f}"
            reasons = _codec_lines(levels, length, change, why)
            larger = min(n, int(budget // (rounds * length)))
            if larger > r:
                why = f"the budget has room for {larger} messages a round"
                reasons.append(Reason("cohort", larger, why))
            else:
                reasons.append(Reason("cohort", r, "kept: the budget has no room for more"))
            return reasons
    length = lengths[1]
    fewer = int(budget // (r * length))
    if fewer < 1:
        raise ConfigError(
            f"--target-bytes {budget:,.0f}: one round of {r} messages takes {r * length:,} bytes "
            "even with one level; a smaller cohort would do"
        )
    reasons = _codec_lines(1, length, change, "the coarsest there is")
    return [*reasons, Reason("rounds", fewer, f"all that {budget:,.0f} bytes allow")]


def _within_seconds(
    config: Config, engine: Engine, changes: Sequence[Params], budget: float
) -> list[Reason]:
    """Messages and periods with which most steps, less what quantizing costs, fit in the time."""
    network = config.network_of(engine)
    assert network is not None
    setup, name = engine.setup, _STEPS[config.method.name]
    r, n = setup.cohort, setup.federation.clients
    sizes = tuple(leaf.size for leaf in jax.tree.leaves(changes[0]))
    down = setup.downlink.bits(fold(0, Purpose.DOWNLINK, 0), changes[0]) // 8
    train = np.asarray(setup.federation.train.size)
    cohorts = np.array([np.asarray(setup.pick_cohort(k)) for k in range(_TIMED)], np.int32)
    best: tuple[float, int, int, float, int] | None = None
    for levels, tau in product(_LEVELS, _PERIODS):
        length = _message(levels, engine, changes)
        method = replace(setup.method, **{name: tau})  # type: ignore[type-var]
        gradients = np.array([method.gradients(int(size)) for size in train])
        traffic = Traffic(cohorts, np.full((_TIMED, r), length), np.full(_TIMED, down))
        seconds = float(network.seconds(traffic, gradients, config.seed, 0).mean())
        rounds = int(budget // seconds)
        q = _codec(levels).variance(sizes) or 0.0
        if rounds < 1 or 1 < tau > bounds.longest_period(q, rounds, tau, r, n):
            continue
        worth = rounds * tau / (1 + q / r)
        if best is None or worth > best[0]:
            best = (worth, levels, tau, seconds, rounds)
    if best is None:
        raise ConfigError(f"--target-time {budget:g}: not one round fits into it")
    _, levels, tau, seconds, rounds = best
    why = f"with periods of {tau} most steps, each worth 1/(1 + q/r), fit into {budget:g} s"
    return [
        *_codec_lines(levels, _message(levels, engine, changes), changes[0], why),
        Reason(
            f"method.{name}",
            tau,
            "the longest period worth it: FedPAQ's (16) bounds it by a multiple of sqrt(T)",
        ),
        Reason("rounds", rounds, f"a round takes {seconds:.3g} s over this network"),
        Reason("cohort", r, "kept"),
    ]


def _candidates(config: Config, c: Constants) -> tuple[list[Reason], list[dict[str, float]]]:
    """What the constants settle, and settings for the pilot to choose from."""
    L, mu = c.L.value, c.mu.value
    # From well below what the sharpest client allows to what half of the clients do.
    safe, usual = 1 / L, 1 / float(np.median(c.client_L))
    outer = [_rounded(rate) for rate in np.geomspace(0.1 * safe, 3 * usual, 5)]
    inner = [_rounded(rate) for rate in np.geomspace(0.1 * safe, usual, 4)]
    name = config.method.name
    steady = "constant steps: the pilot compares those"
    if name == "per-fedavg":
        decays = [Reason("method.beta_decay", 0.0, steady)] if config.method.beta_decay else []
        return decays, [{"alpha": a, "beta": b} for a, b in product(inner, outer)]
    if name == "pfedme":
        softest = 0.3 / usual
        wanted = inner_steps(softest, L, max(mu, 0.0), 1 / (softest + L))
        steps = int(min(wanted, _MOST_INNER))
        kappa = bounds.inner_condition(softest, L, mu)
        told = (
            f"kappa = {kappa:.2g} for lambda = {softest:.2g}: a tenth of the first error is left "
            f"after {wanted} steps"
        )
        more = "" if steps == wanted else f", of which no more than {steps} are advised"
        return [Reason("method.inner_steps", steps, told + more)], [
            {
                "lam": _rounded(a / usual),
                "eta": _rounded(b * usual / a),
                "beta": s,
                "inner_lr": _rounded(1 / (a / usual + L)),
            }
            for a, b, s in product((0.3, 1.0, 3.0), (0.03, 0.1, 0.3), (1.0, 2.0))
        ]
    if name == "local":
        return [], [{"lr": a} for a in outer]
    decays = [Reason("method.diminishing", False, steady)] if config.method.diminishing else []
    return decays, [{"lr": a, "alpha": b} for a, b in product(outer, inner)]


def _pilot(
    given: dict[str, Any],
    settled: dict[str, Any],
    rates: Sequence[dict[str, float]],
    part: Federation,
    say: Callable[[str], None],
) -> list[Trial]:
    """All candidates for some rounds, the best for more; the settings as given with them."""
    candidates: list[dict[str, float]] = [{}, *rates]
    engines = []
    for rate in candidates:
        own = deepcopy(settled if rate else given)
        own["method"] |= rate
        engines.append(_pilot_engine(own, part))
    adapt_on = Config.checked(given).adapt_on
    rounds = int(settled.get("rounds", 100))
    first = min(rounds, max(20, rounds // 10))
    more = min(rounds, 4 * first)
    say(f"pilot: {len(candidates)} candidates, {first} rounds")
    found = _together(engines, first, None, adapt_on)
    order = sorted(range(len(found)), key=lambda i: _loss(found[i]))
    # The settings as given stay in, to say what is gained.
    finalists = sorted(i for i in {*order[:_FINALISTS], 0} if _loss(found[i]) < inf)
    others = [_trial(candidates[i], first, found[i]) for i in order if i not in finalists]
    if more > first and finalists:
        say(f"pilot: {len(finalists)} candidates, {more} rounds")
        so_far = [found[i] for i in finalists]
        going = _together([engines[i] for i in finalists], more, so_far, adapt_on)
        for i, result in zip(finalists, going, strict=True):
            found[i] = result
    last = [_trial(candidates[i], more, found[i]) for i in finalists]
    return sorted(last, key=lambda t: t.loss) + sorted(others, key=lambda t: t.loss)


def _together(
    engines: Sequence[Engine],
    rounds: int,
    so_far: Sequence[Result | DivergedError] | None,
    adapt_on: AdaptOn,
) -> list[Result | DivergedError]:
    """Runs by the same programs where they are alike: one call for each kind."""
    outcomes: dict[int, Result | DivergedError] = {}
    left = list(range(len(engines)))
    while left:
        kin = [i for i in left if engines[left[0]].setup.alike(engines[i].setup)]
        left = [i for i in left if i not in kin]
        courses = None
        if so_far is not None:
            courses = [result.course for i in kin if isinstance(result := so_far[i], Result)]
        some = run_together([engines[i] for i in kin], rounds, None, adapt_on, courses=courses)
        outcomes |= dict(zip(kin, some, strict=True))
    return [outcomes[i] for i in range(len(engines))]


def _trial(settings: dict[str, float], rounds: int, result: Result | DivergedError) -> Trial:
    sent = inf if isinstance(result, DivergedError) else float(result.traffic.uplink.sum() / rounds)
    return Trial(settings, rounds, _loss(result), sent)


def _loss(result: Result | DivergedError) -> float:
    if isinstance(result, DivergedError):
        return inf
    return float(result.scores["personalized"].loss.mean())


def _scale(method: str, name: str, value: float, c: Constants) -> str:
    if name == "lam":
        return f"{value / c.L.value:.2g} L"
    if method == "pfedme" and name == "beta":
        return "the server's mixing"
    if name == "inner_lr":
        return "1/(lambda + L)"
    share = float(np.mean(value <= 1 / c.client_L))
    return f"{value * c.L.value:.2g}/L, at most 1/L_i for {100 * share:.0f} % of clients"


def _put(values: dict[str, Any], reasons: Sequence[Reason]) -> Sequence[Reason]:
    """Write what is advised into a configuration."""
    for reason in reasons:
        *path, key = reason.setting.split(".")
        if reason.setting == "codec.name":
            # Another codec has other settings; how the server's model is sent is another matter.
            old = values.get("codec", {})
            values["codec"] = {"downlink": old["downlink"]} if old.get("downlink") else {}
        place = values
        for name in path:
            place = place.setdefault(name, {})
        place[key] = reason.value
    return reasons


def _rounded(value: float) -> float:
    """Two digits: more are not known."""
    if value == 0 or not np.isfinite(value):
        return float(value)
    return float(round(value, 1 - int(np.floor(log10(abs(value))))))
