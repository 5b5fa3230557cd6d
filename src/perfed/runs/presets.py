"""Published systems that are a method and a codec: FedPAQ, and QSGD as its special case."""

from collections.abc import Callable
from typing import Any, NamedTuple, final

from perfed.core.errors import FieldError, require, require_count
from perfed.core.objective import BatchSize
from perfed.methods import FedAvg, Method
from perfed.methods.schedules import Constant, Harmonic
from perfed.pipeline import Pipeline
from perfed.pipeline.codecs import LowPrecision
from perfed.pipeline.codecs.low_precision import MOST_LEVELS


@final
class Preset(NamedTuple):
    """A method, how its deltas travel, and how many clients take part (0: not given)."""

    method: Method
    pipeline: Pipeline
    cohort: int


def fedpaq(
    rounds: int,
    tau: int = 5,
    r: int | None = None,
    s: int = 1,
    batch: BatchSize = 10,
    lr: float | None = None,
    mu: float | None = None,
    smoothness: float | None = None,
) -> Preset:
    """FedPAQ, Algorithm 1: tau local SGD steps, r of n nodes, quantized changes.

    The step size is one of three: a constant; Theorem 1's 4 / (mu (k tau + 1)) in round k, for
    mu-strongly convex losses; Theorem 2's 1 / (L sqrt(T)), T = rounds * tau, for L-smooth ones.

    Example:
        >>> import perfed
        >>> method, pipeline, cohort = perfed.fedpaq(rounds=100, tau=5, r=25, s=1, lr=0.1)
        >>> method.tau, pipeline.codec, cohort
        (5, LowPrecision(levels=1, norm='whole', code='shortest'), 25)

    Args:
        rounds: how many rounds there will be (K in the paper).
        tau: local steps per round.
        r: nodes per round; None: the run's `cohort`.
        s: levels of the quantizer.
        batch: examples per step.
        lr: a constant step size.
        mu: Theorem 1's, from the strong convexity.
        smoothness: Theorem 2's, from L.
    """
    given = {"lr": lr, "mu": mu, "smoothness": smoothness}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        joined = " and ".join(named) or None
        raise FieldError(
            "lr", joined, "give exactly one of lr, mu (Theorem 1), smoothness (Theorem 2)"
        )
    value = given[named[0]]
    assert value is not None
    require(0 < value < float("inf"), named[0], value, "must be a number greater than 0")
    require_count("s", s)
    require(s <= MOST_LEVELS, "s", s, f"must be at most {MOST_LEVELS}")
    if r is not None:
        require_count("r", r)
    require_count("rounds", rounds)
    require_count("tau", tau)
    rate = {"lr": value, "mu": 4 / value, "smoothness": 1 / (value * (rounds * tau) ** 0.5)}
    schedule = Harmonic() if named[0] == "mu" else Constant()
    method = FedAvg(lr=rate[named[0]], tau=tau, batch=batch, schedule=schedule)
    return Preset(method, Pipeline.of(LowPrecision(levels=s)), r or 0)


def qsgd(
    rounds: int,
    r: int | None = None,
    s: int = 1,
    batch: BatchSize = 10,
    lr: float | None = None,
    mu: float | None = None,
    smoothness: float | None = None,
) -> Preset:
    """QSGD: FedPAQ with a message after every step, tau = 1. The settings are those of `fedpaq`."""
    return fedpaq(rounds, 1, r, s, batch, lr, mu, smoothness)


PRESETS: dict[str, Callable[..., Preset]] = {"fedpaq": fedpaq, "qsgd": qsgd}

# What a preset takes from the run; the rest of its settings are the user's.
FROM_RUN = ("rounds",)


def preset_of(name: str, rounds: int, settings: dict[str, Any]) -> Preset:
    """A preset by name, from its section's settings."""
    own = {key: value for key, value in settings.items() if key != "name"}
    return PRESETS[name](rounds=rounds, **own)
