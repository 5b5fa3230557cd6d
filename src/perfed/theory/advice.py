"""Settings for a federation: from its measured constants, and a short pilot on training data.

The theorems' own step sizes hold for the worst case, and are far below what works; but their
constants say where to look. Candidates lie around 1/L_i, the scale on which steps become unstable,
and a pilot, scored on a part of the clients' training data, decides between them.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from math import ceil, inf, log10
from typing import Any, NamedTuple, final

import jax
import numpy as np

from perfed.codecs import Codec, Float32, LowPrecision
from perfed.data import Federation
from perfed.errors import ConfigError, DivergedError
from perfed.experiment.config import Config
from perfed.experiment.simulate import Result, run_together
from perfed.methods import METHODS
from perfed.objective import BatchSize, Params
from perfed.randomness import Purpose, fold
from perfed.simulation import Engine, Traffic
from perfed.theory import bounds
from perfed.theory.conditions import inner_steps
from perfed.theory.constants import Constants, Effort, measure

# The constants that matter here are L, mu and the spreads of gradients.
_EFFORT = Effort(steps=20, examples=64, hessian_examples=1, hessian_clients=2, hessian_steps=4,
                 tensor_starts=1, tensor_steps=2)  # fmt: skip

# Of the clients' training data, the part that the pilot is scored on.
_VALIDATION = 0.2

# So many candidates go on after the first part of the pilot.
_FINALISTS = 4

# Codecs from the finest to the coarsest; 0 levels: float32.
_LEVELS = (0, 127, 15, 4, 1)
_PERIODS = (1, 2, 5, 10, 20, 50)

# Inner steps of pFedMe cost as much as all else of a round.
_MOST_INNER = 20

# What a method calls its local steps.
_STEPS = {"fedavg": "tau", "per-fedavg": "tau", "local": "tau", "pfedme": "local_rounds"}


class Line(NamedTuple):
    """One piece of advice: a setting, its value, and why."""

    setting: str
    value: Any
    why: str


class Trial(NamedTuple):
    """A candidate in the pilot: its settings, and its loss after so many rounds (inf: diverged)."""

    settings: dict[str, Any]
    rounds: int
    loss: float


@final
@dataclass(frozen=True)
class Advice:
    """What is advised.

    Attributes:
        values: a whole configuration, as a file would say it.
        lines: the reasoning.
        trials: the pilot, best first.
        constants: what was measured.
    """

    values: dict[str, Any]
    lines: list[Line]
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
    values, lines = _plain_method(deepcopy(values)), list[Line]()
    config = Config.checked(values)
    if target_bytes is not None and target_seconds is not None:
        raise ConfigError("give one of --target-bytes and --target-time")
    if target_seconds is not None and config.network is None:
        raise ConfigError("--target-time needs a [network]: how fast links and clients are")
    federation = federation or config.build_federation()
    part = federation.validation(config.validation or _VALIDATION)
    engine = config.build(part)
    constants = measure(engine, effort=_EFFORT, say=say)
    if not 0 < constants.L.value < inf:
        raise ConfigError(
            f"the first model's curvature is {constants.L.value:g}, which says nothing of "
            'step sizes; are inputs far too large? (data.standardise = "feature" makes them alike)'
        )
    lines += _measured(constants, part)

    batch = _batch(config, constants)
    lines.append(batch)
    _set(values, batch)
    if target_bytes is not None or target_seconds is not None:
        say("one round, to see how long messages are")
        change = _change(engine)
        chosen = (
            _within_bytes(config, engine, change, target_bytes)
            if target_bytes is not None
            else _within_seconds(config, engine, change, target_seconds or inf)
        )
        lines += chosen
        for line in chosen:
            _set(values, line)
    else:
        lines += _kept(config, constants)

    fixed, rates = _candidates(config, constants)
    lines += fixed
    trials = _pilot(values, fixed, rates, part, say)
    best = trials[0]
    if best.loss == inf:
        raise DivergedError(
            "every candidate of the pilot diverged; inputs of a common scale usually help "
            '(data.standardise = "feature")'
        )
    given = next(trial for trial in trials if not trial.settings)
    why = (
        f"best of {len(trials)} candidates in a pilot of {best.rounds} rounds: validation loss "
        f"{best.loss:.4g}, {given.loss:.4g} as given"
        if best.settings
        else f"as given: no candidate of the pilot's {len(trials)} does better ({best.loss:.4g})"
    )
    if best.settings:
        for line in fixed:
            _set(values, line)
    for name, value in best.settings.items():
        line = Line(
            f"method.{name}", value, f"{_scale(config.method.name, name, value, constants)}; {why}"
        )
        why = "chosen with it"
        _set(values, line)
        lines.append(line)
    if not best.settings:
        lines = [line for line in lines if line not in fixed]
        lines.append(Line("method", config.method.name, why))
    Config.checked(values)
    return Advice(values, lines, trials, constants)


def _plain_method(values: dict[str, Any]) -> dict[str, Any]:
    """FedPAQ and QSGD as what they are: FedAvg and a quantiser."""
    config = Config.checked(values)
    if config.method.name in METHODS:
        values["method"] = {"name": config.method.name} | values["method"]
        return values
    recipe = config.build_recipe()
    known = {k: v for k, v in vars(recipe.method).items() if v is not None}
    codec = {k: v for k, v in vars(recipe.codec).items() if v is not None}
    return values | {
        "method": {"name": recipe.method.name} | known,
        "codec": {"name": recipe.codec.name} | codec,
        "cohort": recipe.cohort,
    }


def _measured(c: Constants, federation: Federation) -> list[Line]:
    sharpest = federation.names[int(np.argmax(c.client_L))]
    return [
        Line(
            "L",
            _rounded(c.L.value),
            f"the largest curvature, client {sharpest}'s; steps above 2/L = {2 / c.L.value:.3g} "
            f"overshoot there, half of the clients allow {2 / np.median(c.client_L):.3g}",
        ),
        Line(
            "gamma_G",
            _rounded(c.gamma_G.value),
            f"gradients differ this much between clients, and sigma_G = {c.sigma_G.value:.3g} "
            "between examples of one",
        ),
    ]


def _batch(config: Config, c: Constants) -> Line:
    """Enough examples that a batch is no noisier than clients differ."""
    given: BatchSize = getattr(config.method, "batch", "full")
    if isinstance(given, str):
        return Line("method.batch", given, "all data: no noise")
    noise = (c.sigma_G.value / c.gamma_G.value) ** 2 if c.gamma_G.value > 0 else inf
    wanted = int(min(100, 10 * ceil(min(noise, 1e6) / 10)))
    if wanted <= given:
        why = f"enough: from (sigma_G/gamma_G)^2 = {noise:.2g} examples on, batches are less noisy "
        return Line("method.batch", given, why + "than clients are different")
    why = f"(sigma_G/gamma_G)^2 = {noise:.2g} examples make batches as noisy as clients differ"
    return Line("method.batch", wanted, why)


def _kept(config: Config, c: Constants) -> list[Line]:
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
        Line("cohort", r, why),
        Line(
            f"method.{steps}", getattr(config.method, steps), f"{no_target} longer or shorter turns"
        ),
        Line("codec.name", config.codec.name, f"{no_target} shorter messages"),
    ]


def _change(engine: Engine) -> Params:
    """The mean change of one round, as an example of what is sent."""
    start = engine.start()
    after = engine.advance(start, 1)
    return jax.tree.map(lambda a, b: a - b, after.w, start.w)


def _codec(levels: int) -> Codec:
    return LowPrecision(levels) if levels else Float32()


def _message(levels: int, change: Params) -> int:
    """How many bytes such a change takes."""
    return _codec(levels).bits(fold(0, Purpose.UPLINK, 0, 0), change) // 8


def _codec_lines(levels: int, length: int, change: Params, why: str) -> list[Line]:
    sizes = tuple(leaf.size for leaf in jax.tree.leaves(change))
    q = _codec(levels).variance(sizes) or 0.0
    if not levels:
        return [Line("codec.name", "float32", f"{why}: {length:,} bytes a message")]
    return [
        Line("codec.name", "low-precision", f"FedPAQ's quantiser: {length:,} bytes a message"),
        Line("codec.levels", levels, f"{why}; its variance constant q is {q:.3g}"),
    ]


def _within_bytes(config: Config, engine: Engine, change: Params, budget: float) -> list[Line]:
    """The finest messages that the budget allows for all rounds; fewer rounds if none does."""
    rounds, r, n = config.rounds, engine.setup.cohort, engine.setup.federation.clients
    lengths = {levels: _message(levels, change) for levels in _LEVELS}
    for levels, length in lengths.items():
        if rounds * r * length <= budget:
            why = f"the finest of which {rounds} rounds of {r} messages stay within {budget:,.0f}"
            lines = _codec_lines(levels, length, change, why)
            larger = min(n, int(budget // (rounds * length)))
            if larger > r:
                why = f"the budget has room for {larger} messages a round"
                lines.append(Line("cohort", larger, why))
            else:
                lines.append(Line("cohort", r, "kept: the budget has no room for more"))
            return lines
    length = lengths[1]
    fewer = int(budget // (r * length))
    if fewer < 1:
        raise ConfigError(
            f"--target-bytes {budget:,.0f}: one round of {r} messages takes {r * length:,} bytes "
            "even with one level; a smaller cohort would do"
        )
    lines = _codec_lines(1, length, change, "the coarsest there is")
    return [*lines, Line("rounds", fewer, f"all that {budget:,.0f} bytes allow")]


def _within_seconds(config: Config, engine: Engine, change: Params, budget: float) -> list[Line]:
    """Messages and periods with which most steps, less what quantising costs, fit in the time."""
    network = config.network_of(engine)
    assert network is not None
    setup = engine.setup
    r, n = setup.cohort, setup.federation.clients
    sizes = tuple(leaf.size for leaf in jax.tree.leaves(change))
    down = Float32().bits(fold(0, Purpose.DOWNLINK, 0, 0), change) // 8
    train = np.asarray(setup.federation.train.size)
    per_step = np.array([setup.method.gradients(int(size)) for size in train])
    steps = getattr(setup.method, _STEPS[setup.method.name])
    best: tuple[float, int, int, float, int] | None = None
    for levels, tau in product(_LEVELS, _PERIODS):
        length = _message(levels, change)
        cohorts = np.tile(np.arange(r, dtype=np.int32), (40, 1))
        traffic = Traffic(cohorts, np.full((40, r), length), np.full(40, down))
        gradients = np.maximum(1, per_step * tau // steps)
        seconds = float(network.seconds(traffic, gradients, config.seed, 0).mean())
        rounds = int(budget // seconds)
        q = _codec(levels).variance(sizes) or 0.0
        if rounds < 1:
            continue
        allowed = max(1.0, bounds.longest_period(q, rounds, tau, r, n))
        if tau > allowed and tau > 1:
            continue
        worth = rounds * tau / (1 + q / r)
        if best is None or worth > best[0]:
            best = (worth, levels, tau, seconds, rounds)
    if best is None:
        raise ConfigError(f"--target-time {budget:g}: not one round fits into it")
    _, levels, tau, seconds, rounds = best
    why = f"with periods of {tau} most steps, each worth 1/(1 + q/r), fit into {budget:g} s"
    return [
        *_codec_lines(levels, _message(levels, change), change, why),
        Line(
            f"method.{_STEPS[config.method.name]}",
            tau,
            "the longest period worth it: FedPAQ's (16) bounds it by a multiple of sqrt(T)",
        ),
        Line("rounds", rounds, f"a round takes {seconds:.3g} s over this network"),
        Line("cohort", r, "kept"),
    ]


def _candidates(config: Config, c: Constants) -> tuple[list[Line], list[dict[str, float]]]:
    """What the constants settle, and settings for the pilot to choose from."""
    L, mu = c.L.value, c.mu.value
    # From well below what the sharpest client allows to what half of the clients do.
    safe, usual = 1 / L, 1 / float(np.median(c.client_L))
    outer = [_rounded(rate) for rate in np.geomspace(0.1 * safe, 3 * usual, 5)]
    inner = [_rounded(rate) for rate in np.geomspace(0.1 * safe, usual, 4)]
    name = config.method.name
    if name == "per-fedavg":
        return [], [{"alpha": a, "beta": b} for a, b in product(inner, outer)]
    if name == "pfedme":
        softest = 0.3 / usual
        inner_lr = _rounded(1 / (softest + L))
        wanted = inner_steps(softest, L, mu, inner_lr)
        steps = min(wanted, _MOST_INNER)
        kappa = bounds.inner_condition(softest, L, mu)
        told = f"kappa = {kappa:.2g}: a tenth of the first error is left after {wanted} steps"
        lines = [
            Line("method.inner_lr", inner_lr, f"1/(lambda + L), with lambda = {softest:.2g}"),
            Line(
                "method.inner_steps",
                steps,
                told if steps == wanted else f"{told}, of which no more than {steps} are advised",
            ),
        ]
        return lines, [
            {"lam": _rounded(a / usual), "eta": _rounded(b * usual / a), "beta": s}
            for a, b, s in product((0.3, 1.0, 3.0), (0.03, 0.1, 0.3), (1.0, 2.0))
        ]
    if name == "local":
        return [], [{"lr": a} for a in outer]
    return [], [{"lr": a, "alpha": b} for a, b in product(outer, inner)]


def _pilot(
    values: dict[str, Any],
    fixed: Sequence[Line],
    rates: Sequence[dict[str, float]],
    part: Federation,
    say: Callable[[str], None],
) -> list[Trial]:
    """All candidates for some rounds, the best for more; the settings as given with them."""
    settled = deepcopy(values)
    for line in fixed:
        _set(settled, line)
    candidates: list[dict[str, float]] = [{}, *rates]
    engines = []
    for rate in candidates:
        own = deepcopy(settled if rate else values)
        own["method"] |= rate
        engines.append(Config.checked(own).build(part))
    rounds = int(values.get("rounds", 100))
    first = min(rounds, max(20, rounds // 10))
    more = min(rounds, 4 * first)
    say(f"pilot: {len(candidates)} candidates, {first} rounds")
    found = _together(engines, first, None)
    losses = [_loss(result) for result in found]
    # The settings as given stay in, to say what is gained.
    order = sorted(range(len(losses)), key=lambda i: losses[i])
    finalists = list(dict.fromkeys([*order[:_FINALISTS], 0]))
    finalists = [i for i in finalists if losses[i] < inf]
    trials = [
        Trial(candidates[i], first, losses[i]) for i in order if i not in finalists and i != 0
    ]
    if 0 not in finalists:
        trials.append(Trial({}, first, losses[0]))
    if more > first and finalists:
        say(f"pilot: {len(finalists)} candidates, {more} rounds")
        going = _together([engines[i] for i in finalists], more, [found[i] for i in finalists])
        for i, result in zip(finalists, going, strict=True):
            losses[i] = _loss(result)
    last = [Trial(candidates[i], max(first, more), losses[i]) for i in finalists]
    return sorted(last, key=lambda t: t.loss) + sorted(trials, key=lambda t: t.loss)


def _together(
    engines: Sequence[Engine], rounds: int, so_far: Sequence[Result | DivergedError] | None
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
        some = run_together([engines[i] for i in kin], rounds, courses=courses)
        outcomes |= dict(zip(kin, some, strict=True))
    return [outcomes[i] for i in range(len(engines))]


def _loss(result: Result | DivergedError) -> float:
    if isinstance(result, DivergedError):
        return inf
    return float(result.scores["personalized"].loss.mean())


def _scale(method: str, name: str, value: float, c: Constants) -> str:
    if name == "lam":
        return f"{value / c.L.value:.2g} L"
    if method == "pfedme" and name == "beta":
        return "the server's mixing"
    share = float(np.mean(value <= 1 / c.client_L))
    return f"{value * c.L.value:.2g}/L, at most 1/L_i for {100 * share:.0f} % of clients"


def _set(values: dict[str, Any], line: Line) -> None:
    *path, key = line.setting.split(".")
    place = values
    for name in path:
        place = place.setdefault(name, {})
    place[key] = line.value


def _rounded(value: float) -> float:
    """Two digits: more are not known."""
    if value == 0 or not np.isfinite(value):
        return float(value)
    return float(round(value, 1 - int(np.floor(log10(abs(value))))))
