"""Settings for a federation: from its measured constants, and a short pilot on training data.

The theorems' own step sizes hold for the worst case, and are far below what works; but their
constants say where to look. Candidates lie around 1/L_i, the scale on which steps become unstable,
and a pilot, scored on a part of the clients' training data, decides between them.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from math import ceil, inf, log10
from typing import Any, NamedTuple, final

import numpy as np

from perfed.core.errors import ConfigError, DivergedError
from perfed.core.objective import BatchSize
from perfed.data import Federation
from perfed.methods import Method, PerFedAvg, PFedMe
from perfed.methods.schedules import Constant
from perfed.runs.config import Config
from perfed.runs.presets import PRESETS
from perfed.theory import bounds
from perfed.theory.constants import Constants, Effort, measure
from perfed.theory.pfedme import inner_steps
from perfed.theory.pilot import VALIDATION, Log, PilotTrial, pilot_engine, run_pilot
from perfed.theory.targets import Reason, sent_examples, within_bytes, within_seconds

# The constants that matter here are L, mu and the spreads of gradients.
_EFFORT = Effort(steps=20, examples=64, hessian_examples=1, hessian_clients=2, hessian_steps=4,
                 tensor_starts=1, tensor_steps=2)  # fmt: skip

# Inner steps of pFedMe are most of a round's cost.
_MOST_INNER = 20


@final
@dataclass(frozen=True)
class Advice:
    """Advised settings.

    Attributes:
        values: a whole configuration.
        reasons: each advised setting with its reason, and the measured constants.
        trials: the pilot, best first.
        constants: what was measured.
    """

    values: dict[str, Any]
    reasons: list[Reason]
    trials: list[PilotTrial]
    constants: Constants

    @property
    def given(self) -> PilotTrial:
        """The pilot's trial of the settings as given."""
        return next(trial for trial in self.trials if not trial.settings)


def advise(
    values: dict[str, Any],
    target_bytes: float | None = None,
    target_seconds: float | None = None,
    log: Log = lambda line: None,
    federation: Federation | None = None,
) -> Advice:
    """Advice for a configuration.

    Args:
        values: the configuration, as a file has it.
        target_bytes: the budget for all uplink messages of the run.
        target_seconds: the budget for the run's time over its `[network]`.
        log: called with a line for each stage.
        federation: the data; None: the configuration's.
    """
    given = _without_preset(deepcopy(values))
    config = Config.checked(given)
    target = _Target(target_bytes, target_seconds)
    _check_target(config, target)
    federation = federation or config.build_federation()
    # The examples that a run with `validation` is scored on are not used here, either.
    part = config.scored(federation).validation(VALIDATION)
    constants = _measure(config, given, part, target, log)
    from_constants, grid = candidates(config, constants)
    base, reasons = deepcopy(given), _measured(constants, part)
    reasons += _put(base, [*_batch(config, constants), *from_constants])
    if target.given:
        log("one local update, to see how long messages are")
        reasons += _put(base, _within(Config.checked(base), federation, target))
    else:
        reasons += _unchanged(config, constants)

    # With a target, the settings as given are replaced by those that keep to it.
    trials = run_pilot(base if target.given else given, base, grid, part, log)
    best = trials[0]
    if best.loss == inf:
        raise DivergedError(
            "every candidate of the pilot diverged; inputs of a common scale usually help "
            '(data.standardize = "feature")'
        )
    advised = base if target.given or best.settings else given
    if advised is given:
        reasons = []  # none of them improves on it
    reasons += _put(advised, _chosen(config, constants, trials))
    if target.bytes is not None:
        reasons += _put(advised, _fewer_rounds(advised, best, target.bytes))
    Config.checked(advised)
    return Advice(advised, reasons, trials, constants)


class _Target(NamedTuple):
    """A budget of the run.

    Attributes:
        bytes: for all uplink messages.
        seconds: over the `[network]`.
    """

    bytes: float | None
    seconds: float | None

    @property
    def given(self) -> bool:
        """Whether there is one."""
        return self.bytes is not None or self.seconds is not None


def _measure(
    config: Config, given: dict[str, Any], part: Federation, target: _Target, log: Log
) -> Constants:
    """The constants at the first model, on the pilot's data."""
    engine = pilot_engine(given, part)
    if target.given and not any(engine.experiment.is_shared):
        raise ConfigError(f"{config.method_name} sends nothing, so a target does not apply to it")
    constants = measure(engine, effort=_EFFORT, log=log)
    if not 0 < constants.L.value < inf:
        raise ConfigError(
            f"the first model's curvature is {constants.L.value:g}, from which no step size "
            'follows; very large inputs are a common cause (set data.standardize = "feature")'
        )
    return constants


