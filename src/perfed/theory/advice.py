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
from perfed.theory.conditions import inner_steps
from perfed.theory.constants import Constants, Effort, measure
from perfed.theory.pilot import VALIDATION, Log, PilotTrial, pilot_engine, run_pilot
from perfed.theory.targets import Reason, sent_examples, within_bytes, within_seconds

# The constants that matter here are L, mu and the spreads of gradients.
_EFFORT = Effort(steps=20, examples=64, hessian_examples=1, hessian_clients=2, hessian_steps=4,
                 tensor_starts=1, tensor_steps=2)  # fmt: skip

# Inner steps of pFedMe cost as much as all else of a round.
_MOST_INNER = 20


@final
@dataclass(frozen=True)
class Advice:
    """What is advised.

    Attributes:
        values: a whole configuration, as a file would log it.
        reasons: what is advised, line by line; also what was measured for it.
        trials: the pilot, best first.
        constants: what was measured.
    """

    values: dict[str, Any]
    reasons: list[Reason]
    trials: list[PilotTrial]
    constants: Constants

    @property
    def given(self) -> PilotTrial:
        """How the settings as they were given did."""
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
        values: the configuration, as a file says it.
        target_bytes: what all uplink messages of the run may take.
        target_seconds: what the run may take over its `[network]`.
        log: told what is being done.
        federation: the data, if they are at hand.
    """
    given = _without_preset(deepcopy(values))
    config = Config.checked(given)
    _check_targets(config, target_bytes, target_seconds)
    federation = federation or config.build_federation()
    # What a run with `validation` is scored on takes no part in choosing for it, either.
    part = config.scored(federation).validation(VALIDATION)
    engine = pilot_engine(given, part)
    if (target_bytes or target_seconds) and not any(engine.experiment.is_shared):
        raise ConfigError(f"{config.method_name} sends nothing, so there is no target to keep")
    constants = measure(engine, effort=_EFFORT, log=log)
    if not 0 < constants.L.value < inf:
        raise ConfigError(
            f"the first model's curvature is {constants.L.value:g}, which says nothing of "
            'step sizes; are inputs far too large? (data.standardize = "feature" makes them alike)'
        )
    settled_first, tried = candidates(config, constants)
    settled, reasons = deepcopy(given), _measured(constants, part)
    reasons += _put(settled, [_batch(config, constants), *settled_first])
    aimed = target_bytes is not None or target_seconds is not None
    if aimed:
        log("one local update, to see how long messages are")
        within = Config.checked(settled)
        engine = within.build(config.scored(federation))
        examples = sent_examples(engine)
        reasons += _put(
            settled,
            within_bytes(within, engine, examples, target_bytes)
            if target_bytes is not None
            else within_seconds(within, engine, examples, target_seconds or inf),
        )
    else:
        reasons += _unchanged(config, constants)

    # Within a target, settings as given are those that keep to it.
    trials = run_pilot(settled if aimed else given, settled, tried, part, log)
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


def _chosen(config: Config, c: Constants, trials: Sequence[PilotTrial]) -> list[Reason]:
    """What the pilot decides."""
    best, name = trials[0], config.method_name
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
    given: BatchSize = config.method.settings().get("batch", "full")
    if isinstance(given, str):
        return Reason("method.batch", given, "all data: no noise")
    noise = (c.sigma_G.value / c.gamma_G.value) ** 2 if c.gamma_G.value > 0 else inf
    wanted = int(min(100, 10 * ceil(min(noise, 1e6) / 10)))
    if wanted <= given:
        why = f"enough: from (sigma_G/gamma_G)^2 = {noise:.2g} examples on, batches are less noisy "
        return Reason("method.batch", given, why + "than clients are different")
    why = f"(sigma_G/gamma_G)^2 = {noise:.2g} examples make batches as noisy as clients differ"
    return Reason("method.batch", wanted, why)


def _unchanged(config: Config, c: Constants) -> list[Reason]:
    """What only a target of bytes or time would change."""
    preset = config.build_preset()
    r, n, steps = preset.cohort, c.clients, preset.method.local_steps
    lost = 0.0 if n == 1 else (n - r) / (r * (n - 1)) * c.gamma_G.value**2
    why = (
        f"kept: sampling {r} of {n} clients adds (n - r)/(r (n - 1)) gamma_G^2 = {lost:.2g} to the "
        "gradient's variance"
    )
    no_target = "kept: without --target-bytes or --target-time nothing speaks for"
    reasons = [Reason("cohort", r, why)]
    if steps:
        count = getattr(preset.method, steps)
        reasons.append(Reason(f"method.{steps}", count, f"{no_target} longer or shorter periods"))
    codec = preset.pipeline.codec.name
    return [*reasons, Reason("codec", codec, f"{no_target} shorter messages")]


class _Candidates(NamedTuple):
    """What the constants settle, and settings for the pilot to choose from."""

    settled: list[Reason]
    tried: list[dict[str, float]]


def candidates(config: Config, c: Constants) -> _Candidates:
    """What the constants settle, and settings for the pilot to choose from."""
    # From well below what the sharpest client allows to what half of the clients do.
    safe, usual = 1 / c.L.value, 1 / float(np.median(c.client_L))
    outer = [_rounded(rate) for rate in np.geomspace(0.1 * safe, 3 * usual, 5)]
    inner = [_rounded(rate) for rate in np.geomspace(0.1 * safe, usual, 4)]
    method = config.build_preset().method
    if isinstance(method, PFedMe):
        return _of_pfedme(c, usual)
    settled = []
    if getattr(method, "schedule", Constant()) != Constant():
        why = "constant steps: the pilot compares those"
        settled.append(Reason("method.schedule", "constant", why))
    return _Candidates(settled, _grid(method, outer, inner))


def _grid(method: Method, outer: Sequence[float], inner: Sequence[float]) -> list[dict[str, float]]:
    """All step sizes of local updates alike, each with several sizes of the adaptation step."""
    if not method.step_sizes:
        return []
    local = [dict.fromkeys(method.step_sizes, size) for size in outer]
    if not method.adapt_step_size:
        return local
    adaptation = [{method.adapt_step_size: size} for size in inner]
    if isinstance(method, PerFedAvg):  # for the adaptation is what is learned
        return [a | b for a, b in product(adaptation, local)]
    return [a | b for a, b in product(local, adaptation)]


def _of_pfedme(c: Constants, usual: float) -> _Candidates:
    """Lambda around L, and what follows from it."""
    L, mu = c.L.value, c.mu.value
    softest = 0.3 / usual
    wanted = inner_steps(softest, L, max(mu, 0.0), 1 / (softest + L))
    steps = int(min(wanted, _MOST_INNER))
    kappa = bounds.inner_condition(softest, L, mu)
    why = (
        f"kappa = {kappa:.2g} for lambda = {softest:.2g}: a tenth of the first error is left "
        f"after {wanted} steps"
    )
    more = "" if steps == wanted else f", of which no more than {steps} are advised"
    tried = [
        {
            "lam": _rounded(a / usual),
            "eta": _rounded(b * usual / a),
            "beta": s,
            "inner_lr": _rounded(1 / (a / usual + L)),
        }
        for a, b, s in product((0.3, 1.0, 3.0), (0.03, 0.1, 0.3), (1.0, 2.0))
    ]
    return _Candidates([Reason("method.inner_steps", steps, why + more)], tried)


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