def _within(config: Config, federation: Federation, target: _Target) -> list[Reason]:
    """Settings that keep to the target."""
    engine = config.build(config.scored(federation))
    examples = sent_examples(engine)
    if target.bytes is not None:
        return within_bytes(config, engine, examples, target.bytes)
    return within_seconds(config, engine, examples, target.seconds or inf)


def _chosen(config: Config, c: Constants, trials: Sequence[PilotTrial]) -> list[Reason]:
    """The settings that the pilot decides."""
    best, name = trials[0], config.method_name
    if len(trials) == 1:
        why = "as given: it does not name its step sizes (Method.step_sizes), so none are compared"
        return [Reason("method.name", name, why)]
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
        reason = f"{_scale(name, setting, value, c)}; {why}"
        reasons.append(Reason(f"method.{setting}", value, reason))
        why = "chosen with it"
    return reasons


def _fewer_rounds(values: dict[str, Any], best: PilotTrial, budget: float) -> list[Reason]:
    """Fewer rounds, if the pilot's messages were longer than the first examples."""
    if best.uplink * values.get("rounds", 100) <= budget:
        return []
    why = f"messages of the pilot took {best.uplink:,.0f} bytes per round"
    return [Reason("rounds", max(1, int(budget // best.uplink)), why)]


def _check_target(config: Config, target: _Target) -> None:
    """Raise for what cannot be advised, before anything is measured."""
    method, name = config.build_preset().method, config.method_name
    has_candidates = isinstance(method, PFedMe) or bool(method.step_sizes)
    if not target.given and not has_candidates:
        raise ConfigError(
            f"{name} does not name its step sizes (Method.step_sizes), so there is nothing to "
            "choose from; --target-bytes and --target-time work without them"
        )
    if target.bytes is not None and target.seconds is not None:
        raise ConfigError("give one of --target-bytes and --target-time")
    if target.bytes is not None and not 0 < target.bytes < inf:
        raise ConfigError(f"--target-bytes {target.bytes}: must be a number greater than 0")
    if target.seconds is None:
        return
    if config.network is None:
        raise ConfigError("--target-time needs a [network]: how fast links and clients are")
    if not 0 < target.seconds < inf:
        raise ConfigError(f"--target-time {target.seconds}: must be a number greater than 0")
    if not method.local_steps:
        raise ConfigError(
            f"--target-time: {name} does not name the setting that counts its local steps "
            "(Method.local_steps)"
        )


def _without_preset(values: dict[str, Any]) -> dict[str, Any]:
    """FedPAQ and QSGD as what they are: FedAvg and a quantizer."""
    config = Config.checked(values)
    if config.method_name not in PRESETS:
        values["method"] = {"name": config.method_name} | values["method"]
        return values
    preset = config.build_preset()
    known = {k: v for k, v in vars(preset.method).items() if v is not None}
    known |= {name: known[name].name for name in ("optimizer", "schedule")}
    codec = {k: v for k, v in vars(preset.pipeline.codec).items() if v is not None}
    downlink = values.get("codec", {}).get("downlink")
    return values | {
        "method": {"name": preset.method.name} | known,
        "codec": {"name": preset.pipeline.codec.name}
        | codec
        | ({"downlink": downlink} if downlink else {}),
        "cohort": preset.cohort,
    }


def _measured(c: Constants, federation: Federation) -> list[Reason]:
    sharpest = federation.names[int(np.argmax(c.client_L))]
    return [
        Reason(
            "L",
            _rounded(c.L.value),
            f"the largest curvature, client {sharpest}'s; steps above 2/L = {2 / c.L.value:.3g} "
            f"overshoot there; half of the clients allow {2 / np.median(c.client_L):.3g}",
        ),
        Reason(
            "gamma_G",
            _rounded(c.gamma_G.value),
            f"gradients differ this much between clients, and sigma_G = {c.sigma_G.value:.3g} "
            "between examples of one",
        ),
    ]


def _batch(config: Config, c: Constants) -> list[Reason]:
    """Enough examples that a batch's noise is at most the spread between clients."""
    given: BatchSize | None = config.method.settings().get("batch")
    if given is None:
        return []
    if isinstance(given, str):
        return [Reason("method.batch", given, "all data: no noise")]
    noise = (c.sigma_G.value / c.gamma_G.value) ** 2 if c.gamma_G.value > 0 else inf
    size = int(min(100, 10 * ceil(min(noise, 1e6) / 10)))
    if size <= given:
        why = f"enough: from (sigma_G/gamma_G)^2 = {noise:.2g} examples on, batches are less noisy "
        return [Reason("method.batch", given, why + "than clients are different")]
    why = f"(sigma_G/gamma_G)^2 = {noise:.2g} examples make batches as noisy as clients differ"
    return [Reason("method.batch", size, why)]


def _unchanged(config: Config, c: Constants) -> list[Reason]:
    """Settings that only a target of bytes or time changes."""
    preset = config.build_preset()
    r, n, steps = preset.cohort, c.clients, preset.method.local_steps
    variance = 0.0 if n == 1 else (n - r) / (r * (n - 1)) * c.gamma_G.value**2
    why = (
        f"unchanged: sampling {r} of {n} clients adds (n - r)/(r (n - 1)) gamma_G^2 = "
        f"{variance:.2g} to the gradient's variance"
    )
    no_target = "unchanged: without --target-bytes or --target-time there is no reason for"
    reasons = [Reason("cohort", r, why)]
    if steps:
        count = getattr(preset.method, steps)
        reasons.append(Reason(f"method.{steps}", count, f"{no_target} longer or shorter periods"))
    codec = preset.pipeline.codec.name
    return [*reasons, Reason("codec", codec, f"{no_target} shorter messages")]


class _Candidates(NamedTuple):
    """Settings that follow from the constants, and those that the pilot chooses from."""

    base: list[Reason]
    grid: list[dict[str, float]]


def candidates(config: Config, c: Constants) -> _Candidates:
    """Settings that follow from the constants, and those that the pilot chooses from."""
    # From well below what the sharpest client allows to what half of the clients allow.
    safe, usual = 1 / c.L.value, 1 / float(np.median(c.client_L))
    outer = [_rounded(rate) for rate in np.geomspace(0.1 * safe, 3 * usual, 5)]
    inner = [_rounded(rate) for rate in np.geomspace(0.1 * safe, usual, 4)]
    method = config.build_preset().method
    if isinstance(method, PFedMe):
        return _of_pfedme(c, usual)
    base = []
    if getattr(method, "schedule", Constant()) != Constant():
        why = "constant steps: the pilot compares those"
        base.append(Reason("method.schedule", "constant", why))
    return _Candidates(base, _grid(method, outer, inner))


def _grid(method: Method, outer: Sequence[float], inner: Sequence[float]) -> list[dict[str, float]]:
    """All step sizes of local updates alike, each with several sizes of the adaptation step."""
    if not method.step_sizes:
        return []
    local = [dict.fromkeys(method.step_sizes, size) for size in outer]
    if not method.adapt_step_size:
        return local
    adaptation = [{method.adapt_step_size: size} for size in inner]
    if isinstance(method, PerFedAvg):  # the adaptation is what it learns
        return [a | b for a, b in product(adaptation, local)]
    return [a | b for a, b in product(local, adaptation)]


def _of_pfedme(c: Constants, usual: float) -> _Candidates:
    """Lambda around L, and the step sizes that follow from it."""
    L, mu = c.L.value, c.mu.value
    softest = 0.3 / usual
    needed = inner_steps(softest, L, max(mu, 0.0), 1 / (softest + L))
    steps = int(min(needed, _MOST_INNER))
    kappa = bounds.inner_condition(softest, L, mu)
    why = (
        f"kappa = {kappa:.2g} for lambda = {softest:.2g}: after {needed} steps a tenth of the "
        "first error is left"
    )
    more = "" if steps == needed else f", of which at most {steps} are advised"
    grid = [
        {
            "lam": _rounded(a / usual),
            "eta": _rounded(b * usual / a),
            "beta": s,
            "inner_lr": _rounded(1 / (a / usual + L)),
        }
        for a, b, s in product((0.3, 1.0, 3.0), (0.03, 0.1, 0.3), (1.0, 2.0))
    ]
    return _Candidates([Reason("method.inner_steps", steps, why + more)], grid)


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
    """Write advised settings into a configuration."""
    for reason in reasons:
        *path, key = reason.setting.split(".")
        if reason.setting == "codec.name":
            # Another codec has other settings; the downlink's codec stays.
            old = values.get("codec", {})
            values["codec"] = {"downlink": old["downlink"]} if old.get("downlink") else {}
        place = values
        for name in path:
            place = place.setdefault(name, {})
        place[key] = reason.value
    return reasons


def _rounded(value: float) -> float:
    """Two significant digits."""
    if value == 0 or not np.isfinite(value):
        return float(value)
    return float(round(value, 1 - int(np.floor(log10(abs(value))))))
